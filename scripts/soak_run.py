"""A run of a soak: broken nodes return by themselves, and status shows when the next may fail.

Takes in: a virtual cluster; the faults that soak_kills.py injects.
          The notes files of drill_job.py, one for each rank.
Gives:    the status of the run, and waits that are bounded one by one. Per generation the step that
          all ranks restored and the last one that all completed.

Delayed actions (starting a node, reconnecting a cable) run inside the waits, so that no thread is
needed. Only new lines are read, because a training of 100 kills records thousands of steps.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench_common import BenchError, Deadline, NotesReader
from nodes_run import NodesRun

from ftrun.cli.commands.status import status_of
from ftrun.cli.runs import inspect_run
from ftrun.errors import FtrunError
from ftrun.wire.messages.status import StatusView
from ftrun.wire.run_environment import RunFolder

WAIT_S = 600.0
"""For one recovery; the start of a node on a busy machine takes most of it."""
_POLL_S = 0.02
_STATUS_EVERY_S = 0.25

Line = dict[str, Any]


@dataclass
class Life:
    """One rank in one generation."""

    restored: int | None = None
    """The step boundary at which it began."""
    done: int = 0
    """Steps completed since the start of the training; 0: none in this generation."""


@dataclass
class RankNotes:
    """What the records of one rank say so far."""

    file: NotesReader
    lives: dict[int, Life] = field(default_factory=dict)
    committed: int = 0
    """The newest committed step in its records."""
    sealed: int = 0
    intervals_ns: list[int] = field(default_factory=list)
    """Between two steps of one generation."""
    problems: list[str] = field(default_factory=list)
    _taken: int = 0
    """Number of lines."""
    _last: Line | None = None

    def read(self) -> None:
        lines = self.file.read()
        for line in lines[self._taken :]:
            self._take(line)
        self._taken = len(lines)

    def _take(self, line: Line) -> None:
        generation = int(line["generation"])
        if self.lives and generation < max(self.lives):
            what = f"{line['kind']} in generation {generation} on {line['node']}"
            newest = f"after generation {max(self.lives)} had begun"
            self.problems.append(f"{self.file.path.stem}: {what} {newest}")
            return
        life = self.lives.setdefault(generation, Life())
        if line["kind"] == "attached":
            life.restored = int(line["step"])
        if line["kind"] != "step":
            self._last = None
            return
        life.done = int(line["step"]) + 1
        self.committed = max(self.committed, int(line.get("committed", 0)))
        self.sealed = max(self.sealed, int(line.get("sealed", 0)))
        if self._last is not None:
            self.intervals_ns.append(int(line["ns"]) - int(self._last["ns"]))
        self._last = line


class TrainingNotes:
    """Of all ranks together."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.ranks = [RankNotes(NotesReader(path)) for path in paths]

    def read(self) -> None:
        for rank in self.ranks:
            rank.read()

    @property
    def generations(self) -> list[int]:
        """Those in which every rank has begun, in order."""
        found = [{g for g, life in rank.lives.items() if life.restored is not None}
                 for rank in self.ranks]  # fmt: skip
        return sorted(set.intersection(*found))

    def restored(self, generation: int) -> list[int]:
        """The step boundary at which each rank began that generation; equal in a correct run."""
        return [rank.lives[generation].restored or 0 for rank in self.ranks]

    def done(self, *, before: int | None = None) -> int:
        """Steps that all ranks have completed, in any generation or in those before this one."""
        found = [g for g in self.generations if before is None or g < before]
        return max((min(rank.lives[g].done for rank in self.ranks) for g in found), default=0)

    @property
    def committed(self) -> int:
        """The newest step that any rank recorded as committed."""
        return max(rank.committed for rank in self.ranks)

    @property
    def sealed(self) -> int:
        """The newest step that all ranks have sealed."""
        return min(rank.sealed for rank in self.ranks)

    @property
    def problems(self) -> list[str]:
        return [problem for rank in self.ranks for problem in rank.problems]

    def step_s(self) -> float:
        """The usual time of a step: median of the first rank."""
        intervals = sorted(self.ranks[0].intervals_ns)
        return intervals[len(intervals) // 2] / 1e9 if intervals else 0.0


@dataclass
class Later:
    """An action on a node at a time or, if later, once `is_due`."""

    node: int
    at_s: float
    act: Callable[[], object]
    is_due: Callable[[], bool] = lambda: True


class SoakRun(NodesRun):
    """A run over three nodes and a spare, whose nodes come back."""

    notes: TrainingNotes
    later: list[Later]

    def begin(self) -> None:
        self.later = []
        self.notes = TrainingNotes([reader.path for reader in self.readers])
        self.start_all()
        self.await_so("the first steps", lambda: self.notes.done() >= 3)

    # --- its status ---------------------------------------------------------------------------

    def status(self) -> StatusView | None:
        """Of the first node that knows the whole run; None: there is none now."""
        for node in self.processes:
            view = self._status_of(node)
            if view is not None and view.cluster is not None and view.cluster.nodes:
                return view
        return None

    def is_protected(self) -> bool:
        """Whether the run reports that it survives the loss of any node, and has a spare."""
        view = self.status()
        summary = view.summary if view is not None else ""
        return "survives any" in summary and "1 spare" in summary and "lost:" not in summary

    def leader(self) -> int | None:
        view = self.status()
        leader = view.cluster.leader if view is not None and view.cluster is not None else None
        return int(leader.removeprefix("node")) if leader else None

    def _status_of(self, node: int) -> StatusView | None:
        init = self.cluster.nodes()[node].init
        if init is None or self.processes[node].poll() is not None:
            return None
        with contextlib.suppress(FtrunError, OSError):
            for path in Path(f"/proc/{init.pid}/root/run/user").glob("*/ftrun/*"):
                return status_of(inspect_run(RunFolder(path)))
        return None

    # --- waiting --------------------------------------------------------------------------------

    def await_so(self, what: str, is_so: Callable[[], object], *, every_s: float = _POLL_S) -> None:
        """Wait until the condition holds; perform the actions that are due.

        Raises:
            BenchError: a node has failed, or this has taken `WAIT_S`.
        """
        self.deadline = Deadline(WAIT_S)
        while True:
            self._do_what_is_due()
            self.notes.read()
            if is_so():
                return
            self._check(what)
            time.sleep(every_s)

    def let_pass(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        self.await_so("a pause", lambda: time.monotonic() >= end_s)

    def await_protection(self) -> None:
        """Wait until no action is pending, and the run reports that the next node may be lost."""
        self.await_so(
            "a protected state",
            lambda: not self.later and self.is_protected(),
            every_s=_STATUS_EVERY_S,
        )

    def await_next_steps(self) -> None:
        """Wait until all ranks are beyond every step that they had completed."""
        wanted = self.notes.done() + 2
        self.await_so(f"{wanted} completed steps", lambda: self.notes.done() >= wanted)

    # --- later ----------------------------------------------------------------------------------

    def do_later(
        self,
        node: int,
        delay_s: float,
        act: Callable[[], object],
        is_due: Callable[[], bool] = lambda: True,
    ) -> None:
        self.later.append(Later(node, time.monotonic() + delay_s, act, is_due))

    def comes_back(self, node: int, delay_s: float) -> None:
        """Start it again, as a new machine if it has lost its power."""

        def again() -> None:
            if not self.cluster.nodes()[node].is_alive:
                self.cluster.revive(node)
            self.start(node)

        self.may_end(node)
        self.do_later(node, delay_s, again)

    def whole_nodes(self) -> list[int]:
        """Nodes that run and have no pending action."""
        broken = {one.node for one in self.later}
        return [
            node
            for node, process in self.processes.items()
            if process.poll() is None and node not in broken
        ]

    def _do_what_is_due(self) -> None:
        now_s = time.monotonic()
        due = [one for one in self.later if one.at_s <= now_s and one.is_due()]
        for one in due:
            self.later.remove(one)
            one.act()

    # --- the end --------------------------------------------------------------------------------

    def end(self) -> None:
        """Let the training finish. Raises: BenchError: a node did not exit with 0."""
        (self.folder / "go").touch()
        done = -1
        while not all(process.poll() is not None for process in self.processes.values()):
            done = self._await_more_of(done)
        self._check("the end")
        if left := list(self._left_behind()):
            raise BenchError("processes are left behind: " + ", ".join(left))

    def _await_more_of(self, done: int) -> int:
        """Wait until more steps are completed, or all have ended."""
        self.await_so(
            "the end",
            lambda: (
                self.notes.done() > done
                or all(process.poll() is not None for process in self.processes.values())
            ),
            every_s=_STATUS_EVERY_S,
        )
        return self.notes.done()

    def _left_behind(self) -> Iterator[str]:
        """Processes on a node whose ftrun has ended."""
        for node in self.processes:
            for process in self.processes_of(node):
                with contextlib.suppress(OSError):
                    name = Path(f"/proc/{process.pid}/comm").read_text().strip()
                    yield f"{name} on node{node}"
