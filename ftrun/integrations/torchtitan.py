"""torchtitan: its checkpoint manager, with the steps between two checkpoints kept in memory.

    config.checkpoint = CheckpointManager.Config(enable=True, interval=500)

Runs in:  worker; outside of ftrun it is torchtitan's own manager and nothing else.
Takes in: what torchtitan's Trainer gives to the manager that its config names.
Gives:    a snapshot every `memory_interval` steps, by `ftrun.dcp`; torchtitan's checkpoints on disk
          as they are without it; after a restart, whichever of the two is newer.

torchtitan asks its manager after each step whether to save, and the state it would write goes
through `ftrun.dcp.Writer` as well: model, optimizers, schedulers, data loader, the trainer's own
counters, in whatever layout the ranks have them. Random states are added, each rank's under a key
with its number: torchtitan leaves them out of its checkpoints.

The last step is saved by torchtitan alone: a snapshot of it would have a restart believe that the
checkpoint at the end had been written.

Nothing of torchtitan is changed: a subclass is named in the config. Read in 0.3.
"""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from ftrun.dcp import Reader, Writer, newest_step
from ftrun.errors import UsageError
from ftrun.integrations.libraries import is_inside, require
from ftrun.snapshot import plain_values as plain
from ftrun.worker.context import worker_context
from ftrun.worker.state import determinism as rng

require("torchtitan", at_least="0.3")

from torchtitan.components import checkpointer as titan  # noqa: E402

_RANDOM = "random_states_of_rank_{}"


class CheckpointManager(titan.CheckpointManager):
    """torchtitan's, and a snapshot every few steps."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.CheckpointManager.Config):
        """torchtitan's settings of checkpoints on disk, and one of memory."""

        memory_interval: int = 1
        """Steps from one snapshot in memory to the next."""

        def __post_init__(self) -> None:
            titan.CheckpointManager.Config.__post_init__(self)
            if self.memory_interval < 1:
                raise UsageError(
                    f"memory_interval is {self.memory_interval}, and at least one step lies "
                    "between two snapshots"
                )

    # Of the class, because torchtitan closes a manager that has failed in its constructor too.
    _keeps = False
    _underway: Future[Any] | None = None

    def __init__(self, config: Config, **parts: Any) -> None:
        super().__init__(config, **parts)
        context = worker_context()
        if not (config.enable and is_inside("memory_interval") and context):
            return
        self._keeps = context.settings.enabled
        self._memory_interval = config.memory_interval
        # Of its own: a checkpoint on disk may be under way in another thread.
        waits = self.async_mode == titan.AsyncMode.DISABLED
        self._group = None if waits else dist.new_group(backend="gloo")

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        may = self._keeps and not (last_step or self.load_only)
        if may and curr_step % self._memory_interval == 0:
            self._keep(curr_step)
        return bool(super()._save(curr_step, last_step))

    def _load(self, step: int = -1) -> bool:
        newest = newest_step() if self._keeps else None
        if newest is None or newest < self._find_load_step():
            return bool(super()._load(step))
        reader = Reader()
        own = _RANDOM.format(dist.get_rank())
        states = self._everything()
        if f"{own}.packed" not in reader.read_metadata().state_dict_metadata:
            del states[own]  # there were fewer ranks
        load(states, storage_reader=reader)
        self.states[titan.MODEL].load_state_dict(states)
        return True

    def _close(self) -> None:
        self._await_underway()
        super()._close()

    @torch.no_grad()
    def _keep(self, step: int) -> None:
        self._await_underway()
        states, label = self._everything(), f"step-{step}"
        if self._group is None:
            save(states, checkpoint_id=label, storage_writer=Writer())
            return
        underway = async_save(
            states, checkpoint_id=label, storage_writer=Writer(), process_group=self._group
        )
        assert isinstance(underway, Future)
        self._underway = underway

    def _await_underway(self) -> None:
        underway, self._underway = self._underway, None
        if underway is not None:
            underway.result()

    def _everything(self) -> dict[str, Any]:
        """All that a training goes on with."""
        states: dict[str, Any] = self._flattened_model_states_sd()
        return {**states, _RANDOM.format(dist.get_rank()): RandomStates()}


class RandomStates:
    """Those of this process, as a Stateful of DCP's."""

    def state_dict(self) -> dict[str, Any]:
        return {"packed": plain.encode(rng.take_all())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        rng.put_back(plain.decode(state["packed"]))
