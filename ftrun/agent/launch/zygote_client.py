"""The zygote of this node, and its standbys: forked processes that become ranks.

Runs in:  agent, main thread (PDEATHSIG fires when the forking thread ends).
Takes in: the number of ranks; launch requests; the variables of running ranks.
Gives:    processes of ranks. A standby becomes a rank in the time of a message, because it is
          forked already. With `start.device: context`, it has also initialised the device of a
          local rank: it is bound.
Survives: the zygote: existing standbys can still be launched.

Rule 1: a bound standby serves only its local rank, and only with the variables for which the device
        was initialised.
Rule 2: a launch never waits for a device. A standby that is still being bound is dropped.
Rule 3: nothing is bound any more after a problem, or after a rank of a bound standby made no step:
        the script may need a device that is not initialised.
"""

import contextlib
import json
import logging
import os
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ftrun import clock
from ftrun.agent.launch.process import ChildProcess, python_command, spawn
from ftrun.journal import Journal
from ftrun.monitor.worker_exits import exit_text
from ftrun.records.snapshots import (
    CompilerImported,
    FunctionsPrepared,
    StandbyBound,
    StandbyDropped,
)
from ftrun.wire.messages.agent_start import ZygoteSettings
from ftrun.wire.messages.worker import (
    REQUEST_IN_MEMORY,
    BindDevice,
    DeviceBound,
    LaunchRequest,
    encode_launch,
    read_by_device,
)

_log = logging.getLogger(__name__)

READY_WAIT_S = 120.0
"""Importing torch took 1.1 s here on a quiet machine, and minutes from a slow network disk."""

_END_WAIT_S = 1.0  # for all processes, before they are killed
_MAX_ANSWER_BYTES = 4096
_decode_bound = msgspec.json.Decoder(DeviceBound).decode


@dataclass(slots=True)
class Standby:
    """A forked process that waits for a launch request on a socket of its own."""

    orders: socket.socket
    child: ChildProcess | None = None
    """Known once the standby has sent its hello, which it does when it is a child of this
    process."""
    binding: BindDevice | None = None
    is_bound: bool = False


class ZygoteUnavailable(Exception):
    """No worker can be forked now; a fresh process must serve."""


