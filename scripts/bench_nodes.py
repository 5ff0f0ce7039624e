#!/usr/bin/env python3
"""Measure how long a lost rank or node stops a training; compare the rank kill with torchrun.

    python scripts/bench_nodes.py --json nodes.json

Two members run one rank each, with one spare, on a virtual cluster. The faults come in sequence. A
time ends when each rank has completed a step of the next generation with its state restored.

rank kill       SIGKILL of a rank, in turns
node reset      the processes of a node die and its kernel closes connections; the spare replaces it
node power-off  a node loses power without a packet; its peers detect it by the failure timeout
lead power-off  the same with the leader's node

A lost node is started again and becomes the spare. For comparison, torchrun runs with its c10d
rendezvous over two such nodes, with the rank kill only, because it does not replace nodes. It polls
every 0.02 s and reads its state with torch.load from files in the page cache.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import bench_common as bench
from nodes_run import PORT, RUN_ID, NodesRun
from virtual_cluster import VirtualCluster

MEMBERS, SPARES = 2, 1
DEADLINE_S = 3.0
STEPS_BETWEEN = 20
REFILL_S = 2.0
TORCHRUN_KILLS = 3
WORKER = bench.ROOT / "scripts" / "bench_recovery_worker.py"
SIMULATE = bench.ROOT / "scripts" / "simulate.py"
FLAGS = (
    *("--set", "restart.budget=100000", "--set", "nodes.max_failures_per_hour=100000"),
    *("--set", f"nodes.failure_timeout_s={DEADLINE_S}"),
)

Fault = Callable[[NodesRun, int], int]
"""Injects a fault, given the number of the turn; returns the time just before, in nanoseconds."""


class Torchrun(NodesRun):
    """The same interface with torchrun in place of ftrun."""

    def command(self, flags: Sequence[object] = ()) -> list[str]:
        endpoint = f"{self.cluster.address(0)}:{PORT}"
        found = [sys.executable, "-m", "torch.distributed.run", "--nnodes", self.members]
        found += ["--nproc-per-node", 1, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
        found += ["--rdzv-id", RUN_ID, "--max-restarts", 1_000_000, "--monitor-interval", 0.02]
        return [str(word) for word in (*found, *flags)]


def main() -> int:
    args = parse_arguments()
    times: dict[str, list[float]] = {}
    with bench.scratch(base=None) as folder:  # /dev/shm is each node's own
        measure_ftrun(folder / "ftrun", args, times)
        if "rank kill" in args.only:
            times["torchrun rank kill"] = measure_torchrun(folder / "torchrun", args)
    traffic = control_traffic(args.traffic)
    report(times, traffic, args)
    return 0


def measure_ftrun(folder: Path, args: argparse.Namespace, times: dict[str, list[float]]) -> None:
    with VirtualCluster(MEMBERS + SPARES) as cluster:
        sizes = {"members": MEMBERS, "spares": SPARES}
        words = worker_argv(folder, args)
        run = NodesRun(cluster, folder, words, args.deadline, **sizes, flags=FLAGS)
        run.start_all()
        for name in args.only:
            times[name] = measure(name, FAULTS[name], run, args.faults)


def measure_torchrun(folder: Path, args: argparse.Namespace) -> list[float]:
    with VirtualCluster(MEMBERS) as cluster:
        words = worker_argv(folder, args)
        run = Torchrun(cluster, folder, words, args.deadline, members=MEMBERS)
        # torchrun leaves folders of logs there, and by default reuses one store for all restarts.
        env = {"TMPDIR": str(folder), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        run.start_all(dict.fromkeys(range(MEMBERS), env))
        return measure("torchrun rank kill", rank_kill, run, min(args.faults, TORCHRUN_KILLS))


def worker_argv(folder: Path, args: argparse.Namespace) -> list[object]:
    return [WORKER, "--folder", folder, "--state-mb", args.state_mb]


def measure(name: str, fault: Fault, run: NodesRun, count: int) -> list[float]:
    """Seconds of each turn."""
    found = []
    for number in range(count):
        rest(run)
        at_ns = fault(run, number)
        found.append(next_step_s(run, at_ns))
        print(f"{name} {number + 1}: {found[-1]:7.3f} s", flush=True)
        for node in sorted(run.lost):
            take_in(run, node)
    return found


def take_in(run: NodesRun, node: int) -> None:
    """Start the node again, and wait until it is a spare with a vote."""
    before = len(run.journals("voters_changed"))
    run.bring_back(node)
    run.wait_for(f"a vote of node{node}", lambda: len(run.journals("voters_changed")) > before)


def next_step_s(run: NodesRun, at_ns: int) -> float:
    run.wait_for("the next step", lambda: run.next_step_ns(at_ns))
    stepped_ns = run.next_step_ns(at_ns)
    assert stepped_ns is not None
    return (stepped_ns - at_ns) / 1e9


def rest(run: NodesRun) -> None:
    """Wait for enough steps for a protected version, and enough time for new standbys."""
    run.wait_for_generation(0)
    run.wait_for_more_steps(STEPS_BETWEEN)
    end_s = time.monotonic() + REFILL_S
    run.wait_for("a pause", lambda: time.monotonic() >= end_s)


# --- faults -----------------------------------------------------------------------------------


def rank_kill(run: NodesRun, number: int) -> int:
    return run.signal(run.node_of(number % MEMBERS), "rank")


def node_reset(run: NodesRun, number: int) -> int:
    return run.fault("reset", follower(run))


def node_power_off(run: NodesRun, number: int) -> int:
    return run.fault("kill", follower(run))


def leader_power_off(run: NodesRun, number: int) -> int:
    return run.fault("kill", run.leader())


def follower(run: NodesRun) -> int:
    """A member's node that is not the leader."""
    leader = run.leader()
    return next(node for node in map(run.node_of, range(MEMBERS)) if node != leader)


