"""A snapshot restores its whole content, so that the run ends with the same bits.

Each test trains in this process against a real SMP, restores into new objects, continues, and
compares with an undisturbed run.
"""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ftrun.config.profile import SnapshotConfig
from ftrun.errors import ShapeChanged, ValueNotStorable
from ftrun.wire.shared_memory.pages import HeartbeatField
from ftrun.worker.state.tensors import copyable
from tests.integration.in_process_worker import TIMEOUT_S, Run

KILLED_AT, END = 3, 6

Things = dict[str, Any]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.close()


def ends_equal(
    run: Run, build: Callable[[], Things], turn: Callable[[Things, int], None]
) -> tuple[Things, Things]:
    """Compare a run that is restored once with one that is not; return the objects of both."""
    undisturbed = build()
    for at in range(END):
        turn(undisturbed, at)
    things = build()
    for at in run.attach(**things).steps(KILLED_AT):
        turn(things, at)
    things = build()
    session = run.attach(**things)
    assert (session.restored, session.step) == (True, KILLED_AT)
    for at in session.steps(END):
        turn(things, at)
    assert not run.page.get(HeartbeatField.UNPROTECTED), run.page.note
    for name, thing in undisturbed.items():
        assert_equal(state_of(things[name]), state_of(thing), name)
    return things, undisturbed


def state_of(thing: Any) -> Any:
    return thing.state_dict() if hasattr(thing, "state_dict") else thing


def assert_equal(mine: Any, its: Any, path: str) -> None:
    """Equal in every bit, tensors also in their strides."""
    assert type(mine) is type(its), path
    if isinstance(its, dict):
        assert mine.keys() == its.keys(), path
        for key in its:
            assert_equal(mine[key], its[key], f"{path}.{key}")
    elif isinstance(its, list | tuple):
        assert len(mine) == len(its), path
        for at, (one, other) in enumerate(zip(mine, its, strict=True)):
            assert_equal(one, other, f"{path}[{at}]")
    elif isinstance(its, DTensor):
        assert_equal(mine.to_local(), its.to_local(), path)
    elif isinstance(its, torch.Tensor):
        assert (mine.dtype, mine.shape, mine.stride()) == (its.dtype, its.shape, its.stride()), path
        if its.dtype is torch.float4_e2m1fn_x2:  # torch does not compare them
            mine, its = copyable(mine), copyable(its)
        assert torch.equal(mine, its), path
    elif isinstance(its, np.ndarray):
        assert (mine.dtype, mine.shape, mine.strides) == (its.dtype, its.shape, its.strides), path
        assert np.array_equal(mine, its), path
    elif not callable(its):
        assert mine == its, path


def batch(at: int, *shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(at))


def step(things: Things, at: int, *, set_to_none: bool = True) -> None:
    things["optimizer"].zero_grad(set_to_none=set_to_none)
    things["model"](batch(at, 4, 6)).square().mean().backward()
    things["optimizer"].step()


def linear() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


# --- strides -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["fused", "foreach", "single"])
def test_moments_of_channels_last_parameters_keep_their_strides(run: Run, how: str) -> None:
    def build() -> Things:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3))
        model = model.to(memory_format=torch.channels_last)
        kinds = {"fused": how == "fused", "foreach": how == "foreach"}
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.1, **kinds)}

    def turn(things: Things, at: int) -> None:
        things["optimizer"].zero_grad()
        x = batch(at, 2, 3, 8, 8).to(memory_format=torch.channels_last)
        things["model"](x).square().mean().backward()
        things["optimizer"].step()

    things, _ = ends_equal(run, build, turn)
    moment = things["optimizer"].state[things["model"][0].weight]["exp_avg"]
    assert moment.is_contiguous(memory_format=torch.channels_last)


def test_arrays_and_tensors_among_plain_values_keep_their_strides(run: Run) -> None:
    def build() -> Things:
        model = linear()
        return {
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "notes": {},
            "table": torch.zeros(3, 4).t(),
        }

    def turn(things: Things, at: int) -> None:
        step(things, at)
        things["table"] += at
        array = np.arange(6.0).reshape(2, 3) + at
        array.flags.writeable = False
        things["notes"].update(
            fortran=np.asfortranarray(array),
            readonly=array,
            backwards=array[::-1],
            scalar=np.array(at),
            turned=batch(at, 4, 5).t(),
        )

    run_things, _ = ends_equal(run, build, turn)
    again = build()
    run.attach(**again)
    for key in ("fortran", "readonly", "scalar", "turned"):
        assert_equal(again["notes"][key], run_things["notes"][key], key)
    assert np.array_equal(again["notes"]["backwards"], run_things["notes"]["backwards"])


