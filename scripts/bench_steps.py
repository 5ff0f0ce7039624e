#!/usr/bin/env python3
"""What snapshots and their protection across nodes cost a step, all on the cores there are.

    python scripts/bench_steps.py --json steps.json

Four nodes with a rank each on a virtual cluster, each rank with a state of its own, so that all of
it is encoded (3+1). One run after the other, in turns:

off        no snapshots
memory     snapshots in the memory of each node, `erasure.scheme=none`
protected  the same, mirrored and encoded between the nodes

The time of a step is the mean over a while, as a snapshot costs a few steps and not each. How often
there is one is ftrun's own choice (`snapshot.every: auto`, 2 % of a step's time), and is shown; all
four nodes' ranks, SMPs and agents share this machine's cores.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from bench_common import (
    ROOT,
    BenchError,
    Deadline,
    conditions,
    parser_of,
    run_bench,
    scratch,
    show_conditions,
    show_table,
    write_json,
)
from nodes_run import NodesRun
from virtual_cluster import VirtualCluster, available

NODES = 4
WORKER = ROOT / "scripts" / "bench_steps_worker.py"
SCHEME = {"off": "none", "memory": "none", "protected": "3+1"}


def main() -> int:
    args = parse_arguments()
    if reason := available():
        raise BenchError(f"no virtual cluster: {reason}")
    found, deadline = conditions(), Deadline(args.timeout)
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in SCHEME}
    with scratch(base=None) as folder:
        for turn in range(args.rounds):
            for name in SCHEME:
                row = measure(name, folder / f"{name}{turn}", args, deadline)
                rows[name].append(row)
                print(f"{name} {turn + 1}: {row['step_ms']:.1f} ms", flush=True)
    report(rows, args, found)
    return 0


def measure(
    name: str, folder: Path, args: argparse.Namespace, deadline: Deadline
) -> dict[str, float]:
    words = [
        WORKER,
        "--folder",
        folder,
        "--state-mb",
        args.state_mb,
        "--attach",
        int(name != "off"),
    ]
    flags = ["--set", f"erasure.scheme={SCHEME[name]}", "--snapshot-every", args.every]
    with VirtualCluster(NODES) as cluster:
        run = NodesRun(cluster, folder, words, deadline, members=NODES, flags=flags)
        run.start_all()
        run.wait_for_step(args.warm_up)
        began = run.last_step()
        end_s = time.monotonic() + args.seconds
        run.wait_for("the measured time", lambda: time.monotonic() >= end_s)
        lines = [line for line in run.steps(0) if line["step"] >= began]
        took_s = (lines[-1]["ns"] - lines[0]["ns"]) / 1e9
        run.finish()
    return {
        "step_ms": 1e3 * took_s / (len(lines) - 1),
        "steps": len(lines) - 1,
    }


def report(
    rows: dict[str, list[dict[str, float]]], args: argparse.Namespace, found: dict[str, Any]
) -> None:
    step_ms = {name: statistics.median(row["step_ms"] for row in rows[name]) for name in rows}
    show_table(
        f"{NODES} nodes, {args.state_mb:g} MB of its own on each, snapshots {args.every}",
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
    show_conditions(found)
    figures = {
        "protected_over_off": step_ms["protected"] / step_ms["off"],
        "protected_over_memory": step_ms["protected"] / step_ms["memory"],
        "step_ms": step_ms,
        "rounds": rows,
        "state_mb": args.state_mb,
        "every": args.every,
        "conditions": found,
    }
    write_json(args.json, figures)


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, timeout_s=600)
    parser.add_argument("--state-mb", type=float, default=64, help="per rank (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of each (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=15, help="of each (default %(default)s)")
    parser.add_argument("--warm-up", type=int, default=30, help="steps (default %(default)s)")
    parser.add_argument("--every", default="auto", help="steps, or auto (default %(default)s)")
    args = parser.parse_args()
    if args.rounds < 1 or args.seconds <= 0 or args.state_mb <= 0:
        parser.error("--rounds, --seconds and --state-mb are positive")
    return args


if __name__ == "__main__":
    run_bench(main)
