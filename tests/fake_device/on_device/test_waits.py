"""Pairs: without a wait the bytes are wrong, and with it they are right.

Without the wait the mode is `lazy`, because in `threads` the bytes may be right by chance.
"""

import gc

import pytest
import torch
from fake_device import fake

DEVICE = "fake:0"
NUM = 1 << 14

PAIR = [
    pytest.param(False, "lazy", id="without"),
    pytest.param(True, "lazy", id="with"),
    pytest.param(True, "threads", id="with-threads"),
]
pair = pytest.mark.parametrize(("waits", "mode"), PAIR)


def filled(value: float) -> torch.Tensor:
    """A device tensor that is complete."""
    made = torch.full((NUM,), value, device=DEVICE)
    torch.accelerator.synchronize(0)
    return made


def pinned(value: float = -1.0) -> torch.Tensor:
    return torch.empty(NUM, pin_memory=True).fill_(value)


def current() -> torch.Stream:
    return torch.accelerator.current_stream(DEVICE)


def is_all(tensor: torch.Tensor, value: float) -> bool:
    return bool((tensor == value).all())


@pair
def test_pinned_copy_to_the_host_and_its_event(waits: bool, mode: str) -> None:
    source, target = filled(5.0), pinned()
    target.copy_(source, non_blocking=True)
    event = current().record_event()
    if waits:
        event.synchronize()
    assert is_all(target, 5.0) is waits


@pair
def test_pinned_copy_to_the_device_and_its_event(waits: bool, mode: str) -> None:
    source, target = pinned(5.0), filled(0.0)
    target.copy_(source, non_blocking=True)
    event = current().record_event()
    if waits:
        event.synchronize()
    source.fill_(9.0)
    assert is_all(target.cpu(), 5.0) is waits


@pair
def test_side_stream_and_the_work_before_it(waits: bool, mode: str) -> None:
    weight, side, target = filled(0.0), torch.Stream(DEVICE), pinned()
    weight.add_(1.0)
    begun = current().record_event()
    with side:
        if waits:
            side.wait_event(begun)
        target.copy_(weight, non_blocking=True)
    side.synchronize()
    assert is_all(target, 1.0) is waits


@pair
def test_update_and_the_copy_before_it(waits: bool, mode: str) -> None:
    weight = torch.nn.Parameter(filled(1.0))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    weight.grad = torch.ones_like(weight)
    side, target = torch.Stream(DEVICE), pinned()
    with side:
        target.copy_(weight.detach(), non_blocking=True)
        copied = side.record_event()
    if waits:
        current().wait_event(copied)
    optimizer.step()
    current().synchronize()
    side.synchronize()
    assert is_all(target, 1.0) is waits


@pair
def test_reused_buffer_and_its_last_copy(waits: bool, mode: str) -> None:
    sources = [filled(float(value)) for value in range(4)]
    buffer, found = pinned(), []
    for source in sources:
        buffer.copy_(source, non_blocking=True)
        event = current().record_event()
        if waits:
            event.synchronize()
        found.append(buffer.clone())
    assert all(is_all(one, value) for value, one in enumerate(found)) is waits


@pair
def test_freed_memory_and_the_stream_that_still_reads_it(waits: bool, mode: str) -> None:
    source, side, target = filled(3.0), torch.Stream(DEVICE), pinned()
    with side:
        target.copy_(source, non_blocking=True)
    if waits:
        source.record_stream(side)
    address = source.data_ptr()
    del source
    other = torch.full((NUM,), 4.0, device=DEVICE)
    assert (other.data_ptr() == address) is not waits
    current().synchronize()
    side.synchronize()
    assert is_all(target, 3.0) is waits


@pair
def test_another_device_and_the_work_before_it(waits: bool, mode: str) -> None:
    there = "fake:1"
    weight, target = torch.zeros(NUM, device=there), pinned()
    torch.accelerator.synchronize(1)
    weight.add_(1.0)
    begun = torch.accelerator.current_stream(there).record_event()
    side = torch.Stream(there)
    with side:
        if waits:
            side.wait_event(begun)
        target.copy_(weight, non_blocking=True)
    side.synchronize()
    assert is_all(target, 1.0) is waits


@pair
def test_graph_replay_and_the_host(waits: bool, mode: str) -> None:
    weight, target, stream = filled(0.0), pinned(), torch.Stream(DEVICE)
    graph = fake.Graph()
    with stream:
        with graph:
            weight.add_(1.0)
            target.copy_(weight, non_blocking=True)
        graph.replay()
        graph.replay()
        if waits:
            stream.synchronize()
        assert is_all(target, 2.0) is waits


def test_a_copy_between_devices_waits_for_both() -> None:
    here = filled(1.0)
    here.add_(1.0)
    there = torch.zeros(NUM, device="fake:1")
    there.copy_(here)
    here.fill_(0.0)
    assert is_all(there.cpu(), 2.0)


def test_pinned_memory_is_mapped_until_its_copies_have_run() -> None:
    source, target = filled(2.0), pinned()
    target.copy_(source, non_blocking=True)
    address = target.data_ptr()
    del target
    gc.collect()
    assert _is_mapped(address)
    current().synchronize()
    assert not _is_mapped(address)


def _is_mapped(address: int) -> bool:
    with open("/proc/self/maps") as file:
        ranges = [line.split()[0].split("-") for line in file]
    return any(int(first, 16) <= address < int(end, 16) for first, end in ranges)