# --- two values per byte -----------------------------------------------------------------------


def packed(at: int, *shape: int) -> torch.Tensor:
    given = torch.Generator().manual_seed(at)
    found = torch.randint(256, shape, dtype=torch.uint8, generator=given, device="cpu")
    return found.to(torch.get_default_device()).view(torch.float4_e2m1fn_x2)


class PackedMomentum(torch.optim.Optimizer):
    """SGD with a momentum of two values per byte; ftrun copies it while the training continues."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state, size = self.state[parameter], (300, 200)
            if not state:
                state["small"], state["large"] = packed(0, 2, 3), packed(1, *size)
            by = int(parameter.grad.abs().sum() * 1000) % 255 + 1
            for one in state.values():
                one.view(torch.uint8).add_(by)
            parameter.sub_(parameter.grad * (0.1 + state["large"].view(torch.uint8)[0, 0] / 1e4))


@pytest.fixture(params=[False, True], ids=["", "deterministic"])
def is_deterministic(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Torch fills new memory with deterministic algorithms, and no packed items."""
    torch.use_deterministic_algorithms(request.param)
    yield request.param
    torch.use_deterministic_algorithms(False)


def test_tensors_with_two_values_per_byte_come_back_in_every_bit(
    run: Run, is_deterministic: bool
) -> None:
    def build() -> Things:
        model = linear()
        model.register_buffer("scale", packed(2, 5, 4))
        model.register_buffer("turned", packed(3, 400, 300).t())
        model.frozen = nn.Parameter(packed(4, 300, 300), requires_grad=False)
        model.empty = nn.Parameter(packed(5, 0, 3), requires_grad=False)
        optimizer = PackedMomentum(model.parameters())
        optimizer.param_groups[0]["params"] = [p for p in model.parameters() if p.requires_grad]
        return {"model": model, "optimizer": optimizer, "notes": {}}

    def turn(things: Things, at: int) -> None:
        step(things, at)
        things["model"].scale.view(torch.uint8).add_(at)
        things["notes"]["code"] = packed(at, 7)

    verified = 3 if is_deterministic else 0
    run.settings = SnapshotConfig(every=1, commit_timeout_s=TIMEOUT_S, verify_first=verified)
    things, _ = ends_equal(run, build, turn)
    again = build()
    assert run.attach(**again).restored
    assert_equal(again["notes"], things["notes"], "notes")
    assert not run.page.get(HeartbeatField.DISCARDED_COUNT), run.page.note


def test_a_packed_tensor_without_dimensions_is_named_at_attach(run: Run) -> None:
    model = linear()
    model.register_buffer("code", packed(1))
    with pytest.raises(ValueNotStorable, match=r"model\.code.*float4_e2m1fn_x2"):
        run.attach(model=model)


def test_packed_values_are_not_converted(run: Run) -> None:
    def build(dtype: torch.dtype) -> Things:
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        table = packed(1, 8) if dtype is torch.float4_e2m1fn_x2 else torch.ones(8, dtype=dtype)
        model.table = nn.Parameter(table, requires_grad=False)
        return {"model": model, "optimizer": optimizer}

    things = build(torch.float4_e2m1fn_x2)
    for at in run.attach(**things).steps(KILLED_AT):
        step(things, at)
    with pytest.raises(ShapeChanged, match=r"model\.table"):
        run.attach(**build(torch.float32))


# --- gradients ---------------------------------------------------------------------------------


def test_an_unused_parameter_with_a_gradient_of_zeros_is_moved_by_momentum(run: Run) -> None:
    def build() -> Things:
        model = linear()
        model.add_module("unused", nn.Linear(6, 3))
        options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), **options)}

    def turn(things: Things, at: int) -> None:
        model, x = things["model"], batch(at, 4, 6)
        things["optimizer"].zero_grad(set_to_none=False)
        loss = model[2](model[1](model[0](x))).square().mean()
        if at == 0:
            loss = loss + model.unused(x).square().mean()
        loss.backward()
        things["optimizer"].step()

    ends_equal(run, build, turn)


