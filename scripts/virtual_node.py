"""One node of a virtual cluster: its namespaces, its first process, and all processes in it.

Takes in: names, addresses, sizes, and the commands to run in the node.
Gives:    processes that see the node's hostname, network, process ids, /proc, /dev/shm and /run.

Rule 1: a process is identified by its pid and start time together, so that a reused pid is never
        signalled.
Rule 2: a command in a node is a child of the caller, without a process between: its pid, signals
        and exit code are the command's own. For this the calling thread sets for one moment that
        its children start in the node (setns of a pid namespace changes nothing else).
Rule 3: when the first process of a pid namespace is killed, the kernel kills all others in it.
        It remains until the parents have reaped them, but counts as dead: the test is that no
        other process of the node runs.
"""

import contextlib
import ctypes
import errno
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

WAIT_S = 20.0
"""Limit for any operation of the kernel; it takes milliseconds."""

_CLONE_NEWPID = 0x20000000
_libc = ctypes.CDLL(None, use_errno=True)

_INIT = Path(__file__).with_suffix(".sh")


class ClusterError(Exception):
    """A virtual cluster cannot do what was requested; the message says why, and what to do."""


@dataclass(frozen=True)
class Process:
    """A process that is another process's child, or will be."""

    pid: int
    started: int
    """Clock ticks since boot."""

    @staticmethod
    def of(pid: int) -> "Process":
        """Raises: ClusterError: there is none."""
        fields = _stat(pid)
        if fields is None:
            raise ClusterError(f"process {pid} has ended")
        return Process(pid, int(fields[19]))

    @property
    def is_alive(self) -> bool:
        fields = _stat(self.pid)
        if fields is None or int(fields[19]) != self.started:
            return False
        # A dead main thread is shown as Z (zombie) also while other threads still run.
        return fields[0] not in "ZX" or int(fields[17]) > 1

    def kill(self) -> None:
        """SIGKILL it, if it still exists."""
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(self.pid)
            try:
                if self.is_alive:
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            finally:
                os.close(handle)

    def wait(self) -> None:
        """Wait until it has ended. Raises: ClusterError: it does not end."""
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(self.pid)
            try:
                if self.is_alive:
                    _wait_for(handle, f"the end of process {self.pid}")
            finally:
                os.close(handle)


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat behind the name: state, parent ..."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


def _wait_for(descriptor: int, what: str) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    if not poll.poll(WAIT_S * 1000):
        raise ClusterError(f"limit of {WAIT_S:.0f} s exceeded for {what}")


# --- the processes that hold namespaces ------------------------------------------------------


def init_command(*words: str, clock_s: int) -> list[str]:
    """The first process of a node: name, hosts file, size of /dev/shm, addresses.

    `clock_s`: the monotonic clocks of the node are this far ahead.
    """
    # Only the second unshare is in the node: no process outside holds its network.
    clocks = ["--time", "--monotonic", str(clock_s), "--boottime", str(clock_s)]
    outer = ["unshare", "--pid", "--fork", *(clocks if clock_s else []), "--"]
    inner = ["unshare", "--net", "--mount", "--uts", "--ipc", "--"]
    return [*outer, *inner, "sh", str(_INIT), *words]


