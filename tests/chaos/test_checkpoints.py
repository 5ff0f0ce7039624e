"""The next run resumes from the checkpoint that the SMP has written."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from ftrun.ids import RunId
from ftrun.smp.checkpoint.index import parse_index
from ftrun.wire.checkpoint_owner import OWNER_NAME, decode_owner
from ftrun.wire.messages.checkpoint import INDEX_NAME
from ftrun.wire.run_environment import run_folder
from tests.chaos.conftest import HOLD, STEPS, Checked, let_end, wait_for_memory, wait_until_gone
from tests.ftp_server import ftp_server
from tests.integration.conftest import WAIT_S, Run, Start, free_port

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

KEPT = ("--checkpoint-dir", "saved")


def first_step(run: Run) -> int:
    """The step at which its newest generation began."""
    started = [line for line in run.text.splitlines() if line.startswith("begin rank=0")]
    return int(started[-1].rpartition("=")[2])


def test_sigterm_saves_the_last_step_and_the_next_run_continues(
    start: Start, train: tuple[str, ...], undisturbed: Checked
) -> None:
    run = start(*KEPT, *train)
    run.wait_for_step(30)
    run.process.send_signal(signal.SIGTERM)
    let_end(run)
    assert run.wait() == 143, run.text
    stopped_at = run.journal("checkpoint_written")[-1]["step"]
    assert (run.folder / "saved" / "latest").is_symlink()
    again = start(*KEPT, *train)
    assert again.wait() == 0, again.text
    assert first_step(again) == stopped_at
    undisturbed.check(again)


@pytest.mark.full
def test_what_was_sent_to_a_url_is_continued_from(
    start: Start, train: tuple[str, ...], undisturbed: Checked, tmp_path: Path
) -> None:
    """SIGTERM; the second run has a failure of its own before it has sent a checkpoint."""
    with ftp_server(tmp_path / "store") as server:
        kept = ("--checkpoint-dir", server.url())
        run = start(*kept, "--checkpoint-every", "0.3", *train)
        run.wait_for_step(30)
        run.process.send_signal(signal.SIGTERM)
        let_end(run)
        assert run.wait() == 143, run.text
        written = run.journal("checkpoint_written")
        assert not run.journal("checkpoint_failed")
        stopped_at = written[-1]["step"]
        assert str(written[-1]["path"]).startswith("ftp://me:***@")
        once = {
            "FTRUN_CRASH_AT": "worker.capture.marked",
            "FTRUN_CRASH_ONCE": str(run.folder / "once"),
        }
        again = start(*kept, "--resume", "auto", *train, env=once)
        assert again.wait() == 0, again.text
        assert (run.folder / "once").exists()
        assert first_step(again) == stopped_at
        undisturbed.check(again)
        assert "s3cret" not in again.text


@pytest.mark.full
def test_a_url_that_goes_away_is_reported_and_comes_back(
    start: Start, train: tuple[str, ...], undisturbed: Checked, tmp_path: Path
) -> None:
    port = free_port()  # a port that the kernel gives to no other process in between
    with ftp_server(tmp_path / "store", port=port) as server:
        kept = ("--checkpoint-dir", server.url())
        words = ("--checkpoint-every", "0.2", "--set", "stop.grace_s=4")
        run = start(*kept, *words, *train[:-1], "0.08")
        run.wait_until("a checkpoint is there", lambda: run.journal("checkpoint_written"))
    run.wait_until("status says why", lambda: "Connection refused" in checkpoint_error(run))
    with ftp_server(tmp_path / "store", port=port) as server:
        run.wait_until("the next one is written", lambda: not checkpoint_error(run))
        run.wait_for_step(60)
        server.freeze()
        started_s = time.monotonic()
        run.process.send_signal(signal.SIGTERM)
        let_end(run)
        assert run.wait() == 143, run.text
        assert time.monotonic() - started_s < 30
        server.thaw()
        again = start(*kept, *train)
        assert again.wait() == 0, again.text
        undisturbed.check(again)


def test_sigkill_of_everything_loses_what_came_after_the_last_checkpoint(
    start: Start, train: tuple[str, ...], undisturbed: Checked
) -> None:
    run = start(*KEPT, "--checkpoint-every", "0.2", *train)
    run.wait_until("two checkpoints", lambda: len(run.journal("checkpoint_written")) >= 2)
    agent, smp = run.pid_of("agent"), run.pid_of("smp")
    for pid in (run.process.pid, agent, smp):
        os.kill(pid, signal.SIGKILL)
    let_end(run)
    run.process.wait(20)
    wait_until_gone(smp)  # it may be at the end of one more
    saved_at = int((run.folder / "saved" / "latest").readlink().name.split("-")[1])
    again = start(*KEPT, *train)
    assert again.wait() == 0, again.text
    assert first_step(again) == saved_at
    undisturbed.check(again)


@pytest.mark.full
def test_rank_killed_right_after_a_resume_falls_back_to_it(
    start: Start, train: tuple[str, ...], undisturbed: Checked
) -> None:
    run = start(*KEPT, *train)
    run.wait_for_step(20)
    run.process.send_signal(signal.SIGTERM)
    let_end(run)
    assert run.wait() == 143
    at = int(run.journal("checkpoint_written")[-1]["step"])  # type: ignore[call-overload]
    once = {"FTRUN_CRASH_AT": "worker.capture.marked", "FTRUN_CRASH_ONCE": str(run.folder / "once")}
    again = start(*KEPT, *train, env=once)
    assert again.wait() == 0, again.text
    assert (run.folder / "once").exists()
    assert len(again.journal("generation_started")) == 2
    assert first_step(again) == at
    undisturbed.check(again)


@pytest.mark.full
@pytest.mark.parametrize("operation", ["path", "never"])
def test_resume_reports_where_to_begin_and_what_others_left_stays_out(
    start: Start, train: tuple[str, ...], undisturbed: Checked, operation: str
) -> None:
    """A failure before the run's own first checkpoint takes it back to its restored step."""
    run = start(*KEPT, *train)
    run.wait_for_step(20)
    run.process.send_signal(signal.SIGTERM)
    let_end(run)
    assert run.wait() == 143
    at = int(run.journal("checkpoint_written")[-1]["step"])  # type: ignore[call-overload]
    words = {
        "path": ("--checkpoint-dir", "elsewhere", "--resume", "saved/latest"),
        "never": (*KEPT, "--resume", "never"),
    }[operation]
    once = {"FTRUN_CRASH_AT": "worker.capture.marked", "FTRUN_CRASH_ONCE": str(run.folder / "once")}
    again = start(*words, *train, env=once)
    assert again.wait() == 0, again.text
    assert (run.folder / "once").exists()
    assert len(again.journal("generation_started")) == 2
    assert first_step(again) == (at if operation == "path" else 0)
    undisturbed.check(again)


