"""Snapshots of a session of scripts with streams, graphs and devices.

The mode is `lazy`: a stream works only when a thread waits for it. So bytes are right only if
ftrun has ordered its reads and writes itself.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from fake_device import fake
from fake_device.conformance import new_graph
from torch import nn

from ftrun.config.profile import SnapshotConfig
from ftrun.wire.shared_memory.pages import HeartbeatField
from ftrun.worker.capture import device_copies, device_sources
from ftrun.worker.capture.copying import SlotCopy
from ftrun.worker.capture.device_order import StepStreams
from ftrun.worker.session import Session
from tests.integration.in_process_worker import TIMEOUT_S, Run

DEVICE = torch.device("privateuseone", 0)  # its name "fake" is unknown while tests are collected
WIDTH = 300
needs_graphs = pytest.mark.skipif(
    not hasattr(torch.accelerator, "Graph"), reason="needs torch 2.12"
)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with closing(Run(tmp_path)) as one:
        one.settings = settings(verify_first=0)
        yield one


def settings(**given: Any) -> SnapshotConfig:
    return SnapshotConfig(every=1, commit_timeout_s=TIMEOUT_S, **given)


class Counting(nn.Module):
    """Its weight grows by 1 in each step, and its buffer in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self) -> torch.Tensor:
        self.seen.add_(1.0)
        return -self.weight.sum()


def made(device: torch.device = DEVICE) -> tuple[Counting, torch.optim.Optimizer]:
    model = Counting().to(device)
    torch.accelerator.synchronize(device)
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def attached(run: Run) -> tuple[Counting, torch.optim.Optimizer, Session, torch.Stream]:
    """A model, its optimizer and session, and a stream of the script."""
    model, optimizer = made()
    session = run.attach(model=model, optimizer=optimizer)
    torch.accelerator.synchronize(DEVICE)
    return model, optimizer, session, torch.Stream(DEVICE)


