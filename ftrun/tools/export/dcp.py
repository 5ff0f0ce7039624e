"""Writes a folder for torch.distributed.checkpoint, which all of torch's readers can load.

torch plans and writes. Each tensor is read when torch writes it, so that few are in memory. torch's
writer keeps all tensors of a file until the file is closed, so that the size of files is limited.

Source: torch.distributed.checkpoint, `FileSystemWriter` and `DefaultSavePlanner` (read in 2.13).
"""

import threading
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ftrun.sharding.source_index import WholeTensor
from ftrun.tools.export.source import ExportSource, WholeTensorReader
from ftrun.tools.export.tensor_writer import Cast, cast_of
from ftrun.worker.reshard.tensor_reader import readable
from ftrun.worker.state.tensors import DTYPES

FILE_BYTES = 256 << 20


class Placeholders:
    """Placeholders for tensors in a state dict, which are read when torch writes them."""

    def __init__(self, world: ExportSource) -> None:
        self._world = world
        self._meant: dict[int, tuple[WholeTensor, Cast | None]] = {}
        self._own = threading.local()

    def make(self, _name: str, tensor: WholeTensor, dtype: str) -> torch.Tensor:
        made = torch.empty(tensor.shape, dtype=DTYPES[dtype], device="meta")
        self._meant[id(made)] = (tensor, cast_of(tensor.dtype, dtype))
        return made

    def read(self, placeholder: torch.Tensor) -> torch.Tensor:
        if not hasattr(self._own, "reader"):
            self._own.reader = WholeTensorReader(self._world.images, self._world.note)
        tensor, cast = self._meant[id(placeholder)]
        if 0 in tensor.shape:
            return torch.empty_like(placeholder, device="cpu")
        raw = memoryview(self._own.reader.everything(tensor))
        data = raw if cast is None else cast(raw)
        return readable(data, placeholder.dtype).view(tensor.shape)


def write_dcp(
    folder: Path, tree: dict[str, Any], placeholders: Placeholders, *, num_writers: int
) -> None:
    folder.mkdir()
    try:
        with warnings.catch_warnings():
            # This is one process, as `no_dist` says.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            save(
                tree,
                storage_writer=_Writer(folder, num_writers),
                planner=_Planner(placeholders),
                no_dist=True,
            )
    except CheckpointException as error:  # torch's wrapper of the errors of all ranks
        first, _ = next(iter(error.failures.values()))
        raise _behind(first) from error


def _behind(error: BaseException) -> BaseException:
    """Returns the error of the file system, if it caused an error of torch's writer in C++."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return found or error


class _Planner(DefaultSavePlanner):
    """torch's planner, with tensors from a checkpoint."""

    def __init__(self, placeholders: Placeholders) -> None:
        super().__init__()
        self._placeholders = placeholders

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = super().lookup_object(index)
        is_placeholder = isinstance(found, torch.Tensor) and found.is_meta
        return self._placeholders.read(found) if is_placeholder else found


class _Writer(FileSystemWriter):
    """torch's writer in several threads, each of which writes parts of the plan.

    The parts do not depend on the number of threads.
    """

    def __init__(self, folder: Path, num_writers: int) -> None:
        super().__init__(folder)
        self._num_writers = num_writers

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        def write(numbered: tuple[int, list[WriteItem]]) -> list[WriteResult]:
            at, items = numbered
            storage_data = replace(plan.storage_data, prefix=f"__{at}_")
            part = replace(plan, items=items, storage_data=storage_data)
            written: list[WriteResult] = FileSystemWriter.write_data(self, part, planner).wait()
            return written

        pool = ThreadPoolExecutor(self._num_writers, thread_name_prefix="export")
        try:
            waiting = [pool.submit(write, one) for one in enumerate(_cut(plan.items))]
            found = [result for one in waiting for result in one.result()]
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        done: Future[list[WriteResult]] = Future()
        done.set_result(found)
        return done


def _cut(items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    groups: list[list[WriteItem]] = [[]]
    room = FILE_BYTES
    for item in items:
        num_bytes = _num_bytes(item)
        if groups[-1] and num_bytes > room:
            groups.append([])
            room = FILE_BYTES
        groups[-1].append(item)
        room -= num_bytes
    return groups


def _num_bytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
