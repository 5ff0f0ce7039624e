"""Children of the agent, observed through pidfds.

Runs in the main thread. A zygote's grandchildren are reparented to the agent, which reaps them.

A pidfd always refers to one process, so a signal never reaches a later process with the same pid.
The status is read with waitid on exactly that pid, so this code never reaps a child of torch.

A pidfd becomes readable when the kernel has freed the memory of the process: 20 ms after a SIGKILL
of a rank with 64 MB of state. The last of its threads frees the memory; each other thread ends at
once. So a pidfd of one thread reports the end of the process earlier. It is no proof that nothing
of the process runs any more: only `reap` and `wait` are.

Source: PIDFD_THREAD of pidfd_open(2), Linux 6.9; field 52 of proc_pid_stat(5).
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from ftrun import clock
from ftrun.process_tree import fatal_status_of, state_of

MAX_REAPED = 1000
"""Maximum number of orphans reaped by one call, so that the loop continues if many end at once."""

MAX_OUTPUT_BYTES = 2048
"""Of a program that `run_bounded` runs; the start of a longer output is dropped."""
_PIDFD_THREAD = os.O_EXCL
_MAX_WATCHED = 3
"""Threads of one process that are watched after one another in a generation, because a thread may
end alone."""

awaited: set[int] = set()
"""Pids of programs for whose end another thread waits, such as hooks."""


class ChildProcess:
    """One child process, from its pid to its exit status."""

    def __init__(self, pid: int, name: str, *, leads_group: bool = False) -> None:
        self.pid = pid
        self.name = name
        self.leads_group = leads_group
        """The child leads a process group, which is killed when the child has ended."""
        self.pidfd = os.pidfd_open(pid)
        self.status: int | None = None
        """Exit code, or the negative signal number; None while it lives."""
        self.ends_with: int | None = None
        """The status of a process that is being ended and is not completely ended; see
        `is_ending`."""
        self._thread_fd = -1
        self._num_watched = 0

    @property
    def ended_with(self) -> int:
        status = self.ends_with if self.status is None else self.status
        assert status is not None
        return status

    @property
    def is_alive(self) -> bool:
        """It neither has ended nor is being ended, as far as `reap` and `is_ending` have found."""
        return self.status is self.ends_with is None

    @property
    def descriptors(self) -> list[int]:
        """Readable when the child, or its watched thread, has ended; empty after it was reaped."""
        return [] if self.status is not None else [self.pidfd, *self._thread_fds]

    def watch_thread(self) -> None:
        """Watch one thread other than the main thread, so that `is_ending` can report."""
        if self._thread_fd >= 0 or self._num_watched == _MAX_WATCHED or not self.is_alive:
            return
        with contextlib.suppress(OSError):  # it has just ended; before Linux 6.9: no such flag
            others = {int(name) for name in os.listdir(f"/proc/{self.pid}/task")} - {self.pid}
            if others:
                self._num_watched += 1
                self._thread_fd = os.pidfd_open(min(others), _PIDFD_THREAD)

    def renew_watch(self) -> None:
        """Let other threads be watched, because the process begins another generation."""
        self._num_watched = 0

    def is_ending(self) -> bool:
        """Whether a signal or a failure ends the child; `status` follows when it has ended."""
        if self._thread_fd >= 0 and has_ended(self._thread_fd):
            self._unwatch()
            self.ends_with = fatal_status_of(self.pid)
        return self.ends_with is not None

    @property
    def _thread_fds(self) -> list[int]:
        return [self._thread_fd] if self._thread_fd >= 0 else []

    def _unwatch(self) -> None:
        for fd in self._thread_fds:
            os.close(fd)
        self._thread_fd = -1

    def reap(self) -> bool:
        if self.status is not None:
            return True
        try:
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return False
            if self.leads_group:
                self.signal_group(signal.SIGKILL)
            # From here on another process may get this pid.
            found = os.waitid(os.P_PID, self.pid, os.WEXITED)
        except ChildProcessError:
            self._ended(-signal.SIGKILL)  # another part of the process has read the status
            return True
        assert found is not None
        self._ended(found.si_status if found.si_code == os.CLD_EXITED else -found.si_status)
        return True

    def is_stopped(self) -> bool:
        """Whether SIGSTOP or a similar signal has stopped it: /proc shows T (t: by a debugger)."""
        return state_of(self.pid) == "T"

    def signal(self, number: int) -> None:
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def signal_group(self, number: int) -> None:
        """Signal the processes of the child's group; no effect after the child was reaped."""
        if self.status is not None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def wait(self, deadline_s: float) -> bool:
        give_up_s = clock.now_s() + deadline_s
        while not self.reap():
            left_s = give_up_s - clock.now_s()
            if left_s <= 0:
                return False
            has_ended(self.pidfd, wait_s=left_s)
        return True

    def _ended(self, status: int) -> None:
        self.status = status
        self._unwatch()
        os.close(self.pidfd)