def train_step(model: Counting, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model().backward()
    optimizer.step()


def finished(session: Session) -> None:
    assert session._protection is not None
    session._protection.finish()


def sealed(session: Session) -> None:
    """A boundary and the end of its copy."""
    session.step_done()
    finished(session)


@contextmanager
def captured() -> Iterator[Any]:
    graph = new_graph("fake:0")
    graph.capture_begin()
    yield graph
    graph.capture_end()


def saved(run: Run) -> dict[str, float]:
    """The value of each tensor of the newest version; all items of a tensor are equal."""
    _, tensors = run.saved()
    found = {name: one.unique().tolist() for name, one in tensors.items() if "ftrun." not in name}
    return {name: one[0] if len(one) == 1 else float("nan") for name, one in found.items()}


class Gate:
    """Holds the copy thread until `open`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open = threading.Event()
        copy_lazy = SlotCopy.copy_lazy

        def held(copy: SlotCopy, table: memoryview) -> None:
            assert self.is_open.wait(TIMEOUT_S)
            copy_lazy(copy, table)

        monkeypatch.setattr(SlotCopy, "copy_lazy", held)

    def open(self) -> None:
        self.is_open.set()


def test_a_forward_in_the_stream_of_the_step_waits_for_the_boundary_copies(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The boundaries are outside of the stream: the loop is around `with stream`."""
    model, optimizer, session, stream = attached(run)
    gate = Gate(monkeypatch)
    with stream:
        train_step(model, optimizer)
    session.step_done()
    with stream:
        model()
        stream.synchronize()
    gate.open()
    finished(session)
    assert saved(run) == {"model.weight": 1.0, "model.seen": 1.0}


def test_a_step_does_not_wait_for_the_copy_of_staged_state(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.settings = settings(verify_first=0, stage="device")
    model, optimizer, session, stream = attached(run)
    gate = Gate(monkeypatch)
    with stream:
        train_step(model, optimizer)
    session.step_done()
    with stream:
        train_step(model, optimizer)  # without staging it would wait for the gate
        stream.synchronize()
    gate.open()
    finished(session)
    assert saved(run) == {"model.weight": 1.0, "model.seen": 1.0}
    assert float(model.weight.detach().to("cpu")[0, 0]) == 2.0


@pytest.mark.parametrize("verify_first", [0, 1])
def test_the_rate_is_limited_only_in_the_copy_thread(
    verify_first: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verified snapshot is copied while the training waits."""
    limits: list[tuple[str, float]] = []
    wait = device_sources._Pace.wait

    def recorded(pace: device_sources._Pace, num_bytes: int) -> None:
        limits.append((threading.current_thread().name, pace._bytes_per_s))
        wait(pace, num_bytes)

    monkeypatch.setattr(device_sources._Pace, "wait", recorded)
    run.settings = settings(verify_first=verify_first, d2h_gb_s=3.0)
    model, optimizer, session, _ = attached(run)
    train_step(model, optimizer)
    sealed(session)
    expected = (threading.current_thread().name, 0.0) if verify_first else ("ftrun-copy", 3e9)
    assert limits == [expected]
    limits.clear()
    train_step(model, optimizer)
    sealed(session)
    assert limits == [("ftrun-copy", 3e9)]
    assert saved(run) == {"model.weight": 2.0, "model.seen": 2.0}


def test_a_step_without_a_hook_in_a_stream_of_its_own_is_awaited(run: Run) -> None:
    """A compiled step calls no hook of torch's optimizers."""
    model, optimizer, session, stream = attached(run)
    unhooked: Callable[..., Any] = type(optimizer).step.__wrapped__  # type: ignore[attr-defined]
    for _ in range(3):
        with stream:
            optimizer.zero_grad()
            model().backward()
            unhooked(optimizer)
        sealed(session)
        if run.page.get(HeartbeatField.SEALED_COUNT):
            step_of_version = float(run.saved()[0])
            assert saved(run) == dict.fromkeys(["model.weight", "model.seen"], step_of_version)
    assert run.saved()[0] == 3


def test_a_verified_snapshot_is_of_all_streams(run: Run) -> None:
    run.settings = settings(verify_first=1)
    model, optimizer = made()
    average = torch.zeros(WIDTH, device=DEVICE)
    session = run.attach(model=model, optimizer=optimizer, average=average)
    train_step(model, optimizer)
    with torch.Stream(DEVICE):
        average.add_(1.0)
    sealed(session)
    assert saved(run)["average"] == 1.0


def test_a_restore_is_complete_in_every_stream(run: Run) -> None:
    model, optimizer = made()
    session = run.attach(model=model, optimizer=optimizer)
    train_step(model, optimizer)
    sealed(session)
    before, reader = torch.Stream(DEVICE), torch.Stream(DEVICE)
    model, optimizer = made()
    with before:  # the script fills its model in a stream, and attaches outside of it
        model.weight.detach().fill_(7.0)
    assert run.attach(model=model, optimizer=optimizer).restored
    target = torch.empty(WIDTH, WIDTH, pin_memory=True)
    with reader:
        target.copy_(model.weight.detach(), non_blocking=True)
    reader.synchronize()
    assert bool((target == 1.0).all())
    torch.accelerator.synchronize(DEVICE)
    assert bool((model.weight.detach().cpu() == 1.0).all())


@needs_graphs
def test_a_step_that_is_captured_breaks_nothing(run: Run) -> None:
    """In a capture nothing may wait for work outside of it, such as the copy of a snapshot."""
    model, optimizer, session, stream = attached(run)
    with stream:
        train_step(model, optimizer)
        session.step_done()
        with captured() as graph:
            optimizer.step()
        for _ in range(2):
            graph.replay()
            sealed(session)
    assert run.page.get(HeartbeatField.UNPROTECTED) == 0
    assert saved(run) == {"model.weight": 3.0, "model.seen": 1.0}


@needs_graphs
def test_a_turn_with_a_replayed_step_that_is_left_by_break_is_a_step(run: Run) -> None:
    model, optimizer, session, stream = attached(run)
    with stream:
        for step in session.steps(9):
            if step == 0:
                train_step(model, optimizer)
                with captured() as graph:
                    optimizer.step()
                continue
            graph.replay()
            if step == 2:
                break
    finished(session)
    assert run.saved()[0] == 3
    assert saved(run) == {"model.weight": 3.0, "model.seen": 1.0}


@needs_graphs
def test_the_first_step_after_a_restore_may_be_captured(run: Run) -> None:
    """Before the first step, restored tensors are compared, which waits for the device."""
    model, optimizer = made()
    session = run.attach(model=model, optimizer=optimizer)
    train_step(model, optimizer)
    sealed(session)
    model, optimizer = made()
    assert run.attach(model=model, optimizer=optimizer).restored
    model.weight.grad = torch.full_like(model.weight, -1.0)
    model.weight.detach().mul_(1.0)  # only what was written to is compared
    torch.accelerator.synchronize(DEVICE)
    with torch.Stream(DEVICE) as stream:
        with captured() as graph:
            optimizer.step()
        graph.replay()
        stream.synchronize()
    assert bool((model.weight.detach().cpu() == 2.0).all())


@needs_graphs
def test_a_graph_that_changes_no_state_waits_for_no_copy(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward and backward by replay, and an eager step: judged in the second snapshot."""
    model, optimizer, session, stream = attached(run)
    with stream:
        train_step(model, optimizer)
        session.step_done()
        with captured() as graph:
            optimizer.zero_grad()
            (-model.weight.sum()).backward()
        for _ in range(2):
            graph.replay()
            optimizer.step()
            sealed(session)
        gate = Gate(monkeypatch)
        graph.replay()
        optimizer.step()
        session.step_done()
        graph.replay()  # while the copy has not begun
        gate.open()
        optimizer.step()
        sealed(session)
    assert run.page.get(HeartbeatField.UNPROTECTED) == 0
    assert saved(run) == {"model.weight": 5.0, "model.seen": 1.0}


@needs_graphs
def test_a_graph_that_changes_state_waits_for_each_copy(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph updates the weight, and no optimizer takes part."""
    model, optimizer, session, stream = attached(run)
    with stream:
        train_step(model, optimizer)
        optimizer.zero_grad()
        with captured() as graph:
            model.weight.detach().add_(1.0)
        session.step_done()
        for number in range(2, 6):
            graph.replay()
            stream.synchronize()
            sealed(session)
            assert saved(run) == {"model.weight": float(number), "model.seen": 1.0}
    assert "at the step boundary" not in run.page.note


def test_a_default_device_of_the_script_is_not_that_of_buffers(run: Run) -> None:
    model, optimizer = made()
    session = run.attach(model=model, optimizer=optimizer)
    torch.set_default_device("fake")
    try:
        for _ in range(2):
            train_step(model, optimizer)
            session.step_done()
            assert fake.num_pending()
        finished(session)
    finally:
        torch.set_default_device(None)
    assert run.page.get(HeartbeatField.UNPROTECTED) == 0
    assert saved(run) == {"model.weight": 2.0, "model.seen": 2.0}


@pytest.mark.parametrize("verify_first", [0, 10])
def test_no_memory_on_the_device_costs_the_snapshots_of_that_time(
    verify_first: int,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run.settings = settings(verify_first=verify_first)
    model, optimizer = made()
    model.weight.data = model.weight.data.t()  # it is made contiguous on the device
    session = run.attach(model=model, optimizer=optimizer)
    copy_lazy = SlotCopy.copy_lazy

    def without_memory(copy: SlotCopy, table: memoryview) -> None:
        limit = fake.bytes_in_use() + sum(torch.fake.mem_get_info())  # type: ignore[attr-defined]
        fake.set_memory_limit(fake.bytes_in_use())
        try:
            copy_lazy(copy, table)
        finally:
            fake.set_memory_limit(limit)

    num_failing = device_copies.NUM_BUFFERS + 1
    for number in range(num_failing + 2):
        fails = 0 < number <= num_failing
        monkeypatch.setattr(SlotCopy, "copy_lazy", without_memory if fails else copy_lazy)
        train_step(model, optimizer)
        sealed(session)
        assert run.page.get(HeartbeatField.UNPROTECTED) == fails
    assert run.page.get(HeartbeatField.SEALED_COUNT) == 2
    assert saved(run) == dict.fromkeys(["model.weight", "model.seen"], number + 1.0)
    assert "at the step boundary" not in caplog.text


@pytest.mark.parametrize("mode", ["threads"])
def test_a_boundary_in_an_accumulation_waits_for_no_device(mode: str, run: Run) -> None:
    model, optimizer = made()
    session = run.attach(model=model, optimizer=optimizer)
    for _ in range(2):
        train_step(model, optimizer)
        sealed(session)
    optimizer.zero_grad()
    is_open = threading.Event()
    fake.call_in_stream(DEVICE, lambda: _wait(is_open))
    model().backward()
    session.step_done()  # within the accumulation
    is_open.set()
    model().backward()
    optimizer.step()
    sealed(session)
    assert saved(run) == {"model.weight": 4.0, "model.seen": 4.0}


def _wait(is_open: threading.Event) -> None:
    assert is_open.wait(TIMEOUT_S)


@pytest.mark.parametrize("is_staged", [False, True], ids=["", "staged"])
@pytest.mark.parametrize("current", [0, 1])
def test_a_rank_makes_no_context_on_the_device_of_another(
    run: Run, current: int, is_staged: bool
) -> None:
    """It would take memory there, also if the script names its device only in its tensors."""
    run.settings = msgspec.structs.replace(run.settings, stage="device" if is_staged else "off")
    own = torch.device("privateuseone", 1)
    torch.accelerator.set_device_index(current)
    fake.forget_contexts()
    for _ in range(2):
        with torch.accelerator.device_index(1):
            model, optimizer = made(own)
        session = run.attach(model=model, optimizer=optimizer)
        for _ in range(2):
            with torch.accelerator.device_index(1):
                train_step(model, optimizer)
            session.report(loss=torch.ones((), device=own))
            sealed(session)
    assert session.restored
    assert fake.contexts() == [1]


def test_a_step_of_a_group_that_was_added_later_is_awaited_on_its_device() -> None:
    second = torch.device(DEVICE.type, 1)
    first, late = (nn.Parameter(torch.zeros(WIDTH).to(one)) for one in (DEVICE, second))
    for one in (first, late):
        one.grad = torch.full((WIDTH,), -1.0).to(one.device)
    optimizer = torch.optim.SGD([first], lr=1.0)
    streams, stream = StepStreams(lambda hook: hook), torch.Stream(second)
    try:
        optimizer.step()
        streams.join()
        optimizer.add_param_group({"params": [late]})
        torch.accelerator.synchronize(second)
        with stream:
            optimizer.step()
        streams.join()
        assert late.detach().cpu().tolist() == [1.0] * WIDTH
    finally:
        streams.close()
