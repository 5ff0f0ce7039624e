"""Which runs there are on this machine, and what of them still answers.

Runs in:  cli.
Takes in: the run folders of this user.
Gives:    a `FoundRun` for each that is more than a folder.
"""

import fcntl
import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from ftrun import process_tree
from ftrun.cli.stub import answers
from ftrun.errors import FtrunError, UsageError
from ftrun.ids import RunId
from ftrun.wire.messages.envelope import Hello
from ftrun.wire.run_environment import RunFolder, all_run_folders, check_run_id, run_folder
from ftrun.wire.transport.channel import Channel, connect

_CONNECT_S = 5.0


class RunLiveness(Enum):
    """What of a run is there."""

    RUNNING = "running"
    STARTING = "starting"  # a stub, and no agent that answers yet
    ORPHANED = "orphaned"  # no stub; an SMP with the memory, or processes that outlived the stub
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class FoundRun:
    """A run, and what of it is there."""

    folder: RunFolder
    life: RunLiveness
    stub_pid: int | None = None

    @property
    def run_id(self) -> RunId:
        return self.folder.run_id

    @property
    def name(self) -> str:
        """What a command takes: the run id, or `RUN_ID@NODE_ID`."""
        return self.folder.name

    def to_agent(self) -> Channel:
        """Raises: PeerLost, PeerTimeout."""
        return _connect(self.folder, self.folder.agent_socket, "the agent")

    def to_smp(self) -> Channel:
        """Raises: PeerLost, PeerTimeout."""
        return _connect(self.folder, self.folder.smp_socket, "the SMP")


def look_at(folder: RunFolder) -> FoundRun:
    stub_pid = _lock_owner(folder)
    if stub_pid is not None:
        life = RunLiveness.RUNNING if answers(folder.agent_socket) else RunLiveness.STARTING
        return FoundRun(folder, life, stub_pid)
    return FoundRun(folder, RunLiveness.ORPHANED if is_anything_left(folder) else RunLiveness.GONE)


def is_anything_left(folder: RunFolder) -> bool:
    """Whether a run without a stub still has an SMP, or processes that outlived the stub."""
    return answers(folder.smp_socket) or bool(process_tree.left_behind(folder.path))


def sweep() -> None:
    """Remove the folders of runs of which nothing is left, not even memory."""
    for folder in all_run_folders():
        try:
            lock_fd = os.open(folder.lock, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:  # being made this moment
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
    """The run of that name, or the only one.

    Args:
        name: a run id; `RUN_ID@NODE_ID` where several nodes of the run are on this machine.
        command: what is asked for, for the list of names.

    Raises:
        UsageError: there are several, and none is named.
        FtrunError: there is none.
    """
    alive = _alive()
    if name is not None:
        run_id, at, node_id = name.partition("@")
        wanted = run_folder(check_run_id(run_id), check_run_id(node_id) if at else None)
        exact = look_at(wanted)
        if exact.life is not RunLiveness.GONE:
            return exact
        alive = [run for run in alive if run.run_id == name]
    if not alive:
        if name is None:
            raise FtrunError("no run of yours is alive on this machine. Start one: ftrun train.py")
        raise FtrunError(f"no run {name} is alive on this machine{_others()}")
    if len(alive) > 1:
        lines = "".join(f"\n  ftrun {command} {run.name}   ({run.life.value})" for run in alive)
        raise UsageError(f"{len(alive)} runs are alive on this machine; name one:{lines}")
    return alive[0]


def _alive() -> list[FoundRun]:
    found = [look_at(folder) for folder in all_run_folders()]
    return [run for run in found if run.life is not RunLiveness.GONE]


def _others() -> str:
    alive = _alive()
    return f". Alive: {', '.join(run.name for run in alive)}" if alive else ""


def _lock_owner(folder: RunFolder) -> int | None:
    """The stub's process id (0 where it has not written it yet), or None: nobody holds the lock."""
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
    return connect(
        path,
        run_id=folder.run_id,
        peer=peer,
        hello=hello,
        deadline_s=_CONNECT_S,
    )
