#!/usr/bin/env python3
"""Measure what snapshots and their protection across nodes cost a step, on the cores there are.

    python scripts/bench_steps.py --json steps.json

Four nodes run one rank each on a virtual cluster. Each rank has its own state, so that all of it is
encoded (3+1). The runs come in turns:

off        no snapshots
memory     snapshots in the memory of each node, `erasure.scheme=none`
protected  the same, mirrored and encoded between the nodes

The step time is a mean over an interval, because a snapshot costs time in a few steps and not in
each. ftrun chooses the snapshot interval itself (`snapshot.every: auto`, 2 % of a step's time); the
table shows it. The ranks, SMPs and agents of all four nodes share this machine's cores.

With `--rate 1gbit --gradient-mb 8` each step sums gradients over links of that rate, which the
protection shares: bulk data yield to the collective.
"""

import argparse
import statistics
import time
from pathlib import Path

import bench_common as bench
from nodes_run import NodesRun
from virtual_cluster import VirtualCluster

NODES = 4
WORKER = bench.ROOT / "scripts" / "bench_steps_worker.py"
SCHEME = {"off": "none", "memory": "none", "protected": "3+1"}


def main() -> int:
    args = parse_arguments()
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in SCHEME}
    with bench.scratch(base=None) as folder:
        for turn in range(args.rounds):
            for name in SCHEME:
                row = measure(name, folder / f"{name}{turn}", args)
                rows[name].append(row)
                print(f"{name} {turn + 1}: {row['step_ms']:.1f} ms", flush=True)
    report(rows, args)
    return 0


def measure(name: str, folder: Path, args: argparse.Namespace) -> dict[str, float]:
    words = [WORKER, "--folder", folder, "--state-mb", args.state_mb]
    words += ["--attach", int(name != "off"), "--replicated", 0]
    words += ["--gradient-mb", args.gradient_mb]
    flags = ["--set", f"erasure.scheme={SCHEME[name]}", "--snapshot-every", args.every]
    with VirtualCluster(NODES, rail_rate=args.rate) as cluster:
        run = NodesRun(cluster, folder, words, args.deadline, members=NODES, flags=flags)
        run.start_all()
        run.wait_for_step(args.warm_up)
        began = run.last_step()
        end_s = time.monotonic() + args.seconds
        run.wait_for("the measured time", lambda: time.monotonic() >= end_s)
        lines = [line for line in run.steps(0) if line["step"] >= began]
        took_s = (lines[-1]["ns"] - lines[0]["ns"]) / 1e9
        run.finish()
    return {"step_ms": 1e3 * took_s / (len(lines) - 1), "steps": len(lines) - 1}


def report(rows: dict[str, list[dict[str, float]]], args: argparse.Namespace) -> None:
    step_ms = {name: statistics.median(row["step_ms"] for row in rows[name]) for name in rows}
    bench.show_table(
        f"{NODES} nodes, {args.state_mb:g} MB of its own on each, snapshots {args.every}"
        + (f", {args.gradient_mb:g} MB of gradients" if args.gradient_mb else "")
        + (f", links of {args.rate}" if args.rate else ""),
        ["", "step, ms", "over off", "min", "max"],
        [
            [
                name,
                f"{step_ms[name]:.1f}",
                f"{step_ms[name] / step_ms['off']:.3f}",
                *(f"{end(row['step_ms'] for row in rows[name]):.1f}" for end in (min, max)),
            ]
            for name in rows
        ],
    )
    figures = {
        "protected_over_off": step_ms["protected"] / step_ms["off"],
        "protected_over_memory": step_ms["protected"] / step_ms["memory"],
        "step_ms": step_ms,
        "rounds": rows,
        "state_mb": args.state_mb,
        "every": args.every,
    }
    bench.finish(args.json, figures)


def parse_arguments() -> argparse.Namespace:
    parser = bench.Parser(__doc__, timeout_s=600)
    parser.option("--state-mb", float, 64, "MB of state per rank")
    parser.option("--rounds", int, 3, "number of runs of each kind")
    parser.option("--seconds", float, 15, "seconds of each run")
    parser.option("--warm-up", int, 30, "steps before the measurement")
    parser.option("--every", str, "auto", "snapshot interval in steps, or auto")
    parser.option("--gradient-mb", float, 0, "MB that each step sums over the nodes")
    parser.option("--rate", str, "", "rate of each node's link, such as 1gbit")
    return parser.parsed("rounds", "seconds", "state_mb")


if __name__ == "__main__":
    bench.run_bench(main)
