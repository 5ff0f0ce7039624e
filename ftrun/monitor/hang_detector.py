"""Finds the culprit when a run makes no progress.

Source:   C4's syndromes (arXiv 2406.04594, see docs/papers.md) and the design's list.

Rule 1: Positive evidence is a process that cannot run its code (stopped, ended, its GIL held), or
        that is idle while others wait for it. A process that computes is not positive evidence, for
        any duration. It may be evaluating, or at a long last batch.
Rule 2: A verdict states what cannot be determined: several culprits, and `possible`.
"""

from collections.abc import Collection, Mapping, Sequence, Set

import msgspec

from ftrun.config.profile import HangConfig
from ftrun.monitor.connections import stalled_connections, with_stalled
from ftrun.monitor.order.disorder import deadlock_verdict, skipped_verdict
from ftrun.monitor.order.messages import call_of, group_name, waited_s
from ftrun.monitor.verdicts import (
    COMPUTES,
    Confidence,
    ProcessGroupView,
    RankView,
    Verdict,
    VerdictKind,
    function_of,
    nodes_of,
    rank_on_node,
    ranks_text,
    short,
)
from ftrun.monitor.wait_graph import WaitGraph, mismatch, waits_of

_MANY = 3
"""Maximum number of culprits that are described individually."""

_A_MOMENT_S = 0.4
"""Time between two observations. For this long a rank may read a file with the GIL held."""

OWN_TIME = ("checkpoint", "compile", "data", "debugger", "outside")
"""Activities, by the stack, that may take long. They are not interrupted at the first suspicion."""

_MOVED_WITHIN_S = 30.0
"""One operation on the CPU may take this long, so the stack changes later than at each look."""


def find_hang(
    views: Mapping[int, RankView],
    node_of: Mapping[int, str],
    settings: HangConfig,
    *,
    limit_s: float,
) -> Verdict | None:
    """Judge one observation of all ranks, also of ranks that have finished.

    A rank that has made a step within `limit_s` is not late.
    """
    found = _judged(views, node_of, settings, limit_s)
    if found is None:
        return None
    stalled = stalled_connections(views, node_of, limit_s=settings.no_activity_s)
    return _with_errors(with_stalled(found, stalled, views), views)


def _with_errors(verdict: Verdict, views: Mapping[int, RankView]) -> Verdict:
    """With what the culprits have written, or the ranks that wait if there is no culprit."""
    ranks = [rank for rank in verdict.culprits or verdict.victims if views[rank].errors]
    lines = [f"rank {rank}: {one.text}" for rank in ranks for one in views[rank].errors[:1]]
    first = views[ranks[0]].errors[0].error_class if ranks else ""
    evidence = (*verdict.evidence, *lines[:_MANY])
    return msgspec.structs.replace(verdict, evidence=evidence, error_class=first)


def _judged(
    views: Mapping[int, RankView], node_of: Mapping[int, str], settings: HangConfig, limit_s: float
) -> Verdict | None:
    late = [view for view in views.values() if is_late(view, limit_s)]
    if not late:
        return None
    waits = waits_of(views)
    if different := mismatch(views):
        return skipped_verdict(different, waits, node_of)
    if waits.edges or waits.stuck_devices:
        ends = waits.ends()
        if ends & waits.unknown:
            return None  # its node has not reported yet
        if not all(is_late(views[rank], limit_s) or views[rank].is_finished for rank in ends):
            return None  # it makes steps, so it will enter the collective
        if ends:
            return _awaited(ends, waits, node_of, settings)
        return deadlock_verdict(waits, node_of, settings)
    if waits.stuck:
        return _not_left(waits, node_of)
    alone = [view for view in late if view.rank not in waits.waiting]
    if alone:
        return _not_entered(alone, waits, node_of, settings)
    return _not_delivered(late, waits, node_of)


def _awaited(
    ends: Set[int], waits: WaitGraph, node_of: Mapping[int, str], settings: HangConfig
) -> Verdict:
    """The verdict on the ends of the wait chains."""
    if waits.stuck and ends <= set(waits.behind) - waits.stuck_devices:
        return _not_left(waits, node_of)
    culprits = [waits.views[rank] for rank in sorted(ends)]
    if ends <= set(waits.undelivered):
        return _not_delivered(culprits, waits, node_of)
    return _not_entered(culprits, waits, node_of, settings)


def is_late(view: RankView, limit_s: float) -> bool:
    return view.has_stepped and not view.is_finished and view.unresponsive_s >= limit_s


# --- a rank has not entered --------------------------------------------------------------------