FAULTS: dict[str, Fault] = {
    "rank kill": rank_kill,
    "node reset": node_reset,
    "node power-off": node_power_off,
    "lead power-off": leader_power_off,
}


# --- results ----------------------------------------------------------------------------------


def control_traffic(is_wanted: bool) -> list[dict[str, Any]]:
    """Cost of the control messages by number of nodes, from the simulation."""
    if not is_wanted or not SIMULATE.exists():
        return []
    with bench.scratch() as folder:
        path = folder / "traffic.json"
        command = [sys.executable, SIMULATE, "--traffic", "--json", path]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise bench.BenchError(f"{SIMULATE.name} ended with {done.returncode}:\n{done.stderr}")
        rows: list[dict[str, Any]] = json.loads(path.read_text())["control_traffic"]
        return rows


def report(
    times: dict[str, list[float]],
    traffic: list[dict[str, Any]],
    args: argparse.Namespace,
) -> None:
    spreads = {name: bench.spread(values) for name, values in times.items()}
    bench.show_table(
        f"From the fault to the next step on all {MEMBERS} ranks, {args.state_mb:g} MB of state; "
        f"deadline {DEADLINE_S:g} s; in seconds",
        ["fault", "median", "min", "max", "count"],
        [[name, *bench.cells(one, ".3f"), one["count"]] for name, one in spreads.items()],
    )
    if traffic:
        head = list(traffic[0])
        bench.show_table(
            "Control messages, by the simulation",
            head,
            [[f"{row[key]:.6g}" for key in head] for row in traffic],
        )
    figures: dict[str, Any] = {
        f"{name.replace(' ', '_').replace('-', '_')}_s": one["median"]
        for name, one in spreads.items()
    }
    figures |= {
        "spreads": {name: {**one, "all_s": times[name]} for name, one in spreads.items()},
        "control_bytes_per_node_s": {str(row["nodes"]): row["bytes_per_node_s"] for row in traffic},
        "control_traffic": traffic,
        "deadline_s": DEADLINE_S,
        "state_mb": args.state_mb,
    }
    bench.finish(args.json, figures)


def parse_arguments() -> argparse.Namespace:
    parser = bench.Parser(__doc__, timeout_s=900)
    parser.option("--state-mb", float, 64, "MB of parameters and moments")
    parser.option("--faults", int, 5, "number of faults of each kind")
    parser.add_argument("--only", action="append", choices=FAULTS)
    parser.add_argument("--traffic", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parsed("faults", "state_mb")
    args.only = args.only or list(FAULTS)
    return args


if __name__ == "__main__":
    bench.run_bench(main)