class Holder:
    """A process that only holds a namespace: during its start, or as long as it has an owner.

    An owned one ends with its owner, however that ends: it waits for the end of a pipe.
    """

    def __init__(self, name: str, command: list[str], log: Path, *, is_owned: bool) -> None:
        self.name = name
        self._log = log
        with log.open("wb") as errors:
            self._parent = subprocess.Popen(
                [*command, "owned" if is_owned else "kept"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd="/",
                start_new_session=True,  # ^C is for the owner
            )

    def process(self) -> Process:
        return Process.of(int(self._line()))

    def go(self) -> None:
        """The resources that it needs exist."""
        _pipe(self._parent.stdin).write(b"go\n")
        _pipe(self._parent.stdin).flush()

    def wait_ready(self) -> None:
        if self._line() != "ready":
            raise ClusterError(f"{self.name} did not start: {self._errors()}")

    def let_go(self) -> None:
        """It stays alive when this process has ended, and is not reaped here."""
        self.close()
        self._parent.returncode = 0

    def close(self) -> None:
        """End it, if it is owned."""
        for pipe in (self._parent.stdin, self._parent.stdout):
            with contextlib.suppress(OSError):
                _pipe(pipe).close()

    def reap(self) -> None:
        self.close()
        try:
            self._parent.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            raise ClusterError(f"{self.name} does not end within {WAIT_S:.0f} s") from None

    def _line(self) -> str:
        out = _pipe(self._parent.stdout)
        _wait_for(out.fileno(), f"{self.name} to start: {self._errors()}")
        line = out.readline().decode().strip()
        if not line:
            raise ClusterError(f"{self.name} did not start: {self._errors()}")
        return line

    def _errors(self) -> str:
        return self._log.read_text(errors="replace").strip() or "it said nothing"


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise ClusterError("a bug in the virtual cluster: a pipe is missing")
    return pipe


# --- processes in a node ------------------------------------------------------------------------


def start_in(
    init: Process, argv: Sequence[str], *, env: dict[str, str], cwd: str, **options: Any
) -> "subprocess.Popen[Any]":
    """Start a command in the node of `init`, as a child of the caller. `options`: Popen's."""
    spaces = ["--net", "--mount", "--uts", "--ipc"]
    if os.path.exists("/proc/self/ns/time"):
        spaces.append("--time")
    enter = ["nsenter", "--target", str(init.pid), *spaces, "--"]
    # A working directory from outside would be unreachable inside: the command enters it by path.
    enter += ["sh", "-c", 'cd "$0" && exec "$@"', cwd]
    with _children_born_in(init):
        return subprocess.Popen([*enter, *argv], env=env, **options)


@contextlib.contextmanager
def _children_born_in(init: Process) -> Iterator[None]:
    own = os.open("/proc/thread-self/ns/pid", os.O_RDONLY)
    try:
        theirs = os.open(f"/proc/{init.pid}/ns/pid", os.O_RDONLY)
    except FileNotFoundError:
        os.close(own)
        raise ClusterError("the node has just died") from None
    try:
        if not init.is_alive:  # else `theirs` may be another process's, see rule 1
            raise ClusterError("the node has just died")
        _set_namespace(theirs)
        yield
    finally:
        _set_namespace(own)
        os.close(theirs)
        os.close(own)


def may_come_back() -> bool:
    """Whether this process may set back its namespace for children to its own."""
    own = os.open("/proc/thread-self/ns/pid", os.O_RDONLY)
    try:
        _set_namespace(own)
    except ClusterError:
        return False
    finally:
        os.close(own)
    return True


def _set_namespace(descriptor: int) -> None:
    if _libc.setns(descriptor, _CLONE_NEWPID) != 0:
        number = ctypes.get_errno()
        raise ClusterError(f"setns: {os.strerror(number)}")


def processes_of(init: Process) -> list[Process]:
    """All processes of the node that run, its first one left out."""
    namespace = _pid_namespace(init.pid)
    return [found for found in _processes_in(namespace) if found.pid != init.pid]


def _pid_namespace(pid: int) -> str:
    """Empty if it has ended, or if this user may not read it."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


def _processes_in(namespace: str) -> list[Process]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal() and namespace and _pid_namespace(int(name)) == namespace:
            with contextlib.suppress(ClusterError):  # it has just ended
                process = Process.of(int(name))
                if process.is_alive:
                    found.append(process)
    return found


def kill_node(init: Process) -> None:
    """Kill its first process and so all of them; returns when none runs any more."""
    namespace = _pid_namespace(init.pid)
    others = processes_of(init)
    init.kill()
    if not others:
        init.wait()
    while others:  # and those that were started in between
        for process in others:
            process.wait()
        others = [process for process in _processes_in(namespace) if process.pid != init.pid]


def signal_all(init: Process, name: str) -> None:
    """Send a signal to every process of the node but the first, at one instant for all."""
    before = processes_of(init)
    # -1 is every process that the sender sees, except itself and the first process.
    sender = start_in(
        init,
        ["sh", "-c", f"kill -s {name} -- -1"],
        env={"PATH": os.environ.get("PATH", os.defpath)},
        cwd="/",
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # a node without other processes is no error
    )
    sender.wait(WAIT_S)
    if name == "KILL":
        for process in before:
            process.wait()
    if name == "STOP":  # the kernel stops them a moment after the signal was sent
        _until(lambda: all(_is_stopped(one.pid) for one in processes_of(init)), "the stop")


def _is_stopped(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True  # it has ended
    return state in "TtZX"


# --- freezing --------------------------------------------------------------------------------


def freeze(init: Process, name: str) -> Path:
    """Freeze all processes of a node, unseen by them, in a new cgroup `name` (version 2).

    Gives that cgroup, for `thaw`. Raises: OSError: cgroups cannot be changed here.
    """
    group = _cgroup_of(init.pid) / name
    group.mkdir(exist_ok=True)
    try:
        (group / "cgroup.freeze").write_text("1")
        # A process in the cgroup freezes; one that is not yet in it may still fork: repeat until
        # none is.
        while outside := {process.pid for process in processes_of(init)} - _members(group):
            _move(outside, group)
        _until(lambda: "frozen 1" in (group / "cgroup.events").read_text(), "the freeze")
    except BaseException:
        thaw(group)
        raise
    return group


def thaw(group: Path) -> None:
    """Let them continue, in their previous cgroup. Works also if they, or it, have ended."""
    with contextlib.suppress(FileNotFoundError):
        (group / "cgroup.freeze").write_text("0")
        _until(lambda: _is_removed(group), f"the end of {group}")


def _is_removed(group: Path) -> bool:
    _move(_members(group), group.parent)
    try:
        group.rmdir()
    except OSError as error:
        # A process that is just ending is not listed, but still counts.
        if error.errno != errno.EBUSY:
            raise
        return False
    return True


def _cgroup_of(pid: int) -> Path:
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    roots = [Path(words[1]) for words in mounts if words[2] == "cgroup2"]
    if not roots:
        raise FileNotFoundError("no cgroup2 is mounted")
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return roots[0] / line[3:].lstrip("/")
    raise FileNotFoundError("the node is in no cgroup of version 2")


def _members(group: Path) -> set[int]:
    return {int(word) for word in (group / "cgroup.procs").read_text().split()}


def _move(pids: set[int], group: Path) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            (group / "cgroup.procs").write_text(str(pid))


def _until(is_so: Callable[[], bool], what: str) -> None:
    give_up_s = time.monotonic() + WAIT_S
    while not is_so():
        if time.monotonic() > give_up_s:
            raise ClusterError(f"limit of {WAIT_S:.0f} s exceeded for {what}")
        time.sleep(0.002)
