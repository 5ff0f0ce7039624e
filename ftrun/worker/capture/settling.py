"""Whether what this rank has sealed is settled, so that a slot is free for the next snapshot.

Runs in:  worker; any of its threads.
Takes in: the command page; this rank's seals and skips, as `capture` does them.
Gives:    free or not, under way or not, the newest committed version.
Survives: nothing by itself; a new rank begins with the version it was restored from.

Rule 1: a seal is settled when its version, or a newer one, is committed, or when its step is
        abandoned: some rank has none of it, so that it never will be committed.
Rule 2: where a lead decides, all ranks take the same step next, the first that falls due from
        TAKE_FROM on. One that has none of a step that others may have taken, because it was late
        to hear that it is free or has withdrawn it, takes nothing before the lead has named a
        later one (`ftrun/recovery/alignment.py`). Without it, nodes that once took different
        steps could go on for good each taking what the other skips, and nothing would be
        committed any more.
Rule 3: the slot with the newest committed version is never overwritten. Ranks of another world size
        start from a version that is not in their arenas and may not be committed; the arenas may
        hold the committed one.
"""

from collections.abc import Callable

from ftrun.ids import Version, version
from ftrun.wire.shared_memory.arena import NUM_SLOTS
from ftrun.wire.shared_memory.pages import CommandField, SharedPage


class CommitWait:
    """What this rank still waits for.

    Args:
        commands: the command page.
        generation: of this rank.
        restored: the version it was restored from, or None.
    """

    def __init__(self, commands: SharedPage, generation: int, restored: Version | None) -> None:
        self._commands = commands
        self._generation = generation
        self._restored = restored
        self._sealed = restored
        self._skipped = -1

    @property
    def newest_sealed(self) -> Version | None:
        return self._sealed

    def sealed(self, step: int) -> None:
        """This rank has sealed a step of this generation."""
        self._sealed = version(self._generation, step)

    def skipped(self, step: int) -> None:
        """A snapshot fell due at this step, and this rank has none, or takes its own back."""
        self._skipped = max(self._skipped, step)

    @property
    def is_free(self) -> bool:
        """Nothing that this rank holds has still to be committed, and it may take the next."""
        return not self._awaits_recommit and self._is_over() and not self._awaits_others

    @property
    def is_under_way(self) -> bool:
        """All ranks of the node hold it, and other nodes are about to: it must not be waited for.

        That takes as long as the network does; the training goes on meanwhile.
        """
        protecting = self._commands.get(CommandField.PROTECTING_STEP)
        last = self._sealed if self._is_ours else None
        is_protected = last is not None and protecting >= last.step
        return self._awaits_recommit or self._awaits_others or is_protected

    @property
    def committed(self) -> Version | None:
        """The newest version that counts."""
        commands = self._commands
        found = version(
            commands.get(CommandField.COMMITTED_GENERATION),
            commands.get(CommandField.COMMITTED_STEP),
        )
        # A version that came from a checkpoint is of generation -1; no version is of step -1.
        known = [v for v in (found, self._restored) if v is not None and v.step >= 0]
        return max(known, default=None)

    def slot_to_fill(self, find: Callable[[Version], int | None]) -> int:
        """The slot of an arena that may be overwritten: rule 3.

        Args:
            find: gives the slot in which a version is sealed.
        """
        commands = self._commands
        before = version(
            commands.get(CommandField.KEPT_GENERATION), commands.get(CommandField.KEPT_STEP)
        )
        for kept in (self.committed, before):
            slot = find(kept) if kept is not None else None
            if slot is not None:
                return (slot + 1) % NUM_SLOTS
        return 0

    @property
    def _is_ours(self) -> bool:
        return self._sealed is not None and self._sealed.generation == self._generation

    @property
    def _awaits_recommit(self) -> bool:
        """The restored version is not committed in this generation yet: nothing new before it."""
        if self._restored is None:
            return False
        return self._commands.get(CommandField.COMMITTED_IN) < self._generation

    @property
    def _awaits_others(self) -> bool:
        """It has skipped what others may have taken: rule 2."""
        return 0 <= self._commands.get(CommandField.TAKE_FROM) <= self._skipped

    def _is_over(self) -> bool:
        """The newest seal of this rank is committed, or never will be: rule 1."""
        last = self._sealed
        if last is None or self._is_committed():
            return True
        return self._is_ours and self._commands.get(CommandField.ABANDONED_STEP) >= last.step

    def _is_committed(self) -> bool:
        committed = self.committed
        return self._sealed is not None and committed is not None and committed >= self._sealed
