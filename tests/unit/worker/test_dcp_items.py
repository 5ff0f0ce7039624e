"""DCP's metadata are restored unchanged from plain values."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from ftrun.errors import LayoutUnknown, ValueNotStorable
from ftrun.ids import Rank
from ftrun.sharding.source_index import Holder
from ftrun.snapshot import plain_values as plain
from ftrun.worker.reshard.dcp_items import load_tensors, pack, place_of, room_for, unpack
from ftrun.worker.reshard.source import CheckedShards
from tests.unit.worker.test_source import COLUMNS, ROWS, Give, give, tensors_of

__all__ = ["give"]

names = st.text(min_size=1, max_size=12)
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn]


@st.composite
def tensors(draw: st.DrawFn) -> TensorStorageMetadata:
    rows = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    width = draw(st.integers(1, 9))
    starts = [sum(rows[:at]) for at in range(len(rows))]
    chunks = [
        ChunkStorageMetadata(torch.Size((start, 0)), torch.Size((count, width)))
        for start, count in zip(starts, rows, strict=True)
        if count
    ]
    properties = TensorProperties(
        dtype=draw(st.sampled_from(DTYPES)), requires_grad=draw(st.booleans())
    )
    return TensorStorageMetadata(properties, torch.Size((sum(rows), width)), chunks)


def indices(items: dict[str, object]) -> list[MetadataIndex]:
    found = []
    for name, about in items.items():
        if isinstance(about, TensorStorageMetadata):
            found += [MetadataIndex(name, chunk.offsets) for chunk in about.chunks]
        else:
            found.append(MetadataIndex(name))
    return found


@given(
    items=st.dictionaries(names, tensors() | st.builds(BytesStorageMetadata), max_size=6),
    label=st.none() | names,
)
def test_what_was_packed_comes_back(items: dict[str, object], label: str | None) -> None:
    planner_data = {name: ("state", name, 3) for name in items}
    metadata = Metadata(items, planner_data, None, StorageMeta(label, "id"))  # type: ignore[arg-type]
    places = {index: (at % 3, f"entry {at}") for at, index in enumerate(indices(items))}
    raw = plain.encode(pack(metadata, places))
    found = unpack(plain.decode(raw))
    assert found.state_dict_metadata == items
    assert found.planner_data == planner_data
    assert found.storage_meta == StorageMeta(label, "id")
    assert found.storage_data == places
    for index, (rank, entry) in places.items():
        assert place_of(found.storage_data, index) == (Rank(rank), entry)


def test_the_reserved_space_is_enough_for_names_of_any_usual_length() -> None:
    chunks = [
        ChunkStorageMetadata(torch.Size((512 * rank, 0)), torch.Size((512, 4096)))
        for rank in range(8)
    ]
    about = TensorStorageMetadata(TensorProperties(), torch.Size((4096, 4096)), chunks)
    items = {f"model.layers.{at}.attention.query.weight": about for at in range(40)}
    places = {index: (index.offset[0] // 512, index.fqn) for index in indices(items)}  # type: ignore[index]
    planner_data = {name: tuple(name.split(".")) for name in items}
    raw = plain.encode(pack(Metadata(items, planner_data), places))  # type: ignore[arg-type]
    # The layout reserves twice this room.
    assert len(raw) < 2 * room_for(dict.fromkeys(items, 8))


def test_what_no_snapshot_can_keep_is_named() -> None:
    about = TensorStorageMetadata(TensorProperties(torch.complex32), torch.Size((1,)), [])
    with pytest.raises(ValueNotStorable, match=r"^spectrum holds"):
        pack(Metadata({"spectrum": about}), {})
    packed = pack(Metadata({}, planner_data={"x": object()}), {})
    with pytest.raises(ValueNotStorable, match=r"^metadata\.planner_data\.x"):
        plain.encode(packed, root="metadata")


@pytest.mark.parametrize("packed", [{}, {"items": {"a": {"size": 3}}}, {"items": 3}])
def test_other_values_are_refused(packed: dict[str, object]) -> None:
    with pytest.raises(LayoutUnknown, match="not readable"):
        unpack(packed)


def test_an_item_without_a_place_is_named() -> None:
    with pytest.raises(LayoutUnknown, match=r"weight at \[4, 0\]"):
        place_of({}, MetadataIndex("weight", (4, 0)))


class Staging(DefaultLoadPlanner):
    """Hands out one buffer for all tensors, as the contract of planners allows."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = torch.zeros(ROWS * COLUMNS)
        self.resolved: list[ReadItem] = []

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        self.resolved.append(read_item)
        target = super().resolve_tensor(read_item)
        return self.buffer[: target.numel()].view(target.shape)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        assert read_item is self.resolved[-1]
        super().resolve_tensor(read_item).copy_(tensor)


def test_a_planner_may_stage_all_tensors_in_one_buffer(give: Give) -> None:
    images = CheckedShards(give(), "test")
    found = {"wide": torch.zeros(ROWS, COLUMNS), "bias": torch.zeros(4)}
    planner = Staging()
    planner.set_up_planner(found, Metadata({}), is_coordinator=False)

    def item(name: str, rank: int, first: int, shape: tuple[int, ...]) -> tuple[ReadItem, Holder]:
        index, zeros = MetadataIndex(name, [0] * len(shape)), torch.Size([0] * len(shape))
        offsets = torch.Size([first, *zeros[1:]])
        lengths = torch.Size(shape)
        read = ReadItem(LoadItemType.TENSOR, index, offsets, index, zeros, lengths)
        return read, Holder(Rank(rank), images.headers[Rank(rank)].entries[name])

    items = [
        item("bias", 1, 2, (2,)),
        item("wide", 0, 0, (ROWS, COLUMNS)),
        item("bias", 0, 0, (2,)),
    ]
    load_tensors(items, planner, images)
    assert len(planner.resolved) == 3
    assert torch.equal(found["wide"], tensors_of(0)["wide"])
    assert found["bias"].tolist() == [1, 2, 2, 3]
