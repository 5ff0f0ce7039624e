"""DeepSpeed: `attach(engine)` attaches an engine, with any stage of ZeRO.

Runs in:  worker; also under plain python or torchrun, without snapshots.
Takes in: the engine that `deepspeed.initialize` returned, before the first step.
Gives:    the session that `ftrun.attach` returns; each micro-batch ends with a step boundary.

The attached state is what `engine.save_checkpoint` would save. Gradients are not part of it. The
engine's own counters show whether an accumulation is incomplete, so a fault within one returns to
its beginning.

Stages 1 and 2: each rank's flat partition of the fp32 parameters is the parameter of the inner
optimizer. It is therefore copied while the next step computes, as are its moments. The module is
copied at the boundary. Layout rules that are made here describe which tensors the flat row
contains, so another number of ranks can resume from the same snapshot. Stage 3: the state that the
engine's optimizer returns is copied at the boundary, and only the same number of ranks can resume
from it.

Not supported: offload, pipelines, mixtures of experts, and features that choose data or layers by a
state of their own (curriculum, random-LTD). Read in DeepSpeed 0.19.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import yaml

from ftrun.errors import ShapeChanged, UsageError
from ftrun.integrations.libraries import require
from ftrun.sharding.rule_parser import read_rules
from ftrun.sharding.rules import ShardingRules
from ftrun.worker.session import Session
from ftrun.worker.session import attach as attach_parts
from ftrun.worker.state.attached import held_by

require("deepspeed", at_least="0.19")

from deepspeed import DeepSpeedEngine, PipelineEngine  # noqa: E402
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3  # noqa: E402
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer  # noqa: E402

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_OPTIMIZER = "optimizer_state_dict"
_FP32 = "fp32_flat_groups"


def attach(
    engine: DeepSpeedEngine,
    *,
    loader: object = None,
    warmup: Callable[[], object] | None = None,
    **named: Any,
) -> Session:
    """Attaches all that this engine trains, and restores a snapshot if there is one.

    Args:
        engine: as `deepspeed.initialize` returned it.
        loader: as for `ftrun.attach`.
        warmup: as for `ftrun.attach`.
        named: other objects with a state, as for `ftrun.attach`.

    Raises:
        UsageError: this engine has a state that is not supported here.
        SnapshotError: the restored state does not fit.
    """
    if refused := next(_refused(engine), None):
        raise UsageError(f"ftrun.integrations.deepspeed does not support {refused}")
    named = {"engine": EngineCounters(engine), "loss_scaler": LossScaler(engine.optimizer), **named}
    model: Any = engine.module
    optimizer: Any = engine.optimizer
    layout = None
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        named["zero"] = Stage3(engine)
        model, optimizer = {}, None
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        layout = _layout(engine, ["scheduler", *named])
        optimizer = optimizer.optimizer
    return attach_parts(
        model=model,
        optimizer=optimizer,
        scheduler=engine.lr_scheduler,
        loader=loader,
        warmup=warmup,
        layout=layout,
        **named,
    )


def _refused(engine: DeepSpeedEngine) -> Iterator[str]:
    optimizer = engine.optimizer
    if isinstance(engine, PipelineEngine):
        yield "a pipeline: its stages have modules of their own"
    if engine.has_moe_layers:
        yield "a mixture of experts: its experts are on some ranks only"
    if engine.zero_use_cpu_optimizer() or engine.zero_offload_param() is not None:
        yield "offload: leave offload_optimizer and offload_param out"
    if engine.random_ltd_enabled() or engine.curriculum_learning_enabled():
        yield "data efficiency, which chooses layers or data by a state of its own"
    if isinstance(optimizer, DeepSpeedZeroOptimizer | DeepSpeedZeroOptimizer_Stage3):
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        yield (
            f"the optimizer {type(optimizer).__name__}: use ZeRO (zero_optimization.stage 1 to 3), "
            "with gradients in the dtype of the parameters, or stage 0 in fp32"
        )


class EngineCounters:
    """The counters of an engine; they show where an accumulation ends."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine
        self._seen: int = engine.global_steps

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self._engine, name) for name in _COUNTERS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self._engine, name, value)
        self._seen = self._engine.global_steps

    def is_within_accumulation(self) -> bool:
        """Whether the engine has made no optimizer step since the last call."""
        before, self._seen = self._seen, self._engine.global_steps
        return before == self._seen


