"""Bytes are read from other ranks' shards only as captured, and only the requested ones."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest
import torch
import xxhash

from ftrun.errors import (
    LayoutUnknown,
    RanksDiffer,
    SnapshotCorrupt,
    SnapshotError,
    TensorIncomplete,
)
from ftrun.ids import Rank, version
from ftrun.sharding.replica_check import check_replicas
from ftrun.sharding.rules import ranks_alone
from ftrun.sharding.source_index import ByteRange, SourceIndex
from ftrun.snapshot.boxes import TensorPart, whole
from ftrun.snapshot.layout import PIECE_BYTES, CopyTiming, Layout, LayoutEntry, make_layout
from ftrun.snapshot.shard_header import ShardHeader
from ftrun.wire.shared_memory.arena import (
    Arena,
    ArenaShape,
    SlotHeader,
    SlotState,
    create_memfd,
    table_digest,
)
from ftrun.worker.reshard.source import CheckedShards, LocalShards
from ftrun.worker.reshard.source_state import SourceState
from ftrun.worker.reshard.tensor_reader import fill
from ftrun.worker.state.tensors import PACKED
from tests.unit.sharding.worlds import MadeShards, array

WANTED = version(2, 7)
ROWS, COLUMNS = 1200, 150

Give = Callable[..., LocalShards]


def layout_of(rank: int) -> Layout:
    return make_layout(
        [
            LayoutEntry("step", "F32", (), CopyTiming.LAZY),
            LayoutEntry("bias", "F32", (2,), CopyTiming.LAZY, part=TensorPart((4,), (2 * rank,))),
            LayoutEntry("wide", "F32", (ROWS, COLUMNS), CopyTiming.LAZY),
            LayoutEntry("mean", "F32", (3,), CopyTiming.BOUNDARY),
            LayoutEntry(
                "packed",
                "F4",
                (60, 80),
                CopyTiming.LAZY,
                part=TensorPart((120, 80), (60 * rank, 0)),
            ),
        ],
        plain_bytes=1,
    )


def arena_of(rank: int, tensors: dict[str, torch.Tensor]) -> int:
    """A descriptor of an arena in which these are sealed in slot 1."""
    layout = layout_of(rank)
    pieces = layout.pieces
    layout_id = xxhash.xxh3_64_intdigest(layout.header)
    fd = create_memfd(ArenaShape(rank, 2, layout.image_bytes, len(pieces), layout_id))
    arena = Arena(fd, writable=True)
    start = len(layout.header)
    arena.image(1)[:start] = layout.header
    data = arena.image(1)[start:]
    for entry in layout.entries:
        if entry.name in tensors:
            raw = tensors[entry.name].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            data[entry.offset : entry.offset + entry.num_bytes] = raw
    table = arena.table(1)
    for at, piece in enumerate(pieces):
        piece_bytes = data[piece.offset : piece.offset + piece.num_bytes]
        table[at] = xxhash.xxh3_64_intdigest(piece_bytes)
    header = SlotHeader(SlotState.SEALED, 2, 7, layout.image_bytes, table_digest(table), 1)
    arena.write_header(1, header)
    del data, table, piece_bytes
    arena.close()
    return fd


def tensors_of(rank: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return {
        "step": torch.tensor(3.0),
        "wide": torch.rand(ROWS, COLUMNS),
        "bias": torch.tensor([1.0, 2.0]) + rank,
        "mean": torch.full((3,), float(rank)),
        "packed": torch.full((60, 80), 17 + rank, dtype=torch.uint8).view(PACKED),
    }


@pytest.fixture
def give() -> Iterator[Give]:
    """Two ranks' shards; `change` receives both and may damage them first."""
    opened: list[LocalShards] = []

    def make(
        change: Callable[[Arena, int], object] = lambda arena, rank: None,
        **different: torch.Tensor,
    ) -> LocalShards:
        fds = {}
        for rank in (0, 1):
            fd = arena_of(rank, tensors_of(rank) | (different if rank else {}))
            arena = Arena(fd, writable=True)
            change(arena, rank)
            arena.close()
            fds[Rank(rank)] = fd
        opened.append(LocalShards(fds, WANTED))
        return opened[-1]

    yield make
    for images in opened:
        images.close()


def wanted() -> dict[str, torch.Tensor]:
    return {
        "step": torch.zeros(()),
        "wide": torch.zeros(ROWS, COLUMNS),
        "bias": torch.zeros(4),
        "mean": torch.zeros(3),
        "packed": torch.zeros(80, 120, dtype=PACKED).t(),
    }


def restored(images: LocalShards, prefer: int = 0) -> dict[str, torch.Tensor]:
    """All tensors, as a world of one rank gets them."""
    checked = CheckedShards(images, "test")
    index = SourceIndex(checked.headers, prefer=Rank(prefer))
    targets = wanted()
    saved = {name: found for name in targets if (found := index.tensor(name)) is not None}
    check_replicas(saved, {name: whole(tuple(t.shape)) for name, t in targets.items()}, checked)
    fill(targets, saved, checked)
    return targets


@pytest.mark.parametrize("prefer", [0, 1])
def test_tensors_are_put_together_of_two_shards(give: Give, prefer: int) -> None:
    found, expected = restored(give(), prefer), tensors_of(prefer)
    for name in ("step", "wide", "mean"):
        assert torch.equal(found[name], expected[name])
    assert found["bias"].tolist() == [1, 2, 2, 3]
    items = found["packed"].view(torch.uint8)
    assert items[:60].eq(17).all()
    assert items[60:].eq(18).all()


