"""A run of a soak: nodes that are broken come back by themselves, and status says when to go on.

Takes in: a virtual cluster; what soak_kills.py does to its nodes.
Gives:    what the run says of itself, and waits that are bounded one by one.

What is to happen later (a node that starts again, a cable that is plugged in) happens in the
waits, and so nothing is left to a thread.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bench_common import BenchError, Deadline
from nodes_run import NodesRun
from soak_notes import TrainingNotes

from ftrun.cli.commands.status import status_of
from ftrun.cli.runs import inspect_run
from ftrun.errors import FtrunError
from ftrun.wire.messages.status import StatusView
from ftrun.wire.run_environment import RunFolder

WAIT_S = 150.0
"""For one recovery; a node that starts on a busy machine takes most of it."""
_POLL_S = 0.02
_STATUS_EVERY_S = 0.25


@dataclass
class Later:
    """Something to be done to a node at a time or, if later, once `is_due`."""

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

    # --- what it says ---------------------------------------------------------------------------

    def status(self) -> StatusView | None:
        """Of the first node that knows the whole run; None: there is none now."""
        for node in self.processes:
            view = self._status_of(node)
            if view is not None and view.cluster is not None and view.cluster.nodes:
                return view
        return None

    def is_protected(self) -> bool:
        """Whether the run says that it survives any node, and has a spare to go on with."""
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
        """Until it is so; does what is due meanwhile.

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
        """Until nothing is to be done, and the run says that the next node may go."""
        self.await_so(
            "a protected state",
            lambda: not self.later and self.is_protected(),
            every_s=_STATUS_EVERY_S,
        )

    def await_next_steps(self) -> None:
        """Until all ranks have gone on beyond every step that they had completed."""
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
        """It starts again, as a new machine if it has lost its power."""

        def again() -> None:
            if not self.cluster.nodes()[node].is_alive:
                self.cluster.revive(node)
            self.start(node)

        self.may_end(node)
        self.do_later(node, delay_s, again)

    def whole_nodes(self) -> list[int]:
        """Those that run, and to which nothing is to be done."""
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
        """Let the training go to its end. Raises: BenchError: a node did not end with 0."""
        (self.folder / "go").touch()
        done = -1
        while not all(process.poll() is not None for process in self.processes.values()):
            done = self._await_more_of(done)
        self._check("the end")
        if left := list(self._left_behind()):
            raise BenchError("processes are left behind: " + ", ".join(left))

    def _await_more_of(self, done: int) -> int:
        """Until more steps are completed, or all have ended."""
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
        """What runs on a node whose ftrun has ended."""
        for node in self.processes:
            for process in self.processes_of(node):
                with contextlib.suppress(OSError):
                    name = Path(f"/proc/{process.pid}/comm").read_text().strip()
                    yield f"{name} on node{node}"
