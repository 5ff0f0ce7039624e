"""Reports about checkpoints on disk, for the operator's terminal.

Runs in:  the processes of ftrun.tools.checkpoints.catalog and ftrun.tools.checkpoints.convert,
          which make the reports; cli, which shows them. Pure.
"""

import msgspec

from ftrun.wire.checkpoint_owner import CheckpointOwner
from ftrun.wire.messages.export_facts import CheckpointLocation


class CheckpointInfo(msgspec.Struct, frozen=True):
    """One checkpoint, or a folder that looks like one."""

    name: str
    path: str
    is_latest: bool = False
    run_id: str = ""
    generation: int = -1
    step: int = -1
    world_size: int = 0
    num_bytes: int = 0
    """Total size of its files."""
    written_s: float = 0.0
    """Wall time; 0: not known."""
    problems: tuple[str, ...] = ()
    """Reasons why it cannot be used, in words; empty: no problem was found."""


class CatalogReport(msgspec.Struct, frozen=True):
    """A directory of checkpoints, the most recently written first."""

    directory: str
    checkpoints: list[CheckpointInfo]
    unfinished: int = 0
    """Number of folders with an incomplete checkpoint; a later checkpoint removes them."""
    checked_bytes: int = 0
    seconds: float = 0.0
    removed: tuple[str, ...] = ()
    found: CheckpointLocation | None = None
    """The single checkpoint that was requested."""
    owner: CheckpointOwner | None = None
    """Owner record of the run that writes there, or wrote there last; set for the action `try`."""
    problem: str = ""
    """Why nothing could be done, in words."""


class ConvertReport(msgspec.Struct, frozen=True):
    """Result of converting one checkpoint into another."""

    source: str = ""
    path: str = ""
    step: int = -1
    mesh_before: str = ""
    mesh_after: str = ""
    world_size: int = 0
    num_tensors: int = 0
    num_bytes: int = 0
    """Total size of its files."""
    is_linked: bool = False
    """The layout is the same, so that nothing was converted."""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    problem: str = ""
    """Why there is no result, in words."""
    exit_code: int = 0
