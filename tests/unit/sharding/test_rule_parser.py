"""A file of rules is read completely, and every error is reported with line and column."""

import pytest

from ftrun.errors import RulesInvalid
from ftrun.sharding.rule_parser import carried, read_carried, read_rules
from ftrun.sharding.rules import (
    DimensionSplit,
    FlatBuffer,
    FusedPart,
    Mesh,
    SharingKind,
    UnevenPolicy,
)

WHOLE = """
mesh: {pp: 2, dp: 2, tp: 4}
batches: [dp, pp]

replicate:
  - "*.norm.*"
  - name: [model.a, model.b]
  - [model.c]
own:
  - {name: model.mine}
average:
  - {name: [model.e, model.f], axis: dp}
shard:
  - {name: model.embed, axis: tp, dim: 0, size: 1_000, pad_to: 64}
  - {name: model.proj, axis: tp, dim: -1, uneven: chunk}
  - name: model.both
    cuts:
      - {axis: tp, dim: 0}
      - {axis: dp, dim: 1}
fragment:
  - {name: model.up, axis: tp, dim: 0, parts: [1, 1]}
  - name: model.qkv
    axis: tp
    dim: 0
    unit: 64
    parts: [8, {weight: 2, share: true}, {weight: 2, unit: 32, sizes: [1, 1, 0, 0]}]
flat:
  - name: row
    axis: dp
    pad_to: 2
    tensors:
      model.w: [4, 8]
      model.b: [8]
      model.n: []
unique:
  - {name: "model.layers.{n}.*", axis: pp, of: 24, sizes: [10, 14]}
  - {name: [model.embed, model.tied], axis: pp, at: [first, last, 1]}
  - {name: "chunk{turn}.{n}", axis: pp, of: 9, turns: 2, numbered: anew, empty: [3]}
  - {name: "l.{n}", axis: pp, of: 9, numbered: through}
  - {name: "{turn}.in", axis: pp, at: [first, last], tied: "{turn}.out", turns: 2}
"""


def test_everything_that_can_be_reported() -> None:
    rules = read_rules(WHOLE, source="x.yaml")
    assert rules.mesh == Mesh((("pp", 2), ("dp", 2), ("tp", 4)), ("dp", "pp"))
    by_name = {rule.pattern.text: rule for rule in rules.rules}
    assert [by_name[f"model.{one}"].kind for one in "abc"] == [SharingKind.REPLICATE] * 3
    assert by_name["model.mine"].kind is SharingKind.OWN
    assert by_name["model.f"].axis == "dp"
    assert by_name["model.embed"].cuts == (DimensionSplit("tp", 0, size=1000, pad_to=64),)
    assert by_name["model.proj"].cuts == (DimensionSplit("tp", -1, uneven=UnevenPolicy.CHUNK),)
    assert by_name["model.both"].cuts == (DimensionSplit("tp", 0), DimensionSplit("dp", 1))
    assert by_name["model.up"].cuts == (DimensionSplit("tp", 0, (FusedPart(), FusedPart())),)
    assert by_name["model.qkv"].cuts[0].parts == (
        FusedPart(8, 64),
        FusedPart(2, 64, is_shared=True),
        FusedPart(2, 32, (1, 1, 0, 0)),
    )
    shapes = (("model.w", (4, 8)), ("model.b", (8,)), ("model.n", ()))
    assert by_name["row"].flat == FlatBuffer("dp", 2, shapes)
    layers, embed, tied, chunks, through, copies = rules.placements
    assert (copies.renames, str(copies.tied), tied.tied) == (True, "{turn}.out", None)
    assert (layers.at, layers.count, layers.sizes) == (None, 24, (10, 14))
    assert embed.at == tied.at == (0, -1, 1)
    assert (layers.turns, layers.is_anew, layers.empty) == (1, False, ())
    assert (chunks.turns, chunks.is_anew, chunks.empty, chunks.word) == (2, True, (3,), "n")
    assert chunks.renames
    assert not through.renames
    lines = WHOLE.splitlines()
    assert str(by_name["row"]) == f"flat row (line {lines.index('  - name: row') + 1})"
    assert str(layers) == "unique model.layers.{n}.* (line 36)"


