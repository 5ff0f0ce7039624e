"""Owner record of a checkpoint directory, and the claim with which a run requests ownership.

The agent claims, the SMP writes and renews the record, the command line reads it.
"""

from typing import Any

import msgspec

OWNER_NAME = ".owner.json"  # file name of the record in the checkpoint directory


class CheckpointClaim(msgspec.Struct, frozen=True):
    """Request of the node of rank 0 to own a checkpoint directory."""

    directory: str  # absolute path, or a URL
    life: str  # see `GenerationPlan.life`
    num_nodes: int
    inherits: bool  # it resumes from earlier runs' checkpoints there, and may remove them later


class CheckpointOwner(msgspec.Struct, frozen=True):
    """The record. A new field needs a default, because records of older versions are read."""

    run_id: str
    life: str
    node: str  # host name of the process that renews the record
    pid: int
    machine: str  # boot id and PID namespace; only if equal does a pid mean the same process
    num_nodes: int
    since_s: float  # wall time of the claim
    renewed_s: float  # wall time of the last renewal, by the clock of that host
    heartbeat: int = msgspec.field(name="beat")  # counter; each renewal increases it
    runs: list[str]  # runs whose checkpoints may be removed: this run and those it continued
    ended_s: float = 0.0  # wall time of the end of the run; 0: the run has not ended
    exit_code: int = -1
    reason: str = ""
    command: str = ""  # digest of the script and its arguments


def decode_owner(data: bytes | None) -> CheckpointOwner | None:
    """Returns None if there is no record, or if it is damaged."""
    if data is None:
        return None
    try:
        return msgspec.json.decode(data, type=CheckpointOwner)
    except msgspec.MsgspecError:
        return None


def encode_owner(record: CheckpointOwner, **changes: Any) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(record, **changes))
