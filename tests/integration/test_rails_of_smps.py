"""A connection between two SMPs that dies in the middle costs only time.

Real SMP processes on loopback have two rails each. The first is a relay of the test, which is cut
after a number of bytes: the connections end, and its port refuses new ones.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from ftrun.wire.cluster.generation import Rail
from ftrun.wire.messages import smp as smp_messages
from ftrun.wire.transport.tcp import listen_tcp
from tests.integration.test_protection import Cluster, Model, Node, cluster

__all__ = ["cluster"]

COUNT = 3


class Relay:
    """The first rail of a node: it forwards this number of bytes and no more."""

    def __init__(self, host: str, port: int, to: str, budget: int) -> None:
        self.num_bytes = 0
        self._to = (to, port)
        self._budget = budget
        self._lock = threading.Lock()
        self._socks: list[socket.socket] = []
        self._is_over = False
        self._listener = listen_tcp(host, port)
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def is_cut(self) -> bool:
        return self.num_bytes >= self._budget

    def close(self) -> None:
        with self._lock:
            self._is_over = True
        self._cut()
        for thread in self._threads:
            thread.join(10.0)
        for sock in (self._listener, *self._socks):
            sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                with self._lock:
                    self._socks.append(here)
                there = socket.create_connection(self._to, 10.0)
                there.settimeout(None)
                with self._lock:
                    self._socks.append(there)
                    if self._is_over:
                        return
                for source, target in ((here, there), (there, here)):
                    pump = threading.Thread(target=self._pump, args=(source, target), daemon=True)
                    self._threads.append(pump)
                    pump.start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                with self._lock:
                    room = max(0, self._budget - self.num_bytes)
                    self.num_bytes += len(data)
                target.sendall(data[:room])
                if self.is_cut:
                    self._cut()
                    return
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _cut(self) -> None:
        with self._lock:
            for sock in [self._listener, *self._socks]:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)


class RailedNode(Node):
    """A node whose SMP is first reached through a relay."""

    relay: Relay | None = None
    has_rails = False

    @property
    def position(self) -> smp_messages.NodeAddress:
        plain = super().position
        if not self.has_rails:
            return plain
        rails = [Rail("eth0", f"127.0.1.{self.ranks[0] + 1}"), Rail("eth1", self.host)]
        return smp_messages.NodeAddress(
            plain.node_id, 1, rails[0].host, plain.smp_port, plain.ranks, rails
        )


@pytest.fixture
def railed(cluster: Cluster) -> Iterator[Cluster]:
    cluster.model = Model(own=1_500_000)
    for at in range(COUNT):
        cluster.nodes.append(RailedNode(f"n{at}", f"127.0.0.{10 + at}", [at], cluster.folder))
        cluster.nodes[-1].start(secret=cluster.secret)
    yield cluster
    for node in cluster.nodes:
        if isinstance(node, RailedNode) and node.relay is not None:
            node.relay.close()


def put_relays(railed: Cluster, budget: int) -> list[Relay]:
    found = []
    for node in railed.nodes:
        assert isinstance(node, RailedNode)
        node.relay = Relay(node_rail(node), node.port, node.host, budget)
        node.has_rails = True
        found.append(node.relay)
    return found


def node_rail(node: Node) -> str:
    return f"127.0.1.{node.ranks[0] + 1}"


def test_a_version_is_protected_over_another_rail(railed: Cluster) -> None:
    relays = put_relays(railed, 1_000_000)
    railed.begin()
    railed.employ()
    at = railed.protect(1, 2)
    assert all(relay.is_cut for relay in relays)
    railed.lose(0)
    railed.restore(at)
    railed.check(at)


@pytest.mark.parametrize("budget", [30_000, 1_000_000, 4_000_000])
def test_a_lost_shard_is_fetched_over_another_rail(railed: Cluster, budget: int) -> None:
    """Requests, answers, blocks for rebuilding nodes: any message in transit."""
    railed.begin()
    railed.employ()
    at = railed.protect(1)
    railed.lose(0)
    railed.nodes[0].start(secret=railed.secret)
    railed.nodes[0].generation = -1
    relays = put_relays(railed, budget)
    railed.restore(at)
    railed.check(at)
    assert any(relay.is_cut for relay in relays)
    railed.wait_ready(at)
    railed.commit(at)


def test_one_port_is_opened_at_every_address(cluster: Cluster) -> None:
    cluster.start(1)
    (node,) = cluster.nodes
    hosts = ["127.0.0.21", "127.0.0.22", "192.0.2.1"]
    with ExitStack() as stack:
        taken = stack.enter_context(listen_tcp("127.0.0.22", 0)).getsockname()[1]
        wanted = smp_messages.ListenForPeers("127.0.0.21", hosts[1:])
        port = node.ask(wanted, smp_messages.ListeningForPeers).port
        assert port != taken
        for host in hosts[:2]:
            stack.enter_context(socket.create_connection((host, port), 10.0))
        again = node.ask(wanted, smp_messages.ListeningForPeers).port
        assert again == port
        fewer = smp_messages.ListenForPeers("127.0.0.21")
        other = node.ask(fewer, smp_messages.ListeningForPeers).port
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.22", other), 10.0)