class ZygoteClient:
    """One zygote and its standbys."""

    def __init__(self, settings: ZygoteSettings, journal: Journal) -> None:
        self._wanted = 1
        self._settings = settings
        self._journal = journal
        self._tasks: list[str] = []
        """What the zygote lacks, and a fork of it is to prepare; see `fork_successor` there."""
        self._task = ""
        """The one that was ordered."""
        self._preparing: ChildProcess | None = None
        """It performs the task, and may become the next zygote."""
        self._standbys_prepare = False
        self._compiles = False
        self._standbys: deque[Standby] = deque()
        self._control: socket.socket | None = None
        self._ordered = 0
        self.child: ChildProcess | None = None
        self.unfit = ""
        """Why the last fork was refused; empty if it was not."""
        self._logged_refusal = ""
        self._launched: dict[int, dict[str, str]] = {}
        """What `read_by_device` selects of the variables of the last rank, by local rank."""
        self._binds_no_more = False
        self._dropped: list[ChildProcess] = []
        self._without_step: set[int] = set()
        """Local ranks that started from bound standbys, and of which `bind` knows no step."""

    @property
    def children(self) -> list[ChildProcess]:
        found = [*(standby.child for standby in self._standbys), *self._dropped, self._preparing]
        return [child for child in [self.child, *found] if child is not None]

    @property
    def holds_device(self) -> bool:
        return any(standby.binding is not None for standby in self._standbys)

    @property
    def has_standby(self) -> bool:
        """Whether `launch` needs no fork for a rank without a bound standby."""
        return any(one.binding is None and one.child is not None for one in self._standbys)

    def start(self) -> None:
        """Start a zygote as a program, which imports torch again."""
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = (str(its.fileno()), str(os.getpid()), self._settings.encode())
        argv = python_command("ftrun.worker.process.zygote", *words)
        self.adopt(mine, spawn(argv, name="zygote", variables=os.environ, pass_fds=[its.fileno()]))
        its.close()

    def adopt(self, control: socket.socket, child: ChildProcess) -> None:
        if self._preparing is not None:  # a fork of the last zygote
            self._drop_child(self._preparing)
            self._preparing = None
        self._standbys_prepare, self._task = False, ""
        self._tasks = ["call"] if self._settings.prepare else []
        self._tasks += ["compiler"] if self._compiles else []
        self._connect(control, child)

    def _connect(self, control: socket.socket, child: ChildProcess) -> None:
        if self._control is not None:
            self._control.close()
        self._control, self.child = control, child
        self.unfit = ""
        self._ordered = 0

    def want(self, standbys: int) -> None:
        self._wanted = standbys
        self.refill()

    def refill(self) -> None:
        self._order(self._wanted - len(self._standbys) - self._ordered)

    def launch(self, request: LaunchRequest, local_rank: int) -> ChildProcess:
        """Turn a standby into a worker; ZygoteUnavailable if there is none, and none came."""
        try:
            data = encode_launch(request)
        except UnicodeEncodeError as error:
            raise ZygoteUnavailable("a variable or an argument is not UTF-8") from error
        self._launched[local_rank] = read_by_device(request.variables)
        if local_rank in self._without_step:
            self.unbind("a rank of a bound standby has made no step")
        while True:
            standby = self._take_bound(local_rank) or self._take()
            if standby.is_bound:
                self._without_step.add(local_rank)
            with standby.orders as orders:
                child = standby.child or self._hello(standby)
                if child is None or child.reap():
                    continue
                try:
                    send_request(orders, data, list(request.descriptors.values()))
                except OSError as error:
                    self._dropped.append(child)
                    if isinstance(error, ConnectionError):  # it has ended
                        continue
                    # for example no free descriptor
                    raise ZygoteUnavailable(f"no launch request can be sent: {error}") from error
                return child

    def close(self) -> None:
        """End zygote and standbys; both end when their sockets close."""
        for standby in self._standbys:
            standby.orders.close()
        if self._control is not None:
            self._control.close()
            self._control = None
        give_up_s = clock.now_s() + _END_WAIT_S  # a standby that prepares does not read its socket
        for child in self.children:
            if not child.wait(max(0.0, give_up_s - clock.now_s())):
                child.signal(9)
                child.wait(5.0)
        self._standbys.clear()

    def collect(self) -> bool:
        """Take what zygote and standbys have sent; return whether a standby has died."""
        num_standbys = len(self._standbys)
        while self._receive(0.0):
            pass
        self._dropped = [child for child in self._dropped if not child.reap()]
        if self._preparing is not None and self._preparing.reap():
            how = exit_text(self._preparing.ended_with)
            self._prepared(failure=f"the process that calls the functions {how}")
        if self._tasks and not self._task and self._control is not None:
            self._task = self._tasks.pop(0)
            with contextlib.suppress(OSError):  # it has ended
                self._control.send(json.dumps({"successor": self._task}).encode())
        for standby in list(self._standbys):
            child, is_idle = standby.child, standby.binding is None or standby.is_bound
            if child is not None and is_idle and standby in self._standbys and child.reap():
                self._ended(standby)
                continue
            is_expected = standby.child is None or (standby.binding and not standby.is_bound)
            if is_expected and standby in self._standbys:  # the one before may have unbound all
                self._receive_answer(standby)
        return len(self._standbys) < num_standbys

    def import_compiler(self) -> None:
        """Have the zygote import torch's compiler, because ranks use it; once is enough."""
        if not self._compiles:
            self._compiles = True
            self._tasks.append("compiler")

    # --- devices ----------------------------------------------------------------------------

    def bind(self, num_ranks: int) -> None:
        """Have one standby for each rank initialise its device, after all ranks made a step."""
        self._without_step.clear()
        for local_rank in [one for one in self._launched if one >= num_ranks]:
            del self._launched[local_rank]  # the node has fewer ranks now
        if self._binds_no_more:
            return
        taken = {one.binding.local_rank for one in self._standbys if one.binding is not None}
        free = deque(one for one in self._standbys if one.child is not None and not one.binding)
        for local_rank in sorted(self._launched.keys() - taken):
            if not free:
                return
            standby = free.popleft()
            standby.binding = BindDevice(local_rank, self._launched[local_rank])
            with contextlib.suppress(OSError):  # it has ended; `collect` sees that
                standby.orders.send(msgspec.json.encode(standby.binding))

    def unbind(self, reason: str) -> None:
        self._binds_no_more = True
        for standby in list(self._standbys):
            if standby.binding is not None:
                self._drop(standby, reason)

    def _receive_answer(self, standby: Standby) -> None:
        """Receive the hello, or the answer about the device, if it is there."""
        try:
            standby.orders.setblocking(False)
            data = standby.orders.recv(_MAX_ANSWER_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if standby.child is None:
            with contextlib.suppress(OSError):  # it has ended, or there are no descriptors left
                standby.child = _child_of(data)
            if standby.child is None:
                self._ended(standby)
        elif standby.binding is not None:
            try:
                answer = (
                    _decode_bound(data) if data else DeviceBound(problem="the standby has ended")
                )
            except msgspec.MsgspecError:
                answer = DeviceBound(problem="the standby sends an answer that cannot be read")
            if answer.problem:
                _log.warning("start.device: %s. Ranks initialise the device", answer.problem)
                self.unbind(answer.problem)
                return
            standby.is_bound = True
            self._journal.write(
                StandbyBound(standby.binding.local_rank, answer.device, answer.free_bytes)
            )

    def _ended(self, standby: Standby) -> None:
        """Forget a standby that has died, for example by the kernel for its memory."""
        if standby.binding is not None:
            self._drop(standby, "it has ended")
        else:
            self._standbys.remove(standby)
            standby.orders.close()

    def _drop(self, standby: Standby, reason: str) -> None:
        assert standby.binding is not None
        self._standbys.remove(standby)
        standby.orders.close()
        if standby.child is not None:
            self._drop_child(standby.child)
        self._journal.write(StandbyDropped(standby.binding.local_rank, reason))

    def _drop_child(self, child: ChildProcess) -> None:
        child.signal(9)  # it may hang, for example in a driver, so nothing waits for its end
        self._dropped.append(child)

    def _take_bound(self, local_rank: int) -> Standby | None:
        now = self._launched[local_rank]
        for standby in list(self._standbys):
            binding = standby.binding
            if binding is None or binding.local_rank != local_rank:
                continue
            if not standby.is_bound:
                self._receive_answer(standby)  # the answer may have arrived just now
                if standby not in self._standbys:
                    return None
            names = [
                name
                for name in sorted({**binding.variables, **now})
                if binding.variables.get(name) != now.get(name)
            ]
            if standby.is_bound and not names:
                self._standbys.remove(standby)
                return standby
            has_changed = f"{', '.join(names)} changed"
            self._drop(standby, has_changed if names else "its device was not ready")  # Rule 2
        return None

    # --- forks ------------------------------------------------------------------------------

    def _order(self, count: int) -> None:
        if count > 0 and self._control is not None:
            self._ordered += count
            self.unfit = ""
            with contextlib.suppress(OSError):
                order = {"count": count, "prepare": self._standbys_prepare}
                self._control.send(json.dumps(order).encode())

    def _take(self) -> Standby:
        give_up_s = clock.now_s() + READY_WAIT_S
        if self._first_free() is None:
            self._order(max(1, self._wanted - len(self._standbys)) - self._ordered)
        while (free := self._first_free()) is None:
            if self.unfit or self.child is None or self.child.reap():
                raise ZygoteUnavailable(self.unfit or "the zygote has ended")
            if clock.now_s() > give_up_s:
                raise ZygoteUnavailable(f"the zygote was not ready within {READY_WAIT_S:.0f} s")
            self._receive(0.2)
        self._standbys.remove(free)
        return free

    def _first_free(self) -> Standby | None:
        return next((one for one in self._standbys if one.binding is None), None)

    def _receive(self, deadline_s: float) -> bool:
        if self._control is None:
            return False
        self._control.settimeout(deadline_s)
        try:
            data, fds, _, _ = socket.recv_fds(self._control, 1 << 16, 4)
        except OSError:  # also if nothing has come in time
            return False
        if not data:
            self._control.close()
            self._control = None
            return False
        message = json.loads(data)
        if "standby" in message:
            self._ordered -= 1
            orders = socket.socket(fileno=fds[0])
            orders.set_inheritable(False)
            self._standbys.append(Standby(orders))
        if "unfit" in message:
            self._refused(message["unfit"])
        if "preparing" in message:
            with contextlib.suppress(OSError):  # it has ended
                self._preparing = ChildProcess(message["preparing"], "standby")
        if "prepared" in message:
            self._prepared(**message["prepared"], fds=fds)
        for name, error in message.get("failed", {}).items():
            _log.warning("--preload %s failed: %s. The ranks import it themselves", name, error)
        return True

    def _prepared(
        self,
        *,
        seconds: float = 0.0,
        reason: str = "",
        failure: str = "",
        fds: Sequence[int] = (),
    ) -> None:
        """A task was performed, with the control socket of the next zygote in `fds`.

        `reason`: why the process that performed it cannot be forked.
        """
        child, self._preparing = self._preparing, None
        task, self._task = self._task, ""
        if task == "call":
            self._report_calls(seconds, reason, failure)
            self._standbys_prepare = bool(reason)
        else:
            self._journal.write(CompilerImported(failure or reason, seconds))
        if child is not None and fds:
            if self.child is not None:
                self._dropped.append(self.child)  # it ends, because its socket is closed
            control = socket.socket(fileno=fds[0])
            control.set_inheritable(False)
            self._connect(control, child)
        elif child is not None:
            self._dropped.append(child)
        if fds or self._standbys_prepare:
            self._replace_standbys()

    def _report_calls(self, seconds: float, reason: str, failure: str) -> None:
        names = ", ".join(self._settings.prepare)
        place = "rank" if failure else "standby" if reason else "zygote"
        self._journal.write(FunctionsPrepared(failure or reason, place, seconds))
        if failure:
            _log.warning("%s. Ranks call the functions themselves", failure)
        elif reason:
            _log.info("--prepare: each standby calls %s, because of %s", names, reason)
        else:
            _log.info("--prepare: %s took %.1f s; later ranks share the result", names, seconds)

    def _replace_standbys(self) -> None:
        """Those until now were forked before the last task was performed."""
        while self._standbys:
            standby = self._standbys.popleft()
            standby.orders.close()  # it ends
            if standby.child is not None:
                self._dropped.append(standby.child)
        self.refill()

    def _refused(self, reason: str) -> None:
        self._ordered = 0  # the next refill asks again, because a thread may have ended
        self.unfit = reason
        if reason != self._logged_refusal:
            self._logged_refusal = reason
            _log.warning("%s. Ranks start as new processes, which takes longer", reason)

    def _hello(self, standby: Standby) -> ChildProcess | None:
        standby.orders.settimeout(10.0)
        try:
            return _child_of(standby.orders.recv(_MAX_ANSWER_BYTES))
        except OSError:
            return None


def send_request(orders: socket.socket, request: bytes, fds: Sequence[int]) -> None:
    """Send a launch request in memory: variables and arguments may be larger than any message."""
    memory = os.memfd_create("ftrun-launch")
    try:
        with open(memory, "wb", closefd=False) as file:
            file.write(request)
        socket.send_fds(orders, [REQUEST_IN_MEMORY], [memory, *fds])
    finally:
        os.close(memory)


def _child_of(hello: bytes) -> ChildProcess | None:
    if not hello:
        return None
    return ChildProcess(json.loads(hello)["pid"], "standby", leads_group=True)
