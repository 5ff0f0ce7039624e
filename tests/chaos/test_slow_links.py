"""A slow cell, row or column of the delay matrix is named on four nodes that all exchange data."""

import time
from pathlib import Path
from typing import Any

import pytest
from bench_common import ROOT, Deadline
from nodes_run import NodesRun
from virtual_cluster import VirtualCluster, available

if reason := available():
    pytest.skip(f"needs namespaces: {reason}", allow_module_level=True)

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = f"""
import os, sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT / "scripts")!r})
import torch
import torch.distributed as dist
from bench_notes import Notes
import ftrun

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
notes = Notes(folder / f"rank{{dist.get_rank()}}.jsonl")
notes.write_begun(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = ftrun.attach(model=model, optimizer=optimizer)
size = dist.get_world_size()
data, found, end = torch.ones(size << 19), torch.empty(size << 19), torch.zeros(1)
for step in session.steps(1 << 30):
    dist.all_to_all_single(found, data)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    notes.write("step", step=step, generation=0)
    time.sleep(0.15)
    end.fill_((folder / "go").exists())
    dist.all_reduce(end)
    if end.item():
        break
"""
NODES, RATE, SLOW = 4, "1gbit", "40mbit"
PAST_S = 16.0
"""Ten samples of each link, one a second; some take longer on a busy machine."""
PLACES: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "cell": ({"peer": 2}, "the link from node node1 to node node2", ["node1", "node2"]),
    "row": ({"way": "sends"}, "what node node1 sends", ["node1"]),
    "column": ({"way": "receives"}, "what node node1 receives", ["node1"]),
}


@pytest.mark.parametrize("place", [pytest.param(one, marks=pytest.mark.full) for one in PLACES])
def test_the_place_is_named_and_no_other(tmp_path: Path, place: str) -> None:
    how, where, nodes = PLACES[place]
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with VirtualCluster(NODES, rail_rate=RATE) as cluster:
        run = NodesRun(cluster, tmp_path, [script, tmp_path], Deadline(300), members=NODES)
        run.start_all()
        run.wait_for_step(5)
        due_s = time.monotonic() + PAST_S
        run.wait_for("a past of each link", lambda: time.monotonic() > due_s)
        cluster.slow(1, SLOW, **how)
        run.wait_for("a verdict", lambda: run.journals("verdict"))
        named = run.journals("verdict")
        cluster.slow(1, "off", **how)
        run.finish()
    for one in named:
        verdict = one["verdict"]
        assert verdict["kind"] == "slow communication", verdict
        assert verdict["text"].startswith(f"{where} is slow: "), verdict
        assert (verdict["nodes"], verdict["culprits"]) == (nodes, [])
