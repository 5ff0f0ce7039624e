"""What ftrun assumes about a device: one function for each assumption, with the name of a device.

A function raises AssertionError if the device differs. They need only torch, so that a program for
GPUs can call them too; tests call them with the fake device. Each leaves the device idle.
"""

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import torch

Check = Callable[[str], None]
CHECKS: dict[str, Check] = {}
NUM = 1 << 14
NUM_BUSY = 60


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def new_graph(device: str) -> Any:
    if torch.device(device).type == "cuda":
        return torch.cuda.CUDAGraph()
    unified = getattr(torch.accelerator, "Graph", None)  # from torch 2.12
    return (unified or torch.get_device_module(device).Graph)()


def keep_busy(device: str) -> None:
    """Queue work on the current stream; a GPU needs 0.1 s or more for it."""
    size = 4096 if torch.device(device).type in ("cuda", "xpu") else 8
    matrix = torch.full((size, size), 1.0 / size, device=device)
    for _ in range(NUM_BUSY):
        matrix = matrix @ matrix


def current(device: str) -> torch.Stream:
    return torch.accelerator.current_stream(device)


def idle(device: str) -> None:
    torch.accelerator.synchronize(device)


def pinned() -> torch.Tensor:
    return torch.empty(NUM, pin_memory=True).fill_(-1.0)


def filled(device: str, value: float) -> torch.Tensor:
    made = torch.full((NUM,), value, device=device)
    idle(device)
    return made


def in_thread(function: Callable[[], object]) -> list[object]:
    """Its result or its exception."""
    found: list[object] = []

    def run() -> None:
        try:
            found.append(function())
        except RuntimeError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found


def in_fork(function: Callable[[], object]) -> int:
    """The wait status of a forked child: 0 if the function raises RuntimeError there."""
    pid = os.fork()
    if pid == 0:
        try:
            function()
        except RuntimeError:
            os._exit(0)
        os._exit(3)
    return os.waitpid(pid, 0)[1]


# --- streams and events -------------------------------------------------------------------------


@check
def operations_return_before_they_have_run(device: str) -> None:
    idle(device)
    keep_busy(device)
    event = current(device).record_event()
    assert not event.query()
    event.synchronize()
    assert event.query()
    assert current(device).query()


@check
def streams_do_not_wait_for_each_other(device: str) -> None:
    source, target, side = filled(device, 2.0), pinned(), torch.Stream(device)
    keep_busy(device)
    busy = current(device).record_event()
    with side:
        target.copy_(source, non_blocking=True)
    side.synchronize()
    assert bool((target == 2.0).all())
    assert not busy.query()
    idle(device)


@check
def a_stream_waits_for_the_event_of_another(device: str) -> None:
    weight, target, side = filled(device, 0.0), pinned(), torch.Stream(device)
    keep_busy(device)
    weight.add_(1.0)
    side.wait_event(current(device).record_event())
    with side:
        target.copy_(weight, non_blocking=True)
    side.synchronize()
    assert bool((target == 1.0).all())
    idle(device)


@check
def waiting_for_an_unrecorded_event_has_no_effect(device: str) -> None:
    event, side = torch.Event(device), torch.Stream(device)
    keep_busy(device)
    assert event.query()
    event.synchronize()
    side.wait_event(event)
    side.synchronize()
    assert not current(device).query()
    idle(device)


@check
def an_event_keeps_the_place_of_its_last_record(device: str) -> None:
    side, event = torch.Stream(device), torch.Event(device)
    event.record(side)
    keep_busy(device)
    event.record(current(device))
    assert not event.query()
    idle(device)
    assert event.query()


@check
def the_current_stream_belongs_to_a_thread(device: str) -> None:
    side = torch.Stream(device)
    with side:
        assert current(device) == side
        (other,) = in_thread(lambda: current(device))
        assert other != side
    assert current(device) == other


