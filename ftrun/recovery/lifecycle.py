"""The life cycle of a run: its states, their transitions, and the time spent in them.

Source: TRANSOM's task life cycle (arXiv 2310.10046): launch, warm-up, run, verify, recover, with
        C4's diagnosis (2406.04594) between run and recover. The classes of time are those of
        Google's goodput measurement where they fit; `paused`, `fault_detection` and `ending` are
        ftrun's own.

Rule 1: a transition that the table does not contain is rejected and reported, never made. A bug in
        ftrun may cost a line in the journal, not the run.
Rule 2: A second is counted once. A step that is repeated after a failure counted as productive the
        first time.
"""

from enum import Enum

from ftrun.records.incidents import Downtime
from ftrun.wire.cluster.membership import RestartTimes


class LifecycleState(Enum):
    """The state of a run."""

    LAUNCH = "launch"
    """Nodes discover each other."""
    CHECK = "check"
    """Nodes have passed their checks and ranks start; no step is made yet, no deadline runs."""
    RUN = "run"
    SUSPECT = "suspect"
    """Something is late; stacks are being collected."""
    DIAGNOSE = "diagnose"
    """A verdict exists, and is not acted on yet, or is only reported."""
    RECOVER = "recover"
    """Ranks are dead, and a new generation is being prepared."""
    VERIFY = "verify"
    """Ranks run again; the incident stays open until they are past their earlier step."""
    ENDED = "ended"


_FAILING = (LifecycleState.SUSPECT, LifecycleState.DIAGNOSE, LifecycleState.RECOVER)
_AFTER = {
    LifecycleState.LAUNCH: (LifecycleState.CHECK, LifecycleState.RECOVER),
    LifecycleState.CHECK: (LifecycleState.RUN, *_FAILING),
    LifecycleState.RUN: _FAILING,
    LifecycleState.SUSPECT: (LifecycleState.RUN, LifecycleState.DIAGNOSE, LifecycleState.RECOVER),
    LifecycleState.DIAGNOSE: (LifecycleState.RUN, LifecycleState.RECOVER),
    LifecycleState.RECOVER: (LifecycleState.VERIFY, LifecycleState.CHECK),
    LifecycleState.VERIFY: (LifecycleState.RUN, *_FAILING),
}
TABLE = {old: frozenset((*new, LifecycleState.ENDED)) for old, new in _AFTER.items()}
TABLE[LifecycleState.ENDED] = frozenset()


PRODUCTIVE = "productive"
START = "program_startup"
"""From the launch to the first step of every rank."""
DETECTION = "fault_detection"
"""Time without progress until it was found to be a fault."""
RECOVERY = "infrastructure_recovery_from_disruption"
"""From a fault to the first step after it."""
AGAIN = "wasted_progress_from_disruption"
"""Steps that are repeated."""
SAVING = "unproductive_checkpoint_save_time"
"""Time in which a snapshot blocked the ranks."""
PAUSED = "paused"
"""Time in which the run waits for nodes."""
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
    """Time of one run, since this agent began to lead it."""

    def __init__(self, now_s: float) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(CLASSES, 0.0)
        self._last_s = now_s
        self._last_class = START
        self._blocked_s = 0.0
        self._has_run = False
        self._shown: dict[str, float] = {}

    def goodput(self, now_s: float) -> float | None:
        """Productive time over total time; None: no time has passed."""
        seconds = self._until(now_s)
        total_s = sum(seconds.values())
        return seconds[PRODUCTIVE] / total_s if total_s > 0 else None

    def counters(self, now_s: float) -> dict[str, float]:
        """All classes as counters: no value is ever lower than in an earlier call.

        If time moves from one class to another, the first counter stays constant until it catches
        up.
        """
        for name, seconds in self._until(now_s).items():
            self._shown[name] = max(self._shown.get(name, 0.0), seconds)
        return dict(self._shown)

    def turn(
        self, life: str, *, is_paused: bool, has_stepped: bool, blocked_s: float, now_s: float
    ) -> None:
        """Account the time since the last turn to the class that was active then.

        Args:
            is_paused: the run waits for nodes.
            has_stepped: after a restart, every rank has made a step.
            blocked_s: total seconds for which snapshots have blocked the ranks of this generation.
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
            found = RECOVERY  # a reconfiguration: the ranks start again
        self._last_class = found
        since_s = blocked_s - self._blocked_s if blocked_s >= self._blocked_s else blocked_s
        self._blocked_s = blocked_s
        self.move(PRODUCTIVE, SAVING, since_s)

    def move(self, old: str, new: str, seconds: float) -> None:
        moved_s = min(max(0.0, seconds), self.seconds[old])
        self.seconds[old] -= moved_s
        self.seconds[new] += moved_s

    def _until(self, now_s: float) -> dict[str, float]:
        found = dict(self.seconds)
        found[self._last_class] += max(0.0, now_s - self._last_s)
        return found


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
