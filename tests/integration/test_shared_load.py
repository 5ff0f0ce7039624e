"""Nodes that load a checkpoint together read each byte once, also if one is lost in between.

Real SMP processes with links of their own; the test acts as their agents. The kernel's counters
show how many bytes they have read.
"""

import contextlib
import gc
import os
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import xxhash

from ftrun.errors import PeerError
from ftrun.ids import version
from ftrun.snapshot.layout import CopyTiming, Layout, LayoutEntry, make_layout
from ftrun.snapshot.load_shares import ranks_at
from ftrun.wire.messages import checkpoint as checkpoint_messages
from ftrun.wire.messages import envelope as messages
from ftrun.wire.messages import smp as smp_messages
from ftrun.wire.messages import worker as worker_messages
from ftrun.wire.shared_memory.arena import Arena, SlotState, verify
from ftrun.wire.shared_memory.pages import create_command_page
from tests.ftp_server import ftp_server
from tests.integration import test_checkpoint_nodes as nodes_of
from tests.integration.conftest import in_full
from tests.integration.test_checkpoint_nodes import TIMEOUT_S

pytestmark = [pytest.mark.slow]

WORLD = 3
FIRST = version(0, 1)
LOADED = version(-1, 1)
WEIGHTS, OWN = 3_000_000, 100_000
"""Numbers of four bytes: 12 MB that are equal on all ranks, and 0.4 MB of each rank's own."""


def layout_of(rank: int) -> Layout:
    entries = [
        LayoutEntry("weights", "F32", (WEIGHTS,), CopyTiming.LAZY),
        LayoutEntry("own", "F32", (OWN,), CopyTiming.LAZY),
    ]
    return make_layout(entries, plain_bytes=10, metadata={"ftrun.rank": str(rank)})


