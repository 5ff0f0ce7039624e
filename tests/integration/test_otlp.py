"""OpenTelemetry of real runs: the trace of a killed rank, and what happens without a collector."""

import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from tests.integration.conftest import Start
from tests.otlp_collector import collector

TRAIN = """
import os
import torch
import torch.distributed as dist
import ftrun

dist.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = ftrun.attach(model=model, optimizer=optimizer)
for step in session.steps(30):
    model.weight.grad = torch.ones(8, 8)
    dist.all_reduce(model.weight.grad)
    optimizer.step()
    if dist.get_rank() == 1 and step == 20 and session.generation == 0:
        os.kill(os.getpid(), 9)
dist.barrier()
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_killed_rank_is_one_trace_with_the_times_of_the_journal(
    start: Start, script: Callable[..., str]
) -> None:
    with collector() as server:
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": server.url, "NO_PROXY": "127.0.0.1"}
        run = start("--nproc-per-node", "2", script(TRAIN), env=variables)
        assert run.wait() == 0, run.text
    *phases, root = server.spans()
    assert [span["name"] for span in phases] == [
        "detect", "diagnose", "stop", "respawn", "restore", "first step",
    ]  # fmt: skip
    assert root["name"] == "incident crash"
    assert root["ftrun.culprits"] == [1]
    assert root["resource"]["ftrun.run_id"] == run.run_id
    assert {(span["trace"], span["parent"]) for span in phases} == {(root["trace"], root["id"])}
    for one, after in pairwise(phases):
        assert one["end_ns"] == after["start_ns"]
    (downtime,) = run.journal("downtime")
    assert seconds(phases[0]["start_ns"], phases[-1]["end_ns"]) == near(downtime["total_s"])
    assert seconds(phases[-1]["start_ns"], phases[-1]["end_ns"]) == near(downtime["first_step_s"])
    (closed,) = run.journal("incident_closed")
    assert root["end_ns"] / 1e9 == pytest.approx(closed["time"], abs=0.1)
    metrics = server.metrics()
    (point,) = metrics["ftrun_restarts"]["sum"]["dataPoints"]
    assert point["asDouble"] == 1
    points = metrics["ftrun_recovery_seconds"]["histogram"]["dataPoints"]
    assert {one["attributes"][0]["value"]["stringValue"] for one in points} >= {"total", "restart"}
    assert run.journal("hook_failed") == []


def seconds(start_ns: int, end_ns: int) -> float:
    return (end_ns - start_ns) / 1e9


def near(value: object) -> Any:
    return pytest.approx(value, abs=0.002)


HIDE = "import sys\nsys.modules['opentelemetry'] = None\n"


@pytest.mark.full
def test_without_the_library_a_setting_refuses_and_a_variable_warns(
    start: Start, script: Callable[..., str], tmp_path: Any
) -> None:
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "sitecustomize.py").write_text(HIDE)
    name = script("print('trained')")
    folders = [str(tmp_path / "without"), *(folder for folder in sys.path if folder)]
    variables = {"PYTHONPATH": ":".join(folders)}
    refused = start("--set", "otel.endpoint=http://127.0.0.1:9", name, env=variables)
    assert refused.wait() == 2
    assert "pip install 'ftrun[otel]'" in refused.text
    assert "trained" not in refused.text
    variables["OTEL_EXPORTER_OTLP_ENDPOINT"] = "http://127.0.0.1:9"
    warned = start(name, env=variables)
    assert warned.wait() == 0, warned.text
    (failed,) = warned.journal("hook_failed")
    assert failed["reason"] == "opentelemetry is not installed: pip install 'ftrun[otel]'"
    assert "OpenTelemetry (start) failed: opentelemetry is not installed" in warned.text
