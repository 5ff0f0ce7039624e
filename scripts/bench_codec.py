#!/usr/bin/env python3
"""Measure the cost of parity on one processor: in place, through pyeclib, and as a plain copy.

    python scripts/bench_codec.py --mb 128 --json codec.json

Each way uses one thread. The unit is GB of data per second of the thread's own processor time, so
that other load on the machine has little influence. The data exceed the cache, and all memory was
written once before. The ways run in turns; each ratio is the median of the ratios of the turns.

memcpy           one copy of the data: the reference
encode           all parity blocks of a stripe, in place
update           the same for one data block and one parity block at a time, as blocks arrive
rebuild          m lost data blocks of a stripe, in place
checked rebuild  the same with the digests of all fragments before and of the blocks after it
pyeclib encode   pyeclib's own call, on one piece of memory that holds the data of a stripe
pyeclib decode   pyeclib's own call, on the fragments it made, with m data fragments lost
"""

import ctypes
import random
import time
from collections.abc import Callable, Sequence
from itertools import product
from statistics import median
from typing import Any

import bench_common as bench

from ftrun.erasure.codec import Codec, choose_codec
from ftrun.erasure.fragments import (
    BlockDigest,
    Fragment,
    FragmentHeader,
    StripeId,
    block_digest,
    pack,
    run_digest,
)
from ftrun.erasure.pinned_buffers import PinnedBuffers
from ftrun.erasure.rebuild import StripeFacts, StripeWork
from ftrun.erasure.stripes import BLOCK_BYTES
from ftrun.ids import Generation, RunId, version

SHAPES = ((3, 1), (4, 2))
OF = StripeId(run_digest(RunId("bench")), version(0, 1), 0, 0)
MEASURE = "memcpy"

Way = Callable[[], None]
Job = tuple[StripeFacts, list[Fragment], dict[int, BlockDigest]]


def main() -> int:
    parser = bench.Parser(__doc__, timeout_s=60)
    parser.option("--mb", int, 128, "MB of data in total")
    parser.add_argument(
        "--block-kib", type=int, default=BLOCK_BYTES >> 10, help="KiB of a block of a stripe"
    )
    parser.option("--rounds", int, 5, "number of turns")
    args = parser.parsed()
    figures = codec_figures(
        SHAPES,
        num_bytes=args.mb * 1_000_000,
        block_bytes=args.block_kib << 10,
        rounds=args.rounds,
        deadline=args.deadline,
    )
    show_codecs(figures)
    bench.finish(args.json, {"codecs": figures})
    return 0


def codec_figures(
    shapes: Sequence[tuple[int, int]],
    *,
    num_bytes: int,
    block_bytes: int,
    rounds: int,
    deadline: bench.Deadline,
) -> list[dict[str, Any]]:
    """GB per second of processor time, and its ratio to memcpy, for each (k, m).

    Args:
        shapes: data and parity blocks of a stripe.
        num_bytes: size of the data, at least one stripe and larger than the cache.
        block_bytes: size of a block.
        rounds: turns of all ways.
        deadline: for the whole measurement.
    """
    found = []
    for k, m in shapes:
        stripes = StripeBench(k, m, block_bytes=block_bytes, num_bytes=num_bytes)
        stripes.check()
        taken_s: dict[str, list[float]] = {name: [] for name in stripes.ways}
        for _, (name, way) in product(range(rounds), stripes.ways.items()):
            deadline.check(f"{name} with {k}+{m}")
            started_s = time.thread_time()
            way()
            taken_s[name].append(time.thread_time() - started_s)
        found.append(stripes.figures(taken_s))
    return found


def show_codecs(figures: Sequence[dict[str, Any]]) -> None:
    """A row for each way, two columns for each (k, m)."""
    names = list(figures[0]["gb_per_cpu_s"])
    rows = []
    for name in names:
        cells = [
            (f"{one['gb_per_cpu_s'][name]:.2f}", f"{one['over_memcpy'][name]:.2f}")
            for one in figures
        ]
        rows.append([name, *(cell for pair in cells for cell in pair)])
    shapes = [f"{one['data']}+{one['parity']}" for one in figures]
    head = ["", *(word for shape in shapes for word in (shape, "over memcpy"))]
    block_kib = figures[0]["block_bytes"] >> 10
    codec = figures[0]["codec"]
    title = f"GB of data per second of processor time, blocks of {block_kib} KiB, codec {codec}"
    bench.show_table(title, head, rows)


