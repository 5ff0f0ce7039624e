"""Status is readable: the verdict first, no number without a unit."""

import pytest

from ftrun.cli.screen.terminal import duration, show_profile, show_status, size, value_text

DOCUMENT = {
    "run_id": "gpt-1",
    "verdict": "running at step 12",
    "state": "running",
    "generation": 1,
    "uptime_s": 75.0,
    "script": "/home/user/train.py",
    "restarts": [
        {
            "generation": 1,
            "cause": "rank 1 was killed by SIGKILL",
            "at_s_ago": 12.0,
            "restored": "step 8 (generation 0)",
            "phases_s": {"detect": 0.01, "fork": 0.05, "first_step": None},
        }
    ],
    "restart_budget": {"used": 1, "limit": 20, "window_s": 3600.0},
    "ranks": [
        {
            "rank": 0,
            "pid": 11,
            "state": "running",
            "step": 12,
            "beat_age_s": 0.2,
            "phase": "train",
            "loss": 2.5,
            "start": "warm",
        },
        {"rank": 1, "pid": 12, "state": "starting", "step": None, "loss": None},
    ],
    "snapshots": {
        "protected": False,
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


def test_verdict_comes_first_and_tells_that_nothing_protects(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_status(DOCUMENT)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "running at step 12 - UNPROTECTED: two slots need 9 MB"
    text = "\n".join(lines)
    for said in (
        "run gpt-1  /home/user/train.py  generation 1  up 1 min 15 s",
        "0.20 s ago",
        "2.5000",
        "newest step 11 (generation 1), 0.40 s old; 5.0 MB per rank, 20.0 MB of memory in all",
        "taken 3, skipped 1, discarded 0",
        "every 4 steps",
        "restarts    1; 1 of 20 used within 1 h 0 min",
        "generation 1, 12 s ago: rank 1 was killed by SIGKILL; restored step 8 (generation 0); "
        "this node in s: detect 0.010, fork 0.050",
        "checkpoint  step 8, 30 s old; /data",
        "processes   agent 5, smp 7",
    ):
        assert said in text


def test_little_is_shown_of_a_run_of_which_little_is_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_status({"run_id": "x", "verdict": "STARTING", "state": "starting"})
    assert capsys.readouterr().out.splitlines() == ["STARTING", "run x"]


def test_restart_without_a_snapshot_says_where_it_began(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_status({"restarts": [{"generation": 1, "cause": "x"}], "snapshots": {"note": "no attach"}})
    text = capsys.readouterr().out
    assert "began from the script's beginning" in text
    assert "none yet (no attach)" in text


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
    assert "restored step 3; trained again after 1.50 s" in capsys.readouterr().out


def test_a_checkpoint_is_of_no_generation(capsys: pytest.CaptureFixture[str]) -> None:
    show_status({**DOCUMENT, "snapshots": {**DOCUMENT["snapshots"], "generation": -1}})
    assert "newest step 11 (from a checkpoint), 0.40 s old" in capsys.readouterr().out


def test_profile_shows_origins_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    show_profile([("smp.orphan_s", "600.0", "default", "how long")])
    assert "default" in capsys.readouterr().out
    show_profile([("smp.orphan_s", "600.0", "", "how long")])
    assert "default" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.123, "0.12 s"), (45.0, "45 s"), (200.0, "3 min 20 s"), (7500.0, "2 h 5 min")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(12, "12 B"), (5_100_000, "5.1 MB"), (3e15, "3000.0 TB")]
)
def test_size(num_bytes: float, text: str) -> None:
    assert size(num_bytes) == text


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
        "repeated": {"text": "repeated 4 steps: losses bitwise equal"},
    }  # type: ignore[index]
    show_status({**DOCUMENT, "restarts": [restart], "warnings": ["repeated steps differ"]})
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "WARNING     repeated steps differ"
    assert "    repeated 4 steps: losses bitwise equal" in lines
