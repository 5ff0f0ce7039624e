#!/usr/bin/env python3
"""Measure the cost of monitoring: in the steps of a run, and on the processors.

    python scripts/bench_monitor.py --json monitor.json

Two ranks under DDP on one node, runs with `monitor.enabled` on and off in turns. Figures of each
run:

step_ms   the median time of a step, of both ranks together
agent     processor time of the agent during the steps, as a fraction of a core
server    processor time of the threads in the ranks that serve the flight recorder

Required: less than 0.5 % of a core for each rank (the additional time of the agent, and the threads
in the ranks), and less than 1 % of a step's time.
"""

import argparse
import contextlib
import math
import statistics
import time
from itertools import pairwise
from pathlib import Path

import bench_common as bench
import psutil

RANKS = 2
WORKER = bench.ROOT / "scripts" / "bench_monitor_worker.py"
MAX_CORE_PER_RANK = 0.005
MAX_STEP_RATIO = 1.01


def main() -> int:
    args = parse_arguments()
    rows: dict[str, list[dict[str, float]]] = {"off": [], "on": []}
    with bench.scratch() as folder:
        for turn in range(args.rounds):
            for name in rows if turn % 2 == 0 else reversed(rows):
                row = measure(name, folder / f"{name}{turn}", args)
                rows[name].append(row)
                print(f"{name:3} {turn + 1}: {as_text(row)}", flush=True)
    report(rows, args)
    return 0


def measure(name: str, folder: Path, args: argparse.Namespace) -> dict[str, float]:
    folder.mkdir()
    flags = ["--nproc-per-node", RANKS, "--run-id", f"bench-monitor-{name}", "--max-restarts", 0]
    flags += ["--set", "snapshot.every=4"]  # with auto, each run may choose another interval
    flags += ["--set", f"monitor.enabled={'true' if name == 'on' else 'false'}"]
    command = bench.ftrun_command(*flags, WORKER, "--folder", folder, "--pace", args.pace)
    readers = bench.RankFiles(folder, RANKS).readers
    with bench.launched("ftrun", command, folder, args.deadline) as launcher:
        launcher.wait_for("the first steps", lambda: _steps(readers) > args.warm_up)
        before, started_s = _spent(launcher), time.monotonic()
        launcher.pause(args.seconds)
        after, took_s = _spent(launcher), time.monotonic() - started_s
        (folder / "go").touch()
        launcher.wait_for_end()
    times_ms = [
        (later["ns"] - earlier["ns"]) / 1e6
        for reader in readers
        for earlier, later in pairwise(reader.of("step")[args.warm_up :])
    ]
    return {
        "step_ms": statistics.median(times_ms),
        "steps": float(len(times_ms)),
        "agent": (after["agent"] - before["agent"]) / took_s,
        "server": (after["server"] - before["server"]) / took_s,
    }


def _steps(readers: list[bench.NotesReader]) -> int:
    return min(len(reader.of("step")) for reader in readers)


def _spent(launcher: bench.Launcher) -> dict[str, float]:
    """Processor seconds of the agent, and of the threads in the ranks that serve it."""
    launcher.note_family()
    spent = {"agent": 0.0, "server": 0.0}
    for one in launcher.family.values():
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
            process = Path(f"/proc/{one.pid}")
            name = (process / "comm").read_text()
            if name == "ftrun-agent\n":
                times = one.cpu_times()
                spent["agent"] += times.user + times.system
            elif name.startswith("ftrun-rank"):
                spent["server"] += _servers_s(process)
    return spent


def _servers_s(process: Path) -> float:
    """Of all these threads; ticks of 10 ms would be too coarse."""
    total_ns = 0
    for folder in (process / "task").iterdir():
        if (folder / "comm").read_text().startswith("pt_workerserver"):
            total_ns += int((folder / "schedstat").read_text().split()[0])
    return total_ns / 1e9


def as_text(row: dict[str, float]) -> str:
    return (
        f"{row['step_ms']:.2f} ms a step, agent {row['agent']:.4f} cores, "
        f"servers {row['server']:.4f} cores"
    )


def report(rows: dict[str, list[dict[str, float]]], args: argparse.Namespace) -> None:
    middle = {
        name: {key: statistics.median(row[key] for row in of) for key in of[0]}
        for name, of in rows.items()
    }
    # In pairs: other load on the machine changes slowly.
    pairs = [
        on["step_ms"] / off["step_ms"] for on, off in zip(rows["on"], rows["off"], strict=True)
    ]
    ratio = statistics.median(pairs)
    by_chance = statistics.stdev(pairs) / len(pairs) ** 0.5 if len(pairs) > 1 else math.nan
    more = middle["on"]["agent"] - middle["off"]["agent"] + middle["on"]["server"]
    per_rank = more / RANKS
    bench.show_table(
        f"{RANKS} ranks, {args.rounds} runs of {args.seconds:g} s each",
        ["", "step, ms", "agent, cores", "servers, cores"],
        [
            [name, f"{one['step_ms']:.2f}", f"{one['agent']:.4f}", f"{one['server']:.4f}"]
            for name, one in middle.items()
        ],
    )
    bench.show_table(
        "Cost of monitoring",
        ["", "found", "asked"],
        [
            ["step, on over off", f"{ratio:.4f}", f"< {MAX_STEP_RATIO}"],
            ["  by chance", f"± {by_chance:.4f}", ""],
            ["cores for each rank", f"{per_rank:.4f}", f"< {MAX_CORE_PER_RANK}"],
        ],
    )
    figures = {
        "step_on_over_off": ratio,
        "step_by_chance": by_chance,
        "core_per_rank": per_rank,
        "rounds": rows,
    }
    bench.finish(args.json, figures)


def parse_arguments() -> argparse.Namespace:
    parser = bench.Parser(__doc__, timeout_s=600)
    parser.option("--rounds", int, 12, "number of runs of each kind")
    parser.option("--seconds", float, 6, "seconds of each run")
    parser.option("--warm-up", int, 60, "steps before the measurement")
    parser.option("--pace", float, 0.02, "seconds slept in a step")
    return parser.parsed("rounds", "seconds")


if __name__ == "__main__":
    bench.run_bench(main)
