"""SIGTERM to one node drains it, to all nodes stops the run; an agent that comes too late ends."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench_common import Deadline
from drill_faults import FAULTS
from drill_nodes import BaselineRuns, drill, job_argv, steps_lost
from nodes_run import RUN_ID, NodesRun, environment
from virtual_cluster import VirtualCluster, available

from ftrun.membership.leader.pausing import GONE_S

if reason := available():
    pytest.skip(f"needs namespaces: {reason}", allow_module_level=True)

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(900)]

STUB = "cli.stub"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[NodesRun]:
    """Two members and a spare, not started yet, with a directory for checkpoints."""
    cluster = VirtualCluster(3)
    cluster.up()
    flags = ["--checkpoint-dir", tmp_path / "checkpoints"]
    words = job_argv("ddp", tmp_path)
    yield NodesRun(cluster, tmp_path, words, Deadline(600), members=2, spares=1, flags=flags)
    cluster.down()


@pytest.mark.full
def test_a_leader_that_is_drained_leaves_and_another_one_leads(tmp_path: Path) -> None:
    row = drill(FAULTS["lead-drained"], "fsdp2", tmp_path, BaselineRuns(tmp_path))
    assert row.equal, row.problem
    assert row.steps_lost == 0


@pytest.mark.full
def test_drain_all_replaces_each_node_once_and_costs_no_step(tmp_path: Path) -> None:
    """Each node that has left is started again, and is the spare for the next one."""
    with VirtualCluster(3) as cluster:
        words = job_argv("ddp", tmp_path, steps=2400)
        run = NodesRun(cluster, tmp_path, words, Deadline(600), members=2, spares=1)
        drain_all(run)


def drain_all(run: NodesRun) -> None:
    run.start_all()
    run.wait_for_step(20)
    run.may_end(0, 1, 2)
    words = [sys.executable, "-m", "ftrun", "drain", "--all", RUN_ID]
    with (run.folder / "drain.output").open("wb") as file:
        draining = run.cluster.run(
            run.leader(), words, env=environment(), cwd=run.folder, stdout=file, stderr=file
        )
    left: list[int] = []
    while draining.poll() is None:
        for node in set(run.processes) - set(left):
            if run.processes[node].poll() is not None:
                assert run.processes[node].returncode == 143, run.text(node)
                left.append(node)
                run.start(node)
        time.sleep(0.05)
    output = (run.folder / "drain.output").read_text()
    assert draining.returncode == 0, output
    assert "[##] 2/2" in output, output
    assert len(left) >= 2
    run.finish()
    assert steps_lost(run) == 0
    assert set(run.codes().values()) == {0}


@pytest.mark.full
def test_drain_is_refused_without_a_free_spare(run: NodesRun) -> None:
    run.start(0)
    run.start(1)
    run.wait_for_step(20)
    words = [sys.executable, "-m", "ftrun", "drain", "node1", RUN_ID]
    asked = run.cluster.run(
        run.leader(), words, env=environment(), cwd=run.folder,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    output, _ = asked.communicate(timeout=60)
    assert asked.returncode
    assert "no spare is free to take the ranks of node1" in output.decode()
    run.finish()


@pytest.mark.full
def test_sigterm_to_all_nodes_stops_the_run_with_its_last_step_on_disk(run: NodesRun) -> None:
    run.start_all()
    run.wait_for_step(20)
    run.may_end(0, 1, 2)
    for node in range(3):
        run.signal(node, STUB, signal.SIGTERM)
    assert [run.wait_for_code(node) for node in range(3)] == [143] * 3
    assert not run.journals("nodes_draining")
    latest = (run.folder / "checkpoints" / "latest").resolve().name
    assert int(latest.split("-")[1]) >= run.last_step()


@pytest.mark.full
def test_the_others_are_asked_while_one_leaves(run: NodesRun) -> None:
    run.start_all()
    run.wait_for_step(20)
    run.may_end(0, 1, 2)
    run.signal(1, STUB, signal.SIGTERM)
    run.wait_for("the decision", lambda: run.journals("nodes_draining"))
    for node in (0, 2):
        run.signal(node, STUB, signal.SIGTERM)
    assert [run.wait_for_code(node) for node in range(3)] == [143] * 3
    latest = (run.folder / "checkpoints" / "latest").resolve().name
    assert int(latest.split("-")[1]) >= run.last_step()


@pytest.mark.full
def test_an_agent_that_comes_back_to_an_ended_run_ends_too(run: NodesRun) -> None:
    run.start_all()
    run.wait_for_step(10)
    run.may_end(2)
    run.signal(2, STUB, signal.SIGSTOP)
    run.signal(2, "agent")
    run.finish()
    assert {node: code for node, code in run.codes().items() if node != 2} == {0: 0, 1: 0}
    run.signal(2, STUB, signal.SIGCONT)
    started_s = time.monotonic()
    assert run.wait_for_code(2) == 75
    assert time.monotonic() - started_s < GONE_S + 30.0
    assert "no other node of this run is left" in run.text(2)


@pytest.mark.full  # simulated runs cut nodes off at the end, too
def test_a_node_that_was_cut_off_while_the_others_finished_ends_with_their_result(
    tmp_path: Path,
) -> None:
    """It finds no leader, and reads the record of the run next to the checkpoints."""
    with VirtualCluster(3) as cluster:
        flags = ["--checkpoint-dir", tmp_path / "checkpoints"]
        words = job_argv("ddp", tmp_path)
        run = NodesRun(cluster, tmp_path, words, Deadline(600), members=1, spares=2, flags=flags)
        run.start_all()
        run.wait_for_step(5)
        run.may_end(2)
        run.fault("cut", 2)
        run.wait_for("the loss to be seen", lambda: run.journals("node_lost"))
        run.finish()
        assert [run.codes()[node] for node in (0, 1)] == [0, 0]
        cluster.heal(2)
        ended_s = time.monotonic()
        assert run.wait_for_code(2) == 0, run.text(2)
        assert time.monotonic() - ended_s < GONE_S / 2
        assert " finished at " in run.text(2)