@pytest.mark.full
def test_finished_run_is_saved_and_not_repeated(start: Start, train: tuple[str, ...]) -> None:
    run = start(*KEPT, *train[:-1], "0")
    assert run.wait() == 0, run.text
    again = start(*KEPT, *train[:-1], "0")
    assert again.wait() == 0, again.text
    assert first_step(again) == STEPS


@pytest.mark.full
def test_a_second_run_with_the_directory_of_a_live_one_is_refused(
    start: Start, train: tuple[str, ...], undisturbed: Checked, tmp_path: Path
) -> None:
    run = start(*KEPT, "--checkpoint-every", "0.5", *train)
    run.wait_until("a checkpoint", lambda: run.journal("checkpoint_written"))
    (tmp_path / "elsewhere").mkdir()
    words = ("--checkpoint-dir", str(run.folder / "saved"), *train[:-3], str(tmp_path / "train.py"))
    other = Run(tmp_path / "elsewhere", *words, *train[-2:])
    try:
        assert other.wait() == 2, other.text
        assert f"{run.folder / 'saved'} belongs to run {run.run_id} since" in other.text
        assert f"ftrun stop {run.run_id}" in other.text
        assert not other.journal("generation_started")
    finally:
        other.end()
    let_end(run)
    assert run.wait() == 0, run.text
    undisturbed.check(run)
    record = decode_owner((run.folder / "saved" / OWNER_NAME).read_bytes())
    assert record is not None
    assert (record.run_id, record.exit_code, record.ended_s > 0) == (run.run_id, 0, True)


