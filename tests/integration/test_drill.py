"""A drill really injects faults into a run, judges it by its journal, and exits with the result."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPT = """
import time
import torch
import torch.distributed as dist
import ftrun

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = ftrun.attach(model=model, optimizer=optimizer)
for step in session.steps(600):
    loss = model(torch.ones(1, 4)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.01)
dist.destroy_process_group()
"""


def drill(folder: Path, plan: dict[str, Any]) -> "subprocess.CompletedProcess[str]":
    (folder / "plan.yaml").write_text(json.dumps(plan))  # JSON is YAML
    runtime = folder / "runtime"
    runtime.mkdir()
    return subprocess.run(
        [sys.executable, "-m", "ftrun", "drill", "plan.yaml", "--out", "out", "--markdown"],
        cwd=folder,
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime)},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


def rows_in(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "out" / "drill.json").read_text())
    return found


@pytest.mark.full  # the tests of each fault compare bytes, too
def test_two_faults_in_one_run_are_judged_and_change_no_byte(tmp_path: Path) -> None:
    late = {"within_s": 60}  # the latency limit is for an idle machine
    faults = [{"kind": "rank-kill", "rank": 1, "expect": late}, {"kind": "smp-kill"}]
    done = drill(tmp_path, {"pace": 0.02, "steps_between": 5, "faults": faults})
    assert done.returncode == 0, done.stdout + done.stderr
    killed, smp = rows_in(tmp_path)
    assert (killed["fault"], killed["culprit_right"], killed["action"]) == (
        "rank-kill", True, "respawn",
    )  # fmt: skip
    assert killed["detected_s"] > 0
    assert killed["steps_lost"] <= 2
    assert (smp["culprit_right"], smp["steps_lost"], smp["found"]) == (None, 0, "no incident")
    assert all(row["equal"] and row["passed"] and row["in_effect"] for row in (killed, smp))
    assert killed["run"] == smp["run"]
    assert "| `rank-kill` | 1 | crash |" in done.stdout
    assert "2 of 2 passed" in (tmp_path / "out" / "drill.html").read_text()
    assert not list((tmp_path / "runtime").glob("ftrun/*"))


@pytest.mark.full
def test_wrong_expectation_of_an_own_script_fails_the_drill(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    faults = [{"kind": "exception", "rank": 0, "expect": {"verdict": "frozen"}}]
    done = drill(tmp_path, {"script": "train.py", "faults": faults})
    assert done.returncode == 1, done.stdout + done.stderr
    (row,) = rows_in(tmp_path)
    assert (row["fired"], row["culprit_right"], row["equal"]) == (True, True, None)
    assert row["problem"] == "expected frozen, found crash"
    assert "1 of 1 faults failed" in done.stdout


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGHUP, id="hup", marks=pytest.mark.full),
        pytest.param(signal.SIGKILL, id="kill", marks=pytest.mark.full),
    ],
)
def test_nothing_is_left_of_a_drill_that_is_ended(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "plan.yaml").write_text(json.dumps({"faults": [{"kind": "hang"}]}))
    (tmp_path / "runtime").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "ftrun", "drill", "plan.yaml", "--out", "out"],
        cwd=tmp_path,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path / "runtime")},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        # These tests may run under nohup, which a drill would respect.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    try:
        wait(lambda: bool(list((tmp_path / "out").glob("run-*/rank0.jsonl"))), process)
        process.send_signal(number)
        code = process.wait(100)
        assert code == (128 + number if number is signal.SIGHUP else -number)
        wait(lambda: not at_work_below(tmp_path))
    finally:
        process.kill()
        process.wait()


def wait(is_so: Callable[[], bool], process: "subprocess.Popen[bytes] | None" = None) -> None:
    give_up_s = time.monotonic() + 120
    while not is_so():
        assert process is None or process.poll() is None
        assert time.monotonic() < give_up_s
        time.sleep(0.05)


def at_work_below(folder: Path) -> list[str]:
    """Processes whose current folder is there."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if entry.readlink().is_relative_to(folder):
                found.append(entry.parent.name)
    return found
