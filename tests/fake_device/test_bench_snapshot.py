"""scripts/bench_snapshot.py measures ranks that share their replicas on a device too."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_snapshot.py"
LIMIT_S = 600.0

pytestmark = [
    *(pytest.mark.slow, pytest.mark.timeout(2 * LIMIT_S)),
    pytest.mark.usefixtures("compiled"),
]


def measured(path: Path, device: str) -> dict[str, Any]:
    """16 MB are the smallest state whose layers are large enough to be shared."""
    words = ["--replicated", "--device", device, "--mb", "16", "--rounds", "1", "--block", "1"]
    command = [sys.executable, str(SCRIPT), *words, "--json", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_replicas_on_a_device_have_the_figures_of_replicas_in_main_memory(tmp_path: Path) -> None:
    on_cpu, on_device = (measured(tmp_path / f"{one}.json", one) for one in ("cpu", "fake"))
    assert on_device.keys() == on_cpu.keys()
    assert (on_device["device"], on_device["is_replicated"]) == ("fake", True)
    # The node stores the state of its four ranks once, in two slots.
    for found in (on_cpu, on_device):
        assert 2.0 <= found["memory_over_state"] < 2.5
