"""Events of a run: the facts that recovery decides about.

The agent gathers them.
"""

from dataclasses import dataclass
from enum import Enum

import msgspec

from ftrun.ids import Generation, Rank, Step, Version


class Record(msgspec.Struct, frozen=True, tag_field="kind"):
    """A fact or a decision that the journal holds as one line; `ftrun.records` has all kinds."""

    @property
    def kind(self) -> str:
        return str(self.__struct_config__.tag)


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
    NUMERICAL_ANOMALY = "numerical anomaly"
    JOIN_REFUSED = "join refused"


@dataclass(frozen=True, slots=True)
class ErrorLine:
    """A line that a rank wrote, with the class of its pattern."""

    error_class: str
    line: str
    source: str  # `exception`, `stderr.log` or `stdout.log`

    @property
    def text(self) -> str:
        return f"{self.source} ({self.error_class}): {self.line}"


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """How and why one worker ended."""

    rank: Rank
    kind: ExitKind
    code: int  # exit code, or the negative signal number
    text: str  # in words: "rank 1 was killed by SIGKILL"
    detail: str = ""  # the user's part of the exception's traceback
    fingerprint: str = ""  # equal for two failures of the same kind at the same place
    failed_at_ns: int = 0  # on the monotonic clock; 0 if only the exit was observed
    errors: tuple[ErrorLine, ...] = ()  # classes in what it wrote, the likely cause first


@dataclass(frozen=True, slots=True)
class GenerationStarted:
    """All workers of a generation are launched."""

    generation: Generation
    restored: Version | None


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of the workers of this generation."""

    step: Step  # largest step boundary that any rank has passed
    steps_here: int  # step boundaries that the furthest rank has passed in this generation
    attached: bool


class WorkersExited(Record, frozen=True, tag="workers_exited"):
    """Workers that have ended, observed together."""

    exits: tuple[WorkerExit, ...]
    progress: Progress


class StopRequested(Record, frozen=True, tag="stop_requested"):
    """A signal or a command asks the run to end."""

    signal: int
    by: str
    attached: bool


@dataclass(frozen=True, slots=True)
class AllAtBoundary:
    """Every worker waits at a step boundary, and its last snapshot is sealed."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


class SmpExited(Record, frozen=True, tag="smp_exited"):
    """The SMP has ended."""

    text: str


class ZygoteExited(Record, frozen=True, tag="zygote_exited"):
    """The zygote has ended."""

    text: str


Event = GenerationStarted | WorkersExited | StopRequested | AllAtBoundary | Tick  # of the run
PartEvent = SmpExited | ZygoteExited  # events of the agent's own components