def test_a_parameter_without_a_gradient_stays_without_one(run: Run) -> None:
    def build() -> Things:
        model = linear()
        model.add_module("unused", nn.Linear(6, 3))
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), weight_decay=1)}

    def turn(things: Things, at: int) -> None:
        model = things["model"]
        things["optimizer"].zero_grad(set_to_none=False)
        model[2](model[1](model[0](batch(at, 4, 6)))).square().mean().backward()
        things["optimizer"].step()

    things, _ = ends_equal(run, build, turn)
    assert things["model"].unused.weight.grad is None


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def in_ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, find_unused_parameters=True)


def in_ddp_with_views(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, find_unused_parameters=True, gradient_as_bucket_view=True)


def in_fsdp(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


class Partly(nn.Module):
    """Uses one of its layers in the first step only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always = nn.Linear(6, 8)
        self.once = nn.Linear(6, 8)

    def forward(self, x: torch.Tensor, *, is_first: bool) -> torch.Tensor:
        return self.always(x) + self.once(x) if is_first else self.always(x)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("wrap", [in_ddp, in_ddp_with_views, in_fsdp])
def test_gradients_of_zeros_suit_what_keeps_gradients_in_buckets(
    run: Run, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    def build() -> Things:
        model = wrap(Partly())
        options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), **options)}

    def turn(things: Things, at: int) -> None:
        things["optimizer"].zero_grad(set_to_none=False)
        things["model"](batch(at, 4, 6), is_first=at == 0).square().mean().backward()
        things["optimizer"].step()

    things, undisturbed = ends_equal(run, build, turn)
    for mine, its in zip(
        things["model"].parameters(), undisturbed["model"].parameters(), strict=True
    ):
        assert torch.equal(mine.grad, its.grad)


# --- state of optimizers -----------------------------------------------------------------------


def test_lbfgs_whose_lists_grow_ends_the_same(run: Run) -> None:
    def build() -> Things:
        model = linear()
        options = {"lr": 0.3, "max_iter": 3, "history_size": 4, "line_search_fn": "strong_wolfe"}
        return {"model": model, "optimizer": torch.optim.LBFGS(model.parameters(), **options)}

    def turn(things: Things, at: int) -> None:
        def closure() -> torch.Tensor:
            things["optimizer"].zero_grad()
            loss = things["model"](batch(at, 4, 6)).square().mean()
            loss.backward()
            return loss

        things["optimizer"].step(closure)

    ends_equal(run, build, turn)


class Nested(torch.optim.Optimizer):
    """Keeps lists and dicts of tensors, and replaces them, as Shampoo does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in filter(lambda p: p.grad is not None, group["params"]):
                state = self.state[parameter]
                if not state:
                    wide = torch.zeros(parameter.shape, dtype=torch.float32)
                    state.update(kind="shampoo", factors=[wide], blocks={"a": {"b": wide}})
                grad = parameter.grad.float()
                state["factors"][0] = state["factors"][0] * 0.9 + grad
                inner = state["blocks"]["a"]
                inner["b"] = inner["b"] * 0.99 + grad.square()
                change = state["factors"][0] / (inner["b"].sqrt() + 0.01)
                parameter.sub_((change * group["lr"]).to(parameter.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nested_state_comes_back_as_it_was_at_the_boundary(run: Run, dtype: torch.dtype) -> None:
    def build() -> Things:
        model = linear().to(dtype)
        return {"model": model, "optimizer": Nested(model.parameters())}

    def turn(things: Things, at: int) -> None:
        things["optimizer"].zero_grad()
        things["model"](batch(at, 4, 6).to(dtype)).square().mean().backward()
        things["optimizer"].step()

    things, _ = ends_equal(run, build, turn)
    state = things["optimizer"].state[things["model"][0].weight]
    assert state["factors"][0].dtype == state["blocks"]["a"]["b"].dtype == torch.float32


def test_state_of_the_optimizer_as_a_whole_comes_back(run: Run) -> None:
    def build() -> Things:
        model = linear()
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

    def turn(things: Things, at: int) -> None:
        step(things, at)
        state = things["optimizer"].state
        state["count"] = at
        state["name"] = f"turn {at}"
        state[0] = "an int is no index here"
        state["mean"] = batch(at, 3)

    # torch's own state_dict() mistakes these for state of parameters, so they are compared by hand.
    undisturbed, things = build(), build()
    for at in range(END):
        turn(undisturbed, at)
    for at in run.attach(**things).steps(END):
        turn(things, at)
    again = build()
    run.attach(**again)
    for key in ("count", "name", 0, "mean"):
        assert_equal(again["optimizer"].state[key], undisturbed["optimizer"].state[key], str(key))


def test_functions_and_meshes_of_a_group_are_those_of_the_new_optimizer(run: Run) -> None:
    mesh = type("DeviceMesh", (), {})()

    def build() -> Things:
        model = linear()
        buffer = torch.zeros(2, 3)
        group = {
            "params": list(model.parameters()),
            "mesh": mesh,
            "norm": torch.linalg.norm,
            "dtype": torch.bfloat16,
            "buffer": buffer,
            "views": [buffer[0], buffer[1]],
        }
        return {"model": model, "optimizer": torch.optim.SGD([group], lr=0.1, momentum=0.9)}

    def turn(things: Things, at: int) -> None:
        step(things, at)
        things["optimizer"].param_groups[0]["buffer"] += at

    things, _ = ends_equal(run, build, turn)
    group = things["optimizer"].param_groups[0]
    assert (group["mesh"], group["norm"], group["dtype"]) == (
        mesh,
        torch.linalg.norm,
        torch.bfloat16,
    )
    group["buffer"].fill_(7)
    assert group["views"][1].tolist() == [7, 7, 7], "views of one buffer stay views of it"


class Opaque:
    """Has a state that cannot be stored."""


def test_what_a_group_cannot_store_is_named_at_attach(run: Run) -> None:
    model = linear()
    group = {"params": list(model.parameters()), "cache": Opaque()}
    optimizer = torch.optim.SGD([group], lr=0.1)
    with pytest.raises(ValueNotStorable) as caught:
        run.attach(model=model, optimizer=optimizer)
    assert caught.value.key == "optimizer[0].cache"


def test_a_function_that_a_group_gets_later_costs_protection_and_is_named(run: Run) -> None:
    model = linear()
    things = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    for at in run.attach(**things).steps(3):
        step(things, at)
        things["optimizer"].param_groups[0]["norm"] = torch.linalg.norm
    assert run.page.get(HeartbeatField.UNPROTECTED)
    assert "optimizer[0].norm" in run.page.note


# --- modules -----------------------------------------------------------------------------------


class Counting(nn.Module):
    """Has a count that only its state_dict() contains."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.count = 0
        self.seen = torch.zeros(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.seen = self.seen + x.detach().mean()
        return x * self.weight * self.seen.mean()


class SavesItsKeys(Counting):
    """Has keys of its own, like torch's quantized modules."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}count"] = self.count
        destination[f"{prefix}seen"] = self.seen

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.count = state.pop(f"{prefix}count")
        self.seen = state.pop(f"{prefix}seen")
        super()._load_from_state_dict(state, prefix, *rest)


class SavesItsKeysLater(SavesItsKeys):
    """Has none before its second forward, like layers that are quantized then."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.count < 2:
            del destination[f"{prefix}count"], destination[f"{prefix}seen"]

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        if f"{prefix}count" in state:
            super()._load_from_state_dict(state, prefix, *rest)


class HasItsOwn(Counting):
    """Has methods of its own."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = super().state_dict(*args, **kwargs)
        found[kwargs.get("prefix", "") + "own"] = {"count": self.count, "seen": self.seen}
        return found

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        own = state.pop("own")
        self.count, self.seen = own["count"], own["seen"]
        return super().load_state_dict(state, strict)


class Hooked(Counting):
    """Has hooks instead of methods."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(_add_count)
        self.register_load_state_dict_pre_hook(_take_count)


def _add_count(module: Any, state: Any, prefix: str, _: Any) -> None:
    state[f"{prefix}count"], state[f"{prefix}seen"] = module.count, module.seen


def _take_count(module: Any, state: Any, prefix: str, *_: Any) -> None:
    module.count, module.seen = state.pop(f"{prefix}count"), state.pop(f"{prefix}seen")


class Extra(Counting):
    """Uses torch's extra state."""

    def get_extra_state(self) -> Any:
        # Its key equals the name of a parameter, and must not be mistaken for it.
        return {"weight": self.seen, "more": [{"count": self.count}]}

    def set_extra_state(self, state: Any) -> None:
        self.seen, self.count = state["weight"], state["more"][0]["count"]


@pytest.mark.parametrize("kind", [SavesItsKeys, SavesItsKeysLater, HasItsOwn, Hooked, Extra])
def test_what_a_module_adds_to_its_state_dict_comes_back(run: Run, kind: type[Counting]) -> None:
    def build() -> Things:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), kind(), nn.Linear(6, 2))
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}

    things, undisturbed = ends_equal(run, build, step)
    assert things["model"][1].count == undisturbed["model"][1].count == END


