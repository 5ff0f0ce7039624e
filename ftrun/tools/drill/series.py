"""Executes a drill plan run by run: orders, judges and compares every fault.

Faults of one part share a run if possible. A fault that ends a run, or changes the conditions of
the next fault, has a run of its own. If a run fails, its remaining faults get a new run.
"""

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from ftrun import clock
from ftrun.errors import FtrunError
from ftrun.tools.drill.environments import host_for, load_script
from ftrun.tools.drill.expected import CLUSTER
from ftrun.tools.drill.jobs import BaselineRuns, Outcome, first_difference, job_for, steps_for
from ftrun.tools.drill.judge import FaultResult, compare, judge, row_of
from ftrun.tools.drill.plan import DrillPlan, FaultTrial, RunSection, trials_of
from ftrun.tools.drill.run import DrillRun, DrillRunFailed

OVER = "not made: the plan's minutes are over"

Report = Callable[[FaultResult], None]
"""Called when a row is judged, and again if the result of its run is wrong."""


@dataclass
class DrillSeries:
    """The execution of one plan."""

    plan: DrillPlan
    folder: Path
    report: Report

    def __post_init__(self) -> None:
        self._undisturbed = BaselineRuns(self.folder)
        self._end_s = clock.now_s() + self.plan.minutes * 60
        self._count = 0
        self.rows: list[FaultResult] = []
        """Rows of all runs that have ended."""

    def carry_out(self) -> None:
        """Fills `rows`; FtrunError if this machine cannot run the drill."""
        for part in self.plan.parts():
            for batch in batches(list(trials_of(part)), part.most_faults):
                self.rows.extend(self._batch(part, batch))

    def _batch(self, part: RunSection, batch: Sequence[FaultTrial]) -> Iterator[FaultResult]:
        left = list(batch)
        steps = steps_for(part, batch)
        while left:
            trial = left[0]
            if clock.now_s() > self._end_s:
                for one in left:
                    row = row_of(one, part.script or part.job, shape(part))
                    row.problem = OVER
                    self.report(row)
                    yield row
                return
            if trial.kind.startswith(CLUSTER):
                row = cluster_row(trial, part, self._next_folder(trial.kind))
                self.report(row)
                yield row
                left.pop(0)
                continue
            rows = self._one_run(part, left, steps)
            yield from rows
            del left[: len(rows)]

    def _one_run(
        self, part: RunSection, trials: Sequence[FaultTrial], steps: int
    ) -> list[FaultResult]:
        """Returns at least one row; the run may end before all trials are made."""
        job = job_for(part, steps)
        is_compared = any(trial.expected.equal for trial in trials)
        expected = self._undisturbed.of(job, part.nodes * part.ranks) if is_compared else []
        name = trials[0].kind if len(trials) == 1 else part.name or job.name
        folder = self._next_folder(name)
        rows: list[FaultResult] = []
        outcomes: list[Outcome] = []
        problem = ""
        with host_for(part.nodes + (part.spares if part.nodes > 1 else 0)) as host:
            try:
                with DrillRun(host, folder, part, job) as run:
                    run.ready()
                    try:
                        self._break(run, trials, rows)
                        if rows:
                            run.finish(exit_code=trials[len(rows) - 1].expected.exit_code)
                    finally:
                        outcomes = run.outcomes()
            except DrillRunFailed as error:
                problem = str(error)
        if not rows:
            rows.append(row_of(trials[0], job.name, shape(part)))
            problem = problem or f"not made: no minutes are left, or {steps} steps are too few"
        for row in rows:
            row.run = folder.name
        if problem and problem not in rows[-1].problem:
            rows[-1].fail(problem)
            self.report(rows[-1])
        made = rows
        if problem:  # compare only up to the fault that broke the run
            made, last = rows[:-1], rows[-1].fired_step or 0
            expected = [{at: it for at, it in one.items() if at != "digest" and int(at) < last}
                        for one in expected]  # fmt: skip
        for row in compare_all(made, trials, expected, outcomes) if outcomes else ():
            self.report(row)
        return rows

    def _break(self, run: DrillRun, trials: Sequence[FaultTrial], rows: list[FaultResult]) -> None:
        for trial in trials:
            if run.is_near_end() or clock.now_s() > self._end_s:
                return
            rows.append(row_of(trial, run.job.name, shape(run.part)))
            try:
                run.perform(trial, rows[-1])
            finally:
                self.report(rows[-1])

    def _next_folder(self, name: str) -> Path:
        self._count += 1
        plain = re.sub(r"[^\w.]+", "-", name)
        return self.folder / f"run-{self._count:02d}-{plain}"


def compare_all(
    rows: Sequence[FaultResult],
    trials: Sequence[FaultTrial],
    expected: Sequence[Outcome],
    outcomes: Sequence[Outcome],
) -> list[FaultResult]:
    """Records in each row whether the result is equal up to the next fault; returns failed rows.

    A difference counts against the fault before the first differing step and against all later
    faults.
    """
    at, printed = first_difference(expected, outcomes) if expected else (None, "")
    failed = []
    for number, (row, trial) in enumerate(zip(rows, trials, strict=False)):
        next_step = rows[number + 1].fired_step if number + 1 < len(rows) else None
        is_right = at is None or (
            next_step is not None and (at == "digest" or int(at) >= next_step)
        )
        had_passed = row.passed
        is_compared = bool(expected) and not trial.expected.ends
        compare(row, trial, difference="" if is_right else printed, is_compared=is_compared)
        if had_passed and not row.passed:
            failed.append(row)
    return failed


def batches(trials: Sequence[FaultTrial], most: int) -> Iterator[list[FaultTrial]]:
    for is_alone, group in groupby(trials, _is_alone):
        some, size = list(group), 1 if is_alone else most
        yield from (some[at : at + size] for at in range(0, len(some), size))


def _is_alone(trial: FaultTrial) -> bool:
    return trial.expected.alone or trial.kind.startswith(CLUSTER)


def shape(part: RunSection) -> str:
    """Formats as `1 x 2` (nodes x ranks), or `2 x 2 + 1` with spares."""
    spares = f" + {part.spares}" if part.spares and part.nodes > 1 else ""
    return f"{part.nodes} x {part.ranks}{spares}"


def check(plan: DrillPlan) -> None:
    for part in plan.parts():
        job_for(part, 10)
        if part.nodes > 1 or any(fault.kind.startswith(CLUSTER) for fault in part.faults):
            _check_cluster(part)


def _check_cluster(part: RunSection) -> None:
    module = load_script("virtual_cluster", "a drill on several nodes")
    if reason := module.available():
        raise FtrunError(f"{part.name or 'a part of the plan'} needs a virtual cluster: {reason}")
    names = [fault.kind for fault in part.faults if fault.kind.startswith(CLUSTER)]
    if names:
        known = load_script("drill_faults", "breaking virtual nodes").FAULTS
        for kind in names:
            if kind.removeprefix(CLUSTER) not in known:
                raise FtrunError(f"there is no fault {kind}: {', '.join(known)}")


def cluster_row(trial: FaultTrial, part: RunSection, folder: Path) -> FaultResult:
    """Injects one fault of scripts/drill_faults.py into a virtual node: power, cable, kernel.

    Each of them defines its own number of nodes with one rank each, and has its own cluster.
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
    return load_script("drill_nodes", "breaking virtual nodes").BaselineRuns(folder)
