"""The state, work and children of a process, from the kernel.

Runs in:  agent, the thread of the rank observer.
Takes in: pids of this machine.
Gives:    `ProcessState`; None if the process has ended.

Source:   proc(5). Processor time is counted in ticks of 10 ms.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ftrun import clock

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_BAD_STATES = {"T": "is stopped", "D": "hangs in the kernel"}


@dataclass(frozen=True, slots=True)
class ProcessState:
    """One process at one moment."""

    state: str
    cpu_s: float
    """Processor time of all its threads so far."""
    io_bytes: int
    """Bytes read and written by system calls so far; 0 if that cannot be read."""
    blocked_in: str
    """The kernel function in which it sleeps; empty if that cannot be read."""
    child: str
    """A child that does no more work, in words."""
    children_work: float
    """Grows with all that its descendants compute, read and write."""


def process_facts(pid: int) -> ProcessState | None:
    fields = _stat(pid)
    if fields is None:
        return None
    return ProcessState(
        state=fields[0],
        cpu_s=(int(fields[11]) + int(fields[12])) * _TICK_S,
        io_bytes=_io_bytes(pid),
        blocked_in=_first_line(f"/proc/{pid}/wchan").strip("0"),
        child=_bad_child(pid),
        children_work=_children_work(pid),
    )


def cores_used(pid: int, *, within_s: float = 0.25) -> float:
    """Cores that a process uses, measured now; 0 if it has ended."""
    before, begun_s = process_facts(pid), clock.now_s()
    clock.sleep(within_s)
    after = process_facts(pid)
    if before is None or after is None:
        return 0.0
    return (after.cpu_s - before.cpu_s) / (clock.now_s() - begun_s)


def resident_bytes(pid: int) -> int:
    """Resident memory of a process; 0 if it has ended. Called once a second, so it is cheap."""
    words = _first_line(f"/proc/{pid}/statm").split()
    return int(words[1]) * os.sysconf("SC_PAGE_SIZE") if len(words) > 1 else 0


def room_bytes() -> int:
    """Memory that is free: of the machine, or of this cgroup if that is less; 0: unknown."""
    found: list[int] = []
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                found = [int(line.split()[1]) << 10]
    found += [max(0, limit - used) for limit, used in _cgroup_figures()]
    return min(found, default=0)


def _cgroup_figures() -> list[tuple[int, int]]:
    found = []
    for folder, limit, used in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):
            most = int(_first_line(f"{folder}/{limit}"))
            if most < 1 << 60:
                found.append((most, int(_first_line(f"{folder}/{used}"))))
    return found


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the name: state, parent ..."""
    text = _first_line(f"/proc/{pid}/stat")
    return text.rpartition(")")[2].split() if text else None


def _io_bytes(pid: int) -> int:
    total = 0
    with suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines():
            if line.startswith(("rchar", "wchar")):
                total += int(line.split()[1])
    return total


def _bad_child(pid: int) -> str:
    for word in _first_line(f"/proc/{pid}/task/{pid}/children").split():
        fields = _stat(int(word))
        if fields is not None and fields[0] in _BAD_STATES:
            return f"its child process {word} {_BAD_STATES[fields[0]]} (state {fields[0]})"
    return ""


def _children_work(pid: int, depth: int = 4) -> float:
    total = 0.0
    for word in _first_line(f"/proc/{pid}/task/{pid}/children").split()[:64]:
        fields = _stat(int(word))
        if fields is not None and fields[0] != "Z":
            # A process that only communicates uses little processor time, so its voluntary switches
            # count too.
            total += (int(fields[11]) + int(fields[12])) * _TICK_S + _io_bytes(int(word))
            total += _switches(int(word))
            total += _children_work(int(word), depth - 1) if depth else 0.0
    return total


def _switches(pid: int) -> int:
    with suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("voluntary_ctxt_switches"):
                return int(line.split()[1])
    return 0


def _first_line(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.readline()
    except OSError:
        return ""
