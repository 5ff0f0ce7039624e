"""What a restart would wait for is done before it: functions of --prepare, compiler imports."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.conftest import Run, Start, is_gone

pytestmark = [pytest.mark.launch, pytest.mark.slow, pytest.mark.timeout(900)]

Script = Callable[..., str]

DATA = """
import os, random, threading, time

SECONDS = 1.0

def load():
    time.sleep(SECONDS)
    random.random()
    return {"called in": os.getpid()}

def starts_a_thread():
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    return load()

def opens_a_file():
    return [load(), open(__file__)]

def fails():
    raise ValueError("there is no data")

def dies():
    os.kill(os.getpid(), 9)
"""

TRAIN = """
import os, random, sys, time
import torch, torch.distributed as dist
import data, ftrun

dist.init_process_group("gloo")
random.seed(7)
begun_s = time.monotonic()
ftrun.prepared(getattr(data, sys.argv[1]))
line = f"{time.monotonic() - begun_s:.4f} s, then draws {random.random()}"
print(f"rank {dist.get_rank()} of {os.environ['FTRUN_GENERATION']} waits {line}\\n", end="")
model = torch.nn.Linear(4, 4)
session = ftrun.attach(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
for step in session.steps(1_000_000):
    dist.barrier()
    if os.path.exists("stop"):
        break
    time.sleep(0.01)
"""
LINE = re.compile(r"rank (\d) of (\d) waits ([\d.]+) s, then draws ([\d.]+)")


@pytest.fixture
def begin(start: Start, script: Script) -> Callable[[str], Run]:
    def begin(function: str) -> Run:
        script(DATA, "data.py")
        words = ("--nproc-per-node", "2", "--prepare", f"data:{function}")
        run = start(*words, script(TRAIN), function)
        run.wait_until("prepared", lambda: run.journal("functions_prepared"))
        run.wait_until("attached", lambda: run.text.count("of 0 waits") == 2 or function == "fails")
        return run

    return begin


def waits(run: Run, generation: int, folder: Path) -> list[tuple[float, str]]:
    """Seconds for which each rank waited for the result, and the number that it drew then."""
    rank = run.pids()[1]
    if generation:
        os.kill(rank, signal.SIGKILL)
    of_it = f"of {generation} waits"
    run.wait_until("restarted", lambda: run.text.count(of_it) == 2)
    found = [match.groups() for match in LINE.finditer(run.text)]
    return [(float(wait), drawn) for _, number, wait, drawn in found if int(number) == generation]


def test_a_restart_does_not_wait_for_a_result_that_is_prepared(
    begin: Callable[[str], Run], tmp_path: Path
) -> None:
    run = begin("load")
    first = waits(run, 0, tmp_path)
    run.wait_for_step(2)
    again = waits(run, 1, tmp_path)
    assert min(wait for wait, _ in first) > 1.0
    assert max(wait for wait, _ in again) < 0.1, "saves the second that the call takes"
    assert len({drawn for _, drawn in [*first, *again]}) == 1, "the script's random numbers"
    (prepared,) = run.journal("functions_prepared")
    assert prepared["place"] == "zygote"
    assert float(str(prepared["seconds"])) > 1.0
    assert not run.journal("fresh_start_used")
    (tmp_path / "stop").touch()
    assert run.wait() == 0, run.text


@pytest.mark.full
@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (
            "starts_a_thread",
            "the process has 2 threads, and only 1 can be forked",
        ),
        ("opens_a_file", "data.py open, and ranks would share the position"),
    ],
)
def test_what_a_fork_would_break_is_prepared_in_each_standby(
    begin: Callable[[str], Run], tmp_path: Path, function: str, reason: str
) -> None:
    run = begin(function)
    run.wait_for_step(100)  # the standbys have had a second
    again = waits(run, 1, tmp_path)
    assert max(wait for wait, _ in again) < 0.5
    (prepared,) = run.journal("functions_prepared")
    assert prepared["place"] == "standby"
    assert reason in str(prepared["reason"])
    assert not run.journal("fresh_start_used")
    (tmp_path / "stop").touch()
    assert run.wait() == 0, run.text


@pytest.mark.full
@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("fails", "--prepare data:fails failed: ValueError: there is no data"),
        ("nowhere", "--prepare data:nowhere failed: AttributeError"),
        ("dies", "the process that calls the functions was killed by SIGKILL"),
    ],
)
def test_a_function_that_fails_costs_nothing(
    start: Start, script: Script, tmp_path: Path, function: str, reason: str
) -> None:
    script(DATA, "data.py")
    name = script("import time, os\nwhile not os.path.exists('stop'):\n    time.sleep(0.02)\n")
    run = start("--prepare", f"data:{function}", name)
    run.wait_until("reported", lambda: run.journal("functions_prepared"))
    (prepared,) = run.journal("functions_prepared")
    assert prepared["place"] == "rank"
    assert str(prepared["reason"]).startswith(reason)
    assert "Ranks call the functions themselves" in run.text
    (tmp_path / "stop").touch()
    assert run.wait() == 0, run.text


@pytest.mark.full
def test_a_zygote_that_dies_is_replaced_by_one_that_prepares_again(
    begin: Callable[[str], Run], tmp_path: Path
) -> None:
    run = begin("load")
    run.wait_for_step(2)
    zygote = run.pid_of("zygote")
    os.kill(zygote, signal.SIGKILL)
    run.wait_until("prepared again", lambda: len(run.journal("functions_prepared")) == 2)
    assert is_gone(zygote)
    again = waits(run, 1, tmp_path)
    assert max(wait for wait, _ in again) < 0.1
    (tmp_path / "stop").touch()
    assert run.wait() == 0, run.text


COMPILED = """
import os, sys, time
imported = "torch._inductor.compile_fx" in sys.modules
import torch, ftrun

torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
step_of = torch.compile(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = ftrun.attach(model=model, optimizer=optimizer)
print(f"of {os.environ['FTRUN_GENERATION']}: imported {imported}")
for step in session.steps(1_000_000):
    optimizer.zero_grad()
    step_of(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    if os.path.exists("stop"):
        break
    time.sleep(0.01)
"""


@pytest.mark.full
def test_the_compiler_is_imported_before_a_restart_of_ranks_that_compile(
    start: Start, script: Script, tmp_path: Path
) -> None:
    run = start(script(COMPILED))
    run.wait_until("imported", lambda: run.journal("compiler_imported"))
    (imported,) = run.journal("compiler_imported")
    assert not imported["reason"]
    os.kill(run.pids()[0], signal.SIGKILL)
    run.wait_until("restarted", lambda: "of 1: imported True" in run.text)
    assert "of 0: imported False" in run.text
    (tmp_path / "stop").touch()
    assert run.wait() == 0, run.text
    assert not run.journal("fresh_start_used")
