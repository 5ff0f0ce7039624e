"""Training with an unsupported framework feature ends at its start, with and without an agent.

The frameworks need not be installed: the classes of this file have the names that the integrations
import, and call a callback in the order of the real ones. `test_refusals.py` has the real ones.
"""

import enum
import os
import sys
from collections.abc import Iterator
from importlib import metadata
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
from torch import nn

import ftrun.integrations
from ftrun.errors import UsageError
from ftrun.ids import version
from ftrun.wire.messages.worker import decode_launch, encode_launch
from ftrun.wire.run_environment import LAUNCH
from ftrun.wire.shared_memory.pages import create_command_page, create_page
from ftrun.worker.context import worker_context
from tests.launch_requests import launch_request, launch_variables

FRAMEWORKS = ("accelerate", "lightning", "transformers")
STEPS_PER_EPOCH = 1000
WRAPPED = ("train", "_init_training_state", "_evaluate", "_run_epoch", "_load_rng_state")


class Kind(enum.Enum):
    """Accelerate's `DistributedType`."""

    NO = "NO"
    FSDP = "FSDP"
    DEEPSPEED = "DEEPSPEED"
    MEGATRON_LM = "MEGATRON_LM"


class HuggingFaceTrainer:
    """The parts of the Trainer that the callback reads, and its calls at the start."""

    def __init__(
        self, callback: Any, kind: str = "NO", *, is_fsdp2: bool = False, ignores: bool = False
    ) -> None:
        self.accelerator = SimpleNamespace(
            distributed_type=Kind[kind], is_fsdp2=is_fsdp2, scaler=None
        )
        self.args = SimpleNamespace(ignore_data_skip=ignores, gradient_accumulation_steps=2)
        self.callback_handler = SimpleNamespace(callbacks=[callback])
        self.model_wrapped = nn.Linear(2, 2)
        self.optimizer = None
        self.lr_scheduler = None

    def train(self, checkpoint_step: int | None = None) -> None:
        self.begin(checkpoint_step or 0)
        for callback in self.callback_handler.callbacks:
            now = {"train_dataloader": None}
            callback.on_train_begin(self.args, self.state, None, **now)
            callback.on_train_end(self.args, self.state, None)

    def begin(self, checkpoint_step: int) -> tuple[int, int]:
        """Completed epochs, and completed batches of the next one."""
        self.state = SimpleNamespace(global_step=checkpoint_step, log_history=[])
        found: tuple[int, int] = self._init_training_state(5 * STEPS_PER_EPOCH, STEPS_PER_EPOCH)
        return found

    def _init_training_state(self, max_steps: int, per_epoch: int) -> Any:
        epochs, steps = divmod(self.state.global_step, per_epoch)
        return epochs, 0 if self.args.ignore_data_skip else 2 * steps

    def _evaluate(self) -> None: ...

    def _run_epoch(self) -> None: ...

    def _load_rng_state(self) -> None: ...


class Strategy:
    """Lightning's base class, after the setup of a model."""

    def __init__(self) -> None:
        self.model = nn.Linear(2, 2)


DeepSpeedStrategy, FSDPStrategy, DDPStrategy = (
    type(name, (Strategy,), {}) for name in ("DeepSpeedStrategy", "FSDPStrategy", "DDPStrategy")
)


class LightningTrainer:
    """The parts of Lightning's Trainer that the callback reads, and its call at the start."""

    def __init__(self, callback: Any, strategy: Strategy) -> None:
        self.callbacks = [callback]
        self.strategy = strategy
        self.optimizers: list[Any] = []
        self.lr_scheduler_configs: list[Any] = []
        self.precision_plugin = SimpleNamespace(state_dict=dict)
        counts = {"total": {"completed": 0}, "current": {"completed": 0}}
        loops = {"state_dict": {}, "epoch_progress": counts, "epoch_loop.batch_progress": counts}
        self.fit_loop = SimpleNamespace(state_dict=loops.copy, _combined_loader=None)
        self.is_global_zero = True
        self.should_stop = False
        self.reload_dataloaders_every_n_epochs = 0

    def fit(self) -> None:
        for callback in self.callbacks:
            callback.on_train_start(self, self.strategy.model)
            callback.on_train_end(self, self.strategy.model)


MODULES = {
    "accelerate": {"Accelerator": object},
    "accelerate.data_loader": {"DataLoaderDispatcher": type("DataLoaderDispatcher", (), {})},
    "accelerate.utils": {"DistributedType": Kind},
    "transformers": {
        "Trainer": HuggingFaceTrainer,
        "TrainerCallback": object,
        "TrainerControl": object,
        "TrainerState": object,
        "TrainingArguments": object,
    },
    "transformers.trainer_callback": {"ExportableState": type("ExportableState", (), {})},
    "lightning": {},
    "lightning.pytorch": {
        "Callback": object,
        "LightningModule": nn.Module,
        "Trainer": LightningTrainer,
    },
    "lightning.pytorch.strategies": {
        "DeepSpeedStrategy": DeepSpeedStrategy,
        "FSDPStrategy": FSDPStrategy,
        "Strategy": Strategy,
    },
}


def loaded() -> dict[str, ModuleType]:
    """Modules of the frameworks and of their integrations."""
    roots = (*FRAMEWORKS, *(f"ftrun.integrations.{name}" for name in FRAMEWORKS))
    return {
        name: module
        for name, module in sys.modules.items()
        if any(name == root or name.startswith(f"{root}.") for root in roots)
    }


