"""Any part of ftrun may be killed, and any two at once: the result does not change."""

import os
import signal
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest
from fake_nvml.fake import STATE, FakeGpus, folder

from ftrun.errors import ExitCode
from ftrun.ids import RunId
from ftrun.wire.messages.envelope import Hello
from ftrun.wire.messages.smp import PersistRunState
from ftrun.wire.run_environment import run_folder
from ftrun.wire.transport.channel import connect
from tests.chaos.conftest import STEPS, Checked, let_end, wait_for_memory, wait_until_gone
from tests.integration.conftest import WAIT_S, Run, Start, is_gone

PARTS = ("rank", "smp", "zygote", "agent")
KILL_AT = 30
ALWAYS = {("smp", "agent")}
"""The others run with scripts/test --full."""

TOGETHER = [
    pytest.param(
        parts,
        id="+".join(parts),
        marks=[] if parts in ALWAYS else [pytest.mark.full],
    )
    for parts in [*((part,) for part in PARTS), *combinations(PARTS, 2)]
]

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.launch]


def kill(run: Run, parts: tuple[str, ...]) -> None:
    """SIGKILL all of them, as close together as possible."""
    pids = [run.pids()[1] if part == "rank" else run.pid_of(part) for part in parts]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("parts", TOGETHER)
def test_killed_parts_cost_no_step_and_no_bit(
    start: Start, train: tuple[str, ...], undisturbed: Checked, parts: tuple[str, ...]
) -> None:
    run = start("--snapshot-every", "1", *train)
    wait_for_memory(run, KILL_AT)
    kill(run, parts)
    let_end(run)
    assert run.wait() == 0, run.text
    undisturbed.check(run)
    if "agent" in parts or "rank" in parts:
        started = [line for line in run.text.splitlines() if line.startswith("begin rank=0")]
        assert int(started[-1].rpartition("=")[2]) >= KILL_AT, "it did not resume from memory"


@pytest.mark.full
def test_snapshots_continue_with_a_new_smp(start: Start, train: tuple[str, ...]) -> None:
    run = start(*train)
    run.wait_for_step(KILL_AT)
    before = run.pid_of("smp")
    os.kill(before, signal.SIGKILL)
    run.wait_until("a new SMP is up", lambda: run.journal("smp_ready"))
    committed = run.status()["snapshots"]["step"]  # type: ignore[index]
    run.wait_until(
        "a newer version committed",
        lambda: (run.status().get("snapshots") or {"step": -1})["step"] > committed,  # type: ignore[index]
    )
    assert run.pid_of("smp") != before
    let_end(run)


def replace_agent(run: Run) -> None:
    before = len(run.journal("generation_started"))
    os.kill(run.pid_of("agent"), signal.SIGKILL)
    run.wait_until("another agent", lambda: len(run.journal("generation_started")) > before)


def drop_agent(run: Run, path: Path | None = None) -> None:
    """Make the SMP close its connection to the agent, which a newer agent replaces."""
    path = path or run_folder(RunId(run.run_id)).smp_socket
    hello = Hello("agent", os.getpid())
    connect(path, run_id=run.run_id, peer="the SMP", hello=hello, deadline_s=WAIT_S).close()


def test_an_agent_that_the_smp_has_dropped_connects_again(
    start: Start, train: tuple[str, ...], undisturbed: Checked
) -> None:
    run = start("--snapshot-every", "1", "--checkpoint-dir", "checkpoints", *train)
    wait_for_memory(run, 5)
    drop_agent(run)
    run.wait_until("connected again", lambda: len(run.journal("smp_ready")) == 1)
    os.kill(run.pid_of("agent"), signal.SIGKILL)  # the next one adopts this SMP, no child of it
    run.wait_until("another agent", lambda: len(run.journal("generation_started")) > 1)
    drop_agent(run)
    let_end(run)
    assert run.wait() == 0, run.text
    undisturbed.check(run)
    assert not run.journal("smp_exited"), "no second SMP is started"
    assert run.journal("checkpoint_written")[-1]["step"] == STEPS


@pytest.mark.full
def test_a_state_of_another_version_is_reported_and_the_stub_s_is_used(
    start: Start, train: tuple[str, ...], undisturbed: Checked
) -> None:
    run = start("--snapshot-every", "1", *train)
    wait_for_memory(run, 5)
    os.kill(run.pid_of("agent"), signal.SIGSTOP)  # it would repair the state in the SMP
    path, hello = run_folder(RunId(run.run_id)).smp_socket, Hello("agent", os.getpid())
    smp = connect(path, run_id=run.run_id, peer="the SMP", hello=hello, deadline_s=WAIT_S)
    smp.ask(PersistRunState(b'{"plan": {"of": "another version"}}'), deadline_s=WAIT_S)
    smp.close()
    os.kill(run.pid_of("agent"), signal.SIGKILL)
    run.wait_until("another agent", lambda: len(run.journal("generation_started")) > 1)
    let_end(run)
    assert run.wait() == 0, run.text
    undisturbed.check(run)
    (line,) = run.journal("run_state_rejected")
    assert str(line["reason"]).startswith("the state of the run in the SMP has another form")
    assert run.journal("memory_adopted")


@pytest.mark.full
def test_an_smp_that_lives_and_cannot_be_reached_is_replaced(
    start: Start, train: tuple[str, ...], undisturbed: Checked
) -> None:
    run = start("--snapshot-every", "1", *train)
    wait_for_memory(run, 5)
    before = run.pid_of("smp")
    path = run_folder(RunId(run.run_id)).smp_socket
    drop_agent(run, path.rename(path.with_name("moved.sock")))
    run.wait_until("another SMP", lambda: run.journal("smp_ready"))
    assert is_gone(before)
    let_end(run)
    assert run.wait() == 0, run.text
    undisturbed.check(run)


