"""Stages that number their layers from 0 have each layer once, under its global number."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrun.errors import RulesMismatch
from ftrun.sharding.rank_values import RankValues
from ftrun.sharding.rule_parser import read_rules
from ftrun.sharding.rules import ShardingRules
from ftrun.sharding.world_layout import StoredEntry, lay_out, read_world
from ftrun.snapshot import plain_values as plain
from ftrun.snapshot.plain_values import TensorRef
from tests.unit.sharding.worlds import Array, assert_same, entry_named, moved, numbers, stored_of

Layers = dict[int, Array]


def rules(text: str) -> ShardingRules:
    return read_rules(text, source="x.yaml")


@st.composite
def pipelines(draw: st.DrawFn, count: int) -> dict[str, Any]:
    """The distribution and the names of `count` layers."""
    size, turns = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    ends = sorted(draw(st.lists(st.integers(0, count), min_size=size * turns - 1,
                                max_size=size * turns - 1)))  # fmt: skip
    sizes = np.diff([0, *ends, count]).tolist() if draw(st.booleans()) else None
    return {
        "size": size,
        "turns": turns,
        "sizes": sizes,
        "is_anew": draw(st.booleans()),
        "says_turn": draw(st.booleans()),
    }


def rules_of(count: int, way: dict[str, Any]) -> ShardingRules:
    name = "chunk{turn}.layers.{n}.*" if way["says_turn"] else "layers.{n}.*"
    more = f", sizes: {way['sizes']}" if way["sizes"] else ""
    more += ", numbered: anew" if way["is_anew"] else ""
    return rules(
        f"mesh: {{pp: {way['size']}, tp: 2}}\n"
        f'shard:\n  - {{name: "*", axis: tp, dim: 0}}\n'
        f'unique:\n  - {{name: "{name}", axis: pp, of: {count}, turns: {way["turns"]}{more}}}\n'
    )


def ranks_of(layers: Layers, way: dict[str, Any]) -> list[dict[str, Array]]:
    """The layers of each rank, distributed by numpy."""
    size, turns = way["size"], way["turns"]
    runs = np.array_split(np.arange(len(layers)), size * turns)
    if way["sizes"]:
        runs = np.split(np.arange(len(layers)), np.cumsum(way["sizes"])[:-1])
    found = []
    for rank in range(size * 2):
        stage, at = divmod(rank, 2)
        held: dict[str, Array] = {}
        before = 0
        for turn, run in enumerate(runs[stage::size]):
            if way["says_turn"]:
                before = 0
            for place, layer in enumerate(map(int, run)):
                number = before + place if way["is_anew"] else layer
                chunk = f"chunk{turn}." if way["says_turn"] else ""
                part = np.array_split(layers[layer], 2)[at]
                held[f"{chunk}layers.{number}.w"] = part
            before += len(run)
        found.append(held)
    return found


@given(st.data(), st.integers(1, 9))
def test_any_pipeline_becomes_any_other_and_comes_back(data: st.DataObject, count: int) -> None:
    layers = {at: numbers((2 + at % 2, 2)) for at in range(count)}
    before = data.draw(pipelines(count), "before")
    after = data.draw(pipelines(count), "after") | {"says_turn": before["says_turn"]}
    old, expected = ranks_of(layers, before), ranks_of(layers, after)
    source = read_world(rules_of(count, before), stored_of(old))
    target = lay_out(rules_of(count, after), source)
    new = by_own_names(target, moved(source, old, target))
    assert_same(new, expected)
    again = read_world(target.rules, stored_of(new))
    back = lay_out(source.rules, again)
    assert_same(by_own_names(back, moved(again, new, back)), old)


def by_own_names(world: Any, ranks: list[dict[str, Array]]) -> list[dict[str, Array]]:
    return [
        {world.own_name(rank, name): array for name, array in held.items()}
        for rank, held in enumerate(ranks)
    ]


# --- plain values ------------------------------------------------------------------------------

NAMED = """
mesh: {{pp: {pp}}}
unique:
  - {{name: "m{{turn}}.{{n}}.*", axis: pp, of: 4, turns: {turns}, numbered: anew}}
