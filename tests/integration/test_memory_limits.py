"""A lack of memory costs snapshots for as long as it lasts, and status shows the numbers.

Most tests train in this process against a real SMP. It gets no more memory if its limit for a file
is lowered, which applies to a memfd too, or in a cgroup with a limit.
"""

import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ftrun import clock
from ftrun.config.profile import SnapshotConfig
from ftrun.errors import MemoryTooSmall
from ftrun.wire.shared_memory.arena import Arena, arena_bytes
from ftrun.wire.shared_memory.pages import CommandField, HeartbeatField
from ftrun.worker import smp_client as memory_link
from ftrun.worker.capture import slots
from ftrun.worker.session import Session
from tests.integration.conftest import Run as FtrunRun
from tests.integration.conftest import Start
from tests.integration.in_process_worker import TIMEOUT_S, Run, assert_same
from tests.memory_cgroup import memory_cgroup

WIDTH = 300
MB = 10**6
ADDRESSES = 32 * MB


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.close()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of one slot in each request for an arena."""
    found: list[int] = []
    request = memory_link.WorkerSmpClient.request_arena

    def count(self: memory_link.WorkerSmpClient, **how: int) -> int:
        found.append(how["image_bytes"])
        return request(self, **how)

    monkeypatch.setattr(memory_link.WorkerSmpClient, "request_arena", count)
    return found


def refuse_memory(run: Run, *, is_short: bool) -> None:
    """From now on the kernel gives the SMP no memfd of more than a page; or any again."""
    size = 4096 if is_short else resource.RLIM_INFINITY
    resource.prlimit(run.smp.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


class Training:
    """A small model, and the results of its session at each step."""

    def __init__(
        self, run: Run, *, width: int = WIDTH, is_grown: bool = False, **given: Any
    ) -> None:
        torch.manual_seed(0)
        self.run = run
        self.model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 3))
        self.inputs = torch.ones(4, width)
        if is_grown:
            self.grow()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.session: Session = run.attach(model=self.model, optimizer=self.optimizer, **given)

    def steps(self, num: int, act: Callable[[int], object] = lambda at: None) -> None:
        """Train up to this number of steps; `act` runs at the beginning of each iteration."""
        for at in self.session.steps(num):
            act(at)
            self.optimizer.zero_grad()
            self.model(self.inputs).square().mean().backward()
            self.optimizer.step()

    def committed(self) -> int:
        return self.run.commands.get(CommandField.COMMITTED_STEP)

    def grow(self) -> None:
        """The state gets another shape."""
        self.model.register_buffer("seen", torch.zeros(WIDTH))

    def shrink(self) -> None:
        del self.model.seen


@pytest.mark.parametrize("is_expected", [True, False])
def test_the_first_arena_is_made_of_the_memory_that_attach_prepares(
    run: Run, monkeypatch: pytest.MonkeyPatch, *, is_expected: bool
) -> None:
    """Unless the state is larger than expected: then it gets new memory."""
    monkeypatch.setattr(slots, "_PREPARED_BYTES", 0)
    if not is_expected:
        monkeypatch.setattr(slots, "_state_copies", lambda optimizer: 0)
    inodes: dict[str, list[int]] = {"prepare_arena": [], "request_arena": []}

    def noted(name: str) -> Callable[..., int]:
        ask = getattr(memory_link.WorkerSmpClient, name)

        def asked(self: memory_link.WorkerSmpClient, **how: int) -> int:
            fd = int(ask(self, **how))
            inodes[name].append(os.fstat(fd).st_ino)
            return fd

        return asked

    for name in inodes:
        monkeypatch.setattr(memory_link.WorkerSmpClient, name, noted(name))
    training = Training(run)
    training.steps(3)
    assert training.committed() >= 2
    (prepared,), (used,) = inodes["prepare_arena"], inodes["request_arena"]
    assert (prepared == used) is is_expected


def test_memory_that_is_refused_costs_snapshots_until_it_is_there(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "_RETRY_S", 0.0)
    training = Training(run)
    seen: list[tuple[int, bool, str, int]] = []

    def act(at: int) -> None:
        skipped = run.page.get(HeartbeatField.SKIPPED_COUNT)
        seen.append((training.committed(), bool(run.page.get(HeartbeatField.UNPROTECTED)),
                     run.page.note, skipped))  # fmt: skip
        if at == 4:
            run.committed_version()
            refuse_memory(run, is_short=True)
            training.grow()
        if at == 8:
            assert training.committed() == 4  # the old arena and its committed version stay
            done = run.committed_version()
            arena = Arena(run.arena_fd(), writable=False)
            assert arena.find(done) is not None
            refuse_memory(run, is_short=False)

    training.steps(12, act)
    assert run.saved()[0] == 12
    for committed, is_unprotected, note, _ in seen[5:9]:
        assert committed == 4
        assert is_unprotected
        assert "MB more on this node" in note
        assert "the kernel refused it" in note
    assert [skipped for _, _, _, skipped in seen[4:9]] == [0, 1, 2, 3, 4]
    assert not run.page.get(HeartbeatField.UNPROTECTED)
    assert run.page.get(HeartbeatField.SKIPPED_COUNT) == 4

    again = Training(run, is_grown=True)  # the version sealed after the pause is restored
    assert_same(training.model, training.optimizer, again.model, again.optimizer)


def test_an_arena_that_cannot_be_mapped_costs_snapshots_until_it_can(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "_RETRY_S", 0.0)
    training = Training(run)
    unlimited = resource.getrlimit(resource.RLIMIT_AS)
    notes: list[str] = []

    def act(at: int) -> None:
        notes.append(run.page.note if run.page.get(HeartbeatField.UNPROTECTED) else "")
        if at == 3:
            training.model.register_buffer("large", torch.zeros(ADDRESSES // 4))
            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            # Enough for a thread, and for the allocations of a step, but not for two slots.
            resource.setrlimit(resource.RLIMIT_AS, (size + ADDRESSES, unlimited[1]))
        if at == 6:
            resource.setrlimit(resource.RLIMIT_AS, unlimited)

    try:
        training.steps(9, act)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, unlimited)
    assert [bool(note) for note in notes[:7]] == [False] * 4 + [True] * 3
    assert all("Cannot allocate memory" in note for note in notes[4:7])
    assert run.saved()[0] == 9
    assert not run.page.get(HeartbeatField.UNPROTECTED)


def test_refused_memory_is_not_asked_for_at_each_step(run: Run, asked: list[int]) -> None:
    training = Training(run)

    def act(at: int) -> None:
        if at == 2:
            refuse_memory(run, is_short=True)
            training.grow()

    started_s = clock.now_s()
    training.steps(40, act)
    # The first, one after each pause, and one at the last step.
    assert len(asked) <= 3 + (clock.now_s() - started_s) / slots._RETRY_S
    assert run.page.get(HeartbeatField.SKIPPED_COUNT) >= 37


def test_a_state_that_fits_again_is_protected_at_once(run: Run) -> None:
    training = Training(run)
    protected: list[bool] = []

    def act(at: int) -> None:
        protected.append(not run.page.get(HeartbeatField.UNPROTECTED))
        if at == 3:
            refuse_memory(run, is_short=True)
            training.grow()
        if at == 6:
            training.shrink()

    training.steps(9, act)
    assert protected[:7] == [True] * 4 + [False] * 3
    assert protected[8]  # the copy of step 7 ends at the latest when step 8 begins
    assert run.saved()[0] == 9


def test_required_snapshots_end_the_script_at_the_boundary(run: Run) -> None:
    run.settings = SnapshotConfig(every=1, commit_timeout_s=TIMEOUT_S, required=True)
    training = Training(run)

    def act(at: int) -> None:
        if at == 3:
            refuse_memory(run, is_short=True)
            training.grow()

    with pytest.raises(MemoryTooSmall, match="the kernel refused it"):
        training.steps(9, act)
    assert run.saved()[0] == 3


def test_values_that_grow_at_each_step_keep_their_arena(run: Run, asked: list[int]) -> None:
    losses: dict[str, list[float]] = {"losses": []}
    training = Training(run, progress=losses)
    training.steps(6, lambda at: losses["losses"].extend([0.5] * 1500))
    assert len(asked) == 1
    assert run.page.get(HeartbeatField.SKIPPED_COUNT) == 0


def test_values_that_have_grown_go_into_the_arena_of_the_rank_before(
    run: Run, asked: list[int]
) -> None:
    losses: dict[str, list[float]] = {"losses": []}
    training = Training(run, progress=losses)
    training.steps(3, lambda at: losses["losses"].extend([0.5] * 300))
    for num_steps in (5, 7):
        training = Training(run, progress=losses)
        losses["losses"].extend([0.5] * 1500)
        training.steps(num_steps)
        assert len(asked) == 1
    assert run.saved()[0] == 7


def test_tensors_that_are_added_at_each_step_are_named(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    losses: dict[str, list[torch.Tensor]] = {"losses": []}
    training = Training(run, progress=losses)
    training.steps(6, lambda at: losses["losses"].append(torch.zeros(())))
    assert run.saved()[0] == 6
    (line,) = [one for one in caplog.messages if "a new arena of" in one]
    assert "progress.losses" in line


def test_an_smp_that_dies_while_it_makes_an_arena_is_followed_by_one_that_is_asked(
    run: Run, asked: list[int]
) -> None:
    run.next_smp(crash_at="smp.arena.created")
    training = Training(run)

    def act(at: int) -> None:
        if at == 3:
            assert run.smp.wait(TIMEOUT_S)
            assert not run.page.get(HeartbeatField.SEALED_COUNT)
            run.next_smp()

    training.steps(6, act)
    assert len(asked) >= 2
    assert run.saved()[0] == 6
    handed = [one for one in threading.enumerate() if one.name == "ftrun-memory"]
    assert handed == []


def test_a_node_that_takes_long_for_its_arenas_is_waited_for(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone_s = memory_link.allocation_limit_s(100 << 30)
    assert alone_s >= 1000
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert memory_link.allocation_limit_s(100 << 30) >= 7 * alone_s
    assert memory_link.allocation_limit_s(1 << 20) < 70

    waits_s: list[float] = []
    ask = memory_link.Channel.ask

    def note(self: memory_link.Channel, body: Any, *, deadline_s: float, **how: Any) -> Any:
        waits_s.append(deadline_s)
        return ask(self, body, deadline_s=deadline_s, **how)

    monkeypatch.setattr(memory_link.Channel, "ask", note)
    monkeypatch.setattr(memory_link, "_SLOWEST_BYTES_S", 1000.0)
    link = memory_link.WorkerSmpClient(run.next_context())
    os.close(link.request_arena(image_bytes=MB, num_pieces=4, layout_id=1))
    link.close()
    assert waits_s == [memory_link.allocation_limit_s(arena_bytes(MB, 4))]
    assert waits_s[0] > 10_000


# --- a limit of the cgroup ---------------------------------------------------------------------


def test_what_will_not_fit_is_reported_at_attach_and_protected_when_there_is_room(run: Run) -> None:
    with memory_cgroup() as group:
        group.add(run.smp.pid)
        group.limit(group.used_bytes + 16 * MB)
        wanted, run.settings = run.settings, SnapshotConfig(every=1, required=True)
        with pytest.raises(MemoryTooSmall, match="two slots for 1 rank"):
            Training(run, width=1200)
        run.settings = wanted
        run.page.set(HeartbeatField.UNPROTECTED, 0)
        training = Training(run, width=1200)
        assert run.page.get(HeartbeatField.UNPROTECTED)
        note = run.page.note
        assert str(group.folder) in note
        assert "two slots for 1 rank" in note
        assert "--nproc-per-node" in note

        def act(at: int) -> None:
            if at == 3:
                assert run.page.get(HeartbeatField.SEALED_COUNT) == 0
                group.limit(200 * MB)
                clock.sleep(slots._RECHECK_S)

        training.steps(6, act)
        assert run.saved()[0] == 6
        assert not run.page.get(HeartbeatField.UNPROTECTED)


class Hoarder(torch.optim.SGD):
    """Keeps more for each parameter than its settings show."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                for at in range(20):
                    state[f"copy{at}"] = torch.zeros_like(parameter)
        return super().step(closure)


