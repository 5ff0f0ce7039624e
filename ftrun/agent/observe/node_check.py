"""Checks whether this node is fit to run ranks: starts next to the imports, and repeats later.

Runs in the main thread at the start, then in a thread for each further check; `dialled` in the
thread of a handshake. A check that hangs, for example on a dead disk or driver, is killed.

Rule 1: a run on one node, and an agent that was restarted, measure only what costs nothing. The
        first has no node to compare with, and ranks wait for the second. Only the collective check
        runs on one node too, while the ranks start.
Rule 2: the link is measured before the first `Join`, so that the first plan uses the result.
Rule 3: a node that is not fit repeats its check until it is. The first repetition is soon, because
        other work on the machine that disturbed one check has then ended. The interval grows from
        there.
"""

import logging
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from ftrun import clock
from ftrun.agent.cluster.collective_check import CollectiveCheck
from ftrun.agent.cluster.path_probe import probe
from ftrun.agent.launch.process import awaited, python_command
from ftrun.agent.observe.preflight import room
from ftrun.config.run_spec import RunSpec
from ftrun.journal import Journal
from ftrun.membership.events import NodeChecked
from ftrun.monitor.node_fitness import CheckOutcome, NodeFitness, NodeMeasurements, judge
from ftrun.monitor.slow.collective_check import CollectiveResult, wrong_hops, wrong_nodes
from ftrun.records.membership import PreflightFinished
from ftrun.wire.cluster.messages import ProbeLinkRequest, ProbeLinkResult
from ftrun.wire.transport.handshake import PeerIdentity
from ftrun.wire.transport.secret import Secret

LINK_S = 1.0
"""For the probe of one link, because it delays a `Join`."""

SOON_S = 5.0
"""Until the second check of a node that is not fit; doubled with each further check."""

READ_S = 0.5
"""For the result of a check whose time is over, while torch is being imported."""

_log = logging.getLogger(__name__)


