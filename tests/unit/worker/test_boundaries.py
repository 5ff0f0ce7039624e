"""When a snapshot is due, and how an accumulation in progress is detected."""

import os
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from ftrun.config.profile import SnapshotConfig
from ftrun.wire.shared_memory.pages import (
    CommandField,
    HeartbeatField,
    SharedPage,
    create_command_page,
    create_page,
)
from ftrun.worker.capture.boundaries import AccumulationTracker, SnapshotSchedule, StepActivity

STEP_S = 0.1


@pytest.fixture
def pages() -> Iterator[tuple[SharedPage, SharedPage]]:
    fds = (create_page("beats"), create_command_page())
    yield SharedPage(fds[0]), SharedPage(fds[1])
    for fd in fds:
        os.close(fd)


def snapshot(made: SnapshotSchedule, *turns_s: float, quiet: int = 10) -> None:
    """A copy's turn, the turns until its commit, and quiet turns after it."""
    for number, step_s in enumerate(turns_s):
        turn = StepActivity.PROTECT if number else StepActivity.COPY
        made.learn(turn, step_s=step_s, copy_s=0.02, blocked_s=0.0)
    for _ in range(quiet):
        made.learn(StepActivity.QUIET, step_s=STEP_S, copy_s=0.02, blocked_s=0.0)


def test_the_copy_alone_costs_its_share(pages: tuple[SharedPage, SharedPage]) -> None:
    made = SnapshotSchedule(SnapshotConfig(overhead_budget=0.02), *pages)
    for _ in range(5):
        snapshot(made, STEP_S * 1.05)
    assert pages[0].get(HeartbeatField.REQUESTED_EVERY) == 3


def test_turns_that_wait_for_other_nodes_count(pages: tuple[SharedPage, SharedPage]) -> None:
    made = SnapshotSchedule(SnapshotConfig(overhead_budget=0.02), *pages)
    for _ in range(5):
        snapshot(made, STEP_S * 1.1, *[STEP_S * 1.05] * 10)
    # From Python 3.12 on, sum() rounds otherwise.
    assert pages[0].get(HeartbeatField.REQUESTED_EVERY) in (30, 31)


def test_time_that_the_training_was_paused_is_the_least(
    pages: tuple[SharedPage, SharedPage],
) -> None:
    made = SnapshotSchedule(SnapshotConfig(overhead_budget=0.02), *pages)
    snapshot(made, STEP_S)
    made.learn(StepActivity.QUIET, step_s=STEP_S, copy_s=0.0, blocked_s=0.02)
    assert pages[0].get(HeartbeatField.REQUESTED_EVERY) == 10


def test_without_a_quiet_turn_the_interval_grows_until_there_is_one(
    pages: tuple[SharedPage, SharedPage],
) -> None:
    made = SnapshotSchedule(SnapshotConfig(overhead_budget=1.0), *pages)
    snapshot(made, *[STEP_S] * 8, quiet=0)
    assert pages[0].get(HeartbeatField.REQUESTED_EVERY) == 16
    snapshot(made, *[STEP_S] * 8, quiet=1)
    assert pages[0].get(HeartbeatField.REQUESTED_EVERY) == 1


def test_an_interval_holds_from_the_step_that_all_have_received(
    pages: tuple[SharedPage, SharedPage],
) -> None:
    made = SnapshotSchedule(SnapshotConfig(every="auto"), *pages)
    pages[1].set(CommandField.SNAPSHOT_EVERY, 4)
    pages[1].set(CommandField.EVERY_FROM_STEP, 10)
    assert [step for step in range(20) if made.is_due(step)] == [*range(11), 12, 16]


def test_a_request_is_answered_once_at_the_first_boundary_that_allows_it(
    pages: tuple[SharedPage, SharedPage],
) -> None:
    made = SnapshotSchedule(SnapshotConfig(every=1000), *pages)
    commands = pages[1]
    assert not made.is_due(1)
    commands.set(CommandField.CAPTURE_FROM, 3)
    # Boundaries 3 and 4 are within an accumulation, and do not ask.
    assert [step for step in (2, 5, 6, 7) if made.is_due(step)] == [5]
    commands.set(CommandField.CAPTURE_FROM, 8)
    commands.set(CommandField.TAKE_FROM, 10)
    assert [step for step in range(8, 13) if made.is_due(step)] == [10]
    assert made.drain_missed() == -1


