"""Sets what libraries keep from turn to turn, the same way on ranks that stay and on new ranks.

Runs in:  worker, training thread, while the groups have no effect (`ProcessGroups.stand_in`), and
          before the state is restored, because a synthetic backward may step an optimizer.
Gives:    gradients that are None, DDP's buckets in the recorded order, FSDP2 between two turns, a
          GradScaler before its first `unscale_`. Training flags come with the restored version.

Source: torch 2.13, nn/parallel/distributed.py `_update_process_group`, c10d/reducer.cpp
`Reducer::reset_state`, fsdp/_fully_shard/_fsdp_state.py `_reset_iter_state`, amp/grad_scaler.py.
"""

import contextlib
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

from ftrun.worker.state.determinism import warm_buckets

Wrappers = Mapping[str, DistributedDataParallel]
"""Instances of DDP, by the names of the attached modules that they wrap."""

Orders = Mapping[str, list[int]]
"""Recorded orders of gradients, see `determinism.ready_order`."""

_TIMEOUT = timedelta(seconds=60)


def reset(
    modules: Iterable[nn.Module],
    wrappers: Wrappers,
    orders: Orders,
    optimizers: Iterable[torch.optim.Optimizer] = (),
    scalers: Iterable[object] = (),
) -> None:
    """Leave nothing of the last turn, whether it was completed or not."""
    roots = list(modules)
    for root in roots:
        _reset_fsdp(root)
    for name, ddp in wrappers.items():
        ddp._has_rebuilt_buckets = False
        ddp.reducer._reset_state()
        if (order := orders.get(name)) is not None and not ddp.find_unused_parameters:
            with reducing_alone([ddp]):
                warm_buckets(ddp, order)
                ddp._has_rebuilt_buckets = bool(ddp.reducer._rebuild_buckets())
    for parameter in (*_parameters(roots), *_optimized(optimizers)):
        parameter.grad = None
    for scaler in scalers:
        if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled():
            scaler._per_optimizer_states.clear()
    torch.clear_autocast_cache()


def layout(wrappers: Wrappers) -> str:
    """Digest of the buckets of each DDP: which parameters they hold, in which order.

    Takes memory of the size of all gradients, until it returns.
    """
    found: dict[str, list[list[int]]] = {}
    for name, ddp in sorted(wrappers.items()):
        numbers = {id(one): number for number, one in enumerate(ddp.module.parameters())}
        buckets = ddp.reducer._get_zeros_like_grad_buckets()
        found[name] = [[numbers[id(one)] for one in b.parameters()] for b in buckets]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def problem_of(modules: Iterable[nn.Module]) -> str:
    """Why a rank with these modules cannot go back to a version in place; empty: it can."""
    for root in modules:
        for module in root.modules():
            if problem := _problem(module):
                return problem
    return ""


def order_problem(wrappers: Wrappers, orders: Orders) -> str:
    """Why the buckets cannot be made those of a new rank: they are rebuilt, without an order."""
    for name, ddp in wrappers.items():
        if ddp._has_rebuilt_buckets and name not in orders:
            return f"the version was taken before the buckets of {name} had an order"
    return ""


def _problem(module: nn.Module) -> str:
    kind = type(module)
    if kind.__module__.partition(".")[0] == "deepspeed":
        return f"{kind.__name__} of DeepSpeed keeps state that is not reset"
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
        return "FullyShardedDataParallel (FSDP1) keeps state that is not reset; use fully_shard"
    if _is_fsdp2(module) and not hasattr(module, "reset_iter_state"):
        return f"FSDP2 of torch {torch.__version__} cannot be reset; torch 2.13 can"
    return _problem_of_ddp(module) if isinstance(module, DistributedDataParallel) else ""


def _problem_of_ddp(ddp: DistributedDataParallel) -> str:
    if ddp.static_graph:
        return "DDP with static_graph=True builds its buckets from its first turn only"
    if getattr(ddp, "_use_python_reducer", False):
        return "DDP with the Python reducer of torch.compile is not reset"
    if ddp._delay_all_reduce_params:
        return "DDP with delay_all_reduce_named_params is not reset"
    if ddp.mixed_precision is not None:
        return "DDP with mixed_precision is not reset"
    data = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    if ddp._comm_hooks or data.get("comm_hook"):
        return "DDP with a communication hook keeps state that is not reset"
    if any(hasattr(one, "_in_backward_optimizers") for one in ddp._module_parameters):
        return "DDP with an optimizer in the backward is not reset"
    return ""


# --- DDP -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def reducing_alone(wrappers: Iterable[DistributedDataParallel]) -> Iterator[None]:
    """Let DDP's reducers reduce over this rank alone, without any effect on other ranks.

    A backend without communication is not enough, because the reducer reads the results of its
    all-reduces. The group has the rank and size of DDP's, and a gloo backend of one rank.
    """
    changed = list(wrappers)
    try:
        for ddp in changed:
            ddp.reducer._update_process_group(_alone_in(ddp.process_group))
        yield
    finally:
        for ddp in changed:
            ddp.reducer._update_process_group(ddp.process_group)


_alone: dict[tuple[int, int], dist.ProcessGroup] = {}
_one_rank: dist.ProcessGroupGloo | None = None


def _alone_in(group: dist.ProcessGroup) -> dist.ProcessGroup:
    global _one_rank
    place = (group.rank(), group.size())
    if place not in _alone:
        if _one_rank is None:
            _one_rank = dist.ProcessGroupGloo(HashStore(), 0, 1, timeout=_TIMEOUT)
        made = dist.ProcessGroup(HashStore(), *place)
        kind = dist.ProcessGroup.BackendType.GLOO
        for device in group._device_types:
            made._register_backend(device, kind, _one_rank)
        made._set_default_backend(kind)
        _alone[place] = made
    return _alone[place]


# --- FSDP2 ---------------------------------------------------------------------------------------


def _is_fsdp2(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _reset_fsdp(root: nn.Module) -> None:
    wrapped: list[Any] = [one for one in root.modules() if _is_fsdp2(one)]
    states = [one._get_fsdp_state() for one in wrapped]
    groups = [group for state in states for group in state._fsdp_param_groups]
    for group in groups:
        group._all_gather_result = None  # the reset would wait for it, and it has failed
    for module, state in zip(wrapped, states, strict=True):
        if state._is_root:  # None before its first forward
            module.reset_iter_state()
    for group in groups:
        for parameter in group.fsdp_params:  # the reset leaves gradients of a broken backward
            parameter.unsharded_accumulated_grad = None
            if (whole := getattr(parameter, "_unsharded_param", None)) is not None:
                whole.grad = None


def _parameters(modules: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    for module in modules:
        yield from module.parameters()


def _optimized(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]
