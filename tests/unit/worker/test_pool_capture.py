"""A wait for room in a capture pool ends with its generation."""

import os
import queue
import socket
import threading
from types import SimpleNamespace

import msgspec
import numpy as np

from ftrun.snapshot.layout import PAGE_BYTES
from ftrun.wire.messages.worker import Revoke
from ftrun.wire.shared_memory.pool import CapturePool, PoolField, create_pool
from ftrun.worker.survivors.line import AgentLine
from ftrun.worker.targets.pool_capture import _Obstacle
from ftrun.worker.targets.pool_stream import CaptureGivenUp, RingWriter
from tests.launch_requests import context_of

WAIT_S = 10.0
OPEN: list[object] = []
"""Open to the end of this process, because a process ends with its line."""


def test_a_rank_that_stays_gives_up_its_capture_when_its_generation_is_revoked() -> None:
    """The job does not: it waits for the rank that has ended."""
    context, waits = context_of(), threading.Event()
    agent, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line = AgentLine(its.detach(), context.page, lambda: None)
    line.set_may_stay(True)
    context.staying = SimpleNamespace(line=line)  # type: ignore[assignment]
    fd = create_pool(0, PAGE_BYTES)
    pool = CapturePool(fd, is_writer=True)
    pool.set(PoolField.READER, 1)
    pool.set(PoolField.READER_NS, 1 << 62)
    link = SimpleNamespace(is_lost=lambda: False)
    obstacle = _Obstacle(pool, context, link, 5)  # type: ignore[arg-type]
    writer = RingWriter(pool, obstacle, waits.set)
    writer.is_waited_for = True
    given_up: queue.SimpleQueue[str] = queue.SimpleQueue()

    def write() -> None:
        try:
            writer.write(np.zeros(2 * PAGE_BYTES, np.uint8))
        except CaptureGivenUp as error:
            given_up.put(str(error))

    threading.Thread(target=write, daemon=True).start()
    assert waits.wait(WAIT_S)
    agent.send(msgspec.json.encode(Revoke(context.generation)))
    assert "joins the next generation" in given_up.get(timeout=WAIT_S)
    OPEN.append((line, agent, pool))
    os.close(fd)