class StripeBench:
    """All ways over the same stripes, which are contiguous in memory."""

    def __init__(self, k: int, m: int, *, block_bytes: int, num_bytes: int) -> None:
        from pyeclib.ec_iface import ECDriver

        self._k, self._m, self._block_bytes = k, m, block_bytes
        self._codec: Codec = choose_codec(k, m)
        self._driver = ECDriver(ec_type="isa_l_rs_cauchy", k=k, m=m)
        self._lost = range(min(k, m))
        # pyeclib accepts only bytes, so the data are bytes; nothing is written to them.
        whole = random.Random(1).randbytes(k * block_bytes)
        count = max(1, num_bytes // len(whole))
        self._segments = [whole[at:] + whole[:at] for at in range(count)]
        self._data = [_cut(memoryview(one), block_bytes) for one in self._segments]
        self._parity = [_cut(_memory(m * block_bytes), block_bytes) for _ in range(count)]
        self._copy = [_cut(_memory(k * block_bytes), block_bytes) for _ in range(count)]
        pairs = zip(self._data, self._copy, strict=True)
        self._pinned = [PinnedBuffers(data, copy) for data, copy in pairs]
        self._jobs: list[Job] = []
        self._made: list[bytes] = []
        self.ways: dict[str, Way] = {
            MEASURE: self._memcpy,
            "encode": self._encode,
            "update": self._update,
            "rebuild": self._rebuild,
            "checked rebuild": self._checked_rebuild,
            "pyeclib encode": self._pyeclib_encode,
            "pyeclib decode": self._pyeclib_decode,
        }

    def check(self) -> None:
        """Run each of ftrun's ways once, which allocates all memory, and compare the bytes.

        Raises:
            BenchError: the bytes are wrong.
        """
        self._encode()
        self._jobs = [*map(self._job, self._data, self._parity)]
        made = self._driver.encode(self._segments[0])
        self._made = [one for i, one in enumerate(made) if i not in self._lost]
        expected = [one[-self._block_bytes :] for one in made[self._k :]]
        right = [self._parity[0] == expected, self._driver.decode(self._made) == self._segments[0]]
        self._update()
        right.append(self._parity[0] == expected)
        for way in (self._memcpy, self._rebuild, self._checked_rebuild):
            way()
            right.append(self._copy == self._data)
            for stripe, place in product(self._copy, self._lost):
                stripe[place][:] = bytes(self._block_bytes)
        if not all(right):
            raise bench.BenchError(f"{self._k}+{self._m} gives wrong bytes: {right}")

    def figures(self, taken_s: dict[str, list[float]]) -> dict[str, Any]:
        num_bytes = sum(map(len, self._segments))
        base = taken_s[MEASURE]
        return {
            "data": self._k,
            "parity": self._m,
            "block_bytes": self._block_bytes,
            "data_bytes": num_bytes,
            "codec": self._codec.name,
            "gb_per_cpu_s": {name: num_bytes / median(s) / 1e9 for name, s in taken_s.items()},
            "over_memcpy": {
                name: median(one / own for one, own in zip(base, s, strict=True))
                for name, s in taken_s.items()
            },
        }

    # --- the ways -------------------------------------------------------------------------------

    def _memcpy(self) -> None:
        for stripe in self._pinned:
            for source, target in zip(stripe.sources, stripe.targets, strict=True):
                ctypes.memmove(target, source, self._block_bytes)

    def _encode(self) -> None:
        for data, parity in zip(self._data, self._parity, strict=True):
            self._codec.encode(data, parity)

    def _update(self) -> None:
        for data, parity in zip(self._data, self._parity, strict=True):
            for (position, block), (j, target) in product(enumerate(data), enumerate(parity)):
                self._codec.update(position, block, j, target, first=position == 0)

    def _rebuild(self) -> None:
        for data, parity, copy in zip(self._data, self._parity, self._copy, strict=True):
            have = dict(enumerate([*data, *parity]))
            want = {place: copy[place] for place in self._lost}
            self._codec.rebuild({i: one for i, one in have.items() if i not in want}, want)

    def _checked_rebuild(self) -> None:
        for (facts, fragments, known), copy in zip(self._jobs, self._copy, strict=True):
            work = StripeWork(self._codec, facts, {place: copy[place] for place in self._lost})
            if not any(map(work.take, fragments)):
                raise work.refusal()
            if any(block_digest(copy[place]) != digest for place, digest in known.items()):
                raise bench.BenchError("a rebuilt block has another digest")

    def _pyeclib_encode(self) -> None:
        for segment in self._segments:
            self._driver.encode(segment)

    def _pyeclib_decode(self) -> None:
        # The fragments of one stripe serve for all stripes: separate ones would double the memory.
        for _ in self._segments:
            self._driver.decode(self._made)

    def _job(self, data: list[memoryview], parity: list[memoryview]) -> Job:
        """The arguments of a checked rebuild of a stripe."""
        digests = {i: block_digest(block) for i, block in enumerate([*data, *parity])}
        fragments = [
            Fragment(f"n{i}", i, pack(FragmentHeader(OF, Generation(0), i, digests[i])), block)
            for i, block in enumerate([*data, *parity])
            if i not in self._lost
        ]
        known = {i: digests[i] for i in self._lost}
        facts = StripeFacts(OF, tuple(f"n{i}" for i in digests), Generation(0))
        return facts, fragments, known


def _memory(num_bytes: int) -> memoryview:
    """New memory, each page of it written once."""
    return memoryview(bytearray(b"\1") * num_bytes)


def _cut(memory: memoryview, block_bytes: int) -> list[memoryview]:
    return [memory[at : at + block_bytes] for at in range(0, len(memory), block_bytes)]


if __name__ == "__main__":
    bench.run_bench(main)
