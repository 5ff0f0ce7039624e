"""With memory for less than two slots, checkpoints are captured through pools.

Most tests train in this process against a real SMP, and order the checkpoints in place of an agent.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ftrun import clock
from ftrun.wire.messages import checkpoint as checkpoint_messages
from ftrun.wire.messages import smp as smp_messages
from ftrun.wire.shared_memory.arena import SlotState
from ftrun.wire.shared_memory.pages import CommandField, HeartbeatField
from ftrun.worker.session import Session
from ftrun.worker.targets import pool_capture
from ftrun.worker.targets.pool_stream import PooledCopy
from tests.integration.conftest import Run, Start, free_port, script, start
from tests.integration.in_process_worker import TIMEOUT_S
from tests.integration.in_process_worker import Run as Worker
from tests.memory_cgroup import memory_cgroup

__all__ = ["script", "start"]

Write = Callable[..., str]
MB = 10**6
WIDTH = 512

TRAIN = """
import hashlib, os, sys, time
import torch
import torch.distributed as dist
from torch import nn

import ftrun

steps, pace_s, width = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
layers = [nn.Linear(width, width) for _ in range(4)]
model = nn.Sequential(*layers, nn.BatchNorm1d(width))
model.register_parameter("turned", nn.Parameter(torch.ones(300, 700).t()))
torch.manual_seed(dist.get_rank())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
history = {"losses": []}
session = ftrun.attach(model=model, optimizer=optimizer, history=history)
for step in session.steps(steps):
    optimizer.zero_grad()
    loss = model(torch.randn(4, width)).square().mean() + model.turned.square().mean()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    history["losses"].append(loss.item())
    time.sleep(pace_s)
    if step >= steps - 25 and os.path.exists("slow"):
        time.sleep(1)
found = hashlib.sha256(repr(history).encode())
for tensor in model.state_dict().values():
    found.update(tensor.contiguous().numpy().tobytes())
for state in optimizer.state.values():
    for key in ("exp_avg", "exp_avg_sq", "step"):
        found.update(state[key].contiguous().numpy().tobytes())
