"""Starts the process of a rank: from a standby of the zygote, or fresh if no standby can serve.

Runs in:  agent, main thread (PDEATHSIG fires when the forking thread ends), under torch's
          SubprocessContext.
Takes in: the arguments that torch would pass to Popen.
Gives:    a `WorkerHandle`, which replaces torch's own SubprocessHandler. A standby becomes a worker
          in the time of a message, because it is forked already.
Survives: the zygote: existing standbys can still be launched.
"""

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, Any

import msgspec

from ftrun import clock
from ftrun.agent.launch.process import ChildProcess, python_command, spawn
from ftrun.journal import Journal
from ftrun.records.snapshots import FreshStartUsed
from ftrun.wire.messages.worker import LaunchRequest, encode_launch
from ftrun.wire.run_environment import LAUNCH
from ftrun.wire.shared_memory.pages import HeartbeatField, SharedPage

_log = logging.getLogger(__name__)

READY_WAIT_S = 120.0
"""Importing torch took 1.1 s here on a quiet machine, and minutes from a slow network disk."""


@dataclass(slots=True)
class Standby:
    """A forked process that waits for a launch request on a socket of its own."""

    orders: socket.socket
    child: ChildProcess | None = None
    """Known once the standby has sent its hello, which it does when it is a child of this
    process."""


class ZygoteUnavailable(Exception):
    """No worker can be forked now; a fresh process must serve."""


class ZygoteClient:
    """One zygote and its standbys."""

    def __init__(self, *, preload: Sequence[str], folder: str) -> None:
        """`folder`: searched first for the modules of `preload`, as by the script."""
        self._wanted = 1
        self._preload = tuple(preload)
        self._folder = folder
        self._standbys: deque[Standby] = deque()
        self._control: socket.socket | None = None
        self._ordered = 0
        self.child: ChildProcess | None = None
        self.unfit = ""
        """Why the last fork was refused; empty if it was not."""
        self._logged_refusal = ""

    @property
    def children(self) -> list[ChildProcess]:
        found = [standby.child for standby in self._standbys]
        return [child for child in [self.child, *found] if child is not None]

    def start(self) -> None:
        """Start a zygote as a program, which imports torch again."""
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = (str(its.fileno()), str(os.getpid()), self._folder, *self._preload)
        argv = python_command("ftrun.worker.process.zygote", *words)
        self.adopt(mine, spawn(argv, name="zygote", variables=os.environ, pass_fds=[its.fileno()]))
        its.close()

    def adopt(self, control: socket.socket, child: ChildProcess) -> None:
        if self._control is not None:
            self._control.close()
        self._control, self.child = control, child
        self.unfit = ""
        self._ordered = 0

    def want(self, standbys: int) -> None:
        self._wanted = standbys
        self.refill()

    def refill(self) -> None:
        missing = self._wanted - len(self._standbys) - self._ordered
        if missing > 0 and self._control is not None:
            self._ordered += missing
            self.unfit = ""
            with contextlib.suppress(OSError):
                self._control.send(json.dumps({"count": missing}).encode())

    def launch(self, request: LaunchRequest) -> ChildProcess:
        """Turn a standby into a worker.

        Raises:
            ZygoteUnavailable: there is no standby, and none came.
        """
        data, fds = encode_launch(request), list(request.descriptors.values())
        while True:
            standby = self._take()
            if standby.child is None:
                standby.child = self._hello(standby)
            if standby.child is None or standby.child.reap():
                standby.orders.close()
                continue
            try:
                socket.send_fds(standby.orders, [data], fds)
            except OSError:
                standby.orders.close()
                continue
            standby.orders.close()
            return standby.child

    def close(self) -> None:
        """End zygote and standbys; both end when their sockets close."""
        for standby in self._standbys:
            standby.orders.close()
        if self._control is not None:
            self._control.close()
            self._control = None
        for child in self.children:
            if not child.wait(1.0):
                child.signal(9)
                child.wait(5.0)
        self._standbys.clear()

    def collect(self) -> None:
        while self._receive(0.0):
            pass
        for standby in self._standbys:
            if standby.child is None:
                with contextlib.suppress(BlockingIOError, OSError):
                    standby.orders.setblocking(False)
                    standby.child = _child_of(standby.orders.recv(4096))

    def _take(self) -> Standby:
        give_up_s = clock.now_s() + READY_WAIT_S
        if not self._standbys:
            self.refill()
        while not self._standbys:
            if self.unfit or self.child is None or self.child.reap():
                raise ZygoteUnavailable(self.unfit or "the zygote has ended")
            if clock.now_s() > give_up_s:
                raise ZygoteUnavailable(f"the zygote was not ready within {READY_WAIT_S:.0f} s")
            self._receive(0.2)
        return self._standbys.popleft()

    def _receive(self, deadline_s: float) -> bool:
        if self._control is None:
            return False
        self._control.settimeout(deadline_s)
        try:
            data, fds, _, _ = socket.recv_fds(self._control, 1 << 16, 4)
        except (TimeoutError, BlockingIOError):
            return False
        except OSError:
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
        for name, error in message.get("failed", {}).items():
            _log.warning("--preload %s failed: %s. The ranks import it themselves", name, error)
        return True

    def _refused(self, reason: str) -> None:
        self._ordered = 0  # the next refill asks again, because a thread may have ended
        self.unfit = reason
        if reason != self._logged_refusal:
            self._logged_refusal = reason
            _log.warning("%s. Ranks start as new processes, which takes longer", reason)

    def _hello(self, standby: Standby) -> ChildProcess | None:
        standby.orders.settimeout(10.0)
        try:
            return _child_of(standby.orders.recv(4096))
        except (TimeoutError, OSError):
            return None


