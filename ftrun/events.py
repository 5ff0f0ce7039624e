"""Events of a run: the facts that recovery decides about.

The agent gathers them.
"""

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from ftrun.ids import Generation, Rank, Step, Version


class ExitKind(Enum):
    """How a worker ended."""

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
    """How and why one worker ended."""

    rank: Rank
    kind: ExitKind
    code: int
    """Exit code, or the negative signal number."""
    text: str
    """In words: "rank 1 was killed by SIGKILL"."""
    detail: str = ""
    """The user's part of the exception's traceback."""
    fingerprint: str = ""
    """Equal for two failures of the same kind at the same place."""
    failed_at_ns: int = 0
    """Time of the failure on the monotonic clock; 0 if only the exit was observed."""


@dataclass(frozen=True, slots=True)
class GenerationStarted:
    """All workers of a generation are launched."""

    generation: Generation
    restored: Version | None


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of the workers of this generation."""

    step: Step
    """Largest step boundary that any rank has passed."""
    steps_here: int
    """Step boundaries that the furthest rank has passed in this generation."""
    attached: bool


@dataclass(frozen=True, slots=True)
class WorkersExited:
    """Workers that have ended, observed together."""

    journal_kind: ClassVar[str] = "WorkersExited"

    exits: tuple[WorkerExit, ...]
    progress: Progress


@dataclass(frozen=True, slots=True)
class StopRequested:
    """A signal or a command asks the run to end."""

    journal_kind: ClassVar[str] = "StopAsked"

    signal: int
    by: str
    attached: bool


@dataclass(frozen=True, slots=True)
class AllAtBoundary:
    """Every worker waits at a step boundary, and its last snapshot is sealed."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class SmpExited:
    """The SMP has ended."""

    journal_kind: ClassVar[str] = "SmpExited"

    text: str


@dataclass(frozen=True, slots=True)
class ZygoteExited:
    """The zygote has ended."""

    journal_kind: ClassVar[str] = "ZygoteExited"

    text: str


Event = GenerationStarted | WorkersExited | StopRequested | AllAtBoundary | Tick
"""Events of the whole run."""

PartEvent = SmpExited | ZygoteExited
"""Events of the agent's own components."""
