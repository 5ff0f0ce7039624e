"""Ranks store the parts that numpy cuts; items of another world are copied, each of them once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrun.errors import RulesMismatch
from ftrun.sharding.rule_parser import read_rules
from ftrun.sharding.rules import Mesh, ShardingRules
from ftrun.sharding.world_layout import (
    StoredEntry,
    WorldLayout,
    lay_out,
    read_world,
    stored_entries,
)
from ftrun.snapshot.boxes import TensorPart
from ftrun.snapshot.plain_values import TensorRef
from tests.unit.sharding.worlds import (
    Array,
    Made,
    MadeShards,
    array,
    arrays_of,
    assert_same,
    entry_named,
    filled,
    meshes,
    models,
    moved,
    numbers,
    rules_of,
    stored_of,
)


@settings(deadline=None, max_examples=100)
@given(models(), meshes)
def test_what_ranks_store_is_what_numpy_cuts(model: list[Made], mesh: Mesh) -> None:
    arrays = arrays_of(model, mesh)
    world = read_world(rules_of(model, mesh), stored_of(arrays))
    wholes = {name: whole for one in model for name, whole in one.wholes.items()}
    made = [{p.name: filled(p, wholes) for p in entries.values()} for entries in world.entries]
    assert_same(made, arrays)


@settings(deadline=None, max_examples=100)
@given(models(), meshes, meshes)
def test_to_another_world_and_back_is_what_it_was(
    model: list[Made], before: Mesh, after: Mesh
) -> None:
    old = arrays_of(model, before)
    source = read_world(rules_of(model, before), stored_of(old))
    target = lay_out(rules_of(model, after), source)
    new = moved(source, old, target)
    assert_same(new, arrays_of(model, after))
    again = read_world(rules_of(model, after), stored_of(new))
    back = moved(again, new, lay_out(source.rules, again))
    assert_same(back, old)


# --- the cases of the paper ------------------------------------------------------------------


def rules(text: str) -> ShardingRules:
    return read_rules(text, source="rules.yaml")


def world_of(text: str, *held: dict[str, Array]) -> tuple[WorldLayout, list[dict[str, Array]]]:
    arrays = list(held)
    return read_world(rules(text), stored_of(arrays)), arrays


def shapes(world: WorldLayout, name: str) -> list[tuple[int, ...]]:
    return [entries[name].shape for entries in world.entries]


FLAT = "mesh: {{dp: {dp}}}\nflat:\n  - {{name: row, axis: dp, pad_to: 1, tensors: {{w: [1024]}}}}\n"


def test_1024_items_are_1026_on_three_ranks_and_1024_on_two() -> None:
    whole = numbers((1024,))
    row = np.concatenate([whole, np.array([-1, -1])])  # any values in the padding
    source, old = world_of(FLAT.format(dp=3), *({"row": part} for part in np.split(row, 3)))
    assert shapes(source, "row") == [(342,)] * 3
    target = lay_out(rules(FLAT.format(dp=2)), source)
    assert shapes(target, "row") == [(512,)] * 2
    new = moved(source, old, target)
    assert np.array_equal(np.concatenate([held["row"] for held in new]), whole)
    back = moved(target, new, lay_out(source.rules, target))
    assert np.array_equal(back[2]["row"][-3:], [whole[-1], 0, 0])


VOCABULARY = """
mesh: {{tp: {tp}}}
shard:
  - {{name: embed, axis: tp, dim: 0, size: 50257, pad_to: {pad_to}}}
"""


def test_a_vocabulary_is_padded_as_each_world_pads_it() -> None:
    whole = numbers((50257, 1))
    old = np.pad(whole, [(0, 50304 - 50257), (0, 0)], constant_values=7)
    source, arrays = world_of(
        VOCABULARY.format(tp=2, pad_to=64), *({"embed": part} for part in np.split(old, 2))
    )
    for pad_to, rows in ((100, 16800), (128, 16768)):
        target = lay_out(rules(VOCABULARY.format(tp=3, pad_to=pad_to)), source)
        assert shapes(target, "embed") == [(rows, 1)] * 3
        new = np.concatenate([held["embed"] for held in moved(source, arrays, target)])
        assert np.array_equal(new[:50257], whole)
        assert set(new[50257:].flat) == ({7} if 3 * rows == 50304 else {0})


GROUPED = """
mesh: {{tp: {tp}}}
fragment:
  - name: qkv
    axis: tp
    dim: 0
    unit: 2
    size: 24
    parts: [8, {{weight: 2, share: true}}, {{weight: 2, share: true}}]
