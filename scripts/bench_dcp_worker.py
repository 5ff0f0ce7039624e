"""The worker of bench_dcp.py: dcp.save and dcp.load in ftrun's memory and in torch's files.

Each rank has its own state without replicas, as with FSDP2. The ways run in turns, save and then
load. A time runs from a barrier until the last rank has finished. Writes the raw times to
rank<N>.json; bench_dcp.py computes the figures.
"""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bench_notes import Notes, arguments
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

import ftrun

TENSORS = 24


def main() -> None:
    args = arguments(None, tmpfs=Path, disk=Path, mb=float, rounds=int)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    state = made(args.mb, rank)
    ways = {
        "ftrun": Way(lambda _: ftrun.dcp.Writer(), lambda _: ftrun.dcp.Reader()),
        "tmpfs": Way(FileSystemWriter, FileSystemReader, args.tmpfs),
        "disk": Way(FileSystemWriter, FileSystemReader, args.disk),
    }
    for number in range(1 + args.rounds):
        for way in ways.values():
            way.turn(state, is_counted=number > 0)
    copies = [torch.empty_like(tensor) for tensor in state.values()]
    copy_s = [timed(lambda: copy(copies, state)) for _ in range(1 + args.rounds)][1:]
    found = {
        "bytes": sum(tensor.nbytes for tensor in state.values()),
        "copy_s": copy_s,
        "ways": {name: {"save_s": w.save_s, "load_s": w.load_s} for name, w in ways.items()},
    }
    (args.folder / f"rank{rank}.json").write_text(json.dumps(found))
    Notes(args.folder / f"rank{rank}.jsonl").write("measured", generation=0)
    dist.barrier()
    dist.destroy_process_group()


class Way:
    """One pair of writer and reader, and the times of its turns."""

    def __init__(
        self,
        writer: Callable[[str], StorageWriter],
        reader: Callable[[str], StorageReader],
        folder: Path | None = None,
    ) -> None:
        self._writer, self._reader, self._folder = writer, reader, folder
        self.save_s: list[float] = []
        self.load_s: list[float] = []

    def turn(self, state: dict[str, Tensor], *, is_counted: bool) -> None:
        path = str(self._folder / "checkpoint") if self._folder is not None else ""
        save_s = timed(lambda: dcp.save(state, storage_writer=self._writer(path)))
        loaded = {name: torch.empty_like(tensor) for name, tensor in state.items()}
        for tensor in loaded.values():
            tensor.zero_()  # its pages exist before the clock starts
        load_s = timed(lambda: dcp.load(loaded, storage_reader=self._reader(path)))
        assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
        dist.barrier()
        if path and dist.get_rank() == 0:
            shutil.rmtree(path)
        dist.barrier()
        if is_counted:
            self.save_s.append(save_s)
            self.load_s.append(load_s)


def made(megabytes: float, rank: int) -> dict[str, Tensor]:
    torch.manual_seed(rank)
    rows = max(1, int(megabytes * 1e6 / 4 / TENSORS / 1024))
    return {f"rank{rank}.layer{at}": torch.randn(rows, 1024) for at in range(TENSORS)}


def copy(targets: list[Tensor], state: dict[str, Tensor]) -> None:
    for target, tensor in zip(targets, state.values(), strict=True):
        target.copy_(tensor)


def timed(act: Callable[[], object]) -> float:
    """Seconds until the last rank has finished."""
    os.sync()
    dist.barrier()
    started_s = time.monotonic()
    act()
    dist.barrier()
    return time.monotonic() - started_s


main()
