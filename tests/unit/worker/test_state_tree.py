"""Names and sources of a state do not depend on how the model is wrapped."""

from collections.abc import Callable
from enum import IntEnum
from threading import Lock
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ftrun.errors import UsageError, ValueNotStorable
from ftrun.snapshot.layout import CopyTiming
from ftrun.snapshot.plain_values import decode
from ftrun.worker.state.attached import AttachedState, Skip, by_name
from ftrun.worker.state.module_state import every_name, unwrapped
from ftrun.worker.state.state_tree import StateTree
from ftrun.worker.state.tensors import home_of, kind_of


def tree_of(**given: object) -> StateTree:
    attached = AttachedState()
    for argument, thing in given.items():
        for name, one in by_name(argument, thing).items():
            attached.add(name, one)
    return StateTree(attached)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))


def names(tree: StateTree) -> list[str]:
    return [source.name for source in tree.persistent().sources]


def test_a_compiled_model_has_the_names_of_the_bare_one() -> None:
    bare = model()
    compiled = torch.compile(bare, backend="eager")
    assert names(tree_of(model=compiled)) == names(tree_of(model=bare))
    assert "model.0.weight" in names(tree_of(model=bare))
    assert unwrapped(compiled) is bare


def test_only_what_an_optimizer_owns_is_lazy() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net[0].parameters())
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    found = {s.name: s.when for s in tree_of(model=net, optimizer=optimizer).persistent().sources}
    assert found["model.0.weight"] is CopyTiming.LAZY
    assert found["optimizer.state.model.0.weight.exp_avg"] is CopyTiming.LAZY
    assert found["model.1.weight"] is CopyTiming.BOUNDARY
    assert found["model.1.running_mean"] is CopyTiming.BOUNDARY


def test_tied_parameters_are_taken_once() -> None:
    net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    net[1].weight = net[0].weight
    assert names(tree_of(model=net)) == ["model.0.weight"]


def modules_of(tree: StateTree) -> dict[str, object]:
    return decode(tree.persistent().modules)


def test_all_names_of_tied_tensors_are_noted() -> None:
    net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False))
    net[2].weight = net[0].weight
    net.add_module("again", net[1])
    wrapped = nn.Sequential(torch.compile(net, backend="eager"))
    noted = modules_of(tree_of(model={"a": wrapped, "b": net[0]}))
    assert noted["names"] == ["model.a", "model.b"]
    tied = noted["tied"]
    assert tied == {
        "model.a.0.2.weight": "model.a.0.0.weight",
        "model.b.weight": "model.a.0.0.weight",
        **{f"model.a.0.again.{name}": f"model.a.0.1.{name}" for name in net[1].state_dict()},
    }


def test_names_are_those_of_a_state_dict() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    net.register_buffer("cache", torch.zeros(2), persistent=False)
    net.register_parameter("none", None)
    net.add_module("again", net[0])
    found = [name for name, _ in every_name(net, "model")]
    assert sorted(found) == sorted(f"model.{name}" for name in net.state_dict())


def test_buffers_that_are_not_saved_by_torch_are_left_out() -> None:
    net = nn.Module()
    net.register_buffer("cache", torch.zeros(2), persistent=False)
    assert names(tree_of(model=net)) == []


def test_a_parameter_outside_of_the_model_is_named_by_its_group() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    assert names(tree_of(model=model(), optimizer=optimizer))[-1] == "optimizer.params[0][0]"


def change_nothing(_: nn.Module, __: torch.optim.Optimizer) -> None:
    pass


def replace_parameter(net: nn.Module, _: torch.optim.Optimizer) -> None:
    net[0].weight = nn.Parameter(torch.zeros(3, 3))


def replace_memory(net: nn.Module, _: torch.optim.Optimizer) -> None:
    net[0].weight.data = torch.zeros(3, 3)


def add_module(net: nn.Module, _: torch.optim.Optimizer) -> None:
    net.add_module("extra", nn.Linear(1, 1))


def add_group(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": list(net[1].parameters())})


def make_state(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    "change", [change_nothing, replace_parameter, replace_memory, add_module, add_group, make_state]
)
def test_the_walk_is_repeated_when_something_changed(change: object) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net[0].parameters())
    tree = tree_of(model=net, optimizer=optimizer)
    before = tree.persistent()
    assert callable(change)
    change(net, optimizer)
    assert (tree.persistent() is before) == (change is change_nothing)


def shrink(queue: torch.Tensor) -> None:
    queue.resize_(2, 3)


def transpose(queue: torch.Tensor) -> None:
    queue.t_()


def narrow(queue: torch.Tensor) -> None:
    queue.data = queue.data[:2]


def reinterpret(queue: torch.Tensor) -> None:
    queue.data = queue.data.view(torch.int32)