"""


def test_heads_of_keys_that_are_fewer_than_the_ranks_are_shared() -> None:
    whole = numbers((24, 3))
    query, key, value = np.split(whole, [16, 20])
    headers = [np.split(one, len(one) // 2) for one in (query, key, value)]

    def part(rank: int, size: int) -> Array:
        each = 8 // size
        own = headers[0][rank * each : (rank + 1) * each]
        pairs = [[one[rank * 2 // size]] if size > 2 else one for one in headers[1:]]
        return np.concatenate([*own, *pairs[0], *pairs[1]])

    source, old = world_of(GROUPED.format(tp=4), *({"qkv": part(rank, 4)} for rank in range(4)))
    new = moved(source, old, lay_out(rules(GROUPED.format(tp=1)), source))
    assert np.array_equal(new[0]["qkv"], whole)
    assert shapes(lay_out(rules(GROUPED.format(tp=8)), source), "qkv") == [(6, 3)] * 8


def test_copies_that_went_their_own_ways_are_distinguished_until_they_are_one() -> None:
    text = "mesh: {{dp: {dp}}}\naverage:\n  - {{name: e, axis: dp}}\n"
    stored = [[StoredEntry("e", "F32", (3,))] for _ in range(3)]
    source = read_world(rules(text.format(dp=3)), stored)
    target = lay_out(rules(text.format(dp=2)), source)
    copies = source.index(entry_named).copies(target.entries[1]["e"].patches)
    assert [[copy.holders[0].rank for copy in one] for one in copies] == [[0], [1], [2]]
    with pytest.raises(RulesMismatch, match="I64"):
        read_world(rules(text.format(dp=1)), [[StoredEntry("e", "I64", (3,))]])


def test_what_is_each_ranks_own_goes_to_the_rank_of_the_same_coordinates() -> None:
    text = "mesh: {{dp: {dp}, tp: {tp}}}\nown: [mine]\n"
    held = [{"mine": numbers((2,))} for _ in range(4)]
    source, old = world_of(text.format(dp=2, tp=2), *held)
    new = moved(source, old, lay_out(rules(text.format(dp=3, tp=1)), source))
    for found, expected in zip(new, (0, 2, 0), strict=True):
        assert np.array_equal(found["mine"], old[expected]["mine"])


LAYERS = """
mesh: {{pp: {pp}, tp: 1}}
unique:
  - {{name: "layers.{{n}}.*", axis: pp, of: 3{more}}}
  - {{name: embed, axis: pp, at: first}}
  - {{name: head, axis: pp, at: last}}
"""


def test_layers_move_to_the_stages_of_another_pipeline() -> None:
    tensors = {f"layers.{n}.w": numbers((2,)) for n in range(3)}
    embed, head = numbers((1,)), numbers((1,))
    source, old = world_of(
        LAYERS.format(pp=2, more=""),
        {"embed": embed, "layers.0.w": tensors["layers.0.w"], "layers.1.w": tensors["layers.1.w"]},
        {"layers.2.w": tensors["layers.2.w"], "head": head},
    )
    one = moved(source, old, lay_out(rules(LAYERS.format(pp=1, more="")), source))
    assert list(one[0]) == ["embed", *tensors, "head"]
    more = lay_out(rules(LAYERS.format(pp=2, more=", sizes: [1, 2]")), source)
    assert list(more.entries[0]) == ["embed", "layers.0.w"]
    assert list(more.entries[1]) == ["layers.1.w", "layers.2.w", "head"]
    assert np.array_equal(moved(source, old, more)[1]["layers.1.w"], tensors["layers.1.w"])


GATED_TWICE = """
mesh: {dp: 2, tp: 2}
fragment:
  - name: gate_up
    cuts: [{axis: tp, dim: 0, parts: [1, 1]}, {axis: dp, dim: 0}]
"""


def test_what_was_joined_and_cut_may_be_cut_again() -> None:
    gate, up = numbers((6, 2)), numbers((6, 2))
    local = [np.concatenate([gate[at : at + 3], up[at : at + 3]]) for at in (0, 3)]
    held = [{"gate_up": np.array_split(local[rank % 2], 2)[rank // 2]} for rank in range(4)]
    source, old = world_of(GATED_TWICE, *held)
    target = lay_out(source.rules.on(source.mesh.with_sizes({"dp": 1, "tp": 1})), source)
    assert np.array_equal(moved(source, old, target)[0]["gate_up"], np.concatenate([gate, up]))


ROW_OF_JOINED = """
mesh: {{dp: {dp}, tp: {tp}}}
fragment:
  - {{name: gate_up, axis: tp, dim: 1, parts: [1, 1]}}
