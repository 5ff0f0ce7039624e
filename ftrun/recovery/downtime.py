"""The downtime of an incident, and how it splits.

Runs in:  the agent that leads. Pure.
Gives:    the one number that log, status, report, metrics and journal show.

The downtime begins with the fault and ends when every rank has completed its next step, whether
that step is new or repeated. The fault is the end of a process as the kernel reports it, or the
last sign of life of a process that then became unresponsive.
"""

from dataclasses import asdict, astuple, dataclass

from ftrun.wire.cluster.heartbeats import RestartTimes


@dataclass(frozen=True, slots=True)
class Downtime:
    """In seconds. The four parts add up to the total."""

    total_s: float
    detection_s: float
    """From the fault to the verdict."""
    restart_s: float
    """Stop the ranks, choose what to restore, start processes, connect, set up the script."""
    restore_s: float
    first_step_s: float

    def as_fields(self) -> dict[str, float]:
        return {name: round(value, 3) for name, value in asdict(self).items()}

    def plus(self, other: "Downtime") -> "Downtime":
        parts = zip(astuple(self), astuple(other), strict=True)
        return Downtime(*(one + another for one, another in parts))

    @property
    def text(self) -> str:
        return (
            f"training again {self.total_s:.2f} s after the fault (detection "
            f"{self.detection_s:.2f} s, restart {self.restart_s:.2f} s, restore "
            f"{self.restore_s:.2f} s, first step {self.first_step_s:.2f} s)"
        )


def downtime(*, fault_s: float, known_s: float, stepped_s: float, last: RestartTimes) -> Downtime:
    """Splits the time of one incident.

    Args:
        fault_s: when it began.
        known_s: when the verdict was reached.
        stepped_s: when the last rank completed its next step.
        last: the measurements of the node of that rank.
    """
    total_s = left_s = max(0.0, stepped_s - fault_s)
    parts = []
    for part_s in (known_s - fault_s, last.first_step_s, last.restore_s):
        parts.append(min(max(0.0, part_s), left_s))
        left_s -= parts[-1]
    detection_s, first_step_s, restore_s = parts
    return Downtime(total_s, detection_s, left_s, restore_s, first_step_s)