ON_A_DEVICE = """
import time
from pathlib import Path
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend
import ftrun

dist.init_process_group("cpu:gloo,cuda:fake")
weight = torch.zeros(1000, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
session = ftrun.attach({"w": torch.nn.ParameterList([weight])}, optimizer)
for step in session.steps(100_000):
    weight.sum().backward()
    if Path("broken").exists():
        raise RuntimeError("CUDA error: unspecified launch failure")
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)
"""


def test_later_agents_report_the_hardware_fault_of_their_node(
    start: Start, script: Callable[..., str], tmp_path: Path
) -> None:
    state = tmp_path / "gpus"
    gpus = FakeGpus(state, 1)
    env = {STATE: str(state), "LD_LIBRARY_PATH": str(folder())}
    run = start("--snapshot-every", "1", script(ON_A_DEVICE), env=env)
    gpus.need_action(0, 1)
    run.wait_until("the fault is seen", lambda: run.journal("device_error"))
    gpus.need_action(0, 0)  # the next agent cannot find it again
    for _ in range(2):
        replace_agent(run)
    (tmp_path / "broken").touch()
    assert run.wait() == ExitCode.NOT_ENOUGH_NODES, run.text
    assert "has a hardware fault, and no spare is free: GPU 0 needs a reset" in run.text
    assert "and keeps its ranks: no spare is free" in run.text
    assert len(run.journal("device_error")) == 1


ENDS_WITH_ITS_SMP = """
import os, signal, sys, time
from pathlib import Path
import torch
import ftrun

weight = torch.zeros(1000, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
session = ftrun.attach({"w": torch.nn.ParameterList([weight])}, optimizer)
for step in session.steps(20):
    weight.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
while not Path("smp").exists():
    time.sleep(0.01)
time.sleep(0.3)
os.kill(int(Path("smp").read_text()), signal.SIGKILL)
os._exit(0)
"""


def test_the_last_checkpoint_is_written_by_a_new_smp(
    start: Start, script: Callable[..., str]
) -> None:
    words = ("--checkpoint-dir", "saved", "--checkpoint-every", "3600", "--snapshot-every", "1")
    run = start(*words, script(ENDS_WITH_ITS_SMP))
    run.wait_for_step(20)
    part = run.folder / "part"
    part.write_text(str(run.pid_of("smp")))
    part.rename(run.folder / "smp")
    assert run.wait() == 0, run.text
    assert [one.name for one in (run.folder / "saved").glob("step-*")] == ["step-00000020-g0"]


@pytest.mark.full
def test_the_agent_dies_before_a_new_smp_has_the_memory(
    tmp_path: Path, train: tuple[str, ...], undisturbed: Checked
) -> None:
    once = tmp_path / "once"
    env = {"FTRUN_CRASH_AT": "agent.smp.listening", "FTRUN_CRASH_ONCE": str(once)}
    run = Run(tmp_path, "--snapshot-every", "1", *train, env=env)
    try:
        wait_for_memory(run, KILL_AT)
        os.kill(run.pid_of("smp"), signal.SIGKILL)
        let_end(run)
        assert run.wait() == 0, run.text
        assert once.exists()
        undisturbed.check(run)
        started = [line for line in run.text.splitlines() if line.startswith("begin rank=0")]
        assert int(started[-1].rpartition("=")[2]) >= KILL_AT - 2, run.text
        assert len(run.journal("generation_started")) == 2, "no rank hangs"
    finally:
        run.end()


@pytest.mark.full  # [smp+agent] starts a successor from memory, too
def test_same_run_id_resumes_when_only_the_smp_is_left(
    start: Start, train: tuple[str, ...], undisturbed: Checked
) -> None:
    run = start(*train)
    run.wait_for_step(KILL_AT)
    smp, workers = run.pid_of("smp"), run.pids()
    os.kill(run.process.pid, signal.SIGKILL)
    let_end(run)
    run.process.wait(20)
    for pid in workers:
        wait_until_gone(pid)
    assert not is_gone(smp)
    run.start()
    assert run.wait() == 0, run.text
    undisturbed.check(run)
    assert run.journal("memory_adopted")


@pytest.mark.full  # test_resized_world.py restores other numbers of ranks from memory
def test_another_number_of_ranks_continues_from_memory(
    start: Start, train: tuple[str, ...]
) -> None:
    run = start("--snapshot-every", "1", *train)
    wait_for_memory(run, KILL_AT)
    os.kill(run.process.pid, signal.SIGKILL)
    let_end(run)
    run.process.wait(20)
    run.argv[run.argv.index("--nproc-per-node") + 1] = "1"
    run.start()
    assert run.wait() == 0, run.text
    started = [line for line in run.text.splitlines() if line.startswith("begin rank=0")]
    assert int(started[-1].split("step=")[1]) >= KILL_AT - 2, run.text


@pytest.mark.full
def test_changed_script_is_refused_and_costs_nothing(
    start: Start, train: tuple[str, ...], undisturbed: Checked
) -> None:
    run = start(*train)
    run.wait_for_step(KILL_AT)
    os.kill(run.process.pid, signal.SIGKILL)
    let_end(run)
    run.process.wait(20)
    path = run.folder / "train.py"
    right = path.read_text()
    path.write_text(right.replace("nn.Linear(300, 8)", "nn.Linear(300, 9)"))
    run.start()
    assert run.wait() == 77, run.text
    assert "saved as F32[8" in run.text
    path.write_text(right)
    run.start()
    assert run.wait() == 0, run.text
    undisturbed.check(run)
