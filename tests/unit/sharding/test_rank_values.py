"""Every new rank has plain values as if it had taken the snapshot itself."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrun.sharding.rank_values import (
    DERIVED,
    RankValues,
    WorldResize,
    batches_used,
    generators,
    loader,
    loader_note,
    streams,
)
from ftrun.sharding.rule_parser import read_rules
from ftrun.sharding.world_layout import StoredEntry, lay_out, read_world
from ftrun.snapshot import plain_values as plain
from ftrun.snapshot.plain_values import TensorRef, decode, encode
from ftrun.worker.state import determinism as rng

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
        "own_keys": {names[-1]: {"key": rank}} if stage else {},
        "training": {"root": True, names[-1]: False} if stage else {"root": True},
        "learned_others": [f"s.{names[-1]}"] if stage else ["s.a"],
        "gradients": {"usual": not stage, "except": [names[-1]]},
        "modules": {
            "names": ["root"],
            "tied": {f"{names[-1]}.tied": names[-1]},
            "buffers": [names[-1]],
            "no_buffers": [f"{names[-1]}.none"],
            "strides": {names[-1]: (1, stage)},
        },
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


def test_flags_of_modules_and_tensors_go_where_they_live() -> None:
    _, (found,) = made(pp=1, dp=1, tp=1)
    assert found["own_keys"] == {"l.1": {"key": 4}}
    assert found["training"] == {"root": True, "l.1": False}
    assert found["learned_others"] == ["s.a", "s.l.1"]
    # Of the second stage, where that is the exception, l.1 has a gradient.
    assert found["gradients"] == {"usual": True, "except": ["l.0"]}
    assert found["modules"] == {
        "names": ["root"],
        "tied": {"l.0.tied": "l.0", "l.1.tied": "l.1"},
        "buffers": ["l.0", "l.1"],
        "no_buffers": ["l.0.none", "l.1.none"],
        "strides": {"l.0": (1, 0), "l.1": (1, 1)},
    }
    _, found_of_both = made(dp=1, tp=1)
    assert [parts["training"] for parts in found_of_both] == [
        {"root": True}, {"root": True, "l.1": False}
    ]  # fmt: skip
    assert [parts["modules"]["buffers"] for parts in found_of_both] == [["l.0"], ["l.1"]]


def test_layers_that_are_numbered_anew_keep_their_flags() -> None:
    rules = """
mesh: {{pp: {pp}}}
unique:
  - {{name: "m.{{n}}.*", axis: pp, of: 2, numbered: anew}}
