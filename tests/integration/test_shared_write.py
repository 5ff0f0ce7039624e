"""Several nodes write what they hold equally once, and every reader finds it.

Each node is a writer with arenas of its own, in a thread; all share a directory or a URL.
"""

import gc
import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash

from ftrun import clock
from ftrun.errors import CheckpointError, NoUsableCheckpoint
from ftrun.ids import Generation, Rank, RunId, version
from ftrun.smp.checkpoint import shared_load, shared_write
from ftrun.smp.checkpoint.index import SHARED_FORMAT, ShardFile, file_sizes, parse_index, seal
from ftrun.smp.checkpoint.live_capture import CaptureFilter
from ftrun.smp.checkpoint.load import LoadJob, load_checkpoint
from ftrun.smp.checkpoint.reader import CheckpointFiles, OpenFiles, SourceShard
from ftrun.smp.checkpoint.shared_load import LoadGroup
from ftrun.smp.checkpoint.shared_write import Borrowed, NodeOffer, divided
from ftrun.smp.checkpoint.slot_reader import SealedSlot, SlotOverwritten
from ftrun.smp.checkpoint.storage.direct_file import CopyBuffers, Throttle
from ftrun.smp.checkpoint.storage.local import LocalStorage
from ftrun.smp.checkpoint.storage.storage import Retention, open_storage, prune
from ftrun.smp.checkpoint.write_job import WriteJob, WriterContext, WriteResult
from ftrun.smp.checkpoint.writer import CheckpointWriter
from ftrun.snapshot.layout import PIECE_BYTES, CopyTiming, Layout, LayoutEntry, make_layout
from ftrun.snapshot.write_shares import RankOffer
from ftrun.tools.checkpoints.catalog import find_damage
from ftrun.wire.messages.checkpoint import INDEX_NAME
from ftrun.wire.shared_memory.arena import (
    Arena,
    ArenaShape,
    SlotHeader,
    SlotState,
    create_memfd,
    read_shape,
    read_slot_headers,
    table_digest,
    verify,
)
from tests.integration.conftest import in_full
from tests.integration.test_shared_load import noise

SHARED, OWN = 1_500_000, 70_000
"""Numbers of four bytes: 6 MB that are equal on all ranks, and 0.28 MB of each rank's own."""
WAIT_S = 30.0


def layout_of(rank: int) -> Layout:
    entries = [
        LayoutEntry("shared", "F32", (SHARED,), CopyTiming.LAZY),
        LayoutEntry("own", "F32", (OWN,), CopyTiming.LAZY),
    ]
    return make_layout(entries, plain_bytes=10, metadata={"ftrun.rank": str(rank)})


def image_of(rank: int, step: int) -> bytes:
    layout = layout_of(rank)
    data = bytearray(layout.data_bytes)
    for entry in layout.entries:
        seed = f"{entry.name} {step} {'all' if entry.name == 'shared' else rank}"
        data[entry.offset : entry.offset + entry.num_bytes] = noise(seed, entry.num_bytes)
    return layout.header + bytes(data)


@dataclass
class Node:
    """The arenas of one node, and its writer."""

    ranks: tuple[Rank, ...]
    world_size: int
    fds: dict[Rank, list[int]] = field(default_factory=dict)
    stop: threading.Event = field(default_factory=threading.Event)
    free_bytes: int = 1 << 40

    def __post_init__(self) -> None:
        for rank in self.ranks:
            layout = layout_of(rank)
            shape = ArenaShape(
                rank, self.world_size, layout.image_bytes, len(layout.pieces), 9 + rank
            )
            self.fds[rank] = [create_memfd(shape)]
        self.writer = CheckpointWriter(context_of(self))

    def seal(self, step: int, *, slot: int = 0, sealed_s: float = 0.0) -> None:
        for rank in self.ranks:
            layout, image = layout_of(rank), image_of(rank, step)
            arena = Arena(self.fds[rank][0], writable=True)
            arena.image(slot)[:] = image
            table = arena.table(slot)
            for index, piece in enumerate(layout.pieces):
                at = len(layout.header) + piece.offset
                table[index] = xxhash.xxh3_64_intdigest(image[at : at + piece.num_bytes])
            sealed_ns = int((sealed_s or 60 * step) * 1e9)
            digest = table_digest(table)
            del table
            arena.write_header(
                slot, SlotHeader(SlotState.SEALED, 0, step, len(image), digest, sealed_ns)
            )
            arena.close()

    def job(self, where: str, step: int, *, wait_s: float = WAIT_S, writers: int = 0) -> WriteJob:
        return WriteJob(
            where, self.ranks, self.world_size, Retention(2), version(0, step), "token",
            share_wait_s=wait_s, num_writers=writers,
        )  # fmt: skip

    def close(self) -> None:
        for fds in self.fds.values():
            os.close(fds[0])


