"""A rail is cut or slowed in the middle of a training, and the run continues over the other one.

Real agents, ranks and networks, on a virtual cluster with two rails and two leaf switches.
"""

import json
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bench_common import Deadline
from drill_nodes import STEPS, BaselineRuns, job_argv, steps_lost
from nodes_run import NodesRun
from virtual_cluster import VirtualCluster, available

from ftrun.tools.drill.jobs import DrillJob, difference, outcome_of

if reason := available():
    pytest.skip(f"needs namespaces: {reason}", allow_module_level=True)

pytestmark = [pytest.mark.chaos, pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(900)]

WAIT_S = 600.0
MEMBERS = 3
LONG = 400
"""Steps until a slow rail is distinguished from a slow moment."""

SCRIPT = """
import json, os, sys
from pathlib import Path
import torch, torch.distributed as dist
dist.init_process_group("gloo")
names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "MASTER_ADDR")
seen = {name: os.environ.get(name) for name in names}
Path(sys.argv[1], f"seen{dist.get_rank()}").write_text(json.dumps([os.uname().nodename, seen]))
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""

Start = Callable[..., NodesRun]


@pytest.fixture
def paths(tmp_path: Path) -> Iterator[Start]:
    """A run over two rails, not started yet."""
    clusters: list[VirtualCluster] = []
    secret = tmp_path / "secret"
    secret.write_bytes(secrets.token_bytes(32))
    secret.chmod(0o600)

    def make(mode: str, words: list[str], folder: Path = tmp_path) -> NodesRun:
        for before in clusters:
            before.down()
        clusters.append(cluster := VirtualCluster(MEMBERS, rails=2, leaves=2))
        cluster.up()
        flags = ["--secret-file", secret, "--network-plan", mode, "--set", "hang.action=report"]
        return NodesRun(cluster, folder, words, Deadline(WAIT_S), members=MEMBERS, flags=flags)

    yield make
    for cluster in clusters:
        cluster.down()


def rail_in_use(run: NodesRun) -> int:
    """The best rail of the newest plan, as the virtual cluster numbers them."""
    name = run.journals("network_plan")[-1]["rails"][0]
    return int(str(name).removeprefix("eth"))


def problems(run: NodesRun, folder: Path, steps: int = STEPS) -> str:
    """Differences from an undisturbed run."""
    names = tuple(f"rank{rank}.jsonl" for rank in range(MEMBERS))
    job = DrillJob("ddp", tuple(job_argv("ddp", Path("FOLDER"), steps=steps)), names, steps)
    expected = BaselineRuns(folder / "torchrun").of(job, MEMBERS)
    return difference(expected, [outcome_of(run.folder / name) for name in names])


def test_a_cut_rail_costs_one_generation(paths: Start, tmp_path: Path) -> None:
    run = paths("on", job_argv("ddp", tmp_path / "run", pace=3), tmp_path / "run")
    run.start_all()
    run.wait_for_step(30)
    rail = rail_in_use(run)
    run.cluster.cut(1, rail=rail)
    run.wait_for_generation(1)
    run.finish()
    named = [one for one in run.journals("path_finding") if one["finding"] == "dead"]
    assert named
    assert f"eth{rail}" in named[0]["text"]
    assert run.generation == 1
    # None if the blocks of the last snapshot are at the other nodes by the next boundary.
    assert steps_lost(run) <= 1
    assert not run.journals("node_lost")
    assert run.journals("network_plan")[-1]["rails"] == [f"eth{1 - rail}"]
    assert problems(run, tmp_path) == ""


@pytest.mark.full
def test_a_slowed_rail_is_left_at_a_boundary(paths: Start, tmp_path: Path) -> None:
    run = paths("on", job_argv("ddp", tmp_path, steps=LONG))
    run.start_all()
    run.wait_for_step(40)
    rail = rail_in_use(run)
    run.cluster.slow(1, "20mbit", rail=rail)
    run.wait_for_generation(1)
    run.finish()
    reason = run.journals("generation_chosen")[-1]["reason"]
    assert f"leaves rail eth{rail}" in reason or f"eth{rail}, " in reason
    assert (run.generation, steps_lost(run)) == (1, 0)
    assert f"eth{rail}" not in run.journals("network_plan")[-1]["rails"]
    assert problems(run, tmp_path, LONG) == ""


@pytest.mark.full
@pytest.mark.parametrize("mode", ["on", "report"])
def test_ranks_get_what_the_plan_reports_with_on_and_nothing_with_report(
    mode: str, paths: Start, tmp_path: Path
) -> None:
    (tmp_path / "job.py").write_text(SCRIPT)
    run = paths(mode, [str(tmp_path / "job.py"), str(tmp_path)])
    run.start_all()
    assert [run.wait_for_code(node) for node in range(MEMBERS)] == [0] * MEMBERS
    seen = [json.loads((tmp_path / f"seen{rank}").read_text()) for rank in range(MEMBERS)]
    plan = run.journals("network_plan")[-1]
    assert plan["is_applied"] == (mode == "on")
    names = ",".join(plan["rails"])
    if mode == "on":
        assert [node for node, _ in seen] == plan["order"]
        assert {one["GLOO_SOCKET_IFNAME"] for _, one in seen} == {names}
        assert {one["NCCL_SOCKET_IFNAME"] for _, one in seen} == {f"={names}"}
    else:
        assert [node for node, _ in seen] == [f"node{number}" for number in range(MEMBERS)]
        assert {one["GLOO_SOCKET_IFNAME"] for _, one in seen} == {None}
        assert {one["MASTER_ADDR"] for _, one in seen} == {run.cluster.address(0)}


@pytest.mark.full
def test_what_the_user_has_set_stays_untouched(paths: Start, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SCRIPT)
    run = paths("on", [str(tmp_path / "job.py"), str(tmp_path)])
    own = {"NCCL_IB_HCA": "mlx5_7", "GLOO_SOCKET_IFNAME": "eth1"}
    run.start_all(dict.fromkeys(range(MEMBERS), own))
    assert [run.wait_for_code(node) for node in range(MEMBERS)] == [0] * MEMBERS
    for rank in range(MEMBERS):
        _, seen = json.loads((tmp_path / f"seen{rank}").read_text())
        assert {name: seen[name] for name in own} == own
    assert any("GLOO_SOCKET_IFNAME=eth1" in one["text"] for one in run.journals("network_plan"))
