"""`ftrun.attach` and the `Session` that it returns.

Runs in:  worker; also under plain python or torchrun, on any system, without snapshots.
Takes in: the model and every other object whose state the run depends on.
Gives:    a `Session`; the attached state is restored in place if there is a version to restore.

Modules that need Linux are imported only if an agent started this process.
"""

import logging
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ftrun import clock
from ftrun.errors import JoinRefused, SnapshotError, UsageError
from ftrun.sharding.rules import ShardingRules
from ftrun.worker.context import WorkerContext, worker_context
from ftrun.worker.loaders import AttachedLoaders, positions_of, refuse_loader
from ftrun.worker.loops import Loops, SessionPhase, after_optimizer_step, left_pass
from ftrun.worker.snapshot_wait import Level, SnapshotHandle
from ftrun.worker.state.attached import AttachedState, Skip, by_name, declared
from ftrun.worker.state.checked_state import PlainCheck
from ftrun.worker.state.data_position import DataPosition
from ftrun.worker.state.tensors import HostCopy, is_capturing

if TYPE_CHECKING:
    from ftrun.worker.capture.recording import Recording
    from ftrun.worker.snapshot_session import SnapshotSession
    from ftrun.worker.survivors.rejoin import Survivor

_log = logging.getLogger(__name__)

BETWEEN_LOOPS = "between loops"
"""Phase of a rank outside its loop: it may evaluate, save, or upload its model."""

_LATE_LOSSES = 64
"""Maximum number of losses whose copy from a device is pending; older ones are dropped."""

_live: "weakref.ref[Session] | None" = None
"""The newest session of this process."""

_LATER = (
    "a second session is in no snapshot, and a failure repeats it from its start: attach all "
    "models and optimizers once"
)


def attach(  # noqa: PLR0913 - what a script has
    model: object,
    optimizer: object = None,
    scheduler: object = None,
    *,
    scaler: object = None,
    loader: object = None,
    warmup: Callable[[], object] | None = None,
    layout: str | Path | ShardingRules | None = None,
    mesh: Mapping[str, int] | None = None,
    cast: bool = False,
    strict: bool = False,
    skip: Sequence[str] = (),
    **named: object,
) -> "Session":
    """Register the state of this training for snapshots, and restore it after a restart.

    Args:
        model: one module, or several in a dict or a list; before or after DDP, FSDP2, compile.
        optimizer: one torch optimizer, or several in a dict or a list.
        scheduler: one object with a state_dict, or several in a dict or a list.
        scaler: the same, for a GradScaler.
        loader: the loader given to `Session.batches` or a `DataPosition`, or several of them.
        warmup: called once before a restore with DDP on more than two ranks, in place of the
            synthetic backward that puts DDP's buckets in order.
        layout: file of layout rules, or a packaged layout, if ranks hold parts of plain tensors. A
            version of another layout is read by these rules. Integrations pass the rules.
        mesh: axis sizes that differ from the file. Without a file: the arrangement of ranks, the
            slowest axis first, such as {"pp": 2, "dp": 2, "tp": 4}. Ranks read different data
            along axes whose name begins with dp, and are stages along pp.
        cast: if true, parameters and buffers that were saved in another floating dtype are rounded
            to their present dtype, and so is optimizer state in its parameter's dtype.
        strict: if true, a restore into another layout without rules is refused if old ranks had
            different values of one object, or of tensors that are tied here; else the log says so.
        skip: patterns over the names of tensors and keys, such as "model.rope.*". Matching values
            are left out of snapshots and keep the value that the script sets.
        named: all other objects with state: objects with state_dict and load_state_dict, tensors,
            dicts of plain values, random generators of torch, numpy and Python, lists of these.

    Raises:
        UsageError: a session is attached already, or an object has no state.
        SnapshotError: the saved state does not fit, or the state cannot be stored.
    """
    global _live
    if is_attached():
        raise UsageError(
            "attach was called twice: one session holds all models and optimizers, as dicts by "
            "name. Call close() on the first session before the second attach"
        )
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    attached = AttachedState(casts=cast, is_strict=strict, skip=Skip(skip))
    _sort_in(attached, parts, named)
    context = worker_context()
    if isinstance(layout, ShardingRules):
        attached.layout = layout
    elif layout is not None or mesh:
        attached.layout = declared(layout, mesh, context.world_size if context else None)
    session = Session(attached, positions_of(loader), context, warmup, is_first=_live is None)
    _live = weakref.ref(session)
    return session


