"""Faults that are done to a virtual node from outside: power, cable, kernel.

Runs in:  cli.
Takes in: a trial whose kind begins with `cluster:`; the catalogue of scripts/drill_faults.py.
Gives:    a `FaultResult` as for every other fault.

No agent can switch its own node off. These faults have their own number of nodes, one rank on
each, and a cluster of their own.
"""

import functools
from pathlib import Path

from ftrun.errors import FtrunError
from ftrun.tools.drill.environments import load_script
from ftrun.tools.drill.expected import CLUSTER
from ftrun.tools.drill.judge import FaultResult, compare, judge, row_of
from ftrun.tools.drill.plan import FaultTrial, RunSection


def cluster_row(trial: FaultTrial, part: RunSection, folder: Path) -> FaultResult:
    """One run with one fault; what went wrong is in the row.

    Raises:
        FtrunError: the scripts are not there.
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
    """Of one drill, so that each job is run once."""
    return load_script("drill_nodes", "breaking virtual nodes").Undisturbed(folder)