def _child_of(hello: bytes) -> ChildProcess | None:
    if not hello:
        return None
    return ChildProcess(json.loads(hello)["pid"], "standby", leads_group=True)


@dataclass(frozen=True, slots=True)
class LaunchSlot:
    """The resources of one rank, prepared before its process exists."""

    request: LaunchRequest
    page: SharedPage

    @property
    def rank(self) -> int:
        return self.request.rank

    @property
    def stack_fd(self) -> int:
        """Descriptor of the file to which the rank writes its stacks on a signal."""
        return self.request.descriptors["stack"]


@dataclass(slots=True)
class WorkerHandle:
    """One worker, with the methods that torch's SubprocessContext calls."""

    local_rank_id: int
    child: ChildProcess
    slot: LaunchSlot
    start: str
    """`warm` or `fresh`."""
    streams: list[IO[str]] = field(default_factory=list)
    stopped_since_s: float | None = None
    killed_for_s: float | None = None
    exit_seen: bool = False

    @property
    def proc(self) -> "WorkerHandle":
        return self

    @property
    def pid(self) -> int:
        return self.child.pid

    @property
    def state(self) -> str:
        if self.child.status is not None:
            return "finished" if self.child.status == 0 else "ended"
        if self.stopped_since_s is not None:
            return "stopped"
        return "running" if self.slot.page.get(HeartbeatField.FIRST_STEP_NS) else "starting"

    @property
    def has_ended(self) -> bool:
        return self.child.status is not None

    def poll(self) -> int | None:
        self.child.reap()
        return self.child.status

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait as Popen.wait does.

        Raises:
            subprocess.TimeoutExpired: it has not ended within `timeout` seconds.
        """
        if not self.child.wait(3600.0 if timeout is None else timeout):
            raise subprocess.TimeoutExpired("rank", timeout or 0.0)
        return self.child.status

    def close(self, death_sig: signal.Signals | None = None) -> None:
        self.child.signal_group(death_sig or signal.SIGTERM)
        for stream in self.streams:
            stream.close()
        self.streams.clear()


@dataclass
class WorkerStarter:
    """Starts the workers of one generation; replaces torch's `get_subprocess_handler`."""

    zygote: ZygoteClient | None
    journal: Journal
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables of all ranks, in addition to torch's."""
    slots: dict[int, LaunchSlot] = field(default_factory=dict)
    handles: dict[int, WorkerHandle] = field(default_factory=dict)

    def __call__(
        self,
        entrypoint: str,
        args: Sequence[object],
        env: dict[str, str],
        stdout: str | None,
        stderr: str | None,
        local_rank_id: int,
        numa_options: object = None,
        **_: Any,
    ) -> WorkerHandle:
        slot = self.slots[local_rank_id]
        streams = [open(path, "w") if path else None for path in (stdout, stderr)]  # noqa: SIM115
        variables = {**os.environ, **env, **self.variables}
        argv = [str(arg) for arg in args]
        child, start = self._start(entrypoint, argv, variables, streams, slot, numa_options)
        handle = WorkerHandle(local_rank_id, child, slot, start)
        handle.streams = [stream for stream in streams if stream is not None]
        self.handles[local_rank_id] = handle
        return handle

    def _start(
        self,
        entrypoint: str,
        argv: list[str],
        variables: dict[str, str],
        streams: Sequence[IO[str] | None],
        slot: LaunchSlot,
        numa_options: object,
    ) -> tuple[ChildProcess, str]:
        python = entrypoint == sys.executable and argv[:1] == ["-u"]
        fresh_reason = self._fresh_reason(entrypoint, python=python, numa_options=numa_options)
        if fresh_reason is None and self.zygote is not None:
            try:
                return self._warm(self.zygote, argv[1:], variables, streams, slot), "warm"
            except ZygoteUnavailable as error:
                fresh_reason = str(error)
        self.journal.write(FreshStartUsed(fresh_reason or "", slot.rank))
        return self._fresh(entrypoint, argv, variables, streams, slot, python=python), "fresh"

    def _fresh_reason(self, entrypoint: str, *, python: bool, numa_options: object) -> str | None:
        if self.zygote is None:
            return "--start fresh, or the zygote was disabled"
        if numa_options is not None:
            return "--numa-binding wraps the command"
        if not python:
            return f"{entrypoint} is not this interpreter"
        return None

    def _warm(
        self,
        zygote: ZygoteClient,
        argv: list[str],
        variables: dict[str, str],
        streams: Sequence[IO[str] | None],
        slot: LaunchSlot,
    ) -> ChildProcess:
        stdout, stderr = (
            stream.fileno() if stream is not None else number
            for stream, number in zip(streams, (1, 2), strict=True)
        )
        is_module = argv[0] == "-m"
        return zygote.launch(
            msgspec.structs.replace(
                slot.request,
                start="warm",
                descriptors={**slot.request.descriptors, "stdout": stdout, "stderr": stderr},
                argv=argv[1:] if is_module else argv,
                is_module=is_module,
                variables=variables,
                cwd=os.getcwd(),
            )
        )

    def _fresh(
        self,
        entrypoint: str,
        argv: list[str],
        variables: dict[str, str],
        streams: Sequence[IO[str] | None],
        slot: LaunchSlot,
        *,
        python: bool,
    ) -> ChildProcess:
        if python:
            kind = ["module", *argv[2:]] if argv[1] == "-m" else ["script", *argv[1:]]
        else:
            kind = ["command", entrypoint, *argv]
        return spawn(
            python_command("ftrun.worker.process.startup", *kind),
            name=f"rank {slot.rank}",
            variables={**variables, LAUNCH: encode_launch(slot.request).decode()},
            pass_fds=list(slot.request.descriptors.values()),
            streams=streams,
            new_session=True,
        )
