#!/usr/bin/env python3
"""Inject each fault of the catalogue into a run over nodes, and check that its result is the same.

    python scripts/drill_nodes.py --json drill.json
    python scripts/drill_nodes.py --only power-off --job fsdp2

Each fault gets a run of its own on a virtual cluster of its own: one rank on each node, a snapshot
at every step, DDP or FSDP2. Figures of each drill:

seconds     from the fault until every rank has completed a step of the next generation; if the run
            must not restart, or a node is drained, the longest pause between two steps
steps_lost  completed steps that were repeated, in all recoveries together
equal       the loss of every step, and all parameters, buffers and moments at the end, are byte
            for byte those of an undisturbed run of torchrun with the same number of ranks

Exits with 1 if a drill does not finish, or a byte differs.
"""

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import bench_common as bench
from drill_faults import FAULTS, Breaking, Fault
from nodes_run import NodesRun
from virtual_cluster import ClusterError, VirtualCluster, available

from ftrun.errors import FtrunError
from ftrun.events import Record
from ftrun.records.decode import JournalLine, decode
from ftrun.tools.drill.jobs import BaselineRuns, DrillJob, difference, outcome_of

__all__ = ["KINDS", "BaselineRuns", "break_in", "drill", "job_argv"]

KINDS = ("ddp", "fsdp2")
STEPS = 160
PACE_S = 0.03
DRILL_S = 600.0
SCRIPT = bench.ROOT / "scripts" / "drill_job.py"


@dataclass
class Row:
    """The result of one drill."""

    fault: str
    job: str
    nodes: str
    what: str
    seconds: float | None = None
    steps_lost: int | None = None
    equal: bool = False
    recoveries: int = 0
    problem: str = ""


@dataclass
class Broken:
    """A run after its faults, as its judge sees it."""

    journal: list[JournalLine[Record]] = field(default_factory=list)
    """Of all nodes, in the order of time."""
    hit_s: float | None = None
    """When the first fault was made, on the clock of the journal."""
    seconds: float | None = None
    steps_lost: int | None = None
    recoveries: int = 0
    is_over: bool = False
    """Whether it has finished, so that its result can be compared."""
    difference: str = ""
    problem: str = ""


def job_argv(kind: str, folder: Path, pace: float = 1.0, *, steps: int = STEPS) -> list[str]:
    """The script of a drill, and its arguments.

    Args:
        kind: "ddp" or "fsdp2".
        folder: for its notes.
        pace: factor on the usual step time.
        steps: it waits for the file `go` before the last ten of them. A test that counts steps
            after a fault needs at least as many as a busy machine completes until it looks.
    """
    words = [SCRIPT, "--folder", folder, "--kind", kind, "--steps", steps]
    words += ["--pace", PACE_S * pace]
    return [str(word) for word in words]


def main() -> int:
    args = parse_arguments()
    if args.list:
        for fault in FAULTS.values():
            print(f"{fault.name:15} {fault.what}")
        return 0
    if reason := available():
        raise bench.BenchError(f"no virtual cluster: {reason}")
    rows = []
    with work_folder(args.keep) as folder:
        undisturbed = BaselineRuns(folder)
        for fault in [FAULTS[name] for name in args.only or FAULTS]:
            for kind in args.job or KINDS:
                args.deadline.check(f"{fault.name} with {kind}")
                row = drill(fault, kind, folder, undisturbed)
                if fault.most_s and row.seconds is not None and row.seconds > fault.most_s:
                    row.equal, row.problem = False, f"it cost more than {fault.most_s:g} s"
                rows.append(row)
    report(rows)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        print(f"\n  {args.json} has these figures")
    return 0 if all(row.equal for row in rows) else 1


def drill(fault: Fault, kind: str, folder: Path, undisturbed: BaselineRuns) -> Row:
    """One run with one fault; a failure is in the row."""
    nodes = f"{fault.members}+{fault.spares}" if fault.spares else str(fault.members)
    row = Row(fault.name, kind, nodes, fault.what)
    started_s = time.monotonic()
    broken = break_in(fault, kind, folder / f"{fault.name}-{kind}", undisturbed)
    row.seconds, row.steps_lost = broken.seconds, broken.steps_lost
    row.recoveries = broken.recoveries
    row.problem = broken.problem or broken.difference
    row.equal = not row.problem
    took_s = time.monotonic() - started_s
    print(f"{fault.name:15} {kind:5} {took_s:5.1f} s  {as_text(row)}", flush=True)
    return row


