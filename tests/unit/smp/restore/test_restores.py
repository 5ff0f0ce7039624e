"""A restore of one node from the memory of others, over links that deliver at once."""

import os
import select
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from threading import Lock
from types import SimpleNamespace
from typing import Any

import pytest
import xxhash

from ftrun import clock
from ftrun.errors import FetchFailed, LayoutUnknown, SnapshotCorrupt
from ftrun.ids import Generation, Rank, Version, version
from ftrun.smp.jobs import JobLanes, Runner
from ftrun.smp.memory.arenas import ArenaStore, create
from ftrun.smp.memory.parity_store import ParityStore, allocate_parity_region
from ftrun.smp.memory.sealed_shards import ArenaMappings
from ftrun.smp.peer_link import FETCH, OutgoingFrame
from ftrun.smp.redundancy.mirror import mirror_parts
from ftrun.smp.restore import shard_reads
from ftrun.smp.restore.fetch import Fetch
from ftrun.smp.restore.previous_world import PreviousWorld, PreviousWorldShards
from ftrun.smp.restore.restore_server import RestoreServer
from ftrun.smp.restore.restores import RestoreCoordinator
from ftrun.smp.restore.rpc import FetchRpc
from ftrun.smp.restore.shard_reads import ShardReads
from ftrun.snapshot.layout import CopyTiming, Layout, LayoutEntry, make_layout
from ftrun.snapshot.redundancy import (
    NodeRedundancy,
    PieceRun,
    RankRedundancy,
    ReplicatedPieces,
)
from ftrun.wire.cluster.transfer import GetMirror
from ftrun.wire.messages import smp as smp_messages
from ftrun.wire.messages import worker as worker_messages
from ftrun.wire.messages.smp import GroupMember, NodeAddress, PreviousGroup
from ftrun.wire.shared_memory.arena import Arena, ArenaShape, SlotHeader, SlotState, table_digest
from ftrun.wire.shared_memory.parity_region import ParityRecord, ParityRegionState

WANTED = version(1, 4)
GENERATION = Generation(2)
TIMEOUT_S = 0.3
WAIT_S = 30.0


def layout_of() -> Layout:
    entries = [
        LayoutEntry(name, "F32", (64, 64), CopyTiming.BOUNDARY, 0) for name in ("one", "two")
    ]
    return make_layout(entries, plain_bytes=0)


