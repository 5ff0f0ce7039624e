"""Decides at which step boundaries a snapshot is due and possible.

Runs in:  worker, training thread.

All ranks must take snapshots at the same steps, otherwise no version is committed. The ranks do not
communicate about it. Therefore `auto` uses only values that are equal on all ranks: the agent
writes an interval to the command page that applies to steps after one that no rank has reached.
Each rank publishes the interval that its own measurements suggest, and the agent chooses.

A checkpoint that is due requests one more snapshot, from a step that no rank has reached. It is
taken at the first boundary from there on that allows a snapshot, which is the same on all ranks. A
rank that receives the request after it has passed such a boundary takes none, and reports that.

The cost of a snapshot is the extra time of all turns from its copy to its commit, compared with
turns without snapshot activity. This includes encoding and sending, because they need CPUs too.

Snapshots do not contain gradients, so none is taken during an accumulation. An optimizer
accumulates if it has not stepped in this turn and a gradient was added since its last step. The
gradients of all its parameters are compared, by identity and version counter, because a backward
may reach only some of them: adapters of a frozen model, or one expert of many. An id alone does not
identify a gradient, because after it is freed the next one may have the same id. A step that
GradScaler skips looks like an accumulation; it costs the snapshot of that boundary.

If other optimizers step in the turn, gradients that are all zero do not count as accumulation,
because `zero_grad(set_to_none=False)` of the optimizer also writes to them. Values are read only
in this case, because a read waits for the device.

A loop that steps first and runs backward at the end of its turn also has gradients at each
boundary. They look like gradients that the next turn sets to zero, as in a GAN, until the next step
uses them.
"""

import math
import weakref
from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ftrun.config.profile import SnapshotConfig
from ftrun.wire.shared_memory.pages import CommandField, HeartbeatField, SharedPage
from ftrun.worker.state.tensors import is_sharded, version_of
from ftrun.worker.state.unprotected import Hook

_LONGEST = 10_000
_WEIGHT = 0.1


class StepActivity(Enum):
    """Snapshot activity during one turn, between two step boundaries."""

    QUIET = auto()
    COPY = auto()
    """A snapshot was copied lazily."""
    PROTECT = auto()
    """The last snapshot was being sent to other nodes, or awaited its commit."""


class _Mean:
    """Mean of the first 10 values; after that, an exponential average with weight 0.1."""

    def __init__(self) -> None:
        self.count = 0
        self.value = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += max(_WEIGHT, 1 / self.count) * (value - self.value)


class SnapshotSchedule:
    """Snapshot interval of one rank, and the measured cost of a snapshot."""

    def __init__(self, settings: SnapshotConfig, page: SharedPage, commands: SharedPage) -> None:
        self._settings = settings
        self._page = page
        self._commands = commands
        self._every = settings.every if isinstance(settings.every, int) else 1
        self._quiet_s = _Mean()
        self._added_s = _Mean()
        """Time in seconds that one snapshot adds to all its turns together."""
        self._turns_s: list[float] = []
        """Durations of the turns of the last snapshot, beginning with the turn of its copy."""
        self._answered = self._last_step = -1
        """The newest request that was answered; the last boundary that allowed a snapshot."""
        self._missed = -1

    def is_due(self, step: int) -> bool:
        """Whether to take a snapshot; called once at each boundary that allows one."""
        commands, last, self._last_step = self._commands, self._last_step, step
        if not isinstance(self._settings.every, int):
            every = commands.get(CommandField.SNAPSHOT_EVERY)
            if every > 0 and step > commands.get(CommandField.EVERY_FROM_STEP):
                self._every = every
        is_due = step % max(1, self._every) == 0
        persist_every = commands.get(CommandField.PERSIST_EVERY)
        is_due |= persist_every > 0 and step % persist_every == 0
        # From TAKE_FROM on, which the leader sets, all nodes take the same steps.
        take_from = commands.get(CommandField.TAKE_FROM)
        requested = commands.get(CommandField.CAPTURE_FROM)
        if requested > self._answered and step >= max(requested, take_from):
            self._answered = requested
            if last >= max(requested, take_from):
                self._missed = last
            else:
                is_due = True
        return is_due and step >= take_from

    def drain_missed(self) -> int:
        """The boundary at which other ranks may have taken a requested snapshot; -1: none."""
        missed, self._missed = self._missed, -1
        return missed

    def learn(self, turn: StepActivity, *, step_s: float, copy_s: float, blocked_s: float) -> None:
        """Record the duration of one turn, and publish the interval that this rank requests.

        Args:
            turn: snapshot activity during the turn.
            step_s: seconds from the last boundary to this one.
            copy_s: duration of the last copy in the copy thread.
            blocked_s: time for which snapshots blocked the training thread in this turn.
        """
        if turn is StepActivity.QUIET:
            self._quiet_s.add(step_s)
        if turn is not StepActivity.PROTECT and self._turns_s:
            # That was the last turn of the last snapshot.
            turns_s, self._turns_s = self._turns_s, []
            if self._quiet_s.count:
                self._added_s.add(sum(turns_s) - len(turns_s) * self._quiet_s.value)
        if turn is not StepActivity.QUIET:
            self._turns_s.append(step_s)
        if self._quiet_s.count:
            plain_s, added_s = self._quiet_s.value, self._added_s.value
        else:
            # Without a quiet turn to compare with, assume that no part of the copy is hidden.
            first_s = self._turns_s[0]
            plain_s, added_s = max(first_s - copy_s, 0.1 * first_s), copy_s
        requested = math.ceil(max(added_s, blocked_s) / (self._settings.overhead_budget * plain_s))
        if not self._quiet_s.count:
            requested = max(requested, 2 * len(self._turns_s))  # leaves quiet turns to compare with
        self._page.set(HeartbeatField.REQUESTED_EVERY, min(max(requested, 1), _LONGEST))


