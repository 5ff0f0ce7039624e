"""Each test begins with an idle device in the mode `lazy`, unless it takes `mode`."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from fake_device import fake

from ftrun.worker.capture import device_copies

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def idle_device(request: pytest.FixtureRequest) -> Iterator[None]:
    call = getattr(request.node, "callspec", None)
    mode = call.params.get("mode", "lazy") if call is not None else "lazy"
    torch.accelerator.set_device_index(0)
    fake.set_mode(mode, seed=7, max_pause_us=2000)
    yield
    for device in range(2):
        torch.accelerator.synchronize(device)


@pytest.fixture
def second_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Copies use a second thread, as with four cores; the number of items it gets each time."""
    cores = set(range(device_copies.CORES_FOR_TWO_THREADS))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    device_copies._second_thread.cache_clear()
    thread, counts = device_copies._second_thread(), list[int]()
    assert thread is not None
    submit = thread.submit

    def counted(work: Callable[[Any], None], items: Sequence[Any]) -> Future[None]:
        counts.append(len(items))
        return submit(work, items)

    monkeypatch.setattr(thread, "submit", counted)
    yield counts
    device_copies._second_thread.cache_clear()
    thread.shutdown()
