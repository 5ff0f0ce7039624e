"""A rank whose standby has rehearsed continues without its set-up, and with the same bits."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.integration.conftest import Run, Start, is_gone

pytestmark = [pytest.mark.launch, pytest.mark.slow, pytest.mark.timeout(900)]

Script = Callable[..., str]
SET_UP_S = 2.0

TRAIN = """
import os, sys, time
import torch, torch.distributed as dist
import ftrun

total, set_up_s = int(sys.argv[1]), float(sys.argv[2])
gates = () if sys.argv[3] == "open" else (10, 20)
dist.init_process_group("gloo")
rank = dist.get_rank()
time.sleep(set_up_s)
torch.manual_seed(rank)
layers = torch.nn.Linear(8, 300), torch.nn.Dropout(0.2), torch.nn.Linear(300, 4)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.002)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if not ftrun.is_rehearsal():
    ftrun.save(os.getpid(), f"set-up-{set_up_s}.{rank}")
session = ftrun.attach(model=model, optimizer=optimizer)
for step in session.steps(total):
    with session.guard():
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).pow(2).mean()
        loss.backward()
        optimizer.step()
        if not session.is_rehearsal:
            with open(f"{total}-{set_up_s}.{rank}", "a") as file:
                file.write(f"{step} {loss.item().hex()} {os.getpid()}\\n")
        if step:
            session.wait("sealed")
        ftrun.save(step, f"step-{set_up_s}.{rank}")
        assert ftrun.is_rehearsal() == session.is_rehearsal
        while step in gates and not session.is_rehearsal:
            is_open = torch.tensor(float(os.path.exists(f"open-{step}")))
            dist.all_reduce(is_open, dist.ReduceOp.MAX)
            if is_open:
                break
            time.sleep(0.01)
