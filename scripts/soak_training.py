"""One training of a soak: a number of kills, then the comparison at its end.

Takes in: a folder, a seed, the number and kinds of kills, the outcome of the undisturbed run.
Gives:    a `Training`, which is a row of the JSON; a failure is in `problem`.

At each kill, the promise is the newest step that any rank recorded as committed: no recovery may go
back behind it. A recovery after the kill of a process alone repeats fewer steps, because the memory
of all nodes is still available.
"""

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench_common import BenchError, Deadline
from drill_nodes import job_argv
from soak_kills import KINDS, OF_NODES, OF_PROCESSES, Kills
from soak_run import SoakRun
from virtual_cluster import ClusterError, VirtualCluster

from ftrun.errors import FtrunError
from ftrun.tools.drill.jobs import BaselineRuns, Outcome, difference, outcome_of

MEMBERS, SPARES = 3, 1
BUDGETS = {
    "restart.budget": 1000,
    "restart.same_cause_limit": 1000,
    "nodes.max_failures_per_hour": 1000,
}
"""Raises limits that end a run, or exclude a node, after a few failures; a soak has many."""
PACE = 16.0
"""Slower than a drill: 0.48 s for a step, so that a training has only the steps it needs."""
STEPS_PER_KILL = 7
STEPS_AT_LEAST = 300
STEPS_LEFT = 20
"""A training ends with fewer kills if only these steps remain; the next one does the others."""
PAUSE_S = (0.2, 1.5)
"""Between the end of a recovery and the next kill."""
EARLY, EARLY_PAUSE_S = 0.15, 1.0
"""Part of the kills of processes that come while the run still recovers from another one."""

__all__ = ["BUDGETS", "KINDS", "BaselineRuns", "Training", "train"]


@dataclass
class Kill:
    """One kill and its recovery."""

    kind: str
    at_s: float
    """Since the first step of the training."""
    step: int
    """Completed by all ranks at the kill."""
    promised: int
    """Committed at the kill."""
    what: str = ""
    restored: int | None = None
    """Step from which the run resumed; None: without a restart, or another kill came first."""
    repeated: int = 0
    """Completed steps that were repeated."""
    seconds: float = 0.0
    """Until all ranks had completed new steps."""


@dataclass
class Training:
    """The result of one training."""

    seed: str
    job: str
    steps: int
    kills: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)
    restarts: int = 0
    steps_repeated_max: int = 0
    lost_more_than_promised: int = 0
    equal: bool = False
    effective_training_time_ratio: float = 0.0
    seconds: float = 0.0
    """From the first step to the recovery from the last kill."""
    problem: str = ""
    rows: list[Kill] = field(default_factory=list)


