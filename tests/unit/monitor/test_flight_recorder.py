"""What a dump of torch's flight recorder says about the groups of one rank."""

import json
from typing import Any

import pytest

from ftrun.monitor.flight_recorder import (
    RecordedGroups,
    RecorderSource,
    call_text,
    parse_trace,
    recorded_groups,
    trace_of,
)
from ftrun.monitor.page_values import Backends
from ftrun.monitor.verdicts import OpenMessage, ProcessGroupView

NOW_NS = 9_000_000_000


def entry(seq: int, *, group: str = "0", pg_id: int = 0, **changes: object) -> dict[str, Any]:
    return {
        "record_id": seq, "pg_id": pg_id, "process_group": [group, f"desc {group}"],
        "collective_seq_id": seq, "p2p_seq_id": 0, "op_id": seq,
        "profiling_name": "nccl:all_reduce", "time_created_ns": seq * 1_000_000_000,
        "input_sizes": [[8], []], "output_sizes": [[8]], "state": "scheduled", "retired": False,
        "time_discovered_started_ns": 0, "time_discovered_completed_ns": None, "duration_ms": None,
        "timeout_ms": 600000, "is_p2p": False, "unknown": 1, **changes,
    }  # fmt: skip


def status(enqueued: object, completed: object) -> dict[str, object]:
    return {
        "last_enqueued_collective": enqueued,
        "last_started_collective": -1,
        "last_completed_collective": completed,
    }


DEVICE = RecorderSource("0=0-3 7=0,2", Backends({"cuda": "nccl"}, (0, 4)), is_on_device=True)


def read(source: RecorderSource = DEVICE, **dump: object) -> RecordedGroups:
    trace = parse_trace(json.dumps(dump).encode())
    assert trace is not None
    return recorded_groups(trace, source, now_ns=NOW_NS)


def only(found: RecordedGroups) -> ProcessGroupView:
    (view,) = found.views
    return view


def test_no_trace() -> None:
    assert parse_trace(b"not json") is None
    assert trace_of("no dictionary") is None
    assert read() == RecordedGroups()


def test_numbers_are_numbers_or_text_and_a_pickle_says_the_same() -> None:
    entries = [entry(3, state="completed")]
    dump = {"version": "2.10", "entries": entries, "pg_status": {"0": status("3", "-1")}}
    assert parse_trace(json.dumps(dump).encode()) == trace_of(dump)
    assert trace_of({**dump, "pg_status": {0: status(3, -1)}}) == trace_of(dump)
    trace = trace_of(dump)
    assert trace is not None
    first = trace.entries[0]
    assert first.is_over(has_states=True)
    assert (first.op, first.sizes) == ("all_reduce", "[8] scalar")


def test_the_head_is_the_oldest_collective_that_is_not_over() -> None:
    own = [entry(5), entry(3, retired=True), entry(4, state="started"), entry(2, state="completed")]
    view = only(read(entries=own))
    assert (view.waits_seq, view.waits_s, view.entered, view.completed) == (4, 5.0, 5, 3)
    assert (view.desc, view.ranks, view.is_on_device) == ("desc 0", (0, 1, 2, 3), True)
    assert view.has_started is True
    assert [call.seq for call in view.calls] == [2, 3, 4, 5]


def test_the_head_is_shown_behind_any_number_of_later_calls() -> None:
    view = only(read(entries=[entry(seq) for seq in range(1, 30)]))
    assert [call.seq for call in view.calls] == [1, *range(22, 30)]
    assert view.has_started is None
    timed = RecorderSource(DEVICE.groups, DEVICE.backends, is_on_device=True, is_timed=True)
    assert only(read(timed, entries=[entry(1)])).has_started is False


def test_counts_say_what_was_entered_without_any_entry() -> None:
    found = read(
        pg_config={"7": {"name": "7", "desc": "tp", "ranks": "[0, 2]"}},
        pg_status={"0": status(6, 6), "4": status("9", "7")},
    )
    assert found.is_complete
    assert [(one.name, one.desc, one.entered, one.waits_seq) for one in found.views] == [
        ("0", "", 6, 0),
        ("7", "tp", 9, 0),
    ]


def test_counts_alone_tell_the_head_but_no_messages() -> None:
    source = RecorderSource(DEVICE.groups, DEVICE.backends, is_on_device=True, is_status_only=True)
    found = read(source, pg_status={"0": status(6, 6), "4": status("9", "7"), "5": status(1, 1)})
    assert [(one.waits_seq, one.completed) for one in found.views] == [(0, 6), (8, 7)]
    assert not found.is_complete
    assert only(read(source, pg_status={"0": status(2, -1)})).waits_seq == 1
    assert only(read(source, pg_status={"0": status(-1, -1)})).entered == 0


def test_a_group_without_a_name_proves_nothing() -> None:
    unnamed = RecorderSource("0=0-3", Backends({"cuda": "nccl"}), is_on_device=True)
    found = read(unnamed, entries=[entry(1)], pg_status={"0": status(1, 0), "3": status(1, 1)})
    assert (only(found).name, found.is_complete) == ("0", False)
    assert read(unnamed, entries=[entry(1)], pg_status={"0": status(1, 0)}).is_complete


