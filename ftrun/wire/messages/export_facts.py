"""A checkpoint on its way out: where its files are, what is wanted of them, what became of it.

Runs in: the process of ftrun.tools.checkpoints.catalog, which finds the files; cli, which asks;
         the process of
ftrun.tools.export.__main__, which reads them and writes others. Pure.
"""

from typing import Literal

import msgspec

Format = Literal["safetensors", "dcp", "state_dict"]
FORMATS: tuple[Format, ...] = ("safetensors", "dcp", "state_dict")

DTYPE_WORDS = {"bf16": "BF16", "fp16": "F16", "fp32": "F32", "fp64": "F64"}
"""What a tensor's floating-point numbers may be turned into, and safetensors' name of it."""


class ShardFileLocation(msgspec.Struct, frozen=True):
    """One rank's files of a checkpoint, and the digests of what describes them."""

    rank: int
    path: str
    digests_path: str
    num_bytes: int
    table_digest: str  # hexadecimal, as in the index
    header_digest: str


class CheckpointLocation(msgspec.Struct, frozen=True):
    """One checkpoint, by its index."""

    path: str
    run_id: str
    step: int
    world_size: int
    shards: list[ShardFileLocation]


class ExportJob(msgspec.Struct, frozen=True):
    """What is to be written where."""

    source: CheckpointLocation
    format: Format
    out: str
    dtype: str = ""
    """Safetensors' name; empty: as they are."""
    only: tuple[str, ...] = ()
    file_bytes: int = 5_000_000_000
    num_writers: int = 1
    may_replace: bool = False


class ExportReport(msgspec.Struct, frozen=True):
    """What was written."""

    checkpoint: str
    step: int
    format: str
    out: str
    files: tuple[str, ...] = ()
    num_tensors: int = 0
    num_bytes: int = 0
    """Of all files."""
    seconds: float = 0.0
    left_out: tuple[str, ...] = ()
    """What the checkpoint holds and the format cannot, each in words."""
    notes: tuple[str, ...] = ()
    """What else the operator should know."""
    problem: str = ""
    """Why nothing was written, in words."""
