"""A rank whose generation is over neither waits for memory or storage, nor seals a snapshot."""

import os
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from ftrun import clock
from ftrun.snapshot.layout import PAGE_BYTES
from ftrun.wire.messages.worker import Revoke
from ftrun.wire.shared_memory.arena import ArenaShape, SlotState
from ftrun.wire.shared_memory.pool import CapturePool, PooledHeader, create_pool
from ftrun.worker.capture.slots import SlotProvider
from ftrun.worker.context import WorkerContext
from ftrun.worker.smp_client import WorkerSmpClient
from ftrun.worker.survivors.line import AgentLine
from ftrun.worker.targets import pool_capture
from ftrun.worker.targets.pool_stream import CaptureGivenUp, RingWriter
from tests.launch_requests import context_of

WAIT_S = 60.0


class Rank:
    """A rank with a line to its agent, which this test plays."""

    def __init__(self) -> None:
        self.agent, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.dup(self.agent.fileno())  # open to the end of this process, which ends with its line
        self.context: WorkerContext = context_of()
        line = AgentLine(its.detach(), self.context.page, lambda: None)
        self.context.staying = SimpleNamespace(line=line)  # type: ignore[assignment]
        line.set_may_stay(True)

    def revoke(self) -> None:
        self.agent.send(msgspec.json.encode(Revoke(0)))
        assert self.context.staying is not None
        assert self.context.staying.line.await_revoke(WAIT_S)


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.agent.close()


def test_a_wait_for_memory_ends(rank: Rank) -> None:
    provider = SlotProvider(rank.context)
    is_over = threading.Event()
    thread = threading.Thread(target=is_over.wait, daemon=True)
    thread.start()
    threading.Timer(0.2, rank.revoke).start()
    since_s = clock.now_s()
    provider._await(thread, WAIT_S)
    assert 0.2 <= clock.now_s() - since_s < WAIT_S / 2
    is_over.set()
    thread.join()


def test_a_wait_for_memory_has_a_limit(rank: Rank) -> None:
    is_over = threading.Event()
    thread = threading.Thread(target=is_over.wait, daemon=True)
    thread.start()
    since_s = clock.now_s()
    SlotProvider(rank.context)._await(thread, 0.2)
    assert 0.2 <= clock.now_s() - since_s < WAIT_S / 2
    is_over.set()


def test_a_capture_into_a_full_pool_is_given_up(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_capture, "_BEGIN_S", WAIT_S)
    pool = CapturePool(create_pool(1, PAGE_BYTES), is_writer=True)
    link = WorkerSmpClient(rank.context)
    monkeypatch.setattr(link, "is_lost", lambda: False)
    writer = RingWriter(pool, pool_capture._Obstacle(pool, rank.context, link, 1), lambda: None)
    threading.Timer(0.2, rank.revoke).start()
    with pytest.raises(CaptureGivenUp, match="another rank has failed"):
        writer.write(np.zeros(2 * PAGE_BYTES, np.uint8))


def test_a_capture_of_a_pool_is_not_sealed(rank: Rank) -> None:
    pool = CapturePool(create_pool(1, PAGE_BYTES), is_writer=True)
    header = PooledHeader(SlotState.COPYING, 0, 1, 0, ArenaShape(0, 1, 0, 0, 7))
    copy = SimpleNamespace(table=memoryview(bytearray()), write_table=lambda: None)
    target = pool_capture.PoolTarget(pool, header, copy, rank.context)  # type: ignore[arg-type]
    rank.revoke()
    with pytest.raises(CaptureGivenUp):
        target.seal(None)
    found = pool.header()
    assert found is not None
    assert found.state is SlotState.COPYING
