"""Judges dumps with the detector that judges running ranks: pure.

Rule 1: torch counts its groups in each rank, and `pg_status` has these counts only. Names of groups
        that are numbers grow in the same order, so both are matched by order if there are equally
        many, and if no entry contradicts.
Rule 2: a rank without a dump is no culprit while a rank with a dump is one: its file may be
        elsewhere. If none is, the ranks that have no dump are, and the verdict is `possible`.
Rule 3: a dump shows calls only. What a rank did outside of them is not known, so a rank that has
        made no call is never certain.
Rule 4: a dump does not have the time at which it was written. If the file was changed within a day
        after the newest call, that is the time. If not, the file is a copy, and waits are counted
        up to the newest call of any rank.
"""

import json
from collections import Counter
from collections.abc import Collection, Mapping

from msgspec.structs import replace

from ftrun.config.profile import HangConfig
from ftrun.monitor.flight_recorder import RecorderSource, Trace, call_text, recorded_groups
from ftrun.monitor.hang_detector import find_hang
from ftrun.monitor.order.disorder import find_skipped
from ftrun.monitor.page_values import Backends, encode_groups
from ftrun.monitor.verdicts import (
    Confidence,
    DumpedRankView,
    RankView,
    Verdict,
    VerdictKind,
    ranks_text,
)

_NO_MORE = "has made no further call"
_NO_DUMP = "has no dump"
_DAMAGED = "has a damaged dump"
_ANY_BYTES = 1 << 30
_MANY = 3
_DAY_NS = 86_400 * 10**9

_NEXT = {
    VerdictKind.HANG_IN_COMPUTATION: "look at what {ranks} did after the last call: log, stack and "
    "data. If it still runs: py-spy dump --pid PID",
    VerdictKind.HANG_IN_COMMUNICATION: "check the network between the nodes of {ranks}",
    VerdictKind.DEVICE_STUCK: "look at the errors of the device of {ranks}: dmesg, Xid",
    VerdictKind.SKIPPED_COLLECTIVE: "fix the program; it will happen again. Compare the branches "
    "that {ranks} and the others took before this call",
    VerdictKind.DEADLOCK: "fix the program; it will happen again. All ranks must call the "
    "collectives of their groups in one order",
}
_NEXT_WITHOUT_DUMP = (
    "find out whether {ranks} ended: log, node. If a dump is elsewhere, add the file and run the "
    "command again"
)


def views_of(
    traces: Mapping[int, Trace], changed_ns: Mapping[int, int], damaged: Collection[int] = ()
) -> dict[int, RankView]:
    """Views of the members of all groups; `changed_ns` of each file, on the wall clock."""
    read_ns = changed_ns
    if not are_times_known(traces, changed_ns):
        read_ns = dict.fromkeys(traces, max(map(_newest_ns, traces.values()), default=0))
    backends = Counter(_backend(trace) for trace in traces.values())
    del backends[""]
    usual = next((name for name, _ in backends.most_common(1)), "nccl")
    is_timed = any(one.state == "started" for trace in traces.values() for one in trace.entries)
    members = {
        one for trace in traces.values() for ranks in _groups(trace).values() for one in ranks
    }
    found = {
        rank: _blank(rank, _DAMAGED if rank in damaged else _NO_DUMP)
        for rank in members.union(damaged)
    }
    for rank, trace in traces.items():
        backend = _backend(trace) or usual
        found[rank] = _view(rank, trace, read_ns[rank], backend, is_timed=is_timed)
    return dict(sorted(found.items()))


def are_times_known(traces: Mapping[int, Trace], changed_ns: Mapping[int, int]) -> bool:
    """Whether the files were changed when the dumps were written: rule 4."""
    limit_ns = max(map(_newest_ns, traces.values()), default=0) + _DAY_NS
    return all(_newest_ns(one) <= changed_ns[rank] <= limit_ns for rank, one in traces.items())


def without_dump(views: Mapping[int, RankView]) -> list[int]:
    return [rank for rank, view in views.items() if view.from_dump != _NO_MORE]


def judge(
    views: Mapping[int, RankView], node_of: Mapping[int, str], *, has_times: bool = True
) -> Verdict | None:
    """The verdict; None if no rank waits. `has_times` as from `are_times_known`."""
    missing = without_dump(views)
    if not any(view.waiting for view in views.values()):
        found = find_skipped(views, node_of)
    else:
        found = find_hang(views, node_of, HangConfig(), limit_s=0.0)
        if missing and (found is None or not found.culprits):
            found = _of_missing(views, missing, node_of) or found
    if found is None:
        return None
    is_gloo = any(not group.is_on_device for view in views.values() for group in view.groups)
    if missing and is_gloo:
        found = replace(found, confidence=Confidence.POSSIBLE)
    notes = [f"rank {one}: {note}" for one in found.culprits for note in views[one].recorder_notes]
    more = [note for note in notes[:_MANY] if note not in found.evidence]
    against = (*found.counter_evidence, *_counter_evidence(found, missing))
    if missing and is_gloo:
        against += ("if a rank has ended, calls of gloo on other ranks are over, by an error",)
    if not has_times:
        against += ("the files are copies: waits are counted up to the newest call of any rank",)
    elif (longest_s := _longest_wait_s(views)) < HangConfig().suspect_after_s:
        against += (f"the longest wait is {longest_s:.1f} s: the ranks may have made progress",)
    return replace(found, evidence=(*found.evidence, *more), counter_evidence=against)


