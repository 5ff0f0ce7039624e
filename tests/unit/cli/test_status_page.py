"""The page of `ftrun status --watch` is readable for any run and terminal."""

from typing import Any

import msgspec
import pytest

from ftrun.cli.screen.status_page import incident_line, page, rows_of
from ftrun.wire.messages.status import IncidentStatus, StatusView


def rank(number: int, step: int = 1000, **changes: Any) -> dict[str, Any]:
    return {"rank": number, "pid": 1, "state": "running", "step": step, "heartbeat_age_s": 0.05,
            "phase": "", "loss": 2.5, "step_p50_s": 0.12 + number % 7 / 1000, "step_p99_s": 0.15,
            "lateness_s": 0.0004, "last_collective": None, **changes}  # fmt: skip


def whole_run(nodes: int, per_node: int, **changes: Any) -> dict[str, Any]:
    """A healthy run; the steps of its nodes differ by one, as usual."""
    places = [
        {
            "node_id": f"node{number}",
            "last_heartbeat_age_s": 0.2,
            "ranks": [
                rank(number * per_node + local, 1000 - local % 2) for local in range(per_node)
            ],
        }
        for number in range(nodes)
    ]
    places.append({"node_id": "spare0", "role": "spare", "last_heartbeat_age_s": 0.3})
    return {
        "run_id": "big", "summary": "running at step 1,000 on 64 nodes; survives any 1 node",
        "state": "running", "lifecycle": "run", "uptime_s": 7200.0, "incidents": [],
        "snapshots": {"protected": True, "step": 998, "age_s": 0.4, "every": 1},
        "cluster": {"state": "running", "summary": "", "nodes": places, "tolerated_losses": 1},
        **changes,
    }  # fmt: skip


def texts(document: dict[str, Any], width: int = 120, height: int = 40) -> list[str]:
    view = msgspec.convert(document, StatusView)
    lines = page(view, width=width, height=height, steps_per_s=8.1)
    assert all(len(line.text) <= width for line in lines)
    return [line.text for line in lines]


def test_512_ranks_that_do_alike_are_a_few_lines() -> None:
    found = texts(whole_run(64, 8))
    assert len(found) <= 40
    (row,) = [line for line in found if "0-511" in line]
    assert "node0 ... node63 (64)" in row
    assert "999-1,000" in row
    assert any(line.startswith("spare0") for line in found)


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        (
            {"step": 900, "heartbeat_age_s": 14.0, "last_collective": "all_reduce #41,207"},
            "#41,207",
        ),
        ({"state": "stopped"}, "stopped"),
        ({"lateness_s": 0.05}, "50 ms"),
        ({"heartbeat_age_s": 12.0}, "12.0 s"),
        ({"step_p50_s": 0.4}, "400 ms"),
    ],
)
def test_the_one_rank_that_differs_has_a_line_of_its_own(
    changes: dict[str, Any], shown: str
) -> None:
    document = whole_run(64, 8)
    document["cluster"]["nodes"][9]["ranks"][3] |= changes
    found = texts(document)
    assert len(found) <= 40
    (row,) = [line for line in found if line.startswith("node9 ") and " 75 " in line]
    assert shown in row
    assert any("72-74, 76-79" in line for line in found)


def test_where_even_folded_rows_are_too_many_the_odd_ones_stay() -> None:
    document = whole_run(64, 1)
    for number, node in enumerate(document["cluster"]["nodes"][:-1]):
        node["ranks"][0] |= {"step": 1000, "step_p50_s": 1.0 + number}
    document["cluster"]["nodes"][50]["ranks"][0] |= {"state": "stopped"}
    found = texts(document, height=20)
    assert len(found) <= 20
    assert any("stopped" in line for line in found)
    assert any("more rows" in line for line in found)


@pytest.mark.parametrize("width", [20, 40, 60, 80])
def test_narrow_terminal(width: int) -> None:
    document = whole_run(2, 4)
    document["cluster"]["nodes"][0]["ranks"][1]["last_collective"] = "all_reduce #7"
    found = texts(document, width=width)
    assert any("rank" in line for line in found)
    if width >= 40:
        assert any("step" in line and "node" in line for line in found)


