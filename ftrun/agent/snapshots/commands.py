"""The leader's snapshot commands for this node, repeated until the command page shows them.

Runs in:  agent, main thread.
Takes in: commits and abandoned steps, as they arrive; the command page; the time.
Gives:    those that must be sent to the SMP again.

The leader sends a command once. An SMP that ends, or whose socket is full, loses it. Without the
repetition this node would wait forever for a commit that the other nodes have received.
"""

from ftrun.ids import Version, version
from ftrun.recovery.commands import AbandonStep, CommitSnapshot
from ftrun.wire.shared_memory.pages import CommandField, SharedPage

REPEAT_S = 1.0


class UnconfirmedCommands:
    """The newest commands of one generation that the command page does not show yet."""

    def __init__(self) -> None:
        self._generation = -1
        self._committed: Version | None = None
        self._abandoned_step = -1
        self._due_s = 0.0

    def add(self, command: CommitSnapshot | AbandonStep, generation: int, *, now_s: float) -> None:
        if generation != self._generation:
            self._generation, self._committed, self._abandoned_step = generation, None, -1
        if isinstance(command, CommitSnapshot):
            self._committed = command.version
        else:
            self._abandoned_step = command.step
        self._due_s = now_s + REPEAT_S

    def due(
        self, page: SharedPage, generation: int, *, now_s: float
    ) -> list[CommitSnapshot | AbandonStep]:
        """Commands that the SMP of this generation has not executed, at most every `REPEAT_S`."""
        if now_s < self._due_s or generation != self._generation:
            return []
        self._due_s = now_s + REPEAT_S
        found: list[CommitSnapshot | AbandonStep] = []
        shown = version(
            page.get(CommandField.COMMITTED_GENERATION), page.get(CommandField.COMMITTED_STEP)
        )
        is_current = page.get(CommandField.COMMITTED_IN) >= generation
        if self._committed is not None and not (is_current and shown >= self._committed):
            found.append(CommitSnapshot(self._committed))
        if page.get(CommandField.ABANDONED_STEP) < self._abandoned_step:
            found.append(AbandonStep(self._abandoned_step))
        return found