def flip(offset_of: Callable[[Arena], int], in_rank: int) -> Callable[[Arena, int], object]:
    def change(arena: Arena, rank: int) -> None:
        if rank == in_rank:
            arena.image(1)[offset_of(arena)] ^= 1

    return change


def within(name: str) -> Callable[[Arena], int]:
    def find(_: Arena) -> int:
        layout = layout_of(1)
        entry = next(entry for entry in layout.entries if entry.name == name)
        return len(layout.header) + entry.offset + entry.num_bytes // 2

    return find


@pytest.mark.parametrize("where", [within("bias"), lambda _: 12])
def test_a_flipped_bit_that_only_one_rank_could_replace_is_an_error(
    give: Give, where: Callable[[Arena], int]
) -> None:
    with pytest.raises(SnapshotCorrupt) as caught:
        restored(give(flip(where, in_rank=1)))
    assert caught.value.rank == 1


def test_a_flipped_bit_in_the_digest_table_is_an_error(give: Give) -> None:
    def change(arena: Arena, rank: int) -> None:
        arena.table(1)[0] ^= rank

    with pytest.raises(SnapshotCorrupt) as caught:
        restored(give(change))
    assert caught.value.rank == 1


def test_what_another_rank_holds_too_is_read_from_there(give: Give) -> None:
    found = restored(give(flip(within("wide"), in_rank=0)))
    assert torch.equal(found["wide"], tensors_of(0)["wide"])


def test_what_is_each_ranks_own_is_never_read_from_another(give: Give) -> None:
    with pytest.raises(SnapshotCorrupt) as caught:
        restored(give(flip(within("mean"), in_rank=0)))
    assert caught.value.rank == 0


@pytest.mark.parametrize(
    ("name", "other"), [("step", torch.tensor(4.0)), ("wide", torch.zeros(ROWS, COLUMNS))]
)
def test_replicas_that_differ_are_named(give: Give, name: str, other: torch.Tensor) -> None:
    with pytest.raises(RanksDiffer) as caught:
        restored(give(**{name: other}))
    assert (caught.value.key, caught.value.ranks) == (name, (0, 1))


def test_a_part_of_a_large_tensor_is_read_by_the_pieces_under_it(give: Give) -> None:
    images = give()
    checked = CheckedShards(images, "test")
    asked: list[ByteRange] = []
    read = images.read

    def noting(rank: Rank, offset: int, num_bytes: int) -> memoryview:
        asked.append(ByteRange(rank, offset, num_bytes))
        return read(rank, offset, num_bytes)

    images.read = noting  # type: ignore[method-assign]
    wide = checked.headers[Rank(0)].entries["wide"]
    found = checked.read(Rank(0), wide.offset + PIECE_BYTES + 8, 40)
    assert asked == [ByteRange(Rank(0), wide.offset + PIECE_BYTES, PIECE_BYTES)]
    expected = tensors_of(0)["wide"].view(-1)[PIECE_BYTES // 4 + 2 :][:10]
    assert torch.equal(torch.frombuffer(bytearray(found), dtype=torch.float32), expected)


def test_pieces_that_were_compared_before_are_not_compared_again(give: Give) -> None:
    images = give(flip(within("mean"), in_rank=0))
    head = images.headers()[Rank(0)]
    mean = head.entries["mean"]
    (piece,) = head.pieces_under(mean.offset, mean.num_bytes)
    for right in ([], [(Rank(1), piece), (Rank(0), piece + 1)]):
        with pytest.raises(SnapshotCorrupt):
            CheckedShards(images, "test", right).read(Rank(0), mean.offset, mean.num_bytes)
    checked = CheckedShards(images, "test", [(Rank(0), piece)])
    assert len(checked.read(Rank(0), mean.offset, mean.num_bytes)) == mean.num_bytes


def test_an_arena_without_the_version_is_named(give: Give) -> None:
    def change(arena: Arena, rank: int) -> None:
        if rank:
            arena.write_header(1, SlotHeader(SlotState.SEALED, 2, 8, 0, 0, 1))

    with pytest.raises(LayoutUnknown):
        CheckedShards(give(change), "test")


class InMemory:
    """A `ShardSource` of shards in memory."""

    def __init__(self, shards: MadeShards) -> None:
        self._shards = shards

    def headers(self) -> Mapping[Rank, ShardHeader]:
        return {Rank(rank): head for rank, head in enumerate(self._shards.headers)}

    def expect(self, ranges: Sequence[ByteRange]) -> None:
        pass

    def read(self, rank: Rank, offset: int, num_bytes: int) -> memoryview:
        return memoryview(self._shards.data[rank])[offset : offset + num_bytes]

    def close(self) -> None:
        pass


def test_tied_tensors_of_which_a_part_is_missing_are_refused_only_if_strict() -> None:
    def state_of(part: TensorPart) -> SourceState:
        held = {"a": array(1, 2), "b": array(3, 4)}
        made = MadeShards([held, held], part=part, values={"frozen": []})
        checked = CheckedShards(InMemory(made), "test")
        return SourceState(checked, WANTED, 2, Rank(0), ranks_alone(1))

    half = state_of(TensorPart((4,), (0,)))
    half.check_agreement({"b": "a"}, is_strict=False)
    with pytest.raises(TensorIncomplete):
        half.check_agreement({"b": "a"}, is_strict=True)
    with pytest.raises(SnapshotError, match="b and a are one tensor here"):
        state_of(TensorPart((2,), (0,))).check_agreement({"b": "a"}, is_strict=True)
