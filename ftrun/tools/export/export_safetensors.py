"""A checkpoint as a directory of safetensors files.

Runs in:  the process of ftrun.tools.export.__main__. Loads torch only for another dtype.
Takes in: the checkpoint, the outline of what is wanted.
Gives:    `model-00001-of-000NN.safetensors` and so on, with the index that transformers reads.
"""

from pathlib import Path

from ftrun.errors import CheckpointError
from ftrun.tools.export.safetensors import (
    INDEX_NAME,
    PlannedFile,
    TensorDescription,
    index_of,
    plan_files,
)
from ftrun.tools.export.selection import ExportOutline
from ftrun.tools.export.source import ExportSource
from ftrun.tools.export.tensor_writer import (
    TensorPlacement,
    create_files,
    dtype_out,
    write_at,
    write_tensors,
)
from ftrun.wire.messages.checkpoint import ExportJob


def left_out_of_safetensors(outline: ExportOutline) -> list[str]:
    """What is no tensor of a module, in words."""
    return [f"{name}: safetensors files hold tensors of modules only" for name in outline.others]


def write_safetensors(
    folder: Path, outline: ExportOutline, world: ExportSource, order: ExportJob
) -> int:
    """Fill a new folder; how many tensors there are in it.

    Raises:
        CheckpointError: there is nothing to write, or a tensor is damaged.
        OSError: there is no room.
    """
    names, tied = outline.flat()
    if not names:
        raise CheckpointError(
            "there is no tensor of a module to write; the others need --format dcp or state_dict"
        )
    tensors = {name: world.whole(saved) for name, saved in names.items()}
    dtypes = {name: dtype_out(tensor, order.dtype) for name, tensor in tensors.items()}
    described = [TensorDescription(name, dtypes[name], one.shape) for name, one in tensors.items()]
    files = plan_files(described, limit_bytes=order.file_bytes, tied=tied)
    for other, name in tied.items():
        world.tell(f"{other} is tied to {name}; it is written once, under that name")
    folder.mkdir()
    create_files({folder / file.name: file.num_bytes for file in files})
    _write_headers(folder, files)
    placed = [
        TensorPlacement(tensors[name], folder / file.name, at, dtypes[name])
        for file in files
        for name, at in file.places.items()
    ]
    write_tensors(placed, world, num_writers=order.num_writers)
    (folder / INDEX_NAME).write_bytes(index_of(files))
    return len(names)


def _write_headers(folder: Path, files: list[PlannedFile]) -> None:
    for file in files:
        with (folder / file.name).open("r+b", buffering=0) as opened:
            write_at(opened.fileno(), file.header, 0)
