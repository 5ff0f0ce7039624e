"""A file of memory in which a rank leaves its stacks and its last collectives for the agent.

Runs in:  worker (writes, in part from a signal handler in C), agent (reads, also of a dead rank).
Takes in: a descriptor.
Gives:    text of faulthandler before `CALLS_AT`, torch's flight recorder as JSON from there on.
Survives: the worker.
"""

import os
from contextlib import suppress

CALLS_AT = 1 << 20
MAX_CALLS_BYTES = 16 << 20


def create_stack_file(name: str) -> int:
    """A descriptor of an empty file."""
    return os.memfd_create(f"ftrun-stacks-{name}", os.MFD_CLOEXEC)


def leave_calls(fd: int, trace: bytes) -> None:
    with suppress(OSError):
        os.pwrite(fd, trace[:MAX_CALLS_BYTES], CALLS_AT)


def left_calls(fd: int) -> bytes:
    """Empty where none were left."""
    try:
        return os.pread(fd, MAX_CALLS_BYTES, CALLS_AT)
    except OSError:
        return b""


def clear_stacks(fd: int) -> None:
    """Have the next stacks written at the start: the position is the rank's as well."""
    os.ftruncate(fd, 0)
    os.lseek(fd, 0, os.SEEK_SET)


def stacks(fd: int) -> str:
    """What faulthandler has written."""
    with suppress(OSError):
        return os.pread(fd, CALLS_AT, 0).split(b"\0", 1)[0].decode("utf-8", "replace")
    return ""
