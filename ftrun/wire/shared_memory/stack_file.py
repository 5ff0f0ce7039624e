"""Memory file in which a rank leaves its stacks and its last collectives for the agent.

Runs in:  worker (writes, partly from a signal handler in C), agent (reads, also after its death).
Takes in: a descriptor.
Gives:    text of faulthandler before offset `CALLS_AT`, torch's flight recorder as JSON after it.
Survives: the worker.
"""

import os
from contextlib import suppress

CALLS_AT = 1 << 20
MAX_CALLS_BYTES = 16 << 20


def create_stack_file(name: str) -> int:
    return os.memfd_create(f"ftrun-stacks-{name}", os.MFD_CLOEXEC)


def leave_calls(fd: int, trace: bytes) -> None:
    with suppress(OSError):
        os.pwrite(fd, trace[:MAX_CALLS_BYTES], CALLS_AT)


def left_calls(fd: int) -> bytes:
    """Returns empty bytes if the rank left none."""
    try:
        return os.pread(fd, MAX_CALLS_BYTES, CALLS_AT)
    except OSError:
        return b""


def clear_stacks(fd: int) -> None:
    """Truncate the file and rewind it, because the rank shares the file position."""
    os.ftruncate(fd, 0)
    os.lseek(fd, 0, os.SEEK_SET)


def stacks(fd: int) -> str:
    with suppress(OSError):
        return os.pread(fd, CALLS_AT, 0).split(b"\0", 1)[0].decode("utf-8", "replace")
    return ""
