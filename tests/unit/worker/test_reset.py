"""Libraries are put between two turns, the same way in an old process and in a new one."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ftrun.worker.state.determinism import ready_order
from ftrun.worker.survivors import reset
from ftrun.worker.survivors.groups import ProcessGroups


@pytest.fixture(autouse=True)
def groups() -> Iterator[ProcessGroups]:
    found = ProcessGroups()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield found
    found.close()
    dist.destroy_process_group()


class Mixed(nn.Module):
    """Uses its layers in another order than it holds them, and can fail."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for at in (2, 0, 3, 1):
            x = self.layers[at](x).tanh()
            if at == 0:
                x.register_hook(self._in_backward)
        return x

    def _in_backward(self, _: torch.Tensor) -> None:
        if self.fails:
            raise RuntimeError("a peer has closed its connection")


def wrapped(**options: bool) -> DistributedDataParallel:
    torch.manual_seed(3)
    return DistributedDataParallel(Mixed(), bucket_cap_mb=0.005, **options)


def one_step(model: nn.Module) -> list[torch.Tensor]:
    model(torch.ones(2, 32)).sum().backward()
    found = [one.grad for one in model.parameters()]
    assert all(one is not None for one in found)
    return [one.clone() for one in found if one is not None]


def break_a_step(model: nn.Module, inner: Mixed) -> None:
    inner.fails = True
    with pytest.raises(RuntimeError, match="a peer"):
        one_step(model)
    inner.fails = False


def test_a_rank_that_stays_gets_the_buckets_of_a_new_rank(groups: ProcessGroups) -> None:
    old, new = {"model": wrapped()}, {"model": wrapped()}
    wanted = one_step(old["model"])
    one_step(old["model"])
    order, _ = ready_order(old["model"])
    assert order is not None
    assert reset.layout(old) != reset.layout(new)
    break_a_step(old["model"], old["model"].module)  # type: ignore[arg-type]
    groups.stand_in()
    for wrappers in (old, new):
        reset.reset(wrappers.values(), wrappers, {"model": order})
        assert all(one.grad is None for one in wrappers["model"].parameters())
        assert wrappers["model"]._has_rebuilt_buckets
    assert reset.layout(old) == reset.layout(new)
    groups.renew(dist.HashStore(), 2, reset._TIMEOUT)
    assert dist.group.WORLD is not None
    for wrappers in (old, new):
        assert wrappers["model"].process_group is dist.group.WORLD
        for mine, its in zip(one_step(wrappers["model"]), wanted, strict=True):
            assert torch.equal(mine, its)
    assert groups.calls()["0"] > 0  # the reducers use the group again


def test_a_version_without_an_order_is_a_problem_for_rebuilt_buckets() -> None:
    wrappers = {"model": wrapped()}
    assert reset.order_problem(wrappers, {}) == ""
    for _ in range(2):
        one_step(wrappers["model"])
    assert "before the buckets of model" in reset.order_problem(wrappers, {})
    assert reset.order_problem(wrappers, {"model": [0]}) == ""


def test_fsdp2_leaves_nothing_of_a_broken_step() -> None:
    torch.manual_seed(3)
    inner = Mixed()
    for layer in inner.layers:
        fully_shard(layer)
    model = fully_shard(inner)
    assert reset.problem_of([model]) == ""
    reset.reset([model], {}, {})  # before its first forward
    wanted = one_step(model)
    reset.reset([model], {}, {})
    break_a_step(model, inner)
    reset.reset([model], {}, {})
    assert all(one.grad is None for one in model.parameters())
    for mine, its in zip(one_step(model), wanted, strict=True):
        assert torch.equal(mine.to_local(), its.to_local())  # type: ignore[attr-defined]


def test_gradients_of_an_optimizer_without_a_module_are_reset() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.sum().backward()
    reset.reset([], {}, {}, [torch.optim.SGD([weight])], [object()])
    assert weight.grad is None


def test_a_scaler_can_unscale_again() -> None:
    scaler, layer = torch.amp.GradScaler("cpu"), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters())
    for _ in range(2):
        scaler.scale(layer(torch.ones(2)).sum()).backward()
        scaler.unscale_(optimizer)
        reset.reset([layer], {}, {}, [optimizer], [scaler])


def with_hook() -> DistributedDataParallel:
    ddp = wrapped()
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return ddp


def with_builtin_hook() -> DistributedDataParallel:
    ddp = wrapped()
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    return ddp


Engine = type("Engine", (nn.Module,), {"__module__": "deepspeed.runtime.engine"})


@pytest.mark.parametrize(
    ("build", "problem"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 2)), ""),
        (wrapped, ""),
        (lambda: wrapped(find_unused_parameters=True), ""),
        (lambda: nn.Sequential(wrapped(static_graph=True)), "static_graph"),
        (with_hook, "communication hook"),
        (with_builtin_hook, "communication hook"),
        (Engine, "Engine of DeepSpeed"),
    ],
)
def test_modules_that_keep_more_are_a_problem(build: Callable[[], nn.Module], problem: str) -> None:
    found = reset.problem_of([build()])
    assert problem in found if problem else not found


def test_fsdp2_of_an_older_torch_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fully_shard(nn.Linear(2, 2))
    monkeypatch.delattr("torch.distributed.fsdp.FSDPModule.reset_iter_state")
    assert reset.problem_of([model]).startswith(f"FSDP2 of torch {torch.__version__}")
