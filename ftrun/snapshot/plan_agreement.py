"""Agrees on one redundancy plan among the nodes of a group, and detects when it no longer fits.

Runs in:  the SMP, one instance for the life of a group. Pure: all nodes of the group get the same
          input, so all reach the same result.
Takes in: each node's statement about a version: its plan, the digests of its replicas, and its
          manifest if the plan does not fit.
Gives:    a `PlanDecision`: a plan, or that manifests are needed for one.

A plan is made once, from the manifests of one version. It is used for later versions while the
layouts stay the same and the replicas stay equal. A version then costs each node one digest for
each set of replicas. Without a group, `NodeReplicas` compares the ranks of one node.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ftrun.snapshot.manifest import NodeManifest
from ftrun.snapshot.redundancy import (
    Groups,
    RedundancyPlan,
    changed_keys,
    differing,
    make_plan,
    replica_digests,
)
from ftrun.snapshot.replica_shares import minority

ReplicaReport = tuple[int, Sequence[Sequence[tuple[int, int]]]]
"""A node's statement about a version: id of its plan, and the digests of its replicas."""


@dataclass(frozen=True, slots=True)
class PlanDecision:
    """The result of the statements of all nodes.

    Args:
        plan: the plan that all nodes use; None: no plan yet.
        differ: (position, rank) of replicas that have changed, for the journal.
    """

    plan: RedundancyPlan | None
    needs_manifests: bool = False
    differ: frozenset[tuple[int, int]] = frozenset()


class GroupPlan:
    """The plan of a group, as seen by the node at `position`; see `make_plan`."""

    def __init__(
        self,
        *,
        position: int,
        num_nodes: int,
        parity: int,
        small_state_bytes: int,
        is_ring: bool = False,
    ) -> None:
        self.plan: RedundancyPlan | None = None
        self._place = position
        self._num_nodes = num_nodes
        self._parity = parity
        self._small_state_bytes = small_state_bytes
        self._is_ring = is_ring
        self._groups: Groups = ()
        self._shapes: list[tuple[object, ...]] = []
        self._distrusted: set[int] = set()

    def report(self, own: NodeManifest) -> ReplicaReport:
        """This node's statement about a version; the plan id is 0 if no plan fits its layouts."""
        if self.plan is None or _shape(own) != self._shapes[self._place]:
            return 0, []
        return self.plan.id, replica_digests(self._groups, self._place, own)

    def resolve(
        self, reported: Mapping[int, ReplicaReport], manifests: Mapping[int, NodeManifest]
    ) -> PlanDecision:
        """Decides, once every node has made a statement; both arguments are by position."""
        if len(reported) < self._num_nodes:
            return PlanDecision(None)
        ids = {plan_id for plan_id, _ in reported.values()}
        is_known = self.plan is not None and ids == {self.plan.id}
        differ: set[tuple[int, int]] = set()
        if is_known:
            differ = differing(self._groups, [reported[at][1] for at in range(self._num_nodes)])
            if not differ:
                return PlanDecision(self.plan)
        if len(manifests) < self._num_nodes:
            return PlanDecision(None, needs_manifests=True)
        ordered = [manifests[at] for at in range(self._num_nodes)]
        if is_known:
            self._distrusted |= changed_keys(self._groups, ordered)
        self.plan, self._groups = make_plan(
            ordered,
            parity=self._parity,
            small_state_bytes=self._small_state_bytes,
            distrusted=self._distrusted,
            is_ring=self._is_ring,
        )
        self._shapes = [_shape(one) for one in ordered]
        return PlanDecision(self.plan, needs_manifests=True, differ=frozenset(differ))


def _shape(manifest: NodeManifest) -> tuple[object, ...]:
    # The header names every entry, so its digest covers the sections too.
    return tuple(
        (one.rank, one.world_size, one.image_bytes, one.num_pieces, one.header_digest)
        for one in manifest.ranks
    )


class NodeReplicas:
    """Checks that equal parts of the ranks of one node stay equal, from version to version.

    Only sections that were equal once are compared, because ranks that each train a different model
    begin unequal, or become unequal in their first step. A section that has differed is not
    compared again, so each difference is reported once.
    """

    def __init__(self) -> None:
        self._holders: dict[int, frozenset[int]] = {}
        """The ranks that held equal content, by section; sections that differed are removed."""
        self._shape: tuple[object, ...] = ()

    def poll(self, manifest: NodeManifest) -> set[int]:
        """Ranks whose content differs from the majority; all holders if there is no majority."""
        shape = tuple((one.rank, one.header_digest) for one in manifest.ranks)
        content: dict[int, dict[int, int]] = defaultdict(dict)
        for one in manifest.ranks:
            for index, section in enumerate(one.sections):
                if section.may_repeat:
                    content[section.key][one.rank] = one.digest_of(index)
        if shape != self._shape:
            self._shape = shape
            self._holders = {
                key: frozenset(digests)
                for key, digests in content.items()
                if len(digests) > 1 and len(set(digests.values())) == 1
            }
            return set()
        found: set[int] = set()
        for key, holders in list(self._holders.items()):
            digests = {rank: content[key][rank] for rank in holders}
            if len(set(digests.values())) > 1:
                found |= minority(digests)
                del self._holders[key]
        return found
