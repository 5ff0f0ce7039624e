"""Every new rank has plain values as if it had taken the snapshot itself."""

from typing import Any

from ftrun.sharding.rank_values import RankValues
from ftrun.sharding.rule_parser import read_rules
from ftrun.sharding.world_layout import StoredEntry, lay_out, read_world
from ftrun.snapshot import plain_values as plain
from ftrun.snapshot.plain_values import TensorRef
from ftrun.snapshot.regroup import DERIVED

RULES = """
mesh: {{pp: {pp}, dp: {dp}, tp: {tp}}}
replicate: [a, b]
unique:
  - {{name: "l.{{n}}*", axis: pp, of: 2}}
"""


def feed(handed_out: int) -> dict[str, Any]:
    return {"handed_out": handed_out, "started_with": None, "own": None}


def parts_of(rank: int, names: list[str]) -> dict[str, bytes]:
    stage, data = divmod(rank, 4)[0], divmod(rank, 2)[0] % 2
    state = {name: {"mean": TensorRef(f"s.{name}")} for name in names}
    parts = {
        "session": {"step": 7},
        "groups": {"opt": [{"lr": 0.1, "params": names}, {"lr": 0.2, "params": []}]},
        "optimizer_state": {"opt": {"state": {**state, "calls": {"n": stage}}}},
        "frozen": [names[0]],
        "extra_state": {name: bytes([rank]) for name in ("root", names[-1])},
        "rng": {"torch": bytes([data])},
        "generators": {"dice": bytes([data]), "shared": b"same"},
        "loaders": {"loader": feed(4)},
        "dicts": {"rank": rank},
    }
    return {name: plain.encode(value) for name, value in parts.items()}


def made(**sizes: int) -> tuple[RankValues, list[dict[str, Any]]]:
    """The plain values of all ranks of another world than pp 2, dp 2, tp 2."""
    names = [["a", "b", "l.0"]] * 4 + [["a", "b", "l.1"]] * 4
    stored = [
        [
            stored
            for name in held
            for stored in (
                StoredEntry(name, "F32", (2,)),
                StoredEntry(f"s.{name}", "F32", (2,), name),
            )
        ]
        for held in names
    ]
    before = {"pp": 2, "dp": 2, "tp": 2}
    source = read_world(read_rules(RULES.format(**before), source="x"), stored)
    target = lay_out(read_rules(RULES.format(**{**before, **sizes}), source="y"), source)
    values = RankValues([parts_of(rank, held) for rank, held in enumerate(names)], source, target)
    encoded = [plain.decode(values.of(rank)) for rank in range(target.mesh.size)]
    return values, [{k: plain.decode(part) for k, part in parts.items()} for parts in encoded]


def test_the_same_world_has_the_same_values() -> None:
    values, found = made()
    for rank, parts in enumerate(found):
        names = ["a", "b", f"l.{rank // 4}"]
        assert parts["dicts"] == {"rank": rank}
        assert parts["groups"]["opt"][0] == {"lr": 0.1, "params": names}
        assert parts["loaders"] == {"loader": feed(4)}
        assert set(parts["optimizer_state"]["opt"]["state"]) == {*names, "calls"}
        assert parts["rng"] == {"torch": bytes([rank // 2 % 2])}
        assert parts["layout"]["mesh"] == {"pp": 2, "dp": 2, "tp": 2}
    assert values.notes() == []


def test_stages_that_become_one_have_all_their_parameters_in_order() -> None:
    _, found = made(pp=1)
    assert len(found) == 4
    for parts in found:
        assert parts["groups"]["opt"][0]["params"] == ["a", "b", "l.0", "l.1"]
        assert parts["groups"]["opt"][1] == {"lr": 0.2, "params": []}
        assert parts["optimizer_state"]["opt"]["state"]["l.1"]["mean"] == TensorRef("s.l.1")
        assert parts["frozen"] == ["a"]
    assert [parts["dicts"]["rank"] for parts in found] == [0, 1, 2, 3]


def test_what_modules_keep_goes_where_they_live() -> None:
    _, found = made(pp=1, tp=1)
    assert [parts["extra_state"] for parts in found] == [
        {"root": b"\0", "l.0": b"\0", "l.1": b"\4"},
        {"root": b"\2", "l.0": b"\2", "l.1": b"\6"},
    ]
    _, found = made(dp=1, tp=1)
    assert [parts["extra_state"] for parts in found] == [
        {"root": b"\0", "l.0": b"\0"},
        {"root": b"\4", "l.1": b"\4"},
    ]


def test_data_and_random_numbers_go_by_the_axis_of_batches() -> None:
    values, found = made(dp=3, tp=1)
    first = found[:3]
    assert [parts["dicts"]["rank"] for parts in first] == [0, 2, 0]
    assert [parts["loaders"]["loader"]["handed_out"] for parts in first] == [3, 3, 3]
    assert [DERIVED in parts["rng"] for parts in first] == [False, False, True]
    assert first[2]["rng"]["number"] == 2
    assert isinstance(first[2]["generators"]["dice"], int)
    assert first[2]["generators"]["shared"] == b"same"
    (note,) = values.notes()
    assert "2 ranks have used 8 batches" in note
    assert "3 ranks" in note


def test_ranks_that_see_the_same_data_have_the_same_random_numbers() -> None:
    _, found = made(tp=3)
    assert [parts["rng"]["torch"] for parts in found[:6]] == [b"\0"] * 3 + [b"\1"] * 3
    assert [parts["loaders"] for parts in found] == [{"loader": feed(4)}] * 12