def next_step(verdict: Verdict, views: Mapping[int, RankView]) -> str:
    """What to do about a verdict."""
    ranks = ranks_text(verdict.culprits or verdict.victims)
    has_none = set(verdict.culprits) & set(without_dump(views))
    return (_NEXT_WITHOUT_DUMP if has_none else _NEXT[verdict.kind]).format(ranks=ranks)


def _of_missing(
    views: Mapping[int, RankView], missing: Collection[int], node_of: Mapping[int, str]
) -> Verdict | None:
    """The verdict if the ranks without a dump have called nothing; None if it names no rank."""
    assumed = dict(views) | {
        rank: replace(views[rank], is_recorder_complete=True) for rank in missing
    }
    found = find_hang(assumed, node_of, HangConfig(), limit_s=0.0)
    if found is None or not found.culprits:
        return None
    return replace(found, confidence=Confidence.POSSIBLE)


def _counter_evidence(found: Verdict, missing: Collection[int]) -> list[str]:
    lines = []
    if found.kind is VerdictKind.HANG_IN_COMMUNICATION and not missing:
        lines.append("a device may hang in the collective instead, which shows the same calls")
    if missing:
        have = "has" if len(missing) == 1 else "have"
        lines.append(
            f"{ranks_text(missing)} {have} no dump that can be read: ended or stopped, or the "
            "file is elsewhere"
        )
    if found.kind is VerdictKind.HANG_IN_COMPUTATION and not set(found.culprits) <= set(missing):
        lines.append("what a rank does outside of its calls is not in a dump")
    return lines


def _longest_wait_s(views: Mapping[int, RankView]) -> float:
    groups = [group for view in views.values() for group in view.waiting]
    waits_s = [group.waits_s for group in groups]
    waits_s += [message.waits_s for group in groups for message in group.messages]
    return max(waits_s, default=0.0)


def _view(rank: int, trace: Trace, read_ns: int, backend: str, *, is_timed: bool) -> RankView:
    groups = _groups(trace)
    source = RecorderSource(
        encode_groups(groups, _ANY_BYTES),
        Backends(ids=_numbers(trace, list(groups))),
        is_on_device=backend != "gloo",
        has_states=backend == "nccl",
        is_timed=is_timed,
    )
    found = recorded_groups(trace, source, now_ns=read_ns)
    notes: tuple[str, ...] = ("no call is in its dump",)
    if trace.entries:
        newest = max(trace.entries, key=lambda one: one.time_created_ns)
        notes = (f"its last call is {call_text(newest, now_ns=read_ns)}",)
    blank = _blank(rank, _NO_MORE)
    return replace(
        blank, groups=found.views, is_recorder_complete=found.is_complete, recorder_notes=notes
    )


def _blank(rank: int, state: str) -> RankView:
    note = "its dump is damaged" if state == _DAMAGED else "no file has its dump"
    return DumpedRankView(
        rank=rank,
        pid=0,
        process="",
        step=0,
        unresponsive_s=0.0,
        is_recorder_complete=False,
        recorder_notes=(note,),
        state=state,
    )


def _newest_ns(trace: Trace) -> int:
    called_ns = [one.time_created_ns for one in trace.entries]
    return max(
        [*called_ns, *(one.time_discovered_completed_ns or 0 for one in trace.entries)], default=0
    )


def _backend(trace: Trace) -> str:
    return next((one.profiling_name.partition(":")[0] for one in trace.entries), "")


def _groups(trace: Trace) -> dict[str, tuple[int, ...]]:
    """Ranks of each group, in the order in which torch has made the groups, if names show it."""
    found = {name: _ranks(one.ranks) for name, one in trace.pg_config.items() if name}
    named = {one.group for one in trace.entries}
    if not found and len(named) == 1 and (unnamed := trace.pg_config.get("")):
        return {named.pop(): _ranks(unnamed.ranks)}  # gloo does not name its groups
    if all(name.isdecimal() for name in found):
        return {name: found[name] for name in sorted(found, key=int)}
    return found


def _ranks(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(one) for one in json.loads(text))
    except (TypeError, ValueError):
        return ()


def _numbers(trace: Trace, names: list[str]) -> tuple[int | None, ...]:
    """Number of each group in `pg_status`: rule 1; empty if the order does not show it."""
    by_order = dict(zip(names, sorted(trace.pg_status), strict=False))
    is_ordered = len(names) == len(trace.pg_status) and all(map(str.isdecimal, names))
    if not is_ordered or any(by_order.get(one.group) != one.pg_id for one in trace.entries):
        return ()
    return tuple(by_order.values())
