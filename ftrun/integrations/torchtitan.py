"""torchtitan: its checkpoint manager, with snapshots in memory between two checkpoints.

    config.checkpoint = CheckpointManager.Config(enable=True, interval=500)

Runs in:  worker; outside ftrun it behaves as torchtitan's own manager.
Takes in: what torchtitan's Trainer gives to the manager that its config names.
Gives:    a snapshot every `memory_interval` steps, through `ftrun.dcp`; torchtitan's unchanged
          checkpoints on disk; after a restart, the newer of the two.

After each step torchtitan asks its manager whether to save. The state that it would write is also
saved through `ftrun.dcp.Writer`, in any layout: model, optimizers, schedulers, data loader and the
trainer's counters. Random states are added, each rank's under a key with its rank number, because
torchtitan leaves them out of its checkpoints.

Only torchtitan saves the last step. With a snapshot of it, a restart would treat the checkpoint at
the end as written.

torchtitan itself is not changed: the config names a subclass. Read in 0.3.
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
    """torchtitan's manager, plus a snapshot in memory every few steps."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.CheckpointManager.Config):
        """torchtitan's settings of checkpoints on disk, and the interval of snapshots."""

        memory_interval: int = 1
        """Steps between two snapshots in memory."""

        def __post_init__(self) -> None:
            titan.CheckpointManager.Config.__post_init__(self)
            if self.memory_interval < 1:
                raise UsageError(
                    f"memory_interval is {self.memory_interval}, and must be at least 1"
                )

    # Class attributes, because torchtitan calls close() also if the constructor has failed.
    _keeps = False
    _underway: Future[Any] | None = None

    def __init__(self, config: Config, **parts: Any) -> None:
        super().__init__(config, **parts)
        context = worker_context()
        if not (config.enable and is_inside("memory_interval") and context):
            return
        self._keeps = context.settings.enabled
        self._memory_interval = config.memory_interval
        # A group of its own, because another thread may be writing a checkpoint to disk.
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
            del states[own]  # the snapshot was taken by fewer ranks
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
        states: dict[str, Any] = self._flattened_model_states_sd()
        return {**states, _RANDOM.format(dist.get_rank()): RandomStates()}


class RandomStates:
    """Random states of this process, as a Stateful of DCP."""

    def state_dict(self) -> dict[str, Any]:
        return {"packed": plain.encode(rng.take_all())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        rng.put_back(plain.decode(state["packed"]))
