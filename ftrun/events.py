"""What happened: facts somebody has to decide about.

Runs in: agent (which gathers them), recovery (which decides). Pure.
"""

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from ftrun.ids import Generation, Rank, Step, Version


class ExitKind(Enum):
    """How a worker came to its end."""

    FINISHED = "finished"
    EXCEPTION = "exception"
    EXIT_CODE = "exit code"
    SIGNAL = "signal"
    OUT_OF_MEMORY = "out of memory"
    STOPPED = "stopped"
    CORRUPT_SNAPSHOT = "corrupt snapshot"
    NODE_LOST = "node lost"
    RESTORE_FAILED = "restore failed"
    LINK_LOST = "link lost"
    HUNG = "hung"
    SKIPPED = "skipped a collective"
    LEFT_EARLY = "left early"
    BAD_NUMBERS = "bad numbers"


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """One worker's end, and what is known of why."""

    rank: Rank
    kind: ExitKind
    code: int
    """Exit code, or the signal's number with a minus sign."""
    text: str
    """In words: "rank 1 was killed by SIGKILL"."""
    detail: str = ""
    """The exception's traceback, as far as it is the user's."""
    fingerprint: str = ""
    """Equal for two failures of the same kind at the same place."""
    failed_at_ns: int = 0
    """When it failed, on the monotonic clock; 0 when only its end was seen."""


@dataclass(frozen=True, slots=True)
class GenerationStarted:
    """All workers of a generation are launched."""

    generation: Generation
    restored: Version | None


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the workers of this generation are."""

    step: Step
    """The largest step boundary that any rank has passed."""
    steps_here: int
    """Step boundaries passed in this generation by the rank that is furthest."""
    attached: bool


@dataclass(frozen=True, slots=True)
class WorkersExited:
    """Workers that have ended, seen together."""

    journal_kind: ClassVar[str] = "WorkersExited"

    exits: tuple[WorkerExit, ...]
    progress: Progress


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Somebody wants the run to end."""

    journal_kind: ClassVar[str] = "StopAsked"

    signal: int
    by: str
    attached: bool


@dataclass(frozen=True, slots=True)
class AllAtBoundary:
    """Every worker waits at a step boundary, its last snapshot sealed."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class SmpExited:
    """The snapshot manager is gone."""

    journal_kind: ClassVar[str] = "SmpExited"

    text: str


@dataclass(frozen=True, slots=True)
class ZygoteExited:
    """The warm process is gone."""

    journal_kind: ClassVar[str] = "ZygoteExited"

    text: str


Event = GenerationStarted | WorkersExited | StopRequested | AllAtBoundary | Tick
"""Of a whole run."""

PartEvent = SmpExited | ZygoteExited
"""Of one node's own parts."""
