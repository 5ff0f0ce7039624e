"""A node whose preflight check fails runs no ranks; one that passes later does.

Real nodes with real checks. The checks fail by minima that no node reaches, and by limits that are
lifted again.
"""

import contextlib
import json
import resource
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
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
NO_NODE_IS_SO_FAST = {"FTRUN_PREFLIGHT_MIN_MEMORY_GB_S": "100000"}

pytestmark = [pytest.mark.slow]

Start = Callable[..., NodesRun]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Start]:
    """A run that is not started yet."""
    clusters = []

    def make(members: int, spares: int, *flags: object) -> NodesRun:
        clusters.append(cluster := VirtualCluster(members + spares, shm="64m"))
        cluster.up()
        words = [SCRIPT, "--folder", tmp_path, "--kind", "ddp", "--steps", 30, "--pace", 0.02]
        deadline = Deadline(LIMIT_S)
        return NodesRun(
            cluster, tmp_path, words, deadline, members=members, spares=spares, flags=flags
        )

    yield make
    for cluster in clusters:
        cluster.down()


@contextlib.contextmanager
def open_files(count: int) -> Iterator[None]:
    """Limit on the open files of processes that the block starts."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def status(run: NodesRun, node: int) -> dict[str, Any]:
    """The `ftrun status` document there."""
    process = run.cluster.run(
        node,
        [sys.executable, "-m", "ftrun", "status", "--json"],
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    out, _ = process.communicate(timeout=LIMIT_S)
    found: dict[str, Any] = json.loads(out)["cluster"]
    return found


@pytest.mark.full  # simulated nodes fail their check, too
def test_a_node_that_fails_stays_out_and_the_spare_runs(nodes: Start) -> None:
    run = nodes(2, 1, "--set", "preflight.timeout_s=60")
    run.start_all({1: NO_NODE_IS_SO_FAST})
    run.wait_for_step(3)
    assert [run.node_of(rank) for rank in (0, 1)] == [0, 2], run.journals("preflight_finished")
    (failed,) = {line["fitness"]["outcome"] for line in run.journal(1, "preflight_finished")}
    assert failed == "fail"
    unfit, *more = run.journals("node_unfit")  # more: another thing than memory was slow as well
    assert all(line["node_id"] == "node1" for line in (unfit, *more))
    assert unfit["text"].startswith("node node1 may not run ranks: memory is copied at")
    assert "(minimum 100,000.0 GB/s)" in unfit["text"]
    for node in (0, 2):
        newest = run.journal(node, "preflight_finished")[-1]["fitness"]
        assert newest["outcome"] != "fail"
        assert newest["is_whole"]
        assert newest["figures"]["loopback_bytes_per_s"] > 0
    link = run.journal(2, "preflight_finished")[-1]["fitness"]["figures"]
    assert link["link_to"] == "node0"
    assert link["link_bytes_per_s"] > 0
    found = status(run, 2)
    assert list(found["unfit"]) == ["node1"]
    checks = {node["node_id"]: node["preflight"] for node in found["nodes"]}
    assert checks["node1"].startswith("memory is copied at")
    roles = {node["node_id"]: node["role"] for node in found["nodes"]}
    assert roles == {"node0": "member", "node1": "spare", "node2": "member"}
    run.finish()


def collective(run: NodesRun) -> dict[str, Any] | None:
    """The leader's record of the first collective check, once it has ended."""
    return next(iter(run.journals("collective_finished")), None)


def test_a_node_that_computes_a_wrong_sum_is_named_and_the_spare_runs_its_ranks(
    nodes: Start,
) -> None:
    run = nodes(2, 1, "--allow-faults", "--set", "preflight.collective_mb=8")
    run.start_all({1: {"FTRUN_WRONG_SUM": "1"}})
    run.wait_for("the move", lambda: run.generation > 0 and run.node_of(1) == 2)
    found = collective(run)
    assert found is not None
    assert (found["is_complete"], found["is_wrong"]) == (True, True)
    assert found["nodes"] == ["node0", "node1", "node2"]
    (wrong,) = run.journals("wrong_sum_found")
    assert wrong["node_id"] == "node1"
    assert wrong["text"].startswith("node node1: it computed a wrong sum, found by node")
    assert [run.node_of(rank) for rank in (0, 1)] == [0, 2]
    reasons = [one["reason"] for one in run.journals("generation_chosen")]
    assert any("node node1 is evicted: node node1 has a hardware fault" in one for one in reasons)
    assert "node1" in run.journals("verdict")[0]["text"]
    checks = {node["node_id"]: node["preflight"] for node in status(run, 0)["nodes"]}
    assert checks["node1"].startswith("it computed a wrong sum, found by node")
    # The restart that it has caused, and restarts in place, check nothing again.
    run.signal(run.node_of(0), "rank")
    run.wait_for_generation(run.generation + 1)
    run.finish()
    assert len(run.journals("collective_finished")) == 1


