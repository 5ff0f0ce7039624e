"""The script waits until a snapshot is as safe as it requires; real ranks, kills and nodes."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench_common import Deadline
from nodes_run import NodesRun
from virtual_cluster import VirtualCluster, available

from tests.integration.conftest import Start, script, start

__all__ = ["script", "start"]

pytestmark = [pytest.mark.launch, pytest.mark.slow, pytest.mark.timeout(900)]

TRAIN = """
import os, signal, sys
import torch
import torch.distributed as dist
from torch import nn

import ftrun

dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters())
session = ftrun.attach(model, optimizer)


def show(what, call):
    try:
        found = call()
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    print(f"rank {rank} generation {session.generation} {what}: {found}\\n", end="", flush=True)


handle = None
show("before", lambda: session.wait("committed"))
for step in session.steps(6):
    if handle is not None and handle.step == step:
        for level in ("sealed", "committed", "protected", "persisted"):
            show(f"step {step} {level}", lambda: handle.wait(level, 60.0))
    if step == 3 and session.generation == 0 and rank == 1 and "die" in sys.argv:
        show("last", lambda: session.wait("committed", 60.0))
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    if step == 1:
        handle = session.snapshot()
        show("too early", lambda: handle.wait("sealed"))
dist.destroy_process_group()
"""


def test_a_wait_reaches_each_level_of_one_node_and_names_what_it_lacks(
    start: Start, script: str, tmp_path: Path
) -> None:
    """Rank 1 is killed after its commit; the restored version is committed, and persisted again."""
    directory = tmp_path / "saved"
    words = ("--nproc-per-node", "2", "--checkpoint-dir", str(directory), "--snapshot-every", "1")
    run = start(*words, script(TRAIN), "die")
    assert run.wait() == 0, run.text
    for rank in (0, 1):
        assert f"rank {rank} generation 0 before: SnapshotError: wait('committed')" in run.text
        assert f"rank {rank} generation 0 too early: UsageError: wait('sealed')" in run.text
        for level in ("sealed", "committed", "persisted"):
            assert f"rank {rank} generation 0 step 2 {level}: True" in run.text
        lacks = r"step 2 protected: SnapshotError: .* all ranks are on one node"
        assert re.search(rf"rank {rank} generation 0 {lacks}", run.text)
        assert f"rank {rank} generation 1 before: True" in run.text
    assert "rank 1 generation 0 last: True" in run.text
    # The interval is 10 minutes: it was written because the ranks waited for it.
    assert [line["step"] for line in run.journal("checkpoint_written")] == [2, 6]


@pytest.mark.full
@pytest.mark.parametrize("point", ["smp.commit.seal_received:4", "smp.checkpoint.shard_written"])
def test_a_wait_outlasts_a_kill_of_the_smp(
    start: Start, script: str, tmp_path: Path, point: str
) -> None:
    crash = {"FTRUN_CRASH_AT": point, "FTRUN_CRASH_ONCE": str(tmp_path / "once")}
    directory = tmp_path / "saved"
    words = ("--nproc-per-node", "2", "--checkpoint-dir", str(directory), "--snapshot-every", "1")
    run = start(*words, script(TRAIN), env=crash)
    assert run.wait() == 0, run.text
    assert run.journal("smp_respawned"), "the SMP was not killed"
    for rank in (0, 1):
        for level in ("committed", "persisted"):
            assert f"rank {rank} generation 0 step 2 {level}: True" in run.text


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[NodesRun]:
    if reason := available():
        pytest.skip(f"needs namespaces: {reason}")
    cluster = VirtualCluster(2)
    cluster.up()
    (tmp_path / "train.py").write_text(TRAIN)
    flags = ("--checkpoint-dir", tmp_path / "saved")
    run = NodesRun(
        cluster, tmp_path, [tmp_path / "train.py"], Deadline(600.0), members=2, flags=flags
    )
    yield run
    cluster.down()


@pytest.mark.full  # unit tests have the announcements of the leader, and the waits for them
def test_a_version_on_two_nodes_is_protected_and_persisted(nodes: NodesRun) -> None:
    nodes.start_all()
    assert [nodes.wait_for_code(node) for node in (0, 1)] == [0, 0]
    for node in (0, 1):
        for level in ("sealed", "committed", "protected", "persisted"):
            assert re.search(rf"rank \d generation 0 step 2 {level}: True", nodes.text(node)), level
