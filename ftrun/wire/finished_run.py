"""Detects that the run which this node should join has already finished.

The run has left an owner record next to its checkpoints. Without this check, a node that is late or
was partitioned finds no other node, and would wait until `nodes.pause_timeout_s`.
"""

from datetime import UTC, datetime
from pathlib import Path

from ftrun.config.run_spec import RunSpec
from ftrun.urls import is_url
from ftrun.wire.checkpoint_owner import OWNER_NAME, CheckpointOwner, decode_owner
from ftrun.wire.messages.checkpoint import INDEX_NAME


def read_owner(directory: str) -> CheckpointOwner | None:
    try:
        return decode_owner((Path(directory) / OWNER_NAME).read_bytes())
    except OSError:
        return None


def has_finished(spec: RunSpec, record: CheckpointOwner | None, *, life: str = "") -> str:
    """Describe the successful end of this run name and command; empty if there was none.

    A run id that ftrun derived from the port proves nothing, because the next run on that port
    would have the same id. `life` is that of the run in which this node took part (see
    `GenerationPlan.life`); empty: none.
    """
    directory, nodes = spec.checkpoint_directory, spec.nodes
    if nodes is None or directory is None or record is None or not record.ended_s:
        return ""
    if life:
        is_ours = (record.run_id, record.life, record.exit_code) == (spec.run_id, life, 0)
        return _as_text(spec, record) if is_ours else ""
    is_same = (record.run_id, record.command) == (spec.run_id, spec.command_digest)
    is_named = not spec.run_id.endswith(f"-port{nodes.endpoint_port}")
    if not is_same or not is_named or record.exit_code != 0:
        return ""
    is_kept = is_url(directory) or any(Path(directory).glob(f"step-*/{INDEX_NAME}"))
    if not is_kept or spec.profile.checkpoint.resume != "auto":
        return ""
    return f"{_as_text(spec, record)}. To run it again, use another --run-id or --resume never"


def _as_text(spec: RunSpec, record: CheckpointOwner) -> str:
    ended = f"{datetime.fromtimestamp(record.ended_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
    return (
        f"run {spec.run_id} finished at {ended} with exit code 0, as node {record.node} has "
        "recorded next to its checkpoints; this node ends with the same exit code"
    )
