"""Samples of lazy tensors detect every wide enough change, and name the tensor."""

import threading

import pytest
import torch

from ftrun.snapshot.layout import CopyTiming
from ftrun.worker.capture import copying
from ftrun.worker.capture.copying import BOUNDARY_BYTES, is_lazy
from ftrun.worker.capture.lazy_check import ROW_BYTES, LazyCopyCheck, LazySamples, LazyTensor
from ftrun.worker.state.state_tree import source_of

ITEMS = 3 * ROW_BYTES // 4 + 1000


def tensors() -> dict[str, torch.Tensor]:
    """One tensor of each kind that is sampled differently, with bytes that vary."""
    torch.manual_seed(0)
    flat = torch.rand(ITEMS)
    return {
        "flat": flat,
        "columns": torch.rand(300, 200).t(),
        "half": torch.rand(ITEMS).to(torch.bfloat16),
        "nan": torch.full((ITEMS,), float("nan")),
        "last": torch.rand(2, 3 * ROW_BYTES, 5).to(torch.float8_e4m3fn),
        "wide": torch.randn(5_000, dtype=torch.complex128).view(50, 100).t(),
        "exponents": torch.rand(ITEMS).to(torch.float8_e8m0fnu),
        "complex": torch.randn(10_000, dtype=torch.complex64).view(100, 100).t(),
    }


def checked(sources: dict[str, torch.Tensor]) -> tuple[LazyCopyCheck, dict[str, torch.Tensor]]:
    targets = {name: tensor.clone().contiguous() for name, tensor in sources.items()}
    lazy = [LazyTensor(name, tensor, targets[name]) for name, tensor in sources.items()]
    return LazyCopyCheck(LazySamples(lazy)), targets


def test_what_stays_and_is_copied_right_is_not_named() -> None:
    check, _ = checked(tensors())
    check.observe()
    assert check.wrong_copies() == check.changed_before_step() == check.changed_now() == []


@pytest.mark.parametrize("name", tensors())
def test_a_wrong_copy_is_named(name: str) -> None:
    check, targets = checked(tensors())
    targets[name].data.zero_()
    assert check.wrong_copies() == [name]
    assert check.changed_now() == []


@pytest.mark.parametrize("name", tensors())
def test_a_change_that_autograd_does_not_count_is_named_until_it_is_undone(name: str) -> None:
    sources = tensors()
    check, _ = checked(sources)
    backup = sources[name].clone()
    sources[name].data.zero_()
    assert check.changed_now() == [name]
    sources[name].data.copy_(backup)
    assert check.changed_now() == check.changed_before_step() == []
    sources[name].data.zero_()
    check.observe()
    sources[name].data.copy_(backup)
    check.observe()
    assert check.changed_before_step() == [name]


def test_a_change_that_autograd_counts_makes_a_copy_wrong() -> None:
    sources = tensors()
    check, _ = checked(sources)
    sources["half"][:1] += 1
    assert check.wrong_copies() == ["half"]


@pytest.mark.parametrize("row", range(3))
def test_each_row_is_sampled(row: int) -> None:
    check, targets = checked(tensors())
    items = ROW_BYTES // 4 + 1000 // 3
    targets["flat"].data[row * items : (row + 1) * items] += 1
    assert check.wrong_copies() == ["flat"]


def test_samples_lie_elsewhere_for_each_snapshot() -> None:
    """A change of one cache line in 64 is detected in one of some hundred snapshots."""
    sources = {"flat": torch.rand(BOUNDARY_BYTES)}
    lazy = [LazyTensor("flat", sources["flat"], target := sources["flat"].clone())]
    samples = LazySamples(lazy)
    target[: BOUNDARY_BYTES // 16] += 1
    found = [LazyCopyCheck(samples).wrong_copies() for _ in range(600)]
    assert ["flat"] in found
    assert [] in found


def test_small_empty_and_uncounted_tensors_are_copied_at_the_boundary() -> None:
    with torch.inference_mode():
        uncounted = torch.zeros(BOUNDARY_BYTES)
    cases = {
        "large": (torch.zeros(BOUNDARY_BYTES), True),
        "small": (torch.zeros(BOUNDARY_BYTES // 4), False),
        "empty": (torch.zeros(0, BOUNDARY_BYTES), False),
        "uncounted": (uncounted, False),
        "hasty": (torch.zeros(BOUNDARY_BYTES), False),
    }
    for name, (tensor, lazy) in cases.items():
        assert is_lazy(source_of(name, tensor, CopyTiming.LAZY), {"hasty"}) is lazy, name
        assert not is_lazy(source_of(name, tensor, CopyTiming.BOUNDARY), set())


def test_a_copy_thread_that_dies_does_not_block_its_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_LOOK_S", 0.01)
    thread = copying.CopyThread()
    done = threading.Event()

    def exits() -> None:
        raise SystemExit(3)

    def late() -> None:
        assert done.wait(60)

    thread.start(exits)
    assert thread.wait(60)
    thread.start(late)
    assert not thread.wait(0.02)
    done.set()
    assert thread.wait(60)
    thread._thread = threading.Thread()  # as one that has ended
    thread._idle.clear()
    assert thread.wait(60), "its job is lost"
    thread.start(done.clear)
    assert thread.wait(60)
    assert not done.is_set(), "by another thread"
