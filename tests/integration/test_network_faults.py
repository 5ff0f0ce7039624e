"""Injected faults between nodes: links that are cut, slow or lossy, and orders from elsewhere."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench_common import Deadline
from nodes_run import NodesRun, environment
from virtual_cluster import VirtualCluster, available

if reason := available():
    pytest.skip(f"needs namespaces: {reason}", allow_module_level=True)

SCRIPT = Path(__file__).parents[2] / "scripts" / "drill_job.py"
LIMIT_S = 600.0

pytestmark = [pytest.mark.slow]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodesRun]:
    """Two nodes and a spare, with a secret, a rank each."""
    folder = tmp_path_factory.mktemp("nodes")
    secret = folder / "secret"
    secret.touch(mode=0o600)
    secret.write_bytes(os.urandom(32))
    words = [SCRIPT, "--folder", folder, "--kind", "ddp", "--steps", 4000, "--pace", 0.02]
    flags = ["--allow-network-faults", "--secret-file", secret]
    with VirtualCluster(3, shm="64m") as cluster:
        made = NodesRun(cluster, folder, words, Deadline(LIMIT_S), members=2, spares=1, flags=flags)
        made.start_all()
        made.wait_for_step(5)
        yield made


def asked(run: NodesRun, node: int, *words: object) -> "subprocess.CompletedProcess[str]":
    """The output of `ftrun inject-fault` on a node."""
    command = [sys.executable, "-m", "ftrun", "inject-fault", *map(str, words)]
    process = run.cluster.run(
        node,
        command,
        env=environment(),
        cwd=run.folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, err = process.communicate(timeout=LIMIT_S)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def order(run: NodesRun, node: int, *words: object) -> str:
    done = asked(run, node, *words, "--json")
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["id"])


def lines(run: NodesRun, kind: str, fault_id: str) -> list[dict[str, Any]]:
    return [line for line in run.journals(kind) if line["id"] == fault_id]


def tc(run: NodesRun, node: int, *words: str) -> str:
    """The kernel's settings of the node's own end of its cable."""
    process = run.cluster.run(
        node, ["tc", *words, "dev", "eth0"], stdout=subprocess.PIPE, text=True
    )
    return str(process.communicate(timeout=LIMIT_S)[0])


@pytest.mark.full
def test_a_node_is_cut_off_by_an_order_from_another_and_comes_back(run: NodesRun) -> None:
    before = run.generation
    fault_id = order(run, 0, "partition", "--node", "node1", "--for", "8s")
    run.wait_for("the cut", lambda: lines(run, "fault_injected", fault_id))
    (line,) = lines(run, "fault_injected", fault_id)
    assert line["node"] == "node1"
    assert "every packet dropped" in line["how"]
    assert "clsact" in tc(run, 1, "qdisc", "show")
    run.wait_for_generation(before + 1)
    assert any("node1" in line["text"] for line in run.journals("node_lost"))
    run.wait_for("the end of the cut", lambda: lines(run, "fault_reverted", fault_id))
    assert "clsact" not in tc(run, 1, "qdisc", "show")
    run.wait_for("node1 to join again", lambda: run.times_joined(1) > 0)


@pytest.mark.full
def test_slow_and_lossy_links_are_made_and_taken_back(run: NodesRun) -> None:
    expected = {"slow-link": ("qdisc", "tbf"), "lossy-link": ("filter", "bytecode")}
    for kind, (what, word) in expected.items():
        started_s = time.monotonic()
        fault_id = order(run, 0, kind, "--node", "node0", "--for", "2s")
        shown = tc(run, 0, what, "show", *(["egress"] if what == "filter" else []))
        # It is reverted some time before that is recorded.
        assert word in shown or time.monotonic() - started_s > 2.0, shown
        run.wait_for(f"the end of {kind}", lambda i=fault_id: lines(run, "fault_reverted", i))
        assert word not in tc(run, 0, "qdisc", "show")
    run.wait_for_more_steps(3)


@pytest.mark.full
def test_a_bit_flips_on_the_wire_and_nothing_is_believed(run: NodesRun) -> None:
    before = run.generation
    fault_id = order(run, 0, "bitflip-wire", "--node", "node0")
    assert lines(run, "fault_injected", fault_id)
    run.wait_for_more_steps(20)
    assert run.generation >= before


@pytest.mark.full
def test_what_a_node_keeps_for_others_is_damaged(run: NodesRun) -> None:
    run.wait_for("a commit", lambda: run.last_step() > 20)
    store_node = f"node{run.node_of(0)}"
    for kind in ("fragment-truncate", "fragment-stale"):
        fault_id = order(run, 2, kind, "--node", store_node)
        run.wait_for(kind, lambda i=fault_id: lines(run, "fault_injected", i))
    run.wait_for_more_steps(5)


@pytest.mark.full
def test_what_a_rank_is_ordered_reaches_it_on_its_node(run: NodesRun) -> None:
    before = run.generation
    at = run.last_step() + 100
    rank = next(rank for rank in (0, 1) if run.node_of(rank) != 2)
    fault_id = order(run, 2, "rank-kill", "--rank", rank, "--at-step", at)
    run.wait_for("the fault", lambda: lines(run, "fault_injected", fault_id))
    (line,) = lines(run, "fault_injected", fault_id)
    assert (line["step"], line["rank"]) == (at, rank)
    assert line["node"] == f"node{run.node_of(rank)}"
    run.wait_for_generation(before + 1)
    done = asked(run, 2, "smp-kill")
    assert done.returncode == 2
    assert "which node?" in done.stderr