def test_a_buffer_for_each_tensor_and_a_number_of_equal_parts() -> None:
    text = """
mesh: {dp: 2}
flat: [{axis: dp, pad_to: 4, each: {a: [3, 5], b: []}}]
fragment: [{name: c, axis: dp, dim: 0, parts: 3, unit: 2}]
"""
    rules = read_rules(text, source="x").rules
    flats = [one for one in rules if one.kind is SharingKind.FLAT]
    (fused,) = (one for one in rules if one.kind is SharingKind.FRAGMENT)
    assert [(str(one.pattern), one.flat) for one in flats] == [
        ("a", FlatBuffer("dp", 4, (("a", (3, 5)),))),
        ("b", FlatBuffer("dp", 4, (("b", ()),))),
    ]
    assert fused.cuts[0].parts == (FusedPart(unit=2),) * 3


def test_a_snapshot_carries_its_rules_and_its_own_mesh() -> None:
    rules = read_rules(WHOLE, source="x.yaml")
    rules = rules.on(rules.mesh.with_sizes({"dp": 5}))
    back = read_carried(carried(rules))
    assert back.layout == rules.layout
    assert back.source == "x.yaml of the snapshot"


def test_a_file_may_describe_a_mesh_only() -> None:
    assert read_rules("mesh: {tp: 2}", source="x").is_empty
    assert not read_rules("mesh: {tp: 2}\nown: [a]", source="x").is_empty