open(f"{os.environ['OUT']}-{dist.get_rank()}", "w").write(found.hexdigest())
dist.destroy_process_group()
"""
KEPT = ("--checkpoint-dir", "saved", "--checkpoint-every", "5step")


def state_bytes(width: int) -> int:
    """Of one rank: four layers with two moments each."""
    return 4 * 3 * 4 * width**2


def limit(part: float, num_ranks: int = 2, width: int = WIDTH) -> tuple[str, str]:
    """A limit of the node to this part of the state of each rank."""
    num_bytes = num_ranks * part * state_bytes(width)
    return ("--set", f"snapshot.max_memory_gb={num_bytes / 1e9:.6f}")


def checkpoints(run: Run) -> list[int]:
    return [line["step"] for line in run.journal("checkpoint_written")]  # type: ignore[misc]


def snapshots(run: Run) -> dict[str, Any]:
    found = run.status().get("snapshots")
    return found if isinstance(found, dict) else {}


def digests(folder: Path, name: str, num_ranks: int = 2) -> list[str]:
    return [(folder / f"{name}-{rank}").read_text() for rank in range(num_ranks)]


def undisturbed(
    folder: Path, train: str, num_ranks: int = 2, steps: int = 40, width: int = WIDTH
) -> None:
    """Run the script without an agent."""
    port = free_port()
    ranks = []
    for rank in range(num_ranks):
        names = {"RANK": rank, "WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1"}
        given = {"MASTER_PORT": port, "OUT": "plain"}
        env = os.environ | {key: str(value) for key, value in (names | given).items()}
        words = [sys.executable, train, str(steps), "0", str(width)]
        ranks.append(subprocess.Popen(words, cwd=folder, env=env))
    try:
        assert [one.wait(5 * TIMEOUT_S) for one in ranks] == [0] * num_ranks
    finally:
        for one in ranks:
            one.kill()
            one.wait()


def phases(run: Run) -> list[str]:
    return [rank["phase"] for rank in run.status().get("ranks") or []]  # type: ignore[attr-defined]


@pytest.mark.full
@pytest.mark.parametrize(("num_ranks", "width"), [(1, 1024), (2, WIDTH)])
def test_kills_of_a_rank_and_of_the_smp_change_no_bit(
    start: Start, script: Write, tmp_path: Path, num_ranks: int, width: int
) -> None:
    """Pools of a quarter of the state, and a storage that takes longer than a step."""
    train = script(TRAIN)
    undisturbed(tmp_path, train, num_ranks, steps=30, width=width)
    (tmp_path / "slow").touch()  # the run must not end before the next SMP has a pool
    slow = ("--set", f"checkpoint.max_bytes_per_s={16 * MB}")
    ranks, kept = ("--nproc-per-node", str(num_ranks)), limit(0.25, num_ranks, width)
    words = (*ranks, *KEPT, *kept, *slow, train, "30", "0.05", str(width))
    run = start(*words, env={"OUT": "pooled"})
    run.wait_until("a checkpoint", lambda: checkpoints(run))
    status = snapshots(run)
    assert "only checkpoints, through a pool of" in status["unprotected_reason"]
    waited = re.search(r"the training waited ([0-9.]+) s", status["unprotected_reason"])
    assert waited is not None, status
    assert float(waited[1]) > 0.2
    assert 0 < status["memory_bytes"] <= num_ranks * 0.25 * state_bytes(width)

    run.wait_until("a capture", lambda: any("the storage" in one for one in phases(run)))
    before = checkpoints(run)[-1]
    os.kill(run.pids()[-1], signal.SIGKILL)
    run.wait_for_step(before + 1, generation=1)
    restored = run.journal("restore_point_chosen")[-1]["version"]
    assert restored["step"] == before  # type: ignore[index]

    run.wait_until("a capture", lambda: any("the storage" in one for one in phases(run)))
    os.kill(run.pid_of("smp"), signal.SIGKILL)
    step = max(rank["step"] or 0 for rank in run.status()["ranks"])  # type: ignore[attr-defined]
    run.wait_until("a later checkpoint", lambda: checkpoints(run)[-1] > step)
    (tmp_path / "slow").unlink()
    assert run.wait() == 0, run.text
    assert len(run.journal("generation_started")) == 2
    assert digests(tmp_path, "pooled", num_ranks) == digests(tmp_path, "plain", num_ranks)


@pytest.mark.full
def test_a_rank_whose_slots_fit_leaves_them_if_another_rank_has_none(
    start: Start, script: Write, tmp_path: Path
) -> None:
    """Both slots of one rank fit, and then one slot of each."""
    train = script(TRAIN)
    undisturbed(tmp_path, train)
    words = ("--nproc-per-node", "2", *KEPT, *limit(1.2), train, "40", "0.1", str(WIDTH))
    run = start(*words, env={"OUT": "pooled"})
    run.wait_until("a checkpoint", lambda: checkpoints(run))
    assert run.text.count("through a pool of 15 MB") == 2, run.text
    assert snapshots(run)["memory_bytes"] <= 2 * 1.2 * state_bytes(WIDTH)
    before = checkpoints(run)[-1]
    os.kill(run.pids()[0], signal.SIGKILL)
    assert run.wait() == 0, run.text
    restored = run.journal("restore_point_chosen")[-1]["version"]
    assert restored["step"] in (before, before + 5)  # type: ignore[index]
    assert digests(tmp_path, "pooled") == digests(tmp_path, "plain")


LARGE_BUFFER = """
import pathlib, time
import torch
import ftrun

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(100, 100)
model.register_buffer("table", torch.zeros(12_000_000))
optimizer = torch.optim.AdamW(model.parameters())
pathlib.Path("ready").touch()
while not pathlib.Path("go").exists():
    time.sleep(0.05)
