"""What is said of checkpoints on disk, by the process that reads them to the operator's terminal.

Runs in: the processes of ftrun.tools.checkpoints.catalog and ftrun.tools.checkpoints.convert,
         which say it, and cli, which shows
         it. Pure.
"""

import msgspec

from ftrun.wire.checkpoint_owner import CheckpointOwner
from ftrun.wire.messages.export_facts import CheckpointLocation


class CheckpointInfo(msgspec.Struct, frozen=True):
    """One checkpoint, or what looks like one."""

    name: str
    path: str
    is_latest: bool = False
    run_id: str = ""
    generation: int = -1
    step: int = -1
    world_size: int = 0
    num_bytes: int = 0
    """Of all its files."""
    written_s: float = 0.0
    """Wall time; 0: not known."""
    problems: tuple[str, ...] = ()
    """Why it cannot be used, each in words; none: nothing was found."""


class CatalogReport(msgspec.Struct, frozen=True):
    """A directory of checkpoints, the one written last first."""

    directory: str
    checkpoints: list[CheckpointInfo]
    unfinished: int = 0
    """Folders in which a checkpoint was begun; a later one removes them."""
    checked_bytes: int = 0
    seconds: float = 0.0
    removed: tuple[str, ...] = ()
    found: CheckpointLocation | None = None
    """The one that was asked for by itself."""
    owner: CheckpointOwner | None = None
    """The record of the run that writes there, or has written there last; asked by `try`."""
    problem: str = ""
    """Why nothing could be done, in words."""


class ConvertReport(msgspec.Struct, frozen=True):
    """A checkpoint that was made of another one."""

    source: str = ""
    path: str = ""
    step: int = -1
    mesh_before: str = ""
    mesh_after: str = ""
    world_size: int = 0
    num_tensors: int = 0
    num_bytes: int = 0
    """Of all its files."""
    is_linked: bool = False
    """The layout is the same, so that nothing was converted."""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    problem: str = ""
    """Why there is none, in words."""
    exit_code: int = 0