class LossScaler:
    """The loss scale of a DeepSpeed optimizer, and its record of overflows."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        scaler = getattr(self._optimizer, "loss_scaler", None)
        autocast = getattr(self._optimizer, "torch_autocast_gradscaler", None)
        values = {} if scaler is None else vars(scaler)
        return {
            "scaler": {k: v for k, v in values.items() if isinstance(v, int | float)},
            "autocast": None if autocast is None else autocast.state_dict(),
            "overflow": bool(getattr(self._optimizer, "overflow", False)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state["scaler"].items():
            setattr(self._optimizer.loss_scaler, name, value)
        if state["autocast"] is not None:
            self._optimizer.torch_autocast_gradscaler.load_state_dict(state["autocast"])
        if hasattr(self._optimizer, "overflow"):
            self._optimizer.overflow = state["overflow"]


class Stage3:
    """Parameters, buffers and optimizer of ZeRO-3: the partitions of this rank."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._zero = engine.optimizer
        self.covered_optimizers = (self._zero.optimizer,)
        """Optimizers whose state is part of this state."""
        self._module = engine.module
        self._ranks: int = engine.dp_world_size

    def state_dict(self) -> dict[str, Any]:
        own = self._zero.state_dict()
        return {
            "ranks": self._ranks,
            "fp32": dict(enumerate(own[_FP32])),
            "optimizer": own[_OPTIMIZER],
            "frozen": self._frozen(),
            "buffers": dict(self._module.named_buffers()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["ranks"] != self._ranks:
            raise ShapeChanged(
                key="ZeRO-3",
                saved=f"partitions of {state['ranks']} ranks",
                present=f"{self._ranks} ranks; only the same number can resume",
            )
        with torch.no_grad():
            for present, saved in (
                (self._frozen(), state["frozen"]),
                (dict(self._module.named_buffers()), state["buffers"]),
            ):
                for name, tensor in present.items():
                    tensor.copy_(saved[name])
        own = self._zero.state_dict()
        own |= {_FP32: list(state["fp32"].values()), _OPTIMIZER: state["optimizer"]}
        self._zero.load_state_dict([own] * self._ranks)
        self._zero.checkpoint_event_epilogue()  # small parameters are whole on every rank

    def _frozen(self) -> dict[str, torch.Tensor]:
        """This rank's partitions of the parameters that no optimizer updates."""
        return {
            name: parameter.ds_tensor
            for name, parameter in self._module.named_parameters()
            if not parameter.requires_grad
        }


def _layout(engine: DeepSpeedEngine, others: list[str]) -> ShardingRules | None:
    """How ranks share the flat rows of stages 1 and 2; None if no rule can describe it.

    `others`: names of the other attached objects, which are equal on all ranks.
    """
    zero = engine.optimizer
    is_spaced = any(map(any, getattr(zero, "round_robin_bit16_padding", ())))
    if engine.mp_world_size > 1 or zero.round_robin_gradients or is_spaced:
        return None
    names = {id(one.tensor): one.name for one in held_by(engine.module, "model")}
    rows = [
        {
            "name": f"optimizer.params[{at}][0]",
            "axis": "dp",
            "pad_to": zero.nccl_start_alignment_factor,
            "tensors": {names[id(one)]: list(one.shape) for one in group},
        }
        for at, group in enumerate(zero.bit16_groups)
    ]
    patterns = ["model.*", *(words for name in others for words in (name, f"{name}.*"))]
    mesh = {"dp": engine.dp_world_size}
    rules = {"mesh": mesh, "replicate": patterns, "own": ["loader*"], "flat": rows}
    text = yaml.safe_dump(rules, sort_keys=False)
    return read_rules(text, source="ftrun.integrations.deepspeed")
