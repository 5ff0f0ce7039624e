"""A world whose shards state their parts has the same layout as one that rules describe."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from ftrun.errors import RanksDiffer, RulesMismatch, TensorIncomplete
from ftrun.sharding.atoms import extract, one_rank, strip_padding, values_of_one_rank
from ftrun.sharding.part_layout import world_of_parts
from ftrun.sharding.rule_matching import OwningParameter, StateOwnership
from ftrun.sharding.rule_parser import carried, read_rules
from ftrun.sharding.rules import SharingKind
from ftrun.sharding.world_layout import WorldLayout
from ftrun.snapshot import plain_values as plain
from ftrun.snapshot.boxes import TensorPart
from ftrun.snapshot.layout import CopyTiming, LayoutEntry, make_layout
from ftrun.snapshot.plain_values import TensorRef
from ftrun.snapshot.shard_header import ShardHeader
from tests.unit.sharding.worlds import Array, moved

NO_DIGESTS = memoryview(b"").cast("Q")
LAZY, BOUNDARY = CopyTiming.LAZY, CopyTiming.BOUNDARY


def header(*entries: LayoutEntry) -> ShardHeader:
    return ShardHeader(make_layout(entries, plain_bytes=8), 0, NO_DIGESTS)


def part(name: str, shape: tuple[int, ...], whole: tuple[int, ...], *at: int) -> LayoutEntry:
    return LayoutEntry(name, "I64", shape, LAZY, part=TensorPart(whole, at or None))


def whole(name: str, *shape: int, when: CopyTiming = LAZY) -> LayoutEntry:
    return LayoutEntry(name, "I64", shape, when)


def parts_of(
    state: Mapping[str, Mapping[str, TensorRef]] | None = None, mesh: str = ""
) -> dict[str, bytes]:
    saved = {"optimizer_state": {"opt": {"state": state or {}}}}
    found = {name: plain.encode(value) for name, value in saved.items()}
    if mesh:
        found["layout"] = plain.encode(carried(read_rules(mesh, source="x")))
    return found


def world_of(*headers: ShardHeader, parts: dict[str, bytes] | None = None) -> WorldLayout:
    return world_of_parts(headers, [parts or parts_of()] * len(headers), source="it")


def test_parts_replicas_and_state_become_whole_tensors() -> None:
    """Two ranks of FSDP2 in each of two replicas, with uneven parts."""
    w = np.arange(1, 11).reshape(5, 2)
    cuts = [(0, 3), (3, 2), (0, 3), (3, 2)]
    arrays: list[dict[str, Array]] = [
        {"w": w[at : at + n], "m": -w[at : at + n], "step": np.array(7), "seen": np.array([at])}
        for at, n in cuts
    ]
    headers = [
        header(
            part("w", (n, 2), (5, 2), at, 0),
            part("m", (n, 2), (5, 2), at, 0),
            whole("step"),
            whole("seen", 1, when=BOUNDARY),
        )
        for at, n in cuts
    ]
    state = {
        "w": {"m": TensorRef("m"), "step": TensorRef("step")},
        "lost": {"m": TensorRef("seen")},
    }
    world = world_of(*headers, parts=parts_of(state))
    assert world.mesh.size == 4
    assert world.wholes["m"].owner == OwningParameter("w", StateOwnership.LIKE)
    assert world.wholes["step"].owner == OwningParameter("w", StateOwnership.NUMBER)
    assert world.wholes["seen"].owner is None
    assert world.entries[0]["w"] is world.entries[2]["w"]
    assert world.entries[0]["w"] is not world.entries[1]["w"]
    assert world.sharing["seen"].rule.kind is SharingKind.OWN
    assert [f.part for _, f in extract(world) if f.entry == "w"] == ["0-of-2", "1-of-2"]
    assert [f.part for _, f in extract(world) if f.entry == "seen"] == ["0-of-1"]
    one = one_rank(world)
    (found,) = moved(world, arrays, one_rank_of(one, "seen"))
    assert np.array_equal(found["w"], w)
    assert np.array_equal(found["m"], -w)
    assert found["step"] == 7
    assert {f.entry: f.shape for f in strip_padding(one)}["w"] == (5, 2)


def one_rank_of(one: WorldLayout, *without: str) -> WorldLayout:
    entries = {name: placed for name, placed in one.entries[0].items() if name not in without}
    return WorldLayout(one.rules, one.wholes, one.sharing, one.names, (entries,))


def test_state_of_another_shape_follows_no_rule() -> None:
    state = {"w": {"factor": TensorRef("f")}}
    world = world_of(header(whole("w", 4, 2), whole("f", 4)), parts=parts_of(state))
    assert world.wholes["f"].owner == OwningParameter("w", None)


def test_empty_parts_hold_nothing() -> None:
    world = world_of(header(part("w", (2,), (2,), 0)), header(part("w", (0,), (2,), 2)))
    assert world.entries[1]["w"].patches == ()
    assert world.entries[1]["w"].shape == (0,)


@pytest.mark.parametrize(
    ("mesh", "names", "axes"),
    [
        ("mesh: {pp: 2}", ("a", "b"), ["pp"]),
        ("mesh: {dp: 2}", ("a", "b"), []),
        ("", ("a", "b"), ["dp"]),
        ("", ("a", "a"), []),
    ],
)
def test_ranks_are_stages_where_the_mesh_or_their_tensors_say_it(
    mesh: str, names: Sequence[str], axes: list[str]
) -> None:
    headers = [header(whole(name, 3)) for name in names]
    world = world_of(*headers, parts=parts_of(mesh=mesh))
    assert [one.axis for one in world.rules.placements] == axes
    assert list(world.wholes) == list(dict.fromkeys(names))
    assert world.has_module(1, "a")


def test_what_is_no_one_tensor_is_refused() -> None:
    with pytest.raises(TensorIncomplete, match="w"):
        world_of(header(part("w", (2,), (4,), 0)))
    with pytest.raises(TensorIncomplete):
        world_of(header(part("w", (2,), (4,))), header(part("w", (2,), (4,), 2)))
    with pytest.raises(RanksDiffer):
        world_of(header(whole("w", 3)), header(whole("w", 4)))
    with pytest.raises(RulesMismatch, match=r"ftrun\.dcp"):
        world_of_parts([header(whole("w", 3))], [{}], source="it")


def test_groups_that_only_a_later_stage_has_are_kept_and_other_settings_refused() -> None:
    held = [["model.a.w"], ["model.b.w", "model.c.w"]]
    headers = [header(*(whole(name, 3) for name in names)) for names in held]
    parts = [stage_parts(names[0], is_training=True) for names in held]
    for one in parts:
        one["optimizer_state"] = plain.encode({"opt": {"state": {}}})
    groups = [{"lr": 0.1, "params": [name]} for name in ("model.a.w", "model.b.w")]
    further = {"lr": 0.2, "params": ["model.c.w"]}
    parts[0]["groups"] = plain.encode({"opt": [groups[0]]})
    parts[1]["groups"] = plain.encode({"opt": [groups[1], further], "other": [further]})
    world = world_of_parts(headers, parts, source="it")
    found = plain.decode(values_of_one_rank(parts, world, one_rank(world))["groups"])
    joined = {"lr": 0.1, "params": ["model.a.w", "model.b.w"]}
    assert found == {"opt": [joined, further], "other": [further]}
    parts[1]["groups"] = plain.encode({"opt": [further, groups[1]]})
    with pytest.raises(RulesMismatch) as caught:
        values_of_one_rank(parts, world, one_rank(world))
    assert "opt.param_groups[0].lr is 0.1 on rank 0 and 0.2 on rank 1" in str(caught.value)


def stage_parts(name: str, *, is_training: bool) -> dict[str, bytes]:
    """The plain values of a stage that has one layer, with extra state and a mode of its own."""
    module = name.rpartition(".")[0]
    values: dict[str, object] = {
        "groups": {"opt": [{"lr": 0.1, "params": [name]}]},
        "optimizer_state": {"opt": {"state": {name: {"m": TensorRef(f"{name}.m", "sharded")}}}},
        "extra_state": {module: {"calls": 3}},
        "training": {module: is_training},
        "learned_others": [],
        "gradients": {"usual": True, "except": []},
        "modules": {"names": ["model"], "tied": {}, "buffers": [], "no_buffers": []},
        "frozen": [],
        "rng": {"torch": name.encode()},
        "generators": {},
        "loaders": {},
    }
    return {key: plain.encode(value) for key, value in values.items()}


@pytest.mark.parametrize("mesh", ["mesh: {pp: 2}", ""])
def test_one_rank_has_the_plain_values_of_all_stages(mesh: str) -> None:
    names = ["model.a.w", "model.b.w"]
    headers = [header(whole(name, 3), whole(f"{name}.m", 3)) for name in names]
    parts = [stage_parts(name, is_training=at > 0) for at, name in enumerate(names)]
    if mesh:
        for one in parts:
            one["layout"] = plain.encode(carried(read_rules(mesh, source="x")))
    world = world_of_parts(headers, parts, source="it")
    found = values_of_one_rank(parts, world, one_rank(world))
    made = {key: plain.decode(part) for key, part in found.items()}
    assert made["groups"] == {"opt": [{"lr": 0.1, "params": names}]}
    assert made["optimizer_state"]["opt"]["state"] == {
        name: {"m": TensorRef(f"{name}.m")} for name in names
    }
    assert made["extra_state"] == {"model.a": {"calls": 3}, "model.b": {"calls": 3}}
    assert made["training"] == {"model.a": False, "model.b": True}
    assert made["rng"] == {"torch": b"model.a.w"}
    assert read_rules(made["layout"]["text"], source="x").mesh.size == 1
