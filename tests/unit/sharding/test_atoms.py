"""Extract, union and strip give each item of a tensor once; load cuts it for any other world."""

import numpy as np
import pytest
from hypothesis import given, settings

from ftrun.sharding.atoms import (
    TensorFile,
    extract,
    one_rank,
    paths_of,
    share_of,
    strip_padding,
    union,
    values_of_one_rank,
)
from ftrun.sharding.partition import StoredRegion
from ftrun.sharding.rule_parser import read_rules
from ftrun.sharding.rules import Mesh
from ftrun.sharding.source_index import RegionIndex
from ftrun.sharding.world_layout import StoredEntry, WorldLayout, lay_out, read_world
from ftrun.snapshot import plain_values as plain
from ftrun.snapshot.layout import CopyTiming, LayoutEntry
from ftrun.snapshot.plain_values import TensorRef
from tests.unit.sharding.worlds import (
    Array,
    Made,
    arrays_of,
    assert_same,
    meshes,
    models,
    numbers,
    rules_of,
    stored_of,
    view_of,
)


class Files:
    """Files of one operation in memory."""

    def __init__(self, files: list[TensorFile], arrays: list[Array]) -> None:
        self.files = files
        self.arrays = arrays
        self.index = RegionIndex()
        for at, file in enumerate(files):
            assert file.shape == arrays[at].shape
            entry = LayoutEntry(str(at), file.dtype, file.shape, CopyTiming.LAZY)
            self.index.add(at, entry, file.regions)

    def filled(self, regions: tuple[StoredRegion, ...], shape: tuple[int, ...]) -> Array:
        """An array whose regions come from these files; padding is 0."""
        items = np.zeros(int(np.prod(shape)), np.int64)
        copies = self.index.copies(regions)
        for copy in (copy for one in copies for copy in one):
            (holder,) = copy.holders
            source = np.ascontiguousarray(self.arrays[holder.rank]).reshape(-1)
            to = view_of(items, copy.to_first, copy.shape, copy.to_strides)
            to[...] += view_of(source, copy.first, copy.shape, copy.strides)
        return (items // len(copies)).reshape(shape)

    def made(self, files: list[TensorFile]) -> "Files":
        return Files(files, [self.filled(file.regions, file.shape) for file in files])


def extracted(world: WorldLayout, arrays: list[dict[str, Array]]) -> Files:
    found = extract(world)
    held = [arrays[rank][world.own_name(rank, file.entry)] for rank, file in found]
    return Files([file for _, file in found], held)


def loaded(stripped: Files, target: WorldLayout) -> list[dict[str, Array]]:
    return [
        {
            target.own_name(rank, name): stripped.filled(placed.patches, placed.shape)
            for name, placed in entries.items()
        }
        for rank, entries in enumerate(target.entries)
    ]


@settings(deadline=None, max_examples=40)
@given(models(), meshes, meshes)
def test_the_four_operations_bring_any_world_to_any_other(
    model: list[Made], before: Mesh, after: Mesh
) -> None:
    arrays = arrays_of(model, before)
    world = read_world(rules_of(model, before), stored_of(arrays))
    one = one_rank(world)
    fragments = extracted(world, arrays)
    stripped = fragments.made(union(world)).made(strip_padding(one))
    wholes = {name: whole for part in model for name, whole in part.wholes.items()}
    names = [f"{f.entry}/{f.member}" if f.member else f.entry for f in stripped.files]
    assert sorted(names) == sorted(wholes)
    for name, found in zip(names, stripped.arrays, strict=True):
        assert np.array_equal(found, wholes[name])
    target = lay_out(rules_of(model, after), one)
    assert_same(loaded(stripped, target), arrays_of(model, after))
    # In one pass, without the operation in the middle.
    direct = fragments.made(strip_padding(one))
    for found, wanted in zip(direct.arrays, stripped.arrays, strict=True):
        assert np.array_equal(found, wanted)


ZERO3 = "mesh: {{dp: {dp}}}\nflat:\n  - {{axis: dp, each: {{w: [1024], b: [5, 3]}}}}\n"


def zero3(ranks: int) -> list[dict[str, Array]]:
    wholes = {"w": np.arange(1, 1025), "b": np.arange(1, 16)}
    rows = {n: np.pad(whole, (0, -len(whole) % ranks)) for n, whole in wholes.items()}
    return [{n: np.split(row, ranks)[rank] for n, row in rows.items()} for rank in range(ranks)]


def test_the_example_of_the_paper() -> None:
    """1,024 items are 1,026 on three ranks of ZeRO-3, 342 each, and 512 each on two."""
    world = read_world(read_rules(ZERO3.format(dp=3), source="x"), stored_of(zero3(3)))
    fragments = extracted(world, zero3(3))
    of_w = [file for file in fragments.files if file.entry == "w"]
    assert [(file.shape, file.part) for file in of_w] == [
        ((342,), "0-of-3"),
        ((342,), "1-of-3"),
        ((342,), "2-of-3"),
    ]
    joined = fragments.made(union(world))
    assert [(file.entry, file.shape) for file in joined.files] == [("w", (1026,)), ("b", (15,))]
    assert joined.arrays[0][-3:].tolist() == [1024, 0, 0]
    one = one_rank(world)
    stripped = joined.made(strip_padding(one))
    assert [(f.entry, f.member, f.shape) for f in stripped.files] == [
        ("w", "w", (1024,)),
        ("b", "b", (5, 3)),
    ]
    target = lay_out(read_rules(ZERO3.format(dp=2), source="x"), one)
    assert [entries["w"].shape for entries in target.entries] == [(512,), (512,)]
    assert_same(loaded(stripped, target), zero3(2))


FLAT = """
mesh: {dp: 2, tp: 2}
shard: [{name: up, axis: tp, dim: 0}]
replicate: [bias]
flat: [{name: row, axis: dp, pad_to: 2, tensors: {up: [3, 2], bias: [1]}}]
"""


def test_a_buffer_that_another_axis_splits_is_joined_for_each_of_its_coordinates() -> None:
    up, bias = np.arange(1, 7).reshape(3, 2), np.array([9])
    arrays = []
    for rank in range(4):
        part = np.array_split(up, 2)[rank % 2]
        row = np.concatenate([part.reshape(-1), bias])
        row = np.pad(row, (0, -len(row) % 4))
        arrays.append({"up": part, "bias": bias, "row": np.split(row, 2)[rank // 2]})
    world = read_world(read_rules(FLAT, source="x"), stored_of(arrays))
    joined = extracted(world, arrays).made(union(world))
    rows = {f.part: a.tolist() for f, a in zip(joined.files, joined.arrays, strict=True) if f.part}
    assert rows == {"0-of-2": [1, 2, 3, 4, 9, 0, 0, 0], "1-of-2": [5, 6, 9, 0]}
    one = one_rank(world)
    stripped = joined.made(strip_padding(one))
    found = {f.member: a for f, a in zip(stripped.files, stripped.arrays, strict=True) if f.member}
    assert np.array_equal(found["up"], up)
    assert np.array_equal(found["bias"], bias)
    assert one.entries[0]["row"].shape == (7,)


COPIES = """
mesh: {dp: 2}
average: [{name: w, axis: dp}]
own: [mine]
"""


def test_copies_become_their_mean_and_what_is_each_ranks_own_that_of_the_first() -> None:
    arrays = [{"w": np.array([2 * r, 6]), "mine": np.arange(r + 1)} for r in range(2)]
    held = [[StoredEntry(n, "F32", a.shape) for n, a in one.items()] for one in arrays]
    world = read_world(read_rules(COPIES, source="x"), held)
    fragments = extracted(world, arrays)
    assert [(f.entry, f.part) for f in fragments.files] == [
        ("w", "0-of-2"),
        ("w", "1-of-2"),
        ("mine", "0-of-1"),
    ]
    one = one_rank(world)
    stripped = fragments.made(union(world)).made(strip_padding(one))
    assert [a.tolist() for a in stripped.arrays] == [[1, 6], [0]]
    target = lay_out(read_rules(COPIES, source="x"), one)
    assert [held["mine"].tolist() for held in loaded(stripped, target)] == [[0], [0]]


def test_a_workers_share_depends_on_the_name_only() -> None:
    names = [f"model.layers.{n}.weight" for n in range(100)]
    shares = [share_of(name, 3) for name in names]
    assert {*shares} == {0, 1, 2}
    assert shares == [share_of(name, 3) for name in names]
    assert {share_of(name, 1) for name in names} == {0}


def file(entry: str, dtype: str = "F32", part: str = "", member: str = "") -> TensorFile:
    return TensorFile(entry, dtype, (), (), part, member)


def test_paths_have_the_parameter_and_the_value_and_no_rank() -> None:
    states = {
        "optimizer": {
            "state": {
                "model.w": {
                    "exp_avg": TensorRef("o.w.m"),
                    "step": TensorRef("o.w.s"),
                    "more": [{"x": TensorRef("o.w.x"), 3: TensorRef("o.w.3")}, 4],
                },
                "row": {"exp_avg": TensorRef("o.row.m")},
                "model.one": TensorRef("o.one"),
                7: {"k": TensorRef("o.7")},
            }
        },
        "other": {"state": {"model.w": {"exp_avg": TensorRef("p.w.m")}}},
    }
    files = [
        file("model.w", "BF16"),
        file("model.w", part="0-of-2"),
        file("o.w.m"), file("o.w.s"), file("o.w.x"), file("o.w.3"), file("p.w.m"),
        file("row", member="model.up"), file("o.row.m", member="model.up"),
        file("o.one"), file("o.7"),
        file("model.seen", "I64"),
        file("model.z", member="model.z"),
        file("../x/y"),
        file("w" * 300),
    ]  # fmt: skip
    found = paths_of(files, states)
    assert found[:-1] == [
        "model.w/bf16",
        "model.w/fp32.0-of-2",
        "model.w/exp_avg", "model.w/step", "model.w/more[0].x", "model.w/more[0][3]",
        "model.w/exp_avg+",
        "model.up/row.fp32", "model.up/row.exp_avg",
        "model.one/optimizer", "7/k",
        "model.seen/i64",
        "model.z/fp32",
        "%2E.%2Fx%2Fy/fp32",
    ]  # fmt: skip
    assert len(found[-1].partition("/")[0]) == 217
    assert len({*paths_of([file("w" * 300), file("w" * 301)], {})}) == 2


def test_references_to_parts_of_dtensors_become_references_to_whole_tensors() -> None:
    ref = TensorRef("s.w", "sharded@cuda", (1, 2))
    one_part = {
        "groups": {"opt": [{"params": ["w"]}]},
        "optimizer_state": {"opt": {"state": {"w": {"m": ref, "n": TensorRef("s.n")}}}},
        "extra_state": {},
        "frozen": [],
        "rng": {"torch": b"0"},
        "generators": {},
        "loaders": {},
    }
    parts = {name: plain.encode(value) for name, value in one_part.items()}
    rules = read_rules("mesh: {dp: 1}\nreplicate: ['*']", source="x")
    world = read_world(rules, [[StoredEntry(n, "F32", (2,), None) for n in ("w", "s.w", "s.n")]])
    made = values_of_one_rank([parts], world, one_rank(world))
    state = plain.decode(made["optimizer_state"])["opt"]["state"]["w"]
    assert state == {"m": TensorRef("s.w", "tensor@cuda"), "n": TensorRef("s.n")}
    assert made["frozen"] == parts["frozen"]


def test_a_world_of_one_rank_has_rules_for_each_kind() -> None:
    text = """
mesh: {pp: 2}
flat: [{name: row, axis: pp, tensors: {a: [2, 2]}}]
own: [mine]
replicate: ["m.*"]
unique: [{name: "m.{n}", axis: pp, of: 2, numbered: anew}]
"""
    held = [
        [StoredEntry("row", "F32", (2,)), StoredEntry("mine", "I64", (3,)),
         StoredEntry("m.0", "F32", (1,)), StoredEntry("s.m.0", "F32", (), "m.0")]
        for _ in range(2)
    ]  # fmt: skip
    one = one_rank(read_world(read_rules(text, source="x"), held))
    assert {n: e.shape for n, e in one.entries[0].items()} == {
        "row": (4,), "mine": (3,), "m.0": (1,), "s.m.0": (), "m.1": (1,), "s.m.1": (),
    }  # fmt: skip
    assert one.wholes["s.m.1"].owner is not None
    assert one.wholes["s.m.1"].owner.parameter == "m.1"
    assert read_rules(one.rules.text, source="x").layout == one.rules.layout


def test_padding_of_the_first_split_of_a_dimension_counts() -> None:
    text = """
mesh: {dp: 2, tp: 3}
shard:
  - name: w
    cuts: [{axis: tp, dim: -1, size: 7, pad_to: 1}, {axis: dp, dim: 0}, {axis: dp, dim: 1}]
"""
    world = read_world(
        read_rules(text, source="x"),
        [
            [StoredEntry("w", "F32", shape)]
            for shape in ((2, 2), (2, 2), (2, 2), (2, 1), (2, 1), (2, 1))
        ],
    )
    assert [file.shape for file in union(world)] == [(4, 9)]


@pytest.mark.parametrize("shape", [(0, 3), ()])
def test_tensors_of_no_items_and_of_one(shape: tuple[int, ...]) -> None:
    rules = read_rules("mesh: {dp: 2}\nreplicate: [w]", source="x")
    arrays = [{"w": numbers(shape)}] * 2
    world = read_world(rules, stored_of(arrays))
    stripped = extracted(world, arrays).made(union(world)).made(strip_padding(one_rank(world)))
    assert np.array_equal(stripped.arrays[0], arrays[0]["w"])


def test_a_flat_buffer_of_one_stage() -> None:
    text = """
mesh: {pp: 2, dp: 2}
flat: [{name: row, axis: dp, tensors: {a: [3]}}]
unique: [{name: row, axis: pp, at: last}]
"""
    arrays: list[dict[str, Array]] = [{}, {}, {"row": np.array([1, 2])}, {"row": np.array([3, 0])}]
    world = read_world(read_rules(text, source="x"), stored_of(arrays))
    joined = extracted(world, arrays).made(union(world))
    assert [a.tolist() for a in joined.arrays] == [[1, 2, 3, 0]]
    (stripped,) = joined.made(strip_padding(one_rank(world))).files
    assert (stripped.shape, stripped.num_bytes) == ((3,), 24)