# --- gradient accumulation ----------------------------------------------------------------------

_SAMPLED = 16

Signature = dict[int, tuple["weakref.ref[torch.Tensor]", int]]
"""Gradients with their version counters, by id."""


_MOST_WAITING = 100
_MOST_TURNS = 1000
"""Longer than an accumulation over the turns of a loop."""


class AccumulationTracker:
    """Tracks the gradients of the attached optimizers from boundary to boundary."""

    def __init__(
        self,
        optimizers: Iterable[Optimizer],
        objects: Iterable[object] = (),
        guarded: Callable[[Hook], Hook] = lambda hook: hook,
    ) -> None:
        # By the attribute: from Python 3.12 on, isinstance does not see a forwarding __getattr__.
        self._reporting: list[Any] = [
            one for one in objects if callable(getattr(one, "is_within_accumulation", None))
        ]
        """Attached objects with gradients that are in no optimizer; asked once at each boundary."""
        self._optimizers = {id(optimizer): optimizer for optimizer in optimizers}
        self.waiting_turns = 0
        """Turns with a step of some optimizer, since the last boundary without an accumulation."""
        self._turns = 0
        """All turns since that boundary."""
        self.pending: list[Optimizer] = []
        """Optimizers with an accumulation in progress at the last boundary."""
        self.crossing: list[Optimizer] = []
        """Optimizers that have used gradients computed after a step and before a boundary."""
        self._stepped: set[int] = set()
        self._hooked: set[int] = set()
        self._sampled: dict[int, list[torch.Tensor]] = {}
        self._at_boundary: dict[int, list[tuple[weakref.ref[torch.Tensor], int]]] = {}
        self._at_step: dict[int, _Gradients] = {}
        self._sampled_at_step: dict[int, Signature] = {}
        self._versions: dict[int, list[int]] = {}
        self._hook = register_optimizer_step_pre_hook(guarded(self.before_step))

    def close(self) -> None:
        self._hook.remove()

    def restored(self) -> None:
        """Treat the present gradients, which a restore has created, as those of the last step.

        Steps of a turn that was not completed count for nothing.
        """
        for before in (self._stepped, self._at_boundary, self._versions):
            before.clear()
        for key, optimizer in self._optimizers.items():
            self._at_step[key] = _Gradients(_present(p.grad for p in _parameters(optimizer)))

    @property
    def waits_long(self) -> str:
        """For how long an optimizer that does not step prevents snapshots; empty: not for long."""
        # Steps inside a graph that was captured in C++ are not seen.
        if self.waiting_turns >= _MOST_WAITING:
            return f"{self.waiting_turns} steps of other optimizers"
        return f"{self._turns} turns of the loop" if self._turns >= _MOST_TURNS else ""

    def boundary(self) -> bool:
        """End a turn; return whether an accumulation is in progress."""
        self.pending = [one for one in self._optimizers.values() if self._is_pending(one)]
        reported = [one.is_within_accumulation() for one in self._reporting]
        is_pending = bool(self.pending) or any(reported)
        self.waiting_turns = self.waiting_turns + bool(self._stepped) if is_pending else 0
        self._turns = self._turns + 1 if is_pending else 0
        for key in self._stepped:
            then = self._sampled_at_step[key]
            grads = [p.grad for p in self._sampled[key] if p.grad is not None]
            new = [(weakref.ref(one), version_of(one)) for one in grads if _is_new(one, then)]
            self._at_boundary[key] = new
        self._stepped.clear()
        return is_pending

    def before_step(self, optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
        """Called by torch before a step, and before the replay of a graph that contains it."""
        if torch.compiler.is_compiling():
            return  # see `_has_compiled_step`
        key = id(optimizer)
        if key not in self._optimizers:
            return
        has_closure = any(callable(one) for one in (*args, *(kwargs or {}).values()))
        new = self._at_boundary.pop(key, [])
        if not has_closure and optimizer not in self.crossing:
            grads = {id(p.grad) for p in self._sampled[key]} if new else set()
            held = [(reference(), version) for reference, version in new]
            if any(id(g) in grads and version_of(g) == v for g, v in held if g is not None):
                self.crossing.append(optimizer)
        # This runs at each step for each parameter: one access of `grad`, and no tuples.
        parameters = _parameters(optimizer)
        every = [parameter.grad for parameter in parameters]
        present = _present(every)
        if len(present) < len(every):
            parameters = [p for p, g in zip(parameters, every, strict=True) if g is not None]
        apart = max(1, len(present) // _SAMPLED)
        self._sampled[key] = parameters[::apart]
        self._sampled_at_step[key] = _signature(present[::apart])
        self._stepped.add(key)
        self._hooked.add(key)
        self._at_step[key] = _Gradients(present)

    def _is_pending(self, optimizer: Optimizer) -> bool:
        key = id(optimizer)
        if key in self._stepped:
            return False
        parameters = _parameters(optimizer)
        grads = [parameter.grad for parameter in parameters]
        if key not in self._hooked and self._has_compiled_step(key, parameters, grads):
            self._at_step[key] = _Gradients(_present(grads))
            return False
        then = at_step.signature if (at_step := self._at_step.get(key)) is not None else {}
        new = (grad for grad in grads if grad is not None and _is_new(grad, then))
        return any(not (self._stepped and _is_zero(grad)) for grad in new)

    def _has_compiled_step(
        self, key: int, parameters: list[torch.Tensor], grads: list[torch.Tensor | None]
    ) -> bool:
        """Detect a compiled step, which calls no hook: all parameters with a gradient changed."""
        versions = [version_of(parameter) for parameter in parameters]
        before, self._versions[key] = self._versions.get(key, versions), versions
        used = [at for at, grad in enumerate(grads) if grad is not None]
        return bool(
            len(before) == len(versions) and used and all(before[i] != versions[i] for i in used)
        )


class _Gradients:
    """The gradients of an optimizer at its step; their signature is seldom needed."""

    def __init__(self, grads: list[torch.Tensor]) -> None:
        self._references = list(map(weakref.ref, grads))
        self._versions = list(map(version_of, grads))

    @property
    def signature(self) -> Signature:
        """Without the gradients that no longer exist."""
        pairs = zip(self._references, self._versions, strict=True)
        return {id(one): (r, version) for r, version in pairs if (one := r()) is not None}


def _present(grads: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    return [grad for grad in grads if grad is not None]


def _is_new(grad: torch.Tensor, then: Signature) -> bool:
    reference, version = then.get(id(grad), (None, -1))
    return reference is None or reference() is not grad or version != version_of(grad)


def _is_zero(grad: torch.Tensor) -> bool:
    # If this rank's part of a sharded gradient is zero, other parts may not be.
    is_readable = grad.layout is torch.strided and not is_sharded(grad)
    return is_readable and not bool(grad.any())


def _signature(grads: Iterable[torch.Tensor]) -> Signature:
    return {id(one): (weakref.ref(one), version_of(one)) for one in grads}


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
