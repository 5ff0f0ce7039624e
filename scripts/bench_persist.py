#!/usr/bin/env python3
"""Measure checkpoint writes of committed snapshots; compare with dd, torch.save and dcp.save.

    python scripts/bench_persist.py --gb 2 --dir /data --json persist.json
    python scripts/bench_persist.py --gb 0.1 --every-step  # only the cost of persisting each step

All write the same bytes to the same file system, in turns. Each time ends when the files are on
disk (fsync). The files are removed before the next turn. Each ratio is the median of the ratios of
the turns.

ftrun       the SMP's writer: all ranks' arenas, digests compared during the write, index, renames
dd          dd oflag=direct conv=fsync of the same bytes, from memory; without oflag if the file
            system rejects it
torch.save  two files, one after the other, and fsync
dcp.save    torch.distributed.checkpoint with its file writer, which syncs
read back   the SMP's loader: into new arenas, all digests compared; relative to a warm copy

Then a training of two ranks runs. Every few seconds a checkpoint is written at a limit of
--limit-mb a second. The result is the step time during a checkpoint divided by the step time
between two. Steps are counted in whole intervals from one snapshot to the next, so that both have
the same share of snapshots, except that a checkpoint adds the one that it requests.

With --every-step a training of two ranks runs in turns: without snapshots, with a snapshot of each
step, and with a checkpoint of each step (--checkpoint-every 1step). step_slowdown is the mean step
time of the third over that of the first, less 1; step_slowdown_of_disk that over the second.
Versions that the storage has no time for are skipped, and counted.

With --replicated all ranks hold the same state, and each stores its share. bytes_over_state is the
size of the checkpoint divided by the state; writer_imbalance the largest file divided by the mean.

With --nodes N only these two are measured, on a training of --ranks ranks on each of N nodes of a
virtual cluster.
"""

import argparse
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from math import hypot
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import bench_common as bench
import xxhash
from nodes_run import NodesRun
from virtual_cluster import VirtualCluster

from ftrun.ids import Rank, RunId
from ftrun.smp.checkpoint.load import LoadJob, load_checkpoint
from ftrun.smp.checkpoint.storage.direct_file import CopyBuffers, Throttle
from ftrun.smp.checkpoint.storage.storage import Retention
from ftrun.smp.checkpoint.write_job import WriteJob, WriterContext
from ftrun.smp.checkpoint.writer import CheckpointWriter
from ftrun.snapshot.layout import CopyTiming, Layout, LayoutEntry, make_layout, parse_header
from ftrun.snapshot.replica_shares import shares_of
from ftrun.wire.shared_memory.arena import (
    Arena,
    ArenaShape,
    SlotHeader,
    SlotState,
    create_memfd,
    table_digest,
)

TENSORS = 32
ROWS = 1000
WAYS = ("ftrun", "dd", "torch.save", "dcp.save")
WORKER = bench.ROOT / "scripts" / "bench_steps_worker.py"
TRAINING_RANKS = 2
WRITING_S = 4.0
"""Length of the intervals with and without a checkpoint write during a training."""
SNAPSHOT_EVERY = 4
LEAST_ROUNDS = 10
EVERY_STEP: dict[str, list[object]] = {
    "plain": ["--no-snapshots"],
    "in memory": ["--snapshot-every", 1],
    "persisted": ["--snapshot-every", 1, "--checkpoint-every", "1step"],
}
FIRST_STEPS = 10
"""These are left out: they allocate memory, and verify the first snapshots."""
CHECKPOINTS = 4
_FREE = 4
"""Multiple of the bytes that must be free on disk and in memory."""