def _not_entered(
    culprits: Sequence[RankView], waits: WaitGraph, node_of: Mapping[int, str], settings: HangConfig
) -> Verdict:
    ranks = tuple(view.rank for view in culprits)
    victims = tuple(sorted(waits.waiting - set(ranks)))
    kinds = [_kind_of(view, waits, settings) for view in culprits]
    kind = kinds[0][0]
    # If no rank waits for the culprits, they may be doing work of their own.
    act_immediately = all(at_once for _, at_once in kinds) and bool(victims)
    evidence, counter_evidence = _of_waiting(waits, ranks), list[str]()
    for view in culprits[:_MANY]:
        evidence += _of_device(view.rank, waits) + _of_state(view, settings)
        counter_evidence += _counter_evidence(view)
        if view.rank in waits.stuck_devices - waits.proven:
            counter_evidence.append(
                f"the device of rank {view.rank} may run a long kernel before that collective"
            )
    return Verdict(
        kind=kind,
        culprits=ranks,
        nodes=nodes_of(sorted(ranks), node_of),
        victims=victims,
        text=_sentence(culprits, kind, waits, node_of),
        evidence=tuple(evidence),
        counter_evidence=tuple(counter_evidence),
        confidence=Confidence.CERTAIN if act_immediately else Confidence.LIKELY,
        may_take_long=any(
            _may_take_long(view) for view in culprits if view.rank not in waits.proven
        ),
        act_immediately=act_immediately,
        fingerprint=f"{kind.value} {function_of(culprits[0].place)}",
    )


def _may_take_long(view: RankView) -> bool:
    return view.has_reported or view.activity in OWN_TIME or _moves(view)


def _moves(view: RankView) -> bool:
    """Whether it computes at changing places, as in an evaluation that the script does not report.

    A loop that stays in one function is a busy loop. One that calls others looks like work.
    """
    is_at_places = view.unmoved_s < _MOVED_WITHIN_S and view.spins_s < _A_MOMENT_S
    return bool(view.stack) and view.cpu >= COMPUTES and is_at_places


def _kind_of(view: RankView, waits: WaitGraph, settings: HangConfig) -> tuple[VerdictKind, bool]:
    if view.is_finished:
        return VerdictKind.HANG_IN_COMPUTATION, True
    if view.process in ("T", "t"):
        return VerdictKind.FROZEN, True
    if view.process == "D":
        return VerdictKind.FROZEN, False
    if view.rank in waits.stuck_devices:
        return VerdictKind.DEVICE_STUCK, _is_device_proof(view, waits, settings)
    return _kind_of_host(view, settings)


def _is_device_proof(view: RankView, waits: WaitGraph, settings: HangConfig) -> bool:
    """Whether host and device have not moved, and another member had completed it before.

    Ranks are not observed at the same moment. A member that has not moved for a while has not
    completed the collective in between.
    """
    behind = waits.behind[view.rank]
    others = (group for one in behind.completed_by for group in waits.views[one].groups)
    limit_s = settings.no_activity_s
    return (
        view.rank in waits.proven
        and max(view.still_s, view.unmoved_s) >= limit_s
        and behind.group.still_s >= limit_s
        and any(one.name == behind.group.name and one.still_s >= limit_s for one in others)
    )


def _kind_of_host(view: RankView, settings: HangConfig) -> tuple[VerdictKind, bool]:
    is_still = view.still_s >= settings.no_activity_s
    if view.holds_gil and view.process == "S" and view.still_s >= _A_MOMENT_S:
        return VerdictKind.GIL_STUCK, is_still and not _may_take_long(view)
    if view.activity == "data":
        return VerdictKind.INPUT_BOUND, "is stopped" in view.child
    if view.spins_s >= settings.no_activity_s and not _may_take_long(view):
        return VerdictKind.BUSY_LOOP, False
    return VerdictKind.HANG_IN_COMPUTATION, is_still and not _may_take_long(view)


def _sentence(
    culprits: Sequence[RankView], kind: VerdictKind, waits: WaitGraph, node_of: Mapping[int, str]
) -> str:
    first = culprits[0]
    if len(culprits) > 1:
        subject = ranks_text(view.rank for view in culprits)
        does = _DO_TOGETHER.get(kind) or _do_together(culprits)
    else:
        subject = rank_on_node(first.rank, node_of)
        does = _does(first, kind)
    ranks = {view.rank for view in culprits}
    others = sorted(waits.waiting - ranks)
    if not others:
        return f"{subject} {does}; no other rank waits"
    verb = "waits" if len(others) == 1 else "wait"
    groups = _waiting_groups(waits, ranks)
    what = f"in {call_of(groups[0][1])}" if groups else "for it"
    return f"{subject} {does}, and {ranks_text(others)} {verb} {what}"