class SavesOnly(Counting):
    """Saves a key that it does not load."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}count"] = self.count


class SavesOnlyLater(SavesOnly):
    """Saves it after its second forward."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.count < 2:
            del destination[f"{prefix}count"]


@pytest.mark.parametrize("kind", [SavesOnly, SavesOnlyLater])
def test_a_key_that_no_module_takes_back_costs_protection_once_it_changes(
    run: Run, kind: type[Counting]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), kind(), nn.Linear(6, 2))
    things = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}
    for at in run.attach(**things).steps(2):
        step(things, at)
    assert run.page.get(HeartbeatField.UNPROTECTED)
    assert "model.1.state_dict().count" in run.page.note


def test_a_key_that_no_module_takes_back_and_that_stays_does_no_harm(run: Run) -> None:
    def build() -> Things:
        model = linear()
        model.register_state_dict_post_hook(
            lambda _, state, prefix, __: state.update({f"{prefix}format": 2})
        )
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}

    ends_equal(run, build, step)


def test_flags_of_modules_and_tensors_come_back(run: Run) -> None:
    def build() -> Things:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2))
        model[1].register_buffer("learned", torch.ones(6))
        beside = nn.Parameter(torch.ones(2))
        parameters = [*model.parameters(), beside]
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        return {"model": model, "optimizer": optimizer, "beside": beside}

    def turn(things: Things, at: int) -> None:
        model = things["model"]
        if at == 1:
            model[1].eval()
            model[2].eval()
            model[0].weight.requires_grad_(False)
            things["beside"].requires_grad_(False)
            model[1].learned.requires_grad_()
        step(things, at)

    things, undisturbed = ends_equal(run, build, turn)
    for one in (things, undisturbed):
        assert [part.training for part in one["model"].modules()] == [
            True,
            True,
            False,
            False,
            True,
        ]
        assert not one["model"][0].weight.requires_grad
        assert not one["beside"].requires_grad
        assert one["model"][1].learned.requires_grad


