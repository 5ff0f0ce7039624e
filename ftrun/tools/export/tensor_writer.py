"""Writes tensors to their places in files, with a few threads.

Reading, hashing and writing need no interpreter lock. torch is loaded only to convert dtypes. The
result does not depend on the number of threads.
"""

import os
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ftrun.sharding.source_index import WholeTensor
from ftrun.tools.export.source import ExportSource, WholeTensorReader

Cast = Callable[[memoryview], memoryview]
"""Converts items of one dtype to another."""

FLOATS = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})


@dataclass(frozen=True, slots=True)
class TensorPlacement:
    """A tensor, the dtype in which it is written, and the offset in an existing file."""

    tensor: WholeTensor
    path: Path
    at: int
    dtype: str


def dtype_out(tensor: WholeTensor, wanted: str) -> str:
    """Returns the dtype in which a tensor is written: only floating-point numbers are converted."""
    return wanted if wanted and tensor.dtype in FLOATS else tensor.dtype


def write_tensors(
    placed: Sequence[TensorPlacement],
    world: ExportSource,
    *,
    num_writers: int,
    wants_crc: bool = False,
) -> list[int]:
    """Writes all tensors; returns the CRC-32 of each in the same order, or 0 if not `wants_crc`.

    CheckpointError: a tensor is damaged; the files are incomplete.
    """
    casts = {(one.tensor.dtype, one.dtype): cast_of(one.tensor.dtype, one.dtype) for one in placed}
    fds = {path: os.open(path, os.O_WRONLY | os.O_CLOEXEC) for path in {one.path for one in placed}}
    own = threading.local()

    def write(one: TensorPlacement) -> int:
        if not hasattr(own, "reader"):
            own.reader = WholeTensorReader(world.images, world.note)
        cast = casts[one.tensor.dtype, one.dtype]
        return _write(fds[one.path], one, own.reader, cast, wants_crc=wants_crc)

    # The largest first, so that no thread is busy with one after the others have ended.
    sizes = [sum(chunk.box.num_items for chunk in one.tensor.chunks) for one in placed]
    order = sorted(range(len(placed)), key=lambda at: -sizes[at])
    pool = ThreadPoolExecutor(num_writers, thread_name_prefix="export")
    try:
        waiting = {at: pool.submit(write, placed[at]) for at in order}
        return [waiting[at].result() for at in range(len(placed))]
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        for fd in fds.values():
            os.close(fd)


def cast_of(source: str, target: str) -> Cast | None:
    """Returns the conversion between two dtypes; None if they are equal."""
    if source == target:
        return None
    import torch  # takes seconds

    from ftrun.worker.reshard.tensor_reader import readable
    from ftrun.worker.state.tensors import DTYPES, byte_view

    def cast(raw: memoryview) -> memoryview:
        converted: torch.Tensor = readable(raw, DTYPES[source]).to(DTYPES[target])
        return byte_view(converted).numpy().data

    return cast


def create_files(sizes: Mapping[Path, int]) -> None:
    for path, num_bytes in sizes.items():
        with path.open("xb") as file:
            file.truncate(num_bytes)


def write_at(fd: int, data: memoryview | bytes, at: int) -> None:
    left = memoryview(data).cast("B")
    while left:
        done = os.pwrite(fd, left, at)
        at += done
        left = left[done:]


def _write(
    fd: int, one: TensorPlacement, reader: WholeTensorReader, cast: Cast | None, *, wants_crc: bool
) -> int:
    at, crc = one.at, 0
    for part in reader.parts(one.tensor):
        data = part if cast is None else cast(part)
        write_at(fd, data, at)
        at += len(data)
        if wants_crc:
            crc = zlib.crc32(data, crc)
    return crc
