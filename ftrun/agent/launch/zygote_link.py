"""The agent's side of the zygote: keeps standbys ready.

Runs in:  agent, main thread (PDEATHSIG fires when the forking thread ends).
Takes in: launch requests.
Gives:    workers. A standby becomes one in the time of a message, because it is forked already.
Survives: the zygote: existing standbys can still be launched.
"""

import contextlib
import json
import logging
import os
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ftrun import clock
from ftrun.agent.launch.process import ChildProcess, python_command, spawn
from ftrun.wire.messages.worker import LaunchRequest, encode_launch

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

    def __init__(self, *, preload: Sequence[str]) -> None:
        self._wanted = 1
        self._preload = tuple(preload)
        self._standbys: deque[Standby] = deque()
        self._control: socket.socket | None = None
        self._ordered = 0
        self.child: ChildProcess | None = None
        self.unfit = ""
        """Why the last fork was refused; empty if it was not."""

    @property
    def children(self) -> list[ChildProcess]:
        found = [standby.child for standby in self._standbys]
        return [child for child in [self.child, *found] if child is not None]

    def start(self) -> None:
        """Start a zygote as a program, which imports torch once more."""
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = (str(its.fileno()), str(os.getpid()), *self._preload)
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
                raise ZygoteUnavailable(self.unfit or "the warm process has ended")
            if clock.now_s() > give_up_s:
                raise ZygoteUnavailable(
                    f"the warm process was not ready within {READY_WAIT_S:.0f} s"
                )
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
        said = json.loads(data)
        if "standby" in said:
            self._ordered -= 1
            orders = socket.socket(fileno=fds[0])
            orders.set_inheritable(False)
            self._standbys.append(Standby(orders))
        if "unfit" in said:
            self.unfit = said["unfit"]
        for name in set(said.get("missing", ())) & set(self._preload):
            _log.warning("--preload %s: there is no such module", name)
        return True

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
