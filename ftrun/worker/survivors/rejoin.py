"""Joins the next generation with a process that stays, or with one that has set up alone.

Runs in:  worker, training thread.
Takes in: the line to the agent; the groups of this process; the launch requests after the first.
Gives:    a parked process; then a process with pages, variables and streams of its new launch
          request, and groups that are connected again.

    running -revoked-> parked -launch request-> restored, and waiting for the others -> running

Rule 1: a parked process neither communicates nor seals: its groups fail each collective, the copy
        in progress has ended, and its connection to the SMP is closed.
Rule 2: no rank connects before all ranks are ready, because gloo cannot abort a connect.
Rule 3: ranks that differ in their groups, version, buckets or torch end with an error, and all
        ranks are then started again.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ftrun import clock
from ftrun.errors import JoinRefused
from ftrun.wire.crash_points import crash_point
from ftrun.wire.messages.worker import LaunchRequest, encode_launch
from ftrun.wire.run_environment import LAUNCH
from ftrun.wire.shared_memory.pages import HeartbeatField
from ftrun.worker.context import WorkerContext
from ftrun.worker.loaders import AttachedLoaders
from ftrun.worker.process import introspection, message_record
from ftrun.worker.process.startup import replace_streams
from ftrun.worker.restore.loader import saved_part
from ftrun.worker.survivors.groups import ProcessGroups
from ftrun.worker.survivors.guard import is_of_broken_connection
from ftrun.worker.survivors.line import AgentLine
from ftrun.worker.survivors.rehearsal import read_newest
from ftrun.worker.survivors.reset import reducing_alone
from ftrun.worker.survivors.set_up import SetUp

if TYPE_CHECKING:
    from ftrun.worker.snapshot_session import SnapshotSession

_READY_S = 24 * 3600.0
"""Longest wait for the other ranks: the agents end it with the process, if one of them fails."""

_CONNECT_S = 600.0
_ANY_STEP = 2**62
_OF_PROCESS = (
    HeartbeatField.PID, HeartbeatField.ATTACHED, HeartbeatField.HAS_SERVER, HeartbeatField.CAPTURES,
    HeartbeatField.TIMED, HeartbeatField.DEVICE_NS, HeartbeatField.LOOP,
)  # fmt: skip
"""Fields that a process has on each of its pages."""

SET_UP = "set_up"
"""Part of a version: results of the collectives before the first turn."""

NOT_ENTERED = "the script has not entered session.guard()"
NO_GUARD = "a turn of the loop had no session.guard()"

_log = logging.getLogger(__name__)


class StayingProcess:
    """This process, from its first launch request to the last.

    `variables`: the environment with which its script began.
    """

    def __init__(self, context: WorkerContext, variables: dict[str, str]) -> None:
        launch = context.launch
        self.groups = ProcessGroups()
        is_alone = launch.joins or launch.rehearses
        load = partial(read_newest, context, partial(saved_part, context, SET_UP))
        self.set_up = SetUp(self.groups, load if is_alone else None, context.generation)
        self.line = AgentLine(launch.descriptors["line"], context.page, self.groups.abort)
        self._context = context
        self._variables = variables

    def launch_again(self, request: LaunchRequest, fds: list[int]) -> None:
        """Replace the launch request, and all that belongs to it."""
        context, before = self._context, self._context.launch.descriptors
        descriptors = dict(zip(request.descriptors, fds, strict=True))
        replace_streams(descriptors)
        descriptors["line"] = before["line"]
        kept = {at: context.page.get(at) for at in _OF_PROCESS}
        context.commands.rebind(descriptors["command"])
        context.page.rebind(descriptors["heartbeat"])
        for at, value in kept.items():
            context.page.set(at, value)
        context.page.set(HeartbeatField.GENERATION, request.generation)
        context.page.set(HeartbeatField.STARTED_NS, clock.now_ns())
        self._set_variables(request.variables)
        context.launch = msgspec.structs.replace(
            request, descriptors=descriptors, argv=[], variables={}, cwd=""
        )
        os.environ[LAUNCH] = encode_launch(context.launch).decode()
        introspection.start_again(context)
        context.unprotected.start_again()
        for name, fd in before.items():
            if name != "line":
                with suppress(OSError):
                    os.close(fd)

    def _set_variables(self, variables: dict[str, str]) -> None:
        """Set those that differ from the last request; the script may have set others."""
        for name in self._variables.keys() | variables.keys():
            value = variables.get(name)
            if value is None:
                os.environ.pop(name, None)
            elif value != self._variables.get(name):
                os.environ[name] = value
        self._variables = variables


class Survivor:
    """A session whose process stays when another rank fails."""

    def __init__(
        self,
        context: WorkerContext,
        process: StayingProcess,
        protection: "SnapshotSession",
        loaders: AttachedLoaders,
    ) -> None:
        self._context = context
        self._process = process
        self._line, self._groups = process.line, process.groups
        self._protection = protection
        self._loaders = loaders
        self._first_step = 0
        """Oldest step to which this process can go back inside its loop."""
        self._last_step = 0
        """Newest step to which a rehearsal can go inside its loop."""
        self._may_stay = False
        self._judged_with = -1
        """Number of loaders with which it was found out whether this process may stay, in this loop
        and generation; -1: not yet."""
        self._is_guarded = True
        """The last turn that was handed out has entered its guard."""
        self._is_rehearsed = False
        """The turn that this process makes alone has begun."""
        self._rehearsing = ExitStack()
        self._rehearsal_problem = ""
        context.page.stay_problem = NOT_ENTERED

    # --- for the loop and its guard --------------------------------------------------------

    @property
    def is_rehearsal(self) -> bool:
        return self._context.launch.rehearses

    @property
    def may_stay(self) -> bool:
        return self._may_stay

    @property
    def is_over(self) -> bool:
        return self._line.is_revoked or self._is_rehearsed

    def await_end(self, error: Exception) -> bool:
        if self._is_rehearsed:
            self._rehearsal_problem = f"its turn failed: {type(error).__name__}: {error}"
        if self.is_over:
            return True
        if not self._may_stay or not is_of_broken_connection(error):
            return False
        return self._line.await_revoke(self._context.launch.confirm_s)

    def enter_loop(self, step: int, *, last_step: int, is_restored: bool) -> None:
        """Note the steps between which this process can move.

        Args:
            step: at the start of the loop.
            last_step: at its end; an earlier one if that is unknown.
            is_restored: the loop continues at the restored version, so it can go back to it.
        """
        # Here, because a restored loop iterates its loader again before its first turn. What that
        # communicates is of another pass in each process.
        self._process.set_up.finish()
        self._first_step = step if is_restored else step + 1
        self._last_step = last_step
        self._is_guarded, self._judged_with = True, -1

    def show_loop(self, epoch: int, number: int) -> None:
        self._context.page.set(HeartbeatField.LOOP, epoch << 20 | number)

    def leave_early(self) -> None:
        """The script leaves its loop by `break`. Never returns if the generation is over."""
        if self.is_over:
            self._line.refuse("the script has left its loop in a turn that is repeated")

    def leave_loop(self) -> None:
        self._may_stay = False
        self._line.set_may_stay(False)

    def begin_turn(self) -> None:
        if not self._is_guarded and not self.is_rehearsal:
            self._judged_with = len(self._loaders)
            self._set_problem(NO_GUARD)
        self._is_guarded = False
        self._is_rehearsed = self.is_rehearsal

    def enter_turn(self) -> None:
        self._is_guarded = True
        if self._judged_with != len(self._loaders) and not self.is_rehearsal:
            self._judged_with = len(self._loaders)
            self._set_problem(self._problem())

    def _set_problem(self, problem: str) -> None:
        self._context.page.stay_problem = problem
        self._may_stay = not problem
        self._line.set_may_stay(self._may_stay)

    def _problem(self) -> str:
        """Why this process cannot stay, or cannot be replaced, in words; empty if it can."""
        if self._context.recording is not None:
            return "`ftrun verify` records this run"
        set_up, protection = self._process.set_up, self._protection
        try:
            return (
                self._groups.problem
                or set_up.problem
                or protection.stay_problem()
                or self._loaders.stay_problem()
                or set_up.unknown(protection.persistent_tensors())
            )
        except Exception as error:  # noqa: BLE001 - a bug in ftrun must not end the script
            _log.warning("a bug in ftrun: this rank cannot stay", exc_info=True)
            return f"a bug in ftrun: {error!r}"

    def set_up(self) -> dict[str, Any]:
        """What a process that replaces this rank needs, as part of each snapshot."""
        return self._process.set_up.export()

    # --- from one generation to the next ---------------------------------------------------

    def park(self) -> None:
        """Wait for the next launch request, and replace the last one by it."""
        crash_point("worker.renew.revoked")
        self._may_stay, self._judged_with = False, -1
        self._rehearsing.close()
        self._groups.detach()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self._protection.leave()
        problem = self._groups.problem or self._loaders.stay_problem() or self._rehearsal_problem
        if problem:
            self._line.refuse(problem)
        crash_point("worker.renew.parked")
        # A rank has made the steps of all versions that it may go to, and a rehearsal has not.
        last_step = self._last_step if self.is_rehearsal else _ANY_STEP
        request, fds = self._line.park(self._first_step, last_step)
        self._process.launch_again(request, fds)
        self._is_rehearsed = False
        self._groups.stand_in()
        crash_point("worker.renew.launched")

    def join_first(self, buckets: Callable[[], str]) -> None:
        """At the first turn: end the set-up; `join` if it was alone."""
        self._process.set_up.finish()
        if self._context.launch.rehearses:
            self._groups.stand_in()
            wrappers = self._protection.buckets.wrappers()
            self._rehearsing.enter_context(reducing_alone(wrappers.values()))
        elif self._context.launch.joins:
            self.join(buckets())

    def join(self, buckets: str) -> None:
        """Connect the groups of all ranks; `buckets`: digest of the layouts of DDP's buckets.

        Raises JoinRefused if this rank differs from another one.
        """
        crash_point("worker.renew.restored")
        context = self._context
        store = self._await_all()
        crash_point("worker.renew.ready")
        timeout = timedelta(seconds=_CONNECT_S)
        self._groups.renew(store, context.generation, timeout)
        message_record.restart()
        crash_point("worker.renew.connected")
        mine = [
            self._groups.digest(), self._process.set_up.origin, str(context.restore), buckets,
            str(torch.__version__),
        ]  # fmt: skip
        digest = hashlib.sha256(json.dumps(mine).encode()).hexdigest()
        if store.compare_set("digest", "", digest).decode() != digest:
            raise JoinRefused(
                f"rank {context.rank} cannot join the others: it differs from another rank in its "
                f"process groups, set-up, restored version, gradient buckets or torch: {mine}"
            )
        context.page.set(HeartbeatField.INIT_GROUP_NS, clock.now_ns())
        introspection.start_server(context)
        crash_point("worker.renew.joined")

    def _await_all(self) -> Store:
        """Rule 2."""
        context = self._context
        limit = timedelta(seconds=_READY_S)
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=limit)
        inner = PrefixStore(f"ftrun/{context.generation}", store)
        if inner.add("ready", 1) == context.world_size:
            inner.set("all", "1")
        inner.wait(["all"], limit)
        return inner