def context_of(node: Node) -> WriterContext:
    return WriterContext(RunId("run"), CopyBuffers(lambda: node.free_bytes), Throttle(node.stop))


@pytest.fixture
def nodes(request: pytest.FixtureRequest) -> Iterator[list[Node]]:
    """Of two ranks each, two if a test does not set another number."""
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    count = getattr(request, "param", 2)
    made = [Node((Rank(2 * at), Rank(2 * at + 1)), world_size=2 * count) for at in range(count)]
    yield made
    for node in made:
        node.close()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def write(jobs: Sequence[tuple[Node, WriteJob]]) -> list[WriteResult]:
    """All nodes at once."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(lambda one: one[0].writer.write(one[0].fds, one[1]), jobs))


def write_all(
    nodes: Sequence[Node], where: str, step: int = 1, *, writers: int = 0
) -> tuple[Path, WriteResult]:
    """The checkpoint, and the result of the node that finished it."""
    for node in nodes:
        node.seal(step)
    done = write([(node, node.job(where, step, writers=writers)) for node in nodes])
    # At a URL without locks, a node may find the checkpoint that another has just finished.
    last = max((one for one in done if not one.missing_ranks), key=lambda one: one.total_bytes)
    return Path(last.path.removeprefix("file://")), last


def check_restores(where: str, nodes: Sequence[Node], step: int, *, world_size: int = 0) -> None:
    """Every image comes back bit for bit, on one node for the whole world."""
    size = world_size or nodes[0].world_size
    ranks = [Rank(rank) for rank in range(size)]
    loaded = load_checkpoint(where, LoadJob(size, ranks, lambda _: None), threading.Event())
    assert loaded is not None
    assert loaded.rejected == {}
    found: set[int] = set()
    for fd in loaded.fds:
        arena = Arena(fd, writable=False)
        slot = arena.find(version(-1, step))
        assert slot is not None
        verify(arena, slot, what="test")[1].release()
        assert bytes(arena.image(slot)) == image_of(arena.shape.rank, step)
        found.add(arena.shape.rank)
        arena.close()
        os.close(fd)
    assert found == set(range(nodes[0].world_size)), "also if the world has another size"


def state_bytes(nodes: Sequence[Node]) -> int:
    """One copy of what is shared, and all that is each rank's own."""
    images = sum(layout_of(rank).image_bytes for node in nodes for rank in node.ranks)
    return images - (nodes[0].world_size - 1) * 4 * SHARED


def data_files(path: Path) -> dict[str, int]:
    return {
        one.name: one.stat().st_size for one in path.iterdir()
        if one.suffix in (".pieces", ".safetensors")
    }  # fmt: skip


