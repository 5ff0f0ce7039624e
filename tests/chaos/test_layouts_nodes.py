"""A training on plain tensors loses a node of several and continues in another layout, bitwise.

The parts that a rank needs are on other nodes, or only in parity. Code that does not use the rules
(tensor_parallel_training.py) joins the parts of the ranks and compares them step by step.
"""

from pathlib import Path

import pytest
from bench_common import Deadline
from nodes_run import NodesRun
from virtual_cluster import VirtualCluster, available

from tests.integration.documented import rule_file

if reason := available():
    pytest.skip(f"needs namespaces: {reason}", allow_module_level=True)

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).parents[1] / "integration" / "scripts" / "tensor_parallel_training.py"
RULES = "tensor-parallel.yaml"
STEPS = 200


def run_of(
    cluster: VirtualCluster, folder: Path, sizes: str, *flags: object, members: int, spares: int = 0
) -> NodesRun:
    """A training with the tensor-parallel size of each generation."""
    (folder / RULES).write_text(rule_file(RULES))
    words = [SCRIPT, sizes, STEPS, RULES, "noted"]
    run = NodesRun(
        cluster, folder, words, Deadline(600), members=members, spares=spares, flags=flags
    )
    run.start_all()
    run.wait_for_step(8)
    return run


def check(run: NodesRun, sizes: list[int]) -> None:
    """Each generation has begun with the ranks' state after that step in the one before.

    Args:
        run: it is over.
        sizes: tensor-parallel, by generation.
    """
    lines = run.readers[0].read()
    for generation, size in enumerate(sizes):
        own = [line for line in lines if line["generation"] == generation]
        assert {line["size"] for line in own} == {size}
        if not generation:
            continue
        started = next(line for line in own if line["kind"] == "begun")
        before = {
            line["digest"]
            for line in lines
            if line["generation"] < generation
            and line["kind"] == "step"
            and line["step"] == started["step"]
        }
        assert started["step"] >= 6
        assert before == {started["digest"]}, f"generation {generation}, step {started['step']}"
    ends = {reader.of("end")[-1]["digest"] for reader in run.readers}
    assert len(ends) == 1
    assert run.readers[0].of("end")[-1]["step"] == STEPS


def test_as_many_ranks_of_another_layout_after_a_node_is_lost(tmp_path: Path) -> None:
    """Two nodes with two ranks each; a spare takes the place of a lost one."""
    with VirtualCluster(3) as cluster:
        flags = ("--nproc-per-node", 2)
        run = run_of(cluster, tmp_path, "2,4,1", *flags, members=2, spares=1)
        run.fault("kill", run.node_of(1))
        run.wait_for_generation(1)
        run.wait_for_more_steps(3)
        run.signal(run.node_of(0), "rank")
        run.wait_for_generation(2)
        run.finish()
        check(run, [2, 4, 1])


@pytest.mark.parametrize("sizes", ["all", "3,1,3"])
def test_another_number_of_ranks_in_another_layout(tmp_path: Path, sizes: str) -> None:
    """Three nodes, a rank on each: one is lost, and comes back."""
    with VirtualCluster(3) as cluster:
        flags = ("--nnodes", "1:3", "--set", "nodes.last_call_timeout_s=1")
        run = run_of(cluster, tmp_path, sizes, *flags, members=3)
        run.fault("reset", 1)
        run.wait_for("a step of two nodes", lambda: run.steps(0, 1))
        run.bring_back(1)
        run.wait_for("a step of all three", lambda: run.first_steps(2))
        run.finish()
        check(run, [3, 2 if sizes == "all" else 1, 3])
