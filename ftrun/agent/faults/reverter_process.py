"""The reverter: injects a fault, waits, and reverts it, even if the agent has ended.

Runs in:  a process of its own, `python -m ftrun.agent.faults.reverter_process ORDER`, in a session
          of its own. The agent starts it; it does not end with the agent.
Takes in: the steps to do, the duration, and the steps to undo, as JSON.
Gives:    the line `done` on stdout when all steps are done. If a step fails: the line `failed`
          with the reason, after an undo.
Survives: the agent, the stub, every rank.

Rule 1: the reverter undoes the fault when its time is over, when all its targets have ended, or at
        SIGTERM. The agent sends SIGTERM at the end of the run; the stub sends it to all remaining
        processes.
Rule 2: a process is identified by pid and start time, so that no other process with the same pid is
        ever affected.
Rule 3: only steps that were done are undone. If the first step fails, the state that exists belongs
        to another program.
Rule 4: a reverter neither stops nor kills another reverter, because the fault of that one would
        then stay forever.
"""

import contextlib
import errno
import json
import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftrun import clock
from ftrun.linux import die_with_parent, name_process

POLL_S = 0.1
HEARTBEAT_S = 0.037
"""Length of one stop-and-continue cycle; not a divisor of any polling interval."""

_FILL_BYTES = 16 << 20
_COMMAND_S = 10.0
_PASSES = 20
_COMM = "ftrun-healer"
_HEAL_S = 5.0
"""Seconds that other reverters have to undo their faults before the whole run is killed."""

_DONE_TO_SOME = ("signal", "tree")
"""Steps that may be partly done when they fail."""

Process = tuple[int, int]
"""Pid and start time in clock ticks since boot."""


def start_time(pid: int) -> int:
    """Start time in clock ticks since boot; 0: there is no such process, or it is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    state, *fields = stat.rpartition(")")[2].split()
    return 0 if state == "Z" else int(fields[18])


def named(*pids: int) -> list[Process]:
    """Add the start times, which distinguish these processes from later ones with the same pid."""
    return [(pid, start_time(pid)) for pid in pids]


class FaultReverter:
    """Injects and reverts one fault."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._do: list[list[Any]] = order["do"]
        self._undo: list[list[Any]] = order["undo"]
        self._for_s = float(order.get("for_s", 0.0))
        self._since_s = float(order.get("since_s", 0.0))
        self._targets: list[Process] = [(pid, at) for pid, at in order.get("targets", [])]
        self._burners: list[int] = []
        self._beaten: float = 0.0
        self._tree: list[Process] = []
        self._has_started = not self._do
        self._must_end = False

    def run(self) -> int:
        signal.signal(signal.SIGTERM, self._on_term)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        if not os.read(0, 16):
            return 1  # the agent has ended
        try:
            for step in self._do:
                self._has_started = self._has_started or step[0] in _DONE_TO_SOME
                self._take(step)
                self._has_started = True
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            self.revert()
            _report("failed " + str(error).replace("\n", " "))
            return 1
        _report("done")
        try:
            self._wait()
        finally:
            self.revert()
        return 0

    def revert(self) -> None:
        for step in self._undo if self._has_started else []:
            with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
                self._take(step)
        for pid in self._burners:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def _on_term(self, *_: object) -> None:
        self._must_end = True

    def _wait(self) -> None:
        if not self._undo and not self._burners:
            return
        until_s = (self._since_s or clock.now_s()) + self._for_s if self._for_s else float("inf")
        while not self._must_end and clock.now_s() < until_s:
            if self._targets and not any(start_time(pid) == at for pid, at in self._targets):
                return
            if self._beaten:
                self._heartbeat()
            else:
                clock.sleep(min(POLL_S, max(0.0, until_s - clock.now_s())))

    def _heartbeat(self) -> None:
        _signal(signal.SIGSTOP, self._targets)
        clock.sleep(HEARTBEAT_S * (1 - self._beaten))
        _signal(signal.SIGCONT, self._targets)
        clock.sleep(HEARTBEAT_S * self._beaten)

    def _take(self, step: list[Any]) -> None:
        verb, *words = step
        steps: dict[str, Callable[..., None]] = {
            "run": _run,
            "write": _write,
            "fill": _fill,
            "unlink": lambda path: Path(path).unlink(missing_ok=True),
            "signal": lambda number, target: _signal(number, [tuple(one) for one in target]),
            "empty": _empty,
            "limit": _limit,
            "cap files": _cap_files,
            "cap processes": _cap_processes,
            "burn": self._use_cpu,
            "beat": self._begin_heartbeat,
            "tree": self._signal_tree,
        }
        steps[verb](*words)

    def _begin_heartbeat(self, part: float) -> None:
        self._beaten = part

    def _use_cpu(self, count: int) -> None:
        own = os.getpid()
        for _ in range(count):
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                die_with_parent(own)
                while True:
                    pass
            self._burners.append(pid)

    def _signal_tree(self, number: int, root: int) -> None:
        """Stop, kill or continue a process and all its descendants except reverters.

        Several passes stop them first, because a running process may start others during a pass.
        Before a kill, other reverters undo their faults.
        """
        if number == signal.SIGCONT:
            _signal(number, self._tree)
            return
        if number == signal.SIGKILL:
            _end_reverters(root)
        for _ in range(_PASSES):
            new = [one for one in _family(root)[0] if one not in self._tree]
            if not new:
                break
            self._tree += new
            _signal(signal.SIGSTOP, new)
        if number != signal.SIGSTOP:
            _signal(number, self._tree)


