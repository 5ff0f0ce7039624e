"""Named crash points: places where a test kills the process.

Runs in:  every process that keeps or changes state: agent, SMP and worker.

A test sets these variables before the process starts. They are read once, at import. If they are
not set, `crash_point` costs one comparison.

    FTRUN_CRASH_AT=smp.checkpoint.renamed      SIGKILL itself at the first pass
    FTRUN_CRASH_AT=smp.checkpoint.renamed:3    at the third pass
    FTRUN_CRASH_ONCE=/path/file                with FTRUN_CRASH_AT: only the first process of a run
                                               that reaches the point dies; it creates the file
    FTRUN_CRASH_COUNT=/path/file               append the name of each point passed, one per line

A name has the form `process.thing.what_has_just_happened`. A run with FTRUN_CRASH_COUNT lists the
points of a component. A test that kills at every point therefore covers new points automatically.
"""

import os
import signal
from collections import Counter
from collections.abc import Callable

_NAME, _, _HIT = os.environ.get("FTRUN_CRASH_AT", "").partition(":")
_ONCE_FILE = os.environ.get("FTRUN_CRASH_ONCE", "")
_COUNT_FILE = os.environ.get("FTRUN_CRASH_COUNT", "")
_ARMED = bool(_NAME or _COUNT_FILE)
_passed: Counter[str] = Counter()
_last_words: list[Callable[[], None]] = []


def arm(name: str, *, before: Callable[[], None]) -> None:
    """Kill this process, after `before`, at its next pass of a crash point."""
    global _ARMED, _NAME, _HIT
    _ARMED, _NAME, _HIT = True, name, str(_passed[name] + 1)
    _last_words.append(before)


def crash_point(name: str) -> None:
    if _ARMED:
        _pass(name)


def _pass(name: str) -> None:
    _passed[name] += 1
    if _COUNT_FILE:
        with open(_COUNT_FILE, "a", encoding="utf-8") as file:
            file.write(f"{name}\n")
    if name == _NAME and _passed[name] == int(_HIT or 1) and _is_first():
        for say in _last_words:
            say()
        os.kill(os.getpid(), signal.SIGKILL)


def _is_first() -> bool:
    if not _ONCE_FILE:
        return True
    try:
        os.close(os.open(_ONCE_FILE, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True