def main() -> int:
    parser = bench.Parser(__doc__, timeout_s=900)
    parser.option("--gb", float, 2.0, "GB of state in total")
    parser.add_argument(
        "--dir", type=Path, default=Path.cwd(), help="folder on the disk to measure"
    )
    parser.option("--rounds", int, 5, "number of turns")
    parser.option("--limit-mb", float, 100.0, "write limit in MB per second")
    parser.option("--step-seconds", float, 180.0, "seconds of training")
    parser.option("--ranks", int, 2, "ranks that wrote the state")
    parser.add_argument(
        "--replicated", action="store_true", help="all ranks hold the same state and share it"
    )
    parser.option("--nodes", int, 1, "nodes of a virtual cluster; 1: none")
    parser.add_argument(
        "--every-step", action="store_true", help="measure a checkpoint of each step, nothing else"
    )
    args = parser.parsed()
    if args.every_step:
        figures = every_step(args)
        show_every_step(figures)
        bench.finish(args.json, figures)
        return 0
    num_bytes = int(args.gb * 1e9)
    if shutil.disk_usage(args.dir).free < _FREE * num_bytes:
        raise bench.BenchError(f"{args.dir} has less than {_FREE} times {args.gb:g} GB free")
    if args.nodes > 1:
        with bench.scratch(args.dir) as disk:  # /dev/shm is each node's own
            over_nodes = checkpoint_of_nodes(disk, args)
        show_files(over_nodes)
        bench.finish(args.json, over_nodes)
        return 0
    layouts = layouts_of(num_bytes, args.ranks, is_replicated=args.replicated)
    with bench.scratch(args.dir) as disk, bench.scratch() as memory, arenas(layouts) as fds:
        figures = measure(fds, disk, memory, args)
    figures["bytes_over_state"] = sum(figures["written_bytes"]) / num_bytes
    if args.step_seconds > 0:
        with bench.scratch(args.dir) as disk, bench.scratch() as memory:
            figures |= beside_steps(disk, memory, args)
    show(figures)
    bench.finish(args.json, figures)
    return 0


# --- the ways ---------------------------------------------------------------------------------


def measure(
    fds: dict[Rank, list[int]], disk: Path, memory: Path, args: argparse.Namespace
) -> dict[str, Any]:
    source = memory / "bytes"
    images = [Arena(fd[0], writable=False).image(0) for fd in fds.values()]
    with source.open("wb") as file:
        for image in images:
            file.write(image)
    total = sum(len(image) for image in images)
    states = [state_of(image) for image in images]
    turns: list[dict[str, float]] = []
    written: list[int] = []
    for turn in range(args.rounds + 1):
        rates: dict[str, float] = {}
        for way in WAYS:
            args.deadline.check(way)
            folder = disk / way.replace(".", "-")
            folder.mkdir()
            rates[way] = total / seconds(
                lambda way=way, at=folder: write(way, at, fds, source, states)
            )
            if way == "ftrun":
                written = [file.stat().st_size for file in folder.rglob("rank-*.safetensors")]
                rates["read back"] = total / seconds(lambda at=folder: read_back(at, len(fds)))
            shutil.rmtree(folder)
            os.sync()
        rates["memcpy"] = total / seconds(lambda: copy(images))
        if turn:  # the first one allocates memory and finds the disk's blocks
            turns.append(rates)
    ratio = lambda a, b: median(turn[a] / turn[b] for turn in turns)  # noqa: E731
    return {
        "gb_per_s": {way: bench.spread([turn[way] / 1e9 for turn in turns]) for way in turns[0]},
        "write_over_dd": ratio("ftrun", "dd"),
        "write_over_torch_save": ratio("ftrun", "torch.save"),
        "write_over_dcp_save": ratio("ftrun", "dcp.save"),
        "read_over_memcpy": ratio("read back", "memcpy"),
        "total_bytes": total,
        "written_bytes": written,
        "writer_imbalance": max(written) / mean(written),
    }


def seconds(act: Callable[[], None]) -> float:
    started_s = time.perf_counter()
    act()
    return time.perf_counter() - started_s


def write(
    way: str, folder: Path, fds: dict[Rank, list[int]], source: Path, states: list[dict[str, Any]]
) -> None:
    """One turn of one way; the data are on disk when it returns."""
    if way == "ftrun":
        means = WriterContext(RunId("bench"), CopyBuffers(lambda: 0), Throttle(threading.Event()))
        writer = CheckpointWriter(means)
        writer.write(fds, WriteJob(str(folder), tuple(fds), len(fds), Retention(1)))
    elif way == "dd":
        dd(source, folder / "file")
    elif way == "torch.save":
        import torch

        for rank, state in enumerate(states):
            with (folder / f"{rank}.pt").open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
    else:
        import torch.distributed.checkpoint as dcp

        both = {f"{rank}.{name}": one for rank, state in enumerate(states)
                for name, one in state.items()}  # fmt: skip
        dcp.save(both, checkpoint_id=folder, no_dist=True)


