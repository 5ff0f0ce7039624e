"""Culprits among 16 ranks on devices, from traces of the shapes that real incidents had."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from unit.monitor.nccl_world import SIZE, Fault, groups_of, play, traces
from unit.monitor.ranks import view

from ftrun.config.profile import HangConfig
from ftrun.monitor.flight_recorder import RecorderSource, parse_trace, recorded_groups
from ftrun.monitor.hang_detector import find_hang
from ftrun.monitor.page_values import Backends, encode_groups
from ftrun.monitor.verdicts import Confidence, RankView, Verdict, VerdictKind

PAIRS = [(12, 14), (9, 14), (10, 15)]
"""Ranks with a fault in recorded incidents."""

STOP = 32
"""Operations after which the devices of these ranks have nothing left to do."""


def views_of(dumps: Mapping[int, dict[str, Any]], *, only_status: bool) -> dict[int, RankView]:
    found = {}
    for rank, dump in dumps.items():
        kept = {key: one for key, one in dump.items() if not only_status or key != "entries"}
        trace = parse_trace(json.dumps(kept).encode())
        assert trace is not None
        ranks = {name: members for name, (_, members) in groups_of(rank).items()}
        source = RecorderSource(
            encode_groups(ranks, 4094),
            Backends({"cuda": "nccl"}, tuple(int(one) for one in dump["pg_status"])),
            is_on_device=True,
            has_states=True,
            is_status_only=only_status,
        )
        groups = recorded_groups(trace, source, now_ns=20e9)
        own = tuple(replace(one, still_s=6.0) for one in groups.views)
        found[rank] = view(rank, groups=own, is_recorder_complete=groups.is_complete)
    return found


def judge(views: Mapping[int, RankView]) -> Verdict:
    found = find_hang(views, {r: f"node{r // 8}" for r in views}, HangConfig(), limit_s=8.5)
    assert found is not None
    return found


def judged(faults: Mapping[int, Fault], *, only_status: bool = False) -> Verdict:
    return judge(views_of(traces(play(6, faults), faults), only_status=only_status))


def is_circle_of_counts(found: Verdict, *, only_status: bool) -> bool:
    """The counts of messages have no common order. What they show must not be acted on."""
    is_circle = only_status and found.kind is VerdictKind.DEADLOCK
    assert not (is_circle and found.act_immediately)
    return is_circle


@pytest.mark.parametrize("only_status", [False, True])
@pytest.mark.parametrize("culprits", PAIRS)
def test_hosts_that_call_nothing_are_named(culprits: tuple[int, int], only_status: bool) -> None:
    faults = dict.fromkeys(culprits, Fault(STOP, is_of_device=False))
    dumps = traces(play(6, faults), faults, only_active=True)
    assert [rank for rank, dump in dumps.items() if not dump["entries"]] == list(culprits)
    found = judge(views_of(dumps, only_status=only_status))
    assert (found.kind, found.culprits) == (VerdictKind.HANG_IN_COMPUTATION, culprits)
    assert set(found.victims) == set(range(SIZE)) - set(culprits)
    assert found.act_immediately


@pytest.mark.parametrize("culprits", PAIRS)
def test_devices_that_complete_nothing_are_named(culprits: tuple[int, int]) -> None:
    found = judged(dict.fromkeys(culprits, Fault(40, is_of_device=True)))
    assert (found.kind, found.culprits) == (VerdictKind.DEVICE_STUCK, culprits)
    assert found.act_immediately
    for rank in culprits:
        assert any(f"and rank {rank} has only called it" in one for one in found.evidence)
    first, second = culprits
    assert found.text.startswith(f"ranks {first} and {second} have devices that are stuck, and 14")


@pytest.mark.parametrize("only_active", [True, False])
@pytest.mark.parametrize("is_of_device", [True, False])
def test_active_entries_are_enough_if_no_group_has_both_messages_and_collectives(
    only_active: bool, is_of_device: bool
) -> None:
    faults = dict.fromkeys((9, 14), Fault(40 if is_of_device else 32, is_of_device=is_of_device))
    found = judge(views_of(traces(play(6, faults), faults, only_active=only_active),
                           only_status=False))  # fmt: skip
    assert found.culprits == (9, 14)
    assert found.act_immediately


@pytest.mark.parametrize("is_of_device", [True, False])
@pytest.mark.parametrize("at", [20, 32, 40, 41])
def test_messages_in_the_default_group_do_not_count_as_collectives(
    at: int, is_of_device: bool
) -> None:
    """Torch counts both in one field, each with numbers of its own."""
    faults = {9: Fault(at, is_of_device=is_of_device)}
    players = play(8, faults, is_shared=True)
    found = judge(views_of(traces(players, faults), only_status=False))
    assert found.culprits == (9,)
    expected = VerdictKind.DEVICE_STUCK if is_of_device else VerdictKind.HANG_IN_COMPUTATION
    assert found.kind is expected


def test_a_device_that_has_just_stopped_is_named_and_gets_time() -> None:
    faults = dict.fromkeys((12, 14), Fault(40, is_of_device=True))
    views = views_of(traces(play(6, faults), faults), only_status=False)
    for moving in ((12,), tuple(rank for rank in views if rank not in (12, 14))):
        changed = dict(views)
        for rank in moving:
            own = tuple(replace(one, still_s=0.5) for one in views[rank].groups)
            changed[rank] = replace(views[rank], groups=own)
        found = judge(changed)
        assert (found.kind, found.culprits) == (VerdictKind.DEVICE_STUCK, (12, 14))
        assert not found.act_immediately


@settings(max_examples=20, deadline=None)
@given(st.integers(0, SIZE - 1), st.integers(15, 58), st.booleans(), st.booleans())
def test_one_culprit_is_named(rank: int, at: int, is_of_device: bool, only_status: bool) -> None:
    faults = {rank: Fault(at, is_of_device=is_of_device)}
    players = play(8, faults)
    assume(is_of_device or players[rank].done == players[rank].called)
    found = judge(views_of(traces(players, faults), only_status=only_status))
    if is_circle_of_counts(found, only_status=only_status):
        return
    assert found.culprits == (rank,)
    expected = VerdictKind.DEVICE_STUCK if is_of_device else VerdictKind.HANG_IN_COMPUTATION
    assert found.kind is expected


@settings(max_examples=20, deadline=None)
@given(
    st.sets(st.integers(0, SIZE - 1), min_size=2, max_size=3), st.integers(15, 58), st.booleans()
)
def test_of_several_failed_devices_no_other_rank_is_named(
    ranks: set[int], at: int, only_status: bool
) -> None:
    """One of them may have nothing open that another member has completed."""
    found = judged(dict.fromkeys(ranks, Fault(at, is_of_device=True)), only_status=only_status)
    if is_circle_of_counts(found, only_status=only_status):
        return
    assert found.culprits
    assert set(found.culprits) <= ranks


def test_a_circle_of_counts_is_no_deadlock_to_act_on() -> None:
    faults = dict.fromkeys((4, 5), Fault(15, is_of_device=True))
    found = judged(faults, only_status=True)
    assert (found.kind, found.act_immediately) == (VerdictKind.DEADLOCK, False)
    assert found.confidence is Confidence.POSSIBLE
    assert found.counter_evidence
