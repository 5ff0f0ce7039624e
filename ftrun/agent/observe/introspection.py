"""Reads the Python stack of a rank without the rank's cooperation.

Runs in the thread of the rank observer.

Source:   py-spy reads another process's memory (10 to 30 ms here); a container may forbid that.
          faulthandler's C code writes all stacks of its own process on a signal, even while the GIL
          is held, but not while the process is stopped.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ftrun import clock
from ftrun.monitor.verdicts import Frame
from ftrun.wire.shared_memory.pages import clear_stacks, stacks

SPY_S = 5.0
DUMP_WAIT_S = 0.5
MAX_FRAMES = 60


@dataclass(frozen=True, slots=True)
class RankStack:
    """The stack of one rank at one moment."""

    frames: tuple[Frame, ...]
    holds_gil: bool = False
    is_spied: bool = False
    """From py-spy; otherwise the holder of the GIL is unknown."""


def spy_program() -> str | None:
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.exists() else shutil.which("py-spy")


def take_stack(pid: int, *, dumper: int, stack_fd: int) -> RankStack | None:
    """The stack of a main thread; None if neither py-spy nor the rank gives it.

    Args:
        pid: the rank.
        dumper: the signal on which the rank writes its stacks, or 0.
        stack_fd: the file to which it writes them.
    """
    found = _py_spy_stack(pid)
    if found is None and dumper:
        found = _dumped(pid, dumper, stack_fd)
    return found


def _py_spy_stack(pid: int) -> RankStack | None:
    program = spy_program()
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "dump", "--nonblocking", "--json", "--pid", str(pid)],
            capture_output=True,
            timeout=SPY_S,
            check=False,
        )
        threads = json.loads(done.stdout) if done.returncode == 0 else []
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    main = [one for one in threads if one.get("os_thread_id") == pid] or threads[:1]
    if not main:
        return None
    frames = [f"{one['filename']}:{one['line']} in {one['name']}" for one in main[0]["frames"]]
    return RankStack(tuple(frames[:MAX_FRAMES]), bool(main[0].get("owns_gil")), is_spied=True)


def spy_fault() -> str:
    """Why a rank's stack cannot be read from outside here; empty if it can be."""
    if spy_program() is None:
        return "py-spy is not installed (pip install py-spy)"
    as_a_rank = "from ftrun.linux import let_parent_trace as let; let(); print(flush=True); input()"
    safe_path = ["-P"] if sys.flags.safe_path else []
    words = [sys.executable, *safe_path, "-c", as_a_rank]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        is_read = _py_spy_stack(child.pid) is not None
        child.kill()
    if is_read:
        return ""
    return (
        "py-spy may not read other processes here: it needs ptrace (CAP_SYS_PTRACE in a "
        "container, or kernel.yama.ptrace_scope=0)"
    )


def _dumped(pid: int, dumper: int, stack_fd: int) -> RankStack | None:
    """Have the process write its stacks; faulthandler writes the main thread last."""
    clear_stacks(stack_fd)
    try:
        signal.pidfd_send_signal(handle := os.pidfd_open(pid), dumper)
    except OSError:
        return None
    os.close(handle)
    give_up_s, before = clock.now_s() + DUMP_WAIT_S, ""
    while clock.now_s() < give_up_s:
        clock.sleep(0.01)
        text = stacks(stack_fd)
        if text and text == before:
            break
        before = text
    return parse_dump(before)


def parse_dump(text: str) -> RankStack | None:
    """The main thread of a faulthandler dump: the current thread, or else the last one."""
    threads: list[list[Frame]] = []
    current = -1
    for line in text.rpartition("Fatal Python error")[2].splitlines():
        if line.startswith(("Thread ", "Current thread ", "Stack (")):
            if not line.startswith("Thread"):
                current = len(threads)
            threads.append([])
        elif threads and line.startswith('  File "'):
            path, _, rest = line.removeprefix('  File "').partition('", line ')
            number, _, name = rest.partition(" in ")
            threads[-1].append(f"{path}:{number} in {name}")
    if not threads:
        return None
    return RankStack(tuple(threads[current if current >= 0 else -1][:MAX_FRAMES]))


def as_traceback(stack: RankStack) -> str:
    """The stack in the form of an exception's traceback, the innermost frame last."""
    lines = []
    for frame in reversed(stack.frames):
        where, _, function = frame.rpartition(" in ")
        path, _, line = where.rpartition(":")
        lines.append(f'  File "{path}", line {line}, in {function}')
    return "\n".join(lines)


if __name__ == "__main__":  # for the preflight command
    sys.stdout.write(spy_fault())
