"""Accelerate: `attach(accelerator)` attaches everything that `accelerator.prepare` was given.

Runs in:  worker; also under plain python or torchrun, without snapshots.
Takes in: an Accelerator, after `prepare`.
Gives:    the session that `ftrun.attach` returns, for loops over the prepared loader.

The attached state is what `accelerator.save_state` would save: models, optimizers, schedulers, the
scaler, loaders, and the objects given to `register_for_checkpointing`.

Exact: steps, accumulation (a fault within one returns to the last optimizer step), the order of the
data, random numbers drawn while batches are loaded in this process. Not exact: random numbers drawn
in loader worker processes, and iterable data sets whose random numbers are drawn between others.
Refused: dispatch_batches with an indexed data set, FSDP1, and DeepSpeed and Megatron-LM under
Accelerate, because their engines keep state of their own (for DeepSpeed without Accelerate see
`deepspeed.py`).
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset

from ftrun.errors import UsageError
from ftrun.integrations.libraries import numbered, require
from ftrun.integrations.read_ahead import PrefetchingPosition
from ftrun.worker.session import Session
from ftrun.worker.session import attach as attach_parts
from ftrun.worker.state import determinism as rng

require("accelerate", at_least="1.0")

from accelerate import Accelerator  # noqa: E402
from accelerate.data_loader import DataLoaderDispatcher  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402

_REMEDIES = {
    DistributedType.DEEPSPEED: "train with deepspeed.initialize() and ftrun.integrations.deepspeed",
    DistributedType.MEGATRON_LM: "use DDP, or FullyShardedDataParallelPlugin(fsdp_version=2)",
}


def attach(
    accelerator: Accelerator, *, warmup: Callable[[], object] | None = None, **named: Any
) -> Session:
    """Attaches all that this Accelerator has prepared, and restores a snapshot if there is one.

    Args:
        accelerator: after `prepare`; loop over `session.batches(loader)` with the loader that
            `prepare` returned.
        warmup: as for `ftrun.attach`.
        named: other objects with a state, as for `ftrun.attach`.

    Raises:
        UsageError: nothing is prepared yet, or the Accelerator trains with an engine of its own, or
            dispatches the batches of an indexed data set.
        SnapshotError: the restored state does not fit.
    """
    is_fsdp2 = getattr(accelerator, "is_fsdp2", False)  # older versions have FSDP1 only
    if reason := refusal(accelerator.distributed_type, is_fsdp2=is_fsdp2):
        raise UsageError(f"ftrun.integrations.accelerate does not support {reason}")
    if not accelerator._models:
        raise UsageError("this Accelerator has no model yet: call attach() after prepare()")
    loaders = accelerator._dataloaders
    for loader in loaders:
        if reason := refusal_of_loader(loader):
            raise UsageError(f"ftrun.integrations.accelerate does not support {reason}")
    feeds = {str(at): PreparedLoader(f"loader.{at}", one) for at, one in enumerate(loaders)}
    return attach_parts(
        model=numbered(accelerator._models),
        optimizer=numbered([getattr(o, "optimizer", o) for o in accelerator._optimizers]),
        scheduler=numbered(accelerator._schedulers),
        scaler=accelerator.scaler,
        loader=feeds or None,
        warmup=warmup,
        accelerator=AcceleratorCounters(accelerator),
        **{f"registered_{at}": one for at, one in enumerate(accelerator._custom_objects)},
        **named,
    )


def refusal(kind: DistributedType, *, is_fsdp2: bool) -> str | None:
    """The unsupported engine that an Accelerator trains with, and the remedy; None if supported."""
    if kind in _REMEDIES:
        return (
            f"{kind.value}: its engine keeps state that Accelerate does not see; "
            + (_REMEDIES[kind])
        )
    if kind == DistributedType.FSDP and not is_fsdp2:
        return (
            "FSDP1: its flat parameters have no names that another number of ranks could read; "
            "use FSDP2: FullyShardedDataParallelPlugin(fsdp_version=2), under the Trainer "
            "fsdp_config={'version': 2}"
        )
    return None


def refusal_of_loader(loader: Any) -> str | None:
    """The unsupported way in which a prepared loader reads its data; None if it is supported."""
    if not isinstance(loader, DataLoaderDispatcher) or isinstance(loader.dataset, IterableDataset):
        return None
    if loader.state.num_processes == 1:
        return None
    return (
        "dispatch_batches=True with an indexed data set: rank 0 requests the batches of all ranks, "
        "and a last incomplete batch is filled from the first one; leave it out, so that each rank "
        "loads its own batches"
    )


class AcceleratorCounters:
    """The counters that an Accelerator keeps itself."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        accelerator = self._accelerator
        return {"step": accelerator.step, "saved": accelerator.project_configuration.iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._accelerator.step = state["step"]
        self._accelerator.project_configuration.iteration = state["saved"]


class PreparedLoader(PrefetchingPosition):
    """A loader that `prepare` has returned; it loads one batch ahead of the training."""

    def batches(
        self, epoch: int | None, after_start: Callable[[], None], *, ends_if_left: bool = False
    ) -> Iterator[Any]:
        self._iterations += 1
        iteration = self._iterations
        again = self._resume
        is_new = again is None or not again["handed_out"]
        # Inside `steps()` the loop has begun already, and its random streams must continue.
        now = None if is_new else rng.take_all()
        if is_new:
            self._resume = again = None
            after_start()

        def resolved() -> None:
            if now is not None:
                rng.put_back(now)
                after_start()

        self.begin_pass(resolved)
        try:
            if is_new or not self.is_at_end:
                yield from self._rest(again, epoch)
            else:
                self.takes_iterator()  # none starts
        except GeneratorExit:
            if ends_if_left and iteration == self._iterations:
                self.end_pass()
            raise
        self.resolve()
        self.end_pass()

    def leave_out(self, count: int) -> None:
        self._to_leave_out = count

    def _rest(self, again: dict[str, Any] | None, epoch: int | None) -> Iterator[Any]:
        if callable(set_epoch := getattr(self.loader, "set_epoch", None)):
            set_epoch(self._pass if epoch is None else epoch)
        iterator = iter(self.loader)
        for _ in range(0 if again is None or self.is_indexed else self.trained_on):
            next(iterator, None)
        for batch in iterator:
            self.resolve()
            self.trained()
            if self._to_leave_out > 0:
                self._to_leave_out -= 1
                continue
            yield batch
