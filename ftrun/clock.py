"""Reads the clocks for all processes.

Decisions never import this module: they get the time as `now_s`.
"""

import time

_BOOTTIME = getattr(time, "CLOCK_BOOTTIME", None)
"""CLOCK_BOOTTIME advances while the machine is suspended, so leases expire then. Linux only."""


def now_s() -> float:
    """Seconds on the monotonic clock, which all processes of one machine share."""
    return time.monotonic() if _BOOTTIME is None else time.clock_gettime(_BOOTTIME)


def now_ns() -> int:
    return time.monotonic_ns() if _BOOTTIME is None else time.clock_gettime_ns(_BOOTTIME)


def thread_cpu_s() -> float:
    return time.thread_time()


def wall_s() -> float:
    """Seconds since 1970, for journals and file names only: this clock may jump."""
    return time.time()


def sleep(seconds: float) -> None:
    """Sleeps, for bounded back-off only. A wait for a condition waits on a descriptor or event."""
    time.sleep(seconds)
