#!/usr/bin/env python3
"""Break the nodes of a run in every way of the catalogue, and look whether its result is the same.

    python scripts/drill_nodes.py --json drill.json
    python scripts/drill_nodes.py --only power-off --job fsdp2

Each fault gets a run of its own on a virtual cluster of its own: one rank on each node, a
snapshot at every step, DDP or FSDP2. Of each it says

seconds     from the fault until every rank has completed a step of the next generation; where the
            run is not to be started again, the longest pause between two steps
steps_lost  completed steps that were repeated, all recoveries together
equal       the loss of every step, and all parameters, buffers and moments at the end, are byte
            for byte those of an undisturbed run of torchrun with as many ranks

Ends with 1 when a drill does not come to its end, or a byte differs.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench_common import (
    ROOT,
    BenchError,
    Deadline,
    conditions,
    parser_of,
    read_lines,
    run_bench,
    scratch,
    show_conditions,
    show_table,
)
from drill_faults import FAULTS, Breaking, Fault
from nodes_run import NodesRun, environment
from virtual_cluster import ClusterError, VirtualCluster, available

KINDS = ("ddp", "fsdp2")
STEPS = 160
PACE_S = 0.03
DRILL_S = 120.0
SCRIPT = ROOT / "scripts" / "drill_job.py"

Outcome = dict[int | str, str]
"""Of a rank: the loss by step, and the `digest` at the end."""


@dataclass
class Row:
    """What one drill has shown."""

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
class Undisturbed:
    """What torchrun gives, by job and number of ranks; each is run once."""

    folder: Path
    _found: dict[tuple[str, int], list[Outcome]] = field(default_factory=dict)

    def of(self, kind: str, ranks: int) -> list[Outcome]:
        """Raises: BenchError: torchrun fails."""
        if (kind, ranks) not in self._found:
            folder = self.folder / f"undisturbed-{kind}-{ranks}"
            self._found[kind, ranks] = self._run(kind, ranks, folder)
        return self._found[kind, ranks]

    def _run(self, kind: str, ranks: int, folder: Path) -> list[Outcome]:
        folder.mkdir()
        (folder / "go").touch()
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        done = subprocess.run(
            [sys.executable, *torchrun, *job_words(kind, folder)],
            cwd=folder,
            env=environment({"TMPDIR": str(folder)}),  # it leaves a folder of logs there
            capture_output=True,
            text=True,
            timeout=DRILL_S,
            check=False,
        )
        found = outcomes(folder, ranks)
        # A rank that aborts while gloo is taken down has noted all that is compared.
        if done.returncode != 0 and not all("digest" in one for one in found):
            raise BenchError(f"torchrun ended with {done.returncode}:\n{done.stderr[-2000:]}")
        return found


def job_words(kind: str, folder: Path, pace: float = 1.0) -> list[str]:
    """The script of a drill, and what it is told; `pace`: so much slower than usual."""
    words = [SCRIPT, "--folder", folder, "--kind", kind, "--steps", STEPS]
    words += ["--pace", PACE_S * pace]
    return [str(word) for word in words]


def main() -> int:
    args = parse_arguments()
    if args.list:
        for fault in FAULTS.values():
            print(f"{fault.name:15} {fault.what}")
        return 0
    if why := available():
        raise BenchError(f"no virtual cluster: {why}")
    found = conditions()
    deadline = Deadline(args.timeout)
    rows = []
    with work_folder(args.keep) as folder:
        undisturbed = Undisturbed(folder)
        for fault in [FAULTS[name] for name in args.only or FAULTS]:
            for kind in args.job or KINDS:
                deadline.check(f"{fault.name} with {kind}")
                rows.append(drill(fault, kind, folder, undisturbed))
    report(rows, found)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        print(f"\n  {args.json} has these figures")
    return 0 if all(row.equal for row in rows) else 1


def drill(fault: Fault, kind: str, folder: Path, undisturbed: Undisturbed) -> Row:
    """One run with one fault. What went wrong is in the row."""
    nodes = f"{fault.members}+{fault.spares}" if fault.spares else str(fault.members)
    row = Row(fault.name, kind, nodes, fault.what)
    began_s = time.monotonic()
    try:
        break_one(fault, kind, folder / f"{fault.name}-{kind}", undisturbed, row)
    except (BenchError, ClusterError) as error:
        row.problem = str(error)
    row.equal = not row.problem
    took_s = time.monotonic() - began_s
    print(f"{fault.name:15} {kind:5} {took_s:5.1f} s  {in_words(row)}", flush=True)
    return row


def break_one(fault: Fault, kind: str, folder: Path, undisturbed: Undisturbed, row: Row) -> None:
    expected = undisturbed.of(kind, fault.members)
    with VirtualCluster(fault.members + fault.spares) as cluster:
        run = NodesRun(
            cluster,
            folder,
            job_words(kind, folder, fault.pace),
            Deadline(DRILL_S),
            members=fault.members,
            spares=fault.spares,
            flags=fault.flags,
        )
        breaking = Breaking(run, kind)
        fault.act(breaking)
        run.finish()
        row.seconds = round(breaking.seconds(), 3)
    row.recoveries, row.steps_lost = run.generation, steps_lost(run)
    row.problem = difference(expected, outcomes(folder, fault.members))


def steps_lost(run: NodesRun) -> int:
    """Steps that every rank had completed, and that were done again."""
    lost, done = 0, -1
    for generation in range(run.generation + 1):
        firsts = run.first_steps(generation)
        if not firsts:
            continue
        lost += max(0, done + 1 - min(int(line["step"]) for line in firsts))
        ranks = range(run.members)
        done = max(done, min(int(run.steps(rank, generation)[-1]["step"]) for rank in ranks))
    return lost


def outcomes(folder: Path, ranks: int) -> list[Outcome]:
    return [outcome_of(folder / f"rank{rank}.jsonl") for rank in range(ranks)]


def outcome_of(path: Path) -> Outcome:
    """A step that was done twice with two results has both of them, and so equals nothing."""
    found: Outcome = {}
    for line in read_lines(path):
        at: int | str
        if line["kind"] == "step":
            at, value = line["step"], line["loss"]
        elif line["kind"] == "end":
            at, value = "digest", line["digest"]
        else:
            continue
        if found.setdefault(at, value) != value:
            found[at] += f" and {value}"
    return found


def difference(expected: list[Outcome], found: list[Outcome]) -> str:
    """The first one in words; empty where there is none."""
    for rank, (right, is_so) in enumerate(zip(expected, found, strict=True)):
        for at in right:
            if is_so.get(at) != right[at]:
                what = "the state at the end" if at == "digest" else f"the loss of step {at}"
                return f"{what} of rank {rank} is {is_so.get(at)}, undisturbed {right[at]}"
    return ""


def in_words(row: Row) -> str:
    if row.problem:
        return f"FAILED: {row.problem}"
    return f"{row.seconds:.2f} s, {row.steps_lost} steps lost, equal"


def report(rows: list[Row], found: dict[str, Any]) -> None:
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
    show_table("Faults of nodes: one rank on each, a snapshot at every step", head, cells)
    print()
    for name in dict.fromkeys(row.fault for row in rows):
        print(f"  {name:15} {FAULTS[name].what}")
    show_conditions(found)


@contextlib.contextmanager
def work_folder(kept: Path | None) -> Iterator[Path]:
    """Empty; removed at the end, unless it is to be kept."""
    if kept is None:
        with scratch(base=None) as folder:  # /dev/shm is each node's own
            yield folder
        return
    kept.mkdir(parents=True, exist_ok=True)
    yield Path(tempfile.mkdtemp(dir=kept.resolve()))


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, timeout_s=2400)
    parser.add_argument("--only", action="append", metavar="FAULT", choices=FAULTS)
    parser.add_argument("--job", action="append", choices=KINDS, help="default: both")
    parser.add_argument("--list", action="store_true", help="only name the faults")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave logs and notes there")
    return parser.parse_args()


if __name__ == "__main__":
    run_bench(main)