def dd(source: Path, target: Path) -> None:
    command = ["dd", f"if={source}", f"of={target}", "bs=8M", "conv=fsync", "status=none"]
    if subprocess.run([*command, "oflag=direct"], capture_output=True, check=False).returncode:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise bench.BenchError(f"dd: {done.stderr.strip()}")


def read_back(folder: Path, num_ranks: int) -> None:
    """Read as after a restart of the machine, but with the page cache warm."""
    job = LoadJob(num_ranks, [Rank(rank) for rank in range(num_ranks)], lambda _: None)
    loaded = load_checkpoint(str(folder), job, threading.Event())
    if loaded is None:
        raise bench.BenchError("what was written cannot be read")
    for fd in loaded.fds:
        os.close(fd)


def copy(images: list[memoryview]) -> None:
    for image in images:
        target = _COPIES.setdefault(len(image), bytearray(len(image)))
        memoryview(target)[:] = image


_COPIES: dict[int, bytearray] = {}


# --- during a training ------------------------------------------------------------------------


def beside_steps(disk: Path, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The step time while a checkpoint is written, relative to the step time between two."""
    run_id = f"bench-persist-{os.getpid()}"
    half_mb = args.limit_mb * WRITING_S / TRAINING_RANKS
    flags = ["--nproc-per-node", TRAINING_RANKS, "--run-id", run_id]
    flags += ["--checkpoint-dir", disk / "saved", "--snapshot-every", SNAPSHOT_EVERY]
    flags += ["--set", f"checkpoint.max_bytes_per_s={args.limit_mb * 1e6}"]
    flags += ["--set", f"checkpoint.every_s={2 * WRITING_S}"]
    words = training_words(folder, half_mb)
    command = bench.ftrun_command(*flags, *words)
    with bench.launched("training", command, folder, args.deadline) as launcher:
        end_s = time.monotonic() + args.step_seconds
        launcher.wait_for("the training", lambda: time.monotonic() > end_s)
        (folder / "go").touch()
        launcher.wait_for_end()
        journal = bench.read_journal(folder, run_id)
    written = [one for one in journal if one["kind"] == "checkpoint_written"]
    lines = bench.read_lines(folder / "rank0.jsonl")
    at_s = {one["step"]: one["ns"] / 1e9 for one in lines if "step" in one}
    spans = [(one["monotonic_s"] - one["seconds"], one["monotonic_s"]) for one in written]
    gaps = [(one[1], after[0]) for one, after in pairwise(spans)]
    # The first is written while the training warms up.
    inside = [one for span in spans[1:-1] for one in rounds_s(at_s, *span)]
    between = [one for gap in gaps[1:-1] for one in rounds_s(at_s, *gap)]
    if min(len(inside), len(between)) < LEAST_ROUNDS:
        raise bench.BenchError(f"only {len(written)} checkpoints were written; more --step-seconds")
    ratio = mean(inside) / mean(between)
    errors = [stdev(some) / mean(some) / len(some) ** 0.5 for some in (inside, between)]
    return {
        "step_slowdown": ratio - 1,
        "step_slowdown_error": ratio * hypot(*errors),
        "step_rounds": [len(inside), len(between)],
        "step_s": mean(between) / SNAPSHOT_EVERY,
    }


def every_step(args: argparse.Namespace) -> dict[str, Any]:
    """Mean step times of the ways of `EVERY_STEP`, and what became of the steps' versions."""
    run_s = args.step_seconds / args.rounds / len(EVERY_STEP)
    means: dict[str, list[float]] = {way: [] for way in EVERY_STEP}
    counts = {"steps": 0, "written": 0, "skipped": 0}
    for _ in range(args.rounds):
        for way, flags in EVERY_STEP.items():
            with bench.scratch(args.dir) as disk, bench.scratch() as folder:
                where = ["--checkpoint-dir", disk / "saved"] if way == "persisted" else []
                step_s, found = trained(folder, [*flags, *where], run_s, args)
            means[way].append(step_s)
            for key in counts:
                counts[key] += found[key] if way == "persisted" else 0
    over = lambda way: [a / b - 1 for a, b in zip(means["persisted"], means[way], strict=True)]  # noqa: E731
    return {
        "step_slowdown": median(over("plain")),
        "step_slowdown_of_disk": median(over("in memory")),
        "step_slowdowns": over("plain"),
        "step_s": {way: bench.spread(some) for way, some in means.items()},
        "state_mb": args.gb * 1e3,
        **counts,
    }


def trained(
    folder: Path, flags: list[object], seconds: float, args: argparse.Namespace
) -> tuple[float, dict[str, int]]:
    """Train for this time after the first steps; return the mean step time, and counts."""
    run_id = f"bench-persist-{os.getpid()}"
    words = training_words(folder, args.gb * 1e3 / TRAINING_RANKS)
    flags = ["--nproc-per-node", TRAINING_RANKS, "--run-id", run_id, *flags]
    command = bench.ftrun_command(*flags, *words)
    notes = folder / "rank0.jsonl"
    with bench.launched("training", command, folder, args.deadline) as launcher:
        launcher.wait_for(
            "the first steps",
            lambda: notes.exists() and len(bench.read_lines(notes)) > FIRST_STEPS,
        )
        launcher.pause(seconds)
        checkpoint = bench.ftrun_status(run_id).get("checkpoint") or {}
        (folder / "go").touch()
        launcher.wait_for_end()
        written = [one for one in bench.read_journal(folder, run_id)
                   if one["kind"] == "checkpoint_written"]  # fmt: skip
    at_ns = [one["ns"] for one in bench.read_lines(notes) if "step" in one][FIRST_STEPS:]
    if len(at_ns) < LEAST_ROUNDS:
        raise bench.BenchError(f"only {len(at_ns)} steps were made; more --step-seconds, less --gb")
    counts = {
        "steps": len(at_ns) + FIRST_STEPS,
        "written": len(written),
        "skipped": checkpoint.get("skipped", 0),
    }
    return (at_ns[-1] - at_ns[0]) / 1e9 / (len(at_ns) - 1), counts


def show_every_step(figures: dict[str, Any]) -> None:
    rows = [(way, *bench.cells(one, ".4f")) for way, one in figures["step_s"].items()]
    bench.show_table("step time in s", ("training", "median", "least", "most"), rows)
    print(
        f"\n  step_slowdown {figures['step_slowdown']:.3f}, of the disk alone "
        f"{figures['step_slowdown_of_disk']:.3f}; {figures['written']} of {figures['steps']} steps "
        f"written, {figures['skipped']} skipped; state of {figures['state_mb']:.0f} MB"
    )


def rounds_s(at_s: dict[int, float], begin_s: float, end_s: float) -> list[float]:
    """Duration of each interval of steps, from one snapshot to the next, within this time.

    Args:
        at_s: the end of each step, by its number.
        begin_s: of the time, on the same clock.
        end_s: of the time.
    """
    ends = [step for step in at_s if step % SNAPSHOT_EVERY == 0 and step + SNAPSHOT_EVERY in at_s]
    rounds = [(at_s[step], at_s[step + SNAPSHOT_EVERY]) for step in ends]
    return [end - begin for begin, end in rounds if begin_s <= begin and end <= end_s]


# --- over several nodes -----------------------------------------------------------------------


def training_words(folder: Path, state_mb: float, *, replicated: bool = False) -> list[Any]:
    """The training and its arguments; `state_mb`: of each rank."""
    words = [WORKER, "--folder", folder, "--state-mb", state_mb, "--attach", 1]
    return [*words, "--replicated", int(replicated), "--gradient-mb", 0]


def checkpoint_of_nodes(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The size of a checkpoint of a training over several nodes, and of its files."""
    ranks = args.nodes * args.ranks
    state_bytes = int(args.gb * 1e9)
    own_mb = state_bytes / 1e6 / (1 if args.replicated else ranks)
    words = training_words(folder, own_mb, replicated=args.replicated)
    flags = ["--nproc-per-node", args.ranks, "--erasure", "none"]
    flags += ["--checkpoint-dir", folder / "saved", "--checkpoint-every", WRITING_S]
    with VirtualCluster(args.nodes) as cluster:
        run = NodesRun(cluster, folder, words, args.deadline, members=args.nodes, flags=flags)
        run.start_all()
        # In the first ones the ranks of a node may still hold whole replicas.
        run.wait_for("checkpoints", lambda: len(run.journals("checkpoint_written")) >= CHECKPOINTS)
        path = (folder / "saved" / "latest").resolve()
        sizes = {file.name: file.stat().st_size for file in path.iterdir()}
        run.finish()
    files = [size for name, size in sizes.items() if not name.endswith((".digests", ".json"))]
    return {
        "nodes": args.nodes,
        "ranks": ranks,
        "state_bytes": state_bytes,
        "written_bytes": files,
        "bytes_over_state": sum(sizes.values()) / state_bytes,
        "writer_imbalance": max(files) / mean(files),
    }


# --- what is written --------------------------------------------------------------------------


@contextmanager
def arenas(layouts: list[Layout]) -> Iterator[dict[Rank, list[int]]]:
    """One arena for each rank, with a sealed version of random bytes."""
    made: dict[Rank, list[int]] = {}
    try:
        for rank, layout in enumerate(layouts):
            shape = ArenaShape(rank, len(layouts), layout.image_bytes, len(layout.pieces), 1)
            made[Rank(rank)] = [create_memfd(shape)]
            fill(made[Rank(rank)][0], layout)
        yield made
    finally:
        for fds in made.values():
            for fd in fds:
                os.close(fd)


def layouts_of(num_bytes: int, num_ranks: int, *, is_replicated: bool) -> list[Layout]:
    """The layout of each rank; `num_bytes` is the state of all ranks, stored once."""
    columns = num_bytes // (1 if is_replicated else num_ranks) // TENSORS // 4 // ROWS
    entries = [
        LayoutEntry(f"weight.{at}", "F32", (ROWS, columns), CopyTiming.LAZY)
        for at in range(TENSORS)
    ]
    if not is_replicated:
        return [make_layout(entries, plain_bytes=1000)] * num_ranks
    shares = shares_of(entries, num_ranks)
    return [
        make_layout([rows[one.name].of(one) for one in entries], plain_bytes=1000)
        for rows in shares
    ]


def fill(fd: int, layout: Layout) -> None:
    arena = Arena(fd, writable=True)
    image, table, start = arena.image(0), arena.table(0), len(layout.header)
    image[:start] = layout.header
    block = os.urandom(1 << 24)
    for at in range(start, len(image), len(block)):
        image[at : at + len(block)] = block[: len(image) - at]
    for index, piece in enumerate(layout.pieces):
        at = start + piece.offset
        table[index] = xxhash.xxh3_64_intdigest(image[at : at + piece.num_bytes])
    header = SlotHeader(SlotState.SEALED, 0, 1, len(image), table_digest(table), 1)
    arena.write_header(0, header)
    del image, table
    arena.close()


def state_of(image: memoryview) -> dict[str, Any]:
    import torch

    layout, start = parse_header(image)
    return {
        entry.name: torch.frombuffer(
            image, dtype=torch.uint8, count=entry.num_bytes, offset=start + entry.offset
        )
        for entry in layout.entries
        if entry.num_bytes
    }


def show(figures: dict[str, Any]) -> None:
    rates = figures["gb_per_s"]
    dd_rate = rates["dd"]["median"]
    rows = [
        (way, f"{one['median']:.2f}", f"{one['min']:.2f} to {one['max']:.2f}",
         f"{one['median'] / dd_rate:.2f}")
        for way, one in rates.items()
    ]  # fmt: skip
    gb = figures["total_bytes"] / 1e9
    bench.show_table(f"{gb:.2f} GB, on disk", ("way", "GB/s", "range", "over dd"), rows)
    show_files(figures)
    print(
        f"\n  writing over dd {figures['write_over_dd']:.2f}, over torch.save "
        f"{figures['write_over_torch_save']:.2f}, over dcp.save "
        f"{figures['write_over_dcp_save']:.2f}; reading over a warm copy "
        f"{figures['read_over_memcpy']:.2f}"
    )
    if "step_slowdown" in figures:
        inside, between = figures["step_rounds"]
        print(
            f"  steps while one is written, over those between two: "
            f"{1 + figures['step_slowdown']:.3f}, standard error "
            f"{figures['step_slowdown_error']:.3f}; {inside} and {between} rounds of "
            f"{SNAPSHOT_EVERY} steps of {figures['step_s']:.2f} s"
        )


def show_files(figures: dict[str, Any]) -> None:
    print(
        f"\n  bytes over state {figures['bytes_over_state']:.4f}, largest file over mean "
        f"{figures['writer_imbalance']:.4f}"
    )


if __name__ == "__main__":
    bench.run_bench(main)