"""


def parts_of(names: list[str]) -> dict[str, bytes]:
    state = {name: {"seen": [TensorRef(f"o.state.{name}.seen")]} for name in names}
    parts = {
        "groups": {"o": [{"lr": 0.1, "params": names}]},
        "optimizer_state": {"o": {"state": {**state, 7: {"seen": 1}, "all": 2}}},
        "extra_state": {name.removesuffix(".w"): {"of": name} for name in names},
        "frozen": names[:1],
        "rng": {},
        "generators": {},
        "loaders": {},
    }
    return {name: plain.encode(value) for name, value in parts.items()}


def stored_with_state(names: list[str]) -> list[StoredEntry]:
    states = [StoredEntry(f"o.state.{name}.seen", "F32", (2,), name) for name in names]
    return [*(StoredEntry(name, "F32", (2,)) for name in names), *states]


def test_groups_and_state_are_called_as_the_new_rank_calls_them() -> None:
    names = [["m0.0.w", "m1.0.w"]] * 2
    source = read_world(rules(NAMED.format(pp=2, turns=2)), list(map(stored_with_state, names)))
    target = lay_out(rules(NAMED.format(pp=1, turns=1)), source)
    values = RankValues(list(map(parts_of, names)), source, target)
    made = {key: plain.decode(part) for key, part in plain.decode(values.of(0)).items()}
    called = [f"m0.{at}.w" for at in range(4)]
    assert sorted(made["groups"]["o"][0]["params"]) == called
    state = made["optimizer_state"]["o"]["state"]
    assert set(state) == {*called, 7, "all"}
    assert state["m0.3.w"] == {"seen": [TensorRef("o.state.m0.3.w.seen")]}
    assert made["frozen"] == ["m0.0.w", "m0.1.w"]
    # The runs in order: m0 of stage 0, m0 of stage 1, then m1 of each.
    assert made["extra_state"] == {
        "m0.0": {"of": "m0.0.w"},
        "m0.1": {"of": "m0.0.w"},
        "m0.2": {"of": "m1.0.w"},
        "m0.3": {"of": "m1.0.w"},
    }
    copies = source.index(entry_named).copies(target.entries[0]["o.state.m0.2.w.seen"].patches)
    assert [(h.rank, h.entry.name) for copy in copies[0] for h in copy.holders] == [
        (0, "o.state.m1.0.w.seen")
    ]


# --- what does not fit -------------------------------------------------------------------------


def problems(text: str, *ranks: list[str]) -> list[str]:
    with pytest.raises(RulesMismatch) as caught:
        read_world(rules(text), [[StoredEntry(name, "F32", (2,)) for name in one] for one in ranks])
    return list(caught.value.problems)


ANEW = 'mesh: {{pp: 2}}\nunique: [{{name: "l.{{n}}.*", axis: pp, of: {}, numbered: anew{}}}]'
UNIQUE = "unique l.{n}.* (line 2)"


def test_a_stage_with_more_layers_than_declared() -> None:
    found = problems(ANEW.format(3, ""), ["l.0.w", "l.1.w"], ["l.0.w", "l.1.w"])
    assert found == [f"l.1.w: its number is 1, and pp 1 has numbers 0 to 0 by {UNIQUE}"]
    found = problems(ANEW.format(2, ", sizes: [2, 0]"), ["l.0.w", "l.1.w"], ["l.0.w"])
    assert found == [f"l.0.w: its number is 0, and pp 1 has none by {UNIQUE}"]


def test_what_all_ranks_of_a_stage_have_too_many_is_reported_once_and_without_its_state() -> None:
    text = ANEW.format(2, "").replace("pp: 2", "pp: 2, tp: 2")
    names = ["l.0.w", "l.1.w"]
    with pytest.raises(RulesMismatch) as caught:
        read_world(rules(text), [stored_with_state(names)] * 4)
    assert [problem.partition(" by ")[0] for problem in caught.value.problems] == [
        f"l.1.w: its number is 1, and pp {at} has numbers 0 to 0" for at in range(2)
    ]


def test_layers_that_no_process_has() -> None:
    found = problems(ANEW.format(10, ""), ["l.0.w", "l.1.w"], ["l.0.w", "l.1.w"])
    assert found[0].startswith(
        f"{UNIQUE} declares 10 layers, but no rank holds layers 2, 3, 4, 7, 8 and 1 more:"
    )
    text = ANEW.format(4, ", empty: [1]")
    assert ", but no rank holds layer 3: " in problems(text, ["l.0.w"], ["l.0.w"])[0]
    both = [[StoredEntry("l.0.w", "F32", (2,))]] * 2
    assert list(read_world(rules(ANEW.format(4, ", empty: [1, 3]")), both).wholes) == [
        "l.0.w",
        "l.2.w",
    ]


def test_a_layer_that_two_stages_have() -> None:
    text = ANEW.format(2, "").replace("anew", "through")
    (problem,) = problems(text, ["l.0.w"], ["l.0.w", "l.1.w"])
    assert problem.startswith("l.0.w: it is also on ranks [1]")
    assert "the key numbered" in problem


def test_turns_that_do_not_fit() -> None:
    text = ANEW.format(4, ", turns: 2").replace("l.{n}", "l{turn}.{n}")
    ranks = [["l0.0.w", "l1.0.w"], ["l0.0.w", "l1.0.w", "l1.1.w", "l2.0.w"]]
    assert problems(text, *ranks) == [
        "l1.1.w: its number is 1, and turn 1 of pp 1 has numbers 0 to 0 by "
        "unique l{turn}.{n}.* (line 2)",
        "l2.0.w: its turn 2 is not below turns: 2",
    ]
    text = text.replace("anew", "through")
    assert problems(text, ["l0.0.w", "l1.2.w"], ["l0.1.w", "l0.3.w"]) == [
        "l0.3.w: number 3 is not in turn 0 of pp 1"
    ]


ENDS = """
mesh: {{pp: {pp}}}
unique:
  - {{name: "m{{turn}}.first", axis: pp, at: first, turns: {turns}}}
  - {{name: "m{{turn}}.last", axis: pp, at: last, turns: {turns}}}