@check
def a_backward_runs_in_the_stream_of_its_forward(device: str) -> None:
    side, target = torch.Stream(device), pinned()
    with side:
        weight = torch.ones(NUM, device=device, requires_grad=True)
        (weight * 3.0).sum().backward()
        assert weight.grad is not None
        target.copy_(weight.grad, non_blocking=True)
    side.synchronize()
    assert bool((target == 3.0).all())


# --- copies and memory --------------------------------------------------------------------------


@check
def pinned_copies_do_not_block(device: str) -> None:
    source, target = filled(device, 2.0), pinned()
    keep_busy(device)
    target.copy_(source, non_blocking=True)
    source.copy_(target, non_blocking=True)
    event = current(device).record_event()
    assert not event.query()
    event.synchronize()
    assert bool((target == 2.0).all())


@check
def pageable_copies_to_the_host_block(device: str) -> None:
    source = filled(device, 2.0)
    target = torch.empty(NUM)
    keep_busy(device)
    target.copy_(source, non_blocking=True)
    assert bool((target == 2.0).all())
    assert current(device).query()


@check
def a_copy_made_without_blocking_is_pinned_and_needs_a_wait(device: str) -> None:
    source = filled(device, 2.0)
    keep_busy(device)
    found = source.to("cpu", non_blocking=True)
    event = current(device).record_event()
    assert found.is_pinned()
    assert not event.query()
    event.synchronize()
    assert bool((found == 2.0).all())


@check
def a_pageable_source_may_change_after_the_call(device: str) -> None:
    source, target = torch.ones(NUM), filled(device, 0.0)
    keep_busy(device)
    target.copy_(source, non_blocking=True)
    source.fill_(5.0)
    assert bool((target.cpu() == 1.0).all())


@check
def freed_memory_is_reused_at_once(device: str) -> None:
    source = filled(device, 1.0)
    keep_busy(device)
    source.add_(1.0)
    address = source.data_ptr()
    del source
    assert torch.empty(NUM, device=device).data_ptr() == address
    assert not current(device).query()
    idle(device)


@check
def freed_memory_is_reused_although_another_stream_reads_it(device: str) -> None:
    _reused_while_a_side_stream_reads(device, is_recorded=False)


@check
def record_stream_keeps_freed_memory_until_that_stream_has_read_it(device: str) -> None:
    _reused_while_a_side_stream_reads(device, is_recorded=True)


def _reused_while_a_side_stream_reads(device: str, *, is_recorded: bool) -> None:
    source, target, side = filled(device, 1.0), pinned(), torch.Stream(device)
    with side:
        keep_busy(device)
        target.copy_(source, non_blocking=True)
    if is_recorded:
        source.record_stream(side)
    address = source.data_ptr()
    del source
    other = torch.empty(NUM, device=device)
    assert (other.data_ptr() != address) is is_recorded
    assert not side.query()
    idle(device)
    if is_recorded:
        assert bool((target == 1.0).all())


@check
def the_host_cannot_read_the_memory(device: str) -> None:
    address = filled(device, 1.0).data_ptr()
    status = in_fork(lambda: ctypes.string_at(address, 4))
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGSEGV


@check
def a_forked_process_cannot_use_the_device(device: str) -> None:
    filled(device, 1.0)
    assert torch.get_device_module(device).is_initialized()
    assert in_fork(lambda: torch.ones(1, device=device)) == 0


# --- graphs -------------------------------------------------------------------------------------


def captured(device: str, function: Callable[[], object]) -> tuple[Any, torch.Stream]:
    graph, stream = new_graph(device), torch.Stream(device)
    idle(device)
    with stream:
        graph.capture_begin()
        function()
        graph.capture_end()
    return graph, stream


@check
def a_replay_changes_values_and_no_version(device: str) -> None:
    weight = filled(device, 0.0)
    graph, stream = captured(device, lambda: weight.add_(1.0))
    idle(device)
    assert bool((weight.cpu() == 0.0).all())  # the capture runs nothing
    version = weight._version
    with stream:
        graph.replay()
        graph.replay()
    idle(device)
    assert weight._version == version
    assert bool((weight.cpu() == 2.0).all())


