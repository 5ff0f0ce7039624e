"""Injects faults into a virtual node from outside: power, cable, kernel.

Runs in:  cli.
Takes in: a trial whose kind begins with `cluster:`; the catalogue in scripts/drill_faults.py.
Gives:    a `FaultResult`, as for every other fault.

An agent cannot switch off its own node. Each of these faults defines its own number of nodes with
one rank each, and has its own cluster.
"""

import functools
from pathlib import Path

from ftrun.errors import FtrunError
from ftrun.tools.drill.environments import load_script
from ftrun.tools.drill.expected import CLUSTER
from ftrun.tools.drill.judge import FaultResult, compare, judge, row_of
from ftrun.tools.drill.plan import FaultTrial, RunSection


def cluster_row(trial: FaultTrial, part: RunSection, folder: Path) -> FaultResult:
    """Executes one run with one fault; problems are recorded in the row.

    Raises:
        FtrunError: the scripts are missing, or the fault does not support the job.
    """
    faults = load_script("drill_faults", "breaking virtual nodes")
    nodes = load_script("drill_nodes", "breaking virtual nodes")
    fault = faults.FAULTS[trial.kind.removeprefix(CLUSTER)]
    spares = f" + {fault.spares}" if fault.spares else ""
    row = row_of(trial, part.job, f"{fault.members} x 1{spares}")
    row.target, row.run = fault.what, folder.name
    folder.mkdir(parents=True)
    if part.job not in nodes.KINDS:
        raise FtrunError(f"{trial.kind} goes with job ddp or fsdp2, not {part.job}")
    broken = nodes.break_in(fault, part.job, folder, _undisturbed(folder.parent / "from-outside"))
    row.problem = broken.problem
    judge(trial, row, broken.journal, hit_s=broken.hit_s)
    if broken.steps_lost is not None:
        row.steps_lost = broken.steps_lost
    if broken.is_over:
        compare(row, trial, difference=broken.difference, is_compared=True)
    return row


@functools.cache
def _undisturbed(folder: Path) -> object:
    """Cached per drill folder, so that each job has one baseline run."""
    return load_script("drill_nodes", "breaking virtual nodes").Undisturbed(folder)