ORPHANS = """
import os, subprocess
import torch
import ftrun

model = torch.nn.Linear(2048, 2048)
optimizer = torch.optim.AdamW(model.parameters())
for step in ftrun.attach(model=model, optimizer=optimizer).steps(2):
    model(torch.ones(1, 2048)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
# A shell of its own session, whose children have no parent but the agent when they end.
again = "i=0; while [ $i -lt 400 ]; do (sleep 0.01 &); i=$((i + 1)); done"
subprocess.Popen(["setsid", "sh", "-c", again], stdin=subprocess.DEVNULL)
"""


@pytest.mark.full
def test_processes_that_end_while_the_last_checkpoint_is_written_are_not_requested(
    start: Start, tmp_path: Path
) -> None:
    script = tmp_path / "orphans.py"
    script.write_text(ORPHANS)
    run = start(*KEPT, "--snapshot-every", "1", str(script))
    assert run.wait() == 0, run.text
    assert not run.journal("checkpoint_failed"), run.text
    assert run.journal("checkpoint_written")[-1]["step"] == 2


@pytest.mark.full
def test_where_none_can_be_written_the_run_continues_and_status_shows_it(
    start: Start, train: tuple[str, ...], undisturbed: Checked
) -> None:
    run = start(*KEPT, "--checkpoint-every", "0.2", *train[:-1], "0.08")
    saved, excluded = run.folder / "saved", run.folder / "aside"
    run.wait_until("a checkpoint is there", (saved / "latest").is_symlink)
    saved.rename(excluded)
    saved.touch()
    run.wait_until(
        "status says why", lambda: "cannot write the checkpoint" in checkpoint_error(run)
    )
    saved.unlink()
    excluded.rename(saved)
    run.wait_until("the next one is written", lambda: not checkpoint_error(run))
    let_end(run)
    assert run.wait() == 0, run.text
    assert run.text.count("no checkpoint was written") >= 1
    undisturbed.check(run)


def checkpoint_error(run: Run) -> str:
    found = run.status().get("checkpoint")
    return str(found["last_error"]) if isinstance(found, dict) else ""


MOVES = """
import hashlib, sys
import torch
import torch.distributed as dist
from torch import nn
import ftrun

kind, steps = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(13, 64), nn.GELU(), nn.Linear(64, 5))
if kind == "ddp":
    model = nn.parallel.DistributedDataParallel(model)
else:
    from torch.distributed.fsdp import fully_shard
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session = ftrun.attach(model=model, optimizer=optimizer)

def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

def digest():
    found = hashlib.sha256()
    for parameter in model.parameters():
        state = optimizer.state.get(parameter, {})
        for one in (parameter, state.get("exp_avg"), state.get("exp_avg_sq")):
            if one is not None:
                found.update(whole(one.detach()).numpy().tobytes())
    return found.hexdigest()

print(f"begins step={session.step} digest={digest()}\\n", end="", flush=True)
for step in session.steps(steps):
    optimizer.zero_grad()
    torch.manual_seed(step * 100 + rank)
    model(torch.randn(4, 13)).square().mean().backward()
    optimizer.step()
print(f"ends step={session.step} digest={digest()}\\n", end="", flush=True)
dist.destroy_process_group()
"""


def reported(text: str, word: str) -> set[str]:
    """The output of the ranks, which must be equal."""
    return set(re.findall(rf"{word} (step=.*)", text))


