"""Bulk data of protection leave a narrow link to a collective, and use it in between."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from virtual_cluster import VirtualCluster, available

if reason := available():
    pytest.skip(f"needs namespaces: {reason}", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "integration" / "scripts" / "yielding.py"
PORT = "7001"
WAIT_S = 120.0


def test_bulk_data_yield_to_a_collective_on_a_link_of_a_gigabit() -> None:
    command, env = [sys.executable, str(SCRIPT)], {**os.environ, "PYTHONPATH": str(ROOT)}
    found = {}
    with VirtualCluster(2, rail_rate="1gbit", shm="16m") as cluster:
        receiver = cluster.run(1, [*command, "receive", PORT], env=env)
        try:
            for how in ("not", "yields"):
                words = [*command, "send", cluster.address(1), PORT, how]
                sender = cluster.run(0, words, env=env, stdout=subprocess.PIPE, text=True)
                output, _ = sender.communicate(timeout=WAIT_S)
                assert sender.returncode == 0, output
                found[how] = json.loads(output)
        finally:
            receiver.kill()
            receiver.wait(WAIT_S)
    assert found["yields"]["during"] < found["not"]["during"] / 2, found
    assert found["yields"]["between"] > found["not"]["between"] / 2, found
