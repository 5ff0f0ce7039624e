"""Records the events of a rank at each step, kills it at planned moments, and ends it early.

Runs in:  worker, training thread, only in a run of `ftrun verify`.
Takes in: a `VerifyPlan`; calls of the session at its boundaries; hooks on the optimizers, on
          `torch.autograd.backward`, on torch's DataLoader and on the attached modules.
Gives:    `VerifyRecord` lines in the plan's folder.
Survives: SIGKILL: each line is one write to a file opened for appending.

Rule: the recorder only observes. An error in it is recorded in place of the event, and never
      reaches the script.

Without a session the steps are those of the optimizers, and the state is theirs.
"""

import functools
import os
import signal
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import msgspec
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ftrun import clock
from ftrun.wire import verify_records as records
from ftrun.wire.verify_records import VerifyPlan, VerifyRecord, record_path
from ftrun.worker.capture import record_digests as digests
from ftrun.worker.state.attached import AttachedState
from ftrun.worker.state.module_state import unwrapped
from ftrun.worker.state.state_tree import PersistentSources, StateTree

_MAX_FORWARDS = 64
"""Number of forwards recorded in one step."""

_CHECKED_FORWARDS = 4
"""Number of forwards in one step before which parameters are compared with the last boundary."""

_COPIED_PHASES = ("", "train")
"""Phases in which a lazy copy may run; `Session.phase` waits for it."""

_END_WAIT_S = 60.0
_POLL_S = 0.005

_P = ParamSpec("_P")