@pytest.mark.parametrize(
    ("nodes", "scheme"),
    [(2, ""), pytest.param(3, "", marks=pytest.mark.full), (2, "file://")],
    indirect=["nodes"],
)
def test_each_byte_is_written_once_and_every_image_comes_back(
    nodes: list[Node], tmp_path: Path, scheme: str
) -> None:
    where = f"{scheme}{tmp_path / 'saved'}"
    path, done = write_all(nodes, where)
    files = data_files(path)
    assert sum(files.values()) == state_bytes(nodes) == done.total_bytes
    assert max(files.values()) - min(files.values()) <= 2 * PIECE_BYTES
    index = parse_index((path / INDEX_NAME).read_bytes(), what="it")
    assert index.format == SHARED_FORMAT
    assert file_sizes(index.shards) == files
    assert not any(shard.borrowed for shard in index.shards)
    check_restores(where, nodes, 1)
    for world_size in (1, 3, 8):
        check_restores(where, nodes, 1, world_size=world_size)
    with open_storage(where, threading.Event()) as storage:
        assert find_damage(storage, storage.describe(path.name)) == []
    names = {name for shard in index.shards for name in shard.names}
    rest = set(os.listdir(path)) - names - {INDEX_NAME}
    assert not rest if not scheme else all(one.startswith(("part-", "offer-")) for one in rest)


@pytest.mark.parametrize("writers", [*in_full(1), 3])
def test_a_node_writes_the_set_number_of_files_of_equal_size(
    nodes: list[Node], tmp_path: Path, writers: int
) -> None:
    path, _ = write_all(nodes, str(tmp_path), writers=writers)
    files = data_files(path)
    assert len(files) == 2 * writers
    assert sum(files.values()) == state_bytes(nodes)
    assert max(files.values()) - min(files.values()) <= 3 * PIECE_BYTES
    check_restores(str(tmp_path), nodes, 1)


def test_other_nodes_load_their_ranks_and_read_the_rest_from_each_other(
    nodes: list[Node], tmp_path: Path
) -> None:
    """Each of two nodes reads about half of the shared bytes, as from whole images."""
    path, _ = write_all(nodes, str(tmp_path))
    ranks = [list(node.ranks) for node in nodes]
    num_read = []
    for at, own in enumerate(ranks):
        job = LoadJob(4, [Rank(r) for r in own], lambda _: None, group=LoadGroup(ranks, at))
        loaded = load_checkpoint(str(tmp_path), job, threading.Event())
        assert loaded is not None
        assert loaded.rest is not None
        num_read.append(loaded.rest.num_read)
        loaded.rest.read_too(list(loaded.rest.left))
        loaded.rest.seal()
        for rank, fd in zip(own, loaded.fds, strict=True):
            arena = Arena(fd, writable=False)
            assert bytes(arena.image(0)) == image_of(rank, 1)
            arena.close()
            os.close(fd)
    assert max(num_read) < 4 * SHARED
    assert path.name == "step-00000001-g0"


def test_a_conversion_reads_images_from_all_their_files_and_opens_each_once(
    nodes: list[Node], tmp_path: Path
) -> None:
    path, _ = write_all(nodes, str(tmp_path), writers=3)
    with open_storage(str(tmp_path), threading.Event()) as storage:
        source = CheckpointFiles(storage, storage.describe(path.name))
        with closing(OpenFiles(source)) as files:
            shards = [SourceShard(source, one, files) for one in source.index().shards]
            assert opened_files(path) == [], "none before the first read"
            for rank, shard in enumerate(shards):
                for name, seed in (("shared", "all"), ("own", rank)):
                    entry = shard.head.entries[name]
                    found = bytes(shard.read(entry.offset, entry.num_bytes))
                    assert found == noise(f"{name} 1 {seed}", entry.num_bytes)
            assert opened_files(path) == sorted(data_files(path))


def opened_files(folder: Path) -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.append(Path(os.readlink(f"/proc/self/fd/{fd}")))
    return sorted(one.name for one in found if one.parent == folder)


def test_without_the_offer_of_another_node_a_node_writes_all_and_the_other_may_rely_on_it(
    nodes: list[Node], tmp_path: Path
) -> None:
    first, second = nodes
    for node in nodes:
        node.seal(1)
    (part,) = write([(first, first.job(str(tmp_path), 1, wait_s=0.05))])
    assert part.missing_ranks == (2, 3)
    assert part.total_bytes == sum(layout_of(rank).image_bytes for rank in first.ranks)
    (done,) = write([(second, second.job(str(tmp_path), 1))])
    assert not done.missing_ranks
    assert done.total_bytes < 3 * 4 * SHARED, "the second has left a part to the first"
    check_restores(str(tmp_path), nodes, 1)


