"""Backends of process groups: how to create each kind, and how to end what is in flight.

Runs in:  worker; `cut` and `abort_communicators` in any thread.

gloo has no abort. `shutdown` of a connection ends it at both ends, and gloo then raises an error in
each operation that uses it. With torch 2.13, a blocked all-reduce raises after 0.2 to 5 ms.
NCCL has not been tested, because this needs several GPUs.

Source: torch 2.8 to 2.15, c10d/ProcessGroupGloo.cpp, ProcessGroupNCCL.cpp, FakeProcessGroup.hpp;
gloo/transport/tcp/pair.cc, which closes a connection after an error.
"""

import os
import socket
import stat
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch._C._distributed_c10d as _c10d
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from ftrun import clock

KINDS = ("gloo", "nccl")
"""Backends that can be aborted and made again."""

_POLL_S = 0.001
_RUN_LOOP = "pt_gloo_runloop"
"""Name of gloo's threads that run collectives."""


class Connection(NamedTuple):
    """A socket of this process; the inode shows whether the descriptor has been used again."""

    fd: int
    inode: int


def tcp_connections() -> frozenset[Connection]:
    """The TCP sockets of this process that do not listen."""
    found = set[Connection]()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if (one := _as_connection(int(name))) is not None:
                found.add(one)
    return frozenset(found)


def _as_connection(fd: int) -> Connection | None:
    status = os.fstat(fd)
    if not stat.S_ISSOCK(status.st_mode):
        return None
    with socket.socket(fileno=os.dup(fd)) as one:
        is_tcp = one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM
        if not is_tcp or one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return None
    return Connection(fd, status.st_ino)


def cut(connections: Iterable[Connection]) -> None:
    """End the connections at both ends; a descriptor that is another socket by now is left."""
    for one in connections:
        with suppress(OSError), socket.socket(fileno=os.dup(one.fd)) as same:
            # The inode is read from the duplicate, which cannot become another socket.
            if os.fstat(same.fileno()).st_ino == one.inode:
                same.shutdown(socket.SHUT_RDWR)


def abort_communicators(backends: Sequence[Any]) -> None:
    """Abort NCCL's communicators, children first, as one group, so that none waits for another."""
    if backends:
        backends[0]._group_start()
        for backend in reversed(backends):
            backend.abort()
        backends[0]._group_end()


def await_end(connections: Collection[Connection], timeout_s: float) -> bool:
    """Wait until no operation of the cut connections writes any more; return False if one may.

    gloo closes a connection after it has woken each operation that waits for it. An operation that
    still runs makes its thread runnable, so two looks at sleeping threads show that all have ended.
    """
    give_up_s = clock.now_s() + timeout_s
    quiet = 0
    while quiet < 2:
        quiet = quiet + 1 if _are_over(connections) else 0
        if clock.now_s() > give_up_s:
            return False
        clock.sleep(_POLL_S)
    return True


def _are_over(connections: Iterable[Connection]) -> bool:
    for fd, inode in connections:
        with suppress(OSError):
            if os.fstat(fd).st_ino == inode:
                return False
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            name, _, fields = (task / "stat").read_text().partition("(")[2].rpartition(")")
            if name == _RUN_LOOP and fields.split()[0] != "S":
                return False
    return True


# --- creation ------------------------------------------------------------------------------------


def fake(rank: int, size: int, *, fails: bool) -> Any:
    """A backend without communication: each collective fails, or does nothing."""
    kind: Any = _c10d.FakeProcessGroup
    options = kind.Options()
    options.error_on_collective = fails
    return kind._create_internal(rank, size, options)


class GlooDevices:
    """Devices of gloo, by the interfaces that they use; groups share them.

    A group whose backend is replaced keeps the old one to the end of the process. With a device of
    its own, each would leave one more thread and one more listening socket.
    """

    def __init__(self) -> None:
        self._known: dict[str, list[Any]] = {}

    def note(self, backend: Any) -> None:
        self._known.setdefault(_interfaces(), list(backend.options._devices))

    def create(
        self, store: Store, rank: int, size: int, timeout: timedelta
    ) -> dist.ProcessGroupGloo:
        known = self._known.get(_interfaces())
        if known is None:
            made = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
            self.note(made)
            return made
        kind: Any = dist.ProcessGroupGloo
        options = kind._Options()
        options._devices = known
        options._threads = 2 * len(known)
        options._timeout = timeout
        renewed: dist.ProcessGroupGloo = kind(store, rank, size, options)
        return renewed


def _interfaces() -> str:
    return os.environ.get("GLOO_SOCKET_IFNAME", "")


def nccl_options(old: Any, timeout: timedelta) -> Any:
    """Options for a new communicator that is not split from another one."""
    options = dist.ProcessGroupNCCL.Options()
    if old is not None:
        options.is_high_priority_stream = old.is_high_priority_stream
        options.config = old.config
    options._timeout = timeout
    return options
