"""A rank injects an ordered fault into itself, once, at the named step."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ftrun import clock
from ftrun.wire.fault_orders import FaultOrder, FaultPage, make_order
from ftrun.wire.shared_memory.pages import (
    HeartbeatField,
)
from ftrun.worker.context import WorkerContext
from ftrun.worker.process import in_process_faults as inner_faults
from ftrun.worker.process.in_process_faults import InProcessFaults, slow_input
from tests.launch_requests import context_of


@pytest.fixture
def page() -> Iterator[FaultPage]:
    made = FaultPage.create(0)
    yield made
    made.close()


@pytest.fixture
def context() -> WorkerContext:
    return context_of()


class Job:
    """An optimizer whose steps are reported to the watch like by the hook."""

    def __init__(self, context: WorkerContext, page: FaultPage) -> None:
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.0)
        self._heartbeats = context.page
        self.watch = InProcessFaults(context, page)

    def step(self) -> None:
        self._heartbeats.add(HeartbeatField.OPTIMIZER_STEPS, 1)
        self.watch.after_step(self.optimizer)


def ordered(page: FaultPage, kind: str, **more: Any) -> FaultOrder:
    order = make_order("f1", kind, rank=0, **more)
    page.put(order)
    return order


def test_it_fires_once_at_its_step(context: WorkerContext, page: FaultPage) -> None:
    job = Job(context, page)
    ordered(page, "exception", at_step=3)
    job.step()
    job.step()
    assert page.fired == 0
    with pytest.raises(RuntimeError, match="rank 0, step 3"):
        job.step()
    assert (page.fired, page.fired_step, page.times) == (1, 3, 1)
    job.step()
    assert page.times == 1


def test_the_next_process_of_a_rank_does_not_do_it_again(
    context: WorkerContext, page: FaultPage
) -> None:
    ordered(page, "exception", at_step=1)
    with pytest.raises(RuntimeError):
        Job(context, page).step()
    context.page.set(HeartbeatField.OPTIMIZER_STEPS, 0)
    other = Job(context, FaultPage(os.dup(page.fd)))
    other.step()
    other.step()
    assert page.times == 1


@pytest.mark.parametrize("kind", ["poison-batch", "exception"])
def test_what_is_to_be_repeated_is_repeated_at_the_same_step(
    context: WorkerContext, page: FaultPage, kind: str
) -> None:
    ordered(page, kind, at_step=2, again=True)
    for time in (1, 2):
        context.page.set(HeartbeatField.OPTIMIZER_STEPS, 0)
        job = Job(context, FaultPage(os.dup(page.fd)))
        job.step()
        with pytest.raises(RuntimeError):
            job.step()
        job.step()
        assert page.times == time


def test_a_restored_rank_counts_the_steps_of_the_run(
    context: WorkerContext, page: FaultPage
) -> None:
    context.page.set(HeartbeatField.ATTACHED, 1)
    context.page.set(HeartbeatField.RESTORED_STEP, 40)
    ordered(page, "nan", at_step=41)
    Job(context, page).step()
    assert page.fired_step == 41


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_one_bit_of_one_weight_flips(
    context: WorkerContext, page: FaultPage, dtype: torch.dtype
) -> None:
    job = Job(context, page)
    job.weight.data = torch.ones(2, 3, dtype=dtype)
    ordered(page, "weight-bitflip")
    job.step()
    assert job.weight.flatten().tolist() == [1.5, 1, 1, 1, 1, 1]
    assert page.fired == 1


def test_nan_and_spike(context: WorkerContext, page: FaultPage) -> None:
    job = Job(context, page)
    ordered(page, "spike", amount=7.0)
    job.step()
    assert job.weight.tolist() == [7, 7, 7]
    page.put(make_order("f2", "nan", rank=0))
    job.step()
    assert job.weight.isnan().tolist() == [True, False, False]


@pytest.mark.parametrize("weight", [torch.empty(0), torch.ones(2).to(torch.float8_e5m2)])
def test_what_cannot_be_made_is_harmless_and_is_not_tried_again(
    context: WorkerContext, page: FaultPage, weight: torch.Tensor
) -> None:
    ordered(page, "weight-bitflip")
    job = Job(context, page)
    job.weight.data = weight
    job.step()
    assert (page.fired, page.failed) == (0, 1)
    assert "weight-bitflip needs a parameter" in page.reason
    context.page.set(HeartbeatField.OPTIMIZER_STEPS, 0)
    other = Job(context, FaultPage(os.dup(page.fd)))
    other.step()
    assert other.weight.tolist() == [1, 1, 1]
    page.put(make_order("f2", "nan", rank=0))
    other.step()
    assert (page.fired, page.failed) == (2, 1)


def test_a_rank_moves_into_its_cgroup_at_its_step(
    context: WorkerContext, page: FaultPage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inner_faults, "_CGROUPS", tmp_path)
    group = tmp_path / "memory" / "ftrun-fault-f1"
    group.mkdir(parents=True)
    ordered(page, "oom", at_step=2)
    job = Job(context, page)
    job.step()
    assert not list(group.iterdir())
    job.step()
    assert (group / "cgroup.procs").read_text() == str(os.getpid())
    assert page.fired == 0, "a folder is no cgroup: nothing may be allocated"


def test_nothing_is_allocated_outside_a_cgroup_made_for_it(
    context: WorkerContext, page: FaultPage
) -> None:
    ordered(page, "oom", amount=1 << 40)
    Job(context, page).step()
    assert page.fired == 0


def test_a_step_of_another_optimizer_is_not_a_step(context: WorkerContext, page: FaultPage) -> None:
    job = Job(context, page)
    ordered(page, "nan")
    job.watch.after_step(job.optimizer)
    assert page.fired == 0
    job.step()
    assert page.fired == 1


def test_batches_come_late_for_a_while() -> None:
    reported: list[str] = []
    note = reported.append
    slow_input(0.01, 0.2, lambda: note("fired"), lambda: note("ended"), clock.now_s)
    batches = 0
    while "ended" not in reported:
        batches += sum(1 for _ in torch.utils.data.DataLoader(list(range(8))))
    assert reported == ["fired", "ended"]
    assert batches % 8 == 0


def test_batches_that_come_late_are_in_time_again_once_that_is_taken_back(
    context: WorkerContext, page: FaultPage
) -> None:
    job = Job(context, page)
    order = ordered(page, "slow-input", amount=0.01)
    job.step()
    loader = torch.utils.data.DataLoader(list(range(3)))
    assert len(list(loader)) == 3
    assert (page.fired, page.ended) == (1, 0)
    assert order.for_s == 0
    page.cancel(1)
    assert len(list(loader)) == 3
    assert page.ended == 1


def test_an_order_that_is_taken_back_in_time_never_fires(
    context: WorkerContext, page: FaultPage
) -> None:
    job = Job(context, page)
    ordered(page, "nan", at_step=2)
    job.step()
    page.cancel(1)
    job.step()
    job.step()
    assert page.fired == 0
    ordered(page, "nan")
    job.step()
    assert page.fired == 2, "the next one is another"


@pytest.mark.parametrize("kind", ["hang", "busy-loop"])
def test_a_rank_that_is_paused_continues_once_that_is_taken_back(
    context: WorkerContext, page: FaultPage, kind: str
) -> None:
    job = Job(context, page)
    ordered(page, kind, for_s=60.0)

    def take_back() -> None:
        while not page.fired:  # otherwise it would never fire
            clock.sleep(0.01)
        clock.sleep(0.3)
        page.cancel(1)

    other = threading.Thread(target=take_back, daemon=True)
    started_s = clock.now_s()
    other.start()
    job.step()
    other.join()
    assert 0.2 < clock.now_s() - started_s < 50.0
    assert (page.fired, page.ended) == (1, 1)
