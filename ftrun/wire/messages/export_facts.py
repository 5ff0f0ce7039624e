"""Locations of a checkpoint's files, export jobs and their results.

Runs in:  the process of ftrun.tools.checkpoints.catalog, which finds the files; cli, which requests
          the export; the process of ftrun.tools.export, which reads the files and writes others.
          Pure.
"""

from typing import Literal

import msgspec

Format = Literal["safetensors", "dcp", "state_dict"]
FORMATS: tuple[Format, ...] = ("safetensors", "dcp", "state_dict")

DTYPE_WORDS = {"bf16": "BF16", "fp16": "F16", "fp32": "F32", "fp64": "F64"}
"""Target types of floating-point tensors, with the names that safetensors uses."""


class ShardFileLocation(msgspec.Struct, frozen=True):
    """One rank's files of a checkpoint, and the digests of its table and header."""

    rank: int
    path: str
    digests_path: str
    num_bytes: int
    table_digest: str  # hexadecimal, as in the index
    header_digest: str


class CheckpointLocation(msgspec.Struct, frozen=True):
    """One checkpoint, described by its index."""

    path: str
    run_id: str
    step: int
    world_size: int
    shards: list[ShardFileLocation]


class ExportJob(msgspec.Struct, frozen=True):
    """Source, target and format of one export."""

    source: CheckpointLocation
    format: Format
    out: str
    dtype: str = ""
    """Name in safetensors; empty: unchanged."""
    only: tuple[str, ...] = ()
    file_bytes: int = 5_000_000_000
    num_writers: int = 1
    may_replace: bool = False


class ExportReport(msgspec.Struct, frozen=True):
    """Result of one export."""

    checkpoint: str
    step: int
    format: str
    out: str
    files: tuple[str, ...] = ()
    num_tensors: int = 0
    num_bytes: int = 0
    """Total size of all files."""
    seconds: float = 0.0
    left_out: tuple[str, ...] = ()
    """Content of the checkpoint that the format cannot represent, each item in words."""
    notes: tuple[str, ...] = ()
    """Further notes for the operator."""
    problem: str = ""
    """Why nothing was written, in words."""