def test_what_has_timed_out_is_not_over_if_states_are_known() -> None:
    known = RecorderSource(DEVICE.groups, DEVICE.backends, is_on_device=True, has_states=True)
    own = [entry(3, retired=True), entry(4), entry(2, retired=True, state="completed")]
    assert only(read(known, entries=own)).waits_seq == 3
    assert only(read(entries=own)).waits_seq == 4


def test_counts_of_a_group_with_messages_are_not_used() -> None:
    """They may be of the last message, which has a number of its own."""
    sent = entry(
        26, is_p2p=True, p2p_seq_id=900, profiling_name="nccl:send 0->1", state="completed"
    )
    own, counts = entry(26, state="completed"), {"0": status(900, 900)}
    view = only(read(entries=[own, sent], pg_status=counts))
    assert (view.entered, view.completed) == (26, 26)
    assert only(read(entries=[own], pg_status=counts)).entered == 900


def test_groups_that_were_destroyed_hold_up_nothing() -> None:
    """Numbers 1 and 2 are not on the page; the name of 4 was used before, by 3."""
    old = entry(50, group="7", pg_id=3)
    found = read(
        entries=[old, entry(5, group="7", pg_id=4)],
        pg_status={"1": status(9, 1), "2": status(9, 1), "3": status(50, 1), "4": status(5, 4)},
    )
    view = only(found)
    assert (view.name, view.waits_seq, view.entered) == ("7", 5, 5)
    assert found.is_complete
    again = read(entries=[old], pg_status={"3": status(50, 1), "4": status(2, 2)})
    assert (only(again).waits_seq, only(again).entered) == (0, 2)
    newer = read(entries=[entry(1, group="7", pg_id=6)], pg_status={"6": status(1, 0)})
    assert (only(newer).waits_seq, newer.is_complete) == (1, True)
    assert not read(pg_status={"5": status(1, 0)}).is_complete


def test_the_oldest_message_of_each_kind_and_peer() -> None:
    def message(number: int, name: str, **changes: object) -> dict[str, Any]:
        more = {"op_id": number, "p2p_seq_id": number, "is_p2p": True, **changes}
        return entry(number, group="7", pg_id=4, profiling_name=name, **more)

    view = only(
        read(
            entries=[
                message(6, "nccl:send 0->1"),
                message(5, "nccl:send 0->1"),
                message(4, "nccl:recv 0<-1"),
                message(3, "nccl:recv 0<-1", state="completed"),
                message(2, "nccl:coalesced"),
                message(1, "nccl:send 0->9"),
            ]
        )
    )
    assert view.messages == (OpenMessage("recv", 2, 4, 5.0), OpenMessage("send", 2, 5, 4.0))
    assert (view.waits_seq, view.entered, view.is_waiting, view.calls) == (0, 0, True, ())
    assert read(entries=[message(2, "nccl:coalesced")]).views == ()


@pytest.mark.parametrize("is_retired", [True, False])
def test_gloo_counts_nothing(is_retired: bool) -> None:
    source = RecorderSource("0=0,1")
    found = read(source, entries=[entry(1, retired=is_retired)], pg_status={"0": status(9, 9)})
    view = only(found)
    assert (view.waits_seq, view.enqueued, view.entered, found.is_complete) == (
        0 if is_retired else 1,
        0,
        1,
        True,
    )


def test_the_end_of_the_newest_completed_collective_is_known_if_it_was_noticed() -> None:
    over = {"state": "completed", "retired": True, "time_discovered_completed_ns": 4_500_000_000}
    assert only(read(entries=[entry(1, **over), entry(2)])).left_s == 4.5
    assert only(read(entries=[entry(1, state="completed"), entry(2)])).left_s == 0.0


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {},
            "all_reduce #1,005 of group desc 0, which it had entered 2.0 s before it was read, "
            "and had not left",
        ),
        (
            {"retired": True, "process_group": ["0", "default_pg"]},
            "all_reduce #1,005 of the default group, which it had entered 2.0 s before it was "
            "read, and had left",
        ),
        (
            {"state": "completed", "time_discovered_completed_ns": 8_000_000_000},
            "all_reduce #1,005 of group desc 0, which it had entered 2.0 s before it was read, "
            "and had left for 1.0 s",
        ),
        (
            {"is_p2p": True, "p2p_seq_id": 3, "profiling_name": "gloo:send 0->1"},
            "send 0->1 #3 of group desc 0, which it had entered 2.0 s before it was read, and "
            "had not left",
        ),
        (
            {
                "frames": [
                    {"name": "all_reduce", "filename": "/x/torch/distributed/c10d.py", "line": 9},
                    {"name": "step", "filename": "/home/me/train.py", "line": 42},
                ]
            },
            "all_reduce #1,005 of group desc 0, which it had entered at train.py:42 in step 2.0 s "
            "before it was read, and had not left",
        ),
    ],
)
def test_a_call_in_words(changes: dict[str, object], text: str) -> None:
    one = entry(1005, **{"time_created_ns": 7_000_000_000, **changes})
    trace = parse_trace(json.dumps({"entries": [one]}).encode())
    assert trace is not None
    assert call_text(trace.entries[0], now_ns=NOW_NS) == text