def _observing(
    hook: "Callable[Concatenate[Recording, _P], None]",
) -> "Callable[Concatenate[Recording, _P], None]":
    """Wrap a hook so that its error is recorded in place of its event (the rule)."""

    def call(self: "Recording", /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        if not self.can_record:
            return
        try:
            hook(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - objects of the script may raise anything
            self.failed(hook.__name__.strip("_"), error)

    return call


class Recording:
    """The recorder of one process."""

    def __init__(self, context: Any, plan: VerifyPlan) -> None:
        self._context = context
        self._plan = plan
        self._pid = os.getpid()
        path = record_path(Path(plan.folder), context.rank, context.generation)
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        kills = plan.kills
        self._kill = kills[context.generation] if context.generation < len(kills) else None
        is_killed_here = context.rank == (context.generation + 1) % context.world_size
        self._own_kill = self._kill if is_killed_here else None
        self._steps = 0
        self._num_forwards = self._num_checked = 0
        self._has_variables = False
        self._tree: StateTree | None = None
        self._attached = AttachedState()
        self._extra: Callable[[], dict[str, Any]] = dict
        self._captured: set[int] = set()
        self._persistent: PersistentSources | None = None
        """Sources of the last boundary. Modules are not read within a step, because FSDP2 may be
        using them."""
        self._at_boundary: dict[str, str] = {}
        self._hooked: set[int] = set()
        self._first_steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._indices: weakref.WeakKeyDictionary[Any, deque[str]] = weakref.WeakKeyDictionary()

    def install(self) -> None:
        register_optimizer_step_pre_hook(self._before_optimizer)
        register_optimizer_step_post_hook(self._after_optimizer)
        _record_backward(self)
        _record_loaders(self)

    # --- called by the session ----------------------------------------------------------------

    def attached(
        self,
        attached: AttachedState,
        extra: Callable[[], dict[str, Any]],
        known: Iterable[object],
        step: int,
    ) -> None:
        self._attached, self._extra = attached, extra
        self._tree = StateTree(attached)
        self._steps = step
        things = (
            *attached.modules.values(), *attached.optimizers.values(),
            *attached.stateful.values(), *attached.tensors.values(), *attached.dicts.values(),
            *attached.generators.values(), *attached.providers.values(),
        )  # fmt: skip
        self._captured = {id(attached.state), *map(id, things), *map(id, known)}
        for module in attached.modules.values():
            inner = unwrapped(module)
            self._captured.add(id(inner))
            if id(inner) not in self._hooked:
                self._hooked.add(id(inner))
                inner.register_forward_pre_hook(_before_forward, with_kwargs=True)
        restored = self._context.restore
        self._write_state(records.ATTACHED, step, what=str(restored) if restored else "")

    def started(self, step: int) -> None:
        self._steps = step
        self._write_state(records.STARTED, step)

    def boundary(self, step: int) -> bool:
        """Record a completed step before its snapshot; return whether a snapshot may be taken."""
        if self._own_kill is not None and step > self._own_kill.step:
            self._die()  # no optimizer has stepped in this turn
        self._steps = step
        self._write_state(records.BOUNDARY, step)
        self._num_forwards = self._num_checked = 0
        kill = self._kill
        return kill is None or not kill.step - kill.without_snapshot < step <= kill.step

    def passed(self, step: int) -> None:
        kill = self._own_kill
        if kill is not None and not kill.is_in_step and step == kill.step:
            self._die()
        if step >= self._plan.steps:
            self._end()

    # --- hooks ---------------------------------------------------------------------------------

    @property
    def can_record(self) -> bool:
        """False in a process that the script has forked, and while torch compiles.

        Also False inside a torch.func transform, where no tensor has readable bytes.
        """
        return (
            not torch.compiler.is_compiling()
            and torch._C._functorch.peek_interpreter_stack() is None
            and os.getpid() == self._pid
        )

    def failed(self, what: str, error: Exception) -> None:
        place = digests.where(digests.script_frame(sys._getframe(1)))
        text = f"{what}: {type(error).__name__}: {error}"
        self._write(VerifyRecord(records.FAILED, self._steps + 1, where=place, what=text))

    @_observing
    def before_forward(self, module: torch.nn.Module, given: tuple[object, ...]) -> None:
        if self._num_forwards >= _MAX_FORWARDS:
            return
        self._num_forwards += 1
        frame = digests.script_frame(sys._getframe(1))
        record = VerifyRecord(
            records.FORWARD, self._steps + 1, digests.input_digests("input", given),
            where=digests.where(frame), what=type(module).__name__,
        )  # fmt: skip
        if self._num_checked < _CHECKED_FORWARDS and self._context.page.phase in _COPIED_PHASES:
            self._num_checked += 1
            record.notes["changed"] = self._changed()
        self._add_variables(record, frame)
        self._write(record)

    @_observing
    def loss(self, tensor: torch.Tensor) -> None:
        place = digests.where(digests.script_frame(sys._getframe(1)))
        found = {"loss": digests.tensor_digest(tensor)}
        values = {"loss": digests.shown(tensor) or ""}
        self._write(VerifyRecord(records.LOSS, self._steps + 1, found, values, place))

    @_observing
    def batch(self, iterator: Any, batch: object) -> None:
        drawn = self._indices.get(iterator)
        found = digests.input_digests("batch", batch)
        if drawn:
            found["indices"] = drawn.popleft()
        is_stateful = type(iterator).__name__.startswith("_Stateful")
        notes = {
            "workers": str(getattr(iterator, "_num_workers", 0)),
            "kind": "stateful" if is_stateful else "plain",
        }
        place = digests.where(digests.script_frame(sys._getframe(1)))
        self._write(VerifyRecord(records.BATCH, self._steps + 1, found, where=place, notes=notes))

    @_observing
    def drawn(self, iterator: Any, indices: object) -> None:
        queue = self._indices.setdefault(iterator, deque())
        queue.append(digests.digest(indices) or "")

    @_observing
    def _before_optimizer(self, optimizer: Any, *_: object) -> None:
        kill = self._own_kill
        if kill is not None and kill.is_in_step and self._steps >= kill.step:
            self._die()
        frame = digests.script_frame(sys._getframe(1))
        names = self._persistent.names if self._persistent is not None else {}
        record = VerifyRecord(
            records.OPTIMIZER, self._steps + 1, digests.gradient_digests(names, optimizer),
            where=digests.where(frame), what=type(optimizer).__name__,
        )  # fmt: skip
        record.notes["changed"] = self._changed()
        if self._tree is not None:
            # An optimizer that is created and used within a step, as in an inner loop, loses
            # nothing.
            is_new = self._first_steps.setdefault(optimizer, self._steps) == self._steps
            record.notes["is_attached"] = str(int(is_new or id(optimizer) in self._captured))
        self._at_boundary = {}  # from here on parameters change
        self._add_variables(record, frame)
        self._write(record)

    @_observing
    def _after_optimizer(self, optimizer: Any, *_: object) -> None:
        if self._tree is not None:
            return
        self._steps += 1
        found = digests.optimizer_digests(optimizer)
        self._write(VerifyRecord(records.BOUNDARY, self._steps, found))
        self._has_variables = False
        if self._steps >= self._plan.steps:
            self._end()

    # --- details -------------------------------------------------------------------------------

    def _changed(self) -> str:
        if self._persistent is None or not self._at_boundary:
            return ""
        return " ".join(digests.changed_parameters(self._persistent, self._at_boundary))

    def _write_state(self, event: str, step: int, *, what: str = "") -> None:
        frame = digests.script_frame(sys._getframe(1))
        unprotected = self._context.page.note if event == records.BOUNDARY else ""
        try:
            found = self._state_digests()
        except Exception as error:  # noqa: BLE001 - such as a value that cannot be stored
            self._persistent, self._at_boundary = None, {}
            found = {}
            for optimizer in self._attached.optimizers.values():
                found |= digests.optimizer_digests(optimizer)
            unprotected = unprotected or str(error)
        notes = {"unprotected": unprotected} if unprotected else {}
        record = VerifyRecord(
            event, step, found, where=digests.where(frame), what=what, notes=notes
        )
        self._has_variables = False
        self._add_variables(record, frame)
        self._has_variables = False
        self._write(record)

    def _state_digests(self) -> dict[str, str]:
        """Digests of everything that a snapshot of this boundary would contain.

        Raises ValueNotStorable, and any error that a `state_dict` of the script raises.
        """
        assert self._tree is not None
        state = self._tree.collect(self._extra())
        found = digests.state_digests(state)
        self._persistent = state.persistent
        self._at_boundary = {
            source.name: found[f"tensor {source.name}"] for source in state.persistent.sources
        }
        self._captured |= {id(tensor) for tensor in state.persistent.originals}
        return found

    def _add_variables(self, record: VerifyRecord, frame: Any) -> None:
        if self._has_variables:
            return
        self._has_variables = True
        record.digests.update(digests.module_digests(self._attached))
        for key, value in digests.local_variables(frame, self._captured):
            found = digests.digest(value)
            if found is not None:
                record.digests[key] = found
                if (text := digests.shown(value)) is not None:
                    record.values[key] = text

    def _write(self, record: VerifyRecord) -> None:
        os.write(self._fd, msgspec.json.encode(record) + b"\n")

    def _die(self) -> None:
        self._write(VerifyRecord(records.KILLED, self._steps))
        os.kill(os.getpid(), signal.SIGKILL)

    def _end(self) -> None:
        """End this process when all ranks are here, without the code after the script's loop."""
        folder = Path(self._plan.folder)
        num_ranks: int = self._context.world_size
        (folder / f"ended.{self._context.rank}").touch()
        give_up_s = clock.now_s() + _END_WAIT_S
        # A rank that is still in a collective of the last step needs its peers.
        while len(list(folder.glob("ended.*"))) < num_ranks and clock.now_s() < give_up_s:
            clock.sleep(_POLL_S)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _before_forward(
    module: torch.nn.Module, given: tuple[object, ...], named: dict[str, object]
) -> None:
    """A module-level function, so that modules with this hook can be copied and pickled."""
    from ftrun.worker.context import worker_context

    context = worker_context()
    if not torch.compiler.is_compiling() and context is not None and context.recording is not None:
        context.recording.before_forward(module, (*given, named) if named else given)


def _record_backward(recording: Recording) -> None:
    """Record the tensors of `torch.autograd.backward`, which `Tensor.backward` calls.

    A backward within a backward, such as that of a reentrant checkpoint, has no loss.
    """
    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        given = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
        if torch._C._current_graph_task_id() == -1:
            for tensor in given:
                if isinstance(tensor, torch.Tensor):
                    recording.loss(tensor)
        original(given, *args, **kwargs)

    torch.autograd.backward = backward


def _record_loaders(recording: Recording) -> None:
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    next_batch, next_index = _BaseDataLoaderIter.__next__, _BaseDataLoaderIter._next_index

    def recorded_next(self: Any) -> Any:
        batch = next_batch(self)
        recording.batch(self, batch)
        return batch

    def recorded_index(self: Any) -> Any:
        indices = next_index(self)  # type: ignore[no-untyped-call]
        recording.drawn(self, indices)
        return indices

    _BaseDataLoaderIter.__next__ = recorded_next  # type: ignore[method-assign]
    _BaseDataLoaderIter._next_index = recorded_index  # type: ignore[method-assign]