@check
def a_query_in_another_thread_ends_a_capture(device: str) -> None:
    _capture_ends(device, lambda event: in_thread(event.query))


@check
def a_wait_in_another_thread_ends_a_capture(device: str) -> None:
    _capture_ends(device, lambda event: in_thread(event.synchronize))


def _capture_ends(device: str, act: Callable[[torch.Event], list[object]]) -> None:
    weight, graph, stream = filled(device, 0.0), new_graph(device), torch.Stream(device)
    event = current(device).record_event()
    idle(device)
    with stream:
        graph.capture_begin()
        weight.add_(1.0)
        (result,) = act(event)
        assert isinstance(result, RuntimeError)
        try:
            graph.capture_end()
        except RuntimeError:
            pass
        else:
            raise AssertionError("the capture was not ended")
    idle(device)


@check
def is_capturing_ends_no_capture(device: str) -> None:
    if not hasattr(torch.Stream, "is_capturing"):  # before torch 2.12
        return
    weight, other, seen = filled(device, 0.0), current(device), []

    def body() -> None:
        weight.add_(1.0)
        seen.append((current(device).is_capturing(), other.is_capturing()))

    captured(device, body)
    assert seen == [(True, False)]
    assert not current(device).is_capturing()


@check
def the_default_stream_cannot_be_captured(device: str) -> None:
    idle(device)
    try:
        new_graph(device).capture_begin()
    except RuntimeError:
        return
    raise AssertionError("the default stream is captured")


@check
def memory_of_a_graph_is_not_reused_by_others(device: str) -> None:
    found: list[int] = []

    def body() -> None:
        found.append(torch.ones(NUM, device=device).data_ptr())

    graph, stream = captured(device, body)
    with stream:
        other = [torch.zeros(NUM, device=device) for _ in range(8)]
        graph.replay()
    idle(device)
    assert found[0] not in {one.data_ptr() for one in other}
    assert all(bool((one.cpu() == 0.0).all()) for one in other)


@check
def each_replay_draws_other_random_numbers(device: str) -> None:
    target = filled(device, 0.0)
    graph, stream = captured(device, lambda: target.uniform_())
    found = []
    for _ in range(2):
        with stream:
            graph.replay()
        idle(device)
        found.append(target.cpu())
    assert not torch.equal(found[0], found[1])


# --- random numbers -----------------------------------------------------------------------------


@check
def a_random_state_repeats_the_numbers(device: str) -> None:
    module = torch.get_device_module(device)
    states = module.get_rng_state_all()
    first = torch.rand(NUM, device=device).cpu()
    second = torch.rand(NUM, device=device).cpu()
    module.set_rng_state_all(states)
    assert torch.equal(first, torch.rand(NUM, device=device).cpu())
    assert torch.equal(second, torch.rand(NUM, device=device).cpu())
    assert not torch.equal(first, second)


@check
def random_numbers_are_taken_at_the_call(device: str) -> None:
    module, streams = torch.get_device_module(device), [torch.Stream(device) for _ in range(2)]
    state = module.get_rng_state(device)
    expected = [torch.rand(NUM, device=device).cpu() for _ in streams]
    module.set_rng_state(state, device)
    found = []
    for stream in streams:
        with stream:
            found.append(torch.rand(NUM, device=device))
    for stream in reversed(streams):
        stream.synchronize()
    idle(device)
    assert all(torch.equal(one.cpu(), two) for one, two in zip(found, expected, strict=True))


@check
def reading_the_random_state_waits_for_nothing(device: str) -> None:
    idle(device)
    keep_busy(device)
    torch.get_device_module(device).get_rng_state_all()
    assert not current(device).query()
    idle(device)
