"""`ftrun network` of a real run, nodes of two rails, one of them slow: while it runs, and after.

Needs root and network namespaces, as all tests on the virtual cluster.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from bench_common import Deadline
from nodes_run import RUN_ID, NodesRun, environment
from virtual_cluster import VirtualCluster, available

SCRIPT = Path(__file__).parent / "scripts" / "ranks_on_nodes.py"

pytestmark = [pytest.mark.full, pytest.mark.slow]

if reason := available():
    pytest.skip(f"needs namespaces: {reason}", allow_module_level=True)


def reported_in_node(cluster: VirtualCluster, folder: Path, *words: str) -> str:
    """The output of the command on node0."""
    path = folder / "report.txt"
    with path.open("wb") as output:
        process = cluster.run(
            0,
            [sys.executable, "-m", "ftrun", "network", *words],
            env=environment(),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    assert process.wait(60) == 0, path.read_text()
    return path.read_text()


def test_a_slow_rail_is_reported_while_the_run_lives_and_after(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(range(32)))
    secret.chmod(0o600)
    with VirtualCluster(3, rails=2, rail_rate="1gbit") as cluster:
        cluster.slow(2, "30mbit", rail=1)
        flags = ["--secret-file", secret]
        words = [SCRIPT, tmp_path, 0]
        run = NodesRun(cluster, tmp_path, words, Deadline(600), members=3, flags=flags)
        run.start_all()
        run.wait_for_step(5)
        run.wait_for("the plan", lambda: bool(run.journals("network_plan")))
        live = reported_in_node(cluster, tmp_path)
        run.finish()
        kept = json.loads(reported_in_node(cluster, tmp_path, RUN_ID, "--json"))
    # On a busy machine one more path may look slow.
    assert re.match(rf"run {RUN_ID}: of 12 paths, [4-9] slow; the plan is not applied", live)
    assert " ago" in live.splitlines()[1]
    assert re.search(r"^- node2 sends and receives .* over eth1 ", live, re.MULTILINE)
    assert "training over eth0, not over eth1" in " ".join(live.split())
    assert kept["is_live"] is False
    assert len(kept["paths"]) == 12
    assert kept["plan"]["rails"] == ["eth0"]
    assert not kept["is_applied"]
