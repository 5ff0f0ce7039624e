"""How this node's ranks were doing, in the journal, every ten seconds and at the end.

Runs in:  agent, main thread, once per turn of the loop.
Takes in: heartbeat pages and the command page.
Gives:    `ProgressLog` lines, from which the report draws a run that had no incident.
"""

from collections.abc import Mapping, Sequence

from ftrun.agent.launch.worker_group import WorkerGroup
from ftrun.journal import Journal
from ftrun.monitor.page_values import quantile_s
from ftrun.wire.shared_memory.pages import CommandField, HeartbeatField, SharedPage

EVERY_S = 10.0


class ProgressLog:
    """Writes down one node's progress now and then."""

    def __init__(self, journal: Journal, workers: WorkerGroup) -> None:
        self._journal = journal
        self._workers = workers
        self._due_s: float | None = None

    def look(self, lateness_s: Mapping[int, float], *, now_s: float) -> None:
        """Write a line where one is due."""
        if self._due_s is None:
            self._due_s = now_s + EVERY_S
        elif now_s >= self._due_s:
            self._due_s = now_s + EVERY_S
            self.write(lateness_s)

    def write(self, lateness_s: Mapping[int, float]) -> None:
        """Write a line now; none where this node runs no ranks."""
        places = self._workers.places
        if not places:
            return
        pages = [place.page for place in places]
        progress = self._workers.progress()
        counts = step_counts(pages)
        self._journal.write(
            "Pulse",
            step=progress.step,
            steps_here=progress.steps_here,
            p50_s=quantile_s(counts, 0.5),
            p99_s=quantile_s(counts, 0.99),
            blocked_s=round(blocked_s(pages), 6),
            taken=most(pages, HeartbeatField.SEALED_COUNT),
            skipped=most(pages, HeartbeatField.SKIPPED_COUNT),
            discarded=most(pages, HeartbeatField.DISCARDED_COUNT),
            committed=committed_in(self._workers.commands),
            loss=loss_in(pages),
            ranks=[
                [
                    int(place.rank),
                    place.page.get(HeartbeatField.STEP),
                    _rounded(lateness_s.get(place.rank)),
                ]
                for place in places
            ],
        )


def step_counts(pages: Sequence[SharedPage]) -> list[int]:
    """How often a step took how long, over all these ranks."""
    return [sum(counts) for counts in zip(*(page.step_times for page in pages), strict=True)]


def most(pages: Sequence[SharedPage], at: HeartbeatField) -> int:
    """The largest of all ranks; they take and skip snapshots together."""
    return max((page.get(at) for page in pages), default=0)


def blocked_s(pages: Sequence[SharedPage]) -> float:
    """So long the ranks of this generation have stood still for snapshots."""
    return most(pages, HeartbeatField.BLOCKED_NS) / 1e9


def loss_in(pages: Sequence[SharedPage]) -> float | None:
    """As the script has reported it; of the first rank that has."""
    return next((page.loss for page in pages if page.get(HeartbeatField.LOSS)), None)


def committed_in(commands: SharedPage | None) -> tuple[int, int] | None:
    """The newest committed version that the ranks of this node were told of."""
    if commands is None or commands.get(CommandField.COMMITTED_GENERATION) < -1:
        return None
    step = commands.get(CommandField.COMMITTED_STEP)
    return (commands.get(CommandField.COMMITTED_GENERATION), step) if step >= 0 else None


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