def test_a_request_that_comes_after_its_boundary_is_reported_as_missed(
    pages: tuple[SharedPage, SharedPage],
) -> None:
    made = SnapshotSchedule(SnapshotConfig(every=1000), *pages)
    assert not any(map(made.is_due, range(1, 6)))
    pages[1].set(CommandField.CAPTURE_FROM, 5)  # other ranks have received it before boundary 5
    assert not made.is_due(6)
    assert (made.drain_missed(), made.drain_missed()) == (5, -1)
    assert not made.is_due(7)
    pages[1].set(CommandField.CAPTURE_FROM, 8)
    assert made.is_due(8)


def test_steps_that_are_persisted_get_a_snapshot_in_addition_to_the_interval(
    pages: tuple[SharedPage, SharedPage],
) -> None:
    made = SnapshotSchedule(SnapshotConfig(every=6), *pages)
    pages[1].set(CommandField.PERSIST_EVERY, 4)
    assert [step for step in range(1, 17) if made.is_due(step)] == [4, 6, 8, 12, 16]
    pages[1].set(CommandField.TAKE_FROM, 19)
    assert [step for step in range(17, 25) if made.is_due(step)] == [20, 24]


@pytest.fixture
def pair() -> Iterator[tuple[nn.Module, torch.optim.Optimizer, AccumulationTracker]]:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = AccumulationTracker([optimizer])
    yield model, optimizer, made
    made.close()


Pair = tuple[nn.Module, torch.optim.Optimizer, AccumulationTracker]


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 3)).sum().backward()


def test_before_any_backward_nothing_is_pending(pair: Pair) -> None:
    assert not pair[2].boundary()


def test_gradients_are_pending_until_the_optimizer_steps(pair: Pair) -> None:
    model, optimizer, accumulation = pair
    backward(model)
    assert accumulation.boundary()
    backward(model)
    assert accumulation.boundary()
    backward(model)
    optimizer.step()
    assert not accumulation.boundary()
    assert not accumulation.boundary()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_after_a_step_the_next_backward_is_pending_again(pair: Pair, set_to_none: bool) -> None:
    model, optimizer, accumulation = pair
    backward(model)
    optimizer.step()
    assert not accumulation.boundary()
    optimizer.zero_grad(set_to_none=set_to_none)
    backward(model)
    assert accumulation.boundary()


def test_a_gradient_at_the_place_of_one_that_was_freed_is_another() -> None:
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulation = AccumulationTracker([optimizer])
    backward(model)
    optimizer.step()
    assert not accumulation.boundary()
    place = id(model.weight.grad)
    optimizer.zero_grad()
    elsewhere = []
    while id(grad := torch.ones(1, 3)) != place:
        elsewhere.append(grad)
        assert len(elsewhere) < 10_000, "the freed place is not reused"
    model.weight.grad = grad
    assert accumulation.boundary()
    accumulation.close()


def test_one_of_several_optimizers_in_the_middle_is_enough(pair: Pair) -> None:
    model, optimizer, accumulation = pair
    other = nn.Linear(3, 1)
    both = AccumulationTracker([optimizer, torch.optim.SGD(other.parameters(), lr=0.1)])
    backward(model)
    backward(other)
    optimizer.step()
    assert both.boundary()
    assert not accumulation.boundary()
    both.close()


def test_a_step_that_no_hook_sees_is_seen_by_the_parameters(pair: Pair) -> None:
    model, _, accumulation = pair
    accumulation.boundary()
    backward(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.1)
    assert not accumulation.boundary()


class Reported:
    """An object that reports its own position."""

    def __init__(self, *answers: bool) -> None:
        self.answers = list(answers)

    def is_within_accumulation(self) -> bool:
        return self.answers.pop(0)


def test_an_object_that_keeps_gradients_for_itself_is_asked_at_each_boundary(pair: Pair) -> None:
    model, optimizer, _ = pair
    both = AccumulationTracker([optimizer], [object(), Reported(True, False, False)])
    assert both.boundary()
    assert not both.boundary()
    backward(model)
    assert both.boundary()
    both.close()


