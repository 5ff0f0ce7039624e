"""What recovery wants done. Every command says why, in words an operator can act on.

Runs in: agent. Pure.
"""

from dataclasses import dataclass

from ftrun.events import WorkerExit


@dataclass(frozen=True, slots=True)
class KillWorkers:
    """End every worker of this generation at once."""

    why: str


@dataclass(frozen=True, slots=True)
class StartGeneration:
    """Start all workers again, from the newest restore point."""

    why: str


@dataclass(frozen=True, slots=True)
class RespawnSmp:
    """Start another SMP and hand it the memory."""

    why: str


@dataclass(frozen=True, slots=True)
class RespawnZygote:
    """Start another warm process."""

    why: str


@dataclass(frozen=True, slots=True)
class GoOnWithout:
    """Do without a part that keeps dying: `smp` or `zygote`."""

    part: str
    why: str


@dataclass(frozen=True, slots=True)
class AskLastSnapshot:
    """Have every rank take a snapshot at one and the same next boundary, and wait there."""

    why: str


@dataclass(frozen=True, slots=True)
class SignalWorkers:
    """Pass a signal to every worker's process group."""

    signal: int
    why: str


@dataclass(frozen=True, slots=True)
class EndRun:
    """It is over."""

    exit_code: int
    why: str
    cause: WorkerExit | None = None
    advice: str = ""


Command = (
    KillWorkers
    | StartGeneration
    | RespawnSmp
    | RespawnZygote
    | GoOnWithout
    | AskLastSnapshot
    | SignalWorkers
    | EndRun
)