@pytest.mark.parametrize("is_damaged", [True, False], ids=["damaged", "of another life"])
def test_an_offer_that_is_damaged_or_of_another_checkpoint_does_not_count(
    nodes: list[Node], tmp_path: Path, is_damaged: bool
) -> None:
    first = nodes[0]
    first.seal(1)
    with ThreadPoolExecutor(1) as pool:
        job = first.job(str(tmp_path), 1, wait_s=1.0)
        writing = pool.submit(write, [(first, job)])
        offer = folder_with_an_offer(tmp_path) / "offer-00002"
        made = NodeOffer(("run", "another token", 0, 1, 4), [])
        text = msgspec.msgpack.encode(made)
        offer.write_bytes(b"12345678" + text if is_damaged else xxhash.xxh3_64_digest(text) + text)
        (part,) = writing.result(WAIT_S)
    assert part.total_bytes == sum(layout_of(rank).image_bytes for rank in first.ranks)


def test_a_slot_that_is_being_filled_makes_no_offer(nodes: list[Node], tmp_path: Path) -> None:
    node = nodes[0]
    node.seal(1)
    arena = Arena(node.fds[Rank(1)][0], writable=True)
    arena.write_header(0, replace(arena.header(0), state=SlotState.COPYING))
    arena.close()
    shards = [
        SealedSlot(fds[0], 0, read_slot_headers(fds[0])[0], read_shape(fds[0]))
        for fds in node.fds.values()
    ]
    job = node.job(str(tmp_path), 1)
    assert job.version is not None
    blank = job.part(RunId("run"), job.version)
    with open_storage(str(tmp_path), node.stop) as storage:
        assert divided(storage, ".", shards, job, blank, context_of(node)) == {}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("most_ranks", [*in_full(2), 3])
