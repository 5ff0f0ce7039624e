"""Explains why a worker has ended.

Runs in:  agent. Pure.
Takes in: the exit status from the kernel, and the worker's error file.
Gives:    a `WorkerExit`, in words.
"""

from dataclasses import dataclass
from signal import Signals

from ftrun.events import ExitKind, WorkerExit
from ftrun.ids import Rank
from ftrun.monitor.evidence import RUNTIME, is_in

SIGKILL = 9
_OUTPUT_LOST = 120
"""Python's exit code if stdout or stderr cannot be flushed at the end."""


@dataclass(frozen=True, slots=True)
class ExitFacts:
    """Everything known about the end of one worker."""

    rank: Rank
    pid: int
    status: int
    """Exit code, or the negative signal number."""
    message: str = ""
    """Type and text of the exception, from the error file."""
    traceback: str = ""
    failed_at_ns: int = 0
    oom_kills: int | None = None
    """Out-of-memory kills on this node since the last check; None if unreadable."""
    stopped_s: float | None = None
    """Seconds for which the worker was stopped before ftrun killed it for that."""
    full_disk: str = ""
    """Folder of its output and its error file, if their disk is full."""
    corrupt: str = ""
    """Description of its corrupt snapshot, if the worker was killed or ended because of it."""


def explain(facts: ExitFacts) -> WorkerExit:
    rank, status = facts.rank, facts.status
    who = f"rank {rank} (pid {facts.pid})"
    if facts.corrupt:
        return WorkerExit(
            rank,
            ExitKind.CORRUPT_SNAPSHOT,
            status,
            f"{who}: {facts.corrupt}",
            fingerprint="corrupt",
        )
    if facts.stopped_s is not None:
        text = f"{who} was stopped (SIGSTOP) for {facts.stopped_s:.0f} s and was killed for it"
        return WorkerExit(rank, ExitKind.STOPPED, status, text, fingerprint="stopped")
    if status == 0:
        return WorkerExit(rank, ExitKind.FINISHED, 0, f"{who} has finished")
    if status < 0:
        return _signalled(facts, who)
    if facts.message:
        first_line = facts.message.splitlines()[0]
        return WorkerExit(
            rank,
            ExitKind.EXCEPTION,
            status,
            f"{who} raised {first_line}",
            detail=facts.traceback,
            fingerprint=f"exception {place(facts.traceback)} {first_line.split(':')[0]}",
            failed_at_ns=facts.failed_at_ns,
        )
    text = f"{who} exited with code {status}"
    if facts.full_disk:
        text += f": the disk of {facts.full_disk} is full, so its output cannot be written there"
    elif status == _OUTPUT_LOST:
        text += ": Python could not write the rest of its output"
    return WorkerExit(rank, ExitKind.EXIT_CODE, status, text, fingerprint=f"{status}")


def _signalled(facts: ExitFacts, who: str) -> WorkerExit:
    name = signal_name(-facts.status)
    if -facts.status == SIGKILL and facts.oom_kills:
        text = (
            f"{who} was killed by the kernel, which was out of memory ({facts.oom_kills} such "
            "kill(s) since the last look)"
        )
        return WorkerExit(facts.rank, ExitKind.OUT_OF_MEMORY, facts.status, text, fingerprint="oom")
    text = f"{who} was killed by {name}"
    if -facts.status == SIGKILL:
        known = (
            "the kernel has not run out of memory"
            if facts.oom_kills == 0
            else "by whom is not known"
        )
        text += f" ({known})"
    elif own := users_place(facts.traceback):
        text += f" at {own}"
    return WorkerExit(
        facts.rank, ExitKind.SIGNAL, facts.status, text, detail=facts.traceback, fingerprint=name
    )


def signal_name(number: int) -> str:
    try:
        return Signals(number).name
    except ValueError:
        return f"signal {number}"


def place(traceback: str) -> str:
    lines = [line.strip() for line in traceback.splitlines() if line.strip().startswith("File ")]
    return lines[-1] if lines else ""


def users_place(traceback: str) -> str:
    """Innermost line of the user's own code: `train.py:42 in step`; empty: none."""
    for line in reversed(traceback.splitlines()):
        path, comma, rest = line.strip().removeprefix('File "').partition('", line ')
        if comma and not is_in(path, RUNTIME):
            number, _, function = rest.partition(", in ")
            return f"{path.rpartition('/')[2]}:{number} in {function}"
    return ""


def end_in_words(status: int) -> str:
    return f"was killed by {signal_name(-status)}" if status < 0 else f"exited with code {status}"
