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


def checked(tmp_path: Path, *words: str) -> dict[str, Any]:
    result = tmp_path / "result.json"
    command = [sys.executable, str(ROOT / "scripts" / "check_gpu.py"), "--device", "fake"]
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
        pytest.param(["cost-8"], marks=pytest.mark.full),
    ],
    ids=" ".join,
)
def test_the_checks_of_processes_and_figures(tmp_path: Path, checks: list[str]) -> None:
    found = checked(tmp_path, "--checks", ",".join(checks))
    assert list(found) == checks
    assert all(one["ok"] for one in found.values()), found


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