# --- buffers and shapes ------------------------------------------------------------------------


class Growing(nn.Module):
    """Its buffers appear, grow and disappear during training."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 2)
        self.register_buffer("seen", torch.zeros(0))
        self.register_buffer("later", None)
        self.register_buffer("once", torch.ones(1))
        self.register_buffer("mask", torch.ones(2, 1).expand(2, 6))
        self.cache = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = torch.cat([self.seen, x.detach().mean().reshape(1)])
        if self.later is None:
            self.later = torch.zeros(3, dtype=torch.int64)
        self.later += 1
        self.once = None
        if "added" not in self._buffers:
            self.inner.register_buffer("deep", torch.zeros(2, 2))
            del self.cache
            self.register_buffer("cache", torch.ones(4))
            self.register_buffer("added", torch.zeros(2))
        self.added += self.seen.sum()
        self.inner.deep += self.cache.sum()
        self.mask[0, 0] += 1
        return self.inner(x * self.mask.mean(0)) + self.added + self.inner.deep.sum()


def test_buffers_that_appear_and_grow_come_back(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    def build() -> Things:
        torch.manual_seed(0)
        model = Growing()
        return {
            "model": model,
            "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1),
            "table": torch.zeros(1),
        }

    def turn(things: Things, at: int) -> None:
        step(things, at)
        things["table"].resize_(at + 1).fill_(at)

    with caplog.at_level(logging.INFO):
        things, _ = ends_equal(run, build, turn)
    assert things["model"].seen.shape == (END,)
    assert things["model"].mask.stride() == (1, 0)
    assert "model.seen" in caplog.text


class Replacing(nn.Module):
    """Its buffers get other strides, and one becomes persistent, during training."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 2)
        self.register_buffer("later", None)
        self.register_buffer("turned", torch.zeros(2, 3, 4, 4))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = torch.zeros(2, 3, 4, 4) + x.detach().mean()
        self.later = seen.to(memory_format=torch.channels_last)
        self.turned = (self.turned + seen).to(memory_format=torch.channels_last)
        self.register_buffer("cache", self.cache + x.detach().mean())
        return self.inner(x) + self.cache


