"""Exported tensors have the names of the script's own state dicts; omissions are reported."""

from typing import Any

import pytest

from ftrun.errors import CheckpointError
from ftrun.snapshot.plain_values import TensorRef, refs_in
from ftrun.tools.export.selection import (
    ExportOutline,
    NameFilter,
    natural,
    outline_of,
    replaced,
)

HELD = ["model.b.10.w", "model.b.2.w", "model.wte", "table", "optimizer.params[0][2]"]
GROUPS = [{"params": ["model.wte", "model.b.2.w"], "lr": 0.1}, {"params": ["model.b.10.w"]}]
STATES = {"optimizer": {"model.b.10.w": {"exp_avg": TensorRef("x")}, "own": 3}}
PARTS: dict[str, Any] = {
    "modules": {"names": ["model"], "tied": {"model.head": "model.wte"}},
    "groups": {"optimizer": GROUPS},
    "stateful": {"scheduler": {"last": [1, TensorRef("scheduler.last[1]")]}},
    "dicts": {"progress": {"best": 0.5}},
    "extra_state": {"model": 1, "model.b": 2},
    "session": {"step": 4},
}


def outline(*patterns: str, **other: Any) -> ExportOutline:
    return outline_of({**PARTS, **other}, STATES, other.get("held", HELD), NameFilter(patterns))


def test_a_module_has_its_own_names_and_all_of_them() -> None:
    found = outline()
    assert list(found.modules["model"]) == ["b.2.w", "b.10.w", "head", "wte"]
    assert found.flat() == (
        {"wte": "model.wte", "b.2.w": "model.b.2.w", "b.10.w": "model.b.10.w"},
        {"head": "wte"},
    )
    assert found.tensors == ["optimizer.params[0][2]", "table"]
    assert found.others == [
        "model._extra_state",
        "model.b._extra_state",
        "optimizer.params[0][2]",
        "table",
        "optimizer",
        "scheduler",
        "progress",
    ]


def test_the_name_that_is_wanted_of_a_tied_tensor_is_the_one_it_gets() -> None:
    assert outline("model.head").flat() == ({"head": "model.wte"}, {})


def test_several_modules_lead_their_names() -> None:
    modules = {"names": ["model.gen", "model.dis"], "tied": {"model.dis.w": "model.gen.w"}}
    found = outline("model.*", modules=modules, held=["model.gen.w", "model.dis.v"], extra_state={})
    assert found.flat() == (
        {"model.gen.w": "model.gen.w", "model.dis.v": "model.dis.v"},
        {"model.dis.w": "model.gen.w"},
    )
    assert set(found.tree(by_index=True)) == {"model.gen", "model.dis"}


def test_a_tree_by_names_is_what_distributed_checkpoints_have() -> None:
    tree = outline().tree(by_index=False)
    assert tree["model"]["head"] == TensorRef("model.wte")
    assert (tree["model"]["_extra_state"], tree["model"]["b._extra_state"]) == (1, 2)
    assert tree["optimizer"] == {
        "state": {"b.10.w": {"exp_avg": TensorRef("x")}, "own": 3},
        "param_groups": [{"params": ["wte", "b.2.w"], "lr": 0.1}, {"params": ["b.10.w"]}],
    }
    assert tree["table"] == TensorRef("table")
    assert tree["scheduler"] == PARTS["stateful"]["scheduler"]
    assert tree["ftrun"] == {"step": 4}


def test_a_tree_by_index_is_what_an_optimizer_loads() -> None:
    assert outline("optimizer").tree(by_index=True) == {
        "optimizer": {
            "state": {2: {"exp_avg": TensorRef("x")}, "own": 3},
            "param_groups": [{"params": [0, 1], "lr": 0.1}, {"params": [2]}],
        }
    }


def test_parameters_of_several_modules_keep_their_whole_names() -> None:
    groups = {"optimizer": [{"params": ["model.wte", "table"]}]}
    tree = outline(groups=groups).tree(by_index=False)
    assert tree["optimizer"]["param_groups"] == groups["optimizer"]


def test_only_a_modules_extra_state_may_be_wanted() -> None:
    assert outline("model.b._extra_state").tree(by_index=True) == {"model": {"b._extra_state": 2}}


def test_a_pattern_that_matches_nothing_is_an_error_that_lists_what_there_is() -> None:
    reported = r"'modle\.\*' matches nothing; existing names: model"
    with pytest.raises(CheckpointError, match=reported):
        outline("progress", "modle.*")
    with pytest.raises(CheckpointError, match=r"scheduler and 1 more$"):
        outline("x")
    with pytest.raises(CheckpointError, match=r"existing names: progress$"):
        NameFilter(["a"], ["progress"]).check_all_used()


def test_what_an_older_ftrun_has_written_has_modules_by_their_dots() -> None:
    parts = {name: part for name, part in PARTS.items() if name != "modules"}
    found = outline_of(parts, STATES, HELD, NameFilter())
    assert set(found.modules) == {"model"}
    assert "head" not in found.modules["model"]
    assert found.tensors == ["optimizer.params[0][2]", "table"]


def test_references_are_found_and_replaced_wherever_they_are() -> None:
    tree = {"a": [TensorRef("1"), (TensorRef("2"), {3})], 4: {5: TensorRef("6")}}
    assert [ref.name for ref in refs_in(tree)] == ["1", "2", "6"]
    made = replaced(tree, lambda leaf: leaf.name if isinstance(leaf, TensorRef) else -leaf)
    assert made == {"a": ["1", ("2", {-3})], 4: {5: "6"}}


def test_numbers_in_names_are_numbers() -> None:
    assert sorted(["a.10", "a.9", "a", "b.1", "10", "9"], key=natural) == [
        "9", "10", "a", "a.9", "a.10", "b.1",
    ]  # fmt: skip
