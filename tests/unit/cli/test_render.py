"""Status is readable: the summary first, no number without a unit, each incident once."""

from typing import Any

import msgspec
import pytest

from ftrun.cli.screen import terminal
from ftrun.cli.screen.terminal import show_profile, value_text
from ftrun.wire.messages.status import StatusView


def show_status(document: dict[str, Any]) -> None:
    terminal.show_status(msgspec.convert({**BARE, **document}, StatusView))


BARE = {"run_id": "x", "summary": "STARTING", "state": "starting"}

DOCUMENT: dict[str, Any] = {
    "run_id": "gpt-1",
    "summary": "running at step 12",
    "state": "running",
    "generation": 1,
    "uptime_s": 75.0,
    "script": "/home/user/train.py",
    "restarts": [
        {
            "generation": 1,
            "cause": "rank 1 was killed by SIGKILL",
            "age_s": 12.0,
            "restored": "step 8 (generation 0)",
            "phases_s": {"detect": 0.01, "fork": 0.05},
        }
    ],
    "restart_budget": {"used": 1, "limit": 20, "window_s": 3600.0},
    "ranks": [
        {
            "rank": 0,
            "pid": 11,
            "state": "running",
            "step": 12,
            "heartbeat_age_s": 0.2,
            "phase": "train",
            "loss": 2.5,
            "start": "warm",
        },
        {"rank": 1, "pid": 12, "state": "starting", "step": None, "loss": None},
    ],
    "snapshots": {
        "protected": False,
        "unprotected_reason": "two slots need 9 MB",
        "note": "two slots need 9 MB",
        "step": 11,
        "generation": 1,
        "age_s": 0.4,
        "bytes_per_rank": 5_000_000,
        "memory_bytes": 20_000_000,
        "taken": 3,
        "skipped": 1,
        "discarded": 0,
        "blocked_s": 0.02,
        "every": 4,
    },
    "checkpoint": {"directory": "/data", "step": 8, "age_s": 30.0},
    "processes": {"agent": 5, "zygote": None, "smp": 7},
}


def test_summary_comes_first_and_reports_that_nothing_protects(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_status(DOCUMENT)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "running at step 12 - UNPROTECTED: two slots need 9 MB"
    text = "\n".join(lines)
    for said in (
        "run gpt-1  /home/user/train.py  generation 1  up 1 min 15 s",
        "200 ms ago",
        "2.5 ",
        "newest step 11 (generation 1), 400 ms old; 5.0 MB per rank, 20.0 MB of memory in all",
        "3 taken, 1 skipped, 0 discarded",
        "every 4 steps",
        "restarts    1 (limit 20 per hour)",
        "12.0 s ago: rank 1 was killed by SIGKILL; generation 1 started from step 8 "
        "(generation 0); on this node: detect 10 ms, fork 50 ms",
        "checkpoint  step 8, 30.0 s old; /data",
        "processes   agent 5, smp 7",
    ):
        assert said in text


def test_a_remark_of_a_rank_is_no_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """A run that is not protected yet, and a tensor that is copied at the boundary from now on."""
    snapshots = {"protected": False, "note": "a.weight changes by itself"}
    show_status({**DOCUMENT, "snapshots": snapshots})
    assert "UNPROTECTED" not in capsys.readouterr().out


def test_little_is_shown_of_a_run_of_which_little_is_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_status({})
    assert capsys.readouterr().out.splitlines() == ["STARTING", "run x"]


def test_restart_without_a_snapshot_reports_where_it_began(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_status({"restarts": [{"generation": 1, "cause": "x"}], "snapshots": {"note": "no attach"}})
    text = capsys.readouterr().out
    assert "generation 1 started from the beginning of the script" in text
    assert "snapshots   none yet (no attach)" in text


@pytest.mark.parametrize(
    ("every", "words"), [(1, "; every step\n"), (4, "; every 4 steps\n"), (0, "in all\n")]
)
def test_the_interval_of_snapshots_has_words(
    capsys: pytest.CaptureFixture[str], every: int, words: str
) -> None:
    show_status({**DOCUMENT, "snapshots": {**DOCUMENT["snapshots"], "every": every}})
    assert words in capsys.readouterr().out


def test_a_restart_under_an_earlier_leader_has_its_downtime(
    capsys: pytest.CaptureFixture[str],
) -> None:
    restart = {"generation": 1, "cause": "x", "restored": "step 3", "downtime_s": 1.5}
    show_status({**DOCUMENT, "restarts": [restart]})
    assert "from step 3; training again after 1.50 s" in capsys.readouterr().out


def test_a_checkpoint_is_of_no_generation(capsys: pytest.CaptureFixture[str]) -> None:
    show_status({**DOCUMENT, "snapshots": {**DOCUMENT["snapshots"], "generation": -1}})
    assert "newest step 11 (from a checkpoint), 400 ms old" in capsys.readouterr().out


def test_profile_shows_origins_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    show_profile([("smp.orphan_timeout_s", "600.0", "default", "how long")])
    assert "default" in capsys.readouterr().out
    show_profile([("smp.orphan_timeout_s", "600.0", "", "how long")])
    assert "default" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("used", "limit", "window_s", "words"),
    [
        (1, 20, 3600.0, "1 (limit 20 per hour)"),
        (0, 20, 3600.0, "1, 0 of them in the last hour (limit 20)"),
        (1, 5, 600.0, "1 (limit 5 per 10 min)"),
        (1, 5, None, "1 (limit 5)"),
    ],
)
def test_the_budget_names_its_window(
    capsys: pytest.CaptureFixture[str], used: int, limit: int, window_s: float | None, words: str
) -> None:
    budget = {"used": used, "limit": limit, "window_s": window_s}
    show_status({**DOCUMENT, "restart_budget": budget})
    assert f"restarts    {words}\n" in capsys.readouterr().out


CRASH = {
    "number": 1, "age_s": 12.0, "text": "rank 1 was killed by SIGKILL", "verdict_kind": "crash",
    "generations": [1], "recovered_s": 0.45, "steps_lost": 1,
}  # fmt: skip


def test_a_restart_is_shown_with_its_incident_and_only_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_status({**DOCUMENT, "incidents": [CRASH]})
    text = capsys.readouterr().out
    assert text.count("rank 1 was killed by SIGKILL") == text.count("generation 1 started") == 1
    assert "restarts    1 (limit 20 per hour)\nincident 1  12.0 s ago: crash (training" in text


def test_an_open_incident_is_shown_before_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    now = {**CRASH, "number": 2, "state": "suspect", "text": "no step", "generations": []}
    show_status({**DOCUMENT, "incidents": [now, CRASH]})
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("incident 2  SUSPECT for 12.0 s: crash")
    assert sum(line.startswith("incident ") for line in lines) == 2


def test_values_read_as_in_a_profile() -> None:
    assert [value_text(v) for v in (None, True, 3, 0.5, ["a"], "auto")] == [
        "null",
        "true",
        "3",
        "0.5",
        '["a"]',
        "auto",
    ]


def test_warnings_and_repeated_steps_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    restart = {
        **DOCUMENT["restarts"][0],
        "repeated": {"outcome": "equal", "text": "repeated 4 steps: losses bitwise equal"},
    }  # type: ignore[index]
    show_status({**DOCUMENT, "restarts": [restart], "warnings": ["repeated steps differ"]})
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "WARNING     repeated steps differ"
    assert "    repeated 4 steps: losses bitwise equal" in lines