_DO_TOGETHER = {
    VerdictKind.INPUT_BOUND: "wait for their data",
    VerdictKind.FROZEN: "are frozen",
    VerdictKind.DEVICE_STUCK: "have devices that are stuck",
}
_DOES = {
    VerdictKind.DEVICE_STUCK: "has a device that is stuck",
    VerdictKind.GIL_STUCK: "holds the GIL and makes no progress",
    VerdictKind.BUSY_LOOP: "is in a busy loop",
    VerdictKind.INPUT_BOUND: "waits for its data",
}


def _do_together(views: Sequence[RankView]) -> str:
    dumped = {f"have{view.from_dump.removeprefix('has')}" for view in views if view.from_dump}
    if dumped:
        return " or ".join(sorted(dumped))
    phases = {view.phase for view in views if view.has_reported}
    if len(phases) == 1 and all(view.has_reported for view in views):
        return f"are in phase {phases.pop()}"
    is_busy = all(view.cpu >= COMPUTES for view in views)
    return "are still computing" if is_busy else "have stopped making progress"


def _does(view: RankView, kind: VerdictKind) -> str:
    at = f" at {short(view.place)}" if view.place else ""
    if view.is_finished:
        return "has finished"
    if kind is VerdictKind.FROZEN and view.process != "D":
        return "is stopped (SIGSTOP)"
    if kind is VerdictKind.FROZEN:
        where = f" ({view.blocked_in})" if view.blocked_in else ""
        return f"hangs in the kernel{where}{at}"
    usual = "is still computing" if view.cpu >= COMPUTES else "has stopped making progress"
    return f"{_DOES.get(kind, view.from_dump or usual)}{at}"


def _waiting_groups(
    waits: WaitGraph, culprits: Collection[int]
) -> list[tuple[int, ProcessGroupView]]:
    """Groups in which ranks wait, first those in which a culprit is waited for."""

    def is_unrelated(one: tuple[int, ProcessGroupView]) -> bool:
        group = one[1]
        awaited = group.ranks if group.waits_seq else (group.messages[0].peer,)
        return not set(awaited).intersection(culprits)

    found = [(rank, group) for rank, view in sorted(waits.views.items()) for group in view.waiting]
    return sorted(found, key=is_unrelated)


def _of_waiting(waits: WaitGraph, culprits: Sequence[int]) -> list[str]:
    found: dict[tuple[str, str], list[tuple[int, ProcessGroupView]]] = {}
    for rank, group in _waiting_groups(waits, culprits):
        found.setdefault((group.name, call_of(group)), []).append((rank, group))
    lines = []
    for (_, call), waiting in list(found.items())[:_MANY]:
        group = waiting[0][1]
        longest_s = max(waited_s(one) for _, one in waiting)
        verb = "has" if len(waiting) == 1 else "have"
        lines.append(
            f"{ranks_text(rank for rank, _ in waiting)} {verb} entered {call} and not left it for "
            f"{longest_s:.1f} s"
        )
        for culprit in culprits[:_MANY]:
            own = next((g for g in waits.views[culprit].groups if g.name == group.name), None)
            if own is not None and own.entered < group.waits_seq:
                lines.append(f"rank {culprit} entered only #{own.entered:,} of that group")
    return lines


def _of_device(rank: int, waits: WaitGraph) -> list[str]:
    if rank not in waits.stuck_devices:
        return []
    behind = waits.behind[rank]
    call, others = call_of(behind.group), behind.completed_by or behind.started_by
    does = "completed" if behind.completed_by else "started"
    verb = "has" if len(others) == 1 else "have"
    groups = (group for one in behind.completed_by for group in waits.views[one].groups)
    left_s = max((one.left_s for one in groups if one.name == behind.group.name), default=0.0)
    ago = f" {left_s:.1f} s ago" if left_s else ""
    return [f"{ranks_text(others)} {verb} {does} {call}{ago}, and rank {rank} has only called it"]


def _of_state(view: RankView, settings: HangConfig) -> list[str]:
    subject = f"rank {view.rank}"
    if view.is_finished:
        return [f"{subject} ended with exit code 0 after step {view.step:,}"]
    notes = [f"{subject}: {note}" for note in view.recorder_notes]
    if view.from_dump:
        return notes
    found = [f"{subject} has made no step for {view.unresponsive_s:.1f} s (step {view.step:,})"]
    if view.process in ("T", "t"):
        return [*found, f"{subject}'s process is stopped (state {view.process})", *notes]
    if view.process == "D":
        where = f" in {view.blocked_in}" if view.blocked_in else ""
        found.append(f"{subject}'s process is in an uninterruptible sleep (state D){where}")
    if view.still_s >= settings.no_activity_s:
        found.append(
            f"{subject} has used no CPU, read and written nothing, and kept the same stack for "
            f"{view.still_s:.1f} s"
        )
    elif view.spins_s >= settings.no_activity_s:
        found.append(
            f"{subject} has computed for {view.spins_s:.1f} s without leaving one function "
            f"({view.cpu:.1f} cores)"
        )
    if view.holds_gil and view.process == "S":
        found.append(f"{subject}'s main thread holds the GIL and sleeps")
    if view.child:
        found.append(f"{subject}: {view.child}")
    if view.place:
        found.append(f"{subject} is at {short(view.place)}")
    return [*found, *notes]