@pytest.mark.full  # test_resized_world.py restores other layouts, too
def test_another_number_of_ranks_and_another_way_to_share_continues_from_disk(
    start: Start, script: Callable[..., str]
) -> None:
    name, last = script(MOVES), set[str]()
    for number, (ranks, kind) in enumerate(((2, "ddp"), (3, "fsdp"), (1, "ddp"))):
        steps = str(20 * (number + 1))
        run = start(*KEPT, "--nproc-per-node", str(ranks), name, kind, steps)
        assert run.wait() == 0, run.text
        if number:
            assert reported(run.text, "begins") == last, run.text
        last = reported(run.text, "ends")
        assert len(last) == 1, run.text
        assert next(iter(last)).startswith(f"step={steps} ")


@pytest.mark.full
def test_another_number_of_nodes_continues_from_a_shared_directory(
    script: Callable[..., str], tmp_path: Path
) -> None:
    name, last = script(MOVES), set[str]()
    moves = ((2, 1, "ddp"), (1, 3, "fsdp"), (2, 2, "fsdp"), (3, 1, "ddp"))
    for number, (nodes, ranks, kind) in enumerate(moves):
        steps = str(20 * (number + 1))
        words = ("--nproc-per-node", str(ranks), name, kind, steps)
        text = text_of_nodes(tmp_path, nodes, f"moves-{os.getpid()}-{number}", *words)
        if number:
            assert reported(text, "begins") == last, text
        last = reported(text, "ends")
        assert len(last) == 1, text
        assert next(iter(last)).startswith(f"step={steps} ")


def text_of_nodes(folder: Path, nodes: int, run_id: str, *words: str) -> str:
    """The output of a run that had all its nodes on this machine; it must have ended well."""
    names = [f"{run_id}.n{node}" for node in range(nodes)]
    with nodes_of(folder, names, run_id, "--nnodes", str(nodes), *KEPT, *words) as started:
        codes = [process.wait(WAIT_S) for process in started]
    text = text_of(folder, names)
    assert not any(codes), text
    return text


