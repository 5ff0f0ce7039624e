"""The record of the run that writes to a directory of checkpoints, and what it claims it with.

Runs in:  agent, which claims; SMP, which writes and renews the record; cli, which reads it. Pure.
"""

from typing import Any

import msgspec

OWNER_NAME = ".owner.json"
"""The record's file in the directory."""


class CheckpointClaim(msgspec.Struct, frozen=True):
    """What the node of rank 0 claims a directory with."""

    directory: str
    """Absolute, or a URL."""
    life: str
    """See `Plan.life`."""
    num_nodes: int
    inherits: bool
    """The run resumes from what earlier runs have left there, and may remove that later on."""


class CheckpointOwner(msgspec.Struct, frozen=True):
    """The record. A field that is added needs a default: older records are read."""

    run_id: str
    life: str
    node: str
    """The host name of the process that renews the record."""
    pid: int
    machine: str
    """Equal only where a pid means the same process: boot id and pid namespace."""
    num_nodes: int
    since_s: float
    """Wall time of the claim."""
    renewed_s: float
    """Wall time of that host."""
    beat: int
    """Grows with each renewal."""
    runs: list[str]
    """The runs whose checkpoints may be removed: this one, and those that it has continued."""
    ended_s: float = 0.0
    """Wall time; 0: it has not ended."""
    exit_code: int = -1
    reason: str = ""
    command: str = ""
    """A digest of script and arguments."""


def decode_owner(data: bytes | None) -> CheckpointOwner | None:
    """None: there is no record, or it is damaged."""
    if data is None:
        return None
    try:
        return msgspec.json.decode(data, type=CheckpointOwner)
    except msgspec.MsgspecError:
        return None


def encode_owner(record: CheckpointOwner, **changes: Any) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(record, **changes))
