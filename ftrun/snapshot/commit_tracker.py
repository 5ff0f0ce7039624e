"""Tracks which ranks have sealed which version, and which version is committed.

Runs in:  the SMP, for the ranks of its node. Pure.
Takes in: seals, as the workers report them; the versions in the slots, when a generation begins.
Gives:    a `Version` each time every rank has sealed one: that is a commit.
Survives: nothing by itself; a new SMP fills it again from the slots.

A worker overwrites only the slot that does not hold the newest committed version. A rank therefore
holds at most one version beyond the committed one, and its newer seal replaces the older one here
as it did in memory.

The tracker commits alone only if all ranks of the world are on this node and no group protects it.
Otherwise the leader decides: `complete` reports what all ranks here have sealed, and `commit`
records the decision.
"""

from collections.abc import Collection, Iterable, Mapping

from ftrun.ids import Generation, Rank, Version


class CommitTracker:
    """The newest version that every rank has sealed in the current generation."""

    def __init__(self, ranks: Iterable[Rank] = (), world_size: int = 0) -> None:
        self.generation = Generation(-1)
        self.committed: Version | None = None
        self._pending: dict[Rank, Version | None] = dict.fromkeys(ranks)
        self.world_size = world_size
        self._decides_alone = True

    @property
    def ranks(self) -> tuple[Rank, ...]:
        return tuple(self._pending)

    @property
    def sees_all(self) -> bool:
        return len(self._pending) == self.world_size > 0

    @property
    def complete(self) -> Version | None:
        """The version beyond the committed one that every rank here has sealed."""
        found = set(self._pending.values())
        return found.pop() if len(found) == 1 else None

    def pending(self, rank: Rank) -> Version | None:
        return self._pending.get(rank)

    def begin_generation(
        self,
        generation: Generation,
        ranks: Iterable[Rank],
        world_size: int,
        held: Mapping[Rank, Collection[Version]],
        *,
        decides_alone: bool = True,
    ) -> Version | None:
        """Starts to count for these ranks; returns the version that is committed at the start.

        Args:
            generation: seals of any other generation are dropped from now on.
            held: versions in the slots. In a new generation these are the restore point and
                older ones. For a new SMP within a generation they may include seals that no process
                has processed.
            decides_alone: a version that all ranks have sealed is committed without the leader.
        """
        self.generation = generation
        self._decides_alone = decides_alone
        self._pending = dict.fromkeys(ranks)
        self.world_size = world_size
        self.committed = newest_common(held, self._pending) if self._may_commit else None
        for rank in self._pending:
            newest = max(held.get(rank, ()), default=None)
            if newest is not None and self._counts(newest):
                self._pending[rank] = newest
        return self.committed

    def sealed(self, rank: Rank, version: Version) -> Version | None:
        """Records a seal; returns the version that it commits, if it was the last one missing."""
        if rank not in self._pending or not self._counts(version):
            return None
        before = self._pending[rank]
        if before is None or version > before:
            self._pending[rank] = version
        if not self._may_commit or self.complete != version:
            return None
        self.commit(version)
        return version

    def commit(self, version: Version) -> None:
        self.committed = version
        self.abandon(version)

    def abandon(self, newest: Version) -> None:
        for rank, has in self._pending.items():
            if has is not None and has <= newest:
                self._pending[rank] = None

    def withdraw(self, rank: Rank, version: Version) -> bool:
        """False if the version is committed already."""
        if self.committed is not None and version <= self.committed:
            return False
        if self._pending.get(rank) == version:
            self._pending[rank] = None
        return True

    @property
    def _may_commit(self) -> bool:
        return self.sees_all and self._decides_alone

    def _counts(self, version: Version) -> bool:
        is_new = self.committed is None or version > self.committed
        return is_new and version.generation == self.generation


def newest_common(
    held: Mapping[Rank, Collection[Version]], ranks: Iterable[Rank]
) -> Version | None:
    sets = [set(held.get(rank, ())) for rank in ranks]
    return max(set.intersection(*sets), default=None) if sets else None
