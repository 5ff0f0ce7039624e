"""Hugging Face's Trainer: `Trainer(..., callbacks=[FtrunCallback()])`.

Runs in:  worker; if ftrun did not start the process, it only checks for unsupported settings.
Takes in: a Trainer that trains.
Gives:    snapshots between two steps; after a restart `train` continues after the last one.

A step boundary is marked when the next step is about to begin. Everything that the Trainer does
after a step (logging, evaluation, saving) therefore belongs to that step. A step is an optimizer
step: a fault within an accumulation returns to the last one.

The Trainer itself can resume in the middle of an epoch, after `resume_from_checkpoint`. It does not
ask a callback where to resume. Some of its methods are therefore wrapped, for Trainers that have
this callback. A checkpoint that the script resumes from is not read where a snapshot is restored.

Exact: model, optimizer, scheduler, scaler, the state of the Trainer with its log, callbacks that
have an exported state, the order of the data, and random numbers drawn while batches are loaded in
this process, such as random masking. Not exact: random numbers drawn in loader worker processes,
and iterable data sets whose random numbers are drawn between others. Refused: DeepSpeed, FSDP1,
batches that rank 0 dispatches from an indexed data set, several calls of `train` in one run.

With another number of ranks the Trainer resumes from the same step, which then is another position
in the data. `ignore_data_skip` applies to the checkpoint that a script resumes from. A restart by
ftrun always skips the batches that were trained on.
"""

import functools
import json
from collections.abc import Callable
from typing import Any

from ftrun.errors import NotSupportedHere, UsageError
from ftrun.ids import Version
from ftrun.integrations.libraries import is_inside, require
from ftrun.integrations.read_ahead import PrefetchingPosition
from ftrun.worker.context import worker_context
from ftrun.worker.session import Session, attach

require("transformers", at_least="5.0")

from transformers import Trainer, TrainerCallback, TrainerState  # noqa: E402
from transformers.trainer_callback import ExportableState  # noqa: E402

from ftrun.integrations import accelerate  # noqa: E402

_WRAPPED = ("train", "_init_training_state", "_evaluate", "_run_epoch", "_load_rng_state")
_HERE = "ftrun"
"""Replaces the folder of a checkpoint, because the state is in memory."""

_OF_THE_STATE = (
    "epoch", "global_step", "total_flos", "num_input_tokens_seen",
    "best_metric", "best_global_step", "best_model_checkpoint",
)  # fmt: skip
_OF_THE_TRAINER = (
    "_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "current_flos",
    "_initial_global_step", "_initial_num_input_tokens_seen",
)  # fmt: skip


