"""For any split of a tensor over ranks, its bytes are read completely, in parts of any size."""

import itertools
import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from ftrun.errors import CheckpointError
from ftrun.ids import Rank
from ftrun.snapshot import plain_values as plain
from ftrun.snapshot.boxes import Box, TensorPart, whole
from ftrun.snapshot.layout import PLAIN_NAME, CopyTiming, LayoutEntry, make_layout
from ftrun.tools.export.safetensors import write_safetensors
from ftrun.tools.export.selection import NameFilter
from ftrun.tools.export.source import ExportSource, WholeTensorReader
from ftrun.wire.messages.checkpoint import CheckpointLocation, ExportJob, ShardFileLocation
from ftrun.worker.reshard.dcp_items import ItemsToSave
from ftrun.worker.reshard.source import DiskImages

EMPTY = (
    *("groups", "stateful", "dicts", "extra_state", "optimizer_state", "session"),
    *("generators", "loaders", "frozen"),
)
NAMES = {np.dtype(np.int64): "I64", np.dtype(np.complex128): "C128"}
PARTS = {name: plain.encode({}) for name in EMPTY}
PARTS["modules"] = plain.encode({"names": ["m"], "tied": {}})


def write_shard(
    folder: Path,
    rank: int,
    held: dict[str, tuple[Box, np.ndarray]],
    plain_parts: dict[str, bytes] = PARTS,
) -> ShardFileLocation:
    """Both files of a rank, with boxes of these whole arrays."""
    parts = {name: TensorPart(array.shape, box.offsets) for name, (box, array) in held.items()}
    entries = [
        LayoutEntry(name, NAMES[array.dtype], box.shape, CopyTiming.LAZY, part=parts[name])
        for name, (box, array) in held.items()
    ]
    packed = plain.encode(plain_parts)
    layout = make_layout(entries, plain_bytes=len(packed))
    data = bytearray(layout.data_bytes)
    for entry in layout.entries:
        if entry.name == PLAIN_NAME:
            raw = len(packed).to_bytes(8, "little") + packed
        elif entry.name in held:
            box, array = held[entry.name]
            raw = array[tuple(map(slice, box.offsets, box.end))].tobytes()
        else:
            continue
        data[entry.offset : entry.offset + len(raw)] = raw
    digests = [
        xxhash.xxh3_64_intdigest(data[piece.offset : piece.offset + piece.num_bytes])
        for piece in layout.pieces
    ]
    table = b"".join(digest.to_bytes(8, "little") for digest in digests)
    paths = [folder / f"rank-{rank:05d}.{ending}" for ending in ("safetensors", "digests")]
    paths[0].write_bytes(layout.header + data)
    paths[1].write_bytes(table)
    return ShardFileLocation(
        rank=rank,
        path=str(paths[0]),
        digests_path=str(paths[1]),
        num_bytes=layout.image_bytes,
        table_digest=xxhash.xxh3_64_hexdigest(table),
        header_digest=xxhash.xxh3_64_hexdigest(layout.header),
    )


