"""Explains why a worker has ended, and finds the failure that caused the others.

Rule 1: a lost node, or a worker that was killed, cannot be the consequence of a peer's failure; a
        rank that raised an exception can.
Rule 2: if only broken connections are known, the culprit is the rank that left: a rank that ended
        with 0 while others still needed it, or one that called another collective.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from signal import Signals

from ftrun.errors import ExitCode, JoinRefused, SetUpDiffers
from ftrun.events import ExitKind, WorkerExit
from ftrun.ids import Rank
from ftrun.monitor.order.disorder import find_skipped
from ftrun.monitor.verdicts import RUNTIME, RankView, Verdict, is_in, rank_on_node, ranks_text

SIGKILL = 9
_JOIN_REFUSED = (JoinRefused.__name__, SetUpDiffers.__name__)
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
    last_call: str = ""
    """The newest collective of a stopped worker, in words; empty: not known."""
    full_disk: str = ""
    """Folder of its output and its error file, if their disk is full."""
    corrupt: str = ""
    """Description of its corrupt snapshot, if the worker was killed or ended because of it."""


def explain(facts: ExitFacts) -> WorkerExit:
    rank, status = facts.rank, facts.status
    subject = f"rank {rank} (pid {facts.pid})"
    if facts.corrupt:
        text = f"{subject}: {facts.corrupt}"
        return WorkerExit(rank, ExitKind.CORRUPT_SNAPSHOT, status, text, fingerprint="corrupt")
    if facts.stopped_s is not None:
        text = f"{subject} was stopped (SIGSTOP) for {facts.stopped_s:.0f} s, and ftrun killed it"
        return WorkerExit(rank, ExitKind.STOPPED, status, text, facts.last_call, "stopped")
    if status == 0:
        return WorkerExit(rank, ExitKind.FINISHED, 0, f"{subject} has finished")
    if status < 0:
        return _signalled(facts, subject)
    if facts.message:
        first_line = facts.message.splitlines()[0]
        name = first_line.split(":")[0]
        return WorkerExit(
            rank,
            ExitKind.JOIN_REFUSED if name in _JOIN_REFUSED else ExitKind.EXCEPTION,
            status,
            f"{subject} raised {first_line}",
            detail=facts.traceback,
            fingerprint=f"exception {place(facts.traceback)} {name}",
            failed_at_ns=facts.failed_at_ns,
        )
    text = f"{subject} exited with code {status}"
    if facts.full_disk:
        text += f": the disk of {facts.full_disk} is full, so its output cannot be written there"
    elif status == _OUTPUT_LOST:
        text += ": Python could not write the rest of its output"
    return WorkerExit(rank, ExitKind.EXIT_CODE, status, text, fingerprint=f"{status}")


def _signalled(facts: ExitFacts, subject: str) -> WorkerExit:
    name = signal_name(-facts.status)
    if -facts.status == SIGKILL and facts.oom_kills:
        text = (
            f"{subject} was killed by the kernel, which was out of memory ({facts.oom_kills} "
            f"out-of-memory {'kill' if facts.oom_kills == 1 else 'kills'})"
        )
        return WorkerExit(facts.rank, ExitKind.OUT_OF_MEMORY, facts.status, text, fingerprint="oom")
    text = f"{subject} was killed by {name}"
    if -facts.status == SIGKILL:
        text += " (not out of memory)" if facts.oom_kills == 0 else " (sender unknown)"
    elif own := users_place(facts.traceback):
        text += f" at {own}"
    return WorkerExit(
        facts.rank, ExitKind.SIGNAL, facts.status, text, detail=facts.traceback, fingerprint=name
    )


def node_lost(rank: int, node_id: str, reason: str) -> WorkerExit:
    kind, code = ExitKind.NODE_LOST, ExitCode.NOT_ENOUGH_NODES
    text, mark = f"node {node_id} is lost: {reason}", f"node {node_id}"
    return WorkerExit(Rank(rank), kind, code, text, fingerprint=mark)


def restore_failed(rank: int, node_id: str, problem: str, *, is_link: bool) -> WorkerExit:
    """The end of a rank whose node could not fetch or read its state.

    Args:
        is_link: connections to other nodes were lost.
    """
    kind, code = ExitKind.RESTORE_FAILED, ExitCode.STATE_LOST
    if is_link:
        kind, code = ExitKind.LINK_LOST, ExitCode.TRY_AGAIN
    text = f"node {node_id} could not restore its state: {problem}"
    return WorkerExit(Rank(rank), kind, code, text, fingerprint=f"restore {node_id}")


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


def exit_text(status: int) -> str:
    return f"was killed by {signal_name(-status)}" if status < 0 else f"exited with code {status}"


_ORDER = {
    ExitKind.NODE_LOST: 0,
    ExitKind.SKIPPED: 1,
    ExitKind.OUT_OF_MEMORY: 1,
    ExitKind.SIGNAL: 2,
    ExitKind.STOPPED: 2,
    ExitKind.HUNG: 2,
    ExitKind.NUMERICAL_ANOMALY: 2,
    ExitKind.CORRUPT_SNAPSHOT: 2,
    ExitKind.RESTORE_FAILED: 2,
    ExitKind.LINK_LOST: 2,
    ExitKind.LEFT_EARLY: 3,
    ExitKind.JOIN_REFUSED: 3,
}
_BROKEN = (
    "Connection closed by peer", "Connection reset by peer", "Connection refused", "Broken pipe",
    "Read error [", "Write error [", "gloo/transport", "ncclRemoteError", "DistNetworkError",
    "recvVector failed", "peer closed", "Software caused connection abort",
)  # fmt: skip
_SIGABRT = -6


def first_cause(failed: Sequence[WorkerExit]) -> WorkerExit:
    """The failure that caused the others; among exceptions the earliest."""
    return min(
        failed,
        key=lambda found: (_ORDER.get(found.kind, 4), found.failed_at_ns or 1 << 62, found.rank),
    )


def may_be_a_consequence(end: WorkerExit) -> bool:
    """Whether the rank may have ended because of another one.

    gloo aborts the process if two ranks send each other different amounts.
    """
    return is_broken_connection(end) or (end.kind is ExitKind.SIGNAL and end.code == _SIGABRT)


def is_broken_connection(end: WorkerExit) -> bool:
    """Whether it is an exception that says only that a peer is unreachable."""
    return end.kind is ExitKind.EXCEPTION and names_broken_connection(end.text)


def names_broken_connection(text: str) -> bool:
    """Whether the text of an exception names the loss of a connection."""
    return any(words in text for words in _BROKEN)


def is_link_failure(end: WorkerExit) -> bool:
    """Whether a connection was lost without a known process failure: a retry may succeed."""
    return end.kind is ExitKind.LINK_LOST or is_broken_connection(end)


def hidden_cause(
    ended: Sequence[WorkerExit], views: Mapping[int, RankView], node_of: Mapping[int, str]
) -> tuple[WorkerExit, Verdict | None] | None:
    """The failure behind a number of broken connections, if there is one.

    `ended` and `views` include ranks that have ended well.
    """
    failed = [one for one in ended if one.kind is not ExitKind.FINISHED]
    if not failed or not all(may_be_a_consequence(one) for one in failed):
        return None
    skipped = find_skipped(views, node_of)
    if skipped is not None and skipped.culprits:
        rank = Rank(skipped.culprits[0])
        text = f"{skipped.kind.value}: {skipped.text}"
        cause = WorkerExit(rank, ExitKind.SKIPPED, 1, text, fingerprint=skipped.fingerprint)
        return cause, skipped
    finished = [one for one in ended if one.kind is ExitKind.FINISHED]
    if not finished or not all(is_broken_connection(one) for one in failed):
        return None
    left, others = finished[0], ranks_text(one.rank for one in failed)
    subject = rank_on_node(left.rank, node_of)
    verb = "was" if len(failed) == 1 else "were"
    text = f"{subject} exited early (code 0) while {others} {verb} still in a collective"
    detail = failed[0].detail and f"rank {failed[0].rank} failed because of it:\n{failed[0].detail}"
    return WorkerExit(left.rank, ExitKind.LEFT_EARLY, 1, text, detail, "left early"), None