@pytest.mark.parametrize("change", [shrink, transpose, narrow, reinterpret])
def test_a_tensor_that_changes_in_place_has_a_new_source(change: object) -> None:
    queue = torch.arange(9.0).reshape(3, 3)
    tree = tree_of(model=model(), queue=queue)
    before = tree.persistent()
    assert tree.persistent() is before
    assert callable(change)
    change(queue)
    source = tree.persistent().sources[-1]
    assert source.name == "queue"
    assert source.tensor.is_set_to(queue)
    assert source.tensor.dtype == queue.dtype


def replace_child(net: nn.Module) -> None:
    net[1] = nn.BatchNorm1d(3)  # as many tensors as before


def replace_in_list(state: dict[str, object]) -> None:
    state["nested"][0] = torch.zeros(2)


def replace_in_dict(state: dict[str, object]) -> None:
    state["nested"][1]["a"] = torch.zeros(2)


def append(state: dict[str, object]) -> None:
    state["nested"].append(torch.zeros(2))


def change_array(state: dict[str, object]) -> None:
    state["array"][0] += 1


@pytest.mark.parametrize("change", [replace_in_list, replace_in_dict, append, change_array])
def test_the_walk_is_repeated_when_nested_state_has_changed(change: object) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net[0].parameters())
    make_state(net, optimizer)
    state = optimizer.state[net[0].weight]
    state["nested"] = [torch.ones(2), {"a": torch.ones(2)}]
    if change is change_array:
        state["array"] = np.zeros((2, 2))[:, 0]
    tree = tree_of(model=net, optimizer=optimizer)
    before = tree.persistent()
    assert callable(change)
    assert (tree.persistent() is before) == (change is not change_array)
    change(state)
    assert tree.persistent() is not before


def test_a_child_that_was_replaced_by_one_like_it_is_seen() -> None:
    net = model()
    tree = tree_of(model=net)
    before = tree.persistent()
    replace_child(net)
    assert any(one is net[1].weight for one in tree.persistent().originals)
    assert tree.persistent() is not before


def test_training_flags_are_noted_where_they_differ_from_the_parent() -> None:
    net = nn.Sequential(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)), nn.Dropout())
    net[0].eval()
    net[0][1].train()
    flags = decode(decode(tree_of(model=net).collect({}).plain)["training"])
    assert flags == {"model": True, "model.0": False, "model.0.1": True}


@pytest.mark.parametrize("value", [torch.zeros(2).to_sparse(), torch.zeros(2, device="meta")])
def test_a_tensor_without_bytes_of_its_own_is_named(value: torch.Tensor) -> None:
    net = nn.Module()
    net.register_buffer("odd", value)
    with pytest.raises(ValueNotStorable) as caught:
        tree_of(model=net).persistent()
    assert caught.value.key == "model.odd"


def test_a_tensor_among_plain_values_comes_back_on_the_kind_of_device_it_was_on() -> None:
    tensor = torch.ones(2)
    assert kind_of(tensor) == "tensor"
    assert home_of("tensor") == tensor.device
    assert kind_of(torch.empty(2, device="meta")) == "tensor@meta"
    assert home_of("tensor@meta").type == "meta"