session = ftrun.attach(model=model, optimizer=optimizer)
for step in session.steps(100_000):
    optimizer.zero_grad()
    model(torch.ones(2, 100)).square().mean().backward()
    optimizer.step()
    model.table += 1
    for part in model.table.split(1_000_000):
        assert bool((part == step + 1).all()), "a value of another step"
    if pathlib.Path("end").exists():
        break
"""


@pytest.mark.full
def test_a_buffer_larger_than_the_free_memory_is_captured_and_restored(
    start: Start, script: Write, tmp_path: Path
) -> None:
    """All of it must be copied at the boundary. Two slots take 96 MB, and 80 MB are free.

    Without standby processes, whose memory would count too.
    """
    kept = ("--checkpoint-dir", "saved", "--checkpoint-every", "0.5")
    with memory_cgroup() as group:
        with group.for_children():
            run = start(*kept, "--set", "start.mode=fresh", script(LARGE_BUFFER))
        run.wait_until("ready", (tmp_path / "ready").exists)
        group.limit(group.used_bytes + 80 * MB)
        (tmp_path / "go").touch()
        run.wait_until("a checkpoint", lambda: checkpoints(run))
        pool = re.search(r"a pool of (\d+) MB", run.text)
        assert pool is not None, run.text
        assert int(pool[1]) < 40
        before = checkpoints(run)[-1]
        os.kill(run.pids()[0], signal.SIGKILL)
        run.wait_for_step(before + 1, generation=1)
        run.wait_until("a later checkpoint", lambda: checkpoints(run)[-1] > before)
        assert "starts from step" in run.text
        (tmp_path / "end").touch()
        assert run.wait() == 0, run.text


POINTS = (
    "worker.pool.begun",
    "worker.pool.room_found",
    "worker.pool.written",
    "worker.pool.sealed",
    "smp.pool.created",
    "smp.checkpoint.pool_drained",
    "smp.checkpoint.part_written",
    "smp.checkpoint.index_written",
    "smp.checkpoint.latest",
    "smp.checkpoint.loaded",
)


@pytest.mark.full
@pytest.mark.chaos
@pytest.mark.timeout(1500)
def test_a_kill_at_any_point_of_a_pooled_capture_changes_no_bit(
    start: Start, script: Write, tmp_path: Path
) -> None:
    """With checkpoints that are due by time. A rank is killed too, so that one is loaded."""
    train = script(TRAIN)
    undisturbed(tmp_path, train)
    for point in POINTS:
        saved = ("--checkpoint-dir", f"saved-{point}", "--checkpoint-every", "0.5")
        words = ("--nproc-per-node", "2", *saved, *limit(0.25), train, "40", "0.1", str(WIDTH))
        once = tmp_path / point
        env = {"FTRUN_CRASH_AT": point, "FTRUN_CRASH_ONCE": str(once), "OUT": f"of-{point}"}
        run = start(*words, env=env)
        run.wait_until("a checkpoint", lambda run=run: checkpoints(run))
        os.kill(run.pids()[1], signal.SIGKILL)
        assert run.wait() == 0, f"{point}:\n{run.text}"
        assert once.exists(), point
        assert digests(tmp_path, f"of-{point}") == digests(tmp_path, "plain"), point


# --- one rank in this process ------------------------------------------------------------------

SHAPE = (1200, 1000)
ONE_TENSOR = 4 * 1200 * 1000
POOL_BYTES = 2 * MB
"""Less than a tensor."""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    monkeypatch.setattr(pool_capture, "_RETRY_S", 3600.0)
    made = Worker(tmp_path)
    yield made
    made.close()


class Training:
    """A model with a tensor that is larger than the pool, and one with other strides."""

    def __init__(self, worker: Worker, *, limit_bytes: int = POOL_BYTES, **given: Any) -> None:
        torch.manual_seed(0)
        self.worker = worker
        self.model = nn.Linear(*SHAPE, bias=False)
        self.model.turned = nn.Parameter(torch.randn(300, 200).t())
        self.model.register_buffer("seen", torch.zeros(7))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.states: dict[int, dict[str, torch.Tensor]] = {}
        self.limit(limit_bytes)
        context = worker.next_context()
        launch = msgspec.structs.replace(context.launch, has_storage=True)
        context = replace(context, launch=launch)
        parts = {"model": self.model, "optimizer": self.optimizer}
        self.session: Session = worker.session_of(context, **parts, **given)

    def limit(self, num_bytes: int) -> None:
        body = smp_messages.BeginGeneration(0, 1, [0], memory_limit_bytes=num_bytes)
        self.worker.ask(body, self.worker.command_fd)

    def steps(self, num: int, act: Callable[[int], object] = lambda at: None) -> None:
        """Train up to this number of steps; `act` runs in each, after the backward."""
        for at in self.session.steps(num):
            for parameter in self.model.parameters():
                parameter.grad = torch.full_like(parameter, float(at + 1))
            act(at)
            self.optimizer.step()
            self.model.seen += 1
            self.states[at + 1] = {k: v.clone() for k, v in self.model.state_dict().items()}

    def await_pool(self) -> None:
        """Wait until the request of this rank is answered; the next boundary takes the pool."""
        give_up_s = clock.now_s() + TIMEOUT_S
        pool = self.session._protection._capture._pool  # type: ignore[union-attr]
        while pool._pool is None if pool._thread is None else pool._thread.is_alive():
            assert clock.now_s() < give_up_s
            clock.sleep(0.01)

    def order(self, step: int, folder: Path) -> None:
        """Request a checkpoint from this step on."""
        order = checkpoint_messages.WriteCheckpoint(
            str(folder),
            3,
            token="x",
            live_capture_timeout_s=1e9,
            capture_from=(0, step),
        )
        self.worker.agent.send(order)
        self.worker.commands.set(CommandField.CAPTURE_FROM, step)

    def answer(self) -> Any:
        kinds = checkpoint_messages.CheckpointWritten | checkpoint_messages.CheckpointFailed
        while not isinstance(body := self.worker.agent.receive(deadline_s=TIMEOUT_S).body, kinds):
            pass
        return body

    def reason(self) -> str:
        page = self.worker.page
        return page.note if page.get(HeartbeatField.UNPROTECTED) else ""


def assert_is(folder: Path, state: dict[str, torch.Tensor]) -> None:
    found = load_file(folder / "rank-00000.safetensors")
    for key, value in state.items():
        assert torch.equal(found[f"model.{key}"], value), key


def test_a_pool_smaller_than_a_tensor_passes_whole_states(worker: Worker, tmp_path: Path) -> None:
    """The first three are verified snapshots."""
    training = Training(worker)
    folders: list[Path] = []

    def act(at: int) -> None:
        if at == 1:
            assert "two slots" in training.reason()
            training.await_pool()
        if at >= 2:
            assert "through a pool of 2 MB" in training.reason()
        if at >= 3:
            folders.append(Path(training.answer().path))
        if at >= 2:
            training.order(at + 1, tmp_path / "saved")

    training.steps(8, act)
    assert len(folders) == 5
    assert [path.name for path in folders] == [f"step-{at:08}-g0" for at in range(3, 8)]
    for path, step in list(zip(folders, range(3, 8), strict=True))[-3:]:
        assert_is(path, training.states[step])
    assert worker.page.get(HeartbeatField.SKIPPED_COUNT) == 1  # the one that was refused


def test_an_smp_that_ends_in_the_middle_of_a_capture_costs_that_checkpoint_only(
    worker: Worker, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    training = Training(worker)
    waits_s: list[float] = []

    def act(at: int) -> None:
        if at == 1:
            training.await_pool()
            training.order(2, saved)
        if at == 2:
            assert Path(training.answer().path).name == "step-00000002-g0"
            worker.commands.set(CommandField.CAPTURE_FROM, 3)
        if at == 3:  # the copy thread waits for room
            waits_s.append(clock.now_s())
            worker.next_smp()
            training.limit(POOL_BYTES)
        if at == 4:
            waits_s.append(clock.now_s())
        if at == 5:  # the boundary before has found the SMP lost
            clock.sleep(pool_capture._AGAIN_S)
        if at == 6:
            training.await_pool()
            training.order(8, saved)
        if at == 8:
            assert Path(training.answer().path).name == "step-00000008-g0"

    training.steps(9, act)
    assert waits_s[1] - waits_s[0] < 20
    assert os.readlink(saved / "latest") == "step-00000008-g0"
    assert not (saved / "step-00000003-g0").exists()
    assert_is(saved / "step-00000008-g0", training.states[8])


def test_a_change_under_the_copy_discards_the_capture(worker: Worker, tmp_path: Path) -> None:
    """The change leaves no trace but in the bytes; a verified snapshot finds each."""
    saved = tmp_path / "saved"
    training = Training(worker)

    def act(at: int) -> None:
        if at == 1:
            training.await_pool()
            worker.commands.set(CommandField.CAPTURE_FROM, 2)
        if at == 2:  # the copy thread waits for room
            training.model.weight.data.view(-1)[-1] += 1
            training.order(2, saved)
            failed = training.answer()
            assert isinstance(failed, checkpoint_messages.CheckpointFailed)
            assert failed.is_superseded
            training.order(4, saved)
        if at == 4:
            assert Path(training.answer().path).name == "step-00000004-g0"

    training.steps(5, act)
    assert worker.page.get(HeartbeatField.DISCARDED_COUNT) == 1
    assert [path.name for path in sorted(saved.glob("step-*"))] == ["step-00000004-g0"]
    assert_is(saved / "step-00000004-g0", training.states[4])


def test_a_refusal_is_shown_with_its_numbers_and_a_failed_capture_is_void(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_capture, "_RETRY_S", 0.0)
    training = Training(worker)
    pool = training.session._protection._capture._pool  # type: ignore[union-attr]

    def fails(*_: object, **__: object) -> None:
        raise ValueError("a bad value")

    def act(at: int) -> None:
        if at in (1, 3):  # the pool; then the answer that two slots do not fit
            training.await_pool()
        if at == 2:
            assert " 2 MB are free" in training.reason()
            training.limit(POOL_BYTES + 5 * MB)
        if at == 4:
            assert " 5 MB are free" in training.reason()
            worker.commands.set(CommandField.CAPTURE_FROM, 5)
            monkeypatch.setattr(PooledCopy, "copy_boundary", fails)
        if at == 5:
            assert "a bad value" in training.reason()
            header = pool._pool.header()
            assert (header.step, header.state) == (5, SlotState.VOID)

    training.steps(6, act)
    training.await_pool()  # the last request holds a connection


def test_memory_that_is_free_again_ends_the_pools(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_capture, "_RETRY_S", 0.0)
    training = Training(worker)

    def act(at: int) -> None:
        if at == 1:
            training.await_pool()
        if at == 2:
            assert "through a pool" in training.reason()
            training.limit(0)
        if at == 3:
            training.await_pool()  # the question whether two slots fit is answered
            assert not worker.commands.get(CommandField.POOLED)

    training.steps(8, act)
    assert worker.saved()[0] == 8
    assert not training.reason()


def test_a_state_that_grows_keeps_its_version_in_memory_until_a_checkpoint_is_complete(
    worker: Worker, tmp_path: Path
) -> None:
    training = Training(worker, limit_bytes=24 * MB)

    def num_arenas() -> int:
        return len(worker.ask(smp_messages.HandOverMemory()).fds)

    def act(at: int) -> None:
        if at == 3:
            assert worker.committed_version().step == 3
            training.model.register_buffer("more", torch.zeros(2 * MB))
        if at == 5:
            training.await_pool()
            assert num_arenas() == 1
        if at == 6:
            assert num_arenas() == 1
            training.order(7, tmp_path / "saved")
        if at == 7:
            assert training.answer().path
            assert num_arenas() == 0

    training.steps(8, act)
    assert_is(tmp_path / "saved" / "step-00000007-g0", training.states[7])