"""
TOTAL = 30


def losses(folder: Path, set_up_s: float) -> dict[tuple[int, int], str]:
    """By rank and step; a step that was made again had the same loss."""
    found: dict[tuple[int, int], str] = {}
    for rank in (0, 1):
        for line in (folder / f"{TOTAL}-{set_up_s}.{rank}").read_text().splitlines():
            step, loss, _pid = line.split()
            assert found.setdefault((rank, int(step)), loss) == loss
    return found


def open_gate(folder: Path, step: int) -> None:
    """Let the ranks continue, which all-reduce in this step until then."""
    (folder / f"open-{step}").touch()


def wait_for_gate(run: Run, folder: Path, step: int) -> None:
    run.wait_until(
        f"at {step}", lambda: all((rank, step) in losses(folder, SET_UP_S) for rank in (0, 1))
    )


def rehearsed(run: Run) -> list[int]:
    """Ranks that were rehearsed, in order."""
    lines = run.journal("rank_rehearsed")
    assert not [line for line in lines if line["reason"]], run.text
    return [int(str(line["rank"])) for line in lines]


def downtime_s(run: Run, count: int) -> float:
    """From the failure to the first step of all ranks, of the restart with this number."""
    run.wait_until("recovered", lambda: len(run.journal("recovered")) == count)
    last = run.journal("recovered")[-1]
    return sum(last["phases_s"].values())  # type: ignore[attr-defined]


@pytest.fixture
def begin(start: Start, script: Script) -> Callable[..., Run]:
    def begin(*words: str, set_up_s: float = SET_UP_S, gates: str = "closed") -> Run:
        few = ("--nproc-per-node", "2", "--snapshot-every", "1")
        return start(*few, *words, script(TRAIN), str(TOTAL), str(set_up_s), gates)

    return begin


REHEARSE = ("--survivors", "on", "--rehearse", "all")


def test_a_rehearsed_rank_continues_without_its_set_up(
    begin: Callable[..., Run], tmp_path: Path
) -> None:
    run = begin("--survivors", "on", "--rehearse", "1")
    run.wait_until("rehearsed", lambda: rehearsed(run) == [0])
    wait_for_gate(run, tmp_path, 10)
    assert str(run.status()["survivors"]) == "yes; rehearsed ranks: 0"
    old = run.pids()
    os.kill(old[0], signal.SIGKILL)
    open_gate(tmp_path, 10)
    fast_s = downtime_s(run, 1)
    new = run.pids()
    assert new[1] == old[1], "it stays"
    saved = torch.load(tmp_path / f"set-up-{SET_UP_S}.0")
    assert saved == old[0], "not by the rehearsal, whose set-up ran later"
    assert os.getpriority(os.PRIO_PROCESS, new[0]) == os.getpriority(os.PRIO_PROCESS, new[1])
    scores = [Path(f"/proc/{pid}/oom_score_adj").read_text() for pid in new]
    assert scores[0] == scores[1]
    ranks = run.status()["ranks"]
    assert [one["start"] for one in ranks] == ["rehearsed", "stayed"]  # type: ignore[attr-defined]

    wait_for_gate(run, tmp_path, 20)
    for pid in new:  # rank 0 has no standby yet
        os.kill(pid, signal.SIGKILL)
    open_gate(tmp_path, 20)
    slow_s = downtime_s(run, 2)
    assert slow_s > SET_UP_S
    assert fast_s < slow_s / 4, "in comparison to a restart that waits for the set-up"

    assert run.wait() == 0, run.text
    undisturbed = begin(set_up_s=0.0, gates="open")
    assert undisturbed.wait() == 0, undisturbed.text
    assert losses(tmp_path, SET_UP_S) == losses(tmp_path, 0.0)


@pytest.mark.full
def test_when_all_ranks_fail_at_once_all_continue_from_their_standbys(
    begin: Callable[..., Run], tmp_path: Path
) -> None:
    run = begin(*REHEARSE)
    run.wait_until("rehearsed", lambda: set(rehearsed(run)) == {0, 1})
    agent, ranks = run.pid_of("agent"), run.pids()
    os.kill(agent, signal.SIGSTOP)  # it notices both deaths together
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
    os.kill(agent, signal.SIGCONT)
    open_gate(tmp_path, 10)
    assert downtime_s(run, 1) < SET_UP_S / 2
    assert [one["start"] for one in run.status()["ranks"]] == ["rehearsed"] * 2  # type: ignore[attr-defined]
    open_gate(tmp_path, 20)
    assert run.wait() == 0, run.text


@pytest.mark.full
def test_one_standby_is_of_one_rank_and_ends_with_the_run(
    begin: Callable[..., Run], tmp_path: Path
) -> None:
    run = begin("--survivors", "on", "--rehearse", "1", set_up_s=0.1)
    run.wait_until("rehearsed", lambda: rehearsed(run) == [0])
    (standby,) = named(run, "ftrun-rank0")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143
    assert is_gone(standby)
    assert rehearsed(run) == [0]


@pytest.mark.full
def test_a_standby_that_dies_is_rehearsed_again(begin: Callable[..., Run], tmp_path: Path) -> None:
    run = begin("--survivors", "on", "--rehearse", "1", set_up_s=0.1)
    run.wait_until("rehearsed", lambda: rehearsed(run) == [0])
    (standby,) = named(run, "ftrun-rank0")
    os.kill(standby, signal.SIGKILL)
    run.wait_until("rehearsed again", lambda: rehearsed(run) == [0, 1])
    open_gate(tmp_path, 10)
    open_gate(tmp_path, 20)
    assert run.wait() == 0, run.text


def named(run: Run, name: str) -> list[int]:
    """Children of the agent with this name that are no rank of the running generation."""
    agent = run.pid_of("agent")
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    found = [int(one) for one in children if Path(f"/proc/{one}/comm").read_text().strip() == name]
    return [pid for pid in found if pid not in run.pids()]


@pytest.mark.full
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("if session.is_rehearsal: raise ValueError('no licence')", "ValueError: no licence"),
        ("if session.is_rehearsal: os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
    ],
)
def test_a_rehearsal_that_fails_costs_only_itself(
    start: Start, script: Script, tmp_path: Path, line: str, reason: str
) -> None:
    at = "        optimizer.zero_grad()\n"
    name = script(TRAIN.replace(at, f"{at}        {line}\n"))
    run = start(*REHEARSE, "--nproc-per-node", "2", name, str(TOTAL), "0.1", "closed")
    run.wait_until("not rehearsed", lambda: len(run.journal("rank_rehearsed")) == 2)
    assert all(reason in str(one["reason"]) for one in run.journal("rank_rehearsed")), run.text
    assert reason in str(run.status()["survivors"])
    old = run.pids()
    os.kill(old[1], signal.SIGKILL)
    open_gate(tmp_path, 10)
    run.wait_until("restarted", lambda: len(run.journal("generation_started")) == 2)
    assert run.pids()[0] == old[0], "the other rank stays"
    open_gate(tmp_path, 20)
    assert run.wait() == 0, run.text
