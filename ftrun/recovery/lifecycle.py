"""The life of a run in seven states, and which may follow which.

Runs in:  the agent that leads. Pure.
Takes in: wishes to go on, each with a reason.
Gives:    `Change`s for the journal.
Source:   TRANSOM's task life cycle (arXiv 2310.10046): launch, warm-up, run, verify, recover, with
          C4's diagnosis (2406.04594) between run and recover.

Rule 1: a change that the table does not have is refused and told, never made: a bug of ftrun's
        may cost a line in the journal, not the run.
"""

from dataclasses import dataclass
from enum import Enum


class Life(Enum):
    """Where a run is."""

    LAUNCH = "launch"
    """Nodes find one another."""
    CHECK = "check"
    """They were found fit, their ranks are starting; no step is made yet, and no deadline runs."""
    RUN = "run"
    SUSPECT = "suspect"
    """Something is late; stacks are being taken."""
    DIAGNOSE = "diagnose"
    """There is a verdict, and it is not acted on yet, or only reported."""
    RECOVER = "recover"
    """Ranks are dead, and a new generation is on its way."""
    VERIFY = "verify"
    """Ranks run again; the incident stays open until they have got further than before it."""
    ENDED = "ended"


TABLE: dict[Life, frozenset[Life]] = {
    Life.LAUNCH: frozenset({Life.CHECK, Life.RECOVER, Life.ENDED}),
    Life.CHECK: frozenset({Life.RUN, Life.SUSPECT, Life.DIAGNOSE, Life.RECOVER, Life.ENDED}),
    Life.RUN: frozenset({Life.SUSPECT, Life.DIAGNOSE, Life.RECOVER, Life.ENDED}),
    Life.SUSPECT: frozenset({Life.RUN, Life.DIAGNOSE, Life.RECOVER, Life.ENDED}),
    Life.DIAGNOSE: frozenset({Life.RUN, Life.RECOVER, Life.ENDED}),
    Life.RECOVER: frozenset({Life.VERIFY, Life.CHECK, Life.ENDED}),
    Life.VERIFY: frozenset({Life.RUN, Life.SUSPECT, Life.DIAGNOSE, Life.RECOVER, Life.ENDED}),
    Life.ENDED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Change:
    """One step in the life of a run."""

    old: Life
    new: Life
    why: str
    is_refused: bool = False


class LifeCycle:
    """The state of one run."""

    def __init__(self, state: Life = Life.LAUNCH) -> None:
        self.state = state

    def go(self, new: Life, why: str) -> Change | None:
        """Go on to a state; None where it is there already."""
        if new is self.state:
            return None
        old = self.state
        if new not in TABLE[old]:
            return Change(old, new, why, is_refused=True)
        self.state = new
        return Change(old, new, why)
