"""Nodes become unresponsive, and an etcd breaks the tie; it dies, is cut off and returns as well.

Real agents, ranks and networks on a virtual cluster, and a real etcd in a node of its own.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from bench_common import ROOT, Deadline
from drill_nodes import STEPS, BaselineRuns, job_argv
from etcd_server import Certificates, EtcdServer
from etcd_server import available as etcd_available
from nodes_run import NodesRun, environment
from virtual_cluster import VirtualCluster, available

from ftrun.tools.drill.jobs import DrillJob, difference, outcome_of

if reason := available():
    pytest.skip(f"needs namespaces: {reason}", allow_module_level=True)
if reason := etcd_available():
    pytest.skip(f"needs etcd: {reason}", allow_module_level=True)

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(900)]

WAIT_S = 600.0
SHORT = ("--set", "nodes.last_call_timeout_s=5")
"""Time for which a run that may begin with one node waits for the other one, and after which
voters change."""
PATIENT = ("--set", "nodes.failure_timeout_s=12", "--set", "nodes.self_fencing_timeout_s=10")
"""For a run that must not restart: an agent without a processor for 3 s counts as lost, and two
nodes without their etcd have no majority that could continue without it."""


class Cluster:
    """Some nodes for a run, and one more for its etcd."""

    def __init__(self, folder: Path, num_nodes: int, *, tls: bool = False) -> None:
        self.nodes = VirtualCluster(num_nodes + 1)
        self.nodes.up()
        self.at = num_nodes
        run = partial(self.nodes.run, num_nodes)
        host = self.nodes.address(num_nodes)
        certificates = Certificates(folder / "certificates") if tls else None
        self.etcd = EtcdServer(folder, host=host, port=2379, run=run, tls=certificates)
        self.files = ""
        if certificates is not None:
            cert, key = certificates.of("node")
            self.files = f"cacert={certificates.ca},cert={cert},key={key}"
        self.folder = folder

    def run(
        self, members: int, *flags: object, spares: int = 0, words: Sequence[object] = ()
    ) -> NodesRun:
        worker = ROOT / "scripts" / "bench_recovery_worker.py"
        words = words or [worker, "--folder", self.folder, "--state-mb", 1]
        meet = ("--rdzv-backend", "etcd", "--rdzv-endpoint", self.etcd.endpoint)
        tls = ("--rdzv-conf", self.files) if self.files else ()
        flags = (*meet, *tls, *flags)
        deadline = Deadline(WAIT_S)
        return NodesRun(
            self.nodes, self.folder, words, deadline, members=members, spares=spares, flags=flags
        )


Make = Callable[..., Cluster]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Cluster] = []

    def one(num_nodes: int, *, tls: bool = False) -> Cluster:
        made.append(cluster := Cluster(tmp_path, num_nodes, tls=tls))
        cluster.etcd.start()
        return cluster

    yield one
    for cluster in made:
        cluster.nodes.down()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> BaselineRuns:
    return BaselineRuns(tmp_path_factory.mktemp("undisturbed"))


def one_or_two(make: Make, *flags: str, tls: bool = False) -> tuple[Cluster, NodesRun]:
    """Two nodes have begun, and may continue as one."""
    cluster = make(2, tls=tls)
    run = cluster.run(2, "--nnodes", "1:2", *SHORT, *flags)
    run.start_all()
    run.wait_for_step(10)
    return cluster, run


def two_and_spares(make: Make, spares: int) -> tuple[Cluster, NodesRun]:
    """Two nodes have begun a training whose result is known, with this number of spares."""
    cluster = make(2 + spares)
    run = cluster.run(2, spares=spares, words=job_argv("ddp", cluster.folder))
    run.start_all()
    run.wait_for_step(30)
    return cluster, run


def check(run: NodesRun, undisturbed: BaselineRuns, members: int) -> None:
    """The run continues; every loss and parameter is that of an undisturbed run of torchrun."""
    run.wait_for_generation(1)
    run.wait_for_more_steps(15)
    run.finish()
    names = tuple(f"rank{rank}.jsonl" for rank in range(members))
    job = DrillJob("ddp", tuple(job_argv("ddp", Path("FOLDER"))), names, STEPS)
    outcomes = [outcome_of(run.folder / name) for name in names]
    assert not difference(undisturbed.of(job, members), outcomes)


def status(run: NodesRun, node: int) -> str:
    """The output of `ftrun status` there."""
    words = [sys.executable, "-m", "ftrun", "status"]
    asks = run.cluster.run(node, words, env=environment(), stdout=subprocess.PIPE, text=True)
    said, _ = asks.communicate(timeout=WAIT_S)
    return str(said)


def noted(run: NodesRun, kind: str, times: int = 1) -> Callable[[], bool]:
    return lambda: len(run.journals(kind)) >= times


def voter_revisions(run: NodesRun) -> list[str]:
    return [str(line["text"]) for line in run.journals("voters_changed")]


@pytest.mark.full  # tests/simulation/test_witness.py and tests/contract/test_etcd_register.py, too
def test_two_nodes_survive_a_dead_etcd_and_then_an_unresponsive_node(make: Make) -> None:
    cluster, run = one_or_two(make, *PATIENT)
    started = run.generation  # 1 if the other node came late
    assert not run.journals("two_voters_warning")

    cluster.nodes.reset(cluster.at)  # etcd is killed
    run.wait_for("the report of its loss", noted(run, "witness_unreachable"))
    run.wait_for("voters without it", lambda: voter_revisions(run)[-1:] == [_TWO])
    run.wait_for_more_steps(5)
    assert f"etcd is out of reach at {cluster.etcd.endpoint}: the connection" in status(run, 1)
    cluster.etcd.start()
    run.wait_for("the report of its return", noted(run, "witness_reachable"))
    run.wait_for("voters with it", lambda: voter_revisions(run)[-1] == _TWO_AND_IT)
    run.wait_for_more_steps(5)
    assert run.generation == started, [line["reason"] for line in run.journals("generation_chosen")]

    leader = run.leader()
    run.fault("kill", leader)  # its power is cut: it sends nothing
    run.wait_for("steps of one node alone", lambda: len(run.steps(0, started + 1)) > 5)
    assert (
        run.journals("generation_chosen")[-1]["text"]
        == f"generation {started + 1}: 1 nodes, 1 ranks"
    )


_TWO = "voters of the next generation: 2 nodes"
_TWO_AND_IT = "voters of the next generation: 2 nodes and the witness"


@pytest.mark.full
def test_half_of_four_nodes_continues_and_no_byte_differs(
    make: Make, undisturbed: BaselineRuns
) -> None:
    _, run = two_and_spares(make, 2)
    leader = run.leader()
    member = run.node_of(0) if run.node_of(0) != leader else run.node_of(1)
    others = [node for node in range(4) if node not in (leader, run.node_of(0), run.node_of(1))]
    run.fault("kill", leader if leader in (run.node_of(0), run.node_of(1)) else member)
    run.fault("kill", others[0])
    check(run, undisturbed, 2)


@pytest.mark.full
def test_leader_lost_together_with_etcd_is_followed_by_the_majority(
    make: Make, undisturbed: BaselineRuns
) -> None:
    cluster, run = two_and_spares(make, 1)
    cluster.nodes.kill(cluster.at)
    run.fault("kill", run.leader())
    check(run, undisturbed, 2)


@pytest.mark.full
def test_an_etcd_over_tls_breaks_the_tie_as_well(make: Make) -> None:
    _, run = one_or_two(make, tls=True)
    run.fault("kill", run.leader())
    run.wait_for("steps of one node alone", lambda: len(run.steps(0, 1)) > 5)


@pytest.mark.full
def test_a_lost_node_of_two_that_comes_back_costs_no_byte(
    make: Make, undisturbed: BaselineRuns
) -> None:
    """Without a spare and with a fixed number of nodes, the other one waits for it."""
    _, run = two_and_spares(make, 0)
    lost = run.leader()
    run.fault("kill", lost)
    run.wait_for("a pause of the other", lambda: run.journal(1 - lost, "run_paused"))
    run.bring_back(lost)
    check(run, undisturbed, 2)


@pytest.mark.full
def test_two_nodes_without_one_another_and_without_etcd_pause_until_it_is_back(make: Make) -> None:
    cluster, run = one_or_two(make)
    leader = run.leader()
    cluster.nodes.cut(cluster.at)
    run.fault("kill", 1 - leader)
    run.wait_for("a pause", noted(run, "run_paused"))
    assert "the witness" in run.journals("run_paused")[-1]["text"]
    assert not run.steps(0, 1)
    cluster.nodes.heal(cluster.at)
    run.wait_for("steps of one node alone", lambda: len(run.steps(0, 1)) > 5)
    run.bring_back(1 - leader)  # it has no state of the run, and finds it there
    run.wait_for("a step of both", lambda: run.first_steps(run.generation))


@pytest.mark.full
def test_of_two_ranks_that_do_not_receive_from_each_other_one_continues(make: Make) -> None:
    cluster, run = one_or_two(make)
    leader = run.leader()
    cluster.nodes.cut(0, peer=1)
    run.wait_for("a pause of the other", lambda: run.journal(1 - leader, "run_paused"))
    run.wait_for("steps of the leader alone", lambda: len(run.steps(0, 1)) > 5)
    assert run.leader() == leader
    cluster.nodes.heal(0, peer=1)
    run.wait_for("a step of both", lambda: run.first_steps(run.generation))
    numbers = [line["text"] for line in run.journals("generation_chosen")]
    assert len(numbers) == len(set(numbers))


@pytest.mark.full
def test_etcd_that_is_cut_off_and_frozen_costs_no_generation(make: Make) -> None:
    cluster, run = one_or_two(make)
    for times, (break_it, mend) in enumerate(
        [
            (cluster.nodes.cut, cluster.nodes.heal),
            (cluster.nodes.freeze, cluster.nodes.thaw),
        ],
        start=1,
    ):
        break_it(cluster.at)
        run.wait_for("the report of its loss", noted(run, "witness_unreachable", times))
        run.wait_for_more_steps(20)
        mend(cluster.at)
        run.wait_for("the report of its return", noted(run, "witness_reachable", times))
    assert run.generation == 0


@pytest.mark.full
def test_wrong_endpoint_is_reported_before_training_starts(make: Make) -> None:
    cluster = make(1)
    cluster.nodes.reset(cluster.at)
    run = cluster.run(2)
    run.start(0)
    assert run.wait_for_code(0) == 75
    assert f"no etcd answers within 10 s at {cluster.etcd.endpoint}" in run.text(0)
    assert "the connection is refused" in run.text(0)
    assert "Traceback" not in run.text(0)
