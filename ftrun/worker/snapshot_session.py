"""Restore and snapshots of a session in a process that an agent started.

Runs in:  worker, training thread.
Takes in: the context, the attached state, the positions of the loaders.
Gives:    a restored state at `attach`, snapshots at boundaries, a halt at the boundary that the
          agent requests.
Survives: see capture.py.
"""

import atexit
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ftrun import clock
from ftrun.errors import MemoryTooSmall, PeerError, SnapshotError
from ftrun.ids import Version
from ftrun.snapshot.layout import Layout
from ftrun.snapshot.replica_shares import Group
from ftrun.wire.shared_memory.arena import NUM_SLOTS, Arena
from ftrun.wire.shared_memory.pages import CommandField, HeartbeatField
from ftrun.worker.capture.boundaries import AccumulationTracker
from ftrun.worker.capture.boundary_digests import BoundaryDigests
from ftrun.worker.capture.capture import Capture
from ftrun.worker.capture.device_order import StepStreams
from ftrun.worker.capture.slots import expected_layout, frozen_bytes
from ftrun.worker.context import WorkerContext
from ftrun.worker.process import graph_captures, heartbeat, lease
from ftrun.worker.replicas.shares import ReplicaShares
from ftrun.worker.restore import early_restore
from ftrun.worker.restore.buckets import BucketOrders, Warmup
from ftrun.worker.restore.loader import (
    LocalState,
    SavedState,
    arena_with,
    put_back_random_states,
    reload,
)
from ftrun.worker.restore.overwritten import RestoredMarks, RestoredSettings
from ftrun.worker.smp_client import WorkerSmpClient
from ftrun.worker.snapshot_wait import Level, LevelWait, SnapshotHandle, unprotected_reason
from ftrun.worker.state.attached import AttachedState, is_layout_of
from ftrun.worker.state.checked_state import CheckedState
from ftrun.worker.state.state_tree import BoundaryState
from ftrun.worker.state.unprotected import shown

_POLL_S = 0.02
_STOP_WAIT_S = 600.0

_log = logging.getLogger(__name__)


