"""Verdicts on ranks that call collectives or messages in different orders, or wait in a cycle."""

from collections.abc import Mapping, Sequence

from ftrun.config.profile import HangConfig
from ftrun.monitor.order.messages import call_of, group_name
from ftrun.monitor.verdicts import (
    Confidence,
    RankView,
    Verdict,
    VerdictKind,
    nodes_of,
    ranks_text,
    short,
)
from ftrun.monitor.wait_graph import CollectiveMismatch, WaitGraph, mismatch, waits_of

_MANY = 3
"""Maximum number of ranks that are described individually."""


def find_skipped(views: Mapping[int, RankView], node_of: Mapping[int, str]) -> Verdict | None:
    """Find ranks that call different collectives under one number, including ended ranks."""
    different = mismatch(views)
    return skipped_verdict(different, waits_of(views), node_of) if different else None


def skipped_verdict(
    different: CollectiveMismatch, waits: WaitGraph, node_of: Mapping[int, str]
) -> Verdict:
    sides = different.sides
    fewest = next(iter(sides.values()))
    is_clear = len(sides) == 2 and len(fewest) * 2 < len(different.calls)
    if not is_clear:  # a rank that has skipped a call is ahead in its steps
        ahead = max(waits.views[rank].step for rank in different.calls)
        in_front = [rank for rank in different.calls if waits.views[rank].step == ahead]
        is_clear = len(in_front) * 2 <= len(different.calls)
        fewest = in_front if is_clear else sorted(different.calls)
    ranks = tuple(fewest)
    evidence = [f"{ranks_text(side)}: {what}" for what, side in sides.items()]
    verb = "calls" if len(ranks) == 1 else "call"
    text = (
        f"{ranks_text(ranks)} {verb} another collective than the others: #{different.seq:,} of "
        f"{group_name(different.group)} is {_sides(sides)}"
    )
    if is_clear and (frame := short(waits.views[ranks[0]].place)):
        text += f"; rank {ranks[0]} is at {frame}"
    return Verdict(
        kind=VerdictKind.SKIPPED_COLLECTIVE,
        culprits=ranks,
        nodes=nodes_of(sorted(ranks), node_of),
        victims=tuple(sorted(set(different.calls) - set(ranks))),
        text=text,
        evidence=tuple(evidence),
        counter_evidence=() if is_clear else ("which side is correct cannot be determined",),
        confidence=Confidence.CERTAIN if is_clear else Confidence.POSSIBLE,
        act_immediately=True,
        fingerprint=f"{VerdictKind.SKIPPED_COLLECTIVE.value} {_sides(sides)}",
    )


def _sides(sides: Mapping[str, Sequence[int]]) -> str:
    return " and ".join(f"{what} on {ranks_text(ranks)}" for what, ranks in sides.items())


def deadlock_verdict(waits: WaitGraph, node_of: Mapping[int, str], settings: HangConfig) -> Verdict:
    """Ranks that wait in a cycle; if some have left the order of their messages, these ranks."""
    left = sorted(rank for rank in waits.edges if waits.views[rank].left_order)
    ranks = tuple(left or sorted(waits.circle()))
    views = [waits.views[rank] for rank in waits.edges if rank in ranks]
    # Torch counts messages and collectives of a group in one field, which gives no common order.
    are_counts = any(view.groups and not view.is_recorder_complete for view in views)
    are_still = all(view.still_s >= settings.no_activity_s for view in views) and not are_counts
    unknown = "only the counts of their recorders are known, which may be of messages"
    shown = sorted({*ranks, *waits.edges}, key=lambda rank: (rank not in ranks, rank))[: 2 * _MANY]
    evidence = [f"rank {rank}: {waits.views[rank].left_order}" for rank in left[:_MANY]]
    evidence += [
        f"rank {rank} waits in {call_of(waits.views[rank].waiting[0])} for "
        f"{ranks_text(waits.edges[rank])}"
        for rank in (shown if left else ranks[: 2 * _MANY])
    ]
    victims = tuple(sorted(waits.waiting - set(ranks)))
    return Verdict(
        kind=VerdictKind.DEADLOCK,
        culprits=ranks,
        nodes=nodes_of(sorted(ranks), node_of),
        victims=victims,
        text=_left_text(left, victims, waits) if left else _circle_text(ranks, waits),
        evidence=tuple(evidence),
        counter_evidence=(unknown,) if are_counts else (),
        confidence=Confidence.CERTAIN if are_still else Confidence.POSSIBLE,
        act_immediately=are_still,
        fingerprint=f"{VerdictKind.DEADLOCK.value} {' '.join(str(rank) for rank in ranks)}",
    )


def _left_text(left: Sequence[int], victims: Sequence[int], waits: WaitGraph) -> str:
    view = waits.views[left[0]]
    have, wait = ("has" if len(left) == 1 else "have"), ("waits" if len(victims) == 1 else "wait")
    at = f" at {short(view.place)}" if view.place else ""
    waiting = f", and {ranks_text(victims)} {wait}" if victims else ""
    return (
        f"{ranks_text(left)} {have} left the order of the messages of earlier steps{at}{waiting}: "
        f"{view.left_order}"
    )


def _circle_text(ranks: Sequence[int], waits: WaitGraph) -> str:
    groups = [waits.views[rank].waiting[0] for rank in ranks]
    of_messages = any(one.messages and not one.waits_seq for one in groups)
    orders = "they call collectives of several process groups in different orders"
    unmatched = "none of them has called the message that another waits for"
    return f"{ranks_text(ranks)} wait for one another: {unmatched if of_messages else orders}"
