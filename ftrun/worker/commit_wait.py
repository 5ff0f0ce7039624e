"""Whether the last seal of a rank is resolved, so that the rank may take the next snapshot.

Runs in:  worker, any of its threads; the simulation of several nodes, which has no torch.
Takes in: the command page; the seals and skips of this rank.
Gives:    whether a slot is free, and the slot for the next snapshot.
Survives: nothing; a new process of the rank starts with the version that it was restored from.

Rule 1: a seal is resolved when its version, or a newer one, is committed, or when its step is
        abandoned. An abandoned step is never committed, because some rank has no seal of it.
Rule 2: if the run has a leader, all ranks take their next snapshot at the same step: the first due
        step from TAKE_FROM on. A rank may lack the snapshot of a step that other ranks have taken,
        because its slot was not free in time, or because it has withdrawn that snapshot. Such a
        rank takes no snapshot until the leader has named a later step
        (ftrun/recovery/snapshot_coordination.py). Without this rule, nodes that once took different
        steps could always take the steps that the other nodes skip, and no version would be
        committed again.
Rule 3: the slot with the newest committed version is never overwritten. Ranks of another world size
        start from a version that is not in their arenas and may not be committed. Their arenas may
        still hold the committed version.
"""

from collections.abc import Callable

from ftrun.ids import Version, version
from ftrun.wire.shared_memory.arena import NUM_SLOTS
from ftrun.wire.shared_memory.pages import CommandField, SharedPage


class CommitWait:
    """Commit state of the seals of one rank."""

    def __init__(self, commands: SharedPage, generation: int, restored: Version | None) -> None:
        self._commands = commands
        self._generation = generation
        self._restored = restored
        self.newest_sealed = restored
        self._skipped = -1

    def sealed(self, step: int) -> None:
        self.newest_sealed = version(self._generation, step)

    def skipped(self, step: int) -> None:
        """Record that this rank has no snapshot of a due step, or withdraws its own."""
        self._skipped = max(self._skipped, step)

    @property
    def is_free(self) -> bool:
        """Whether this rank awaits no commit and may take the next snapshot."""
        if self._awaits_recommit or self._awaits_others:
            return False
        return self.newest_sealed is None or self.is_over(self.newest_sealed)

    @property
    def is_under_way(self) -> bool:
        """Whether protection across nodes, or other nodes' commits, are in progress.

        The training must not wait for this, because its duration depends on the network.
        """
        protecting, last = self._commands.get(CommandField.PROTECTING_STEP), self.newest_sealed
        is_protected = last is not None and self.is_ours(last) and protecting >= last.step
        return self._awaits_recommit or self._awaits_others or is_protected

    @property
    def committed(self) -> Version | None:
        """Newest version that is committed or was restored."""
        commands = self._commands
        found = version(
            commands.get(CommandField.COMMITTED_GENERATION),
            commands.get(CommandField.COMMITTED_STEP),
        )
        # A version from a checkpoint has generation -1. Step -1 means that there is no version.
        known = [v for v in (found, self._restored) if v is not None and v.step >= 0]
        return max(known, default=None)

    def slot_to_fill(self, find: Callable[[Version], int | None]) -> int:
        """Slot that may be overwritten: rule 3. `find` returns the slot with a sealed version."""
        commands = self._commands
        before = version(
            commands.get(CommandField.RETAINED_GENERATION), commands.get(CommandField.RETAINED_STEP)
        )
        for kept in (self.committed, before):
            slot = find(kept) if kept is not None else None
            if slot is not None:
                return (slot + 1) % NUM_SLOTS
        return 0

    def is_ours(self, sealed: Version) -> bool:
        return sealed.generation == self._generation

    def is_over(self, sealed: Version) -> bool:
        """Whether a seal of this rank is resolved: rule 1."""
        if self.is_committed(sealed):
            return True
        return self.is_ours(sealed) and (
            self._commands.get(CommandField.ABANDONED_STEP) >= sealed.step
        )

    def is_committed(self, sealed: Version) -> bool:
        committed = self.committed
        return committed is not None and committed >= sealed

    @property
    def _awaits_recommit(self) -> bool:
        """The restored version must be committed in this generation before any new version."""
        if self._restored is None:
            return False
        return self._commands.get(CommandField.COMMITTED_IN) < self._generation

    @property
    def _awaits_others(self) -> bool:
        """This rank has skipped a step that others may have taken: rule 2."""
        return 0 <= self._commands.get(CommandField.TAKE_FROM) <= self._skipped
