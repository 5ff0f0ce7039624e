"""How the nodes of a group come to one plan, and find out when it does not hold any more.

Runs in:  the SMP, one for as long as a group is what it is. Pure: all nodes of the group are told
          the same, so all conclude the same.
Takes in: what each node says of a version: which plan it goes by, what its replicas look like, and
          where that does not fit, its manifest.
Gives:    a `PlanDecision`: a plan, or whether manifests are needed for one.

A plan is made once, from the manifests of one version, and goes on for later ones as long as
layouts stay as they are and replicas are replicas. Then a version costs each node one digest for
each set of replicas.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ftrun.snapshot.manifest import NodeManifest, RankManifest
from ftrun.snapshot.redundancy import (
    Groups,
    RedundancyPlan,
    changed_keys,
    differing,
    make_plan,
    replica_digests,
)

Told = tuple[int, Sequence[Sequence[tuple[int, int]]]]
"""Plan and replicas, as a node says of a version."""


@dataclass(frozen=True, slots=True)
class PlanDecision:
    """What follows from what the nodes have said.

    Args:
        plan: all of them go by it; None: not yet.
        needs_manifests: every node has to send its own.
        differ: whose replicas are not what they were, as (place, rank), for the journal.
    """

    plan: RedundancyPlan | None
    needs_manifests: bool = False
    differ: frozenset[tuple[int, int]] = frozenset()


class GroupPlan:
    """The plan of a group.

    Args:
        place: of this node.
        num_nodes: of the group; more than `parity`.
        parity: m.
        small_state_bytes: see `make_plan`.
    """

    def __init__(self, *, place: int, num_nodes: int, parity: int, small_state_bytes: int) -> None:
        self.plan: RedundancyPlan | None = None
        self._place = place
        self._num_nodes = num_nodes
        self._parity = parity
        self._small_state_bytes = small_state_bytes
        self._groups: Groups = ()
        self._shapes: list[tuple[object, ...]] = []
        self._distrusted: set[int] = set()

    def say(self, own: NodeManifest) -> Told:
        """What this node says of a version: 0 where no plan fits its layouts."""
        if self.plan is None or _shape(own) != self._shapes[self._place]:
            return 0, []
        return self.plan.id, replica_digests(self._groups, self._place, own)

    def settle(
        self, told: Mapping[int, Told], manifests: Mapping[int, NodeManifest]
    ) -> PlanDecision:
        """Conclude, once every node has spoken.

        Args:
            told: by place.
            manifests: by place, those that have come.
        """
        if len(told) < self._num_nodes:
            return PlanDecision(None)
        ids = {plan_id for plan_id, _ in told.values()}
        is_known = self.plan is not None and ids == {self.plan.id}
        differ: set[tuple[int, int]] = set()
        if is_known:
            differ = differing(self._groups, [told[at][1] for at in range(self._num_nodes)])
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
        )
        self._shapes = [_shape(one) for one in ordered]
        return PlanDecision(self.plan, needs_manifests=True, differ=frozenset(differ))


def _shape(manifest: NodeManifest) -> tuple[object, ...]:
    """All of a manifest that is not content."""
    return tuple(_rank_shape(rank) for rank in manifest.ranks)


def _rank_shape(rank: RankManifest) -> tuple[object, ...]:
    # The header names every entry, so its digest stands for the sections too.
    return rank.rank, rank.world_size, rank.image_bytes, rank.num_pieces, rank.header_digest