def steps_for(kills: int) -> int:
    """Steps in whole epochs of the job; it waits before the last ten until all kills are done."""
    return -(-max(STEPS_AT_LEAST, STEPS_PER_KILL * kills) // 10) * 10


def deck(kinds: Sequence[str], kills: int, chance: random.Random) -> list[str]:
    """The same number of each kind, in a random order."""
    found = [kinds[number % len(kinds)] for number in range(kills)]
    chance.shuffle(found)
    return found


def train(
    folder: Path, seed: str, job: str, kinds: Sequence[str], expected: Sequence[Outcome]
) -> Training:
    """One training with these kills, in this order, on a cluster of its own."""
    found = Training(seed, job, steps_for(len(kinds)))
    try:
        with VirtualCluster(MEMBERS + SPARES) as cluster:
            flags = [word for name, value in BUDGETS.items() for word in
                     ("--set", f"{name}={value}")]  # fmt: skip
            run = SoakRun(
                cluster,
                folder,
                job_argv(job, folder, PACE, steps=found.steps),
                Deadline(0.0),
                members=MEMBERS,
                spares=SPARES,
                flags=flags,
            )
            _Soak(run, found, random.Random(seed)).go(kinds)
            outcomes = [outcome_of(reader.path) for reader in run.readers]
            found.problem = difference(expected, outcomes)
    except (BenchError, ClusterError, FtrunError) as error:
        found.problem = str(error)
    found.equal = not found.problem
    return found


class _Soak:
    """The kills of one training."""

    def __init__(self, run: SoakRun, found: Training, chance: random.Random) -> None:
        self._run = run
        self._found = found
        self._chance = chance
        self._kills = Kills(run, chance)
        self._judged = 0
        self._open: list[Kill] = []
        """Kills whose recovery is not judged yet."""

    def go(self, kinds: Sequence[str]) -> None:
        self._run.begin()
        self._started_s = time.monotonic()
        began = self._run.notes.done()
        for number, kind in enumerate(kinds):
            self._let_recover(kind)
            if self._run.notes.done() > self._found.steps - STEPS_LEFT:
                break
            self._kill(kind)
            self._report(number + 1)
        self._recover()
        self._sum_up(self._run.notes.done() - began)
        # Without shared storage, a node that starts after the end of the run cannot know of the
        # end: it waits for `nodes.pause_timeout_s`.
        self._run.await_protection()
        self._run.end()

    def _let_recover(self, kind: str) -> None:
        """Before a kill of this kind; kills of processes may come early."""
        last = self._open[-1].kind if self._open else None
        is_of_processes = kind in OF_PROCESSES and last in OF_PROCESSES
        if is_of_processes and self._chance.random() < EARLY:
            self._run.let_pass(self._chance.uniform(0.0, EARLY_PAUSE_S))
            return
        self._recover()
        if kind in OF_NODES or last in OF_NODES:
            self._run.await_protection()
        self._run.let_pass(self._chance.uniform(*PAUSE_S))
        if kind in OF_NODES:
            self._run.await_protection()

    def _kill(self, kind: str) -> None:
        notes = self._run.notes
        notes.read()
        kill = Kill(
            kind, round(time.monotonic() - self._started_s, 2), notes.done(), notes.committed
        )
        self._open.append(kill)
        self._found.rows.append(kill)
        kill.what = self._kills.kill(kind)
        self._found.by_kind = dict(Counter(row.kind for row in self._found.rows))
        self._found.kills = len(self._found.rows)

    def _recover(self) -> None:
        """Wait until training resumes; then judge the restored state."""
        if not self._open:
            return
        self._run.await_next_steps()
        now_s = time.monotonic() - self._started_s
        for kill in self._open:
            kill.seconds = round(now_s - kill.at_s, 2)
        self._judge()
        self._open.clear()

    def _judge(self) -> None:
        found, notes, last = self._found, self._run.notes, self._open[-1]
        promised = max(kill.promised for kill in self._open)
        for generation in [one for one in notes.generations if one > self._judged]:
            self._judged = generation
            restored = notes.restored(generation)
            if len(set(restored)) > 1:
                raise BenchError(f"generation {generation}: ranks restored steps {restored}")
            repeated = max(0, notes.done(before=generation) - restored[0])
            last.restored, last.repeated = restored[0], last.repeated + repeated
            found.steps_repeated_max = max(found.steps_repeated_max, repeated)
            if restored[0] < promised:
                found.lost_more_than_promised += 1
                print(f"  LOST: generation {generation} restored {restored[0]}, and {promised} "
                      f"was committed at {last}", flush=True)  # fmt: skip
        found.restarts = len(notes.generations) - 1
        if notes.problems:
            raise BenchError("two trainings at once: " + "; ".join(notes.problems))

    def _sum_up(self, steps: int) -> None:
        self._found.seconds = round(time.monotonic() - self._started_s, 1)
        useful_s = steps * self._run.notes.step_s()
        self._found.effective_training_time_ratio = round(useful_s / self._found.seconds, 3)

    def _report(self, number: int) -> None:
        kill = self._found.rows[-1]
        print(f"kill {number:3} at {kill.at_s:6.1f} s, step {kill.step:5}: {kill.kind:6} "
              f"{kill.what}", flush=True)  # fmt: skip


def summary(trainings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The keys of the JSON, over all trainings."""
    by_kind = Counter[str]()
    for one in trainings:
        by_kind.update(one["by_kind"])
    seconds = sum(one["seconds"] for one in trainings)
    useful_s = sum(one["seconds"] * one["effective_training_time_ratio"] for one in trainings)
    return {
        "kills": sum(one["kills"] for one in trainings),
        "by_kind": dict(sorted(by_kind.items())),
        "steps_repeated_max": max((one["steps_repeated_max"] for one in trainings), default=0),
        "lost_more_than_promised": sum(one["lost_more_than_promised"] for one in trainings),
        "equal": all(one["equal"] for one in trainings),
        "effective_training_time_ratio": round(useful_s / seconds, 3) if seconds else None,
    }