def test_with_most_parameters_frozen_the_gradients_of_the_others_are_found() -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(40)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in {"7.weight", "33.bias"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulation = AccumulationTracker([optimizer])
    backward(model)
    assert accumulation.boundary()
    backward(model)
    optimizer.step()
    assert not accumulation.boundary()
    optimizer.zero_grad()
    backward(model)
    assert accumulation.boundary()
    accumulation.close()


def test_a_gradient_of_one_expert_of_many_is_found() -> None:
    experts = nn.ModuleList(nn.Linear(3, 1, bias=False) for _ in range(40))
    optimizer = torch.optim.SGD(experts.parameters(), lr=0.1)
    accumulation = AccumulationTracker([optimizer])
    backward(experts[3])
    optimizer.step()
    assert not accumulation.boundary()
    backward(experts[17])
    assert accumulation.boundary()
    accumulation.close()


def test_an_optimizer_without_gradients_is_in_no_accumulation() -> None:
    model, idle = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    both = AccumulationTracker([optimizer, torch.optim.SGD(idle.parameters(), lr=0.1)])
    backward(model)
    assert both.boundary()
    optimizer.step()
    assert not both.boundary()
    both.close()


def test_a_frozen_weight_that_the_script_changes_is_no_step() -> None:
    model = nn.Linear(3, 1)
    model.weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulation = AccumulationTracker([optimizer])
    accumulation.boundary()
    backward(model)
    model.weight.mul_(0.5)
    assert accumulation.boundary()
    accumulation.close()


def test_gradients_that_are_freed_after_a_step_are_not_pending(pair: Pair) -> None:
    model, optimizer, accumulation = pair
    backward(model)
    optimizer.step()
    assert not accumulation.boundary()
    model.weight.grad = None
    assert not accumulation.boundary()


def test_gradients_of_the_turn_before_are_found_when_a_step_uses_them(pair: Pair) -> None:
    model, optimizer, accumulation = pair
    for _ in range(2):  # the first step has no gradients
        optimizer.step()
        optimizer.zero_grad()
        backward(model)
        accumulation.boundary()
    assert accumulation.crossing == []
    optimizer.step()
    assert accumulation.crossing == [optimizer]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_discarded_gradients_do_not_cross(pair: Pair, set_to_none: bool) -> None:
    model, optimizer, accumulation = pair
    for _ in range(4):
        optimizer.zero_grad(set_to_none=set_to_none)
        backward(model)
        optimizer.step()
        backward(model)  # as a generator's loss does to its discriminator
        accumulation.boundary()
    assert accumulation.crossing == []


@pytest.mark.filterwarnings("ignore:Converting a tensor:UserWarning")  # torch 2.8's own LBFGS
def test_gradients_that_a_closure_makes_do_not_cross() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    accumulation = AccumulationTracker([optimizer])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(torch.ones(2, 3)) - 1).square().sum()
        loss.backward()
        return loss

    for _ in range(4):
        optimizer.step(closure)
        accumulation.boundary()
    accumulation.close()
    assert accumulation.crossing == []


def test_gradients_that_a_restore_has_made_are_not_pending_until_one_is_added_to(
    pair: Pair,
) -> None:
    model, _, accumulation = pair
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    accumulation.restored()
    assert not accumulation.boundary()
    backward(model)
    assert accumulation.boundary()


@pytest.mark.parametrize("has_hook", [True, False])
def test_after_a_restore_in_place_a_step_of_a_broken_turn_does_not_count(
    pair: Pair, has_hook: bool
) -> None:
    model, optimizer, accumulation = pair
    backward(model)
    accumulation.boundary()
    if has_hook:
        optimizer.step()  # of a turn that is broken after it
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.mul_(1)  # the restore writes to it
        parameter.grad = None
    accumulation.restored()
    backward(model)
    assert accumulation.boundary()


@pytest.mark.parametrize("is_zero", [True, False])
def test_gradients_set_to_zero_while_another_optimizer_steps_are_not_pending(is_zero: bool) -> None:
    model, other = nn.Linear(3, 1), nn.Linear(3, 1)
    still = torch.optim.SGD(model.parameters(), lr=0.1)
    stepping = torch.optim.SGD(other.parameters(), lr=0.1)
    accumulation = AccumulationTracker([still, stepping])
    backward(model)
    still.step()
    assert not accumulation.boundary()
    for _ in range(2):
        still.zero_grad(set_to_none=False)
        if not is_zero:
            model(torch.ones(2, 3)).sum().backward()
        backward(other)
        stepping.step()
        assert accumulation.boundary() is not is_zero
    assert (still in accumulation.pending) is not is_zero
    assert accumulation.waiting_turns == (0 if is_zero else 2)
    accumulation.close()
