"""Where the time of a run goes, class by class, while it runs.

Runs in:  the agent that leads. Pure.
Takes in: the state of the run's life, again and again, with the time.
Gives:    seconds by class; goodput, the part of it that was productive.
Source:   the names of classes are those of Google's goodput measurement where they fit; `paused`,
          `fault_detection` and `ending` are ours.

Rule 1: a second is counted once. What is done again after a failure was productive the first time.
"""

PRODUCTIVE = "productive"
START = "program_startup"
"""From the launch to the first step of every rank."""
DETECTION = "fault_detection"
"""Silence, until it was found to be a fault."""
RECOVERY = "infrastructure_recovery_from_disruption"
"""From a fault to the first step after it."""
AGAIN = "wasted_progress_from_disruption"
"""Steps that are made a second time."""
SAVING = "unproductive_checkpoint_save_time"
"""The ranks stood still for a snapshot."""
PAUSED = "paused"
"""Waiting for nodes."""
ENDING = "ending"

CLASSES = (PRODUCTIVE, START, DETECTION, RECOVERY, AGAIN, SAVING, PAUSED, ENDING)

_OF_LIFE = {
    "launch": START,
    "check": START,
    "run": PRODUCTIVE,
    "suspect": DETECTION,
    "diagnose": DETECTION,
    "recover": RECOVERY,
    "verify": RECOVERY,
    "ended": ENDING,
}


class TimeAccounting:
    """The time of one run, since this agent began to lead it."""

    def __init__(self, now_s: float) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(CLASSES, 0.0)
        self._last_s = now_s
        self._last_class = START
        self._blocked_s = 0.0
        self._has_run = False
        self._shown: dict[str, float] = {}

    def goodput(self, now_s: float) -> float | None:
        """Productive time over all time; None: no time has passed."""
        seconds = self._until(now_s)
        total_s = sum(seconds.values())
        return seconds[PRODUCTIVE] / total_s if total_s > 0 else None

    def counters(self, now_s: float) -> dict[str, float]:
        """All classes, as counters: none is ever less than it was when it was asked for before.

        Where time is moved from one class to another, the first stands still for so long.
        """
        for name, seconds in self._until(now_s).items():
            self._shown[name] = max(self._shown.get(name, 0.0), seconds)
        return dict(self._shown)

    def turn(
        self, life: str, *, is_paused: bool, has_stepped: bool, blocked_s: float, now_s: float
    ) -> None:
        """Book the time since the last turn to what was going on then.

        Args:
            life: state of the life cycle.
            is_paused: the run waits for nodes.
            has_stepped: after a restart, every rank has made a step.
            blocked_s: so long the ranks of this generation have stood still for snapshots.
            now_s: monotonic.
        """
        self.seconds[self._last_class] += max(0.0, now_s - self._last_s)
        self._last_s = now_s
        found = _OF_LIFE.get(life, RECOVERY)
        if found == PRODUCTIVE:
            self._has_run = True
        if is_paused:
            found = PAUSED
        elif life == "verify" and has_stepped:
            found = AGAIN
        elif found == START and self._has_run:
            found = RECOVERY  # nodes were taken in: the same ranks start once more
        self._last_class = found
        since_s = blocked_s - self._blocked_s if blocked_s >= self._blocked_s else blocked_s
        self._blocked_s = blocked_s
        self.move(PRODUCTIVE, SAVING, since_s)

    def move(self, old: str, new: str, seconds: float) -> None:
        """Time that was booked to one class was of another, as is known now."""
        moved_s = min(max(0.0, seconds), self.seconds[old])
        self.seconds[old] -= moved_s
        self.seconds[new] += moved_s

    def _until(self, now_s: float) -> dict[str, float]:
        """What is booked, and what goes on since the last turn."""
        found = dict(self.seconds)
        found[self._last_class] += max(0.0, now_s - self._last_s)
        return found
