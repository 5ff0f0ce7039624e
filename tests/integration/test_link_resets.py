"""TCP resets in the middle of a fetch cost only time.

Real SMP processes run on loopback. Each is reached through a relay of the test, which resets every
connection after a fixed number of bytes; there is no other rail.
"""

import contextlib
import select
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from ftrun.wire.messages import smp as smp_messages
from ftrun.wire.transport.tcp import listen_tcp
from tests.integration.test_protection import Cluster, Model, Node, cluster

__all__ = ["cluster"]

COUNT = 3
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class ResettingRelay:
    """Forwards to a host and port, and resets each connection after its budget."""

    def __init__(self, host: str, port: int, to: str, budget: int) -> None:
        self.num_resets = 0
        self._to = (to, port)
        self._budget = budget
        self._is_over = False
        self._listener = listen_tcp(host, port)
        self._listener.settimeout(0.1)
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        self._is_over = True
        for thread in self._threads:
            thread.join(10.0)
        self._listener.close()

    def _accept(self) -> None:
        while not self._is_over:
            with contextlib.suppress(TimeoutError):
                here, _ = self._listener.accept()
                tick = threading.Thread(target=self._pass_on, args=(here,), daemon=True)
                self._threads.append(tick)
                tick.start()

    def _pass_on(self, here: socket.socket) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(here.close)
            try:
                there = socket.create_connection(self._to, 10.0)
            except OSError:
                return
            stack.callback(there.close)
            other = {here: there, there: here}
            left = self._budget
            with contextlib.suppress(OSError):
                while left > 0 and not self._is_over:
                    for sock in select.select([here, there], [], [], 0.1)[0]:
                        data = sock.recv(min(left, 1 << 16))
                        if not data:
                            return
                        other[sock].sendall(data)
                        left -= len(data)
            if left <= 0:
                self.num_resets += 1
            for sock in (here, there):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)


def put_relays(relayed: Cluster, budget: int) -> list[ResettingRelay]:
    found = []
    for node in relayed.nodes:
        assert isinstance(node, RelayedNode)
        node.relay = ResettingRelay(node.relay_host, node.port, node.host, budget)
        found.append(node.relay)
    return found


@dataclass
class RelayedNode(Node):
    """A node whose SMP is reached through a relay, if it has one."""

    relay: ResettingRelay | None = None

    @property
    def position(self) -> smp_messages.NodeAddress:
        plain = super().position
        if self.relay is None:
            return plain
        return smp_messages.NodeAddress(
            plain.node_id, 1, self.relay_host, plain.smp_port, plain.ranks
        )

    @property
    def relay_host(self) -> str:
        return f"127.0.2.{self.ranks[0] + 1}"


@pytest.fixture
def relayed(cluster: Cluster) -> Iterator[Cluster]:
    for at in range(COUNT):
        cluster.nodes.append(RelayedNode(f"n{at}", f"127.0.0.{10 + at}", [at], cluster.folder))
        cluster.nodes[-1].start(secret=cluster.secret)
    yield cluster
    for node in cluster.nodes:
        if isinstance(node, RelayedNode) and node.relay is not None:
            node.relay.close()


# The smallest budget lets one block of 1 MiB through, and nothing of the second. It lets five of
# the 16 pieces of one request through.
@pytest.mark.parametrize(
    ("model", "budget"),
    [
        (Model(own=1_500_000), 1_300_000),
        (Model(own=1_500_000), 3_000_000),
        (Model(own=0, shared=1_500_000), 1_300_000),
    ],
    ids=["a block", "several blocks", "replicas"],
)
def test_resets_while_exactly_k_sources_remain_end_no_restore(
    relayed: Cluster, model: Model, budget: int
) -> None:
    """The links of requests, of answers, and between the rebuilding nodes are all reset."""
    relayed.model = model
    relayed.begin()
    relayed.employ()
    at = relayed.protect(1)
    relayed.lose(0)
    relayed.nodes[0].start(secret=relayed.secret)
    relayed.nodes[0].generation = -1
    relays = put_relays(relayed, budget)
    relayed.restore(at)
    relayed.check(at)
    assert sum(relay.num_resets for relay in relays) >= 2


def test_a_fetch_that_failed_for_resets_is_reported(relayed: Cluster) -> None:
    """No connection lives long enough for a handshake: the SMP reports a link as the cause."""
    relayed.begin()
    relayed.employ()
    at = relayed.protect(1)
    relayed.lose(0)
    relayed.nodes[0].start(secret=relayed.secret)
    relayed.nodes[0].generation = -1
    put_relays(relayed, 100)
    relayed.restore(at, fails=[0])
    (failed,) = relayed.nodes[0].has_reported(smp_messages.RestoreFailed)
    assert isinstance(failed, smp_messages.RestoreFailed)
    assert failed.is_link
