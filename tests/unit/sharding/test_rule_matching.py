"""Every name has one rule: all names with none or two are reported."""

import pytest

from ftrun.errors import RulesMismatch
from ftrun.sharding.partition import SplitImpossible
from ftrun.sharding.rule_matching import OwningParameter, StateOwnership, match
from ftrun.sharding.rule_parser import read_rules
from ftrun.sharding.rules import SharingKind

TEXT = """
mesh: {pp: 2, tp: 2}
replicate:
  - "*.norm"
  - lonely
shard:
  - {name: "model.*", axis: tp, dim: 0}
own: [mine]
unique:
  - {name: "*.{n}.w", axis: pp, of: 4}
  - {name: "*.w", axis: pp, at: 0}
  - {name: "model.last", axis: pp, at: last}
"""
RULES = read_rules(TEXT, source="x.yaml")


def test_names_with_two_rules_and_with_none_are_all_listed() -> None:
    names = ["model.norm", "a.1.w", "b", "c", "model.up"]
    owner = OwningParameter("model.up", None)
    with pytest.raises(RulesMismatch) as caught:
        match(RULES, [*((name, None) for name in names), ("factor", owner)])
    assert caught.value.problems == (
        "model.norm is matched by replicate *.norm (line 4) and by shard model.* (line 7)",
        "a.1.w is matched by unique *.{n}.w (line 10) and by unique *.w (line 11)",
        "b matches no rule",
        "c matches no rule",
        "factor matches no rule, and does not have the shape of model.up",
    )


def test_the_first_ten_are_shown_and_the_others_counted() -> None:
    with pytest.raises(RulesMismatch) as caught:
        match(RULES, [(f"x{at}", None) for at in range(13)])
    text = str(caught.value)
    assert "x9 matches" in text
    assert "x10" not in text
    assert "and 3 more" in text
    assert text.startswith("x.yaml does not fit")


def test_state_has_the_rule_of_its_parameter_unless_it_has_its_own() -> None:
    found = match(
        RULES,
        [
            ("s.like", OwningParameter("model.last", StateOwnership.LIKE)),
            ("s.number", OwningParameter("model.last", StateOwnership.NUMBER)),
            ("model.last", None),
            ("lonely", OwningParameter("model.last", StateOwnership.LIKE)),
            ("mine", None),
            ("s.mine", OwningParameter("mine", StateOwnership.NUMBER)),
        ],
    )
    assert found["s.like"] == found["model.last"]
    assert found["s.number"].rule.kind is SharingKind.REPLICATE
    assert found["s.number"].places[0].coordinates(2) == {1}
    assert found["lonely"].places == ()
    assert found["s.mine"].rule.kind is SharingKind.OWN
    with pytest.raises(RulesMismatch):
        match(RULES, [("s", OwningParameter("nobody", StateOwnership.LIKE))])


def test_a_placement_that_matches_state_keeps_the_rule_of_the_parameter() -> None:
    text = """
mesh: {ep: 2, tp: 2, dp: 2}
shard: [{name: "model.experts.*.up", axis: tp, dim: 0}]
unique:
  - {name: "*experts.{e}.*", axis: ep, of: 4}
  - {name: "state.*", axis: dp, at: 0}
"""
    name = "model.experts.3.up"
    state = (f"state.{name}.mean", OwningParameter(name, StateOwnership.LIKE))
    found = match(read_rules(text, source="x"), [state, (name, None)])
    assert found[state[0]].rule == found[name].rule
    assert found[name].rule.kind is SharingKind.SHARD
    where = {one.axis: one.coordinates(2) for one in found[state[0]].places}
    assert where == {"ep": {1}, "dp": {0}}
    assert [one.axis for one in found[name].places] == ["ep"]
    orphan = match(read_rules(text, source="x"), [("state.w", state[1])])
    assert orphan["state.w"].rule.kind is SharingKind.REPLICATE


def test_strict_rules_want_a_rule_for_each_name() -> None:
    text = "mesh: {pp: 2}\nstrict: true\nunique: [{name: 'l.{n}.*', axis: pp, of: 2}]\n"
    with pytest.raises(RulesMismatch, match=r"l\.1\.w is placed by unique l\.\{n\}\.\*"):
        match(read_rules(text, source="x"), [("l.1.w", None)])
    known = read_rules(f"{text}replicate: ['l.*.w']", source="x")
    names = [("l.1.w", None), ("l.1.w.step", OwningParameter("l.1.w", StateOwnership.NUMBER))]
    assert all(one.places for one in match(known, names).values())


def test_where_a_number_lives() -> None:
    text = "mesh: {{pp: 2}}\nunique: [{{name: 'l.{{n}}', axis: pp, of: 5{}}}]"
    even = read_rules(text.format(""), source="x")
    found = match(even, [(f"l.{n}", None) for n in range(6)])
    assert [found[f"l.{n}"].places[0].coordinates(2) for n in range(5)] == [{0}, {0}, {0}, {1}, {1}]
    with pytest.raises(SplitImpossible, match="number 5 is not below of: 5"):
        found["l.5"].places[0].coordinates(2)
    sized = match(read_rules(text.format(", sizes: [1, 4]"), source="x"), [("l.1", None)])
    assert sized["l.1"].places[0].coordinates(2) == {1}
    with pytest.raises(SplitImpossible, match="2 runs of layers, and there are 5 for 3"):
        sized["l.1"].places[0].coordinates(3)
