"""What a failed rank has written and its last collective are evidence, and decide nothing."""

import os
import platform
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Run, Start

SCRIPT = """
import os, sys, time, torch, torch.distributed as dist, ftrun
from torch import nn
dist.init_process_group("gloo")
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = ftrun.attach(model=model, optimizer=optimizer)
for step in session.steps(60):
    while step == 12 and session.generation == 0 and dist.get_rank() == 0:
        time.sleep(0.01)
    dist.all_reduce(model(torch.ones(4)).sum().detach())
    optimizer.step()
    time.sleep(0.02)
    if step == 40 and session.generation == 1 and dist.get_rank() == 0:
        while not os.path.exists("closed"):
            time.sleep(0.01)
        print("loss is nan", flush=True)
        print("the pool answers: volume quota used up", file=sys.stderr, flush=True)
        os._exit(7)
print("done")
"""


@pytest.mark.slow
@pytest.mark.launch
def test_a_stopped_rank_and_one_that_reports_its_error(start: Start, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "profile.yaml").write_text(
        "monitor:\n  frozen_kill_after_s: 1\n  error_patterns: {storage quota: quota*used}\n"
    )
    flags = ("--nproc-per-node", "2", "--redirects", "3", "--profile", "profile.yaml")
    run = start(*flags, "--set", "hang.action=evict", "train.py")
    run.wait_for_step(12)
    time.sleep(1.0)  # rank 1 enters the collective for which rank 0 never comes
    os.kill(run.pids()[1], signal.SIGSTOP)
    run.wait_until("training again", lambda: run.journal("incident_closed"))
    (tmp_path / "closed").touch()
    assert run.wait() == 0, run.text
    frozen, crash = verdicts(run)
    assert (frozen["kind"], frozen["culprits"], frozen["error_class"]) == ("frozen", [1], "")
    call = (
        r"its last collective is all_reduce #\d+ of the default group, which it had entered "
        r"[\d.]+ s before it was read, and had not left"
    )
    if platform.machine() != "x86_64":
        call = r"its last sample has collective #\d+ of group 0"
    assert any(re.fullmatch(call, line) for line in frozen["evidence"]), frozen
    # One line names a NaN, and no verdict follows from it: the rank crashed.
    assert (crash["kind"], crash["culprits"]) == ("crash", [0])
    assert crash["text"].endswith("exited with code 7")
    assert crash["error_class"] == "storage quota"
    assert crash["evidence"][1:3] == [
        "stderr.log (storage quota): the pool answers: volume quota used up",
        "stdout.log (NaN): loss is nan",
    ]
    closed = run.journal("incident_closed")
    assert [line["action"] for line in closed] == ["respawn", "respawn"]
    assert [line["error_class"] for line in closed] == ["", "storage quota"]
    command = [sys.executable, "-m", "ftrun", "report", "2"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "storage quota" in shown.stdout


def verdicts(run: Run) -> list[dict[str, Any]]:
    """The first verdict of each incident."""
    found: dict[Any, dict[str, Any]] = {}
    for line in run.journal("verdict"):
        found.setdefault(line["incident"], line["verdict"])  # type: ignore[arg-type]
    return list(found.values())
