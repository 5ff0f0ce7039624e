#!/usr/bin/env python3
"""Run the protocol between nodes in one process, with simulated time, network and faults.

    python scripts/simulate.py --seed 4711 --mode safety      one world, with its whole trace
    python scripts/simulate.py --seeds 1000000                many; all violations
    python scripts/simulate.py --seeds 400000 --from 600000   the rest, after ^C
    python scripts/simulate.py --traffic 8,64,512,4096        cost of a run of many nodes at rest

A seed determines one world: the number of nodes, the faults, the random choices. The same seed
gives the same run on every machine. Each seed is run in two modes:

safety     faults until the end; no invariant may ever be violated
liveness   the faults stop; then the run must continue, and finish

tests/simulation/invariants.py lists the checks after each event. Exits with 1 after a violation;
the output names each such world with the command that runs it again. ^C ends at once, and prints
the results so far and how to continue. With the same --json FILE the figures of the first part are
added to those of the rest.
"""

import argparse
import json
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import FrameType
from typing import Any

from bench_common import ROOT, Parser, show_table, write_json

sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from simulation.mishaps import has_mishaps  # noqa: E402
from simulation.run import Outcome, Simulation, run_seed  # noqa: E402
from simulation.scenario import MODES  # noqa: E402
from simulation.survivors import have_survivors  # noqa: E402
from simulation.traffic import (  # noqa: E402
    HEARTBEAT_S,
    RANKS_PER_NODE,
    SNAPSHOT_EVERY,
    STEP_S,
    WINDOW_S,
    measure,
)

CHUNK = 50
"""Number of seeds in one chunk for a process."""
CHUNKS_PER_PROCESS = 400
"""After this number of chunks a process is replaced, which limits its memory."""
MAX_KEPT = 50
"""Violations that are printed; the rest is only counted."""
HANGS_AFTER_S = 60.0
"""A run takes some hundredths of a second."""
REPORT_EVERY_S = 10.0
TRAFFIC = "8,64,512,4096"
TRAFFIC_HEAD = (
    *("nodes", "bytes/node/s", "messages/node/s", "lead CPU s/s", "of it deciding"),
    *("us/message", "plan bytes"),
)
_WIDTH = 400

COUNTERS = ("verdicts", "faults", "happened")
"""Fields of a tally."""

WORLDS = {"": None, "mishaps": has_mishaps, "survivors": have_survivors}
Chunk = tuple[int, int, tuple[str, ...], bool, str]
"""First seed, the one after the last, modes, whether to run each twice, a key of `WORLDS`."""


