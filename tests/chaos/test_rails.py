"""A rail is cut while another one works: no node counts as lost, and no step is repeated."""

import json
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bench_common import Deadline
from drill_nodes import job_argv
from nodes_run import NodesRun, environment
from virtual_cluster import VirtualCluster, available

if reason := available():
    pytest.skip(f"needs namespaces: {reason}", allow_module_level=True)

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(900)]

NODES = 3
MORE_STEPS = 40
HELD_S = 1.9
"""Ranks are suspended after 2 s."""
TRIES = 3
"""Number of attempts: the machine may pause for a second during a cut."""
TRAINED_OVER = {"GLOO_SOCKET_IFNAME": "eth1"}


Start = Callable[[], NodesRun]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Three nodes that train over eth1; agents and SMPs know each other by eth0."""
    clusters: list[VirtualCluster] = []

    def make() -> NodesRun:
        for before in clusters:
            before.down()
        folder = tmp_path / str(len(clusters))
        folder.mkdir()
        secret = folder / "secret"
        secret.touch(mode=0o600)
        secret.write_bytes(secrets.token_bytes(32))
        clusters.append(cluster := VirtualCluster(NODES, rails=2, shm="64m"))
        cluster.up()
        made = NodesRun(
            cluster,
            folder,
            job_argv("ddp", folder, pace=3, steps=300),
            Deadline(600),
            members=NODES,
            flags=["--secret-file", secret],
        )
        made.start_all(dict.fromkeys(range(NODES), TRAINED_OVER))
        made.wait_for_step(20)
        return made

    yield make
    for cluster in clusters:
        cluster.down()


def status(run: NodesRun, node: int) -> dict[str, Any]:
    done = run.cluster.run(
        node,
        [sys.executable, "-m", "ftrun", "status", "--json"],
        env=environment(),
        cwd=run.folder,
        stdout=subprocess.PIPE,
        text=True,
    )
    found: dict[str, Any] = json.loads(done.communicate(timeout=60)[0])
    return found


def steps_done(run: NodesRun) -> list[list[int]]:
    return [[line["step"] for line in run.steps(rank)] for rank in range(NODES)]


def check_undisturbed(run: NodesRun) -> None:
    """The run ends in its first generation, with every step done once."""
    run.finish()
    assert len(run.journals("generation_chosen")) == 1
    assert not run.journals("node_lost")
    assert not run.journals("leader_lost")
    assert not run.journals("ranks_suspended")
    for steps in steps_done(run):
        assert steps == list(range(len(steps)))


def other_rails(run: NodesRun, node: int) -> list[dict[str, Any]]:
    """Journal lines which report that this node, or a peer of it, uses another rail."""
    found = run.journals("connection_failed_over")
    return [line for line in found if f"node{node}" in (line["to"], line["node"])]


def protected_step(run: NodesRun) -> int:
    """The newest step that every node holds, with its part for the others."""
    nodes = status(run, 0)["cluster"]["nodes"]
    assert not any(node["unprotected_reason"] for node in nodes)
    return int(min(node["ready"][1] for node in nodes))


def cut_off(start: Start, node: int, cut: Callable[[NodesRun], int]) -> NodesRun:
    """A run in which another rail was found before ranks are suspended.

    Args:
        start: starts a run.
        node: the node that is cut off.
        cut: cuts it off; gives the time just before, in ns.
    """
    took_s: list[float] = []
    while len(took_s) < TRIES:
        run = start()
        at_ns = cut(run)
        run.wait_for("another rail", lambda run=run: other_rails(run, node))
        took_s.append(other_rails(run, node)[0]["monotonic_s"] - at_ns / 1e9)
        if took_s[-1] < HELD_S:
            return run
    pytest.fail(f"another rail is found after {took_s} s, and ranks are suspended after 2 s")


def check_continues(run: NodesRun) -> None:
    """No rank waited for a node that was cut off, and its memory is still protected."""
    cut_at = run.last_step()
    run.wait_for_more_steps(MORE_STEPS)
    run.wait_for("protected steps", lambda: protected_step(run) > cut_at + MORE_STEPS // 2)


def lose_one_way(run: NodesRun, node: int, other: int) -> None:
    """Drop the packets from this node to the other one over eth0, but not those in reverse."""
    nowhere = ["lladdr", "02:00:00:00:ff:ff", "dev", "eth0"]
    words = ["ip", "neigh", "replace", run.cluster.address(other), *nowhere]
    assert run.cluster.run(node, words).wait() == 0


@pytest.mark.full  # tests/simulation/test_other_rail.py cuts rails, too
def test_a_run_continues_where_the_rail_of_its_agents_is_cut(start: Start) -> None:
    run = cut_off(start, 1, lambda run: run.fault("cut", 1, rail=0))
    check_continues(run)
    run.fault("heal", 1, rail=0)
    run.wait_for_more_steps(MORE_STEPS)
    check_undisturbed(run)


@pytest.mark.full
def test_a_run_continues_where_the_rail_of_its_leader_is_cut(start: Start) -> None:
    run = cut_off(start, 0, lambda run: run.fault("cut", 0, rail=0))
    check_continues(run)
    assert other_rails(run, 1)
    assert other_rails(run, 2)
    check_undisturbed(run)


@pytest.mark.full
@pytest.mark.parametrize(("node", "other"), [(1, 0), (0, 1)])
def test_a_rail_that_is_cut_in_one_direction_is_left(start: Start, node: int, other: int) -> None:
    def cut(run: NodesRun) -> int:
        at_ns = time.monotonic_ns()
        lose_one_way(run, node, other)
        return at_ns

    run = cut_off(start, 1, cut)
    check_continues(run)
    check_undisturbed(run)


@pytest.mark.full
def test_a_node_whose_rails_are_all_cut_is_lost_as_usual(start: Start) -> None:
    run = start()
    at_ns = run.fault("cut", 1)
    run.wait_for("the loss", lambda: run.journals("node_lost"))
    (line,) = run.journals("node_lost")
    assert "node node1 is lost: no heartbeat for 3" in line["text"]
    assert 2.5 < line["monotonic_s"] - at_ns / 1e9 < 5.0
    run.fault("heal", 1)
    run.wait_for_generation(1)
    run.finish()
