"""What `ftrun verify` asks of the ranks, and what they record for it.

Runs in: worker (writes), the verify command (reads).

Each rank appends one JSON line per event to `rank{R}.{GENERATION}.jsonl` in the plan's folder with
a single write, so that a rank killed by SIGKILL leaves whole lines.
"""

from pathlib import Path

import msgspec


class Kill(msgspec.Struct, frozen=True):
    """One SIGKILL. The kill at index G is carried out in generation G, by rank G + 1 modulo N."""

    step: int
    """Steps that are done when it happens."""

    is_in_step: bool
    """In the middle of the step after it, before the optimizer; else at the end of the step."""

    without_snapshot: int = 0
    """The last steps before it, this number of them, get no snapshot, so that they are repeated."""


class VerifyPlan(msgspec.Struct, frozen=True):
    """One run of a verification; JSON in `environment.VERIFY`."""

    folder: str
    steps: int
    """Each rank ends its process with 0 after this number of steps."""

    kills: tuple[Kill, ...] = ()


ATTACHED = "attached"
"""The state when attach returns: restored, or the script's own."""

BEGUN = "begun"
"""The state when the first turn of a session's loop begins."""

BATCH = "batch"
FORWARD = "forward"
LOSS = "loss"
"""A tensor of which a backward is begun."""

OPTIMIZER = "optimizer"
"""Before an optimizer's step."""

BOUNDARY = "boundary"
KILLED = "killed"

FAILED = "failed"
"""An event could not be recorded; `what` says which and why."""


class VerifyRecord(msgspec.Struct, omit_defaults=True):
    """One event of one rank."""

    event: str
    step: int
    """Boundaries passed for ATTACHED, BEGUN and KILLED; else the step that is made or was made."""

    digests: dict[str, str] = {}
    """xxh3 of values by key; the key's first word says what it is: see record_digests."""

    values: dict[str, str] = {}
    """Short texts of numbers and strings among `digests`, by the same keys."""

    where: str = ""
    """FILE:LINE of the script."""

    what: str = ""
    """The class of the optimizer, loader or module; of ATTACHED the restored version."""

    notes: dict[str, str] = {}


def record_path(folder: Path, rank: int, generation: int) -> Path:
    return folder / f"rank{rank}.{generation}.jsonl"


def read_records(path: Path) -> list[VerifyRecord]:
    """The whole lines of one file; a line that is cut off is left out."""
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    decode = msgspec.json.Decoder(VerifyRecord).decode
    return [decode(line) for line in whole.splitlines()]
