#!/usr/bin/env python3
"""Measure the gain of a network plan, and the cost of a cut rail.

    python scripts/bench_network.py --json network.json

The nodes of a virtual cluster have two rails and two leaf switches, and run one rank each. The
switches are joined by narrow uplinks. Consecutive nodes are on alternating switches, so that in the
order of their names each neighbour in the ring is on the other switch. The all-reduces are gloo's,
which are rings:

orders     launched without ftrun, over the first rail, in each order that matters, in turns
plan       under ftrun, `--network-plan off` and `on`
slow       the same with one node's first rail at a tenth of its rate
cut        a training with snapshots, planned; the cable of one node's rail in use is cut
snapshots  a training whose state is encoded between the nodes all the time, and the same without
           snapshots; planned, and with `--network-plan off`

With up to five nodes every ring is tried, in one direction, because links are equal in both. With
more nodes, one ring is tried for each order in which switches can follow each other: nodes of one
switch are equal.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import bench_common as bench
from nodes_run import RUN_ID, NodesRun, environment
from virtual_cluster import VirtualCluster
from virtual_link import bits_per_s

RAILS, LEAVES = 2, 2
WORKER = bench.ROOT / "scripts" / "bench_network_worker.py"
STORE_PORT = 29444
MAX_NODES_FOR_ALL_RINGS = 5
STRUCK = 1
"""The node whose rail fails; it is not the leader."""
CUT_MB, CUT_STATE_MB, CUT_AFTER = 16, 2, 6
SETTLE_STEPS = 3
SNAPSHOT_MB, SNAPSHOT_STEPS = 16, 12
STATUS_S = 30.0
FLAGS = ("--set", "hang.action=report", "--set", "restart.budget=1000")

Figures = dict[str, Any]


def main() -> int:
    args = parse_arguments()
    figures: Figures = {}
    with bench.scratch(base=None) as folder:  # /dev/shm is each node's own
        for name in args.only:
            print(f"\n{name}", flush=True)
            figures[name] = PARTS[name](folder / name, args)
    report(figures, args)
    return 0


def cluster_of(args: argparse.Namespace) -> VirtualCluster:
    return VirtualCluster(
        args.nodes, rails=RAILS, leaves=LEAVES, uplink=args.uplink, rail_rate=args.rail
    )


# --- orders -----------------------------------------------------------------------------------


def orders(folder: Path, args: argparse.Namespace) -> Figures:
    """The times of each ring; the first ring is the order of the nodes' names."""
    folder.mkdir()
    with cluster_of(args) as cluster:
        tried = rings([node.leaf for node in cluster.nodes()])
        host = cluster.address(0)
        words = ["sweep", "--folder", folder, "--mb", args.mb, "--rounds", args.rounds]
        words += ["--orders", json.dumps(tried), "--store", f"{host}:{STORE_PORT}"]
        with (folder / "output").open("wb") as output:
            processes = [
                cluster.run(
                    node,
                    [sys.executable, str(WORKER), *map(str, words), "--node", str(node)],
                    env=environment({"GLOO_SOCKET_IFNAME": "eth0"}),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
                for node in range(args.nodes)
            ]
        wait_for_all(processes, folder / "output", args.deadline)
    lines = [bench.read_lines(folder / f"node{node}.jsonl") for node in range(args.nodes)]
    found = []
    for which, order in enumerate(tried):
        seconds = slowest([[one for one in of if one["order"] == which] for of in lines])
        found.append({"order": order, "seconds": seconds})
        print(f"  {show_order(order)}: {show_seconds(seconds)}", flush=True)
    return {"rings": found}


def rings(leaf_of: Sequence[int]) -> list[list[int]]:
    """Orders that differ as rings; with many nodes, orders that differ as rings of leaves."""
    every = len(leaf_of) <= MAX_NODES_FOR_ALL_RINGS
    seen, found = set(), []
    for rest in itertools.permutations(range(1, len(leaf_of))):
        order = (0, *rest)
        what = order if every else tuple(leaf_of[node] for node in order)
        turns = [what[at:] + what[:at] for at in range(len(what))]
        shape = min(min(turn, turn[::-1]) for turn in turns)
        if shape not in seen:
            seen.add(shape)
            found.append(list(order))
    return found


def wait_for_all(
    processes: "Sequence[subprocess.Popen[bytes]]", output: Path, deadline: bench.Deadline
) -> None:
    """Raises: BenchError: one has failed, or the time is over."""
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            break
        deadline.check("the all-reduces")
        time.sleep(bench.POLL_S)
    if any(process.poll() for process in processes):
        last = output.read_text(errors="replace").splitlines()[-25:]
        raise bench.BenchError("an all-reduce has failed:\n" + "\n".join(last))


# --- under ftrun ------------------------------------------------------------------------------


def training(
    cluster: VirtualCluster,
    folder: Path,
    args: argparse.Namespace,
    mode: str,
    *words: object,
) -> NodesRun:
    """A started training under `--network-plan` MODE."""
    script = [WORKER, "train", "--folder", folder, *words]
    flags = ["--network-plan", mode, *FLAGS]
    run = NodesRun(cluster, folder, script, args.deadline, members=args.nodes, flags=flags)
    run.start_all()
    return run


def plan(folder: Path, args: argparse.Namespace) -> Figures:
    with cluster_of(args) as cluster:
        return {mode: reduced(cluster, folder / mode, args, mode) for mode in ("off", "on")}


def slow(folder: Path, args: argparse.Namespace) -> Figures:
    tenth = f"{bits_per_s(args.rail) / 1e4:.0f}kbit"
    found = {}
    with cluster_of(args) as cluster:
        for mode in ("off", "on"):
            cluster.slow(STRUCK, tenth, rail=0)
            found[mode] = reduced(cluster, folder / mode, args, mode, rounds=1)
    return found


def reduced(
    cluster: VirtualCluster,
    folder: Path,
    args: argparse.Namespace,
    mode: str,
    rounds: int = 0,
) -> Figures:
    """Seconds of all-reduces, without the first if there are several, and the chosen plan."""
    skipped = 0 if rounds else 1
    rounds = rounds or args.rounds
    run = training(cluster, folder, args, mode, "--mb", args.mb)
    run.wait_for_step(skipped + rounds - 1)
    chosen = network_of(run)
    nodes = [run.node_of(rank) for rank in range(args.nodes)]
    lines = [run.steps(rank)[skipped : skipped + rounds] for rank in range(args.nodes)]
    cluster.slow(STRUCK, "off", rail=0)
    run.finish()
    seconds = slowest(lines)
    print(f"  {mode}: {show_order(nodes)}: {show_seconds(seconds)}", flush=True)
    return {"order": nodes, "seconds": seconds, "network": chosen}


def network_of(run: NodesRun) -> Figures:
    """The run's report about its network; empty if there is none."""
    found: Figures = (status_of(run).get("cluster") or {}).get("network") or {}
    return found


def status_of(run: NodesRun) -> Figures:
    """`ftrun status --json` on the leader's node; empty if it does not answer."""
    process = run.cluster.run(
        run.leader(),
        [sys.executable, "-m", "ftrun", "status", RUN_ID, "--json"],
        env=environment(),
        cwd=run.folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    said, _ = process.communicate(timeout=STATUS_S)
    found: Figures = json.loads(said) if said else {}
    return found


def cut(folder: Path, args: argparse.Namespace) -> Figures:
    """Generations and steps that each cut costs, and the time until the rail is named."""
    found = []
    for number in range(args.cuts):
        found.append(cut_once(folder / str(number), args))
        print(f"  {json.dumps(found[-1])}", flush=True)
    return {"cuts": found}


def cut_once(folder: Path, args: argparse.Namespace) -> Figures:
    words = ["--mb", CUT_MB, "--state-mb", CUT_STATE_MB, "--attach"]
    with cluster_of(args) as cluster:
        run = training(cluster, folder, args, "on", *words)
        run.wait_for_step(CUT_AFTER)
        chosen = network_of(run).get("plan") or {}
        rail = (chosen.get("rails") or ["eth0"])[0]
        at_ns = run.fault("cut", STRUCK, rail=int(rail.removeprefix("eth")))
        run.wait_for("the next generation", lambda: run.next_step_ns(at_ns))
        stepped_ns = run.next_step_ns(at_ns)
        run.wait_for_more_steps(SETTLE_STEPS)
        generation = run.generation
        found = {
            "rail": rail,
            "next_step_s": ((stepped_ns or at_ns) - at_ns) / 1e9,
            "generations": generation,
            "steps_lost": max(lost_steps(run, rank, at_ns) for rank in range(args.nodes)),
            "named_s": named_s(run, rail, at_ns),
            "nodes_lost": [line["text"] for line in run.journals("node_lost")],
        }
        cluster.heal(STRUCK)
        run.finish()
    return found


def lost_steps(run: NodesRun, rank: int, at_ns: int) -> int:
    """Steps that were complete before the first step of the next generation, and are repeated."""
    lines = run.readers[rank].read()
    started = next(
        at for at, line in enumerate(lines) if line["kind"] == "begun" and line["ns"] > at_ns
    )
    before = [line["step"] for line in lines[:started] if line["kind"] == "step"]
    after = [line["step"] for line in lines[started:] if line["kind"] == "step"]
    return max(0, before[-1] + 1 - after[0])


def named_s(run: NodesRun, rail: str, at_ns: int) -> float | None:
    """From the cut until a journal names both the node and the rail; None: never."""
    for line in run.journals():
        text = str(line.get("text", ""))
        after_s = line["monotonic_s"] - at_ns / 1e9
        if after_s > 0 and f"node{STRUCK}" in text and rail in text:
            return float(after_s)
    return None


def snapshots(folder: Path, args: argparse.Namespace) -> Figures:
    """Seconds of a step with a snapshot at each one, and without any."""
    found: Figures = {}
    words = ["--mb", SNAPSHOT_MB, "--state-mb", args.state_mb]
    with cluster_of(args) as cluster:
        for mode in ("on", "off"):
            for attach in ((), ("--attach",)):
                name = f"plan {mode}, " + ("with" if attach else "without")
                run = training(cluster, folder / name, args, mode, *words, *attach)
                run.wait_for_step(SNAPSHOT_STEPS + 2)
                lines = run.steps(0)[2 : SNAPSHOT_STEPS + 3]
                held = (status_of(run).get("snapshots") or {}).get("step")
                behind = None if held is None else run.last_step() + 1 - held
                run.finish()
                step_s = [
                    (later["ns"] - one["ns"]) / 1e9 for one, later in itertools.pairwise(lines)
                ]
                found[name] = {"step_s": step_s, "protected_steps_behind": behind}
                tail = f"; {behind} steps are not protected" if attach else ""
                print(f"  {name}: {show_seconds(step_s)}{tail}", flush=True)
    return found


Part = Callable[[Path, argparse.Namespace, bench.Deadline], Figures]
PARTS: dict[str, Part] = {
    "orders": orders,
    "plan": plan,
    "slow": slow,
    "cut": cut,
    "snapshots": snapshots,
}


# --- results ----------------------------------------------------------------------------------


def slowest(lines: Sequence[Sequence[Figures]]) -> list[float]:
    """For each all-reduce, the time of the slowest rank."""
    return [max(line["seconds"] for line in turn) for turn in zip(*lines, strict=False)]


def show_order(nodes: Sequence[int]) -> str:
    return "-".join(map(str, nodes))


def show_seconds(seconds: Sequence[float]) -> str:
    found = bench.spread(seconds)
    return "median {median:.2f} s, {min:.2f} to {max:.2f}".format(**found)


def report(parts: Figures, args: argparse.Namespace) -> None:
    asked = asked_figures(parts)
    title = f"{args.nodes} nodes, {args.mb:g} MB; rails of {args.rail}, uplinks of {args.uplink}"
    bench.show_table(title, ["", "found"], [[name, show(value)] for name, value in asked.items()])
    setting = {name: getattr(args, name) for name in ("nodes", "mb", "rail", "uplink", "rounds")}
    bench.finish(args.json, {**asked, "parts": parts, **setting})


def show(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def asked_figures(parts: Figures) -> Figures:
    """The requested figures that the completed parts allow."""
    found: Figures = {}
    on_s = None
    if "orders" in parts:
        medians = [statistics.median(ring["seconds"]) for ring in parts["orders"]["rings"]]
        found |= {"rings_tried": len(medians), "best_over_naive": medians[0] / min(medians)}
    if "plan" in parts:
        off_s, on_s = (statistics.median(parts["plan"][mode]["seconds"]) for mode in ("off", "on"))
        found["planned_over_naive"] = off_s / on_s
        found["probe_s"] = parts["plan"]["on"]["network"].get("probed_s")
    if on_s and "orders" in parts:
        found["planned_over_best"] = min(medians) / on_s
    if "slow" in parts:
        slow_s = {mode: statistics.median(one["seconds"]) for mode, one in parts["slow"].items()}
        found["rail_slow_over_off"] = slow_s["off"] / slow_s["on"]
    if "cut" in parts:
        cuts = parts["cut"]["cuts"]
        for name in ("generations", "steps_lost"):
            found[f"cut_{name}"] = max(one[name] for one in cuts)
        for name in ("named_s", "next_step_s"):
            times = [one[name] for one in cuts]
            found[f"cut_{name}"] = None if None in times else statistics.median(times)
    if "snapshots" in parts:
        step_s = {name: statistics.mean(one["step_s"]) for name, one in parts["snapshots"].items()}
        found["snapshot_slowdown"] = step_s["plan on, with"] / step_s["plan on, without"]
        found["snapshot_slowdown_off"] = step_s["plan off, with"] / step_s["plan off, without"]
    return found


def parse_arguments() -> argparse.Namespace:
    parser = bench.Parser(__doc__, timeout_s=900)
    parser.option("--nodes", int, 4, "number of nodes, 4 to 8")
    parser.option("--mb", float, 64, "MB of an all-reduce")
    parser.option("--rounds", int, 3, "number of turns of each part")
    parser.option("--cuts", int, 3, "number of cuts of a rail")
    parser.option("--rail", str, "400mbit", "rate of a cable")
    parser.option("--uplink", str, "200mbit", "rate of the uplink of a switch")
    parser.option("--state-mb", float, 32, "MB of a snapshot, per rank")
    parser.add_argument("--only", action="append", choices=PARTS)
    args = parser.parsed()
    if not 3 <= args.nodes <= 8 or min(args.rounds, args.cuts, args.mb, args.state_mb) <= 0:
        parser.error("--nodes is 3 to 8; --rounds, --cuts, --mb, --state-mb are positive")
    args.only = args.only or list(PARTS)
    return args


if __name__ == "__main__":
    bench.run_bench(main)