def noise(seed: str, num_bytes: int) -> bytes:
    """Bytes of which no two pieces are equal."""
    made = b"".join(
        xxhash.xxh3_128_digest(f"{seed} {at}".encode()) * 256 for at in range(num_bytes // 4096 + 1)
    )
    return made[:num_bytes]


@cache
def image_of(rank: int) -> bytes:
    layout = layout_of(rank)
    data = bytearray(layout.data_bytes)
    for entry in layout.entries:
        seed = f"{entry.name} {'all' if entry.name == 'weights' else rank}"
        data[entry.offset : entry.offset + entry.num_bytes] = noise(seed, entry.num_bytes)
    return layout.header + bytes(data)


COPY_BYTES = len(image_of(0))
OWN_BYTES = COPY_BYTES - 4 * WEIGHTS


class Node(nodes_of.Node):
    """A node with links to others."""

    port = 0
    said: list[messages.AnyMessage]

    def start(self, *, crash_at: str = "", count: str = "") -> None:
        super().start(crash_at=crash_at, count=count)
        self.said = []
        answer = self.ask(smp_messages.ListenForPeers("127.0.0.1"))
        assert isinstance(answer, smp_messages.ListeningForPeers)
        self.port = answer.port

    def make_and_seal(self) -> None:
        self.page_fd = create_command_page()
        body = smp_messages.BeginGeneration(0, WORLD, self.ranks)
        assert self.ask(body, self.page_fd) == messages.Done()
        for rank in self.ranks:
            layout = layout_of(rank)
            pieces = len(layout.pieces)
            asked = worker_messages.RequestArena(rank, WORLD, layout.image_bytes, pieces, 9 + rank)
            got = self.connect("worker", rank).ask(asked, deadline_s=TIMEOUT_S)
            (self.arenas[rank],) = got.fds
        self.seal(FIRST)

    def place(self, ranks: list[int]) -> smp_messages.NodeAddress:
        alive = self.process is not None and self.process.poll() is None
        return smp_messages.NodeAddress(self.name, 1, "127.0.0.1", self.port if alive else 0, ranks)

    def num_read(self) -> int:
        """Bytes that its process has read from files, without those from sockets."""
        assert self.process is not None
        try:
            text = Path(f"/proc/{self.process.pid}/io").read_text()
        except PermissionError:
            pytest.skip("needs root: an SMP is not dumpable, so its counters are root's")
        return int(text.split("rchar:")[1].split()[0])

    def receive(self, *kinds: type[messages.AnyMessage]) -> messages.AnyMessage:
        """The first message of these kinds, received already or not; the others are kept."""
        assert self.agent is not None
        end_s = time.monotonic() + TIMEOUT_S
        while True:
            for body in self.said:
                if isinstance(body, kinds):
                    self.said.remove(body)
                    return body
            received = self.agent.receive(deadline_s=end_s - time.monotonic())
            for fd in received.fds:
                os.close(fd)
            self.said.append(received.body)

    def receive_restore(self) -> messages.AnyMessage:
        return self.receive(smp_messages.RestoreReady, smp_messages.RestoreFailed)


@pytest.fixture(autouse=True)
def replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes of the other tests seal these images."""
    monkeypatch.setattr(nodes_of, "layout_of", layout_of)
    monkeypatch.setattr(nodes_of, "image_of", lambda rank, at, salt="": image_of(rank))


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    gc.collect()  # what other tests have left is not counted
    before = len(os.listdir("/proc/self/fd"))
    found = [Node(f"node{at}", [at], tmp_path) for at in range(WORLD)]
    yield found
    for node in found:
        node.lose()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    """Storage of the checkpoint."""
    return str(getattr(request, "param", "directory"))


@pytest.fixture
def where(kind: str, nodes: list[Node], tmp_path: Path) -> Iterator[str]:
    """A checkpoint of all three; then all of them are lost."""
    directory = tmp_path / "checkpoints"
    with contextlib.ExitStack() as ends:
        place = {"directory": str(directory), "file": f"file://{directory}"}.get(kind)
        if place is None:
            place = ends.enter_context(ftp_server(tmp_path)).url("checkpoints")
        for node in nodes:
            node.start()
            node.make_and_seal()
        body = checkpoint_messages.WriteCheckpoint(place, 2, (FIRST.generation, FIRST.step), "a")
        answers = [node.ask(body) for node in nodes]
        last = answers[-1]
        assert isinstance(last, checkpoint_messages.CheckpointWritten), answers
        assert not last.is_part, answers
        for node in nodes:
            node.lose()
        yield place


def load(node: Node, where: str, load_group: list[Node]) -> checkpoint_messages.CheckpointLoaded:
    ranks = [[at] for at in range(len(load_group))]
    body = checkpoint_messages.LoadCheckpoint(
        where,
        len(load_group),
        ranks[load_group.index(node)],
        ranks=ranks,
        node=load_group.index(node),
    )
    answer = node.ask(body)
    assert isinstance(answer, checkpoint_messages.CheckpointLoaded), answer
    return answer


def begin(node: Node, load_group: list[Node], *, previous_world_size: int = 0) -> None:
    """Begin a generation as the agents' `begin_generation` does."""
    count = len(load_group)
    own = [one.place([at]) for at, one in enumerate(load_group)]
    loaded = [one.place(list(ranks_at(at, count, WORLD))) for at, one in enumerate(load_group)]
    node.page_fd = create_command_page() if node.page_fd < 0 else node.page_fd
    body = smp_messages.BeginGeneration(
        1,
        count,
        [load_group.index(node)],
        group=own,
        node_id=node.name,
        restored=(LOADED.generation, LOADED.step),
        restored_world_size=previous_world_size,
        restore_from=[smp_messages.PreviousGroup(loaded, 0, -1)] if previous_world_size else [],
        read_from=[smp_messages.PreviousGroup(own, 0, -1)],
        timeout_s=20.0,
    )
    assert node.agent is not None
    node.agent.generation = 1
    node.send(body, node.page_fd)
    node.receive(messages.Done)


def check_whole(node: Node, ranks: list[int]) -> None:
    """The arenas that its agent was granted are sealed, and equal the captured state."""
    assert sorted(node.granted) == ranks
    for rank, fd in node.granted.items():
        arena = Arena(fd, writable=False)
        slot = arena.find(LOADED)
        assert slot is not None
        verify(arena, slot, what="test")
        assert bytes(arena.image(slot)) == image_of(rank)
        arena.close()


@pytest.mark.parametrize("kind", ["directory", *in_full("file")], indirect=True)
def test_three_replicas_read_one_copy(nodes: list[Node], where: str) -> None:
    for node in nodes:
        node.start()
    before = [node.num_read() for node in nodes]
    answers = [load(node, where, nodes) for node in nodes]
    assert all(answer.is_share for answer in answers)
    read = [node.num_read() - start for node, start in zip(nodes, before, strict=True)]
    for node in nodes:
        begin(node, nodes)
    assert [type(node.receive_restore()) for node in nodes] == [smp_messages.RestoreReady] * WORLD
    for at, node in enumerate(nodes):
        check_whole(node, [at])
    after = [node.num_read() - start for node, start in zip(nodes, before, strict=True)]
    one_copy = 4 * WEIGHTS + WORLD * OWN_BYTES
    # Libraries that are loaded at the same time and reads of /proc are included.
    assert one_copy <= sum(after) < 1.25 * one_copy + (4 << 20), after
    assert max(read) < 1.5 * min(read) + (2 << 20), "each reads about as much"


def test_what_a_lost_node_was_to_read_the_others_read(nodes: list[Node], where: str) -> None:
    for node in nodes:
        node.start()
        load(node, where, nodes)
    nodes[1].lose()
    left = [nodes[0], nodes[2]]
    for node in left:
        begin(node, nodes)
    for node in left:
        assert isinstance(node.receive_restore(), smp_messages.RestoreReady)
        notes = [one for one in node.said if isinstance(one, smp_messages.SmpNotice)]
        assert any("are read here" in one.reason for one in notes), notes
        check_whole(node, node.ranks)


@pytest.mark.full
def test_fewer_nodes_than_ranks_load_a_part_each(nodes: list[Node], where: str) -> None:
    two = nodes[:2]
    for node in two:
        node.start()
    before = [node.num_read() for node in two]
    for node in two:
        assert load(node, where, two).world_size == WORLD
    for node in two:
        begin(node, two, previous_world_size=WORLD)
    assert [type(node.receive_restore()) for node in two] == [smp_messages.RestoreReady] * 2
    after = [node.num_read() - start for node, start in zip(two, before, strict=True)]
    assert sum(after) < 1.25 * (4 * WEIGHTS + WORLD * OWN_BYTES) + (4 << 20), after
    for at, node in enumerate(two):
        check_whole(node, list(ranks_at(at, 2, WORLD)))


def test_replicas_of_one_node_are_read_once(nodes: list[Node], where: str) -> None:
    node = nodes[0]
    node.ranks = [0, 1, 2]
    node.start()
    before = node.num_read()
    answer = node.ask(checkpoint_messages.LoadCheckpoint(where, WORLD, node.ranks))
    assert isinstance(answer, checkpoint_messages.CheckpointLoaded), answer
    assert not answer.is_share
    assert node.num_read() - before < 1.25 * (4 * WEIGHTS + WORLD * OWN_BYTES) + (4 << 20)
    check_whole(node, node.ranks)


def test_an_smp_killed_with_half_of_it_leaves_nothing_that_counts(
    nodes: list[Node], where: str
) -> None:
    """Its successor has the arenas, reports that the version is missing, and loads it again."""
    first, second, third = nodes
    first.start(crash_at="smp.checkpoint.share_taken")
    second.start()
    third.start()
    for node in nodes:
        load(node, where, nodes)
    for node in nodes:
        begin(node, nodes)
    with pytest.raises(PeerError):
        first.receive_restore()
    for node in (second, third):
        assert isinstance(node.receive_restore(), smp_messages.RestoreReady)
    first.kill()
    first.arenas, first.granted = first.granted, {}
    arena = Arena(first.arenas[0], writable=False)
    assert [arena.header(slot).state for slot in range(2)] == [SlotState.COPYING, SlotState.EMPTY]
    arena.close()
    first.start()
    begin(first, nodes)
    assert isinstance(first.receive_restore(), smp_messages.RestoreFailed)
    assert load(first, where, nodes).is_share


def test_a_damaged_piece_is_read_from_a_replica_if_another_rank_has_it(
    nodes: list[Node], where: str
) -> None:
    """The state of rank 1 alone cannot be read from another file: then there is no checkpoint."""
    (path,) = Path(where).glob("step-*/rank-00001.safetensors")
    ends = (COPY_BYTES // 2, path.stat().st_size - 4096)
    for at, piece_of in zip(ends, ("all ranks", "rank 1"), strict=True):
        with path.open("r+b") as file:
            file.seek(at)
            file.write(b"\x00" * 64)
        nodes[1].start()
        body = checkpoint_messages.LoadCheckpoint(where, WORLD, [1])
        answer = nodes[1].ask(body)
        assert isinstance(answer, checkpoint_messages.CheckpointLoaded)
        if piece_of == "all ranks":
            assert answer.rejected == {}
            check_whole(nodes[1], [1])
            nodes[1].lose()
            continue
        (reason,) = answer.rejected.values()
        assert (answer.path, answer.problem != "") == ("", True)
        assert str(path) in reason
    nodes[0].start()
    assert load(nodes[0], where, nodes).is_share


@pytest.mark.full
@pytest.mark.parametrize("kind", ["ftp"], indirect=True)
def test_it_comes_over_ftp_as_well(nodes: list[Node], where: str) -> None:
    for node in nodes:
        node.start()
    for node in nodes:
        load(node, where, nodes)
    for node in nodes:
        begin(node, nodes)
    for at, node in enumerate(nodes):
        assert isinstance(node.receive_restore(), smp_messages.RestoreReady)
        check_whole(node, [at])
