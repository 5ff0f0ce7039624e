"""Lightning: `Trainer(callbacks=[FtrunCallback()])`.

Runs in:  worker; if ftrun did not start the process, it only checks for unsupported settings.
Takes in: a Trainer that fits.
Gives:    snapshots between two batches; after a restart `fit` continues after the last one.

A step boundary is marked when the next batch is about to be trained on. Everything that Lightning
does after a batch (validation, schedulers, callbacks, checkpoints) therefore belongs to that batch.
Within an accumulation no snapshot is taken: a fault there returns to the last optimizer step.

Exact: model, optimizers, schedulers, precision plugin, counters of all loops, the state_dict of
each callback and of the datamodule, averaged weights of callbacks, the order of one train loader
with indices, and random numbers drawn while it loads in this process. Not exact: random numbers
drawn in loader worker processes, and averages of logged values over an epoch, which start at the
restart. The same holds for metrics without persistent state and for callbacks that monitor them.
Not saved: what a module or another callback adds in `on_save_checkpoint` (give it to the callback
by name), and the position in several loaders.
Refused: DeepSpeedStrategy, FSDPStrategy (FSDP1), and reload_dataloaders_every_n_epochs.

Lightning runs forward and backward within `optimizer.step`, so the lazy copy overlaps little. With
another number of ranks its counters keep their values, and the data continue after the samples that
all ranks have used.
"""

import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from ftrun.errors import UsageError
from ftrun.integrations.libraries import is_inside, numbered, require
from ftrun.integrations.read_ahead import PrefetchingPosition
from ftrun.worker.session import Session, attach

require("lightning", at_least="2.6")

from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, Strategy  # noqa: E402

_log = logging.getLogger(__name__)

_OF_THE_BATCH = ("epoch_progress", "epoch_loop.batch_progress")


class FtrunCallback(Callback):
    """Takes snapshots of a `Trainer.fit`, and restores them.

    Args:
        warmup: as for `ftrun.attach`.
        named: other objects with a state, as for `ftrun.attach`.
    """

    def __init__(self, *, warmup: Callable[[], object] | None = None, **named: Any) -> None:
        self._warmup = warmup
        self._named = named
        self.session: Session | None = None
        """The session after the training has begun; None outside ftrun."""
        self._feed: PrefetchingPosition | None = None
        self._has_started = False
        self._has_trained = False
        self._is_first_pass = True

    # --- hooks, in the order in which Lightning calls them ---------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._has_started:
            raise UsageError("FtrunCallback supports one fit() per run of ftrun")
        if reason := refusal(trainer.strategy):
            raise UsageError(f"FtrunCallback does not support {reason}")
        if trainer.reload_dataloaders_every_n_epochs:
            raise UsageError(
                "FtrunCallback does not support reload_dataloaders_every_n_epochs: a restart "
                "cannot create the loader of an earlier epoch again; keep one loader, and let the "
                "set_epoch() of its sampler choose the data of an epoch"
            )
        is_run = is_inside("FtrunCallback")
        feed = _feed_of(trainer) if is_run else None
        session = attach(
            model=trainer.strategy.model,
            optimizer=numbered(trainer.optimizers),
            scheduler=numbered([config.scheduler for config in trainer.lr_scheduler_configs]),
            loader=feed,
            warmup=self._warmup,
            loops=LoopCounters(trainer),
            callbacks=CallbackStates(trainer, self),
            **_averages(trainer),
            **self._named,
        )
        self._has_started = True
        if not is_run:
            session.close()  # attach() has checked the state
            return
        self._feed, self.session = feed, session
        _report_unsaved(trainer, self)
        if feed is not None and feed.is_indexed:
            warnings.filterwarnings("ignore", ".*your dataloader is not resumable")
        loop = trainer.fit_loop
        if loop.restarted_mid_epoch or loop.restarted_on_epoch_end:
            # Lightning continues a checkpoint of the script without calling this hook.
            self.on_train_epoch_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.session is None or self._feed is None:
            return
        self._feed.begin_pass(self.session.begin)
        if self._is_first_pass:
            # Lightning has created its first iterator before the restored position was known. A
            # second iterator replaces it, and the random states from before its own draws are put
            # back.
            self._is_first_pass = False
            fetcher = iter(trainer.fit_loop._data_fetcher)
            self._feed.undo_first_draws()
            if not self._feed.is_indexed:
                _drop(fetcher, self._feed.trained_on)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.session is None:
            return
        if self._feed is not None:
            self._feed.resolve()
        self.session.begin()
        if self._has_trained:
            self.session.step_done()
        self._has_trained = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.session is None:
            return
        self._has_trained = True
        if self._feed is not None:
            self._feed.trained()
        if isinstance(outputs, Mapping) and "loss" in outputs:
            self.session.report(loss=outputs["loss"])

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.session is not None:
            self.session.phase("eval")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.session is not None:
            self.session.phase("train")

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.session is not None and self._has_trained:
            self.session.snapshot()
            self.session.step_done()
            self._has_trained = False


