"""`scripts/simulate.py` prints the trace of a seed, and counts the outcomes of many seeds."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from simulation.run import run_seed

SCRIPT = Path(__file__).parents[2] / "scripts" / "simulate.py"


def simulate(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_seed_is_reported_with_its_whole_story() -> None:
    done = simulate("--seed", 3, "--mode", "safety")
    outcome = run_seed(3, "safety")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"trace {outcome.digest:016x}" in done.stdout
    assert "agent 1001 starts" in done.stdout
    assert f"{outcome.steps} steps" in done.stdout


def test_without_a_mode_it_is_reported_in_both() -> None:
    reported = simulate("--seed", 5).stdout
    assert "seed 5, safety" in reported
    assert "seed 5, liveness" in reported


@pytest.mark.slow
@pytest.mark.parametrize(("jobs", "seeds", "more"), [(1, 10, ["--twice"]), (2, 52, [])])
def test_many_seeds_are_counted(tmp_path: Path, jobs: int, seeds: int, more: list[str]) -> None:
    """Two processes run a chunk of 50 seeds and one of the rest."""
    path = tmp_path / "found.json"
    words = ("--seeds", seeds, "--from", 40, "--mode", "safety", *more)
    done = simulate(*words, "--jobs", jobs, "--json", path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 violations" in done.stdout
    found = json.loads(path.read_text())
    assert found["runs"] == seeds
    assert sum(found["verdicts"].values()) == seeds
    reported = sum(run_seed(seed, "safety").num_events for seed in range(40, 40 + seeds))
    assert found["events"] == reported


@pytest.mark.slow
def test_a_count_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    for first, seeds in ((0, 10), (10, 10)):
        done = simulate("--from", first, "--seeds", seeds, "--mode", "safety", "--json", path)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "10 runs of" in done.stdout
    assert "20 runs of seeds 0 to 19" in done.stdout
    found = json.loads(path.read_text())
    assert found["events"] == sum(run_seed(seed, "safety").num_events for seed in range(20))
    simulate("--from", 7, "--seeds", 1, "--mode", "safety", "--json", path)
    assert json.loads(path.read_text())["runs"] == 1, "another count"


def test_stopped_by_hand_it_shows_what_it_has_and_ends() -> None:
    command = [sys.executable, SCRIPT, "--seeds", "1000000", "--jobs", "2", "--mode", "safety"]
    run = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        process_group=0,
        # If this test runs in the background of a shell (`&`), all its children ignore SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert run.stdout is not None
        first = run.stdout.readline()
        os.killpg(run.pid, signal.SIGINT)
        # The output ends when no process is left that can write.
        rest, _ = run.communicate(timeout=60)
    finally:
        if run.poll() is None:
            # Not its process group: its children notice its end, and free their semaphores.
            run.kill()
            run.communicate()
    assert run.returncode == 130, first + rest
    at = re.search(r"continue with --from (\d+) --seeds (\d+)", rest)
    assert at is not None, rest
    assert int(at[1]) + int(at[2]) == 1_000_000
    assert "runs of seeds 0 to" in rest


def test_traffic_is_written_by_number_of_nodes(tmp_path: Path) -> None:
    path = tmp_path / "traffic.json"
    done = simulate("--traffic", "4,8", "--json", path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    for key in ("control_bytes_per_node_s", "control_messages_per_node_s", "lead_cpu_s_per_s"):
        assert list(found[key]) == ["4", "8"]
        assert min(found[key].values()) > 0
