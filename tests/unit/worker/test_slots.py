"""The amount of requested memory, the retry after a refusal, and the advice of the refusal."""

import pytest
import torch
from torch import nn

from ftrun.errors import MemoryTooSmall
from ftrun.worker.capture import slots
from ftrun.worker.state.attached import AttachedState
from ftrun.worker.state.state_tree import StateTree


def is_over(*, needed_bytes: int, available_bytes: int) -> bool:
    error = MemoryTooSmall(
        needed_bytes=needed_bytes, available_bytes=available_bytes, limit="a limit"
    )
    return slots._Refusal(error, ((), ()), 8).is_over()


def test_memory_that_has_become_free_is_asked_for_before_the_pause_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slots, "_RETRY_S", 600.0)
    assert not is_over(needed_bytes=2, available_bytes=1)  # free now, and refused just now
    monkeypatch.setattr(slots, "_RECHECK_S", 0.0)
    assert is_over(needed_bytes=2, available_bytes=1)
    assert not is_over(needed_bytes=1 << 60, available_bytes=1)
    assert not is_over(needed_bytes=2, available_bytes=2)  # it was free when it was refused


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adam, {}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.Adamax, {}),
        (torch.optim.NAdam, {}),
        (torch.optim.RAdam, {}),
        (torch.optim.RMSprop, {}),
        (torch.optim.RMSprop, {"momentum": 0.9}),
        (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
        (torch.optim.Rprop, {}),
        (torch.optim.Adadelta, {}),
        (torch.optim.ASGD, {}),
        (torch.optim.Adafactor, {}),
    ],
)
def test_the_guess_at_attach_is_the_state_after_the_first_step(
    kind: type[torch.optim.Optimizer], options: dict[str, object]
) -> None:
    weight = nn.Parameter(torch.ones(64, 64))
    optimizer = kind([weight], **{"lr": 0.1, **options})
    guess = slots._state_copies(optimizer)
    weight.sum().backward()
    optimizer.step()
    kept = sum(t.numel() for t in optimizer.state[weight].values() if isinstance(t, torch.Tensor))
    assert round(kept / weight.numel()) == guess


def test_refused_memory_names_the_flags_that_help() -> None:
    how = {"needed_bytes": 10**9, "available_bytes": 10**8, "limit": "a cgroup", "num_ranks": 2}
    text = str(MemoryTooSmall(state_bytes=10**8, **how))
    assert "start fewer ranks per node (--nproc-per-node)" in text
    assert "skip" not in text
    text = str(MemoryTooSmall(state_bytes=10**8, frozen_bytes=9 * 10**7, **how))
    assert "no optimizer updates (90 MB of this state) by attach(skip=[" in text


def test_frozen_parameters_are_those_of_no_optimizer() -> None:
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 1, bias=False))
    attached = AttachedState()
    attached.add("model", model)
    attached.add("optimizer", torch.optim.SGD(model[1].parameters(), 0.1))
    assert slots.frozen_bytes(StateTree(attached).collect({})) == 400
