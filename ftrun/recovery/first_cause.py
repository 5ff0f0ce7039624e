"""Finds the failure that caused the others.

Runs in:  the agent that leads, inside `GenerationMonitor` and `Supervisor`. Pure.
Takes in: ranks that have ended; what the flight recorders held at that moment.
Gives:    one `WorkerExit`; possibly one that no rank reported.

Rule 1: a lost node, or a worker that was killed, cannot be the consequence of a peer's failure; a
        rank that raised an exception can.
Rule 2: if only broken connections are known, the culprit is the rank that left: a rank that ended
        with 0 while others still needed it, or one that called another collective.
"""

from collections.abc import Mapping, Sequence

from ftrun.events import ExitKind, WorkerExit
from ftrun.ids import Rank
from ftrun.monitor.evidence import RankView
from ftrun.monitor.hang_detector import find_skipped
from ftrun.monitor.verdicts import Verdict, ranks_in_words

_ORDER = {
    ExitKind.NODE_LOST: 0,
    ExitKind.SKIPPED: 1,
    ExitKind.OUT_OF_MEMORY: 1,
    ExitKind.SIGNAL: 2,
    ExitKind.STOPPED: 2,
    ExitKind.HUNG: 2,
    ExitKind.BAD_NUMBERS: 2,
    ExitKind.CORRUPT_SNAPSHOT: 2,
    ExitKind.RESTORE_FAILED: 2,
    ExitKind.LINK_LOST: 2,
    ExitKind.LEFT_EARLY: 3,
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
    return end.kind is ExitKind.EXCEPTION and any(words in end.text for words in _BROKEN)


def is_link_failure(end: WorkerExit) -> bool:
    """Whether a connection was lost without a known process failure: a retry may succeed."""
    return end.kind is ExitKind.LINK_LOST or is_broken_connection(end)


def hidden_cause(
    ended: Sequence[WorkerExit],
    views: Mapping[int, RankView],
    node_of: Mapping[int, str],
) -> tuple[WorkerExit, Verdict | None] | None:
    """The failure behind a number of broken connections, if there is one.

    Args:
        ended: all ranks that have ended in this generation, including those that ended well.
        views: observations of the ranks at that moment, including those that have ended.
        node_of: the node of each rank.
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
    left, needed = finished[0], ranks_in_words(one.rank for one in failed)
    node = node_of.get(left.rank)
    who = f"rank {left.rank} on {node}" if node else f"rank {left.rank}"
    text = f"{who} has ended with exit code 0 while {needed} still needed it"
    detail = failed[0].detail and f"rank {failed[0].rank} failed because of it:\n{failed[0].detail}"
    return WorkerExit(left.rank, ExitKind.LEFT_EARLY, 1, text, detail, "left early"), None