def break_in(fault: Fault, kind: str, folder: Path, undisturbed: BaselineRuns) -> Broken:
    """One run with one fault, in a cluster of its own; a failure is in `problem`."""
    found = Broken()
    try:
        _break(fault, kind, folder, undisturbed, found)
    except (bench.BenchError, ClusterError, FtrunError) as error:
        found.problem = str(error)
    return found


def _break(fault: Fault, kind: str, folder: Path, undisturbed: BaselineRuns, found: Broken) -> None:
    names = tuple(f"rank{rank}.jsonl" for rank in range(fault.members))
    job = DrillJob(kind, tuple(job_argv(kind, Path("FOLDER"))), names, STEPS)
    expected = undisturbed.of(job, fault.members)
    with VirtualCluster(fault.members + fault.spares, rails=fault.rails) as cluster:
        run = NodesRun(
            cluster,
            folder,
            job_argv(kind, folder, fault.pace),
            bench.Deadline(DRILL_S),
            members=fault.members,
            spares=fault.spares,
            flags=fault.flags,
        )
        breaking = Breaking(run, kind)
        try:
            fault.act(breaking)
            run.finish()
            found.seconds = round(breaking.seconds(), 3)
        finally:
            lines = [decode(json.dumps(line).encode()) for line in run.journals()]
            found.journal = [line for line in lines if line is not None]
            found.hit_s = breaking.hits[0][1] / 1e9 if breaking.hits else None
    found.recoveries, found.steps_lost, found.is_over = run.generation, steps_lost(run), True
    outcomes = [outcome_of(folder / name) for name in names]
    found.difference = difference(expected, outcomes)


def steps_lost(run: NodesRun) -> int:
    """Steps that every rank had completed, and that were repeated."""
    lost, done = 0, -1
    for generation in range(run.generation + 1):
        firsts = run.first_steps(generation)
        if not firsts:
            continue
        lost += max(0, done + 1 - min(int(line["step"]) for line in firsts))
        ranks = range(run.members)
        done = max(done, min(int(run.steps(rank, generation)[-1]["step"]) for rank in ranks))
    return lost


def as_text(row: Row) -> str:
    if row.problem:
        return f"FAILED: {row.problem}"
    return f"{row.seconds:.2f} s, {row.steps_lost} steps lost, equal"


def report(rows: list[Row]) -> None:
    cells = [
        [
            row.fault,
            row.job,
            row.nodes,
            "-" if row.seconds is None else f"{row.seconds:.2f}",
            "-" if row.steps_lost is None else row.steps_lost,
            row.recoveries,
            "yes" if row.equal else "NO",
        ]
        for row in rows
    ]
    head = ["fault", "job", "nodes", "seconds", "steps lost", "recoveries", "equal"]
    bench.show_table("Faults of nodes: one rank on each, a snapshot at every step", head, cells)
    print()
    for name in dict.fromkeys(row.fault for row in rows):
        print(f"  {name:15} {FAULTS[name].what}")
    bench.show_conditions()


@contextlib.contextmanager
def work_folder(kept: Path | None) -> Iterator[Path]:
    """An empty folder; removed at the end unless it is kept."""
    if kept is None:
        with bench.scratch(base=None) as folder:  # /dev/shm is each node's own
            yield folder
        return
    kept.mkdir(parents=True, exist_ok=True)
    yield Path(tempfile.mkdtemp(dir=kept.resolve()))


def parse_arguments() -> argparse.Namespace:
    parser = bench.Parser(__doc__, timeout_s=2400)
    parser.add_argument("--only", action="append", metavar="FAULT", choices=FAULTS)
    parser.add_argument("--job", action="append", choices=KINDS, help="default: both")
    parser.add_argument("--list", action="store_true", help="only print the names of the faults")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="keep logs and records in this folder"
    )
    return parser.parsed()


if __name__ == "__main__":
    bench.run_bench(main)
