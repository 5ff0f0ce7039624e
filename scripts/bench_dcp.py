#!/usr/bin/env python3
"""Compare dcp.save and dcp.load in ftrun's memory with torch's files on tmpfs and on disk.

    python scripts/bench_dcp.py --mb 384 --json dcp.json

Two ranks have --mb of state each, without replicas, as with FSDP2. ftrun's writer and reader and
torch's FileSystemWriter and FileSystemReader run in turns in one process per rank. The torch writer
syncs its files, which is its default. ftrun's save ends when the snapshot is committed, torch's
when its files are synced. The loaded state is compared with the saved state outside the timed part.

save_speedup_tmpfs, save_speedup_disk    torch's time to save divided by ftrun's
load_speedup_tmpfs, load_speedup_disk    the same for load (files are in the page cache)
save_over_memcpy, load_over_memcpy       time of a warm Tensor.copy_ of the state, on all ranks
                                         at once, divided by ftrun's time
"""

import argparse
import json
import os
from pathlib import Path
from statistics import median
from typing import Any

import bench_common as bench

RANKS = 2
RUN_ID = f"bench-dcp-{os.getpid()}"
WAYS = ("ftrun", "tmpfs", "disk")
WORKER = Path(__file__).with_name("bench_dcp_worker.py")
MEMORY_NEEDED = 8  # times --mb on each rank: state, two slots, loaded, a copy, files, pages


def main() -> int:
    args = parse_arguments()
    bench.check_memory(MEMORY_NEEDED * RANKS * args.mb * 1e6)
    with bench.scratch(bench.TMPFS) as tmpfs, bench.scratch(args.disk) as disk:
        results = run(args, tmpfs, disk)
    report(results, args)
    return 0


def run(args: argparse.Namespace, tmpfs: Path, disk: Path) -> list[dict[str, Any]]:
    words: list[object] = ["--folder", tmpfs, "--tmpfs", tmpfs, "--disk", disk]
    words += ["--mb", args.mb, "--rounds", args.rounds]
    flags = ["--nproc-per-node", RANKS, "--run-id", RUN_ID]
    # A restart would mix two generations in one measurement.
    command = bench.ftrun_command(*flags, "--max-restarts", 0, WORKER, *words)
    files = bench.RankFiles(tmpfs, RANKS)
    with bench.launched("ftrun", command, tmpfs, args.deadline) as launcher:
        launcher.wait_for("the measurement", lambda: files.have("measured"))
        return [json.loads((tmpfs / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


def times(results: list[dict[str, Any]], way: str, what: str) -> list[float]:
    """The slowest rank's time of each turn."""
    return [max(turn) for turn in zip(*(r["ways"][way][what] for r in results), strict=True)]


def figures_of(results: list[dict[str, Any]]) -> dict[str, float]:
    copy_s = median(max(turn) for turn in zip(*(r["copy_s"] for r in results), strict=True))
    found = {}
    for what in ("save", "load"):
        own_s = median(times(results, "ftrun", f"{what}_s"))
        for way in WAYS[1:]:
            found[f"{what}_speedup_{way}"] = median(times(results, way, f"{what}_s")) / own_s
        found[f"{what}_over_memcpy"] = copy_s / own_s
    return found


def report(results: list[dict[str, Any]], args: argparse.Namespace) -> None:
    num_bytes = sum(result["bytes"] for result in results)
    rows, figures = [], figures_of(results)
    for way in WAYS:
        cells = [way if way == "ftrun" else f"torch's files, {way}"]
        for what in ("save_s", "load_s"):
            values = times(results, way, what)
            middle = median(values)
            shown = f"{middle:.3f} ({min(values):.3f} to {max(values):.3f})"
            cells += [shown, f"{num_bytes / middle / 1e9:.2f}"]
        rows.append(cells)
    head = ["", "save, s", "GB/s", "load, s", "GB/s"]
    title = (
        f"dcp.save and dcp.load of {num_bytes / 1e9:.2f} GB by {RANKS} ranks, {args.rounds} turns"
    )
    bench.show_table(title, head, rows)
    ratios = [[name, f"{value:.2f}"] for name, value in figures.items()]
    bench.show_table("Ratios", ["", ""], ratios)
    whats = ("save_s", "load_s")
    raw = {way: {w: bench.spread(times(results, way, w)) for w in whats} for way in WAYS}
    bench.finish(args.json, {**figures, "bytes": num_bytes, "times": raw})


def parse_arguments() -> argparse.Namespace:
    parser = bench.Parser(__doc__, timeout_s=600)
    parser.option("--mb", float, 384, "MB of state of one rank")
    parser.option("--rounds", int, 5, "number of turns after the first")
    parser.add_argument(
        "--disk", type=Path, default=bench.ROOT, help="folder on the disk to compare with"
    )
    return parser.parsed("mb", "rounds")


if __name__ == "__main__":
    bench.run_bench(main)