"""


def test_what_is_at_an_end_is_in_its_turn() -> None:
    first, last = numbers((1,)), numbers((2,))
    old = [{"m0.first": first}, {"m2.last": last}]
    source = read_world(rules(ENDS.format(pp=2, turns=3)), stored_of(old))
    assert list(source.wholes) == ["m0.first", "m0.last"]
    target = lay_out(rules(ENDS.format(pp=1, turns=2)), source)
    new = by_own_names(target, moved(source, old, target))
    assert_same(new, [{"m0.first": first, "m1.last": last}])
    assert problems(ENDS.format(pp=2, turns=2), ["m0.first"], ["m0.last"]) == [
        "m0.last: its turn is 0, and that of pp 1 is 1 by unique m{turn}.last (line 5), turns: 2"
    ]


def test_sizes_for_other_stages() -> None:
    (problem,) = problems(ANEW.format(3, ", sizes: [1, 1, 1]"), ["l.0.w"], ["l.0.w"])
    assert problem == (
        f"{UNIQUE}: sizes [1, 1, 1] are 3 numbers for 3 runs of layers, and there are 3 for 2: "
        "pp 2, turns 1"
    )


def test_a_name_that_two_rules_move_is_left_to_be_reported() -> None:
    text = ANEW.format(2, "").replace("]", ', {name: "*.{n}.w", axis: pp, of: 2, numbered: anew}]')
    (problem, *_) = problems(text, ["l.0.w"], ["l.0.w"])
    assert problem.startswith("l.0.w is matched by unique l.{n}.* (line 2) and by unique *.{n}.w")


# --- tensors that stages hold as copies ---------------------------------------------------------

TIED = """
mesh: {{pp: {pp}}}
unique:
  - {{name: "m.in", axis: pp, at: [first, last], tied: "m.out"}}
  - {{name: "m.l.{{n}}", axis: pp, of: 4}}
"""


def tied(pp: int) -> list[list[str]]:
    names = [[f"m.l.{n}" for n in part] for part in np.array_split(np.arange(4), pp)]
    names[0].append("m.in")
    if pp > 1:
        names[-1].append("m.out")
    return names


@pytest.mark.parametrize(("before", "after"), [(1, 3), (2, 1), (3, 2)])
def test_a_copy_has_its_own_name_on_other_stages(before: int, after: int) -> None:
    stored = [stored_with_state(names) for names in tied(before)]
    source = read_world(rules(TIED.format(pp=before)), stored)
    target = lay_out(rules(TIED.format(pp=after)), source)
    found = [
        sorted(target.own_name(rank, name) for name in entries)
        for rank, entries in enumerate(target.entries)
    ]
    expected = [stored_with_state(names) for names in tied(after)]
    assert found == [sorted(one.name for one in some) for some in expected]


@pytest.mark.parametrize(
    ("names", "reported"),
    [
        ([["m.out"], ["m.out"]], "m.out: pp 0 has it as m.in by unique m.in (line 4)"),
        ([["m.in"], ["m.in"]], "m.in: pp 1 has it as m.out by unique m.in (line 4)"),
        ([["m.in", "m.out"], ["m.out"]], "m.out: pp 0 has it as m.in"),
    ],
)
def test_a_copy_with_another_name_is_reported(names: list[list[str]], reported: str) -> None:
    with pytest.raises(RulesMismatch) as caught:
        read_world(rules(TIED.format(pp=2)), [stored_with_state(some) for some in names])
    assert caught.value.problems[0].startswith(reported)
