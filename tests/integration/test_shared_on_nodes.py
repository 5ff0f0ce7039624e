"""Nodes of a protection group begin to share replicas at one version, and lose nothing by it."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import xxhash

from ftrun.ids import Rank, version
from ftrun.snapshot.layout import CopyTiming, Layout, LayoutEntry, make_layout
from ftrun.snapshot.replica_shares import ReplicaCheck, key_of, shares_of, written
from ftrun.wire.messages import envelope as messages
from ftrun.wire.messages import smp as smp_messages
from ftrun.wire.messages import worker as worker_messages
from ftrun.wire.shared_memory.pages import CommandField, SharedPage
from tests.integration.test_protection import TIMEOUT_S, Cluster, Model, Node, noise

ITEMS = 1_000_000
BIAS = LayoutEntry("bias", "F32", (9,), CopyTiming.LAZY)
MEAN = LayoutEntry("mean", "F64", (4,), CopyTiming.BOUNDARY)
SHARED = LayoutEntry("shared", "F32", (ITEMS,), CopyTiming.LAZY)


@dataclass(frozen=True)
class Replicas(Model):
    """One large tensor that is equal on all ranks; each rank stores its rows if members are set.

    `members` are the ranks of each node; a node that differs in its first rank is `odd`.
    """

    members: tuple[tuple[Rank, ...], ...] = ()
    odd: int = -1
    is_local: bool = False
    """The tensor is equal on the ranks of a node only, as with sharding over nodes."""

    def group(self, rank: int) -> tuple[Rank, ...]:
        return next((one for one in self.members if rank in one), ())

    def layout(self, rank: int) -> Layout:
        metadata = {"ftrun.rank": str(rank), **written(self.group(rank))}
        return make_layout([BIAS, MEAN, self.entry(rank)], plain_bytes=100, metadata=metadata)

    def entry(self, rank: int) -> LayoutEntry:
        group = self.group(rank)
        if not group:
            return SHARED
        return shares_of([SHARED], len(group))[group.index(Rank(rank))]["shared"].of(SHARED)

    def image(self, rank: int, at: object) -> bytes:
        layout = self.layout(rank)
        parts = [layout.header]
        for entry in layout.entries:
            if entry.name == "shared":
                salt = "odd" if rank == self.odd else str(rank // 2) if self.is_local else ""
                content = noise(f"shared {at} {salt}", SHARED.num_bytes)
                first = 4 * (entry.part.offsets[0] if entry.part and entry.part.offsets else 0)
                parts.append(content[first : first + entry.num_bytes])
            else:
                parts.append(noise(f"{entry.name} {at} {rank}", entry.num_bytes))
        return b"".join(parts)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.end()


def decisions(nodes: Sequence[Node]) -> list[int]:
    return [SharedPage(node.page_fd).get(CommandField.REPLICA_SHARES) for node in nodes]


def granted(node: Node) -> list[messages.AnyMessage]:
    return [
        worker.channel.ask(
            worker_messages.RequestShares(worker.rank, key_of([BIAS, MEAN, SHARED])),
            deadline_s=TIMEOUT_S,
        ).body
        for worker in node.workers
    ]


def change(cluster: Cluster, model: Model) -> None:
    """All ranks take later versions in the layout of this model."""
    cluster.model = model
    for node in cluster.nodes:
        for worker in node.workers:
            worker.model = model
            os.close(worker.fd)
            worker.request()


def sent_bytes(cluster: Cluster) -> int:
    found = [node.work()["sent_bytes"] for node in cluster.nodes]
    return sum(one for one in found if isinstance(one, int))


def begun(cluster: Cluster, model: Model, ranks_per_node: int = 2) -> None:
    cluster.model = model
    cluster.start(3, ranks_per_node=ranks_per_node)
    cluster.begin()
    cluster.employ()


GROUPS = tuple((Rank(2 * at), Rank(2 * at + 1)) for at in range(3))


def test_all_nodes_decide_at_the_same_commit_and_send_no_shares(cluster: Cluster) -> None:
    begun(cluster, Replicas())
    for step in (1, 2):
        cluster.protect(step)
        assert decisions(cluster.nodes) == [0, 0, 0]
    cluster.protect(3)
    assert decisions(cluster.nodes) == [1, 1, 1]
    for node, group in zip(cluster.nodes, GROUPS, strict=True):
        assert granted(node) == [worker_messages.SharesGranted(list(group))] * 2
    before = sent_bytes(cluster)
    change(cluster, Replicas(members=GROUPS))
    at = cluster.protect(4, 5)
    assert decisions(cluster.nodes) == [1, 1, 1]
    assert sent_bytes(cluster) - before < SHARED.num_bytes // 4
    cluster.lose(1)
    cluster.restore(at)
    cluster.check(at)
    cluster.wait_ready(at)
    cluster.commit(at)
    assert decisions(cluster.nodes) == [1, 1, 1], "the restored ranks continue to share"


def test_what_the_ranks_of_a_node_share_is_encoded_once(cluster: Cluster) -> None:
    """No other node has it, so it needs parity; one copy of each node is sent, not one per rank."""
    begun(cluster, Replicas(is_local=True))
    cluster.protect(1, 2, 3)
    before = sent_bytes(cluster)
    cluster.protect(4)
    whole = sent_bytes(cluster) - before
    change(cluster, Replicas(members=GROUPS, is_local=True))
    cluster.protect(5)
    before = sent_bytes(cluster)
    at = cluster.protect(6)
    assert sent_bytes(cluster) - before < 0.6 * whole
    assert whole > 2 * SHARED.num_bytes
    cluster.lose(1)
    cluster.restore(at)
    cluster.check(at)


def test_one_node_with_unequal_ranks_keeps_whole_copies_on_all(cluster: Cluster) -> None:
    begun(cluster, Replicas(odd=3))
    cluster.protect(1, 2, 3, 4)
    assert decisions(cluster.nodes) == [0, 0, 0]
    assert all(isinstance(one, messages.Refused) for one in granted(cluster.nodes[0]))


def test_a_difference_on_one_node_ends_the_sharing_on_all(cluster: Cluster) -> None:
    begun(cluster, Replicas())
    cluster.protect(1, 2, 3)
    change(cluster, Replicas(members=GROUPS))
    cluster.protect(4)
    at = version(cluster.generation, 5)
    for node in cluster.nodes:
        for worker in node.workers:
            worker.capture(at, kept=cluster.committed)
            members = [rank for group in GROUPS if worker.rank in group for rank in group]
            check = ReplicaCheck(members, 0, 7 + (worker.rank == 3))
            layout_id = xxhash.xxh3_64_intdigest(worker.model.layout(worker.rank).header)
            worker.channel.send(
                worker_messages.ShardSealed(worker.rank, at.generation, at.step, layout_id, check)
            )
    node = cluster.nodes[1]
    while not node.has_reported(smp_messages.AbandonVersion):
        node.work()
    assert decisions(cluster.nodes) == [1, -1, 1]
    for other in cluster.nodes:
        assert other.agent is not None
        other.agent.send(smp_messages.AbandonVersion(at.generation, at.step))
    change(cluster, Replicas())
    cluster.protect(6)
    assert decisions(cluster.nodes) == [0, -1, 0]
    cluster.check(version(cluster.generation, 6))
