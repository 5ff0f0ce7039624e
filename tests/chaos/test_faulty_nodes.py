"""Ranks that fail at every start on one node: a spare runs them, and the result is the same."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from bench_common import Deadline
from drill_nodes import STEPS, BaselineRuns, job_argv
from nodes_run import NodesRun
from virtual_cluster import VirtualCluster, available

from ftrun.errors import ExitCode
from ftrun.tools.drill.jobs import DrillJob, difference, outcome_of
from tests.chaos.test_own_deaths import ON_A_DEVICE
from tests.fake_nvml.fake import STATE, FakeGpus, folder

if reason := available():
    pytest.skip(f"needs namespaces: {reason}", allow_module_level=True)

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPT = """
import os, runpy, sys
from pathlib import Path
from torch.optim.optimizer import register_optimizer_step_pre_hook

broken = Path(sys.argv[1])

def fail(*_):
    names = broken.read_text().split() if broken.exists() else []
    if os.environ["NODE"] in names or os.environ["RANK"] in names:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

register_optimizer_step_pre_hook(fail)
sys.argv = sys.argv[2:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[NodesRun]:
    """Two members and a spare; the script raises on the nodes and ranks that a file names."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    words = [script, tmp_path / "broken", *job_argv("ddp", tmp_path)]
    with VirtualCluster(3) as cluster:
        made = NodesRun(cluster, tmp_path, words, Deadline(600), members=2, spares=1)
        made.start_all({node: {"NODE": f"node{node}"} for node in range(3)})
        made.wait_for_step(10)
        yield made


@pytest.mark.full  # tests/simulation/test_faulty_nodes.py has the same on simulated nodes
def test_the_spare_runs_the_ranks_of_a_node_on_which_they_fail(
    run: NodesRun, tmp_path: Path
) -> None:
    names = [f"rank{rank}.jsonl" for rank in range(2)]
    job = DrillJob("ddp", tuple(job_argv("ddp", Path("FOLDER"))), tuple(names), STEPS)
    expected = BaselineRuns(tmp_path / "undisturbed").of(job, 2)
    node = run.node_of(1)
    (tmp_path / "broken").write_text(f"node{node}")
    reason = (
        f"node node{node} is excluded: the same failure occurred on it 2 times without progress"
    )
    # The last step before the first failure may be reported only after it: this is progress.
    reasons = lambda: [one["reason"] for one in run.journals("generation_chosen")]  # noqa: E731
    run.wait_for("the exclusion", lambda: reason in reasons())
    asked = run.node_of(0)
    (excluded,) = run.status(asked)["cluster"]["exclusions"]
    assert excluded["node_id"] == f"node{node}"
    assert 3500 < excluded["left_s"] < 3600
    assert "the same failure occurred on it 2 times" in excluded["reason"]
    run.ask(run.leader(), "readmit", f"node{node}")
    run.wait_for("the readmission", lambda: run.journals("node_readmitted"))
    run.wait_for("a new check", lambda: not run.status(asked)["cluster"]["unfit"])
    assert not run.status(asked)["cluster"]["exclusions"]
    run.finish()
    assert reasons().count(reason) == 1
    assert run.node_of(1) != node
    assert set(run.codes().values()) == {0}
    assert not difference(expected, [outcome_of(tmp_path / name) for name in names])


@pytest.mark.full
def test_a_failure_that_follows_its_rank_ends_the_run_and_names_both_nodes(
    run: NodesRun, tmp_path: Path
) -> None:
    node = run.node_of(1)
    (tmp_path / "broken").write_text("1")
    run.may_end(0, 1, 2)
    codes = {run.wait_for_code(one) for one in range(3)}
    assert codes == {int(ExitCode.DO_NOT_RESTART)}
    text = run.text(0)
    assert f"rank 1 has failed by it on node node{node}, and on node" in text


SLOW_SCRIPT = SCRIPT.replace(
    """    if os.environ["NODE"] in names or os.environ["RANK"] in names:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
""",
    """    if os.environ["NODE"] in names:
        time.sleep(0.15)
""",
).replace("import os,", "import time, os,")


@pytest.mark.full  # a unit test decides about simulated lateness
def test_by_default_a_spare_takes_the_place_of_a_slow_node(tmp_path: Path) -> None:
    names = [f"rank{rank}.jsonl" for rank in range(2)]
    steps = 1500
    words = tuple(job_argv("ddp", Path("FOLDER"), steps=steps))
    expected = BaselineRuns(tmp_path / "undisturbed").of(
        DrillJob("ddp", words, tuple(names), steps), 2
    )
    script, slow = tmp_path / "train.py", tmp_path / "slow"
    script.write_text(SLOW_SCRIPT)
    with VirtualCluster(3) as cluster:
        job = [script, slow, *job_argv("ddp", tmp_path, steps=steps)]
        flags = ("--set", "slow.evict_after_s=3")
        made = NodesRun(cluster, tmp_path, job, Deadline(400), members=2, spares=1, flags=flags)
        made.start_all({node: {"NODE": f"node{node}"} for node in range(3)})
        made.wait_for_step(150)
        node = made.node_of(1)
        slow.write_text(f"node{node}")
        made.wait_for("the eviction", lambda: made.node_of(1) != node)
        acted = [one for one in made.journals("action_taken") if one["action"] == "evict"]
        assert acted[-1]["text"].startswith(f"node node{node} is evicted: rank 1 is slow: ")
        (excluded,) = made.status(made.node_of(0))["cluster"]["exclusions"]
        assert excluded["node_id"] == f"node{node}"
        made.finish()
    assert not difference(expected, [outcome_of(tmp_path / name) for name in names])


@pytest.mark.full  # tests/unit/recovery/test_past.py decides without processes
def test_a_node_that_was_repaired_after_a_hardware_fault_is_readmitted(tmp_path: Path) -> None:
    gpus = FakeGpus(tmp_path / "gpus", 1)
    env = {STATE: str(tmp_path / "gpus"), "LD_LIBRARY_PATH": str(folder())}
    script = tmp_path / "train.py"
    script.write_text(ON_A_DEVICE)
    with VirtualCluster(3) as cluster:
        made = NodesRun(cluster, tmp_path, [script], Deadline(400), members=2, spares=1)
        made.start_all({1: env})
        made.wait_for("a start", lambda: made.journals("generation_started"))
        made.wait_for("a commit", lambda: made.status(0)["cluster"]["committed_version"])
        gpus.need_action(0, 1)
        made.wait_for("the exclusion", lambda: made.status(0)["cluster"]["exclusions"])
        (excluded,) = made.status(0)["cluster"]["exclusions"]
        assert (excluded["node_id"], excluded["left_s"]) == ("node1", None)
        assert "GPU 0 needs a reset" in excluded["reason"]
        made.fault("reset", 1)
        gpus.need_action(0, 0)
        made.start(1, env)
        made.wait_for("the readmission", lambda: made.journals("node_readmitted"))
        (line,) = made.journals("node_readmitted")
        assert line["text"].startswith("node node1 is readmitted: ftrun was started on it")
        made.wait_for("a check", lambda: not made.status(0)["cluster"]["unfit"])
        assert not made.status(0)["cluster"]["exclusions"]