def test_a_large_world_writes_a_copy_for_each_block_of_ranks(
    nodes: list[Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_ranks: int
) -> None:
    """With blocks of three ranks, the second node has ranks of both blocks."""
    monkeypatch.setattr(shared_write, "MOST_RANKS", most_ranks)
    path, _ = write_all(nodes, str(tmp_path))
    assert sum(data_files(path).values()) == state_bytes(nodes) + 4 * SHARED
    check_restores(str(tmp_path), nodes, 1)


def test_a_node_that_dies_before_its_share_costs_the_checkpoint_and_not_the_one_before(
    nodes: list[Node], tmp_path: Path
) -> None:
    first, second = nodes
    before, _ = write_all(nodes, str(tmp_path))
    for node in nodes:
        node.seal(2, slot=1)
    with ThreadPoolExecutor(1) as pool:
        first_one = pool.submit(write, [(first, first.job(str(tmp_path), 2))])
        folder = folder_with_an_offer(tmp_path)
        second.stop.set()  # it ends right after its offer
        with pytest.raises(CheckpointError, match="being stopped"):
            write([(second, second.job(str(tmp_path), 2))])
        assert (folder / "offer-00002").exists()
        (part,) = first_one.result(WAIT_S)
    assert part.missing_ranks == (2, 3)
    assert part.total_bytes < 2 * 4 * SHARED, "it has relied on the offer"
    assert (tmp_path / "latest").resolve() == before
    check_restores(str(tmp_path), nodes, 1)
    again = Node(second.ranks, 4)
    again.seal(2, slot=1)
    (finished,) = write([(again, again.job(str(tmp_path), 2))])
    assert not finished.missing_ranks, "it writes its share when it is asked again"
    check_restores(str(tmp_path), nodes, 2)
    again.close()


def folder_with_an_offer(directory: Path) -> Path:
    end_s = clock.now_s() + WAIT_S
    while not (found := list(directory.glob(".tmp-step-*/offer-00000"))):
        assert clock.now_s() < end_s
        clock.sleep(0.01)
    return found[0].parent


def test_a_part_that_relies_on_other_bytes_is_not_published(
    nodes: list[Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A division that differs on one node: its own bytes are in no file."""
    for node in nodes:
        node.seal(1)
    true = shared_write.borrowed_bytes

    def other(offers: Sequence[RankOffer], ranks: Sequence[int]) -> Borrowed:
        found = true(offers, ranks)
        if 0 in ranks:
            longer = found[0][0].num_bytes + PIECE_BYTES
            found[0][0] = msgspec.structs.replace(found[0][0], num_bytes=longer)
        return found

    monkeypatch.setattr(shared_write, "borrowed_bytes", other)
    jobs = [(node, node.job(str(tmp_path), 1)) for node in nodes]
    with pytest.raises(CheckpointError, match="relies on bytes that rank"):
        write(jobs)
    assert not (tmp_path / "latest").exists()
    with pytest.raises(NoUsableCheckpoint):
        load_checkpoint(
            str(tmp_path), LoadJob(4, [Rank(0)], lambda _: None, only="latest"), threading.Event()
        )


@pytest.mark.parametrize("free_bytes", [1 << 40, 0], ids=["copied", "no memory"])
def test_a_slot_that_is_overwritten_while_others_are_awaited_is_copied_or_written_whole_before(
    nodes: list[Node], tmp_path: Path, free_bytes: int
) -> None:
    first, second = nodes
    for node in nodes:
        node.seal(1)
    first.free_bytes = free_bytes
    with ThreadPoolExecutor(1) as pool:
        first_one = pool.submit(write, [(first, first.job(str(tmp_path), 1))])
        folder_with_an_offer(tmp_path)
        first.seal(2, slot=1)  # from now on its slot may be overwritten
        if not free_bytes:  # it does not wait any longer
            assert first_one.result(WAIT_S / 3)[0].total_bytes > 2 * 4 * SHARED
        clock.sleep(0.5)
        first.seal(3)
        write([(second, second.job(str(tmp_path), 1))])
        done = first_one.result(WAIT_S)[0]
        assert done.version == version(0, 1)
        assert bool(free_bytes) == (done.total_bytes < 2 * 4 * SHARED)
    check_restores(str(tmp_path), nodes, 1)


def test_the_offers_of_nodes_that_never_made_one_are_not_awaited(
    nodes: list[Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in directories that are not shared. Files of another node end it."""
    first, second = nodes
    true, listed = LocalStorage.names, list[str]()

    def names(storage: LocalStorage, folder: str) -> list[str]:
        listed.append(folder)
        return true(storage, folder)

    monkeypatch.setattr(LocalStorage, "names", names)

    def seconds(step: int, wait_s: float) -> float:
        first.seal(step)
        begun_s = clock.now_s()
        write([(first, first.job(str(tmp_path), step, wait_s=wait_s))])
        return clock.now_s() - begun_s

    assert seconds(1, 1.0) > 1.0
    assert 3 < len(listed) < 10, "less and less often, because each node lists all files"
    assert seconds(2, 1.0) > 1.0
    assert seconds(3, WAIT_S) < WAIT_S / 3
    second.seal(3)
    (done,) = write([(second, second.job(str(tmp_path), 3))])
    assert not done.missing_ranks
    assert done.total_bytes < 3 * 4 * SHARED, "the offer is made all the same"
    assert seconds(3, WAIT_S) < WAIT_S / 3, "it finds the checkpoint, and so the other node"
    assert seconds(4, 1.0) > 1.0


@pytest.mark.parametrize("nodes", [3], indirect=True)
def test_the_wait_begins_anew_with_each_offer(nodes: list[Node], tmp_path: Path) -> None:
    """Each node inspects the directory under a lock, so those of many come one after the other."""
    for node in nodes:
        node.seal(1)

    def begun(at: int) -> WriteResult:
        clock.sleep(1.0 * at)
        return nodes[at].writer.write(nodes[at].fds, nodes[at].job(str(tmp_path), 1, wait_s=1.5))

    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(begun, range(3)))
    (path,) = {Path(one.path) for one in done if not one.missing_ranks}
    assert sum(data_files(path).values()) == state_bytes(nodes)


def test_the_size_of_all_checkpoints_includes_the_one_that_is_written(
    nodes: list[Node], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Three checkpoints of equal size, and space for two and a half."""

    def published(step: int, keep_bytes: int) -> list[str]:
        jobs = []
        for node in nodes:
            node.seal(step)
            retention = Retention(9, keep_bytes=keep_bytes)
            jobs.append((node, replace(node.job(str(tmp_path), step), retention=retention)))
        write(jobs)
        return sorted(one.name[:13] for one in tmp_path.glob("step-*"))

    size = state_bytes(nodes)
    assert published(1, size * 5 // 2) == ["step-00000001"]
    assert published(2, size * 5 // 2) == ["step-00000001", "step-00000002"]
    assert published(3, size * 5 // 2) == ["step-00000002", "step-00000003"]
    assert not caplog.records
    assert published(4, size * 3 // 2) == ["step-00000004"]
    assert "keeps only the newest checkpoint" in caplog.text


def test_the_end_of_the_run_and_of_the_generation_end_the_wait(
    nodes: list[Node], tmp_path: Path
) -> None:
    first = nodes[0]
    first.seal(1)
    for name in ("is_over", "hurries"):
        job = replace(
            first.job(str(tmp_path / name), 1),
            is_over=lambda name=name: name == "is_over",
            hurries=lambda name=name: name == "hurries",
        )
        begun_s = clock.now_s()
        (part,) = write([(first, job)])
        assert clock.now_s() - begun_s < WAIT_S / 3
        assert part.total_bytes == sum(layout_of(rank).image_bytes for rank in first.ranks)


def capture(node: Node, where: str, step: int, *, wait_s: float = WAIT_S) -> WriteJob:
    """As `Node.job`, of the version that is captured from this step on."""
    follow = CaptureFilter(
        Generation(0),
        is_over=lambda: False,
        hurries=lambda: False,
        wait_s=WAIT_S,
        is_committed=lambda _: True,
        from_step=step,
    )
    return replace(node.job(where, step, wait_s=wait_s), version=None, follow=follow)


def test_captured_versions_are_shared_as_long_as_nodes_hold_equal_bytes(
    nodes: list[Node], tmp_path: Path
) -> None:
    for step in (1, 2):
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(
                write, [(one, capture(one, str(tmp_path), step)) for one in nodes]
            )
            for node in nodes:
                node.seal(step, slot=step % 2)
            done = writing.result(WAIT_S)
        last = max((one for one in done if not one.missing_ranks), key=lambda one: one.total_bytes)
        assert sum(data_files(Path(last.path)).values()) == state_bytes(nodes)
    check_restores(str(tmp_path), nodes, 2)


def test_without_equal_bytes_or_an_offer_later_versions_are_written_while_they_are_captured(
    nodes: list[Node], tmp_path: Path
) -> None:
    """The second node makes no offer, so the first writes the next version without one."""
    first, second = nodes
    whole = sum(layout_of(rank).image_bytes for rank in first.ranks)
    for step in (1, 2):
        for node in nodes:
            node.seal(step, slot=step % 2)
        (part,) = write([(first, capture(first, str(tmp_path), step, wait_s=0.05))])
        assert (part.missing_ranks, part.total_bytes) == ((2, 3), whole)
        offers = list(tmp_path.glob(f".tmp-step-{step:08d}-*/offer-*"))
        assert len(offers) == (1 if step == 1 else 0)
        write([(second, capture(second, str(tmp_path), step, wait_s=0.0))])
        check_restores(str(tmp_path), nodes, step)


def test_an_index_with_bytes_in_no_file_is_left_for_the_checkpoint_before(
    nodes: list[Node], tmp_path: Path
) -> None:
    before, _ = write_all(nodes, str(tmp_path))
    path, _ = write_all(nodes, str(tmp_path), 2)
    index = parse_index((path / INDEX_NAME).read_bytes(), what="it")
    rank = index.shards[0]
    lost = [one for one in rank.extents if one.file != rank.file]
    assert lost
    rank.extents.remove(lost[0])
    (path / INDEX_NAME).write_bytes(seal(index))
    parse_index.cache_clear()
    for ranks in ([[0, 1], [2, 3]], [[0, 1, 2, 3]]):
        job = LoadJob(4, [Rank(r) for r in ranks[0]], lambda _: None, group=LoadGroup(ranks, 0))
        loaded = load_checkpoint(str(tmp_path), job, threading.Event())
        assert loaded is not None
        for fd in loaded.fds:
            os.close(fd)
        if loaded.rest is not None:
            loaded.rest.close()
        assert loaded.path == str(before)
        assert "in no file" in loaded.rejected[path.name]


def test_a_checkpoint_is_not_pruned_until_the_last_piece_is_there(
    nodes: list[Node], tmp_path: Path
) -> None:
    """Pieces that another node does not deliver are read from it later."""
    path, _ = write_all(nodes, str(tmp_path))
    ranks = [list(node.ranks) for node in nodes]
    for ended_by in ("seal", "close"):
        job = LoadJob(4, list(nodes[0].ranks), lambda _: None, group=LoadGroup(ranks, 0))
        loaded = load_checkpoint(str(tmp_path), job, threading.Event())
        assert loaded is not None
        assert loaded.rest is not None
        with open_storage(str(tmp_path), threading.Event()) as storage:
            assert prune(storage, [path.name], lambda _: None) == ([], [path.name])
            if ended_by == "seal":
                loaded.rest.read_too(list(loaded.rest.left))
            getattr(loaded.rest, ended_by)()
            assert prune(storage, [path.name], lambda _: None) == ([path.name], [])
        for fd in loaded.fds:
            os.close(fd)


@pytest.mark.parametrize("damage", ["missing", *in_full("cut"), "flipped"])
def test_damage_to_shared_bytes_is_found_once_and_the_checkpoint_is_not_used(
    nodes: list[Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """Other ranks have the bytes in the same place of the same file, which is not read again."""
    true, read = shared_load._is_read, list[int]()

    def is_read(source: CheckpointFiles, shard: ShardFile, *words: Any) -> bool:
        read.append(shard.rank)
        return true(source, shard, *words)

    monkeypatch.setattr(shared_load, "_is_read", is_read)
    before, _ = write_all(nodes, str(tmp_path))
    path, _ = write_all(nodes, str(tmp_path), 2)
    file = path / max(data_files(path), key=lambda name: name)
    if damage == "missing":
        file.unlink()
    elif damage == "cut":
        os.truncate(file, file.stat().st_size // 2)
    else:
        with file.open("r+b") as opened:
            opened.seek(1_000_000)
            opened.write(bytes([opened.read(1)[0] ^ 1]))
    with open_storage(str(tmp_path), threading.Event()) as storage:
        problems = find_damage(storage, storage.describe(path.name))
    assert problems
    assert all(file.name in one for one in problems)
    job = LoadJob(4, [Rank(0)], lambda _: None)
    loaded = load_checkpoint(str(tmp_path), job, threading.Event())
    assert loaded is not None
    os.close(loaded.fds[0])
    assert loaded.path == str(before)
    assert file.name in loaded.rejected[path.name]
    assert read == []


@pytest.mark.parametrize("free_bytes", [1 << 40, 0], ids=["copied", "no memory"])
def test_slots_that_change_while_several_threads_write_are_copied_or_reported(
    nodes: list[Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int
) -> None:
    first, second = nodes
    first.free_bytes = free_bytes
    for node in nodes:
        node.seal(1)
    first.seal(2, slot=1)
    true, calls = shared_write.append, itertools.count()

    def append(*words: Any) -> xxhash.xxh3_64:
        if next(calls) == 5:
            first.seal(3)
        return true(*words)

    monkeypatch.setattr(shared_write, "append", append)
    job = first.job(str(tmp_path), 1, wait_s=0.0, writers=2)
    if not free_bytes:
        with pytest.raises(SlotOverwritten):
            write([(first, job)])
        return
    write([(first, job)])
    write([(second, second.job(str(tmp_path), 1, wait_s=0.0))])
    check_restores(str(tmp_path), nodes, 1)