class FtrunCallback(TrainerCallback):
    """Takes snapshots of a `Trainer.train`, and restores them.

    Args:
        warmup: as for `ftrun.attach`.
        named: other objects with a state, as for `ftrun.attach`.
    """

    def __init__(self, *, warmup: Callable[[], object] | None = None, **named: Any) -> None:
        self._warmup = warmup
        self._named = named
        self._trainer: Any = None
        self.session: Session | None = None
        """The session after the training has begun; None outside ftrun."""
        self._feed: PrefetchingPosition | None = None
        self._progress: TrainerProgress | None = None
        self.place = (0, 0)
        """Epoch to begin with, and the number of its batches that were trained on before."""
        is_inside("FtrunCallback")
        _wrap()

    # --- the Trainer's own methods ---------------------------------------------------------------

    def where_to_begin(self, trainer: Any, found: tuple[int, int], per_epoch: int) -> Any:
        """Completed epochs, and completed batches of the next one, as they follow from the step.

        The place that the snapshot holds replaces them, unless it is that of another number of
        ranks.
        """
        self._trainer = trainer
        restore = _version_to_restore()
        # A restore by ftrun sets the position in the data, whatever checkpoint the script has
        # found.
        batches_done = trainer.state.global_step % per_epoch if restore is None else 0
        if reason := refusal(trainer, batches_done):
            raise UsageError(f"FtrunCallback does not support {reason}")
        if restore is None:
            self.place = found
        else:
            step = trainer.state.global_step = int(restore.step)
            epochs, steps = divmod(step, per_epoch)
            self.place = epochs, steps * trainer.args.gradient_accumulation_steps
        return self.place

    @property
    def is_before_restored_epoch(self) -> bool:
        """Whether the work before the first epoch is part of the restored snapshot."""
        is_restored = self.session is not None and self.session.restored
        return is_restored and self._progress is not None and self._progress.epoch is None

    def epoch_begins(self, epoch: int, loader: Any) -> bool:
        """Prepares for an epoch; False if nothing of it is left to train."""
        assert self.session is not None
        assert self._feed is not None
        assert self._progress is not None
        if self._progress.is_finished:
            self._trainer.control.should_training_stop = True
            return False
        first, batches_done = self.place
        if epoch < first:
            return False
        self._progress.epoch = epoch
        self._feed.begin_pass(self._begin, behind=batches_done if epoch == first else None)
        # A copy of the loader that skips batches does not pass set_epoch() to its samplers.
        reported: Any = loader
        while reported is not None:
            if callable(set_epoch := getattr(reported, "set_epoch", None)):
                set_epoch(epoch)
            reported = getattr(reported, "batch_sampler", None)
        return True

    # --- hooks, in the order in which the Trainer calls them -------------------------------------

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **now: Any) -> None:
        trainer = self._trainer
        if trainer is None:
            raise UsageError(
                "FtrunCallback has no Trainer: a subclass overrides _init_training_state() "
                "without calling it"
            )
        if self._progress is not None and self._progress.is_finished:
            raise UsageError("FtrunCallback supports one train() per run of ftrun")
        if self.session is not None:
            self.session.close()  # the Trainer has restarted, with smaller batches
        if reason := accelerate.refusal_of_loader(now["train_dataloader"]):
            raise UsageError(f"FtrunCallback does not support {reason}")
        feed = None
        if worker_context() is not None:
            feed = PrefetchingPosition("loader", now["train_dataloader"], leaves_out=False)
        self._progress = TrainerProgress(trainer)
        session = attach(
            model=trainer.model_wrapped,
            optimizer=getattr(trainer.optimizer, "optimizer", trainer.optimizer),
            scheduler=trainer.lr_scheduler,
            scaler=trainer.accelerator.scaler,
            loader=feed,
            warmup=self._warmup,
            trainer=self._progress,
            **self._named,
        )
        if feed is None:
            session.close()  # attach() has checked the state
            return
        self._feed, self.session = feed, session
        context, epoch = worker_context(), self._progress.restored_epoch
        if epoch is not None and context is not None and not context.is_resized:
            self.place = epoch, feed.trained_on

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **now: Any) -> None:
        if self.session is None or self._feed is None:
            return
        self._feed.resolve()
        self.session.phase("train")
        if state.global_step > self.session.step:
            self.session.step_done()

    def on_substep_end(self, args: Any, state: TrainerState, control: Any, **now: Any) -> None:
        if self._feed is not None:
            self._feed.trained()

    on_step_end = on_substep_end

    def on_prediction_step(self, args: Any, state: TrainerState, control: Any, **now: Any) -> None:
        if self.session is not None:
            self.session.phase("eval")

    def on_log(self, args: Any, state: TrainerState, control: Any, **now: Any) -> None:
        loss = (now.get("logs") or {}).get("loss")
        if self.session is not None and isinstance(loss, int | float):
            self.session.report(loss=float(loss))

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **now: Any) -> None:
        if self._progress is not None:
            self._progress.is_finished = True
        if self.session is not None and state.global_step > self.session.step:
            self.session.snapshot()
            self.session.step_done()

    def _begin(self) -> None:
        assert self.session is not None
        self.session.begin(done=self._trainer.state.global_step)