@contextmanager
def nodes_of(
    folder: Path, names: list[str], run_id: str, *words: str
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Nodes of one run on this machine, each with its output in the folder."""
    endpoint = f"127.0.0.1:{free_port()}"
    with ExitStack() as ends:
        started = []
        for name in names:
            flags = ["--rdzv-endpoint", endpoint, "--node-id", name]
            process = subprocess.Popen(
                [sys.executable, "-m", "ftrun", "--run-id", run_id, *flags, *words],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=ends.enter_context((folder / f"{name}.out").open("w")),
                stderr=subprocess.STDOUT,
            )
            ends.callback(end, process)
            started.append(process)
        yield started


def text_of(folder: Path, names: list[str]) -> str:
    return "\n".join((folder / f"{name}.out").read_text() for name in names)


def wait_for_losses(folder: Path, ranks: int, count: int, names: list[str]) -> None:
    """Wait until each of these ranks has completed this number of steps."""
    give_up_s = time.monotonic() + WAIT_S
    paths = [folder / f"losses.{rank}" for rank in range(ranks)]
    while not all(path.exists() and path.read_text().count("\n") >= count for path in paths):
        assert time.monotonic() < give_up_s, text_of(folder, names)
        time.sleep(0.05)


def agent_of(stub: int) -> int:
    children = Path(f"/proc/{stub}/task/{stub}/children").read_text().split()
    (found,) = [pid for pid in children if Path(f"/proc/{pid}/comm").read_text() == "ftrun-agent\n"]
    return int(found)


@pytest.mark.parametrize(
    ("members", "spares", "victim"),
    [
        (2, 0, 1),
        pytest.param(1, 1, 0, marks=pytest.mark.full),
        pytest.param(2, 0, 0, marks=pytest.mark.full),
    ],
    ids=["member", "with a spare", "leader"],
)
def test_sigterm_to_all_nodes_soon_after_a_kill_of_an_agent_still_saves_the_snapshot(
    train: tuple[str, ...], tmp_path: Path, members: int, spares: int, victim: int
) -> None:
    """The next agent of that node knows of no commit; all nodes write the step that all hold."""
    names = [f"n{node}" for node in range(members + spares)]
    flags = ("--nnodes", str(members), "--spares", str(spares), "--erasure", "none", *KEPT)
    words = (*flags, "--snapshot-every", "1", "--nproc-per-node", "1", *train[2:-1], "0.05")
    with nodes_of(tmp_path, names, f"stops-{os.getpid()}-{members}{victim}", *words) as started:
        wait_for_losses(tmp_path, members, 20, names)
        os.kill(agent_of(started[victim].pid), signal.SIGKILL)
        for process in started:
            process.send_signal(signal.SIGTERM)
        codes = [process.wait(WAIT_S) for process in started]
    text = text_of(tmp_path, names)
    assert codes == [143] * len(names), text
    latest = tmp_path / "saved" / "latest"
    assert latest.is_symlink(), text
    index = parse_index((latest.resolve() / INDEX_NAME).read_bytes(), what="it")
    assert [shard.rank for shard in index.shards] == list(range(members))
    assert index.step >= 15, text
    assert f"kept         step {index.step} in " in text


@pytest.mark.full  # test_checkpoint_owner.py shows the rule over two owners
def test_a_second_run_of_the_same_id_on_other_nodes_is_refused(
    train: tuple[str, ...], tmp_path: Path
) -> None:
    """Without --run-id, two jobs of one script on one port have one id."""
    run_id, one, two = f"twins-{os.getpid()}", ["a0", "a1"], ["b0", "b1"]
    words = ("--nnodes", "2", *KEPT, "--checkpoint-every", "0.5", "--nproc-per-node", "1")
    with nodes_of(tmp_path, one, run_id, *words, *train[2:]) as first:
        wait_for_losses(tmp_path, 2, 10, one)
        with nodes_of(tmp_path, two, run_id, *words, *train[2:]) as second:
            codes = [process.wait(WAIT_S) for process in second]
        refusal = text_of(tmp_path, two)
        assert codes == [2, 2], refusal
        for name in two:
            assert f"belongs to run {run_id} since" in text_of(tmp_path, [name])
        assert "begin rank" not in refusal
        assert all(process.poll() is None for process in first), text_of(tmp_path, one)
        (tmp_path / HOLD).unlink()
        codes = [process.wait(WAIT_S) for process in first]
    assert codes == [0, 0], text_of(tmp_path, one)


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(30)


@pytest.mark.parametrize(
    ("parts", "delay_s"),
    [
        (("agent",), 0.2),
        pytest.param(("agent", "smp"), 0.5, marks=pytest.mark.full),
        pytest.param(("agent",), 1.0, marks=pytest.mark.full),
        pytest.param(("agent",), 3.0, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_sigterm_soon_after_a_kill_of_the_agent_still_saves_the_snapshot(
    start: Start, train: tuple[str, ...], parts: tuple[str, ...], delay_s: float
) -> None:
    run = start(*KEPT, *train)
    run.wait_for_step(20)
    wait_for_memory(run, 15)
    for pid in [run.pid_of(part) for part in parts]:
        os.kill(pid, signal.SIGKILL)
    time.sleep(delay_s)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143, run.text
    written = run.journal("checkpoint_written")
    assert written, run.text
    assert int(written[-1]["step"]) >= 15  # type: ignore[call-overload]
    assert f"kept         step {written[-1]['step']} in " in run.text
    assert "to resume    start the same command again" in run.text
    assert not run_folder(RunId(run.run_id)).path.exists(), "something is left"


@pytest.mark.full
def test_an_agent_killed_while_the_run_is_stopped_is_followed_by_one_that_saves(
    start: Start, train: tuple[str, ...]
) -> None:
    """Ranks do not reach a boundary, so the first agent waits when it is killed."""
    run = start(*KEPT, *train)
    run.wait_for_step(20)
    wait_for_memory(run, 15)
    agent = run.pid_of("agent")
    for pid in run.pids():
        os.kill(pid, signal.SIGSTOP)
    run.process.send_signal(signal.SIGTERM)
    run.wait_until("the stop is known", lambda: run.journal("stop_requested"))
    os.kill(agent, signal.SIGKILL)
    assert run.wait() == 143, run.text
    assert run.journal("checkpoint_written"), run.text
    assert "which ends the run by SIGTERM" in run.text
