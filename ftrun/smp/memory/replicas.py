"""Compares the replicas of a node's ranks, and decides which ranks share them.

Runs in:  the SMP: in the server's thread; jobs read the digests.
Takes in: the shards of each version; requests of workers; with a protection group, what its nodes
          agree on.
Gives:    SmpNotice "replicas_differ"; the groups of ranks that share, and the number of the
          decision on the command page (`ftrun.snapshot.replica_shares`).
Survives: the page keeps the number, so workers continue to share when another SMP takes over. A new
          SMP determines again which bytes are replicas.

Whole shards are compared by all of their digests: in a run without groups at most every
`_COMPARE_EVERY_S` seconds once the decision is made, with a group by the group's plan for each
version. Shards with shares are compared at their seals (commits.py).

Rule 1: the number is written just before a commit is shown. No rank takes its next snapshot before
        it knows this commit, so all ranks change at one version.
Rule 2: with a group, all nodes change at one version, and only if their shares have equal bounds.
        If nodes differed in this, no bytes of one would be replicas of another, and all of them
        would be erasure-coded.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import xxhash

from ftrun import clock
from ftrun.errors import LayoutUnknown, SnapshotCorrupt
from ftrun.ids import Rank, Version
from ftrun.smp.jobs import Finish, JobLanes
from ftrun.smp.memory.sealed_shards import ArenaMappings, SealedShards
from ftrun.snapshot.manifest import NodeManifest
from ftrun.snapshot.plan_agreement import NodeReplicas
from ftrun.snapshot.replica_shares import (
    Group,
    ReplicaContent,
    ShareAgreement,
    are_local,
    members_of,
    replica_content,
    whole_key,
)
from ftrun.wire.messages import envelope as messages
from ftrun.wire.messages import smp as smp_messages
from ftrun.wire.messages import worker as worker_messages
from ftrun.wire.shared_memory.pages import CommandField, SharedPage

Descriptors = Callable[[], Mapping[Rank, Sequence[int]]]
Groups = dict[Group, int]
"""The members that share, and the key of the tensors that they share."""

_COMPARE_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class NodeContents:
    """Replicas of one version here; `whole` is None for a rank with nothing to share."""

    whole: dict[Rank, ReplicaContent | None]
    shared: Groups


class ReplicaMonitor:
    """The replicas of one node; a notice names ranks whose bytes differ from most others."""

    def __init__(
        self, jobs: JobLanes, maps: ArenaMappings, send_to_agent: Callable[..., None]
    ) -> None:
        self._jobs = jobs
        self._maps = maps
        self._send_to_agent = send_to_agent
        self._page: SharedPage | None = None
        self._ranks: Sequence[Rank] = ()
        self._is_alone = True
        self._generation = -1
        self._due_s = 0.0
        self._is_busy = False
        self._restart()

    def _restart(self) -> None:
        self._replicas = NodeReplicas()
        self._agreement = ShareAgreement()
        self._groups: Groups = {}
        self._proposed: Groups = {}
        self._has_shares = False
        """The last version that was read has shares."""
        self._number = 0

    def begin(
        self, page: SharedPage, generation: int, ranks: Sequence[Rank], *, is_alone: bool
    ) -> None:
        """Begin a generation; `is_alone`: there is no group, and this node decides by itself."""
        self._page, self._ranks, self._is_alone = page, ranks, is_alone
        if generation != self._generation:
            self._generation = generation
            self._restart()
        self._number = max(self._number, page.get(CommandField.REPLICA_SHARES))

    # --- decisions -----------------------------------------------------------------------------

    def grant(self, body: worker_messages.RequestShares) -> messages.AnyMessage:
        """Answer with the members of a rank's group."""
        rank, members = Rank(body.rank), tuple(map(Rank, body.members))
        if not self._may_share:
            return messages.Refused("replicas are not shared in this generation")
        if members:
            if rank not in members or not are_local(members, self._ranks):
                return messages.Refused(f"not all of the ranks {body.members} are on this node")
            if self._groups.get(members) != body.key and self._is_alone:
                self._decide({**self._groups, members: body.key})
        for group, key in self._groups.items():
            if rank in group and key == body.key:
                return worker_messages.SharesGranted(list(group))
        return messages.Refused(f"the tensors of rank {rank} are not those that were compared")

    @staticmethod
    def contents_of(shards: SealedShards) -> NodeContents:
        """Read the replicas of a version; raises LayoutUnknown if a header is not valid."""
        whole: dict[Rank, ReplicaContent | None] = {}
        shared: Groups = {}
        for rank, shard in shards.shards.items():
            members = members_of(shard.layout.metadata)
            if members:
                shared[members] = whole_key(shard.layout.entries)
            else:
                whole[rank] = replica_content(shard.layout, shard.table)
        return NodeContents(whole, shared)

    def statement(self, contents: NodeContents) -> int:
        """Return what the ranks of this node may share; 0: nothing.

        Equal numbers of several nodes mean that their shares have equal bounds. It is called once
        for each version, in order.
        """
        found: Groups = {}
        self._has_shares = bool(contents.shared)
        if not contents.shared:
            by_rank = contents.whole
            for group in self._agreement.poll(by_rank):
                content = by_rank[group[0]]
                found[group] = 0 if content is None else content.key
        elif contents.whole:
            found = self._groups  # some ranks have not changed yet
        elif all(are_local(group, self._ranks) for group in contents.shared):
            found = contents.shared
        self._proposed = found if self._may_share else {}
        shape = sorted((len(group), key) for group, key in self._proposed.items())
        return xxhash.xxh3_64_intdigest(repr(shape).encode()) if shape else 0

    def decide(self, *, is_agreed: bool) -> None:
        """Begin or end to share, just before a commit; `is_agreed`: by all nodes, or alone."""
        if not self._may_share:
            return
        proposed, self._proposed = self._proposed, {}
        if is_agreed:
            if proposed and proposed != self._groups:
                self._decide(proposed)
        elif self._groups:
            self._groups = {}
            assert self._page is not None
            self._page.set(CommandField.REPLICA_SHARES, 0)

    @property
    def _may_share(self) -> bool:
        return self._page is not None and self._page.get(CommandField.REPLICA_SHARES) >= 0

    def _decide(self, groups: Groups) -> None:
        assert self._page is not None
        self._groups = dict(groups)
        self._number += 1
        self._page.set(CommandField.REPLICA_SHARES, self._number)

    # --- comparison on one node ----------------------------------------------------------------

    def poll(self, committed: Version, fds: Descriptors) -> None:
        """Compare the digests of this version, unless another one was compared just before."""
        if committed.generation != self._generation:
            return
        is_settled = self._agreement.is_settled or self._has_shares
        if self._is_busy or (is_settled and clock.now_s() < self._due_s):
            return
        self._due_s = clock.now_s() + _COMPARE_EVERY_S
        shards = self._maps.hold(fds(), committed)
        if len(shards.ranks) < 2:
            return
        self._is_busy = True
        self._jobs.submit("replicas", partial(self._read, shards, fds), failed=self._found_nothing)

    def _read(self, shards: SealedShards, fds: Descriptors) -> Finish:
        try:
            manifest = shards.manifest(shards.ranks)
            contents = self.contents_of(shards)
        except (LayoutUnknown, SnapshotCorrupt):
            return self._found_nothing
        return partial(self._compare, shards, manifest, contents, fds)

    def _compare(
        self, shards: SealedShards, manifest: NodeManifest, contents: NodeContents, fds: Descriptors
    ) -> None:
        self._is_busy = False
        wanted = shards.version
        # Ranks may overwrite a slot while it is read, as soon as a newer version is committed. The
        # digests count only if the slot still holds the version after the read.
        is_there = self._maps.hold(fds(), wanted).ranks == shards.ranks
        if wanted.generation != self._generation or not is_there:
            return
        if not contents.shared and (ranks := self._replicas.poll(manifest)):
            self._send_to_agent(differing_notice(wanted, ranks))
        if self._is_alone:
            self.statement(contents)

    def _found_nothing(self) -> None:
        self._is_busy = False


def differing_notice(found: Version, ranks: set[Rank] | set[int]) -> smp_messages.SmpNotice:
    words = ", ".join(map(str, sorted(ranks)))
    reason = f"{found}: replicas on several ranks are no longer equal; different on {words}"
    return smp_messages.SmpNotice("replicas_differ", reason, [], sorted(ranks))