class TrainerProgress:
    """The Trainer's counters, its log, and the exported state of its callbacks."""

    def __init__(self, trainer: Any) -> None:
        self.is_finished = False
        self.epoch: int | None = None
        """Index of the epoch; None before the first."""
        self.restored_epoch: int | None = None
        self._trainer = trainer
        self._lines: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        trainer, state = self._trainer, self._trainer.state
        return {
            "state": {n: getattr(state, n) for n in _OF_THE_STATE if hasattr(state, n)},
            "trainer": {n: getattr(trainer, n) for n in _OF_THE_TRAINER if hasattr(trainer, n)},
            "log": self._log(state.log_history),
            "callbacks": {
                name: json.dumps(one.state()["attributes"]) for name, one in self._exporting()
            },
            "is_finished": self.is_finished,
            "epoch": self.epoch,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        trainer, state = self._trainer, self._trainer.state
        for holder, values in ((state, saved["state"]), (trainer, saved["trainer"])):
            for name, value in values.items():
                before = getattr(holder, name, None)
                setattr(holder, name, value.to(before) if hasattr(before, "device") else value)
        self._lines = saved["log"].splitlines()
        state.log_history[:] = [json.loads(line) for line in self._lines]
        for name, one in self._exporting():
            for attribute, value in json.loads(saved["callbacks"].get(name, "{}")).items():
                setattr(one, attribute, value)
        self.is_finished = saved["is_finished"]
        self.restored_epoch = saved.get("epoch")

    def _log(self, history: list[dict[str, float]]) -> str:
        # Encodes only new entries, because encoding a long log at each boundary would be slow.
        self._lines += [json.dumps(entry) for entry in history[len(self._lines) :]]
        return "\n".join(self._lines)

    def _exporting(self) -> list[tuple[str, Any]]:
        callbacks = self._trainer.callback_handler.callbacks
        found = [one for one in callbacks if isinstance(one, ExportableState)]
        return [(f"{at}.{type(one).__name__}", one) for at, one in enumerate(found)]


def _wrap() -> None:
    """Makes Trainers with this callback begin where the snapshot was taken."""
    missing = [name for name in _WRAPPED if not hasattr(Trainer, name)]
    if missing:
        raise NotSupportedHere(
            f"this version of transformers has no Trainer.{missing[0]}(), which ftrun needs to "
            "resume within an epoch; docs/frameworks.md names the tested versions"
        )
    for around in (train, _init_training_state, _evaluate, _run_epoch, _load_rng_state):
        original = getattr(Trainer, around.__name__)
        if not hasattr(original, "__wrapped__"):
            setattr(Trainer, around.__name__, _wrapped(original, around))


def _wrapped(original: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(trainer: Any, *args: Any, **named: Any) -> Any:
        return around(trainer, original, *args, **named)

    return method


def train(
    trainer: Any, original: Any, resume_from_checkpoint: Any = None, *args: Any, **named: Any
) -> Any:
    # A snapshot replaces what a checkpoint holds, and the fault may have left a partial one.
    if _callback_of(trainer) is not None and _version_to_restore() is not None:
        resume_from_checkpoint = None
    return original(trainer, resume_from_checkpoint, *args, **named)


def _init_training_state(
    trainer: Any, original: Any, max_steps: int, per_epoch: int, *args: Any, **named: Any
) -> Any:
    found = original(trainer, max_steps, per_epoch, *args, **named)
    callback = _callback_of(trainer)
    return callback.where_to_begin(trainer, found, per_epoch) if callback is not None else found


def _evaluate(trainer: Any, original: Any, *args: Any, **named: Any) -> Any:
    callback = _callback_of(trainer)
    if callback is not None and callback.is_before_restored_epoch:
        return None
    return original(trainer, *args, **named)


def _run_epoch(trainer: Any, original: Any, *args: Any, **named: Any) -> Any:
    callback = _callback_of(trainer)
    if callback is None or callback.session is None:
        return original(trainer, *args, **named)
    if not callback.epoch_begins(named["epoch"], named["train_dataloader"]):
        return None
    if not callback.session.restored:
        return original(trainer, *args, **named)
    named["resume_from_checkpoint"] = _HERE
    named["epochs_trained"], named["steps_trained_in_current_epoch"] = callback.place
    arguments = trainer.args
    ignores, arguments.ignore_data_skip = arguments.ignore_data_skip, False
    try:
        return original(trainer, *args, **named)
    finally:
        arguments.ignore_data_skip = ignores


def refusal(trainer: Any, batches_done: int) -> str | None:
    """The unsupported setting of a Trainer, and the remedy; None if it is supported.

    `batches_done`: batches of the epoch at the checkpoint that the script resumes from; 0 if a
    restore by ftrun takes precedence.
    """
    accelerator = trainer.accelerator
    is_fsdp2 = getattr(accelerator, "is_fsdp2", False)
    if reason := accelerate.refusal(accelerator.distributed_type, is_fsdp2=is_fsdp2):
        return reason
    if trainer.args.ignore_data_skip and batches_done:
        return (
            "ignore_data_skip=True with a checkpoint from within an epoch: the position in the "
            "data no longer follows from the step; leave ignore_data_skip out"
        )
    return None


def _load_rng_state(trainer: Any, original: Any, checkpoint: Any) -> None:
    if checkpoint != _HERE:
        original(trainer, checkpoint)


def _version_to_restore() -> Version | None:
    context = worker_context()
    return context.restore if context is not None else None


def _callback_of(trainer: Any) -> FtrunCallback | None:
    callbacks = trainer.callback_handler.callbacks
    return next((one for one in callbacks if isinstance(one, FtrunCallback)), None)