def _sort_in(
    attached: AttachedState, parts: Mapping[str, object], named: Mapping[str, object]
) -> None:
    if "session" in named:
        raise UsageError("attach(session=...): this name is ftrun's own. Give it another name")
    for argument, given in parts.items():
        for name, thing in by_name(argument, given).items():
            refuse_loader(argument, thing)
            attached.add(name, thing)
    for name, thing in named.items():
        attached.add(name, thing)


def is_attached() -> bool:
    other = _live() if _live is not None else None
    return other is not None and not other.is_closed


class Session(Loops):
    """A training loop with step boundaries, created by `attach`."""

    def __init__(
        self,
        attached: AttachedState,
        positions: dict[str, DataPosition],
        context: WorkerContext | None,
        warmup: Callable[[], object] | None,
        *,
        is_first: bool = True,
    ) -> None:
        super().__init__()
        self._loaders = AttachedLoaders(positions, context)
        self._context = context
        self._state = attached.state
        self._boundaries = 0
        self._has_started = False
        self._restored = False
        self._losses: deque[tuple[int, HostCopy]] = deque(maxlen=_LATE_LOSSES)
        """Steps and losses whose copy from a device is pending."""
        self._protection: SnapshotSession | None = None
        self._survivor: Survivor | None = None
        self._check: PlainCheck | None = None
        self._explained_in = ""
        self._fresh_id = uuid.uuid4().hex[:12]
        self.is_closed = False
        if context is not None and is_first:
            self._protect(context, attached, warmup)
        elif context is not None:
            context.unprotected.add("session", _LATER)
        else:
            self._check = PlainCheck(attached, self._own_state())
            weakref.finalize(self, self._check.close)

    # --- for the script --------------------------------------------------------------------

    @property
    def state(self) -> dict[str, Any]:
        """Plain values and tensors that the script stores; part of every snapshot.

        `attach` restores them. A tensor is restored to the device type that it was saved from.
        """
        return self._state

    @property
    def restored(self) -> bool:
        return self._restored

    @property
    def id(self) -> str:
        """Identifier of the run; the same after every restart."""
        return self._context.run_id if self._context else self._fresh_id

    @property
    def generation(self) -> int:
        """Number of restarts of the run."""
        return self._context.generation if self._context else 0

    def begin(self, done: int = 0) -> None:
        """Mark the start of the first step in a loop of the script's own; optional.

        After a restore, the script may have changed restored state, for example by wrapping its
        model in DDP or by drawing random numbers. This call restores that state again.

        Args:
            done: steps before this run, such as those of a checkpoint that the script has loaded.
        """
        if not (self._restored or self._has_started):
            self._step = done
        self._begin()

    def step_done(self, snapshot: bool = True) -> None:
        """Mark a step boundary in a loop of the script's own.

        Args:
            snapshot: if false, no snapshot is taken at this boundary, for example because the
                script is in the middle of a phase.
        """
        if self._driver is not None:
            raise UsageError(f"step_done() inside a loop over {self._driver}, which counts itself")
        if not self._has_started and self._protection is not None:
            self._protection.first_turn_is_over()
        self._has_started = True
        self._boundary(allowed=snapshot)

    def phase(self, name: str) -> SessionPhase:
        """Report the current phase; as a context manager, only for the duration of its block.

        Otherwise it ends with the next boundary at the latest.

        Before another phase than "train" begins, this call waits until the snapshot in progress is
        copied. The script may then change weights until the next step, also through .data.
        """
        was_plain, self._is_plain_phase = self._is_plain_phase, name != "train"
        before = self._set_phase(name)
        # phase("train") at the top of each turn must not wait for the lazy copy in progress.
        if self._protection is not None and not name == before == "train":
            self._protection.resolve()
        return SessionPhase(self, before, was_plain=was_plain)

    def report(self, *, loss: "float | torch.Tensor") -> None:
        """Show the loss in `ftrun status`; does not wait for a device.

        The call has no effect while a graph is captured.

        Raises:
            UsageError: the tensor has more than one element.
        """
        if isinstance(loss, torch.Tensor) and loss.numel() != 1:
            raise UsageError(
                f"report(loss=) was given a tensor of shape {list(loss.shape)}: pass one number, "
                "such as loss.mean()"
            )
        if self._context is None or self.is_rehearsal:
            return
        step = self._step + 1
        if isinstance(loss, torch.Tensor) and not loss.is_cpu:
            if is_capturing(loss.device):
                return
            self._losses.append((step, HostCopy(loss)))
            while len(self._losses) > 1 and self._losses[0][1].has_arrived:
                step, copy = self._losses.popleft()
                self._take_loss(self._context, step, copy.tensor)
        else:
            self._take_loss(self._context, step, loss)

    def _take_loss(self, context: WorkerContext, step: int, loss: "float | torch.Tensor") -> None:
        # torch warns of a conversion of a tensor that requires a gradient.
        loss = loss.detach() if isinstance(loss, torch.Tensor) else loss
        value = float(loss)
        context.page.set_loss(value, step)
        if self._protection is not None:
            context.unprotected.guarded(self._protection.digests.take_loss)(step, value)

    def close(self) -> None:
        """Stop taking snapshots. `attach` may be called again, for a session without snapshots."""
        self.is_closed = True
        self._end_hook()
        if self._survivor is not None:
            self._survivor.leave_loop()
            self._survivor = None
        if self._protection is not None:
            self._protection.close()
            self._protection = None
        if self._check is not None:
            self._check.close()

    # --- inside ----------------------------------------------------------------------------

    @property
    def _recording(self) -> "Recording | None":
        return self._context.recording if self._context is not None else None

    def _protect(
        self,
        context: WorkerContext,
        attached: AttachedState,
        warmup: Callable[[], object] | None,
    ) -> None:
        # Imported here, because these modules need memory mappings and sockets of Linux.
        from ftrun.worker.capture import explicit_save as saver
        from ftrun.worker.snapshot_session import SnapshotSession

        if saver.is_in_use():
            raise UsageError(
                "attach was called in a script that saves or loads with ftrun.dcp, which takes the "
                "snapshots then. Use one or the other"
            )
        protection = self._protection = SnapshotSession(context, attached, warmup)
        protection.after_replayed_step = after_optimizer_step(weakref.ref(self))
        if context.staying is not None:
            from ftrun.worker.survivors.rejoin import Survivor

            self._survivor = Survivor(context, context.staying, protection, self._loaders)
            self._loaders.keep_batches(lambda: self._step, attached.generators)
        try:
            self._restore(protection, context)
        except BaseException:
            protection.close()  # else its hooks would run in addition to those of the next attach
            raise
        if context.recording is not None:
            known = (self, *protection.inner.every())
            context.recording.attached(attached, self._own_state, known, self._step)

    def _restore(self, protection: "SnapshotSession", context: WorkerContext) -> None:
        restore = protection.restore
        if context.launch.rehearses:
            from ftrun.worker.survivors.rehearsal import read_newest

            restore = partial(read_newest, context, protection.restore)
        saved = restore()
        if saved is not None:
            self._restored = True
            own = saved["session"]
            self._step, self._epoch = own["step"], own["epoch"]
            self._left_before = own.get("left", "")
            earlier = [0] if self._left_before == "steps()" else []  # format of version 0.2.0
            self._steps_left = set(own.get("steps_left", earlier))
            self._explain(own.get("explained_in", ""))
            left = [one for one in saved["loaders"] if left_pass(one) == self._left_before]
            self._loaders.load(saved["loaders"], left)
        protection.begin(self._own_state)
        if context.launch.rehearses:
            protection.release()  # the rank that runs may overwrite the version at any time
        protection.put_back_random_states()

    @property
    def _stay(self) -> "Survivor | None":
        return self._survivor

    def _rejoin(self) -> bool:
        survivor, protection = self._survivor, self._protection
        if survivor is None or protection is None or not survivor.is_over:
            return False
        survivor.park()
        saved = protection.restore(is_again=True)
        if saved is None or saved["session"]["epoch"] != self._epoch:
            raise JoinRefused("this process cannot go back to a version before its loop")
        self._step = saved["session"]["step"]
        self._steps_left = set(saved["session"].get("steps_left", ()))
        self._loaders.rewind(saved["loaders"], self._step)
        self._force = self._has_stepped = self._is_plain_phase = False
        self._requested = None
        self._losses.clear()
        protection.begin(self._own_state)
        survivor.join(protection.buckets.digest())
        protection.put_back_random_states()
        protection.release()
        return True

    def _explain(self, before: str) -> None:
        """Log once per run what a restore does not restore; `before`: the run that logged it."""
        self._explained_in = self.id
        if before == self.id or (self._context is not None and self._context.rank):
            return
        names = ", ".join(map(str, self._state)) or "nothing yet"
        _log.warning(
            "step %d is restored. Local variables of the script are not, such as running averages, "
            "best values, indices of enumerate() and batches drawn ahead: keep those in "
            "session.state (it holds: %s). Modules, tensors and random generators of the script "
            "must be attached by a name",
            self._step,
            names,
        )

    def _own_state(self) -> dict[str, Any]:
        more = {
            "left": self._left,
            "steps_left": sorted(self._steps_left),
            "explained_in": self._explained_in,
        }
        return {
            "session": {
                "step": self._step,
                "epoch": self._epoch,
                **{key: value for key, value in more.items() if value},
            },
            "loaders": self._loaders.state(),
            "orders": {},
            **({} if self._survivor is None else {"set_up": self._survivor.set_up()}),
        }

    def _set_phase(self, name: str) -> str:
        if self._context is None:
            return "train"
        before, self._context.page.phase = self._context.page.phase, name
        self._context.page.show_life(clock.now_ns())
        return before or "train"

    def _begin(self) -> None:
        if not self._has_started:
            self._has_started = True
            if self._protection is not None:
                self._protection.first_turn(self._join)
            self._loaders.put_back_generators()
            if self._recording is not None:
                self._recording.started(self._step)

    def _join(self) -> None:
        if self._survivor is not None and self._protection is not None:
            self._survivor.join_first(self._protection.buckets.digest)

    def _wait(self, level: Level, timeout_s: float, handle: SnapshotHandle | None) -> bool:
        if self._context is None:
            return False
        if self._protection is None:
            raise SnapshotError(f"wait({level!r}): this session takes no snapshots")
        return self._protection.wait(level, timeout_s, handle)

    def _boundary(self, *, allowed: bool) -> None:
        if self._stay is None or not self._stay.is_over:  # else the turn is repeated
            self._complete_turn(allowed=allowed)

    def _complete_turn(self, *, allowed: bool) -> None:
        self._step += 1
        handle, self._requested = self._requested, None
        if handle is not None:
            handle.step = self._step
        self._has_stepped = False
        self._boundaries += 1
        if self._is_plain_phase:
            # A step was made, so the script only forgot to name the next phase.
            self._is_plain_phase = False
            self._set_phase("train")
        if self._check is not None:
            self._check.boundary(self._own_state)
        if self._protection is None:
            if self._context is not None:
                _count_step(self._context)
            return
        force, self._force = self._force, False
        self._loaders.watch(self._boundaries)
        if self._recording is not None:
            allowed = self._recording.boundary(self._step) and allowed
        self._protection.boundary(self._step, self._own_state, force=force, allowed=allowed)
        if self._survivor is not None:
            oldest = self._protection.oldest_step if self._survivor.may_stay else self._step
            self._loaders.forget_before(oldest)
        if handle is not None:
            self._protection.passed(handle)
        if self._recording is not None:
            self._recording.passed(self._step)

    def _keep(self) -> None:
        if self._protection is not None:
            self._protection.keep(self._step, self._own_state)

    def _newest_kept(self) -> int | None:
        return None if self._protection is None else self._protection.newest_step

    def _enter(self, driver: str, last_step: int) -> None:
        super()._enter(driver, last_step)
        if self._survivor is not None:
            is_restored = self._restored and not self._has_started
            self._survivor.enter_loop(self._step, last_step=last_step, is_restored=is_restored)
        if self._context is not None and self._context.page.phase == BETWEEN_LOOPS:
            self._context.page.phase = "train"

    def _leave(self) -> None:
        super()._leave()
        if self._survivor is not None:
            self._survivor.leave_loop()
        if self._context is not None and self._context.page.phase in ("", "train"):
            self._context.page.phase = BETWEEN_LOOPS
        if self._protection is not None:
            self._protection.finish()

    def _feed_of(self, loader: Any) -> DataPosition:
        return self._loaders.of(loader)


def _count_step(context: WorkerContext) -> None:
    """Count a boundary of a later session, after those of the first one."""
    from ftrun.wire.shared_memory.pages import HeartbeatField
    from ftrun.worker.process.heartbeat import step_done

    done = map(context.page.get, (HeartbeatField.STEP, HeartbeatField.RESTORED_STEP))
    step_done(context.page, max(done) + 1)