def _signal(number: int, processes: list[Process]) -> None:
    for pid, at in processes:
        if start_time(pid) == at:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _end_reverters(root: int) -> None:
    """Send SIGTERM to the other reverters below `root`, and wait up to 5 s for their undo."""
    own = os.getpid()
    others = [one for one in _family(root)[1] if one[0] != own]
    _signal(signal.SIGTERM, others)
    until_s = clock.now_s() + _HEAL_S
    while any(start_time(pid) == at for pid, at in others) and clock.now_s() < until_s:
        clock.sleep(POLL_S / _PASSES)


def _family(root: int) -> tuple[list[Process], list[Process]]:
    """The process tree below `root`: the processes that are not reverters, and the reverters."""
    children: dict[int, list[int]] = {}
    reverters = {os.getpid()}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                stat = Path(f"/proc/{name}/stat").read_text(encoding="ascii", errors="replace")
                before, _, after = stat.rpartition(")")
                children.setdefault(int(after.split()[1]), []).append(int(name))
                if before.partition("(")[2] == _COMM:
                    reverters.add(int(name))
    found, met, rest = [], [], [root]
    while rest:
        pid = rest.pop(0)
        if pid in reverters:
            met.append(pid)
        elif pid != 1 or root == 1:
            rest += children.get(pid, [])
            if pid != 1:
                found.append(pid)
    return [one for one in named(*found) if one[1]], [one for one in named(*met) if one[1]]


def _run(argv: list[str]) -> None:
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=_COMMAND_S, check=False, cwd="/"
    )
    if done.returncode != 0:
        words = " ".join((done.stderr or done.stdout).split())
        raise ValueError(f"`{' '.join(argv)}`: {words or f'exit {done.returncode}'}")


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def _fill(path: str) -> None:
    """Create a file that takes all free space; remove it if that fails for another reason."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    size, step = 0, _FILL_BYTES
    try:
        while step >= 4096:
            try:
                os.posix_fallocate(fd, size, step)
                size += step
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    os.unlink(path)
                    raise
                step //= 2
    finally:
        os.close(fd)


def _empty(group: str, parent: str) -> None:
    """Move the remaining processes of a cgroup to `parent`, and remove the cgroup."""
    for _ in range(_PASSES):
        with contextlib.suppress(OSError):
            for pid in Path(group, "cgroup.procs").read_text(encoding="ascii").split():
                with contextlib.suppress(OSError):
                    _write(f"{parent}/cgroup.procs", pid)
        try:
            os.rmdir(group)
            return
        except FileNotFoundError:
            return
        except OSError:
            clock.sleep(POLL_S)


def _limit(target: Process, what: int, soft: int) -> None:
    pid, at = target
    if start_time(pid) == at:
        _, hard = resource.prlimit(pid, what)
        resource.prlimit(pid, what, (soft, hard))


def _cap_files(target: Process) -> None:
    """Limit a process to its lowest free descriptor number.

    It is sampled 20 times, because threads of the process open and close files.
    """
    pid, at = target
    if start_time(pid) == at:
        _limit(target, resource.RLIMIT_NOFILE, min(_lowest_free(pid) for _ in range(_PASSES)))


def _lowest_free(pid: int) -> int:
    clock.sleep(POLL_S / _PASSES)
    taken = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    return min(set(range(len(taken) + 1)) - taken)


def _cap_processes(group: str) -> None:
    _write(f"{group}/pids.max", Path(group, "pids.current").read_text(encoding="ascii").strip())


def _report(text: str) -> None:
    with contextlib.suppress(OSError):
        if select.select([], [1], [], 0)[1]:
            os.write(1, f"{text}\n".encode())


if __name__ == "__main__":
    name_process(_COMM)
    sys.exit(FaultReverter(json.loads(sys.argv[1])).run())
