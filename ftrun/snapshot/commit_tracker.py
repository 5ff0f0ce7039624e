"""Which versions are sealed by whom, and which of them is committed.

Runs in:  the SMP, for the ranks of its node. Pure.
Takes in: seals, as the workers report them; what the slots hold, when a generation begins.
Gives:    a `Version` each time every rank has sealed one: that is a commit.
Survives: nothing by itself; a new SMP fills it again from the slots.

A worker overwrites only the slot that does not hold the newest committed version, so a rank
holds at most one version beyond the committed one: a newer seal of a rank replaces its older
one here as it did in memory.

Decides alone only where all ranks of the world are on this node and no group protects it. Else
the lead decides: `complete` says what all ranks here have sealed, `commit` takes the decision.
"""

from collections.abc import Collection, Iterable, Mapping

from ftrun.ids import Generation, Rank, Version


class CommitTracker:
    """The newest version that every rank has sealed, generation by generation."""

    def __init__(self, ranks: Iterable[Rank] = (), world_size: int = 0) -> None:
        self.generation = Generation(-1)
        self.committed: Version | None = None
        self._pending: dict[Rank, Version | None] = dict.fromkeys(ranks)
        self._world_size = world_size
        self._decides_alone = True

    @property
    def ranks(self) -> tuple[Rank, ...]:
        return tuple(self._pending)

    @property
    def world_size(self) -> int:
        return self._world_size

    @property
    def sees_all(self) -> bool:
        """Every rank of the world reports here."""
        return len(self._pending) == self._world_size > 0

    @property
    def complete(self) -> Version | None:
        """What every rank here has sealed beyond the committed version."""
        found = set(self._pending.values())
        return found.pop() if len(found) == 1 else None

    def pending(self, rank: Rank) -> Version | None:
        """The version beyond the committed one that this rank has sealed."""
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
        """Count for these ranks from now on; the version that is committed at the start.

        Args:
            generation: seals of any other one are dropped from now on.
            ranks: those that report here.
            world_size: how many there are in all.
            held: what the slots hold. In a new generation that is the restore point and what is
                older; for a new SMP in the middle of one it may be seals that nobody heard.
            decides_alone: what all ranks have sealed is committed by that.
        """
        self.generation = generation
        self._decides_alone = decides_alone
        self._pending = dict.fromkeys(ranks)
        self._world_size = world_size
        self.committed = newest_common(held, self._pending) if self._may_commit else None
        for rank in self._pending:
            newest = max(held.get(rank, ()), default=None)
            if newest is not None and self._counts(newest):
                self._pending[rank] = newest
        return self.committed

    def sealed(self, rank: Rank, version: Version) -> Version | None:
        """Take a seal; the version it commits, if it was the last one missing."""
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
        """It is committed, whoever has decided so."""
        self.committed = version
        self.abandon(version)

    def abandon(self, newest: Version) -> None:
        """Seals up to this version do not count any more."""
        for rank, has in self._pending.items():
            if has is not None and has <= newest:
                self._pending[rank] = None

    def withdraw(self, rank: Rank, version: Version) -> bool:
        """Forget a rank's seal; False where it is too late, because it is committed."""
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
    """The newest version that each of these ranks holds."""
    sets = [set(held.get(rank, ())) for rank in ranks]
    return max(set.intersection(*sets), default=None) if sets else None
