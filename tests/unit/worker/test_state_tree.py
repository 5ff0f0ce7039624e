"""Names and sources of a state do not depend on how the model is wrapped."""

import numpy as np
import pytest
import torch
from torch import nn

from ftrun.errors import ValueNotStorable
from ftrun.snapshot.layout import When
from ftrun.snapshot.plain import decode
from ftrun.worker.attached import Attached, by_name, every_name, unwrapped
from ftrun.worker.state_tree import StateTree
from ftrun.worker.tensors import at_home, kind_of


def tree_of(**given: object) -> StateTree:
    attached = Attached()
    for argument, thing in given.items():
        for name, one in by_name(argument, thing).items():
            attached.add(name, one)
    return StateTree(attached)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))


def names(tree: StateTree) -> list[str]:
    return [source.name for source in tree.lasting().sources]


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
    found = {s.name: s.when for s in tree_of(model=net, optimizer=optimizer).lasting().sources}
    assert found["model.0.weight"] is When.LAZY
    assert found["optimizer.state.model.0.weight.exp_avg"] is When.LAZY
    assert found["model.1.weight"] is When.BOUNDARY
    assert found["model.1.running_mean"] is When.BOUNDARY


def test_tied_parameters_are_taken_once() -> None:
    net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    net[1].weight = net[0].weight
    assert names(tree_of(model=net)) == ["model.0.weight"]


def modules_of(tree: StateTree) -> dict[str, object]:
    return decode(tree.lasting().modules)


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
    before = tree.lasting()
    assert callable(change)
    change(net, optimizer)
    assert (tree.lasting() is before) == (change is change_nothing)


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
    before = tree.lasting()
    assert callable(change)
    assert (tree.lasting() is before) == (change is not change_array)
    change(state)
    assert tree.lasting() is not before


def test_a_child_that_was_replaced_by_one_like_it_is_seen() -> None:
    net = model()
    tree = tree_of(model=net)
    before = tree.lasting()
    replace_child(net)
    assert any(one is net[1].weight for one in tree.lasting().originals)
    assert tree.lasting() is not before


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
        tree_of(model=net).lasting()
    assert caught.value.key == "model.odd"


def test_a_tensor_among_plain_values_comes_back_on_the_kind_of_device_it_was_on() -> None:
    tensor = torch.ones(2)
    assert kind_of(tensor) == "tensor"
    assert at_home(tensor, "tensor") is tensor
    assert kind_of(torch.empty(2, device="meta")) == "tensor@meta"
    assert at_home(tensor, "tensor@meta").is_meta
