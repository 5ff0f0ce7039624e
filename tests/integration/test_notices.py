"""A notice on a run's only node stops it with its last step on disk; ftrun drain needs a spare."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.integration.conftest import Run, Start, script, start

__all__ = ["script", "start"]

Write = Callable[..., str]
TRAIN = """
import time
import torch
import ftrun

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
session = ftrun.attach(model=model, optimizer=optimizer)
for step in session.steps(100_000):
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    time.sleep(0.01)
"""


def drain(run: Run, *words: str) -> str:
    command = [sys.executable, "-m", "ftrun", "drain", *words]
    done = subprocess.run(
        command, cwd=run.folder, env=run.variables, capture_output=True, text=True, check=False
    )
    assert done.returncode
    return done.stderr


def test_a_notice_on_the_only_node_stops_the_run_with_its_last_step_on_disk(
    start: Start, script: Write, tmp_path: Path
) -> None:
    notice = tmp_path / "leave"
    run = start(
        *("--checkpoint-dir", "saved", "--notices", f"file:{notice}"),
        *("--set", "notices.every_s=0.1", "--snapshot-every", "1", script(TRAIN)),
    )
    run.wait_for_step(5)
    assert "has one node" in drain(run, "node0", run.run_id)
    assert "name a node, or give --all" in drain(run)
    notice.write_text("the machine is taken away")
    assert run.wait() == 143
    (asked,) = run.journal("stop_requested")
    assert asked["by"] == "notice of file: the machine is taken away"
    assert "kept         step" in run.text
