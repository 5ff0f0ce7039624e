"""The only reader of time.

Runs in: every process. Decisions never import it: time comes to them as `now_s`.
"""

import time

_BOOTTIME = getattr(time, "CLOCK_BOOTTIME", None)
"""It goes on while the machine is suspended, so a lease ends then. Only Linux has it."""


def now_s() -> float:
    """Seconds on the monotonic clock, which all processes of one machine share."""
    return time.monotonic() if _BOOTTIME is None else time.clock_gettime(_BOOTTIME)


def now_ns() -> int:
    """Nanoseconds on the same clock as `now_s`."""
    return time.monotonic_ns() if _BOOTTIME is None else time.clock_gettime_ns(_BOOTTIME)


def thread_cpu_s() -> float:
    """Processor time of the calling thread, in seconds."""
    return time.thread_time()


def wall_s() -> float:
    """Seconds since 1970. For journals and file names only: it may jump."""
    return time.time()


def sleep(seconds: float) -> None:
    """Give up the processor. Only for bounded back-off; a wait for a thing waits on the thing."""
    time.sleep(seconds)