"""
    held = [[StoredEntry("m.0.w", "F32", (2,))]] * 2
    parts = [
        {
            **parts_of(4 * stage, ["m.0.w"]),
            "extra_state": plain.encode({}),
            "optimizer_state": plain.encode({"opt": {"state": {}}}),
            "own_keys": plain.encode({"m.0": {"key": stage}}),
            "training": plain.encode({"m": True, "m.0": False} if stage else {"m": True}),
            "learned_others": plain.encode([]),
            "gradients": plain.encode({"usual": True, "except": ["m.0.w"] if stage else []}),
            "modules": plain.encode({"names": ["m"], "buffers": ["m.0.w"], "no_buffers": []}),
            "frozen": plain.encode([]),
        }
        for stage in range(2)
    ]
    source = read_world(read_rules(rules.format(pp=2), source="x"), held)
    target = lay_out(read_rules(rules.format(pp=1), source="y"), source)
    encoded = plain.decode(RankValues(parts, source, target).of(0))
    assert plain.decode(encoded["own_keys"]) == {"m.0": {"key": 0}, "m.1": {"key": 1}}
    assert plain.decode(encoded["training"]) == {"m": True, "m.1": False}
    assert plain.decode(encoded["gradients"]) == {"usual": True, "except": ["m.1.w"]}
    assert plain.decode(encoded["modules"])["buffers"] == ["m.0.w", "m.1.w"]


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


counts = st.lists(st.integers(0, 50), min_size=1, max_size=6)


def feed_of(handed_out: int, *, own: object = None, seed: int | None = None) -> dict[str, object]:
    began = None
    if seed is not None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        generator = torch.Generator().manual_seed(seed)
        began = {"rng": rng.take_all(), "generators": {"loader": rng.generator_bytes(generator)}}
    return {
        "pass": 2,
        "handed_out": handed_out,
        "started_with": began,
        "had_workers": False,
        "own": own,
    }


@settings(deadline=None)
@given(counts, st.integers(1, 7))
def test_no_sample_is_seen_twice_and_less_than_a_batch_of_each_rank_is_left_out(
    handed_out: list[int], size: int
) -> None:
    states = [feed_of(count) for count in handed_out]
    resize = WorldResize(0, len(states), size)
    used = batches_used(states, resize) * size
    assert 0 <= used - sum(handed_out) < size
    for rank in range(size):
        state = loader(states, WorldResize(rank, len(states), size))
        assert state["handed_out"] * size == used
        assert (state["pass"], state["own"], state["resized"]) == (2, None, True)


def test_a_new_rank_has_other_generators_of_its_loader_than_the_old_ones() -> None:
    states = [
        {**feed_of(0), "generators": feed_of(0, seed=seed)["started_with"]["generators"]}  # type: ignore[index]
        for seed in range(2)
    ]
    found = [loader(states, WorldResize(rank, 2, 3))["generators"]["loader"] for rank in range(3)]
    assert found[:2] == [state["generators"]["loader"] for state in states]
    assert isinstance(found[2], int)


def test_what_happens_to_a_loader_is_reported() -> None:
    resize = WorldResize(0, 3, 4)
    assert loader_note("loader", [feed_of(0)] * 3, resize) is None
    note = loader_note("loader", [feed_of(6)] * 3, resize)
    assert note is not None
    assert "3 ranks have used 18 batches" in note
    assert "after 5 in each of 4 ranks" in note
    assert "2 batches are skipped" in note
    own = loader_note("loader", [feed_of(6, own={"at": 6})] * 3, WorldResize(0, 3, 2))
    assert own is not None
    assert "skipped" not in own
    assert "dropped" in own


def taken(seed: int) -> dict[str, object]:
    found = feed_of(0, seed=seed)["started_with"]["rng"]  # type: ignore[index]
    return decode(encode(found))  # type: ignore[no-any-return]


def draw(states: dict[str, object]) -> tuple[float, float, float]:
    rng.put_back(states)
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_a_rank_that_was_there_continues_with_its_own_random_numbers() -> None:
    old = [taken(seed) for seed in range(3)]
    for rank in range(2):
        assert draw(streams(old, WorldResize(rank, 3, 2))) == draw(old[rank])


def test_a_rank_that_was_not_there_draws_as_no_other_does_and_the_same_each_time() -> None:
    old = [taken(seed) for seed in range(2)]
    drawn = [draw(streams(old, WorldResize(rank, 2, 6))) for rank in range(6)]
    for stream in zip(*drawn, strict=True):
        assert len(set(stream)) == 6
    assert drawn[5] == draw(streams(old, WorldResize(5, 2, 6)))


@pytest.mark.parametrize("size", [1, 2])
def test_a_stream_that_several_ranks_have_in_common_stays_in_common(size: int) -> None:
    old = [{**taken(9), "python": taken(seed)["python"]} for seed in range(size)]
    python, numpy, own = draw(streams(old, WorldResize(3, size, 4)))
    shared = draw(taken(9))
    assert ((numpy, own) == shared[1:]) == (size > 1)
    assert python not in {draw(state)[0] for state in old}


def test_generators_continue_or_get_a_seed() -> None:
    made = [{"dice": bytes([seed]), "shared": b"same"} for seed in range(2)]
    assert generators(made, WorldResize(1, 2, 3)) == made[1]
    derived = generators(made, WorldResize(2, 2, 3))
    assert derived["shared"] == b"same"
    assert isinstance(derived["dice"], int)
    assert derived == generators(made, WorldResize(2, 2, 3))


def test_the_shuffle_of_a_pass_is_that_of_the_old_rank_or_a_derived_one() -> None:
    states = [feed_of(4, seed=seed) for seed in range(2)]
    kept = loader(states, WorldResize(1, 2, 3))["started_with"]
    assert kept == states[1]["started_with"]
    derived = loader(states, WorldResize(2, 2, 3))["started_with"]
    drawn = set()
    for state in (*kept["generators"].values(), *derived["generators"].values()):
        generator = torch.Generator()
        rng.set_generator(generator, state)
        drawn.add(float(torch.rand((), generator=generator)))
    assert len(drawn) == 2


def test_what_follows_from_what_follows_is_another_one_again() -> None:
    old = [taken(seed) for seed in range(2)]
    once = [streams(old, WorldResize(rank, 2, 3)) for rank in range(3)]
    twice = streams(decode(encode(once)), WorldResize(5, 3, 6))
    assert twice[DERIVED] == once[2]
    assert len({draw(states)[2] for states in (*old, *once, twice)}) == 4
