"""A rank's copy is written from its slot, while others are still captured and copied."""

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import xxhash

from ftrun.ids import Generation, Rank, RunId, Version, version
from ftrun.smp.checkpoint.live_capture import CaptureFilter
from ftrun.smp.checkpoint.storage.direct_file import BUFFER_BYTES, CopyBuffers, Throttle
from ftrun.smp.checkpoint.storage.storage import Retention
from ftrun.smp.checkpoint.write_job import WriteJob, WriterContext
from ftrun.smp.checkpoint.writer import CheckpointWriter
from ftrun.snapshot.layout import CopyTiming, LayoutEntry, make_layout
from ftrun.wire.shared_memory.arena import (
    Arena,
    ArenaShape,
    SlotHeader,
    SlotState,
    create_memfd,
    table_digest,
)

RANKS = 3
LAYOUT = make_layout([LayoutEntry("weight", "F32", (5_000_000,), CopyTiming.LAZY)], plain_bytes=10)
"""More than two buffers of the disk."""
STEP = version(0, 1)
BYTES_PER_S = 2.5 * BUFFER_BYTES


class Worker:
    """One rank that captures up to a given piece; its own number in every byte."""

    def __init__(self, rank: int) -> None:
        self.rank = Rank(rank)
        shape = ArenaShape(rank, RANKS, LAYOUT.image_bytes, len(LAYOUT.pieces), 9)
        self.fd = create_memfd(shape)
        self.arena = Arena(self.fd, writable=True)
        self.arena.begin_copy(0, self._header(SlotState.COPYING, STEP))
        image, table = self.arena.image(0), self.arena.table(0)
        start = len(LAYOUT.header)
        image[:start] = LAYOUT.header
        for at, piece in enumerate(LAYOUT.pieces):
            here = image[start + piece.offset :][: piece.num_bytes]
            here[:] = bytes([rank + 1]) * piece.num_bytes
            table[at] = xxhash.xxh3_64_intdigest(here)
        del image, table

    def seal(self) -> None:
        digest = table_digest(self.arena.table(0))
        self.arena.write_header(0, self._header(SlotState.SEALED, STEP, digest))

    def _header(self, state: SlotState, at: Version, digest: int = 0) -> SlotHeader:
        sealed_ns = time.monotonic_ns() if state is SlotState.SEALED else 0  # as a worker's
        return SlotHeader(state, at.generation, at.step, LAYOUT.image_bytes, digest, sealed_ns)


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    made = [Worker(rank) for rank in range(RANKS)]
    yield made
    for one in made:
        one.arena.close()
        os.close(one.fd)


@pytest.mark.slow
@pytest.mark.parametrize("last", [1, 2])  # rank 0 is written first, and waits for its seal
@pytest.mark.parametrize("first", range(RANKS))
def test_whichever_rank_seals_first_or_last_each_file_is_its_own(
    workers: list[Worker], tmp_path: Path, first: int, last: int
) -> None:
    throttle = Throttle(threading.Event())
    throttle.bytes_per_s = BYTES_PER_S
    writer = CheckpointWriter(WriterContext(RunId("run"), CopyBuffers(lambda: 1 << 40), throttle))
    follow = CaptureFilter(
        Generation(0),
        is_over=lambda: False,
        hurries=lambda: False,
        wait_s=3.0,
        is_committed=lambda _: True,
        from_step=0,
    )
    ranks = tuple(one.rank for one in workers)
    order = WriteJob(str(tmp_path), ranks, RANKS, Retention(3), follow=follow)
    if first != last:
        workers[first].seal()  # before the writer looks
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(writer.write, {one.rank: [one.fd] for one in workers}, order)
        time.sleep(0.2)
        for one in workers:
            if one.rank not in (first, last):
                one.seal()
        give_up_s = time.monotonic() + 20
        while not list(tmp_path.glob(".tmp-*/*rank-00001*")) and time.monotonic() < give_up_s:
            time.sleep(0.005)
        workers[last].seal()
        path = Path(writing.result(60).path)
    start = len(LAYOUT.header)
    for one in workers:
        data = (path / f"rank-{one.rank:05d}.safetensors").read_bytes()
        whole = sum(piece.num_bytes for piece in LAYOUT.pieces)
        assert data[start : start + whole].count(bytes([one.rank + 1])) == whole