def test_batches_differ_along_dp_by_default() -> None:
    assert read_rules("mesh: {tp: 2, dp: 3}", source="x").mesh.batch_axes == ("dp",)
    assert read_rules("mesh: {tp: 2}\nreplicate:\n", source="x").mesh.batch_axes == ()
    assert read_rules("mesh: {tp: 2}\nbatches: tp", source="x").mesh.batch_axes == ("tp",)


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("", "line 1, column 1: expected mesh and rules, and the file is empty"),
        ("- a", "line 1, column 1: expected rules, as keys with values, and there is a list of 1"),
        ("mesh: {tp: 2}\nshad: []", "line 2, column 1: expected shard in rules"),
        ("mesh: {tp: 2}\nxyzzy: []", "expected one of mesh, batches, strict, replicate, shard"),
        ("replicate: [a]", "line 1, column 1: expected the key mesh in rules"),
        ("mesh: {}", "line 1, column 7: expected at least one axis"),
        ("mesh: {tp: 0}", "line 1, column 12: expected a number, 1 or more, and there is '0'"),
        ("mesh: {tp: 010}", "expected a number, 1 or more, and there is '010'"),
        ("mesh: {tp: '2'}", "expected a number"),
        ("mesh: {tp: }", "expected a number, 1 or more, and there is nothing"),
        ("mesh: {tp: {}}", "expected a number, 1 or more, and there is a mapping of nothing"),
        ("mesh: {tp: 1, tp: 2}", "line 1, column 15: expected tp once"),
        ("mesh: {tp: 2}\nbatches: dp", "line 2, column 10: expected an axis of the mesh (tp)"),
        ("mesh: {tp: 2}\nreplicate: a", "line 2, column 12: expected a list of replicate rules"),
        ("mesh: {tp: 2}\nreplicate: [{nam: a}]", "expected name in a rule"),
        ("mesh: {tp: 2}\nreplicate: [{name: {a: b}}]", "expected a name, and there is a mapping"),
        ("mesh: {tp: 2}\naverage: [{name: a}]", "expected the key axis in a rule under average"),
        ("mesh: {tp: 2}\nshard: [{name: a, axis: tp}]", "expected the key dim, together with axis"),
        ("mesh: {tp: 2}\nshard: [{name: a}]", "expected the key axis, together with others"),
        ("mesh: {tp: 2}\nshard: [{name: a, axis: tp, dim: x}]", "column 34: expected a number"),
        ("mesh: {tp: 2}\nshard: [{name: a, axis: tp, dim: 0, unit: 2}]", "none of parts, unit"),
        ("mesh: {tp: 2}\nfragment: [{name: a, axis: tp, dim: 0}]", "belongs under shard"),
        ("mesh: {tp: 2}\nfragment: [{name: a, axis: tp, dim: 0, parts: {a: 1}}]",
         "a list of parts"),
        ("mesh: {tp: 2}\nfragment: [{name: a, axis: tp, dim: 0, parts: x}]", "a number, 1 or more"),
        ("mesh: {tp: 2}\nfragment: [{name: a, axis: tp, dim: 0, parts: [{unit: 3}]}]",
         "the key weight in a part"),
        ("mesh: {tp: 2}\nfragment: [{name: a, axis: tp, dim: 0, sizes: 3}]", "a list of numbers"),
        ("mesh: {tp: 2}\nfragment: [{name: a, axis: tp, dim: 0, sizes: [1], pad_to: 2}]",
         "either sizes or pad_to"),
        ("mesh: {tp: 2}\nshard: [{name: a, axis: tp, cuts: []}]", "axis inside of cuts"),
        ("mesh: {tp: 2}\nshard: [{name: a, axis: tp, dim: 0, uneven: odd}]", "balanced or chunk"),
        ("mesh: {tp: 2}\nshard: [{name: a, axis: tp, dim: 0, share: 1}]", "expected true or false"),
        ("mesh: {tp: 2}\nflat: [{name: a, axis: tp, tensors: [w]}]", "expected tensors with their"),
        ("mesh: {tp: 2}\nflat: [{name: a, axis: tp, tensors: {w: 4}}]", "expected a shape"),
        ("mesh: {tp: 2}\nflat: [{axis: tp, name: a}]", "either name: and tensors:, or each:"),
        ("mesh: {tp: 2}\nflat: [{axis: tp, name: a, tensors: {w: [1]}, each: {w: [1]}}]",
         "either name: and tensors:, or each:"),
        ("mesh: {tp: 2}\nflat: [{axis: tp, name: a, each: {w: [1]}}]", "either name: and tensors:"),
        ("mesh: {tp: 2}\nunique: [{name: a, axis: tp}]", "either at: with coordinates, or of:"),
        ("mesh: {tp: 2}\nunique: [{name: a, axis: tp, of: 3}]", "expected one number in the name"),
        ("mesh: {tp: 2}\nunique: [{name: a, axis: tp, at: middle}]", "a number, and there is 'mid"),
        ("mesh: {tp: 2}\nunique: [{name: a, axis: tp, at: 0, sizes: [2]}]",
         "sizes together with of:"),
        ("mesh: {tp: 2}\nunique: [{name: '{n}', axis: tp, of: 2, numbered: new}]",
         "through or anew, and there is 'new'"),
        ("mesh: {tp: 2}\nunique: [{name: '{n}.{n}', axis: tp, of: 2}]", "each number under a word"),
        ("mesh: {tp: 2}\nunique: [{name: 'l.{n}', axis: tp, of: 2, tied: b}]",
         "tied together with at:, not with of:"),
        ("mesh: {tp: 2}\nunique: [{name: 'a.*', axis: tp, at: 0, tied: b}]",
         "whole names, without * and numbers, for tied:"),
        ("mesh: {tp: 2}\nunique: [{name: a, axis: tp, at: 0, tied: 'b.{n}'}]",
         "whole names, without * and numbers, for tied:"),
        ("mesh: {tp: 2}\nunique: [{name: '{turn}', axis: tp, of: 2}]", "expected one number in"),
        ("mesh: {tp: 2", "line 1, column 13: expected YAML (while parsing a flow mapping)"),
        ("mesh: *a", "line 1, column 7: expected YAML"),
        ("mesh: \x00", "expected YAML, and "),
        (f"mesh: {{tp: {'x' * 50}}}", f"there is '{'x' * 40}...'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_reported_with_its_place(text: str, reported: str) -> None:
    with pytest.raises(RulesInvalid) as caught:
        read_rules(text, source="x.yaml")
    assert reported in caught.value.problems[0]
    assert str(caught.value).startswith("1 problem in x.yaml:")


def test_everything_that_is_wrong_is_reported_at_once() -> None:
    text = "mesh: {tp: 2}\nshard:\n  - {axis: tp}\n  - {name: a, axis: dp, dim: 0}\nunique: [a]\n"
    with pytest.raises(RulesInvalid) as caught:
        read_rules(text, source="x")
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "line 3, column 5",
        "line 4, column 21",
        "line 5, column 10",
    ]