def test_a_state_larger_than_was_guessed_is_reported_before_the_first_snapshot(run: Run) -> None:
    run.settings = SnapshotConfig(every=1000, commit_timeout_s=TIMEOUT_S)
    with memory_cgroup() as group:
        group.add(run.smp.pid)
        group.limit(group.used_bytes + 8 * MB)
        model = nn.Linear(WIDTH, WIDTH)
        optimizer = Hoarder(model.parameters(), lr=0.1)
        session = run.attach(model=model, optimizer=optimizer)
        assert not run.page.get(HeartbeatField.UNPROTECTED)
        for at in session.steps(3):
            if at == 1:
                assert run.page.get(HeartbeatField.UNPROTECTED)
                assert "MB of state" in run.page.note
            model(torch.ones(4, WIDTH)).square().mean().backward()
            optimizer.step()


BEFORE_THE_FIRST_STEP = """
import pathlib, time
import torch
import ftrun

torch.set_num_threads(1)
model = torch.nn.Linear(10, 10)
model.register_buffer("table", torch.ones(1_000_000))
optimizer = torch.optim.AdamW(model.parameters())
session = ftrun.attach(model=model, optimizer=optimizer)
while not pathlib.Path("go").exists():
    time.sleep(0.05)
for step in session.steps(100_000):
    model(torch.ones(2, 10)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if pathlib.Path("end").exists():
        break
"""


