"""The record of a worker at a boundary: the loss of the step, and a few bytes of parameters."""

import struct
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ftrun.monitor.repeat_check import LATE_STEPS, BoundaryRecord
from ftrun.wire.shared_memory.pages import MAX_SAMPLES, SharedPage, create_page
from ftrun.worker.capture.boundary_digests import STAYS, BoundaryDigests
from ftrun.worker.state.attached import AttachedState
from ftrun.worker.state.tensors import HostCopy


class Watched:
    """A model and its optimizer, and their records."""

    def __init__(self, model: nn.Module, *parameters: nn.Parameter) -> None:
        self.model = model
        self.attached = AttachedState()
        self.attached.add("model", model)
        used = list(parameters) or list(model.parameters())
        self.optimizer = torch.optim.SGD(used, lr=0.1)
        self.attached.add("optimizer", self.optimizer)
        self.page = SharedPage(create_page("test"))
        self.digests = BoundaryDigests(self.page, self.attached)

    def at(self, step: int) -> BoundaryRecord:
        self.digests.boundary(step)
        return self.page.records()[step]


def mlp(depth: int = 3, width: int = 5) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


def bits(value: float) -> int:
    return int.from_bytes(struct.pack("<d", value), "little", signed=True)


def test_equal_parameters_have_equal_records_and_others_have_not() -> None:
    one, other = Watched(mlp()), Watched(mlp())
    assert one.at(3) == other.at(3)
    with torch.no_grad():
        other.model[2].bias[4] += 1e-6
    before, after = one.at(4), other.at(4)
    assert before.has_digest == after.has_digest == 0b111111
    assert before.digests[:20] == after.digests[:20]
    assert before.digests[20:24] != after.digests[20:24]


def test_a_restart_reads_the_same_slices() -> None:
    whole, resumed = Watched(mlp(2, 300)), Watched(mlp(2, 300))
    for step in range(1, 3 * STAYS):
        found = whole.at(step)
        if step > STAYS + 7:
            assert resumed.at(step) == found, step


def test_every_slice_moves_now_and_then() -> None:
    watched = Watched(mlp(1, 300))
    before = watched.at(1).digests[:4]
    watched.digests.boundary(STAYS // 2)
    seen = {watched.at(step).digests[:4] for step in range(1, 20 * STAYS, STAYS)}
    assert before in seen
    assert len(seen) == 20


def test_parameters_are_sampled_evenly_with_the_first_and_the_last() -> None:
    watched = Watched(mlp(100, 2))
    watched.at(1)
    names = watched.page.samples
    assert len(set(names)) == MAX_SAMPLES
    assert (names[0], names[-1]) == ("model.0.weight", "model.99.bias")


def test_frozen_parameters_are_left_out_and_strange_ones_named() -> None:
    model, alone = mlp(2), nn.Parameter(torch.zeros(2))
    model[0].weight.requires_grad_(False)
    watched = Watched(model, *model.parameters(), alone)
    watched.at(1)
    assert watched.page.samples == (
        "model.0.bias",
        "model.1.weight",
        "model.1.bias",
        "optimizer.param_groups.0.params.4",
    )


def test_without_an_optimizer_the_modules_are_sampled() -> None:
    watched = Watched(mlp(1))
    watched.attached.optimizers.clear()
    watched.at(1)
    assert watched.page.samples == ("model.0.weight", "model.0.bias")


def test_a_new_group_is_sampled_too() -> None:
    watched = Watched(mlp(1))
    watched.at(1)
    watched.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert watched.at(2).has_digest == 0b111
    assert sorted(watched.page.records()) == [2]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda p: setattr(p, "data", torch.ones(5, 5)), id="data replaced"),
        pytest.param(lambda p: p.data.fill_(1), id="changed in place"),
    ],
)
def test_the_present_values_are_read(change: Callable[[nn.Parameter], object]) -> None:
    watched, ones = Watched(mlp(1)), Watched(mlp(1))
    with torch.no_grad():
        ones.model[0].weight.fill_(1)
    watched.at(1)
    change(watched.model[0].weight)
    assert watched.at(2) == ones.at(2)


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.zeros(1, 4).expand(4, 4), id="expanded"),
        pytest.param(torch.zeros(4, 4)[:, :2], id="with gaps"),
        pytest.param(torch.empty(0), id="empty"),
        pytest.param(torch.zeros(4, 4).to_sparse(), id="sparse"),
        pytest.param(torch.zeros(4, 4, device="meta"), id="meta"),
    ],
)
def test_what_has_no_memory_of_its_own_is_left_out(tensor: torch.Tensor) -> None:
    model = mlp(1)
    strange = nn.Parameter(torch.zeros(0))
    watched = Watched(model, *model.parameters(), strange)
    watched.optimizer.param_groups[0]["params"][2] = nn.Parameter(tensor)
    assert watched.at(1).has_digest == 0b011


def test_memory_order_and_dtype_do_not_matter() -> None:
    model = nn.Conv2d(2, 3, 3).to(torch.bfloat16).to(memory_format=torch.channels_last)
    assert Watched(model).at(1).has_digest == 0b11


def test_a_freed_storage_is_left_out() -> None:
    watched = Watched(mlp(1))
    watched.at(1)
    watched.model[0].weight.data.untyped_storage().resize_(0)
    assert watched.at(2).has_digest == 0b10


def test_the_loss_belongs_to_the_step_that_is_done() -> None:
    watched = Watched(mlp(1))
    watched.digests.take_loss(1, 0.5)
    watched.digests.take_loss(1, 0.25)
    assert watched.at(1).loss == bits(0.25)
    assert watched.at(2).loss is None
    watched.digests.take_loss(2, 0.75)  # from a device: one step late
    watched.digests.take_loss(3, 1.0)
    assert watched.page.records()[2].loss == bits(0.75)
    assert watched.page.records()[2].has_digest == 0b11
    assert watched.at(3).loss == bits(1.0)


def test_a_loss_that_comes_much_too_late_is_left_out() -> None:
    watched = Watched(mlp(1))
    for step in range(1, LATE_STEPS + 2):
        watched.at(step)
    watched.digests.take_loss(1, 0.5)
    watched.digests.take_loss(2, 0.5)
    assert watched.at(LATE_STEPS + 2).loss is None
    assert watched.page.records()[1].loss is None
    assert watched.page.records()[2].loss == bits(0.5)


def test_digests_of_a_device_that_is_behind_come_to_their_own_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Host copies that have not arrived replace a device, which does not exist here."""
    expected, watched = Watched(mlp()), Watched(mlp())
    before = expected.at(1)
    with monkeypatch.context() as behind:
        behind.setattr(HostCopy, "has_arrived", False)
        assert watched.at(1) == BoundaryRecord(None, 0, bytes(len(before.digests)))
        watched.model[0].weight.data.add_(1)
        watched.digests.take_loss(1, 0.5)
        assert watched.page.records()[1].has_digest == 0
        assert watched.at(2).has_digest == 0
    watched.digests.boundary(3)
    first, second, third = watched.page.records().values()
    assert first == before._replace(loss=bits(0.5))
    assert second.has_digest == third.has_digest == 0b111111
    assert second.digests[:4] != first.digests[:4]
    assert second.digests[4:] == first.digests[4:]


def test_an_error_ends_the_records_and_not_the_step(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(mlp(1))
    watched.at(1)
    monkeypatch.delattr(watched.optimizer, "param_groups")
    watched.digests.boundary(2)
    watched.digests.boundary(3)
    assert sorted(watched.page.records()) == [1]
    assert caplog.text.count("repeated steps are not compared") == 1