@st.composite
def worlds(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A tensor's shape, and the box that each rank of a mesh holds; some hold the same."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=3)))
    cuts = [sorted(draw(st.lists(st.integers(0, size), max_size=3))) for size in shape]
    ranges = (itertools.pairwise([0, *at, size]) for at, size in zip(cuts, shape, strict=True))
    found = [
        Box(tuple(low for low, _ in cell), tuple(high - low for low, high in cell))
        for cell in itertools.product(*ranges)
    ]
    found += draw(st.lists(st.sampled_from(found), max_size=2))
    return shape, draw(st.permutations(found))


@settings(deadline=None, max_examples=80)
@given(worlds(), st.integers(1, 9))
def test_any_cut_comes_out_whole(case: tuple[tuple[int, ...], list[Box]], most_items: int) -> None:
    shape, boxes = case
    array = np.arange(math.prod(shape)).reshape(shape)
    with tempfile.TemporaryDirectory() as name:
        images = DiskImages(
            [write_shard(Path(name), at, {"m.w": (box, array)}) for at, box in enumerate(boxes)]
        )
        world = ExportSource(images)
        reader = WholeTensorReader(images, world.note, part_bytes=most_items * 8)
        parts = list(reader.parts(world.whole("m.w")))
        images.close()
    assert all(len(part) <= most_items * 8 for part in parts)
    assert b"".join(parts) == array.tobytes()
    assert world.notes == []


def test_a_tensor_without_items_has_no_bytes(tmp_path: Path) -> None:
    array = np.zeros((3, 0), np.int64)
    images = DiskImages([write_shard(tmp_path, 0, {"m.w": (whole((3, 0)), array)})])
    world = ExportSource(images)
    assert list(WholeTensorReader(images, world.note).parts(world.whole("m.w"))) == []
    images.close()


def test_a_part_that_no_process_has_is_named(tmp_path: Path) -> None:
    array = np.arange(6)
    images = DiskImages([write_shard(tmp_path, 0, {"m.w": (Box((0,), (4,)), array)})])
    with pytest.raises(CheckpointError, match=r"m\.w of shape \[6\].*no rank saved \[4:6\]"):
        ExportSource(images).whole("m.w")
    images.close()


@pytest.mark.parametrize("num_items", [3, 40_000])
def test_ranks_that_hold_different_things_have_no_one_tensor(
    tmp_path: Path, num_items: int
) -> None:
    box = whole((num_items,))
    places = [
        write_shard(tmp_path, rank, {"m.w": (box, np.arange(num_items) + rank)})
        for rank in range(2)
    ]
    images = DiskImages(places)
    with pytest.raises(CheckpointError, match=r"m\.w cannot be exported: ranks 0 and 1 have"):
        ExportSource(images).whole("m.w")
    images.close()


def test_equal_small_tensors_next_to_different_ones_are_equal(tmp_path: Path) -> None:
    """They share a piece, so its digest does not distinguish them."""
    shared, other = np.arange(4), np.arange(6)
    places = [
        write_shard(
            tmp_path, rank, {"m.w": (whole((4,)), shared), "m.v": (Box((3 * rank,), (3,)), other)}
        )
        for rank in range(2)
    ]
    images = DiskImages(places)
    assert ExportSource(images).whole("m.w").shape == (4,)
    images.close()


def test_a_snapshot_of_dcp_is_refused_with_what_to_do_instead(tmp_path: Path) -> None:
    parts = ItemsToSave(SavePlan([]), DefaultSavePlanner(), Rank(0)).packed(b"")
    held = {"m.w": (whole((6,)), np.arange(6))}
    images = DiskImages([write_shard(tmp_path, 0, held, plain.decode(parts))])
    with pytest.raises(CheckpointError, match=r"ftrun\.dcp.*dcp\.load"):
        ExportSource(images)
    images.close()


def test_items_of_sixteen_bytes_come_out_whole_but_not_as_safetensors(tmp_path: Path) -> None:
    array = np.arange(24.0).view(np.complex128).reshape(4, 3)
    boxes = [Box((0, 0), (4, 1)), Box((0, 1), (4, 2))]
    places = [write_shard(tmp_path, at, {"m.z": (box, array)}) for at, box in enumerate(boxes)]
    images = DiskImages(places)
    world = ExportSource(images)
    found = WholeTensorReader(images, world.note).everything(world.whole("m.z"))
    assert found == array.tobytes()
    outline = world.outline(NameFilter(), is_whole=False)
    job = ExportJob(CheckpointLocation("", "run", 1, 2, places), "safetensors", "out")
    with pytest.raises(CheckpointError, match=r"m\.z cannot be written.*complex128"):
        write_safetensors(tmp_path / "out", outline, world, job)
    assert not (tmp_path / "out").exists()
    images.close()
