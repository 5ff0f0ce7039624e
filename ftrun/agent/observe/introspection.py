"""Reads the Python stack and the flight recorder of a rank without the rank's cooperation.

Runs in:  agent, the thread of the rank observer.
Takes in: a pid; the rank's stack file, in case py-spy is not permitted; the unix socket of torch's
          worker server in the rank. Its C++ thread answers even if the rank hangs while it holds
          the GIL.
Gives:    a `RankStack`: the main thread's frames, the innermost first, and whether it holds the
          GIL; `RecordedCollective`s, the oldest first.
Source:   py-spy reads another process's memory (10 to 30 ms here); a container may forbid that.
          faulthandler's C code writes all stacks of its own process on a signal, even while the GIL
          is held, but not while the process is stopped. The handler `fr_trace_json` was read in
          torch 2.13, where 64 entries take 1 ms. With gloo an entry has no start and no end, only
          `retired` after its end.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ftrun import clock
from ftrun.monitor.verdicts import Frame
from ftrun.wire.shared_memory.pages import clear_stacks, stacks
from ftrun.wire.transport.channel import short_socket_path

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
    """The stack of a rank's main thread; None if neither method works.

    Args:
        pid: of the rank.
        dumper: the signal on which the rank writes its stacks; 0: it has reported none.
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


# --- the flight recorder ------------------------------------------------------------------------

RECORDER_S = 1.0
MAX_ANSWER_BYTES = 64 << 20
_REQUEST = (
    b"POST /handler/fr_trace_json HTTP/1.1\r\nHost: rank\r\nContent-Length: 0\r\n"
    b"Connection: close\r\n\r\n"
)


class RecordedCollective(msgspec.Struct, frozen=True):
    """One collective as this rank has called it."""

    process_group: tuple[str, str]
    """Name and description of the group."""
    collective_seq_id: int
    profiling_name: str
    """For example `gloo:all_reduce`."""
    time_created_ns: int
    """When it was called, on the wall clock."""
    retired: bool
    """It has ended on this rank."""
    is_p2p: bool = False
    input_sizes: list[list[int]] = []

    @property
    def group(self) -> str:
        return self.process_group[0]

    @property
    def op(self) -> str:
        return self.profiling_name.rpartition(":")[2]

    @property
    def sizes(self) -> str:
        shown = " ".join(str(sizes) if sizes else "scalar" for sizes in self.input_sizes[:4])
        return shown + (" ..." if len(self.input_sizes) > 4 else "")


class _Trace(msgspec.Struct):
    entries: list[RecordedCollective] = []


_decoder = msgspec.json.Decoder(_Trace)


def read_entries(path: str, *, deadline_s: float = RECORDER_S) -> list[RecordedCollective] | None:
    """All entries of a rank; None if it does not answer."""
    try:
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as link:
            link.settimeout(deadline_s)
            with short_socket_path(Path(path)) as short:
                link.connect(short)
            link.sendall(_REQUEST)
            answer = _read_all(link)
        head, _, body = answer.partition(b"\r\n\r\n")
    except OSError:
        return None
    return parse_entries(body) if b" 200 " in head[:32] else None


def parse_entries(trace: bytes) -> list[RecordedCollective] | None:
    try:
        return _decoder.decode(trace).entries
    except msgspec.DecodeError:
        return None


def _read_all(link: socket.socket) -> bytes:
    parts, size = [], 0
    while size < MAX_ANSWER_BYTES and (part := link.recv(1 << 18)):
        parts.append(part)
        size += len(part)
    return b"".join(parts)


if __name__ == "__main__":  # for the preflight command
    sys.stdout.write(spy_fault())
