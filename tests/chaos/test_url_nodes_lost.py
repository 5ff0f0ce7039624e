"""Every node loses power, and the next run resumes from the checkpoint at a URL."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench_common import ROOT, Deadline
from drill_nodes import STEPS, job_argv
from nodes_run import NodesRun
from virtual_cluster import VirtualCluster, available

from ftrun.tools.drill.jobs import BaselineRuns, DrillJob, difference, outcome_of
from tests.ftp_server import url_of

if reason := available():
    pytest.skip(f"needs namespaces: {reason}", allow_module_level=True)

pytestmark = [pytest.mark.chaos, pytest.mark.full, pytest.mark.timeout(900)]

MEMBERS, STORE, PORT = 2, 2, 2121


@pytest.fixture
def cluster() -> Iterator[VirtualCluster]:
    """Two nodes that train, and one for an FTP server."""
    with VirtualCluster(MEMBERS + 1) as found:
        yield found


@pytest.fixture
def store(cluster: VirtualCluster, tmp_path: Path) -> Iterator[str]:
    """The URL of its FTP server; the last process of its node ends before the node does."""
    host = cluster.address(STORE)
    words = [sys.executable, "-m", "tests.ftp_server", str(tmp_path / "store"), host, str(PORT)]
    server = cluster.run(STORE, words, cwd=ROOT)
    yield url_of(host, PORT)
    server.kill()
    server.wait(20)


def written(run: NodesRun) -> list[dict[str, Any]]:
    return run.journals("checkpoint_written")


def test_all_nodes_lost_at_once_cost_what_came_after_the_last_checkpoint(
    cluster: VirtualCluster, store: str, tmp_path: Path
) -> None:
    names = tuple(f"rank{rank}.jsonl" for rank in range(MEMBERS))
    job = DrillJob("fsdp2", tuple(job_argv("fsdp2", Path("FOLDER"))), names, STEPS)
    expected = BaselineRuns(tmp_path / "undisturbed").of(job, MEMBERS)
    folder = tmp_path / "run"
    run = NodesRun(
        cluster,
        folder,
        job_argv("fsdp2", folder),
        Deadline(600),
        members=MEMBERS,
        flags=("--checkpoint-dir", store, "--checkpoint-every", 0.5),
    )
    run.start_all()
    run.wait_for("two checkpoints", lambda: len(written(run)) >= 2)
    for node in range(MEMBERS):
        run.fault("kill", node)
        run.may_end(node)
    saved_at = max(line["step"] for line in written(run))
    for node in range(MEMBERS):
        cluster.revive(node)
        run.start(node)
    started = [reader.of("attached") for reader in run.readers]
    run.wait_for(
        "a second beginning",
        lambda: all(len(reader.of("attached")) > len(one)
                    for reader, one in zip(run.readers, started, strict=True)),
    )  # fmt: skip
    (began_at,) = {reader.of("attached")[-1]["step"] for reader in run.readers}
    assert began_at >= saved_at  # one more, if power was cut before it was recorded
    run.finish()
    outcomes = [outcome_of(folder / name) for name in names]
    assert not difference(expected, outcomes)
