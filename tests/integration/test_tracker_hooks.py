"""The hooks of docs/frameworks.md that write incidents to W&B, MLflow and TensorBoard.

Each script runs with its own library, and gets an incident on stdin as a hook does.
"""

import ast
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ftrun.agent.publish.hooks import document, run_command
from ftrun.records.incidents import IncidentClosed, IncidentVerification

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"
SCRIPTS = {
    text.splitlines()[0].removeprefix("# incident_to_").removesuffix(".py"): text
    for text in re.findall(
        r"^```python\n(# incident_to_.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
}
CLOSED = IncidentClosed(
    "rank 1 was killed", 3, "crash", (1,), (), IncidentVerification(progress=True, loss="none"),
    "respawn", ("respawn",), 2.0, recovered_s=1.5, steps_lost=2,
)  # fmt: skip
FACTS = {"run_id": "run-7", "script": "train.py", "node": "n0", "generation": 1}


def test_the_scripts_read_fields_that_a_closed_incident_has() -> None:
    assert SCRIPTS.keys() == {"wandb", "mlflow", "tensorboard"}
    for text in SCRIPTS.values():
        read = {
            node.slice.value
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Subscript)
            and isinstance(node.value, ast.Name)
            and node.value.id == "incident"
            and isinstance(node.slice, ast.Constant)
        }
        assert "recovered_s" in read
        assert read <= document(CLOSED, FACTS).keys()


def hook(name: str, folder: Path) -> None:
    (folder / "hook.py").write_text(SCRIPTS[name])
    command = f"{sys.executable} hook.py"
    assert run_command(command, document(CLOSED, FACTS), str(folder), limit_s=300) == ""


def output_of(source: str, folder: Path) -> Any:
    """Prints of a program that reads what a hook has written, as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.full
@pytest.mark.skipif(find_spec("tensorboard") is None, reason="needs tensorboard: not installed")
def test_tensorboard(tmp_path: Path) -> None:
    hook("tensorboard", tmp_path)
    found = output_of(
        "import json\n"
        "from tensorboard.backend.event_processing.event_accumulator import EventAccumulator\n"
        "read = EventAccumulator('runs/run-7-incidents').Reload()\n"
        "print(json.dumps([(one.step, one.value) for one in read.Scalars('ftrun/lost_s')]))",
        tmp_path,
    )
    assert found == [[3, 1.5]]


@pytest.mark.full
@pytest.mark.skipif(find_spec("mlflow") is None, reason="needs mlflow: not installed")
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/store")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    begin = "import json, mlflow\nprint(json.dumps(mlflow.start_run().info.run_id))"
    monkeypatch.setenv("MLFLOW_RUN_ID", run := output_of(begin, tmp_path))
    hook("mlflow", tmp_path)
    found = output_of(
        "import json\nfrom mlflow import MlflowClient\n"
        f"data = MlflowClient().get_run({run!r}).data\n"
        "print(json.dumps([data.metrics, data.tags]))",
        tmp_path,
    )
    assert found[0] == {"ftrun_lost_s": 1.5, "ftrun_steps_lost": 2}
    assert found[1]["ftrun_incident_3"] == "rank 1 was killed"


@pytest.mark.full
@pytest.mark.skipif(find_spec("wandb") is None, reason="needs wandb: not installed")
def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    hook("wandb", tmp_path)
    (written,) = tmp_path.glob("wandb/offline-run-*/run-run-7-incidents.wandb")
    assert b"ftrun/lost_s" in written.read_bytes()
