"""Instructions of `ftrun verify` to the ranks, and the records that the ranks write for it.

Each rank appends one JSON line per event to `rank{R}.{GENERATION}.jsonl` in the plan's folder. Each
line is a single write, so that a rank killed by SIGKILL leaves complete lines.
"""

from pathlib import Path

import msgspec


class Kill(msgspec.Struct, frozen=True):
    """One SIGKILL. Rank G + 1 modulo N carries out the kill at index G, in generation G."""

    step: int  # steps that are complete when the kill happens
    is_in_step: bool  # in the next step, before its optimizer step; else at the end of `step`
    without_snapshot: int = 0  # steps before the kill without a snapshot, which are repeated


class VerifyPlan(msgspec.Struct, frozen=True):
    """One run of a verification; JSON in `environment.VERIFY`."""

    folder: str
    steps: int  # each rank ends its process with exit code 0 after this number of steps
    kills: tuple[Kill, ...] = ()


ATTACHED = "attached"  # state when attach returns: restored, or the script's own
STARTED = "begun"  # state when the first iteration of a session's loop begins
BATCH = "batch"
FORWARD = "forward"
LOSS = "loss"  # tensor on which a backward pass begins
OPTIMIZER = "optimizer"  # state before an optimizer step
BOUNDARY = "boundary"
KILLED = "killed"

FAILED = "failed"  # an event could not be recorded; `what` names the event and the reason


class VerifyRecord(msgspec.Struct, omit_defaults=True):
    """One event of one rank."""

    event: str
    step: int  # ATTACHED, BEGUN, KILLED: boundaries passed; else the step in progress or completed
    digests: dict[str, str] = {}
    """xxh3 digests of values by key. The first word of a key names the kind of value, see
    `ftrun.worker.capture.record_digests`."""

    values: dict[str, str] = {}  # short texts of numbers and strings in `digests`, by the same keys
    where: str = ""  # FILE:LINE of the script
    what: str = ""  # class of the optimizer, loader or module; for ATTACHED the restored version
    notes: dict[str, str] = {}


def record_path(folder: Path, rank: int, generation: int) -> Path:
    return folder / f"rank{rank}.{generation}.jsonl"


def read_records(path: Path) -> list[VerifyRecord]:
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    decode = msgspec.json.Decoder(VerifyRecord).decode
    return [decode(line) for line in whole.splitlines()]
