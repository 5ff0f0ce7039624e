"""Steps that a script makes without and next to a session, as the heartbeat page shows them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ftrun import clock
from ftrun.wire.shared_memory.pages import HeartbeatField, SharedPage, create_page
from ftrun.worker.process import heartbeat
from tests.launch_requests import context_of


@pytest.fixture
def page() -> SharedPage:
    return SharedPage(create_page("heartbeat"))


@pytest.fixture
def step(page: SharedPage, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes one step of an optimizer at a time in seconds."""
    monkeypatch.setattr(heartbeat, "_steps_by_optimizer", {})
    hook = heartbeat._after_step(context_of(page=page))

    def step(optimizer: torch.optim.Optimizer, at_s: float) -> None:
        monkeypatch.setattr(clock, "now_ns", lambda: int(at_s * 1e9))
        hook(optimizer, (), {})

    return step


def sgd(value: float = 1.0, **settings: Any) -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.full((2,), value), **settings)
    return torch.optim.SGD([parameter], lr=0.1)


def test_a_second_optimizer_shows_life_and_changes_no_step_time(
    page: SharedPage, step: Callable[..., None]
) -> None:
    first, second = sgd(), sgd()
    for turn in range(10):
        step(first, 1.0 + turn)
        step(second, 1.5 + turn)
    assert page.get(HeartbeatField.STEP) == 10
    assert page.get(HeartbeatField.HEARTBEAT_NS) == int(10.5e9)
    counts = [count for count in page.step_times if count]
    assert counts == [9], "all of one second"


def test_steps_of_a_later_phase_show_life(page: SharedPage, step: Callable[..., None]) -> None:
    before, after = sgd(), sgd()
    for turn in range(20):
        step(before, 1.0 + turn)
    for turn in range(10):
        step(after, 100.0 + turn)
        assert page.get(HeartbeatField.HEARTBEAT_NS) == int((100.0 + turn) * 1e9)
    assert page.get(HeartbeatField.STEP) == 20


def test_steps_next_to_a_session_show_life_after_its_first_boundary(
    page: SharedPage, step: Callable[..., None]
) -> None:
    page.set(HeartbeatField.ATTACHED, 1)
    optimizer = sgd()
    step(optimizer, 1.0)
    assert page.get(HeartbeatField.HEARTBEAT_NS) == 0
    heartbeat.step_done(page, 1)
    step(optimizer, 2.0)
    assert page.get(HeartbeatField.HEARTBEAT_NS) == int(2e9)
    assert page.get(HeartbeatField.STEP) == 1


@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_frozen_mask_of_infinity_is_no_anomaly(
    page: SharedPage, step: Callable[..., None], *, is_frozen: bool
) -> None:
    step(sgd(float("-inf"), requires_grad=not is_frozen), 1.0)
    assert page.get(HeartbeatField.NUMERICAL_ANOMALY_STEP) == (0 if is_frozen else 1)