class Noted(nn.Linear):
    """With extra state, and a key of its own that it does not take back."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.extra: object = {"seen": 1}
        self.count: object = {"n": 1}

    def get_extra_state(self) -> object:
        return self.extra

    def set_extra_state(self, state: object) -> None:
        self.extra = state

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "count"] = self.count


class Ema:
    """An object with a state."""

    def __init__(self) -> None:
        self.state: object = {"decay": 0.9}

    def state_dict(self) -> object:
        return self.state

    def load_state_dict(self, state: object) -> None:
        self.state = state


class Level(IntEnum):
    """An int with a name."""

    HIGH = 3


class Script:
    """What a script attaches, and may spoil later."""

    def __init__(self) -> None:
        self.model = Noted()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.group = self.optimizer.param_groups[0]
        self.group["fn"] = abs
        self.progress: dict[Any, Any] = {"best": 1}
        self.ema = Ema()

    def attached(self, *skip: str) -> AttachedState:
        found = AttachedState(skip=Skip(skip))
        for name in ("model", "optimizer", "progress", "ema"):
            found.add(name, getattr(self, name))
        return found


def set_in(holder: str, key: Any, value: Any) -> Callable[[Script, AttachedState], None]:
    def corrupt(script: Script, attached: AttachedState) -> None:
        getattr(attached if holder == "state" else script, holder)[key] = value

    return corrupt


def in_state(key: Any, value: object) -> Callable[[Script, AttachedState], None]:
    def corrupt(script: Script, _: AttachedState) -> None:
        script.optimizer.state[script.model.weight if key is None else key] = value

    return corrupt


def set_attribute(owner: str, name: str, value: object) -> Callable[[Script, AttachedState], None]:
    def corrupt(script: Script, _: AttachedState) -> None:
        setattr(getattr(script, owner), name, value)

    return corrupt


def add_sparse_buffer(script: Script, _: AttachedState) -> None:
    script.model.register_buffer("odd", torch.zeros(2).to_sparse())


CORRUPTED: dict[str, Callable[[Script, AttachedState], None]] = {
    "optimizer[0].cache": set_in("group", "cache", Lock()),
    "optimizer[0].cache.lock": set_in("group", "cache", {"lock": Lock()}),
    "optimizer[0].fns[1]": set_in("group", "fns", [1, Lock()]),
    "optimizer[0].fn": set_in("group", "fn", len),
    "optimizer.state.model.weight.lock": in_state(None, {"lock": Lock()}),
    "optimizer.state.model.weight": in_state(None, Lock()),
    "optimizer.state.shared.lock": in_state("shared", {"lock": Lock()}),
    "optimizer.state[a tensor of shape [3]]": in_state(torch.zeros(3), {"step": 1}),
    "progress.lock": set_in("progress", "lock", Lock()),
    "progress.notes[1]": set_in("progress", "notes", [0, Lock()]),
    "progress.kinds{}": set_in("progress", "kinds", {object}),
    "progress key <class 'object'>": set_in("progress", object, 1),
    "progress[3]": set_in("progress", 3, Lock()),
    "progress.level": set_in("progress", "level", Level.HIGH),
    "session.state.lock": set_in("state", "lock", Lock()),
    "ema": set_attribute("ema", "state", Lock()),
    "ema.lock": set_attribute("ema", "state", {"lock": Lock()}),
    "model._extra_state": set_attribute("model", "extra", Lock()),
    "model._extra_state.lock": set_attribute("model", "extra", {"lock": Lock()}),
    "model.state_dict().count": set_attribute("model", "count", 2),
    "model.state_dict().count.lock": set_attribute("model", "count", {"n": 1, "lock": Lock()}),
    "model.odd": add_sparse_buffer,
}


@pytest.mark.parametrize("key", CORRUPTED)
def test_every_key_that_cannot_be_stored_can_be_skipped(key: str) -> None:
    script = Script()
    attached = script.attached()
    tree = StateTree(attached)
    tree.collect({})
    CORRUPTED[key](script, attached)
    with pytest.raises(ValueNotStorable) as caught:
        tree.collect({})
    assert caught.value.key == key
    assert f"attach(skip=[{key!r}])" in str(caught.value)

    script = Script()
    attached = script.attached(key)
    tree = StateTree(attached)
    tree.collect({})
    tree.check_skip()  # not there yet
    CORRUPTED[key](script, attached)
    tree.collect({})
    assert attached.skip.unmatched == []


def test_a_loaders_own_position_can_be_skipped_in_part() -> None:
    script = Script()
    loaders = {"loader": {"pass": 1, "own": {"lock": Lock(), "at": 3}}}
    with pytest.raises(ValueNotStorable) as caught:
        StateTree(script.attached()).collect({"loaders": loaders})
    tree = StateTree(script.attached(caught.value.key, "loader.pass"))
    state = decode(decode(tree.collect({"loaders": loaders}).plain)["loaders"])
    assert state == {"loader": {"pass": 1, "own": {"at": 3}}}
    tree.check_skip()


def test_what_a_snapshot_cannot_do_without_is_not_skipped() -> None:
    script = Script()
    script.optimizer.state[script.model.weight]["momentum_buffer"] = torch.ones(2, 2)
    tree = StateTree(script.attached("optimizer*", "optimizer[0]", "*[0]"))
    plain = decode(tree.collect({}).plain)
    groups = decode(plain["groups"])["optimizer"]
    assert groups == [{"params": ["model.weight", "model.bias"]}]
    assert decode(plain["optimizer_state"]) == {"optimizer": {"state": {}}}


def test_a_parameter_that_is_trained_and_cannot_be_stored_gets_no_advice_to_skip_it() -> None:
    parameter = nn.Parameter(torch.zeros(2).to_sparse())
    net = nn.Module()
    net.register_parameter("odd", parameter)
    with pytest.raises(ValueNotStorable) as caught:
        tree_of(model=net, optimizer=torch.optim.SGD([parameter], 0.1)).persistent()
    assert "model.odd holds" in str(caught.value)
    assert "skip" not in str(caught.value)


@pytest.mark.parametrize("pattern", ["state.x", "modl.*", "optimizers"])
def test_a_pattern_that_begins_with_no_attached_name_is_refused(pattern: str) -> None:
    tree = StateTree(Script().attached(pattern))
    tree.collect({})
    with pytest.raises(UsageError, match=r"matches nothing"):
        tree.check_skip()
