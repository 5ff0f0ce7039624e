"""Steps that are repeated after a kill are compared with the first execution; ftrun reports it."""

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.integration.conftest import Run, Start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
DEMO = Path(__file__).parents[2] / "scripts" / "demo"

TRAIN = """
import os, signal, sys, time
import torch, torch.distributed as dist, ftrun

kind, kills = sys.argv[1], [int(one) for one in sys.argv[2].split(",")]
rank, generation = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
torch.manual_seed(rank)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
if int(os.environ["WORLD_SIZE"]) > 1:
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
if kind == "bare":
    loop, report = range(20), lambda loss: None
else:
    session = ftrun.attach(model=model, optimizer=optimizer)
    loop, report = session.steps(20), lambda loss: session.report(loss=loss)
if kind == "unreported":
    report = lambda loss: None
running = 0.0
for step in loop:
    loss = model(torch.randn(4, 6)).square().mean()
    if kind == "hidden":
        running += 0.1  # a value that no snapshot has
        loss = loss * (1 + running)
    if kind == "urandom":
        loss = loss * (1 + os.urandom(1)[0] / 256)
    optimizer.zero_grad()
    loss.backward()
    if kind == "unreported" and generation == 1 and step == 15:
        session.snapshot()  # waits for its seal: nothing is repeated after the kill at step 16
    time.sleep(0.02)
    if rank == 0 and generation < len(kills) and step == kills[generation]:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    report(loss)
"""


def demo() -> ModuleType:
    """The program scripts/demo, which prints the failures of a run's journal."""
    loader = SourceFileLoader("demo", str(DEMO))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture
def train(start: Start, script: Callable[..., str]) -> Callable[..., Run]:
    """Train to the end, with a kill in each generation but the last."""

    def run(kind: str, kills: str, *, ranks: int = 1) -> Run:
        name = script(TRAIN)
        words = ("--nproc-per-node", str(ranks), "--snapshot-every", "5", name, kind, kills)
        found = start(*words, env={"OMP_NUM_THREADS": "1"})
        assert found.wait() == 0, found.text
        return found

    return run


def results(run: Run) -> list[Any]:
    return [line["result"] for line in run.journal("repeated_steps")]


@pytest.mark.full
def test_an_exact_repeat_is_reported_as_equal(train: Callable[..., Run]) -> None:
    run = train("exact", "13", ranks=2)
    lines = results(run)
    assert [line["outcome"] for line in lines] == ["equal"], lines
    count = lines[0]["repeated"]
    both = "losses and parameter samples bitwise equal"
    assert lines[0]["text"] == f"repeated {count} steps: {both}"
    assert lines[0]["compared"] == count
    assert "repeated steps differ" not in run.text
    ((generation, cause, lost_s),) = demo().failures(
        run.folder / "ftrun-logs" / run.run_id / "journal.jsonl"
    )
    assert (generation, cause) == (1, "rank 0 was killed")
    assert lost_s > 0
    made = subprocess.run(
        [sys.executable, "-m", "ftrun", "report", "last", "--run", run.run_id],
        cwd=run.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    pages = "".join(path.read_text() for path in run.folder.rglob("*.html"))
    assert f"repeated {count} steps: {both}" in pages, made


@pytest.mark.full
def test_without_losses_parameters_are_compared_and_without_a_repeat_nothing(
    train: Callable[..., Run],
) -> None:
    run = train("unreported", "13,16")
    first, second = results(run)
    count = first["repeated"]
    assert first["text"] == f"repeated {count} steps: parameter samples bitwise equal", first
    assert (second["outcome"], second["text"]) == (
        "not compared",
        "not compared: no step was repeated",
    )


def test_a_value_that_no_snapshot_has_is_found(start: Start, script: Callable[..., str]) -> None:
    name = script(TRAIN.replace("steps(20)", "steps(100000)"))
    run = start("--snapshot-every", "5", name, "hidden", "13,12", env={"OMP_NUM_THREADS": "1"})
    run.wait_until("compared twice", lambda: len(run.journal("repeated_steps")) == 2)
    first, second = results(run)
    restored: Any = run.journal("recovered")[0]["restored"]
    assert restored["step"] == int(str(first["step"])) - 1, (restored, first)
    assert (first["outcome"], first["what"], first["rank"]) == ("differs", "loss", 0), first
    assert str(first["text"]).startswith(
        "repeated steps differ from the first execution: "
        f"first at step {first['step']} in loss on rank 0"
    )
    assert str(first["text"]) in run.text
    assert second["outcome"] == "state lost", second

    document = run.status()
    shown = [restart["repeated"]["text"] for restart in document["restarts"]]  # type: ignore[attr-defined]
    assert shown == [first["text"], second["text"]]
    (warning,) = document["warnings"]  # type: ignore[misc]
    assert warning == f"after the restart to generation 2: {second['text']}"
    screen = subprocess.run(
        [sys.executable, "-m", "ftrun", "status", run.run_id],
        capture_output=True,
        text=True,
        env=run.variables,
        check=True,
    ).stdout
    assert screen.splitlines()[1] == f"WARNING     {warning}", screen
    assert f"    {first['text']}" in screen


@pytest.mark.full
def test_a_script_that_is_not_deterministic_is_named(train: Callable[..., Run]) -> None:
    run = train("urandom", "13,12")
    first, second = results(run)
    assert first["outcome"] == "differs", first
    assert second["outcome"] == "not deterministic", second
    assert "the script is not deterministic" in run.text


@pytest.mark.full
def test_a_script_that_attaches_nothing_is_not_compared(train: Callable[..., Run]) -> None:
    run = train("bare", "5")
    assert [line["text"] for line in results(run)] == ["not compared: nothing attached"], (
        json.dumps(run.journal("repeated_steps"))
    )
