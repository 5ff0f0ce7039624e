"""Compares the replicas of a node's ranks periodically, in a run without protection groups.

Runs in:  the SMP; it begins and ends in the server's thread, and a job reads the digests.
Takes in: committed versions, their digest tables.
Gives:    a notice "replicas_differ" with the ranks whose bytes differ from those of the majority.
Survives: nothing by itself; a new SMP determines again which bytes are replicas.

Rule 1: ranks may overwrite a slot while it is read, as soon as a newer version is committed. The
        digests count only if the slot still holds the version after the read.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ftrun import clock
from ftrun.errors import LayoutUnknown, SnapshotCorrupt
from ftrun.ids import Rank, Version
from ftrun.smp.jobs import Finish, JobLanes
from ftrun.smp.memory.sealed_shards import ArenaMappings, SealedShards
from ftrun.snapshot.manifest import NodeManifest
from ftrun.snapshot.plan_agreement import NodeReplicas
from ftrun.wire.messages import smp as smp_messages

_EVERY_S = 2.0

Descriptors = Callable[[], Mapping[Rank, Sequence[int]]]


class ReplicaMonitor:
    """Compares the replicas of one node, one generation after the other."""

    def __init__(
        self, jobs: JobLanes, maps: ArenaMappings, tell_agent: Callable[..., None]
    ) -> None:
        self._jobs = jobs
        self._maps = maps
        self._tell_agent = tell_agent
        self._generation = -1
        self._replicas = NodeReplicas()
        self._due_s = 0.0
        self._is_busy = False

    def look(self, committed: Version, fds: Descriptors) -> None:
        """Compare the digests of the ranks for this version, at most every `_EVERY_S` seconds.

        Args:
            committed: a version of the running generation.
            fds: returns the current descriptors of each rank's arenas.
        """
        if committed.generation != self._generation:
            self._generation, self._replicas = committed.generation, NodeReplicas()
        if self._is_busy or clock.now_s() < self._due_s:
            return
        self._due_s = clock.now_s() + _EVERY_S
        shards = self._maps.hold(fds(), committed)
        if len(shards.ranks) < 2:
            return
        self._is_busy = True
        self._jobs.submit("replicas", partial(self._read, shards, fds), failed=self._found_nothing)

    def _read(self, shards: SealedShards, fds: Descriptors) -> Finish:
        try:
            manifest = shards.manifest(shards.ranks)
        except (LayoutUnknown, SnapshotCorrupt):
            return self._found_nothing
        return partial(self._compare, shards, manifest, fds)

    def _compare(self, shards: SealedShards, manifest: NodeManifest, fds: Descriptors) -> None:
        self._is_busy = False
        wanted = shards.version
        is_there = self._maps.hold(fds(), wanted).ranks == shards.ranks  # rule 1
        if wanted.generation != self._generation or not is_there:
            return
        ranks = sorted(self._replicas.look(manifest))
        if ranks:
            words = ", ".join(map(str, ranks))
            why = f"{wanted}: what was equal on several ranks is not any more; different on {words}"
            self._tell_agent(smp_messages.SmpNotice("replicas_differ", why, [], ranks))

    def _found_nothing(self) -> None:
        self._is_busy = False
