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
