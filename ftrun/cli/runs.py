"""Finds the runs of this user on this machine, tests which processes respond, and queries them."""

import contextlib
import fcntl
import os
import select
import signal
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import TypeVar

from ftrun import process_tree
from ftrun.cli.stub import answers
from ftrun.errors import FtrunError, ProtocolError, UsageError
from ftrun.ids import RunId
from ftrun.wire.messages.envelope import AnyMessage, Done, Hello, Refused
from ftrun.wire.messages.message import Message
from ftrun.wire.messages.smp import Shutdown
from ftrun.wire.run_environment import RunFolder, all_run_folders, check_run_id, run_folder
from ftrun.wire.transport.channel import Channel, connect

SHUTDOWN_S = 5.0
_CONNECT_S = 5.0

M = TypeVar("M", bound=Message)


class RunLiveness(Enum):
    """Which processes of a run respond."""

    RUNNING = "running"
    STARTING = "starting"  # a stub without an agent that responds
    ORPHANED = "orphaned"  # no stub; an SMP with memory, or processes that outlived the stub
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class FoundRun:
    """A run on this machine, alive or not."""

    folder: RunFolder
    life: RunLiveness
    stub_pid: int | None = None

    @property
    def run_id(self) -> RunId:
        return self.folder.run_id

    @property
    def name(self) -> str:
        """The argument that commands accept: the run id, or `RUN_ID@NODE_ID`."""
        return self.folder.name

    def to_agent(self) -> Channel:
        return _connect(self.folder, self.folder.agent_socket, "the agent")

    def to_smp(self) -> Channel:
        return _connect(self.folder, self.folder.smp_socket, "the SMP")


def inspect_run(folder: RunFolder) -> FoundRun:
    stub_pid = _lock_owner(folder)
    if stub_pid is not None:
        life = RunLiveness.RUNNING if answers(folder.agent_socket) else RunLiveness.STARTING
        return FoundRun(folder, life, stub_pid)
    return FoundRun(folder, RunLiveness.ORPHANED if is_anything_left(folder) else RunLiveness.GONE)


def is_anything_left(folder: RunFolder) -> bool:
    return answers(folder.smp_socket) or bool(process_tree.left_behind(folder.path))


def sweep() -> None:
    """Removes run folders that have no live process and no memory."""
    for folder in all_run_folders():
        try:
            lock_fd = os.open(folder.lock, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:  # its owner is just creating the folder
            continue
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            if is_file_of(folder.lock, lock_fd) and not is_anything_left(folder):
                folder.remove()
        finally:
            os.close(lock_fd)


def is_file_of(path: Path, fd: int) -> bool:
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(fd))


def choose(name: str | None, *, command: str) -> FoundRun:
    """Returns the run of this name (see `run_folder`) or id, or the only live one."""
    if name is not None:
        for part in name.split("@", 1):
            check_run_id(part)
        exact = inspect_run(run_folder(name))
        if exact.life is not RunLiveness.GONE:
            return exact
    # Only now, because a dead run costs a search through all processes of this machine.
    alive = [run for run in _alive() if name is None or run.run_id == name]
    if not alive:
        if name is None:
            raise FtrunError("no run of yours is alive on this machine. Start one: ftrun train.py")
        names = ", ".join(run.name for run in _alive())
        raise FtrunError(
            f"no run {name} is alive on this machine{f'. Alive: {names}' if names else ''}"
        )
    if len(alive) > 1:
        lines = "".join(f"\n  ftrun {command} {run.name}   ({run.life.value})" for run in alive)
        raise UsageError(f"{len(alive)} runs are alive on this machine; name one:{lines}")
    return alive[0]


def _alive() -> list[FoundRun]:
    found = [inspect_run(folder) for folder in all_run_folders()]
    return [run for run in found if run.life is not RunLiveness.GONE]


def _lock_owner(folder: RunFolder) -> int | None:
    """Returns the stub's pid (0 if not yet written), or None if the lock is free."""
    try:
        lock_fd = os.open(folder.lock, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.pread(lock_fd, 32, 0).decode().strip()
        return int(text) if text.isdigit() else 0
    finally:
        os.close(lock_fd)
    return None


def _connect(folder: RunFolder, path: Path, peer: str) -> Channel:
    hello = Hello(role="cli", pid=os.getpid())
    return connect(path, run_id=folder.run_id, peer=peer, hello=hello, deadline_s=_CONNECT_S)


def end_on_signals() -> None:
    """Handles SIGTERM and SIGHUP as ^C, so that a command ends the runs that it has started."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # keep the effect of nohup
        signal.signal(signal.SIGHUP, leave)


def ask(channel: Channel, request: AnyMessage, kind: type[M], *, deadline_s: float) -> M | Refused:
    """Returns the reply, and closes the channel; a ProtocolError for a reply of another kind."""
    try:
        body = channel.ask(request, deadline_s=deadline_s).body
    finally:
        channel.close()
    if not isinstance(body, (kind, Refused)):
        raise ProtocolError(f"{channel.peer} answered with a {type(body).__name__}")
    return body


def shut_down_smp(folder: RunFolder) -> bool:
    """Requests that the SMP frees everything, and waits for its end; returns whether it agreed."""
    try:
        channel = _connect(folder, folder.smp_socket, "the SMP")
        pid = channel.peer_pid
        has_agreed = isinstance(ask(channel, Shutdown(), Done, deadline_s=SHUTDOWN_S), Done)
    except FtrunError:
        return False
    if has_agreed:
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            select.select([handle], [], [], SHUTDOWN_S)
            os.close(handle)
    return has_agreed