class NodeCheck:
    """All checks of one agent."""

    def __init__(self, spec: RunSpec, journal: Journal) -> None:
        self.fitness: NodeFitness | None = None
        """The result of the newest check; None: there is none."""
        self._settings = spec.profile.preflight
        self._is_alone = spec.nodes is None
        self._folder = Path(spec.log_folder)
        self._journal = journal
        self._child: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0
        self._number = 0
        self._report: Callable[[NodeChecked], None] | None = None
        self._identity: PeerIdentity | None = None
        self._secret: Secret | None = None
        self._link: tuple[str, str, int] | None = None
        """Node id, host and port of the agent that was reached last."""
        self._link_figures = NodeMeasurements()
        self._is_link_due = False
        self.collective = CollectiveCheck(allow_faults=spec.allow_faults)
        self._collective: CollectiveResult | None = None
        self._is_first = False
        self._busy = threading.Lock()
        self._stop = threading.Event()

    def begin(self, *, is_awaited: bool) -> None:
        """Start the first check. `is_awaited`: an earlier agent here was part of the run."""
        if not self._settings.enabled:
            return
        self._started_s = clock.now_s()
        self._is_first = not is_awaited
        self._is_link_due = not self._is_alone and not is_awaited
        if self._is_link_due:
            self._start()

    def first(self) -> None:
        if not self._settings.enabled:
            return
        is_whole = self._child is not None
        self._note(self._collect() if is_whole else room(self._folder), is_whole=is_whole)
        if self.fitness is not None and self._is_alone and not self.fitness.is_fit:
            _log.warning("this machine may not be fit for the run: %s", self.fitness)
        if self._is_alone and self._is_first and self._settings.collective_mb:
            _start_thread(self._compare_processors)

    def join(
        self, identity: PeerIdentity, secret: Secret | None, report: Callable[[NodeChecked], None]
    ) -> None:
        """Report results to the control loop from now on; called before the first connection."""
        self._identity = msgspec.structs.replace(identity, purpose="probe")
        self._secret, self._report = secret, report
        self.collective.join(identity, secret, self._compared)
        if self.fitness is not None:
            report(NodeChecked(self.fitness))
            self._repeat_until_fit()

    def close(self) -> None:
        self._stop.set()
        self._end_child()
        self.collective.close()

    def dialled(self, node_id: str, host: str, port: int) -> None:
        """Measure the link to the first agent that was reached, which has received nothing yet."""
        self._link = (node_id, host, port)
        if not self._is_link_due or self.fitness is None:
            return
        self._is_link_due = False
        self._measure_link()
        self._note(self.fitness.figures, is_whole=self.fitness.is_whole, number=self._number)

    def _measure_link(self) -> None:
        if self._link is None or self._identity is None:
            return
        node_id, host, port = self._link
        order = ProbeLinkRequest(0, node_id, host, port)
        self._link_figures = _link_figures(
            probe(order, self._identity, self._secret, limit_s=LINK_S)
        )

    def _compared(self, result: CollectiveResult) -> None:
        with self._busy:
            self._collective = result.after(self._collective)
            if self.fitness is not None:
                found = self.fitness
                self._note(found.figures, is_whole=found.is_whole, number=self._number)

    def _compare_processors(self) -> None:
        """On one node: a wrong sum is a warning, because no other node can run the ranks."""
        try:
            found = self.collective.on_one_machine(self._settings.collective_mb * 1_000_000)
        except OSError as error:  # no more processes or open files
            _log.warning("the processors of this machine are not compared: %s", error)
            return
        if self._stop.is_set():
            return
        wrong = wrong_nodes(wrong_hops(found))
        problems = tuple(f"{name}: {text}" for (name, _), text in sorted(wrong.items()))
        self._compared(next(iter(found.values())))
        if problems and self.fitness is not None:
            self.fitness = msgspec.structs.replace(
                self.fitness, outcome=CheckOutcome.FAIL, problems=problems
            )
            text = f"this machine computes wrong sums: {self.fitness}"
            self._journal.write(PreflightFinished(text, self.fitness))
            _log.warning("%s. Its results cannot be trusted: use another machine", text)

    def again(self, number: int) -> None:
        _start_thread(partial(self._again, number))  # without a thread the control loop asks again

    def _again(self, number: int) -> None:
        with self._busy:
            if self._number >= number or self._stop.is_set():
                return
            self._start()
            figures = self._collect()
            self._measure_link()
            self._note(figures, is_whole=True, number=max(number, self._number + 1))

    def _repeat_until_fit(self) -> None:
        if self.fitness is not None and not self.fitness.is_fit and not self._is_alone:
            _start_thread(self._repeat)

    def _repeat(self) -> None:
        wait_s = SOON_S
        while not self._stop.wait(min(wait_s, self._settings.retry_max_s)):
            self._again(self._number + 1)
            if self.fitness is None or self.fitness.is_fit:
                return
            wait_s *= 2

    def _start(self) -> None:
        self._started_s = clock.now_s()
        try:
            self._child = subprocess.Popen(
                python_command("ftrun.agent.observe.preflight", str(self._folder)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:  # no more processes: `room` measures the rest
            _log.warning("the check of this node cannot be started: %s", error)
            return
        awaited.add(self._child.pid)

    def _collect(self) -> NodeMeasurements:
        child, limit_s = self._child, self._settings.timeout_s
        if child is None:
            reason = "its process could not be started"
            return msgspec.structs.replace(
                room(self._folder), not_done=f"nothing measured: {reason}"
            )
        try:
            left_s = max(READ_S, self._started_s + limit_s - clock.now_s())
            data, _ = child.communicate(timeout=left_s)
            return msgspec.json.decode(data, type=NodeMeasurements)
        except (subprocess.TimeoutExpired, msgspec.MsgspecError):
            reason = f"the check was not done within {limit_s:g} s"
            return msgspec.structs.replace(room(self._folder), not_done=reason)
        finally:
            self._end_child()

    def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        if child.poll() is None:
            child.kill()
            child.communicate()
        awaited.discard(child.pid)

    def _note(self, figures: NodeMeasurements, *, is_whole: bool, number: int = 1) -> None:
        link = self._link_figures
        figures = msgspec.structs.replace(
            figures,
            link_to=link.link_to,
            link_rtt_s=link.link_rtt_s,
            link_bytes_per_s=link.link_bytes_per_s,
            collective=self._collective,
            not_done=figures.not_done or link.not_done,
        )
        before, self._number = self.fitness, number
        found = judge(figures, self._settings, number=number, is_whole=is_whole)
        self.fitness = found
        self._journal.write(PreflightFinished(f"this node: {found}", found))
        if str(found) != "fit" and (before is None or str(before) != str(found)):
            _log.warning("the check of this node: %s", found)
        if self._report is not None:
            self._report(NodeChecked(found))
            if before is not None and before.is_fit:
                self._repeat_until_fit()


def _start_thread(work: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # no more threads
        threading.Thread(target=work, name="ftrun-preflight", daemon=True).start()


def _link_figures(found: ProbeLinkResult) -> NodeMeasurements:
    both = [rate for rate in (found.to_bytes_per_s, found.from_bytes_per_s) if rate > 0]
    problem = f"the link to {found.receiver} was not measured: {found.problem}"
    return NodeMeasurements(
        link_to=found.receiver,
        link_rtt_s=found.rtt_s,
        link_bytes_per_s=min(both, default=0.0),
        not_done=problem if found.problem else "",
    )