def image_of(layout: Layout, seed: int) -> bytes:
    """Random bytes; the first tensor is equal on two ranks."""
    data = bytearray()
    for at, piece in enumerate(layout.pieces):
        word = xxhash.xxh3_64_digest(f"{at} {seed if at else 0}".encode())
        data += (word * (piece.num_bytes // 8 + 1))[: piece.num_bytes]
    return layout.header + bytes(data)


def seal(rank: int, image: bytes, layout: Layout, wanted: Version) -> int:
    """The descriptor of an arena with a sealed slot."""
    start, pieces = len(layout.header), layout.pieces
    layout_id = xxhash.xxh3_64_intdigest(layout.header)
    fd = create(ArenaShape(rank, 2, len(image), len(pieces), layout_id))
    arena = Arena(fd, writable=True)
    arena.image(0)[:] = image
    table = arena.table(0)
    for at, piece in enumerate(pieces):
        begin = start + piece.offset
        table[at] = xxhash.xxh3_64_intdigest(image[begin : begin + piece.num_bytes])
    digest = table_digest(table)
    header = (wanted.generation, wanted.step, len(image), digest, clock.now_ns())
    arena.write_header(0, SlotHeader(SlotState.SEALED, *header))
    arena.close()
    return fd


@dataclass
class Net:
    """Delivers each frame at once, in the thread of its sender."""

    nodes: dict[str, "Node"] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)


@dataclass
class Link:
    """One direction between two nodes; a dead node accepts a frame and sends nothing."""

    net: Net
    sender: str
    to: str
    is_connected: bool = True

    def send(self, frame: OutgoingFrame) -> None:
        if self.to in self.net.dead:
            return
        raw = b"".join(frame.raw)
        envelope: Any = SimpleNamespace(
            body=frame.body, raw_bytes=len(raw), raw_digest=frame.raw_digest
        )

        def receive(_: Any, room: Any) -> bool:
            at = 0
            for view in room or ():
                view[:] = raw[at : at + len(view)]
                at += len(view)
            return True

        source: Any = SimpleNamespace(
            node_id=self.sender, socket=SimpleNamespace(receive_raw=receive)
        )
        self.net.nodes[self.to].rpc.received(source, envelope)


class Node:
    """One SMP's part in a restore."""

    def __init__(self, net: Net, node_id: str, ranks: list[int]) -> None:
        self.net = net
        self.address = NodeAddress(node_id, 1, "host", 1, ranks)
        self.links: dict[str, Link] = {}
        self.jobs, self.memory, self.parity_store = JobLanes(), ArenaStore(), ParityStore()
        self.reported: list[Any] = []
        self.excluded: list[tuple[SnapshotCorrupt, Any]] = []
        self.rpc = FetchRpc(self, excluded=self.exclude, runner=Runner())  # type: ignore[arg-type]
        self.is_here = 0
        self.restores = RestoreCoordinator(
            self.memory,
            self.rpc,
            self.jobs,
            send_to_agent=lambda body, *, fds=(): self.reported.append(body),
            here=self.come,
        )
        net.nodes[node_id] = self

    def come(self) -> None:
        self.is_here += 1

    def exclude(self, error: SnapshotCorrupt, ask: Any) -> None:
        self.excluded.append((error, ask))

    def link(self, position: NodeAddress, purpose: str) -> Link:
        assert purpose == FETCH
        return self.links.setdefault(
            position.node_id, Link(self.net, self.address.node_id, position.node_id)
        )

    def find(self, node_id: str, purpose: str) -> Link | None:
        return self.links.get(node_id)

    def hold(self, rank: int, image: bytes, layout: Layout) -> None:
        self.memory.add(seal(rank, image, layout, WANTED), Generation(1))

    def serve(self) -> RestoreServer:
        fds = {rank: [arena.fd for arena in self.memory.of(rank)] for rank in self.memory.ranks}
        served = RestoreServer(
            7, WANTED, maps=ArenaMappings(), fds=fds, parity_store=self.parity_store
        )
        self.rpc.begin(served, None, self.address)
        return served

    def begin(self, ranks: list[int], groups: list[PreviousGroup]) -> None:
        body = smp_messages.BeginGeneration(
            GENERATION,
            2,
            ranks,
            node_id=self.address.node_id,
            group=[self.address],
            restored=(WANTED.generation, WANTED.step),
            restore_from=groups,
            timeout_s=TIMEOUT_S,
        )
        self.restores.begin(body, WANTED, self.address)

    def wait(self, *kinds: type[Any]) -> Any:
        """The first of these messages; results of the fetch are handled here."""
        end_s = clock.now_s() + WAIT_S
        while clock.now_s() < end_s:
            for body in self.reported:
                if isinstance(body, kinds):
                    return body
            if select.select([self.jobs], [], [], 1.0)[0]:
                self.jobs.finish()
        raise AssertionError(f"{kinds} does not come; received: {self.reported}")

    def outcome(self) -> Any:
        return self.wait(smp_messages.RestoreReady, smp_messages.RestoreFailed)

    def image(self, rank: int) -> bytes:
        (held,) = self.memory.of(Rank(rank))
        assert held.holds(WANTED)
        arena = Arena(held.fd, writable=False)
        slot = arena.find(WANTED)
        assert slot is not None
        found = bytes(arena.image(slot))
        arena.close()
        return found

    def free(self) -> None:
        self.restores.stop()
        self.rpc.begin(None, None)
        self.parity_store.free()
        self.memory.free()


@pytest.fixture
def net() -> Iterator[Net]:
    made = Net()
    yield made
    for node in made.nodes.values():
        node.free()


def group_of(*nodes: Node, parity: int = 0) -> PreviousGroup:
    return PreviousGroup([node.address for node in nodes], parity, WANTED.generation)


# --- whole slots ------------------------------------------------------------------------------


def test_a_slot_is_copied_from_the_node_that_holds_it(net: Net) -> None:
    layout = layout_of()
    image = image_of(layout, 1)
    own, other = Node(net, "own", [1]), Node(net, "other", [0])
    other.hold(0, image, layout)
    own.serve(), other.serve()
    own.begin([0], [group_of(other)])
    assert isinstance(own.outcome(), smp_messages.RestoreReady)
    assert own.image(0) == image
    assert worker_messages.ArenaGranted in {type(body) for body in own.reported}
    assert own.is_here == 1


def test_a_slot_is_copied_from_its_owner_although_no_node_has_its_mirror(net: Net) -> None:
    layout = layout_of()
    image = image_of(layout, 1)
    own, other = Node(net, "own", [1]), Node(net, "other", [0])
    other.hold(0, image, layout)
    own.serve(), other.serve()
    own.begin([0], [group_of(other, own, parity=1)])
    assert isinstance(own.outcome(), smp_messages.RestoreReady)
    assert own.image(0) == image


def test_an_owner_without_slots_and_mirror_is_named(net: Net) -> None:
    own, other = Node(net, "own", [1]), Node(net, "other", [0])
    own.serve(), other.serve()
    own.begin([0], [group_of(other, own, parity=1)])
    failed = own.outcome()
    assert isinstance(failed, smp_messages.RestoreFailed)
    assert "cannot fetch its small state (other: this node has no complete parity" in failed.reason
    assert "nor its slots (rank 0, step 4 (generation 1): its shard cannot be" in failed.reason


@pytest.mark.parametrize("part", ["header", "digest table", "piece 1"])
def test_a_damaged_slot_is_rejected_by_rank(net: Net, part: str) -> None:
    layout = layout_of()
    own, other = Node(net, "own", [1]), Node(net, "other", [0])
    other.hold(0, image_of(layout, 1), layout)
    damage(other, part)
    own.serve(), other.serve()
    own.begin([0], [group_of(other)])
    assert isinstance(own.outcome(), smp_messages.RestoreFailed)
    ((error, _), *_) = other.excluded
    assert error.rank == 0
    assert part in str(error)


def damage(node: Node, part: str) -> None:
    (held,) = node.memory.of(Rank(0))
    arena = Arena(held.fd, writable=True)
    if part == "digest table":
        arena.table(0)[0] ^= 1
    else:
        arena.image(0)[0 if part == "header" else -1] ^= 1
    arena.close()


def test_an_unresponsive_holder_is_given_up_and_named(net: Net) -> None:
    own, other = Node(net, "own", [1]), Node(net, "other", [0])
    own.serve()
    net.dead.add("other")
    own.begin([0], [group_of(other)])
    failed = own.outcome()
    assert isinstance(failed, smp_messages.RestoreFailed)
    assert "rank 0" in failed.reason
    assert "other: no answer for 0 s" in failed.reason
    assert not failed.is_link


def test_a_lost_link_is_the_reason_that_is_reported(net: Net) -> None:
    own, other = Node(net, "own", [1]), Node(net, "other", [0])
    own.serve()
    net.dead.add("other")
    own.begin([0], [group_of(other)])
    own.rpc.lost("other", "its link broke")
    failed = own.outcome()
    assert isinstance(failed, smp_messages.RestoreFailed)
    assert "other: " in failed.reason
    assert failed.is_link


def test_a_rank_that_no_group_protected_is_refused_by_name(net: Net) -> None:
    own, other = Node(net, "own", [1]), Node(net, "other", [0])
    own.serve(), other.serve()
    own.begin([1], [group_of(other)])
    failed = own.outcome()
    assert isinstance(failed, smp_messages.RestoreFailed)
    assert "ranks [1]" in failed.reason


def test_a_cancelled_restore_reports_nothing(net: Net) -> None:
    own, other = Node(net, "own", [1]), Node(net, "other", [0])
    own.serve()
    net.dead.add("other")
    own.begin([0], [group_of(other)])
    own.restores.cancel()
    end_s = clock.now_s() + 3 * TIMEOUT_S
    while clock.now_s() < end_s:
        if select.select([own.jobs], [], [], 0.05)[0]:
            own.jobs.finish()
    assert not own.reported


# --- a lost node ------------------------------------------------------------------------------


class Lost:
    """Node `lost` ran rank 0, and the next node of its group has its mirror."""

    def __init__(self, net: Net, *, replicated: bool) -> None:
        self.layout = layout_of()
        self.image = image_of(self.layout, 1)
        self.lost, self.holder = Node(net, "lost", [0]), Node(net, "holder", [1])
        self.own = Node(net, "own", [])
        self.lost.hold(0, self.image, self.layout)
        self.holder.hold(1, image_of(self.layout, 2), self.layout)
        count = len(self.layout.pieces)
        shared = 1 if replicated else 0
        mirrored = [PieceRun(shared, count - shared)]
        copies = [ReplicatedPieces(0, [PieceRun(0, 1)])] if replicated else []
        self.plan = NodeRedundancy([RankRedundancy(0, mirrored, [], copies)], 1 << 20, 0)
        served = self.lost.serve()
        self.parts = mirror_parts(served.shards, self.record(0, self.plan))
        self.store_mirror(b"".join(self.parts))
        net.dead.add("lost")

    def record(self, position: int, plan: NodeRedundancy) -> ParityRecord:
        return ParityRecord(
            generation=WANTED.generation,
            step=WANTED.step,
            world_size=2,
            protected_in=WANTED.generation,
            members=[GroupMember("lost", [0]), GroupMember("holder", [1])],
            parity=1,
            position=position,
            block_bytes=4096,
            coded_bytes=[0, 0],
            own=plan,
            holders=[[0, 1]],
            mirrors=[(1 - position, 1 << 20)],
            num_rows=0,
        )

    def store_mirror(self, raw: bytes) -> None:
        record = self.record(1, NodeRedundancy([RankRedundancy(1, [], [], [])], 0, 0))
        region, slot = allocate_parity_region(record), self.holder.parity_store.free_slot()
        self.holder.parity_store.put(slot, region)
        region.begin(record)
        region.mirror_space(0)[: len(raw)] = raw
        region.store_mirror(0, len(raw), xxhash.xxh3_64_intdigest(raw))
        region.mark(ParityRegionState.COMPLETE)

    def begin(self) -> None:
        gone = NodeAddress("lost", 1, "host", 0, [0])
        nodes = [gone, self.holder.address]
        self.own.serve(), self.holder.serve()
        self.own.begin([0], [PreviousGroup(nodes, 1, WANTED.generation)])


@pytest.mark.parametrize("replicated", [False, True])
def test_a_lost_slot_comes_from_its_mirror_and_from_replicas(net: Net, replicated: bool) -> None:
    made = Lost(net, replicated=replicated)
    made.begin()
    assert isinstance(made.own.outcome(), smp_messages.RestoreReady)
    assert made.own.image(0) == made.image


def test_a_mirror_of_other_contents_is_refused(net: Net) -> None:
    made = Lost(net, replicated=False)
    made.holder.parity_store.free()
    made.holder.parity_store = ParityStore()
    made.store_mirror(b"".join(made.parts)[:-1])
    made.begin()
    failed = made.own.outcome()
    assert isinstance(failed, smp_messages.RestoreFailed)
    assert "rank 0 of node lost" in failed.reason
    assert "cannot fetch its small state (holder: a mirror of " in failed.reason
    assert "unreachable: lost" in failed.reason


def test_a_replica_that_no_node_has_is_named(net: Net) -> None:
    made = Lost(net, replicated=True)
    made.holder.memory.free()
    made.begin()
    failed = made.own.outcome()
    assert isinstance(failed, smp_messages.RestoreFailed)
    assert "bytes of a replica (holder: this node has no piece" in failed.reason


# --- pieces for another world --------------------------------------------------------------------


def shards_of(made: Lost, num_readers: int = 1) -> PreviousWorldShards:
    served = made.own.serve()
    made.holder.serve()
    nodes = [NodeAddress("lost", 1, "host", 0, [0]), made.holder.address]
    groups = [PreviousGroup(nodes, 1, WANTED.generation)]
    fetch = Fetch(made.own.rpc, timeout_s=TIMEOUT_S)
    world = PreviousWorld(WANTED, groups, made.own.address, "own", num_readers)
    return PreviousWorldShards(world, fetch, served, None)


@pytest.mark.parametrize("replicated", [False, True])
def test_pieces_of_a_lost_shard_come_from_its_mirror_and_replicas(
    net: Net, replicated: bool
) -> None:
    made = Lost(net, replicated=replicated)
    shards = shards_of(made)
    assert bytes(shards.head(Rank(0)).header) == made.layout.header
    out = memoryview(bytearray(made.layout.data_bytes))
    shards.read([(Rank(0), at) for at in range(len(made.layout.pieces))], out)
    assert bytes(out) == made.image[len(made.layout.header) :]


class Ranks:
    """Two ranks of a node, one after the other, that read the shard of a lost rank."""

    def __init__(self, made: Lost, num_readers: int) -> None:
        self.reads = ShardReads(made.own.memory, made.own.jobs)
        self.shards = shards_of(made, num_readers)
        self.reads.begin(self.shards)
        self._made = made
        self._answers: list[Any] = []

    def read(self, rank: int, pieces: range) -> bytes:
        """The bytes of an answer; raises AssertionError with its reason if it is refused."""
        wanted = [(0, pieces.start, len(pieces))]
        body = worker_messages.FetchPieces(rank, WANTED.generation, WANTED.step, wanted)
        requester: Any = SimpleNamespace(send=self._take)
        self.reads.ask(requester, body)
        self.wait(lambda: bool(self._answers))
        answer = self._answers.pop()
        assert isinstance(answer, bytes), answer
        return answer

    def wait(self, claim: Callable[[], bool]) -> None:
        end_s = clock.now_s() + WAIT_S
        while not claim():
            assert clock.now_s() < end_s
            if select.select([self._made.own.jobs], [], [], 0.1)[0]:
                self._made.own.jobs.finish()

    def _take(self, body: Any, *, fds: tuple[int, ...] = ()) -> None:
        self._answers.append(os.pread(fds[0], body.num_bytes, 0) if fds else body)


@pytest.mark.parametrize("num_readers", [1, 2])
def test_a_second_rank_gets_pieces_from_the_fetch_of_the_first(
    net: Net, num_readers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_reads, "IDLE_S", 0.05)
    made = Lost(net, replicated=True)
    ranks, size = Ranks(made, num_readers), made.layout.data_bytes
    pieces = range(len(made.layout.pieces))
    content = made.image[len(made.layout.header) :]
    assert ranks.read(0, pieces) == content
    first = ranks.shards.fetch.num_bytes
    assert 0 < first <= size
    assert ranks.read(1, pieces) == content
    assert ranks.shards.fetch.num_bytes == (first if num_readers > 1 else 2 * first)
    ranks.wait(lambda: not ranks.shards.pieces.num_bytes)  # some time after the last read
    assert not ranks.reads.free_copies()
    before = ranks.shards.fetch.num_bytes
    assert ranks.read(1, pieces) == content
    assert ranks.shards.fetch.num_bytes == before + first
    ranks.reads.begin(None)


@pytest.mark.parametrize("num_readers", [1, 2])
def test_a_piece_that_no_node_has_is_refused_with_its_name(net: Net, num_readers: int) -> None:
    made = Lost(net, replicated=True)
    made.holder.memory.free()
    ranks = Ranks(made, num_readers)
    for rank in range(num_readers):
        with pytest.raises(AssertionError, match=r"piece 0 of rank 0, .*unreachable nodes: lost"):
            ranks.read(rank, range(1))
    ranks.reads.begin(None)


def test_equal_pieces_of_one_request_are_fetched_once(net: Net) -> None:
    made = Lost(net, replicated=True)
    shards = shards_of(made)
    piece = made.layout.pieces[0]
    out = memoryview(bytearray(3 * piece.num_bytes))
    shards.read([(Rank(0), 0)] * 3, out)
    start = len(made.layout.header) + piece.offset
    assert bytes(out) == 3 * made.image[start : start + piece.num_bytes]
    assert shards.fetch.num_bytes == piece.num_bytes


def test_a_missing_piece_is_named_with_the_lost_nodes(net: Net) -> None:
    made = Lost(net, replicated=True)
    made.holder.memory.free()
    shards = shards_of(made)
    out = memoryview(bytearray(made.layout.pieces[0].num_bytes))
    with pytest.raises(LayoutUnknown, match=r"piece 0 of rank 0, .*unreachable nodes: lost"):
        shards.read([(Rank(0), 0)], out)


def test_a_damaged_mirror_on_the_reading_node_is_rejected(net: Net) -> None:
    made = Lost(net, replicated=False)
    served = made.holder.serve()
    (region,) = [one for one in made.holder.parity_store._slots if one is not None]
    region.mirror_space(0)[0] ^= 1
    nodes = [NodeAddress("lost", 1, "host", 0, [0]), made.holder.address]
    groups = [PreviousGroup(nodes, 1, WANTED.generation)]
    fetch = Fetch(made.holder.rpc, timeout_s=TIMEOUT_S)
    world = PreviousWorld(WANTED, groups, made.holder.address, "holder")
    shards = PreviousWorldShards(world, fetch, served, None)
    with pytest.raises(LayoutUnknown, match="mirror of place 0"):
        shards.head(Rank(0))
    ((_, ask),) = made.holder.excluded
    assert isinstance(ask, GetMirror)
    made.holder.parity_store.drop_damaged_mirror(WANTED, ask.protected_in, ask.position)
    assert made.holder.parity_store.parts()[0].mirrors == []


def test_a_cancelled_read_ends(net: Net) -> None:
    made = Lost(net, replicated=True)
    shards = shards_of(made)
    shards.head(Rank(0))
    shards.fetch.cancel()
    out = memoryview(bytearray(made.layout.pieces[0].num_bytes))
    with pytest.raises(FetchFailed, match="a new generation begins"):
        shards.read([(Rank(0), 0)], out)


# --- a load that several nodes share ------------------------------------------------------------


class Load:
    """Two pieces that the other node of the group should have read."""

    def __init__(self, raws: list[bytes]) -> None:
        self.version = WANTED
        self.ranks = [Rank(0)]
        self.lock = Lock()
        self.raws = raws
        self.rooms = [bytearray(len(raw)) for raw in raws]
        self.left = {(0, at): 1 for at in range(len(raws))}
        self.is_whole = self.is_closed = False
        self.num_read = 0
        self.read: list[tuple[int, int]] = []

    def find(self, digest: int) -> memoryview:
        raise LayoutUnknown("not here")

    def room(self, position: tuple[int, int]) -> memoryview:
        return memoryview(self.rooms[position[1]])

    def digest(self, position: tuple[int, int]) -> int:
        return xxhash.xxh3_64_intdigest(self.raws[position[1]])

    def took(self, position: tuple[int, int]) -> None:
        if bytes(self.rooms[position[1]]) != self.raws[position[1]]:
            raise SnapshotCorrupt(what="a piece", piece=position[1], pieces=len(self.raws))
        self.left.pop(position, None)

    def read_too(self, places: list[tuple[int, int]]) -> None:
        for position in places:
            self.rooms[position[1]][:] = self.raws[position[1]]
            self.read.append(position)
            self.took(position)

    def seal(self) -> None:
        assert not self.left
        self.is_whole = True

    def close(self) -> None:
        self.is_closed = True


def begin_load(net: Net, load: Any) -> Node:
    own, other = Node(net, "own", [0]), Node(net, "other", [1])
    layout = layout_of()
    other.hold(1, image_of(layout, 1), layout)
    own.serve(), other.serve()
    own.restores.share(load)
    own.begin([0], [group_of(own, other)])
    return own


def piece_of(at: int) -> bytes:
    layout = layout_of()
    start, piece = len(layout.header), layout.pieces[at]
    image = image_of(layout, 1)
    return image[start + piece.offset : start + piece.offset + piece.num_bytes]


def test_pieces_that_another_node_has_read_are_not_read_again(net: Net) -> None:
    load = Load([piece_of(0), piece_of(1)])
    own = begin_load(net, load)
    assert isinstance(own.outcome(), smp_messages.RestoreReady)
    assert load.is_whole
    assert not load.read


def test_a_load_that_is_replaced_releases_its_checkpoint(net: Net) -> None:
    load: Any = Load([piece_of(0)])
    restores = Node(net, "own", [0]).restores
    restores.share(load)
    assert not load.is_closed
    restores.share(None)
    assert load.is_closed


def test_what_the_other_node_does_not_have_is_read_from_storage(net: Net) -> None:
    load = Load([piece_of(0), b"a piece that no node has"])
    own = begin_load(net, load)
    assert isinstance(own.outcome(), smp_messages.RestoreReady)
    assert load.read == [(0, 1)]
    notice = own.wait(smp_messages.SmpNotice)
    assert notice.kind == "source_set_aside"
    assert "1 pieces" in notice.reason
    assert "other: this node has no piece with this digest" in notice.reason


def test_a_load_that_storage_does_not_complete_fails_without_blaming_links(net: Net) -> None:
    load = Load([b"a piece that no node has"])

    def fail(places: Any) -> None:
        raise OSError("the disk is lost")

    load.read_too = fail  # type: ignore[method-assign]
    own = begin_load(net, load)
    own.rpc.lost("other", "its link broke")
    failed = own.outcome()
    assert isinstance(failed, smp_messages.RestoreFailed)
    assert (failed.reason, failed.is_link) == ("the disk is lost", False)
