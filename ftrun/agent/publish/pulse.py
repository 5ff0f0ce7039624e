"""Writes the progress of this node's ranks to the journal, every 10 s and at the end.

Runs in:  agent, main thread, once per turn of the loop.
Takes in: heartbeat pages and the command page.
Gives:    `Pulse` lines, from which the report draws the progress of a run without incidents.
"""

from collections.abc import Mapping, Sequence

from ftrun.agent.launch.worker_group import WorkerGroup
from ftrun.journal import Journal
from ftrun.monitor.page_values import quantile_s
from ftrun.wire.shared_memory.pages import CommandField, HeartbeatField, SharedPage

EVERY_S = 10.0


class ProgressLog:
    """Writes the progress of one node every 10 s."""

    def __init__(self, journal: Journal, workers: WorkerGroup) -> None:
        self._journal = journal
        self._workers = workers
        self._due_s: float | None = None

    def look(self, lateness_s: Mapping[int, float], *, now_s: float) -> None:
        if self._due_s is None:
            self._due_s = now_s + EVERY_S
        elif now_s >= self._due_s:
            self._due_s = now_s + EVERY_S
            self.write(lateness_s)

    def write(self, lateness_s: Mapping[int, float]) -> None:
        """Write a line now, unless this node runs no ranks."""
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
    """Number of steps in each step-time bucket, summed over the ranks."""
    return [sum(counts) for counts in zip(*(page.step_times for page in pages), strict=True)]


def most(pages: Sequence[SharedPage], at: HeartbeatField) -> int:
    """Maximum over the ranks, because all ranks take and skip the same snapshots."""
    return max((page.get(at) for page in pages), default=0)


def blocked_s(pages: Sequence[SharedPage]) -> float:
    """Seconds for which snapshots have blocked the slowest rank of this generation."""
    return most(pages, HeartbeatField.BLOCKED_NS) / 1e9


def loss_in(pages: Sequence[SharedPage]) -> float | None:
    return next((page.loss for page in pages if page.get(HeartbeatField.LOSS)), None)


def committed_in(commands: SharedPage | None) -> tuple[int, int] | None:
    """Generation and step of the newest commit on the command page; None: no commit."""
    if commands is None or commands.get(CommandField.COMMITTED_GENERATION) < -1:
        return None
    step = commands.get(CommandField.COMMITTED_STEP)
    return (commands.get(CommandField.COMMITTED_GENERATION), step) if step >= 0 else None


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