def test_buffers_that_are_replaced_come_back_with_their_strides_and_persistence(run: Run) -> None:
    def build() -> Things:
        torch.manual_seed(0)
        model = Replacing()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return {"model": model, "optimizer": optimizer, "table": torch.zeros(1)}

    def turn(things: Things, at: int) -> None:
        step(things, at)
        things["table"].data = batch(at, 3, at + 2).t()

    ends_equal(run, build, turn)
    things = build()
    run.attach(**things)
    assert things["model"].later.is_contiguous(memory_format=torch.channels_last)
    assert things["model"].turned.is_contiguous(memory_format=torch.channels_last)
    assert things["table"].stride() == (1, END + 1)


def test_an_expanded_buffer_that_was_replaced_gets_memory_of_its_own(run: Run) -> None:
    def build() -> Things:
        model = linear()
        model.register_buffer("mask", torch.zeros(1).expand(4))
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}

    def turn(things: Things, at: int) -> None:
        step(things, at)
        things["model"].mask = things["model"].mask + torch.arange(4.0)

    ends_equal(run, build, turn)


def add_parameter(things: Things) -> None:
    things["model"].register_parameter("late", nn.Parameter(torch.ones(2)))


def add_module(things: Things) -> None:
    things["model"].add_module("norm", nn.BatchNorm1d(2, affine=False))


def replace_header(things: Things) -> None:
    things["model"][2] = nn.Linear(8, 5)


def remove_group(things: Things) -> None:
    things["optimizer"].param_groups.pop()


def group_of_new_parameters(things: Things) -> None:
    things["optimizer"].add_param_group({"params": [nn.Parameter(torch.ones(2))]})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (add_parameter, "model.late was added"),
        (add_module, "model.norm.running_mean"),
        (replace_header, "model.2.weight was F32[2, 8] at attach and is F32[5, 8] now"),
        (remove_group, "parameter groups of optimizer"),
        (group_of_new_parameters, "optimizer.params[1][0] was added"),
    ],
)
def test_what_a_rebuilt_script_could_not_take_is_reported_and_the_last_snapshot_stays(
    run: Run, change: Callable[[Things], None], named: str
) -> None:
    def build() -> Things:
        model = linear()
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

    things = build()
    for at in run.attach(**things).steps(4):
        assert bool(run.page.get(HeartbeatField.UNPROTECTED)) == (at == 3)
        step(things, at)
        if at == 2:
            change(things)
            things["model"].forward = lambda x: things["model"][0](x)
    assert run.page.get(HeartbeatField.UNPROTECTED)
    assert named in run.page.note
    assert run.attach(**build()).step == 2


def test_a_parameter_that_is_added_and_removed_again_leaves_no_trace(run: Run) -> None:
    model = linear()
    things = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    for at in run.attach(**things).steps(4):
        step(things, at)
        if at == 1:
            add_parameter(things)
        if at == 2:
            assert run.page.get(HeartbeatField.UNPROTECTED)
            del model.late
    assert not run.page.get(HeartbeatField.UNPROTECTED)


def test_a_parameter_of_another_shape_is_refused(run: Run) -> None:
    model = linear()
    things = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    for at in run.attach(**things).steps(2):
        step(things, at)
    other = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    with pytest.raises(ShapeChanged) as caught:
        run.attach(model=other, optimizer=torch.optim.SGD(other.parameters(), lr=0.1))
    assert caught.value.key == "model.2.weight"


def test_lazy_modules_get_their_shape_from_the_snapshot(run: Run) -> None:
    def build() -> Things:
        torch.manual_seed(0)
        model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Tanh(), nn.LazyLinear(2))
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}

    torch.manual_seed(1)
    state = torch.random.get_rng_state()

    def turn(things: Things, at: int) -> None:
        if at == 0:
            torch.random.set_rng_state(state)
        step(things, at)

    things, _ = ends_equal(run, build, turn)
    assert type(things["model"][0]) is nn.Linear
    assert things["model"][0].in_features == 6


class Forwarding:
    """A wrapper whose methods are those of the object in it."""

    def __init__(self, scheduler: torch.optim.lr_scheduler.LRScheduler) -> None:
        self._scheduler = scheduler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)


def test_an_object_that_forwards_its_methods_is_attached(run: Run) -> None:
    def build() -> Things:
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = Forwarding(torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    def turn(things: Things, at: int) -> None:
        things["model"](torch.ones(1, 2)).sum().backward()
        things["optimizer"].step()
        things["optimizer"].zero_grad()
        things["scheduler"].step()

    ends_equal(run, build, turn)