def _counter_evidence(view: RankView) -> list[str]:
    if view.is_finished or view.process in ("T", "t"):
        return []
    found = []
    if _may_take_long(view):
        found.append(f"rank {view.rank} is busy with {view.activity}, which may take long")
    if view.cpu >= COMPUTES:
        found.append(f"rank {view.rank} computes ({view.cpu:.1f} cores)")
    elif not view.is_gil_known and view.process == "S":
        found.append(
            f"whether rank {view.rank} holds the GIL is not known: py-spy is missing or may not "
            "read the process (see ftrun preflight)"
        )
    return found


# --- all have entered -------------------------------------------------------------------------


def _not_left(waits: WaitGraph, node_of: Mapping[int, str]) -> Verdict:
    group, ranks = max(waits.stuck, key=lambda one: one[0].waits_s)
    members = set(group.ranks or ranks)
    unread = waits.unread(group)
    entered = members - unread
    left = sorted(entered - set(ranks))
    have = "has" if len(ranks) == 1 else "have"
    call = call_of(group)
    evidence = [
        f"{'' if unread else 'all '}{len(entered)} ranks of {group_name(group)} have entered "
        f"{call}",
        f"{ranks_text(ranks)} {have} not left it for {group.waits_s:.1f} s",
    ]
    if left:
        evidence.append(f"{ranks_text(left)} {'has' if len(left) == 1 else 'have'} left it")
    for rank in sorted(unread)[:_MANY]:
        evidence += [f"rank {rank}: {note}" for note in waits.views[rank].recorder_notes]
    nodes = nodes_of(sorted(members), node_of)
    on = f" on node {nodes[0]}" if nodes else ""
    where = f" between nodes {', '.join(nodes)}" if len(nodes) > 1 else on
    text = (
        f"all ranks have entered {call} and {ranks_text(ranks)} cannot leave it: a "
        f"connection{where} carries no data"
    )
    unknown = ""
    if unread:
        unknown = f"whether {ranks_text(unread)} entered {call} is not known"
        text = f"{ranks_text(ranks)} cannot leave {call}, and {unknown}"
    return Verdict(
        kind=VerdictKind.HANG_IN_COMMUNICATION,
        culprits=(),
        nodes=nodes,
        victims=tuple(sorted(waits.waiting)),
        text=text,
        evidence=tuple(evidence),
        counter_evidence=(unknown,) if unread else (),
        confidence=Confidence.POSSIBLE if unread else Confidence.LIKELY,
        fingerprint=f"{VerdictKind.HANG_IN_COMMUNICATION.value} {' '.join(nodes)}",
    )


def _not_delivered(
    late: Sequence[RankView], waits: WaitGraph, node_of: Mapping[int, str]
) -> Verdict:
    """Ranks wait for messages that their peers have called, or that no recorder shows."""
    peers = waits.undelivered
    ranks = sorted({*peers, *(one for one in peers.values() if one >= 0)})
    ranks = ranks or sorted(view.rank for view in late)
    nodes = nodes_of(ranks, node_of)
    evidence = [
        f"rank {rank} has entered {call_of(group)}, which rank {peer} has called too"
        for rank, peer in sorted(peers.items())
        for group in waits.views[rank].waiting
        if group.messages
    ]
    evidence += [f"rank {view.rank} is at {short(view.place)}" for view in late if not evidence]
    unknown = "no recorder shows these messages, so the sender is not known"
    return Verdict(
        kind=VerdictKind.HANG_IN_COMMUNICATION,
        culprits=(),
        nodes=nodes,
        victims=tuple(sorted(waits.waiting)),
        text=f"{ranks_text(ranks)} wait for messages that do not arrive",
        evidence=tuple(evidence[:_MANY]),
        counter_evidence=() if peers else (unknown,),
        confidence=Confidence.LIKELY if peers else Confidence.POSSIBLE,
        fingerprint=f"{VerdictKind.HANG_IN_COMMUNICATION.value} messages",
    )
