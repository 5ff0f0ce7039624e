"""scripts/check_gpu.py runs on the fake device, so that its first run on a GPU finds GPU faults."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 1500

pytestmark = [
    *(pytest.mark.slow, pytest.mark.launch, pytest.mark.timeout(LIMIT_S + 100)),
    pytest.mark.usefixtures("compiled"),
]


def checked(tmp_path: Path, *words: str, device: str = "fake") -> dict[str, Any]:
    result = tmp_path / "result.json"
    command = [sys.executable, str(ROOT / "scripts" / "check_gpu.py"), "--device", device]
    command += ["--json", str(result), "--timeout", str(LIMIT_S), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.exists(), done.stdout + done.stderr
    found: dict[str, Any] = json.loads(result.read_text())["checks"]
    assert done.returncode == 0, done.stdout + done.stderr
    return found


@pytest.mark.parametrize(
    "checks",
    [
        pytest.param(["standby", "memory", "respawn", "respawn-bound"], marks=pytest.mark.full),
        ["ring", "rates", "nvml"],
        pytest.param(["conformance", "cost-2"], marks=pytest.mark.full),
        pytest.param(["cost-8", "auto", "collectives"], marks=pytest.mark.full),
        pytest.param(["two"], marks=pytest.mark.full),
    ],
    ids=" ".join,
)
def test_the_checks_of_processes_and_figures(tmp_path: Path, checks: list[str]) -> None:
    found = checked(tmp_path, "--checks", ",".join(checks))
    assert list(found) == checks
    assert all(one["ok"] for one in found.values()), found


def test_two_ranks_that_hang_without_a_device_are_judged(tmp_path: Path) -> None:
    """Only gloo can send and receive here."""
    found = checked(tmp_path, "--checks", "two", device="cpu")["two"]
    assert found["ok"], found
    assert found["shown"]["p2p"]["culprits"] == [1]


@pytest.mark.full
def test_an_illegal_access_ends_its_process_only(tmp_path: Path) -> None:
    found = checked(tmp_path, "--checks", "nvml", "--provoke-xid")["nvml"]["shown"]
    assert found["died"] != 0
    assert found["xid"] == "not visible here"


@pytest.mark.parametrize(
    "variants",
    [
        pytest.param(["own-stream", "group"], marks=pytest.mark.full),
        pytest.param(None, marks=pytest.mark.full),
    ],
)
def test_the_check_of_exactness(tmp_path: Path, variants: list[str] | None) -> None:
    words = ["--variants", ",".join(variants)] if variants else []
    found = checked(tmp_path, "--checks", "exact", *words)["exact"]
    assert {one["result"] for one in found["variants"].values()} == {"equal"}


JUDGED = """
import check_gpu_figures as figures
from check_gpu_processes import BOUND_S, RECORDED_FIELDS, missed_by_respawn

costs = {"boundary_p50_ms": 4.9, "copy_s": 0.5, "step_s": 0.3, "step_with_snapshot_s": 0.509}
assert figures.missed_by_cost(costs) == []
assert figures.missed_by_cost({**costs, "step_with_snapshot_s": 0.52}) == [
    "a snapshot adds 0.220 s to its step, more than 0.210 s"
]
hidden = {**costs, "copy_s": 0.1, "step_with_snapshot_s": 0.309}
assert figures.missed_by_cost(hidden) == []
assert len(figures.missed_by_cost({**hidden, "step_with_snapshot_s": 0.32})) == 1
assert "5 ms" in figures.missed_by_cost({**hidden, "boundary_p50_ms": 5.1})[0]

ring = {"one_thread_gb_per_s": 8.1, "gb_per_s": 13.0, "has_two_threads": True, "sums_s_per_gb": 0.0}
slower = {"matmul_4096_kib": 0.02, "small_4096_kib": 0.04, "small_16384_kib": 0.01}
assert figures.missed_by_ring(ring, slower) == []
slow = figures.missed_by_ring({**ring, "one_thread_gb_per_s": 7.9}, slower)
assert slow == ["one thread copies 7.9 GB/s, not 8"]
assert "1.6 times" in figures.missed_by_ring({**ring, "gb_per_s": 12.0}, slower)[0]
alone = {**ring, "gb_per_s": 8.1, "has_two_threads": False}
assert figures.missed_by_ring(alone, slower) == []
larger = figures.missed_by_ring(ring, {**slower, "small_4096_kib": 0.06})
assert larger[-1] == "pieces of 16 MiB are enough"
none = figures.missed_by_ring(ring, {**slower, "small_4096_kib": 0.06, "small_16384_kib": 0.06})
assert none[-1] == "pieces of 16 MiB are not enough"

handler = "dump_nccl_trace_json"
facts = {handler: {"newest": [dict.fromkeys(RECORDED_FIELDS)]}, "handlers": [handler]}
for request in ("nothing", handler + "?includecollectives=false"):
    facts["capture during " + request] = "intact"
facts |= {"kill_to_step_s": [2.4, 2.5], "capture during " + handler: "broken: known"}
assert missed_by_respawn(facts, BOUND_S) == []
assert "2.6 s, more than 2.5 s" in missed_by_respawn({**facts, "kill_to_step_s": [2.6]}, BOUND_S)[0]
del facts[handler]["newest"][0]["retired"]
facts["capture during nothing"] = "broken"
assert missed_by_respawn(facts, BOUND_S) == [
    "fields of the recorder: retired", "a capture during nothing: broken"
]
"""


def test_required_figures_that_are_missed_are_named() -> None:
    """In a process of its own, because its modules import torch and psutil."""
    done = subprocess.run(
        [sys.executable, "-c", JUDGED],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr


def test_an_error_and_a_check_without_end_do_not_end_the_others(tmp_path: Path) -> None:
    """They run in a process of their own, because they use its alarm."""
    script = """
import time, sys
from argparse import Namespace
from pathlib import Path
import check_gpu
from check_gpu_runs import Check

def endless(check):
    while True:
        time.sleep(0.01)

def wrong(check):
    return {}["no key"]

check_gpu.STOP_S = 0.2
args = Namespace(device="cpu")
for run in (endless, wrong):
    found = check_gpu.checked(run, Check(args, Path(sys.argv[1]) / "check", 0.1))
    assert found["ok"] is False, found
    print(found["shown"]["failed"])
time.sleep(0.5)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert lines[0].startswith("TimeoutError: no end after")
    assert lines[1].startswith("KeyError")