def test_status_shows_what_snapshots_need_before_the_first_one(
    start: Start, script: Callable[..., str], tmp_path: Path
) -> None:
    def memory(key: str) -> int:
        return int((run.status().get("snapshots") or {}).get(key, 0))  # type: ignore[attr-defined]

    run = start("--nproc-per-node", "2", script(BEFORE_THE_FIRST_STEP))
    both_ranks = 2 * 2 * 4 * MB  # two slots for each
    run.wait_until("needed", lambda: memory("needed_bytes") >= both_ranks)
    assert memory("needed_bytes") < 1.3 * both_ranks
    assert memory("memory_bytes") == 0
    words = [sys.executable, "-m", "ftrun", "status", run.run_id]
    text = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S).stdout
    assert "none yet; 0" in text
    assert "of memory in all, up to 16" in text
    assert "more needed" in text
    (tmp_path / "go").touch()
    run.wait_until("held", lambda: memory("memory_bytes") >= both_ranks)
    run.wait_until("not needed any more", lambda: memory("needed_bytes") == 0)
    (tmp_path / "end").touch()
    assert run.wait() == 0, run.text


TWO_RANKS = """
import os, pathlib, time
import torch
import torch.distributed as dist
import ftrun

dist.init_process_group("gloo")
torch.set_num_threads(1)
model = torch.nn.Linear(10, 10)
model.register_buffer("table", torch.ones(12_000_000))
optimizer = torch.optim.AdamW(model.parameters())

def train():
    model(torch.ones(2, 10)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

train()  # all that the training needs is allocated
pathlib.Path("ready" + os.environ["RANK"]).touch()
while not pathlib.Path("go").exists():
    time.sleep(0.05)
session = ftrun.attach(model=model, optimizer=optimizer)
for step in session.steps(100_000):
    train()
    end = torch.tensor(float(pathlib.Path("end").exists()))
    dist.all_reduce(end)
    if end:
        break
"""


@pytest.mark.full
def test_two_ranks_that_fit_alone_are_unprotected_together_until_there_is_room(
    start: Start, script: Callable[..., str], tmp_path: Path
) -> None:
    """One arena takes 96 MB: one fits below the limit, and two do not."""
    with memory_cgroup() as group:
        with group.for_children():
            run = start("--nproc-per-node", "2", script(TWO_RANKS))
        both = [tmp_path / "ready0", tmp_path / "ready1"]
        run.wait_until("ready", lambda: all(one.exists() for one in both))
        group.limit(group.used_bytes + 150 * MB)
        (tmp_path / "go").touch()
        run.wait_until("unprotected", lambda: "two slots for each of 2 ranks" in run.text)
        assert str(group.folder) in run.text
        run.wait_until("in status", lambda: "UNPROTECTED" in verdict(run))
        run.wait_for_step(5)
        assert "MB more on this node" in verdict(run), run.text
        group.limit(group.used_bytes + 2000 * MB)
        run.wait_until("protected", lambda: "if a rank is killed now" in verdict(run))
        (tmp_path / "end").touch()
        assert run.wait() == 0, run.text


def verdict(run: FtrunRun) -> str:
    return str(run.status().get("summary", ""))
