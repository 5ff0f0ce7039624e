"""A node that gets no descriptor or no thread for a while rebuilds blocks again afterwards."""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

from ftrun.ids import version
from ftrun.smp.jobs import Runner
from ftrun.smp.memory.parity_store import ParityStore
from ftrun.smp.memory.sealed_shards import ArenaMappings
from ftrun.smp.peer_listener import PeerListener, PeerSession
from ftrun.smp.redundancy.rebuilder import NUM_THREADS, Rebuilder
from ftrun.smp.restore.restore_server import RestoreServer
from ftrun.smp.restore.rpc import FetchRpc
from ftrun.wire.cluster import transfer as t
from ftrun.wire.messages.smp import NodeAddress
from ftrun.wire.transport.handshake import PeerIdentity, accept_handshake
from tests.exhausted import no_descriptors, no_threads

WAIT_S = 60.0


@pytest.fixture
def peers() -> Iterator[PeerListener]:
    made = PeerListener()
    made.begin(PeerSession(PeerIdentity("run", "smp", "a", 1), 0, 7, timeout_s=WAIT_S))
    yield made
    made.close()


def not_used(*_: Any) -> Any:
    raise AssertionError


def rebuilder_of(peers: PeerListener, port: int) -> Rebuilder:
    """It answers node b, and refuses because it has no parity."""
    served = RestoreServer(
        1, version(0, 1), maps=ArenaMappings(), fds={}, parity_store=ParityStore()
    )
    rpc = FetchRpc(peers, excluded=not_used, runner=Runner())
    rpc.begin(served, None, NodeAddress("a", 1, "127.0.0.1", 1, [0]))
    rpc.meet([NodeAddress("b", 1, "127.0.0.1", port, [1])])
    return Rebuilder(rpc, served, run=1, codec_for=not_used, timeout_s=WAIT_S)


def wait_for_idle(rebuilder: Rebuilder) -> None:
    give_up_s = time.monotonic() + WAIT_S
    while not rebuilder._asks.empty():
        assert time.monotonic() < give_up_s
        time.sleep(0.01)
    time.sleep(0.1)


@pytest.mark.parametrize("lack", [no_descriptors, no_threads])
def test_blocks_are_rebuilt_after_a_lack(
    peers: PeerListener, lack: Callable[[], AbstractContextManager[None]]
) -> None:
    ask = t.RebuildBlock(1, 0, 1, 0, 0, position=0, stripe=0, alive=[])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        rebuilder = rebuilder_of(peers, listener.getsockname()[1])
        with lack():
            for _ in range(NUM_THREADS):
                rebuilder.ask("b", ask)
            wait_for_idle(rebuilder)
        rebuilder.ask("b", ask)
        listener.settimeout(WAIT_S)
        with contextlib.closing(listener.accept()[0]) as sock:
            accept_handshake(sock, PeerIdentity("run", "smp", "b", 1), None)
        rebuilder.stop()