def forget(modules: dict[str, ModuleType]) -> None:
    for name in modules:
        del sys.modules[name]
    for name in FRAMEWORKS:
        vars(ftrun.integrations).pop(name, None)


@pytest.fixture(autouse=True)
def frameworks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The classes of this file in place of the frameworks, installed or not."""
    kept = loaded()
    attributes = {n: m for n, m in vars(ftrun.integrations).items() if n in FRAMEWORKS}
    forget(kept)
    monkeypatch.setattr(metadata, "version", lambda name: "99.0")
    for name in WRAPPED:
        monkeypatch.setattr(HuggingFaceTrainer, name, vars(HuggingFaceTrainer)[name])
    for name, content in MODULES.items():
        module = sys.modules[name] = ModuleType(name)
        vars(module).update(content)
    try:
        yield
    finally:
        forget(loaded())
        sys.modules.update(kept)
        vars(ftrun.integrations).update(attributes)


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The variables of a rank that an agent has started."""
    fds = {"heartbeat": create_page("beat"), "command": create_command_page()}
    for name, value in launch_variables("refusals", launch_request(descriptors=fds)).items():
        monkeypatch.setenv(name, value)
    worker_context.cache_clear()
    yield monkeypatch
    worker_context.cache_clear()


def hugging_face(*args: Any, named: dict[str, Any] | None = None, **kind: Any) -> Any:
    from ftrun.integrations.transformers import FtrunCallback

    return HuggingFaceTrainer(FtrunCallback(**(named or {})), *args, **kind)


def lightning(strategy: Strategy, **named: Any) -> Any:
    from ftrun.integrations.lightning import FtrunCallback

    return LightningTrainer(FtrunCallback(**named), strategy)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("DEEPSPEED", "DEEPSPEED.*ftrun.integrations.deepspeed"),
        ("MEGATRON_LM", "MEGATRON_LM"),
        ("FSDP", "FSDP1.*'version': 2"),
    ],
)
def test_a_trainer_with_an_engine_that_is_not_taken(kind: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        hugging_face(kind).train()


def test_a_trainer_with_an_engine_that_is_not_taken_under_an_agent(
    inside: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UsageError, match="FSDP1"):
        hugging_face("FSDP").begin(0)


@pytest.mark.parametrize(("kind", "is_fsdp2"), [("NO", False), ("FSDP", True)])
def test_a_trainer_that_is_taken(kind: str, is_fsdp2: bool) -> None:
    trainer = hugging_face(kind, is_fsdp2=is_fsdp2)
    trainer.train()
    assert trainer.callback_handler.callbacks[0].session is None


@pytest.mark.parametrize(
    ("ignores", "step", "is_taken"),
    [(True, 750, False), (True, 0, True), (True, 2 * STEPS_PER_EPOCH, True), (False, 750, True)],
)
def test_a_checkpoint_within_an_epoch_and_a_trainer_that_ignores_the_place_in_the_data(
    ignores: bool, step: int, is_taken: bool
) -> None:
    trainer = hugging_face(ignores=ignores)
    if is_taken:
        trainer.train(step)
    else:
        with pytest.raises(UsageError, match="ignore_data_skip=True"):
            trainer.train(step)


def test_a_checkpoint_of_the_script_does_not_count_where_ftrun_restores(
    inside: pytest.MonkeyPatch,
) -> None:
    """The first start has no checkpoint and is accepted; a restart finds the one of step 750."""
    trainer = hugging_face(ignores=True)
    assert trainer.begin(0) == (0, 0)
    with pytest.raises(UsageError, match="ignore_data_skip=True"):
        trainer.begin(750)
    request = decode_launch(os.environ[LAUNCH])
    restarted = msgspec.structs.replace(request, restore=version(0, 1760))
    inside.setenv(LAUNCH, encode_launch(restarted).decode())
    worker_context.cache_clear()
    assert trainer.begin(750) == (1, 2 * 760)
    assert trainer.state.global_step == 1760


def test_a_trainer_that_trains_twice() -> None:
    trainer = hugging_face()
    trainer.train()
    with pytest.raises(UsageError, match="supports one train"):
        trainer.train()


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (DeepSpeedStrategy, "DeepSpeedStrategy.*ftrun.integrations.deepspeed"),
        (FSDPStrategy, "FSDPStrategy.*FSDP1.*ModelParallelStrategy"),
    ],
)
def test_a_strategy_that_is_not_taken(strategy: type[Strategy], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        lightning(strategy()).fit()


def test_loaders_that_are_created_again() -> None:
    trainer = lightning(DDPStrategy())
    trainer.reload_dataloaders_every_n_epochs = 1
    with pytest.raises(UsageError, match=r"reload_dataloaders_every_n_epochs.*set_epoch"):
        trainer.fit()


def test_a_strategy_that_is_not_taken_under_an_agent(inside: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="FSDP1"):
        lightning(FSDPStrategy()).fit()


def test_a_strategy_that_is_taken_once() -> None:
    trainer = lightning(DDPStrategy())
    trainer.fit()
    assert trainer.callbacks[0].session is None
    with pytest.raises(UsageError, match="supports one fit"):
        trainer.fit()


@pytest.mark.parametrize("framework", ["transformers", "lightning"])
def test_something_without_a_state_is_refused_without_an_agent_too(framework: str) -> None:
    start = (
        lightning(DDPStrategy(), ema=object()).fit
        if framework == "lightning"
        else hugging_face(named={"ema": object()}).train
    )
    with pytest.raises(UsageError, match="ema"):
        start()
