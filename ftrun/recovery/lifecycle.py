"""The life cycle of a run: seven states and their transitions.

Runs in:  the agent that leads. Pure.
Takes in: requested transitions, each with a reason.
Gives:    `LifecycleTransition`s for the journal.
Source:   TRANSOM's task life cycle (arXiv 2310.10046): launch, warm-up, run, verify, recover, with
          C4's diagnosis (2406.04594) between run and recover.

Rule 1: a transition that the table does not contain is rejected and reported, never made. A bug in
        ftrun may cost a line in the journal, not the run.
"""

from dataclasses import dataclass
from enum import Enum


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
    """One transition, made or rejected."""

    old: LifecycleState
    new: LifecycleState
    why: str
    is_refused: bool = False


class Lifecycle:
    """The state of one run."""

    def __init__(self, state: LifecycleState = LifecycleState.LAUNCH) -> None:
        self.state = state

    def go(self, new: LifecycleState, why: str) -> LifecycleTransition | None:
        """Changes to a state; None if it is the current one."""
        if new is self.state:
            return None
        old = self.state
        if new not in TABLE[old]:
            return LifecycleTransition(old, new, why, is_refused=True)
        self.state = new
        return LifecycleTransition(old, new, why)
