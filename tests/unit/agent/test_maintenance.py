"""When the zygote imports the compiler that ranks use."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from made_settings import node

from ftrun.agent.launch.warm_start import WorkerStarter
from ftrun.agent.launch.zygote_client import ZygoteClient
from ftrun.agent.maintenance import Maintenance
from ftrun.config.cluster import ClusterSize, NodesSpec
from ftrun.config.profile import Profile, RestartConfig
from ftrun.config.run_spec import RunSpec
from ftrun.journal import Journal
from ftrun.wire.messages.agent_start import ZygoteSettings
from ftrun.wire.shared_memory.pages import HeartbeatField, SharedPage, create_page

NODES = node(ClusterSize(1, 2, 0))


@pytest.mark.parametrize(("max_restarts", "budget", "nodes", "start", "imports"), [
    (None, 5, None, "warm", True),
    (None, 5, None, "stayed", True),
    (None, 5, None, "fresh", False),
    (None, 0, None, "warm", False),
    (0, 5, None, "warm", False),
    (3, 0, None, "warm", True),
    (0, 0, NODES, "warm", True),  # a node may join or leave
])  # fmt: skip
def test_the_zygote_imports_the_compiler_only_if_later_ranks_are_forked_from_it(
    max_restarts: int | None,
    budget: int,
    nodes: NodesSpec | None,
    start: str,
    imports: bool,
    tmp_path: Path,
) -> None:
    spec = RunSpec(
        run_id="r", script="s", torchrun_argv=[], log_folder=".", cwd=".", nodes=nodes,
        max_restarts=max_restarts, profile=Profile(restart=RestartConfig(budget=budget)),
    )  # fmt: skip
    journal = Journal(tmp_path)
    zygote = ZygoteClient(ZygoteSettings("/here", [], [], []), journal)
    page_fd = create_page("rank-0")
    page = SharedPage(page_fd)
    page.set(HeartbeatField.COMPILES, 1)
    workers = SimpleNamespace(
        pages=[page], starter=WorkerStarter(zygote, journal), handles=[SimpleNamespace(start=start)]
    )
    made = Maintenance(cast("Any", SimpleNamespace(spec=spec, workers=workers)))
    made._prepare_standbys()
    assert zygote._tasks == [], "the first step is not over"
    page.set(HeartbeatField.FIRST_STEP_NS, 1)
    made._prepare_standbys()
    made._prepare_standbys()
    assert zygote._tasks == (["compiler"] if imports else [])
    os.close(page_fd)