def test_low_terminal_loses_old_incidents_first() -> None:
    closed = [
        {"number": number, "state": "closed", "age_s": 60.0 * number, "text": "rank 3 died",
         "verdict_kind": "crash", "recovered_s": 0.4, "steps_lost": 1}
        for number in (4, 3, 2, 1)
    ]  # fmt: skip
    now = {"number": 5, "state": "suspect", "age_s": 3.0, "text": "no step for 12 s",
           "verdict_kind": None}  # fmt: skip
    document = whole_run(64, 8, incidents=[now, *closed])
    high, low = texts(document, height=40), texts(document, height=12)
    assert sum("rank 3 died" in line for line in high) == 4
    assert sum("rank 3 died" in line for line in low) < 4
    # Below the summary, because the terminal cuts the end of a page that is too long.
    assert [line.startswith("incident 5  SUSPECT for 3.00 s") for line in low].index(True) == 2
    assert any("0-511" in line for line in low)
    assert "training again after 400 ms, 1 step lost" in "".join(high)


def test_run_on_one_node_has_no_column_for_it() -> None:
    ranks = [rank(number) for number in range(2)]
    document = {"run_id": "r", "summary": "running", "state": "running", "ranks": ranks}
    found = texts(document)
    heading = next(line for line in found if "step time" in line)
    assert heading.split()[0] == "rank"


def test_a_run_that_only_starts_is_a_page_too() -> None:
    assert texts({"run_id": "r", "summary": "STARTING", "state": "starting"})[0] == "STARTING"


def test_messages_of_unknown_peers_do_no_harm() -> None:
    document = whole_run(2, 2, summary="\x1b[2Jgone\x07", run_id="a\x1b]0;title\x07b")
    document["cluster"]["nodes"][0]["node_id"] = "n\x1b[31m0"
    document["incidents"] = [{"number": 1, "text": "x\x1b[2J\ny", "age_s": 1}]
    found = "\n".join(texts(document))
    assert "\x1b" not in found
    assert "\x07" not in found


def test_enough_room_shows_each_rank() -> None:
    assert len(rows_of(msgspec.convert(whole_run(2, 4), StatusView), max_rows=20)) == 9


def test_warnings_are_on_the_first_screen() -> None:
    found = texts(whole_run(2, 2, warnings=["node n1: repeated steps differ"]))
    assert found[1] == "WARNING: node n1: repeated steps differ"
    assert not any("WARNING" in line for line in texts(whole_run(2, 2)))


def test_the_error_class_of_an_incident_follows_its_kind() -> None:
    one = {"number": 5, "verdict_kind": "crash", "error_class": "disk full", "text": "it ended"}
    line = incident_line(msgspec.convert(one, IncidentStatus))
    assert line.endswith("crash, disk full: it ended")


def test_an_open_incident_is_on_any_page() -> None:
    now = {"number": 5, "state": "suspect", "age_s": 3.0, "text": "x" * 300, "verdict_kind": None}
    document = whole_run(64, 8, incidents=[now], warnings=["w"] * 3)
    assert any(line.startswith("incident 5") for line in texts(document, width=60, height=8)[:8])


def test_excluded_nodes_are_shown_with_the_time_that_is_left() -> None:
    exclusions = [
        {"node_id": "node3", "reason": "3 failures in an hour", "left_s": 2460.0},
        {"node_id": "node4", "reason": "it reports a hardware fault: GPU 2 is lost"},
    ]
    document = whole_run(4, 1)
    document["cluster"]["exclusions"] = exclusions
    found = texts(document)
    assert "node node3 is excluded for 41 min more: 3 failures in an hour" in found
    assert "node node4 is excluded: it reports a hardware fault: GPU 2 is lost" in found


def test_the_page_says_that_snapshots_are_mirrored() -> None:
    document = whole_run(4, 1)
    assert not any("a copy is on the next node" in line for line in texts(document))
    document["cluster"]["is_mirrored"] = True
    assert any("of each group (a copy is on the next node)" in line for line in texts(document))


def test_with_survivors_the_page_says_why_ranks_could_not_stay() -> None:
    assert not any("survivors" in line for line in texts(whole_run(2, 2)))
    found = texts(whole_run(2, 2, survivors="no, rank 3: a loader cannot be replayed"))
    assert "survivors  no, rank 3: a loader cannot be replayed" in found