@dataclass
class Tally:
    """The result of some seeds."""

    runs: int = 0
    events: int = 0
    virtual_s: float = 0.0
    verdicts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    happened: Counter[str] = field(default_factory=Counter)
    num_violations: int = 0
    violations: list[tuple[int, str, str]] = field(default_factory=list)
    """Seed, mode, violation; the first few."""
    seconds: float = 0.0

    @classmethod
    def read(cls, path: Path, end: tuple[int, str]) -> "Tally":
        """The figures in a file if they end where this count begins, else none."""
        try:
            found = json.loads(path.read_text())
            if (found.pop("next_seed"), found.pop("kind")) != end:
                return cls()
            for name in COUNTERS:
                found[name] = Counter(found[name])
            return cls(**found)
        except (OSError, ValueError, KeyError, TypeError):
            return cls()

    def take(self, outcome: Outcome) -> None:
        self.runs += 1
        self.events += outcome.num_events
        self.virtual_s += outcome.virtual_s
        self.verdicts[f"{outcome.mode}: {outcome.verdict}"] += 1
        self.faults.update(outcome.faults)
        self.happened.update(outcome.happened)
        if outcome.problem:
            self.violate(outcome, outcome.problem)

    def violate(self, outcome: Outcome, what: str) -> None:
        self.num_violations += 1
        if len(self.violations) < MAX_KEPT:
            self.violations.append((outcome.seed, outcome.mode, what[:_WIDTH]))

    def add(self, other: "Tally") -> None:
        """Add the figures of another process."""
        for name in ("runs", "events", "virtual_s", "num_violations"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in COUNTERS:
            getattr(self, name).update(getattr(other, name))
        self.violations += other.violations[: MAX_KEPT - len(self.violations)]


def main() -> int:
    args = parse_arguments()
    if args.traffic is not None:
        return show_traffic(args)
    if args.seed is not None:
        return max([replay(args.seed, mode, args.world) for mode in args.modes])
    return run_many(args)


# --- one seed ---------------------------------------------------------------------------------


def replay(seed: int, mode: str, world: str) -> int:
    """Print the whole trace of one world."""

    def prepare(simulation: Simulation) -> None:
        if (change := WORLDS[world]) is not None:
            change(simulation)
        scenario = simulation.scenario
        print(f"seed {seed}, {mode}\n")
        for one in fields(scenario):
            print(f"  {one.name:12} {getattr(scenario, one.name)}")
        print()
        simulation.world.on_trace = print

    with hangs_are_errors():
        outcome = run_seed(seed, mode, prepare=prepare)
    print(
        f"\n{outcome.verdict} after {outcome.virtual_s:.1f} s and {outcome.num_events} events; "
        f"trace {outcome.digest:016x}"
    )
    print(", ".join(f"{count} {name}" for name, count in outcome.happened.items()), "\n")
    if outcome.problem:
        print(f"VIOLATION {outcome.problem}\n")
    return 1 if outcome.problem else 0


# --- many seeds -------------------------------------------------------------------------------


def run_many(args: argparse.Namespace) -> int:
    total, started_s = Tally(), time.monotonic()
    if args.json is not None:
        total = Tally.read(args.json, (args.first, kind_of(args)))
    before_s, next_seed = total.seconds, args.first
    said_s, is_whole = 0.0, False
    wanted = total.runs + args.seeds * len(args.modes)
    if total.runs:
        print(f"{total.runs:,} runs of {args.json} are counted in", flush=True)
    try:
        for tally in tallies(args):
            next_seed = min(next_seed + CHUNK, args.first + args.seeds)
            for seed, mode, what in tally.violations[: MAX_KEPT - len(total.violations)]:
                print(f"VIOLATION {replay_command(seed, mode, args)}\n    {what}", flush=True)
            total.add(tally)
            now_s = time.monotonic()
            total.seconds = before_s + now_s - started_s
            if now_s - said_s >= REPORT_EVERY_S:
                said_s = now_s
                report_progress(total, wanted)
        is_whole = True
    except KeyboardInterrupt:
        left = args.first + args.seeds - next_seed
        print(
            f"\nstopped before the end; continue with --from {next_seed} --seeds {left}", flush=True
        )
    report(total, next_seed, args)
    if total.num_violations:
        return 1
    return 0 if is_whole else 130


def tallies(args: argparse.Namespace) -> Iterator[Tally]:
    """The results of the seeds, chunk by chunk."""
    end = args.first + args.seeds
    chunks = (
        (first, min(first + CHUNK, end), args.modes, args.twice, args.world)
        for first in range(args.first, end, CHUNK)
    )
    if args.jobs == 1:
        yield from map(run_chunk, chunks)
        return
    context = multiprocessing.get_context("spawn")
    # Leaving the block ends all of its processes.
    with context.Pool(args.jobs, ignore_interrupt, (), CHUNKS_PER_PROCESS) as pool:
        # In order, so that the count covers all seeds before one seed.
        yield from pool.imap(run_chunk, chunks)


def run_chunk(chunk: Chunk) -> Tally:
    first, end, modes, is_twice, world = chunk
    prepare = WORLDS[world]
    tally = Tally()
    for seed in range(first, end):
        for mode in modes:
            with hangs_are_errors():
                outcome = run_seed(seed, mode, prepare=prepare)
                tally.take(outcome)
                if is_twice and run_seed(seed, mode, prepare=prepare) != outcome:
                    tally.violate(outcome, "run twice, it was not the same run")
    return tally


def ignore_interrupt() -> None:
    """The first process handles ^C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def hangs_are_errors() -> Iterator[None]:
    """A decision that never ends raises an exception, which names the seed."""

    def hangs(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"one run has used the processor for more than {HANGS_AFTER_S:.0f} s")

    signal.signal(signal.SIGPROF, hangs)
    signal.setitimer(signal.ITIMER_PROF, HANGS_AFTER_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


# --- results ----------------------------------------------------------------------------------


def replay_command(seed: int, mode: str, args: argparse.Namespace) -> str:
    command = f"python scripts/simulate.py --seed {seed} --mode {mode}"
    return f"{command} --{args.world}" if args.world else command


def kind_of(args: argparse.Namespace) -> str:
    """What figures must have in common to be added."""
    return f"{' '.join(args.modes)}{f' {args.world}' if args.world else ''}{' twice' * args.twice}"


def report_progress(total: Tally, wanted: int) -> None:
    rate = total.runs / max(total.seconds, 1e-9)
    left_s = (wanted - total.runs) / rate
    print(
        f"{total.runs:,} of {wanted:,} runs, {rate:.0f} a second, {total.num_violations} "
        f"violations; {left_s / 60:.0f} min left",
        flush=True,
    )


def report(total: Tally, next_seed: int, args: argparse.Namespace) -> None:
    runs, took_s = max(1, total.runs), total.seconds
    first = next_seed - total.runs // len(args.modes)
    show_table(
        "How runs have ended",
        ["verdict", "runs", "%"],
        [[name, n, f"{100 * n / runs:.1f}"] for name, n in total.verdicts.most_common()],
    )
    show_table("Faults", ["what", "times"], list(total.faults.most_common()))
    show_table("What else has happened", ["what", "times"], list(total.happened.most_common()))
    print(
        f"\n  {total.runs:,} runs of seeds {first} to {next_seed - 1} "
        f"({', '.join(args.modes)}{', each twice' if args.twice else ''}), "
        f"{total.virtual_s / 3600:,.1f} hours of their time and {total.events:,} events in "
        f"{took_s:.0f} s: {total.runs / max(took_s, 1e-9):.0f} runs a second"
    )
    print(f"  {total.num_violations} violations")
    for seed, mode, what in total.violations:
        print(f"\n  {replay_command(seed, mode, args)}\n    {what}")
    if total.num_violations > len(total.violations):
        print(f"\n  and {total.num_violations - len(total.violations)} more")
    write_json(args.json, {**vars(total), "next_seed": next_seed, "kind": kind_of(args)})


# --- traffic ----------------------------------------------------------------------------------


def show_traffic(args: argparse.Namespace) -> int:
    rows = []
    for count in args.traffic:
        started_s = time.monotonic()
        rows.append(measure(count, time.thread_time))
        took_s = time.monotonic() - started_s
        print(f"{count} nodes, {WINDOW_S:.0f} s of theirs: {took_s:.0f} s", flush=True)
    show_table(
        f"Control messages of a quiet run: {RANKS_PER_NODE} ranks a node, a heartbeat each "
        f"{HEARTBEAT_S:g} s, a step each {STEP_S:g} s, a snapshot each {SNAPSHOT_EVERY} steps",
        TRAFFIC_HEAD,
        [
            [
                row.nodes,
                f"{row.bytes_per_node_s:.0f}",
                f"{row.messages_per_node_s:.2f}",
                f"{row.leader_cpu:.4f}",
                f"{row.leader_decides:.4f}",
                f"{row.leader_us_per_message:.1f}",
                f"{row.plan_bytes:,}",
            ]
            for row in rows
        ],
    )
    figures: dict[str, Any] = {
        "control_bytes_per_node_s": {str(row.nodes): row.bytes_per_node_s for row in rows},
        "control_messages_per_node_s": {str(row.nodes): row.messages_per_node_s for row in rows},
        "lead_cpu_s_per_s": {str(row.nodes): row.leader_cpu for row in rows},
        "control_traffic": [asdict(row) for row in rows],
    }
    write_json(args.json, figures)
    return 0


# --- arguments --------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = Parser(__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--seed", type=int, metavar="S", help="print the trace of this seed")
    what.add_argument("--seeds", type=int, metavar="N", help="run this number of seeds, and count")
    what.add_argument(
        "--traffic",
        nargs="?",
        const=TRAFFIC,
        metavar="N,N,...",
        help=f"cost of runs at rest with these numbers of nodes ({TRAFFIC})",
    )
    parser.add_argument("--mode", choices=MODES, help="(default: both, one after the other)")
    parser.add_argument(
        "--from", type=int, default=0, dest="first", metavar="M", help="the first of --seeds (0)"
    )
    parser.option("--jobs", int, len(os.sched_getaffinity(0)), "processes for --seeds")
    world = parser.add_mutually_exclusive_group()
    world.add_argument(
        "--survivors",
        action="store_const",
        const="survivors",
        dest="world",
        default="",
        help="with restart.survivors: ranks keep their processes when others fail",
    )
    world.add_argument(
        "--mishaps",
        action="store_const",
        const="mishaps",
        dest="world",
        default="",
        help="with clocks of other rates, firewalls that refuse, ranks that survive their agent or "
        "cannot be killed, dead threads, and checkpoints that do not load",
    )
    parser.add_argument(
        "--twice", action="store_true", help="run each of --seeds again, and compare"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the figures to this file"
    )
    args = parser.parse_args()
    if args.jobs < 1 or (args.seeds is not None and args.seeds < 1):
        parser.error("--seeds and --jobs are positive")
    args.modes = MODES if args.mode is None else (args.mode,)
    if args.traffic is not None:
        try:
            args.traffic = [int(word) for word in args.traffic.split(",")]
        except ValueError:
            parser.error(f"--traffic takes numbers of nodes, such as {TRAFFIC}")
        if min(args.traffic) < 1:
            parser.error("--traffic takes numbers of nodes, of 1 and more")
    return args


if __name__ == "__main__":
    sys.exit(main())