@pytest.mark.full
def test_a_node_whose_links_are_far_slower_is_a_warning(nodes: Start) -> None:
    run = nodes(2, 1, "--set", "preflight.collective_mb=8")
    run.cluster.slow(1, "16mbit")
    run.start_all()
    run.wait_for("the check", lambda: run.journals("collective_finished"))
    (slow,) = [one for one in run.journals("node_below_median") if "collective" in one["text"]]
    assert slow["node_id"] == "node1"
    run.finish()
    assert [run.node_of(rank) for rank in (0, 1)] == [0, 1]
    assert run.journals("wrong_sum_found") == []


@pytest.mark.full
def test_a_node_that_is_killed_in_the_middle_of_the_check_is_not_wrong(nodes: Start) -> None:
    run = nodes(2, 1, "--set", "preflight.collective_mb=2000")
    run.start_all()
    run.wait_for("the check", lambda: all(computes(run, node) for node in range(3)))
    run.fault("kill", 1)
    run.wait_for("both checks", lambda: len(run.journals("collective_finished")) == 2)
    first, second = run.journals("collective_finished")
    assert (first["is_complete"], first["is_wrong"]) == (False, False)
    assert "node1 has sent no result" in first["text"]
    assert second["nodes"] == ["node0", "node2"]
    assert (second["is_complete"], second["is_wrong"]) == (True, False), second
    run.finish()
    assert [run.node_of(rank) for rank in (0, 1)] == [0, 2]
    assert run.journals("wrong_sum_found") == run.journals("node_below_median") == []


def computes(run: NodesRun, node: int) -> bool:
    """Whether a process of the check runs there."""
    for process in run.processes_of(node):
        with contextlib.suppress(OSError):
            if b"cluster.collective" in Path(f"/proc/{process.pid}/cmdline").read_bytes():
                return True
    return False


@pytest.mark.full
def test_a_run_with_too_few_fit_nodes_waits_until_one_passes(nodes: Start) -> None:
    run = nodes(2, 0, "--set", "preflight.retry_max_s=0.5")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    run.start(0)
    with open_files(most - 1):
        run.start(1, {"FTRUN_PREFLIGHT_MIN_OPEN_FILES": str(most)})
    run.wait_for("the pause", lambda: run.journals("run_paused"))
    assert "unfit: node1 (" in run.journals("run_paused")[0]["text"]
    assert "open files are allowed (ulimit -n; minimum" in run.journals("run_paused")[0]["text"]
    agent = run.pid_of(1, "agent")
    resource.prlimit(agent, resource.RLIMIT_NOFILE, (most, most))
    run.wait_for_step(3)
    assert [line["node_id"] for line in run.journals("node_fit")] == ["node1"]
    assert run.journal(1, "preflight_finished")[-1]["fitness"]["number"] > 1
    run.finish()


def test_ftrun_check_reports_by_its_exit_code() -> None:
    command = f"ulimit -n 200; exec {shlex.quote(sys.executable)} -m ftrun preflight"
    done = subprocess.run(
        ["bash", "-c", command], env=environment(), capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 1, done.stderr
    assert "NOT FIT: 200 open files are allowed" in done.stdout
    done = subprocess.run(
        [sys.executable, "-m", "ftrun", "preflight", "--json"],
        env=environment({"FTRUN_PREFLIGHT_MIN_MEMORY_GB_S": "0"}),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    found = json.loads(done.stdout)
    assert done.returncode == (0 if found["outcome"] != "fail" else 1)
    assert found["figures"]["free_memory_bytes"] > 0
