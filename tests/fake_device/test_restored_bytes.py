"""A rank on the fake device is killed; what its next process restores is of the restored step.

The mode is `lazy`: what ftrun does not wait for has not happened.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.conftest import Run

FOLDER = Path(__file__).parent
Restored = Callable[..., dict[str, Any]]

pytestmark = [pytest.mark.slow, pytest.mark.launch, pytest.mark.usefixtures("compiled")]


@pytest.fixture
def restored(tmp_path: Path) -> Iterator[Restored]:
    """Run a script that kills itself; what its second process found."""
    with contextlib.ExitStack() as ends:

        def run(name: str, what: str) -> dict[str, Any]:
            result = tmp_path / "result.json"
            words = ["--start", "fresh", "--nproc-per-node", "1", "--snapshot-every", "1"]
            script = str(FOLDER / "scripts" / name)
            one = Run(tmp_path, *words, script, str(result), what)
            ends.callback(one.end)
            assert one.wait() == 0, one.text
            assert result.exists(), one.text
            assert "at the step boundary" not in one.text  # no copy had to be discarded
            found: dict[str, Any] = json.loads(result.read_text())
            return found

        yield run


@pytest.mark.parametrize("stream", ["own", pytest.param("default", marks=pytest.mark.full)])
def test_of_a_training_in_a_stream(restored: Restored, stream: str) -> None:
    found = restored("stream_training.py", stream)
    assert found["step"] > 8
    assert found["tensors"] == 16
    assert found["wrong"] == []


@pytest.mark.skipif(not hasattr(torch.accelerator, "Graph"), reason="needs torch 2.12")
@pytest.mark.parametrize("what", ["update", pytest.param("step", marks=pytest.mark.full)])
def test_of_steps_by_graph_replay(restored: Restored, what: str) -> None:
    found = restored("graph_training.py", what)
    assert found["step"] > 8
    assert found["found"] == [[found["step"] + 1.0]] * 8