class SnapshotSession:
    """Snapshots and restores of one attached state."""

    def __init__(
        self, context: WorkerContext, attached: AttachedState, warmup: Warmup | None
    ) -> None:
        self._context = context
        self._attached = attached
        self._checked = CheckedState(attached, context.unprotected, self._check_overwritten)
        self.inner, self._tree = self._checked.inner, self._checked.tree
        self._link = WorkerSmpClient(context)
        guarded = context.unprotected.guarded
        self._graphs = graph_captures.observer()
        self._graphs.listen(guarded(self._before_capture), guarded(self._before_replay))

        def guarded_step(hook: Callable[..., None]) -> Callable[..., None]:
            return guarded(self._graphs.outside_captures(hook))

        self._streams = StepStreams(guarded_step)
        stepping = [*attached.optimizers.values(), *self.inner.covered]
        self._accumulation = AccumulationTracker(stepping, attached.stateful.values(), guarded_step)
        self.buckets = BucketOrders(attached.modules, warmup, may_stay=context.staying is not None)
        self.digests = BoundaryDigests(context.page, attached)
        self._capture: Capture | None = None
        self._saved: SavedState | None = None
        self._inherited: Arena | None = None
        self._marks: RestoredMarks | None = None
        self._settings: RestoredSettings | None = None
        self._members: Group = ()
        """Of the restored shard; empty if it holds whole tensors, or was of another layout."""
        self.after_replayed_step: Callable[..., None] = lambda: None
        """Called for the replay of a graph that contains a step, which fires no hook."""

    # --- attach ----------------------------------------------------------------------------

    def restore(self, *, is_again: bool = False) -> dict[str, Any] | None:
        """Restore the attached state; return the session's own values, None without a version.

        `is_again`: in a process that has made steps; tensors of optimizers keep their memory.
        """
        context = self._context
        lease.install(context)  # if a wrapper started the worker, `heartbeat.install` has not run
        context.page.set(HeartbeatField.ATTACHED, 1)
        context.page.set(HeartbeatField.ATTACH_NS, clock.now_ns())
        self.buckets.find_older()
        if context.restore is None:
            return None
        self._saved = self._open_other() if context.is_resized else self._open_own(context.restore)
        self.buckets.load(self._saved.part("orders"))
        own = {name: self._saved.part(name) for name in ("session", "loaders")}
        self._load(is_again=is_again)
        return own

    def _open_own(self, wanted: Version) -> SavedState:
        """Open this rank's shard, or the shards of all ranks if they had another layout."""
        ahead = early_restore.take(wanted)
        right, copied = frozenset[int](), dict[str, torch.Tensor]()
        if ahead is None:
            self._inherited = arena_with(wanted, self._context, self._link)
        else:
            self._inherited = ahead.arena
            # The early restore thread may still add to these sets, so copy what is complete now.
            right, copied = frozenset(ahead.right), dict(ahead.copied)
        saved = LocalState(self._inherited, wanted, self._context, right, copied)
        if saved.members:
            self._members = saved.members
            # Imported here, because the readers of several shards are needed in few runs.
            from ftrun.worker.replicas.shared_state import SharedState

            saved = SharedState(self._inherited, wanted, self._context, self._link, right)
        if self._is_of_this_layout(saved):
            return saved
        self._inherited, self._members = None, ()
        return self._open_other()

    def _is_of_this_layout(self, saved: LocalState) -> bool:
        if (layout := self._attached.layout) is not None:
            is_same = is_layout_of(layout, saved.layout)
            if not layout.is_empty or not is_same:
                return is_same
        if self._context.world_size == 1:
            return True
        # With the same world size, ranks may still hold other tensor parts or be other pipeline
        # stages. If the model is another one, the reader of all shards reports what it was.
        persistent = self._tree.persistent()
        held = set(persistent.names.values())
        return saved.is_cut_like([one for one in persistent.entries if one.name in held])

    def _open_other(self) -> SavedState:
        # Imported here, because most runs are restored into the same layout.
        from ftrun.worker.reshard.engine import open_resharded

        return open_resharded(self._context, self._link, self._attached.layout)

    def begin(self, extra: Callable[[], dict[str, Any]]) -> None:
        """Reserve memory and prepare to take snapshots."""
        context = self._context
        if not context.settings.enabled or context.launch.rehearses:
            return
        state = self._checked.begin(extra())  # raises ValueNotStorable
        inherited, self._inherited = self._inherited, None
        if inherited is not None and inherited.shape.num_slots < NUM_SLOTS:
            inherited = None  # it is only restored from
        expected = self._reserve(state) if inherited is None else None
        is_undeclared = self._attached.layout is None
        shares = ReplicaShares(
            context, self._link, restored=self._members, is_allowed=is_undeclared
        )
        of_steps = self._graphs.outside_captures
        self._capture = Capture(context, self._tree, self._link, shares, self._streams, of_steps)
        atexit.register(self._capture.finish)
        if inherited is not None:
            self._capture.warm(inherited)
        if expected is not None:
            self._capture.prepare(expected)

    def put_back_random_states(self) -> None:
        if self._saved is not None:
            put_back_random_states(self._saved, self._attached)

    def _load(self, *, is_again: bool = False) -> None:
        assert self._saved is not None
        self._prepare_wrappers()
        self._put_in_place(is_again=is_again)
        if is_again:
            return  # no code of the script runs before the next turn
        self._marks = RestoredMarks(self._tree)
        self._settings = RestoredSettings(self._tree)

    def _prepare_wrappers(self) -> None:
        """Bring wrappers into the state in which the version was taken."""
        if self._is_alone:
            attached = self._attached
            self.buckets.reset(attached.optimizers.values(), attached.stateful.values())
        else:
            self.buckets.warm()

    @property
    def _is_alone(self) -> bool:
        """The groups have no effect until this process joins the other ranks."""
        launch, staying = self._context.launch, self._context.staying
        is_new = launch.joins or launch.rehearses
        return staying is not None and (is_new or staying.line.renewals > 0)

    def _put_in_place(self, *, is_again: bool = False) -> None:
        assert self._saved is not None
        attached = self._attached
        # The script may hold references to dict items from attach. A second load keeps those items.
        dicts = () if self._marks is None else (attached.state, *attached.dicts.values())
        items = [dict(one) for one in dicts]
        with self.inner.leaving_out(self._saved.part("groups")):
            reload(self._saved, self._tree, self._context, keeps_memory=is_again)
        for one, its in zip(dicts, items, strict=True):
            one.clear()
            one.update(its)
        self.inner.share_again()
        self._accumulation.restored()
        early_restore.release()

    def release(self) -> None:
        """Release the restored version and the marks of overwritten values."""
        if self._saved is not None:
            self._saved.close()
        self._saved = self._marks = self._settings = None

    def _reserve(self, state: BoundaryState) -> Layout | None:
        """Request memory for the state; return its layout if there is memory for it.

        If it does not fit, snapshots are still attempted.
        """
        context = self._context
        expected = expected_layout(self._tree, state)
        try:
            self._link.reserve(expected.image_bytes, frozen_bytes=frozen_bytes(state))
        except MemoryTooSmall as error:
            context.unprotected.add("memory", str(error))
            if context.settings.required:
                raise
        except PeerError as error:
            _log.warning("memory is not reserved: %s", error)
        else:
            return expected
        return None

    # --- loop ------------------------------------------------------------------------------

    def first_turn(self, join: Callable[[], None]) -> None:
        """Start the loop: restore again what the script has changed since `attach`.

        `join`: called before the random states are restored.
        """
        if self._saved is not None:
            self._put_back_settings()
            if self.buckets.is_wrapped_since:
                # DDP's constructor has broadcast the buffers of rank 0.
                self.finish()
                self._load()
            else:
                self._load_if_overwritten()
        join()
        self.put_back_random_states()
        self.release()

    def _put_back_settings(self) -> None:
        assert self._settings is not None
        if found := self._settings.put_back():
            _log.warning(
                "after attach the script has set %s otherwise than at step %d; the restored values "
                "are put back; set them before attach, or inside the loop",
                shown(found),
                self._restored_step,
            )

    def _load_if_overwritten(self) -> None:
        assert self._marks is not None
        touched = self._marks.compare()
        if not touched:
            return
        self.finish()
        self._put_in_place()
        if changed := [name for name, is_other in touched.items() if is_other]:
            _log.warning(
                "the script has overwritten the restored %s after attach (load_state_dict?); the "
                "state of step %d is put back; load before attach",
                shown(changed, limit=1),
                self._restored_step,
            )

    def _check_overwritten(self) -> None:
        """Report overwritten state before the first optimizer step if `begin` was not called.

        The forward of this step has run, so the state cannot be restored again. A wrapper such as
        SAM, or a script that normalizes a layer, also changes weights before the step. Therefore
        the report requires that most weights, or most optimizer state, differ.
        """
        if self._marks is None or self.inner.has_wrappers or self.buckets.is_wrapped_since:
            return
        if self._graphs.is_capturing:
            return  # the comparison waits for the device
        if changed := self._marks.mostly_overwritten():
            self._context.unprotected.add(
                "overwritten",
                f"the script has overwritten the restored {shown(changed, limit=1)} after attach "
                "(load_state_dict?): the run does not continue from step "
                f"{self._restored_step}; load before attach",
            )

    @property
    def _restored_step(self) -> int:
        assert self._context.restore is not None
        return self._context.restore.step

    def first_turn_is_over(self) -> None:
        """End the first step of a loop that did not call `begin`; that step cannot be repeated."""
        if self._saved is not None and self.buckets.is_wrapped_since:
            _log.warning(
                "not bitwise: the model was wrapped in DDP after attach, which has sent rank 0's "
                "buffers to all; attach after wrapping, or use session.steps()"
            )
        self.release()

    def boundary(
        self, step: int, extra: Callable[[], dict[str, Any]], *, force: bool, allowed: bool
    ) -> None:
        """Process a step boundary. Raises MemoryTooSmall if the profile requires snapshots."""
        lease.wait(self._context.commands, lambda: self._context.is_revoked)
        stops = False
        try:
            stops = self._end_step(step, extra, force=force, allowed=allowed)
        except MemoryTooSmall:
            raise
        except Exception as error:  # noqa: BLE001 - a bug in ftrun must not end the script
            self._context.unprotected.add_bug("the step boundary", error)
        if stops:
            self._halt(step)  # a signal handler of the script may raise here

    def _end_step(
        self, step: int, extra: Callable[[], dict[str, Any]], *, force: bool, allowed: bool
    ) -> bool:
        """End the step; return whether this process must halt now."""
        if self._graphs.is_capturing:
            return False  # a wait, query or copy would end the capture
        self._streams.join()
        self.digests.boundary(step)
        heartbeat.step_done(self._context.page, step)
        is_good = self._is_good()
        allowed, force = allowed and is_good, force and is_good
        is_between = not self._accumulation.boundary()
        self._checked.watch.boundary()
        self._report_waiting()
        stops = is_between and self._context.commands.get(CommandField.STOP_AFTER_STEP) <= step
        if self._capture is not None:
            self._capture.boundary(
                step,
                collect=lambda: self._collect(extra()),
                force=(force and is_between) or (stops and is_good),
                allowed=allowed and is_between,
            )
        return stops

    def _collect(self, extra: dict[str, Any]) -> BoundaryState:
        return self._checked.collect({**extra, "orders": self.buckets.known()})

    def keep(self, step: int, extra: Callable[[], dict[str, Any]]) -> None:
        """Take a snapshot without a boundary, unless `step` already has one."""
        capture = self._capture
        if capture is None or self.newest_step == step or not self._is_good():
            return
        collect = lambda: self._collect(extra())  # noqa: E731
        capture.boundary(step, collect=collect, force=True, allowed=True)

    @property
    def newest(self) -> Version | None:
        """The newest snapshot that this rank has sealed or restored, after the copy in progress."""
        if self._capture is None:
            return None
        self._capture.await_copy()
        return self._capture.commit_wait.newest_sealed

    @property
    def newest_step(self) -> int | None:
        """None: no snapshots are taken; -1: this rank has none."""
        if self._capture is None:
            return None
        newest = self.newest
        return -1 if newest is None else newest.step

    @property
    def oldest_step(self) -> int:
        """Step of the oldest version that may still be restored; -1: there is none."""
        committed = self._capture.commit_wait.committed if self._capture is not None else None
        return -1 if committed is None else committed.step

    def stay_problem(self) -> str:
        """Why this process cannot stay when another rank fails, in words; empty if it can."""
        if self._capture is None:
            return "this run takes no snapshots (snapshot.enabled)"
        return self.buckets.stay_problem()

    def persistent_tensors(self) -> Sequence[torch.Tensor]:
        return self._tree.persistent().originals

    def wait(self, level: Level, timeout_s: float, handle: SnapshotHandle | None) -> bool:
        if self._context.launch.rehearses:
            return False
        if self._capture is None:
            raise SnapshotError(f"wait({level!r}): this run takes no snapshots (snapshot.enabled)")
        commit_wait = self._capture.commit_wait
        wait = LevelWait(self._context, commit_wait, self._link.send_again)
        if handle is not None:
            return wait.until(level, handle.version(level), timeout_s)
        return wait.until(level, None, timeout_s, self._capture.await_copy)

    def passed(self, handle: SnapshotHandle) -> None:
        """Complete a handle after its boundary."""
        handle.passed(self.newest, unprotected_reason(self._context))

    def _report_waiting(self) -> None:
        accumulation, reasons = self._accumulation, self._context.unprotected
        if accumulation.crossing and "crossing gradients" not in reasons:
            crossing = accumulation.crossing
            names = [name for name, one in self._attached.optimizers.items() if one in crossing]
            reasons.add(
                "crossing gradients",
                f"{shown(names) or 'an optimizer'} uses gradients of the turn before, and no "
                "snapshot holds gradients: a restart would step without them; run backward() and "
                "step() in the same turn of the loop",
            )
        waited = accumulation.waits_long
        if not waited:
            reasons.remove("accumulation")
        elif "accumulation" not in reasons:
            pending = accumulation.pending
            names = [name for name, one in self._attached.optimizers.items() if one in pending]
            reasons.add(
                "accumulation",
                f"{shown(names) or 'an optimizer'} has gradients but has not stepped during "
                f"{waited}. No snapshot is taken. "
                "Call its zero_grad(), or requires_grad_(False) on its parameters",
            )

    def _is_good(self) -> bool:
        """Whether a new snapshot may replace older ones: no parameter is NaN or infinite."""
        page = self._context.page
        since = page.get(HeartbeatField.NUMERICAL_ANOMALY_STEP)
        if since and "numerical anomaly" not in self._context.unprotected:
            self._context.unprotected.add(
                "numerical anomaly",
                f"a parameter is NaN or infinite since step {since:,}; older snapshots are kept",
            )
        return not since

    def resolve(self) -> None:
        if self._capture is not None and not self._graphs.is_capturing:
            self._capture.resolve()

    def _before_capture(self, graph: Any) -> None:
        if self._capture is not None:
            self._capture.before_capture(graph)

    def _before_replay(self, graph: Any, stepping: Sequence[torch.optim.Optimizer]) -> None:
        self._streams.note()
        for optimizer in stepping:
            self._accumulation.before_step(optimizer)
        if stepping:
            self.after_replayed_step()
        if self._capture is not None:
            self._capture.before_replay(graph, is_step=bool(stepping))

    def finish(self) -> None:
        if self._capture is not None:
            self._capture.finish()

    def close(self) -> None:
        self.buckets.close()
        self._graphs.listen()
        self._streams.close()
        self._accumulation.close()
        self._checked.watch.close()
        self.leave()

    def leave(self) -> None:
        """End the snapshots of this generation; `restore` and `begin` may follow in the next."""
        if self._capture is not None:
            self._capture.close()
            atexit.unregister(self._capture.finish)
        self._capture = self._inherited = None
        self._members = ()
        self.digests.start_again()
        self.release()
        self._link.close()

    def _halt(self, step: int) -> None:
        """Wait until the agent ends this process or cancels the stop; 600 s at most."""
        commands = self._context.commands
        self._context.page.set(HeartbeatField.STOPPED_AT_BOUNDARY, 1)
        give_up_s = clock.now_s() + _STOP_WAIT_S
        try:
            while commands.get(CommandField.STOP_AFTER_STEP) <= step and clock.now_s() < give_up_s:
                if self._context.is_revoked:
                    return
                clock.sleep(_POLL_S)  # short, so that a signal handler of the script can run
        finally:
            self._context.page.set(HeartbeatField.STOPPED_AT_BOUNDARY, 0)
