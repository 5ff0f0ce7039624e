"""The life of a run in seven states, and which may follow which.

Runs in:  the agent that leads. Pure.
Takes in: wishes to go on, each with a reason.
Gives:    `LifecycleTransition`s for the journal.
Source:   TRANSOM's task life cycle (arXiv 2310.10046): launch, warm-up, run, verify, recover, with
          C4's diagnosis (2406.04594) between run and recover.

Rule 1: a change that the table does not have is refused and told, never made: a bug of ftrun's
        may cost a line in the journal, not the run.
"""

from dataclasses import dataclass
from enum import Enum


class LifecycleState(Enum):
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


TABLE: dict[LifecycleState, frozenset[LifecycleState]] = {
    LifecycleState.LAUNCH: frozenset(
        {LifecycleState.CHECK, LifecycleState.RECOVER, LifecycleState.ENDED}
    ),
    LifecycleState.CHECK: frozenset(
        {
            LifecycleState.RUN,
            LifecycleState.SUSPECT,
            LifecycleState.DIAGNOSE,
            LifecycleState.RECOVER,
            LifecycleState.ENDED,
        }
    ),
    LifecycleState.RUN: frozenset(
        {
            LifecycleState.SUSPECT,
            LifecycleState.DIAGNOSE,
            LifecycleState.RECOVER,
            LifecycleState.ENDED,
        }
    ),
    LifecycleState.SUSPECT: frozenset(
        {LifecycleState.RUN, LifecycleState.DIAGNOSE, LifecycleState.RECOVER, LifecycleState.ENDED}
    ),
    LifecycleState.DIAGNOSE: frozenset(
        {LifecycleState.RUN, LifecycleState.RECOVER, LifecycleState.ENDED}
    ),
    LifecycleState.RECOVER: frozenset(
        {LifecycleState.VERIFY, LifecycleState.CHECK, LifecycleState.ENDED}
    ),
    LifecycleState.VERIFY: frozenset(
        {
            LifecycleState.RUN,
            LifecycleState.SUSPECT,
            LifecycleState.DIAGNOSE,
            LifecycleState.RECOVER,
            LifecycleState.ENDED,
        }
    ),
    LifecycleState.ENDED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class LifecycleTransition:
    """One step in the life of a run."""

    old: LifecycleState
    new: LifecycleState
    why: str
    is_refused: bool = False


class Lifecycle:
    """The state of one run."""

    def __init__(self, state: LifecycleState = LifecycleState.LAUNCH) -> None:
        self.state = state

    def go(self, new: LifecycleState, why: str) -> LifecycleTransition | None:
        """Go on to a state; None where it is there already."""
        if new is self.state:
            return None
        old = self.state
        if new not in TABLE[old]:
            return LifecycleTransition(old, new, why, is_refused=True)
        self.state = new
        return LifecycleTransition(old, new, why)