def has_ended(pidfd: int, *, wait_s: float = 0.0) -> bool:
    """Whether the process of this pidfd, a child or not, has ended with all its threads."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(wait_s * 1000))


def spawn(
    argv: Sequence[str],
    *,
    name: str,
    variables: Mapping[str, str],
    pass_fds: Sequence[int] = (),
    streams: Sequence[IO[str] | None] = (None, None),
    new_session: bool = False,
) -> ChildProcess:
    """Start a program; it inherits stdin, and stdout and stderr where `streams` has None."""
    started = subprocess.Popen(
        list(argv),
        env=dict(variables),
        pass_fds=tuple(pass_fds),
        stdout=streams[0],
        stderr=streams[1],
        start_new_session=new_session,
    )
    # ChildProcess reads the status. A Popen that is collected without one warns and keeps the pid.
    started.returncode = 0
    return ChildProcess(started.pid, name, leads_group=new_session)


def run_bounded(
    argv: Sequence[str],
    *,
    limit_s: float,
    variables: Mapping[str, str] | None = None,
    stdin: bytes = b"",
    cwd: str | None = None,
) -> tuple[str, str]:
    """Run a program to its end, in another thread than the main one, which reaps children.

    Its output goes to a file, not to a pipe: a background process that keeps a pipe open could
    block the thread longer than the program runs.

    Returns:
        Why it failed, empty if it did not; and the last `MAX_OUTPUT_BYTES` of its output.

    Raises:
        OSError: it cannot be started.
    """
    source, output = os.memfd_create("ftrun-program-in"), os.memfd_create("ftrun-program-out")
    try:
        os.write(source, stdin)
        os.lseek(source, 0, os.SEEK_SET)
        started = subprocess.Popen(
            list(argv),
            stdin=source,
            stdout=output,
            stderr=output,
            cwd=cwd,
            env=None if variables is None else dict(variables),
            start_new_session=True,
        )
        reason = _await_program(started, limit_s)
        size = os.fstat(output).st_size
        printed = os.pread(output, MAX_OUTPUT_BYTES, max(0, size - MAX_OUTPUT_BYTES))
        return reason, printed.decode("utf-8", "replace").strip()
    finally:
        os.close(source)
        os.close(output)


def _await_program(started: "subprocess.Popen[bytes]", limit_s: float) -> str:
    awaited.add(started.pid)
    started.returncode = 0  # `ChildProcess` reads the exit status, see `spawn`
    try:
        child = ChildProcess(started.pid, "program", leads_group=True)
        if not child.wait(limit_s):
            child.signal_group(signal.SIGKILL)
            child.wait(1.0)
            return f"it was killed after {limit_s:g} s"
    finally:
        awaited.discard(started.pid)
    code = child.ended_with
    if code == 0:
        return ""
    return f"it ended with {code}" if code > 0 else f"it was killed by signal {-code}"


def python_command(module: str, *arguments: str) -> list[str]:
    """`python -u -m module`, with the same protection from modules in the user's folder (-P)."""
    safe_path = ["-P"] if sys.flags.safe_path else []
    return [sys.executable, "-u", *safe_path, "-m", module, *arguments]


def reap_strangers(known: Sequence[ChildProcess]) -> None:
    """Read the status of adopted orphans, so that no zombie stays.

    A known child that ends between the two calls of waitid is reaped as itself.
    """
    mine = {child.pid: child for child in known}
    for _ in range(MAX_REAPED):
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None:
            return
        if found.si_pid in mine or found.si_pid in awaited:
            return  # its own event follows; orphans behind it wait for the next call
        with contextlib.suppress(ChildProcessError):
            os.waitpid(found.si_pid, os.WNOHANG)


def oom_kills() -> int | None:
    """Number of out-of-memory kills in this cgroup; on the machine, if that is not counted."""
    for path in (*_cgroup_files("memory.events", "memory.oom_control"), Path("/proc/vmstat")):
        found = _oom_kills_in(path)
        if found is not None and path.name == "memory.oom_control":
            # Version 1 counts each cgroup separately, version 2 with all cgroups below it.
            beneath = (_oom_kills_in(one) for one in path.parent.glob(f"*/{path.name}"))
            found += sum(kills or 0 for kills in beneath)
        if found is not None:
            return found
    return None


def _oom_kills_in(path: Path) -> int | None:
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def one_oom_ends_all() -> bool:
    """Whether memory.oom.group of this cgroup is 1: an OOM kill then ends all processes in it."""
    for path in _cgroup_files("memory.oom.group", ""):
        with contextlib.suppress(OSError):
            return path.read_text(encoding="ascii").strip() == "1"
    return False


def _cgroup_files(name: str, name_v1: str) -> list[Path]:
    root = Path("/sys/fs/cgroup")
    found: list[Path] = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                found.append(root / path.lstrip("/") / name)
            elif name_v1 and "memory" in controllers.split(","):
                found.append(root / "memory" / path.lstrip("/") / name_v1)
    return found