def refusal(strategy: Strategy) -> str | None:
    """Why a strategy is unsupported, and the remedy; None if it is supported."""
    name = type(strategy).__name__
    if isinstance(strategy, DeepSpeedStrategy):
        return (
            f"{name}: its engine keeps state that Lightning does not see; train with "
            "deepspeed.initialize() and ftrun.integrations.deepspeed, or use strategy='ddp'"
        )
    if isinstance(strategy, FSDPStrategy):
        return (
            f"{name}, which is FSDP1: its flat parameters have no names that another number of "
            "ranks could read; use FSDP2: ModelParallelStrategy() with fully_shard() in "
            "configure_model(), or strategy='ddp'"
        )
    return None


class LoopCounters:
    """The counters of Lightning's loops, as they are between two batches.

    They are loaded once. A second load restores state that the script has overwritten, and by then
    the loops have begun.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._is_loaded = False

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._trainer.fit_loop.state_dict()
        state["state_dict"].pop("combined_loader", None)  # the feed has the position
        for name in _OF_THE_BATCH:
            for counted in (state[name]["total"], state[name]["current"]):
                counted.update(dict.fromkeys(counted, counted["completed"]))
        state["epoch_loop.batch_progress"]["is_last_batch"] = False
        state["should_stop"] = self._trainer.should_stop
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._is_loaded:
            return
        self._is_loaded = True
        loop = self._trainer.fit_loop
        loop.load_state_dict(state)
        # Early stopping may have ended the fit, or may wait for min_epochs.
        self._trainer.should_stop |= state.get("should_stop", False)
        # Only the loop over batches can be restarted in the middle. If the loop over epochs counted
        # as restarting, it would skip work at the end of the resumed epoch that an undisturbed run
        # does.
        loop._restarting = False
        # A checkpoint that the script has loaded before was of another place in the epoch.
        loop.reset_restart_stage()
        loop.epoch_loop.reset_restart_stage()
        is_within = state["epoch_loop.batch_progress"]["current"]["completed"] > 0
        loop.epoch_loop.restarting = is_within
        if is_within:
            loop.epoch_loop.update_restart_stage()
            _omit_first_check(loop.epoch_loop)


def _omit_first_check(epoch_loop: Any) -> None:
    """Makes the restarted loop train at once.

    The validation after the last batch is part of the snapshot. Lightning would not repeat it, but
    it would step the schedulers and count the batch again.
    """

    def no_validation(_: Any) -> bool:
        del epoch_loop._should_check_val_fx
        return False

    epoch_loop._should_check_val_fx = no_validation


class CallbackStates:
    """The state of the precision plugin, the datamodule and other callbacks for a checkpoint."""

    def __init__(self, trainer: Trainer, own: Callback) -> None:
        self._holders: dict[str, Any] = {
            callback.state_key: callback for callback in trainer.callbacks if callback is not own
        }
        self._holders["precision"] = trainer.precision_plugin
        datamodule = getattr(trainer, "datamodule", None)
        if datamodule is not None:
            self._holders["datamodule"] = datamodule

    def state_dict(self) -> dict[str, Any]:
        return {name: holder.state_dict() for name, holder in self._holders.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, holder in self._holders.items():
            if state.get(name):
                holder.load_state_dict(state[name])


def _averages(trainer: Trainer) -> dict[str, Any]:
    """The averaged weights of callbacks such as EMAWeightAveraging, which no state_dict has."""
    found = [getattr(callback, "_average_model", None) for callback in trainer.callbacks]
    return {f"average_{at}": model for at, model in enumerate(found) if model is not None}


def _report_unsaved(trainer: Trainer, own: Callback) -> None:
    for callback in trainer.callbacks if trainer.is_global_zero else ():
        is_saved = callback is own or getattr(callback, "_average_model", None) is not None
        if type(callback).on_save_checkpoint is not Callback.on_save_checkpoint and not is_saved:
            _log.warning(
                "not bitwise: no snapshot holds what %s adds in on_save_checkpoint; give that "
                "state to FtrunCallback by name",
                type(callback).__name__,
            )


def _drop(fetcher: Any, count: int) -> None:
    """Skips the batches that were trained on before the restart.

    The count that Lightning has restored contains them already.
    """
    fetched = fetcher.fetched
    for _ in range(count):
        next(fetcher, None)
    fetcher.fetched = fetched


def _feed_of(trainer: Trainer) -> PrefetchingPosition | None:
    combined = trainer.fit_loop._combined_loader
    loaders = [] if combined is None else combined.flattened
    if len(loaders) == 1:
        return PrefetchingPosition("loader", loaders[0])
    if trainer.is_global_zero:
        _log.warning("not bitwise: a restart repeats the pass over %d loaders", len(loaders))
    return None