flat:
  - {{name: row, axis: dp, tensors: {{bias: [3], gate_up: [2, 8]}}}}
"""


def test_a_row_may_hold_what_is_joined_and_cut() -> None:
    bias, whole = numbers((3,)), numbers((2, 8))

    def row(rank: int, data: int, tensor: int) -> Array:
        at, width = rank % tensor, 4 // tensor
        parts = [half[:, at * width : (at + 1) * width] for half in np.split(whole, 2, 1)]
        items = np.concatenate([bias, np.concatenate(parts, 1).reshape(-1)])
        return np.split(np.pad(items, (0, -len(items) % data)), data)[rank // tensor]

    held = [{"row": row(rank, 3, 2)} for rank in range(6)]
    source, old = world_of(ROW_OF_JOINED.format(dp=3, tp=2), *held)
    new = moved(source, old, lay_out(rules(ROW_OF_JOINED.format(dp=2, tp=4)), source))
    assert_same(new, [{"row": row(rank, 2, 4)} for rank in range(8)])


# --- state of optimizers ---------------------------------------------------------------------

WITH_STATE = """
mesh: {{dp: 1, tp: {tp}}}
shard:
  - {{name: model.w, axis: tp, dim: 1}}
own: [model.mine]
"""


def with_state(rank: int) -> list[StoredEntry]:
    return [
        StoredEntry("model.w", "BF16", (3, 2)),
        StoredEntry("opt.w.mean", "F32", (3, 2), "model.w"),
        StoredEntry("opt.w.step", "F32", (), "model.w"),
        StoredEntry("model.mine", "F32", (1 + rank,)),
        StoredEntry("opt.mine.mean", "F32", (1 + rank,), "model.mine"),
        StoredEntry("opt.mine.step", "F32", (), "model.mine"),
    ]


def test_state_goes_with_its_parameter() -> None:
    source = read_world(rules(WITH_STATE.format(tp=2)), [with_state(0), with_state(1)])
    assert source.wholes["opt.w.mean"].shape == (3, 4)
    target = lay_out(rules(WITH_STATE.format(tp=3)), source)
    assert shapes(target, "opt.w.mean") == [(3, 2), (3, 1), (3, 1)]
    assert shapes(target, "opt.w.step") == [()] * 3
    assert [e["opt.mine.step"].patches[0].tensor for e in target.entries] == [
        "opt.mine.step@0",
        "opt.mine.step@1",
        "opt.mine.step@0",
    ]


# --- what does not fit -----------------------------------------------------------------------


def problems_of(text: str, *ranks: list[StoredEntry]) -> tuple[str, ...]:
    with pytest.raises(RulesMismatch) as caught:
        read_world(rules(text), ranks)
    return caught.value.problems


def test_a_mesh_of_another_size_is_reported() -> None:
    (problem,) = problems_of("mesh: {dp: 2, tp: 2}", [], [], [])
    assert "4 ranks (dp 2, tp 2), but 3 ranks" in problem


@pytest.mark.parametrize(
    ("text", "shapes_there", "reported"),
    [
        ("shard: [{name: w, axis: tp, dim: 2}]", [(2, 2), (2, 2)], "2 dimensions, but dimension 2"),
        ("shard: [{name: w, axis: tp, dim: 0}]", [(2, 2), (2,)], "different numbers of dimensions"),
        ("shard: [{name: w, axis: tp, dim: 0}]", [(1, 2), (3, 2)], "on rank 0, and should have"),
        ("shard: [{name: w, axis: tp, dim: 0}]", [(2, 2), (2, 3)], "on rank 1, and should have"),
        ("shard: [{name: w, axis: tp, dim: 0, pad_to: 4}]", [(4,), (4,)], "set size:"),
        ("replicate: [w]", [(2,), (3,)], "[3] on rank 1, and should have [2]"),
        ("fragment: [{name: w, axis: tp, dim: 0, parts: [2, 1]}]", [(2,), (2,)], "parts of 2 : 1"),
        ("flat: [{name: w, axis: tp, tensors: {a: [5]}}]", [(2,), (2,)], "should have [3]"),
        ("flat: [{name: w, axis: dp, tensors: {a: []}}]\nshard: [{name: a, axis: tp, dim: 0}]",
         [(1,), (1,)], "0 dimensions, but dimension 0"),
        ("flat: [{name: w, axis: dp, tensors: {aa: [2]}}]\nreplicate: ['a*', '*a']",
         [(1,), (1,)], "aa in it is matched by replicate a* (line 3) and by replicate *a"),
        ("unique: [{name: w, axis: tp, at: 0}]", [(2,), (2,)], "also on ranks [1]"),
        ("unique: [{name: w, axis: tp, at: 5}]", [(2,), (2,)], "is placed at 5 of tp 2"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_reported(
    text: str, shapes_there: list[tuple[int, ...]], reported: str
) -> None:
    ranks = [[StoredEntry("w", "F32", shape)] for shape in shapes_there]
    (problem, *_) = problems_of(f"mesh: {{dp: 1, tp: 2}}\n{text}", *ranks)
    assert problem.startswith("w")
    assert reported in problem


def test_a_tensor_that_is_not_everywhere_or_of_two_dtypes_is_reported() -> None:
    w, half = StoredEntry("w", "F32", (2,)), StoredEntry("w", "F16", (2,))
    assert "not on ranks [1]" in problems_of("mesh: {tp: 2}\nreplicate: [w]", [w], [])[0]
    assert "F16 and as F32" in problems_of("mesh: {tp: 2}\nreplicate: [w]", [w], [half])[0]


def test_a_target_that_cannot_be_is_reported() -> None:
    def problems(target: str) -> str:
        source = read_world(
            rules("mesh: {tp: 1}\nshard: [{name: w, axis: tp, dim: 0}]"),
            [[StoredEntry("w", "F32", (4,))]],
        )
        with pytest.raises(RulesMismatch) as caught:
            lay_out(rules(target), source)
        return "".join(caught.value.problems)

    assert "4 units of 1 for 2" in problems(
        "mesh: {tp: 2}\nfragment: [{name: w, axis: tp, dim: 0, sizes: [1, 2]}]"
    )
    assert "flat buffer" in problems(
        "mesh: {tp: 2}\nflat: [{name: w, axis: tp, tensors: {a: [4]}}]"
    )
    assert "own by only one" in problems("mesh: {tp: 2}\nown: [w]")
    assert "rule has size 5" in problems(
        "mesh: {tp: 2}\nshard: [{name: w, axis: tp, dim: 0, size: 5}]"
    )


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 12))
def test_the_same_world_needs_nothing(old: int, new: int) -> None:
    one = rules(FLAT.format(dp=old)).layout
    other = rules("\n" + FLAT.format(dp=new)).layout
    assert (one == other) == (old == new)


# --- entries of shards ---


def test_state_is_reported_with_its_parameter() -> None:
    state = {
        "w": {
            "n": 7,
            "mean": TensorRef("s.mean"),
            "more": [TensorRef("s.one"), (TensorRef("s.two"),)],
        },
        3: {"x": TensorRef("s.global")},
    }
    names = ("w", "s.mean", "s.one", "s.two", "s.global")
    made = MadeShards([dict.fromkeys(names, array(1, 2))], state)
    (found,) = stored_entries(made.headers, made.parts(), source="x")
    owners = {one.name: one.of for one in found}
    assert owners == {"w": None, "s.mean": "w", "s.one": "w", "s.two": "w", "s.global": None}
    assert found[0] == StoredEntry("w", "F32", (2,))


def test_dtensors_need_no_rules() -> None:
    made = MadeShards([{"w": array(1, 2)}], part=TensorPart((4,), (2,)))
    with pytest.raises(RulesMismatch, match="w is a DTensor"):
        stored_entries(made.headers, made.parts(), source="x")


def test_what_no_session_has_saved_is_refused_in_words() -> None:
    made = MadeShards([{"w": array(1, 2)}])
    with pytest.raises(RulesMismatch, match=r"saved by ftrun\.dcp"):
        stored_entries(made.headers, [{"objects": b""}], source="x")


def test_a_ranks_own_tensor_moves_with_its_stage() -> None:
    text = "mesh: {{pp: {pp}, tp: 2}}\nown: [m]\nunique: [{{name: m, axis: pp, at: last}}]"
    held = {f"{one}": [StoredEntry("m", "F32", (one,))] for one in (2, 3)}
    source = read_world(rules(text.format(pp=2)), [[], [], held["2"], held["3"]])
    for pp in (1, 3):
        target = lay_out(rules(text.format(pp=pp)), source)
        assert [entries["m"].patches[0].tensor for entries in target.entries[-2:]] == ["m@2", "m@3"]
        assert [entries["m"].shape for entries in target.entries[-2:]] == [(2,), (3,)]
