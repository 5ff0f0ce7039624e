"""Takes snapshots in the worker, from the step boundary to the seal.

Runs in:  worker; the boundary and the optimizer's pre-hook in the training thread, lazy copies
          and the seal in the copy thread.
Takes in: the state of each boundary, commits on the command page, memory from the SMP.
Gives:    sealed slots, and reports of them to the SMP; counts and times on the heartbeat page.
Survives: nothing; the slot with the newest committed version is never written, so a kill at any
          moment leaves it whole.

Rule 1: between two boundaries at most one snapshot is in progress. Whenever an optimizer changes a
        parameter, the copy thread is idle, or has queued all its reads of devices and runs no state
        provider. The stream of the step waits for these reads, and the training thread does not.
Rule 2: tensors that belong to an optimizer are copied lazily. Each lazy copy is checked against the
        boundary before its slot is sealed (lazy_check.py), and a difference discards the snapshot.
        The first `verify_first` snapshots, and one in `verify_every`, are verified snapshots. They
        are copied at the boundary, so they are exact regardless of the script, and compared by
        digest just before the optimizer steps. A tensor that differs is copied at the boundary
        from then on.
Rule 3: a slot is overwritten only after its version is committed and superseded, or abandoned:
        withdrawn by this rank, or by another rank that has no snapshot of that step.
Rule 4: the boundary does not wait while the SMPs protect the last snapshot across nodes. It also
        does not wait after a restore until the restored version is committed again. Snapshots that
        are due in these times are skipped.
Rule 5: an error in this module costs protection, never the run: no exception reaches the script. If
        a state cannot be captured, the snapshot of this step is skipped, and later boundaries try
        again. An error of a copy or of its check ends protection.
Rule 6: a replay of a graph fires no hook and changes no version counter. Before the replay of a
        graph that contains a step, or that is not judged yet, the stream waits as before a step.
        The next snapshot is then verified. If no source changes until the step, the graphs replayed
        in between are harmless and wait no more, until the state has other tensors. If a source
        changes, they are treated like steps. Later verified snapshots compare after harmless graphs
        too.

Source: the lazy copy during forward and backward is from DataStates-LLM (arXiv 2406.10707).
"""

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ftrun import clock
from ftrun.errors import FtrunError, MemoryTooSmall, PeerError, ProviderFailed, StructureChanged
from ftrun.snapshot.replica_shares import ReplicaCheck
from ftrun.wire.crash_points import crash_point
from ftrun.wire.shared_memory.arena import Arena
from ftrun.wire.shared_memory.pages import HeartbeatField
from ftrun.worker.capture.boundaries import SnapshotSchedule, StepActivity
from ftrun.worker.capture.copying import CopyThread, SlotCopy
from ftrun.worker.capture.device_order import JudgedGraphs, StepStreams
from ftrun.worker.capture.device_sources import NO_DEVICE_MEMORY, DeviceCopies
from ftrun.worker.capture.lazy_check import BEFORE_STEP, UNDER_COPY, WITHOUT_HOOK, LazyCopyCheck
from ftrun.worker.capture.slots import SlotProvider
from ftrun.worker.context import WorkerContext
from ftrun.worker.replicas.shares import ReplicaShares
from ftrun.worker.smp_client import WorkerSmpClient
from ftrun.worker.state.state_tree import BoundaryState, StateTree
from ftrun.worker.state.unprotected import Hook, shown
from ftrun.worker.targets.pool_capture import PoolCapture, PoolTarget
from ftrun.worker.targets.pool_stream import CaptureGivenUp
from ftrun.worker.targets.slot_target import SlotTarget, SlotTargets

_log = logging.getLogger(__name__)


class Capture:
    """Takes snapshots at step boundaries; `of_steps` leaves out hooks of steps that do not run."""

    def __init__(
        self,
        context: WorkerContext,
        tree: StateTree,
        link: WorkerSmpClient,
        shares: ReplicaShares,
        streams: StepStreams,
        of_steps: Callable[[Hook], Hook],
    ) -> None:
        self._context = context
        self._tree = tree
        self._link = link
        self._shares = shares
        self._page = context.page
        self._cadence = SnapshotSchedule(context.settings, context.page, context.commands)
        self._thread = CopyThread()
        self._pid = os.getpid()
        self._store = SlotProvider(context)
        self._slots = SlotTargets(context, self._store, shares, link)
        self._pool = PoolCapture(context)
        self._at_boundary: set[str] = set()
        self.commit_wait = self._store.commit_wait
        self.prepare = self._store.prepare
        self._check: LazyCopyCheck | None = None
        self._verified: tuple[SlotCopy, memoryview] | None = None
        self._graphs = JudgedGraphs()
        self._num_taken, self._newest_taken = 0, -1
        self._copy_s, self._blocked_ns = 0.0, 0
        self._turn = StepActivity.QUIET
        self._is_typical = True
        self._last_boundary_ns = 0
        self._hook_fired = False
        self._is_hookless = False
        """No optimizer hook has run in the turn before this boundary."""
        self._streams = streams
        self._is_off = False
        self._trouble = ""
        self._copy_of_devices: DeviceCopies | None = None
        """The copy in progress, or the last one, if it reads devices."""
        self._late_skip = -1
        self._is_providing = False
        """State providers write in the copy thread, in the copy in progress or the last one."""
        self._hook = register_optimizer_step_pre_hook(of_steps(self.before_step))

    # --- training thread -------------------------------------------------------------------

    def boundary(
        self, step: int, *, collect: Callable[[], BoundaryState], force: bool, allowed: bool
    ) -> None:
        """Take a snapshot at this boundary if one is due.

        Args:
            step: number of boundaries passed, including this one.
            collect: returns the state; called only if it is needed.
            force: take a snapshot regardless of the interval, and wait for its seal.
            allowed: the script and its optimizers permit a snapshot at this boundary.

        Raises:
            MemoryTooSmall: there is no memory for snapshots, and the profile requires them.
        """
        if self._is_off:
            return
        started_ns = clock.now_ns()
        try:
            is_due = self._is_due(step, force=force, allowed=allowed)
            self._end_turn(is_due=is_due, allowed=allowed)
            self._report_late_skip()
            self._learn(started_ns)
            self._link.send_again()
            if (missed := self._cadence.drain_missed()) > self._newest_taken:
                self._report_skip(missed)  # other ranks may have a snapshot of this step
            self._try(step, collect, is_due=is_due, is_last=force)
        except PeerError as error:
            # The agent starts another SMP; until then no memory can be requested.
            self._page.add(HeartbeatField.SKIPPED_COUNT, 1)
            if str(error) != self._trouble:  # log it once, not at each step
                self._trouble = str(error)
                _log.warning("no snapshot of step %d, nor until that is over: %s", step, error)
        except StructureChanged as error:
            self._skip_snapshot(step, "structure", str(error))
        except MemoryTooSmall as error:
            self._refused(step, error)
        except Exception as error:  # noqa: BLE001 - rule 5
            self._give_up(error)
        self._count_blocked(started_ns)
        self._last_boundary_ns = clock.now_ns()

    def _is_due(self, step: int, *, force: bool, allowed: bool) -> bool:
        # It does not depend on `_learn`: intervals begin at steps that no rank has made.
        is_due = (allowed and self._cadence.is_due(step)) or force
        if self._pool.is_on:  # rule 1 of pools
            return allowed and self._cadence.is_requested
        if is_due and not force and self._is_providing and self._thread.is_busy:
            self._page.add(HeartbeatField.SKIPPED_COUNT, 1)
            self._late_skip = step
            return False
        return is_due

    def warm(self, arena: Arena) -> None:
        """Map the pages of an inherited arena in the copy thread, during the first step."""
        self._store.inherit(arena)
        self._thread.start(arena.populate)

    def finish(self) -> None:
        """Wait for the copy thread, so that the last snapshot is whole."""
        if os.getpid() == self._pid:
            self.await_copy()

    def await_copy(self, timeout_s: float | None = None) -> bool:
        """Wait for the copy in progress; return whether it is complete."""
        if self._copy_of_devices is not None:
            self._copy_of_devices.lift_limit()
        if self._pool.is_streaming:
            return self._pool.await_copy(self._thread.wait, timeout_s)
        return self._thread.wait(timeout_s)

    def close(self) -> None:
        self.finish()
        self._hook.remove()
        self._is_off = True
        self._release()
        self._pool.close()
        self._thread.close()

    def resolve(self) -> None:
        """Wait for the copy in progress; the script may then change any tensor until its next step.

        Never raises.
        """
        self._resolve(waits=True)

    def _resolve(self, *, waits: bool = False) -> None:
        if self._is_off or os.getpid() != self._pid:
            return
        started_ns = clock.now_ns()
        try:
            if waits:
                self.await_copy()
            self._observe()
        except Exception as error:  # noqa: BLE001 - rule 5
            self._give_up(error)
        self._count_blocked(started_ns)

    def before_capture(self, graph: Any) -> None:
        self._graphs.harmless.discard(graph)
        self._graphs.changing.discard(graph)
        self.resolve()

    def before_replay(self, graph: Any, *, is_step: bool) -> None:
        # Rule 6
        graphs = self._graphs
        if is_step or graph in graphs.changing:
            self.before_step()
        elif graph not in graphs.harmless:
            if self._verified is not None:
                graphs.replayed.add(graph)
            else:
                graphs.are_new = True
                self.before_step()

    def before_step(self, *_: Any) -> None:
        """Called by torch before an optimizer steps, and before a replay that may change state."""
        # A compiled step must not trace the code below; `_end_turn` detects such a step. A process
        # that the script has forked has this hook but no copy thread, so `resolve` returns there.
        if torch.compiler.is_compiling():
            return
        self._hook_fired = True
        if self._check is not None or self._copy_of_devices is not None:
            self._resolve()

    def _observe(self) -> None:
        """Order what follows after the copy, and sample its sources before they may change."""
        if self._copy_of_devices is not None:
            self._copy_of_devices.precede()
        if self._copy_of_devices is None or self._is_providing:
            self.await_copy()
        if self._check is not None:
            self._check.observe()
        verified, self._verified = self._verified, None
        if verified is not None:
            copy, table = verified
            changed = copy.differing(table)
            if self._graphs.judge(has_changed=bool(changed)):
                self._check = None  # its samples hold the changes of the graphs
            else:
                self._demote(changed, BEFORE_STEP)

    def _end_turn(self, *, is_due: bool, allowed: bool) -> None:
        hook_fired, self._hook_fired = self._hook_fired, False
        self._is_hookless = not hook_fired
        if not is_due and self._is_providing and self._thread.is_busy:
            return  # no optimizer has stepped
        check = self._check
        if check is not None and not is_due:
            check.hook_fired = check.hook_fired or hook_fired
            # No thread waits for a device here: the check continues at the next boundary. In an
            # accumulation, which allows no snapshot, it continues until the step.
            is_complete = not self._thread.is_busy and check.has_arrived
            if not (is_complete if check.hook_fired else allowed):
                return
        self.await_copy()
        self._copy_of_devices = None
        self._observe()
        check, self._check = self._check, None
        if check is not None and (hook_fired or check.hook_fired):
            self._demote(check.changed_before_step(), BEFORE_STEP)
        elif check is not None:
            self._demote(check.changed_now(), WITHOUT_HOOK)

    def _count_blocked(self, started_ns: int) -> None:
        blocked_ns = clock.now_ns() - started_ns
        self._blocked_ns += blocked_ns
        self._page.add(HeartbeatField.BLOCKED_NS, blocked_ns)

    def _learn(self, now_ns: int) -> None:
        # A turn with a verified snapshot does not measure the cost of a lazy one.
        if self._last_boundary_ns and self._is_typical:
            self._cadence.learn(
                self._turn,
                step_s=(now_ns - self._last_boundary_ns) / 1e9,
                copy_s=self._copy_s,
                blocked_s=self._blocked_ns / 1e9,
            )
        self._turn = StepActivity.QUIET if self.commit_wait.is_free else StepActivity.PROTECT
        if self._thread.is_busy:
            self._turn = StepActivity.COPY
        self._is_typical = True
        self._blocked_ns = 0

    def _try(
        self, step: int, collect: Callable[[], BoundaryState], *, is_due: bool, is_last: bool
    ) -> None:
        """Take a snapshot if one is due; otherwise check that there is memory for one."""
        try:
            if self._pool.is_wanted and not self._thread.is_busy:
                stored_bytes = self._page.get(HeartbeatField.IMAGE_BYTES)
                self._pool.begin(max(self._link.reserved_bytes, stored_bytes))
                self._leave_slots()
            elif self._pool.is_on and not self._thread.is_busy and not self._pool.poll():
                if is_due:
                    self._report_skip(step)
            elif is_due:
                self._take(step, collect, is_last=is_last)
                if is_last:
                    self.await_copy()
            elif not self._pool.is_on:
                size_of = lambda: self._shares.cut(collect(), self._at_boundary)  # noqa: E731
                self._store.check_size(self._tree, size_of, self._link)
        except (PeerError, StructureChanged, MemoryTooSmall):
            raise
        except CaptureGivenUp as error:
            self._check = None
            self._skip_pooled(step, error)
        except Exception as error:  # noqa: BLE001 - rule 5
            self._fail(step, error)

    def _refused(self, step: int, error: MemoryTooSmall) -> None:
        self._skip_snapshot(step, "memory", str(error))
        if self._context.settings.required:
            raise error
        if self._pool.refused(error):
            self._leave_slots()

    def _leave_slots(self) -> None:
        self.await_copy()
        self._release()
        self._check = self._copy_of_devices = None
        self._store.release()

    def _skip_pooled(self, step: int, error: Exception) -> None:
        self._page.add(HeartbeatField.SKIPPED_COUNT, 1)
        _log.warning("no checkpoint of step %d: %s", step, error)
        self._link.withdraw(step)

    def _report_skip(self, step: int) -> None:
        self.commit_wait.skipped(step)
        self._link.report_skipped(step)

    def _take(self, step: int, collect: Callable[[], BoundaryState], *, is_last: bool) -> None:
        targets = self._pool if self._pool.is_on else self._slots
        if not targets.may_overwrite(is_last=is_last):
            # No withdrawal: the SMP may still commit the last seal, so no rank may overwrite it.
            self._page.add(HeartbeatField.SKIPPED_COUNT, 1)
            self._report_skip(step)
            return
        crash_point("worker.capture.started")
        whole = collect()
        self._graphs.see(whole.persistent)
        target = targets.target(step, whole, self._at_boundary, is_last=is_last)
        if target is None:
            self.commit_wait.skipped(step)
            self._link.withdraw(step)
            return
        self._newest_taken = step
        try:
            self._fill(target, step, is_last=is_last)
        except BaseException:
            target.discard()
            raise

    def _fill(self, target: SlotTarget | PoolTarget, step: int, *, is_last: bool) -> None:
        copy, is_verified = target.copy, self._is_verified()
        if is_verified or self._is_hookless:
            # A step without a hook, such as a compiled one, may have run in any stream.
            copy.synchronize()
        is_verified = is_verified and target.verify()
        check = LazyCopyCheck(copy.samples)
        settings = self._context.settings
        gb_s = 0.0 if is_verified or is_last else settings.d2h_gb_s  # no limit: this thread waits
        copy.copy_boundary(is_staged=settings.stage == "device", gb_s=gb_s)
        target.begin()
        crash_point("worker.capture.boundary_copied")
        self._check = check
        if copy.on_devices:
            self._copy_of_devices = copy.on_devices
            self._streams.release()
        replicas = target.check(self._shares)
        if is_verified:
            if self._copy(target, check, step, replicas) and isinstance(copy, SlotCopy):
                self._verified = (copy, target.table)
            self._is_typical = False
        else:
            self._turn = StepActivity.COPY

            def work() -> None:
                self._copy(target, check, step, replicas)
                copy.provided.clear()  # what they have frozen may be large

            self._is_providing = bool(copy.provided)
            self._thread.start(work)

    def _report_late_skip(self) -> None:
        # After the seal of the step before, which a skip would abandon.
        if self._late_skip >= 0 and not self._thread.is_busy:
            self._report_skip(self._late_skip)
            self._late_skip = -1

    def _is_verified(self) -> bool:
        settings = self._context.settings
        taken, self._num_taken = self._num_taken, self._num_taken + 1
        are_new, self._graphs.are_new = self._graphs.are_new, False
        return are_new or taken < settings.verify_first or (taken + 1) % settings.verify_every == 0

    # --- copy thread -----------------------------------------------------------------------

    def _copy(
        self,
        target: SlotTarget | PoolTarget,
        check: LazyCopyCheck,
        step: int,
        replicas: Callable[[], ReplicaCheck | None],
    ) -> bool:
        """Copy and seal; return whether the slot is sealed. Never raises."""
        started_ns, copy, is_sealed = clock.now_ns(), target.copy, False
        try:
            copy.copy_lazy(target.table)
            hashed = replicas()  # before `wrong_copies`, which covers the time of both
            crash_point("worker.capture.copied")
            if wrong := sorted({*target.changed(), *check.wrong_copies()}):
                self._page.add(HeartbeatField.DISCARDED_COUNT, 1)
                self._demote(wrong, UNDER_COPY.format(step=step))
                self.commit_wait.skipped(step)
                self._link.withdraw(step)
                return False
            target.seal(hashed)
            is_sealed = True
            for key in target.solved:
                self._context.unprotected.remove(key)
        except CaptureGivenUp as error:
            self._skip_pooled(step, error)
        except ProviderFailed as error:
            self._skip_bad_value(step, error)
        except torch.OutOfMemoryError:
            self._skip_snapshot(step, "device memory", NO_DEVICE_MEMORY)
        except Exception as error:  # noqa: BLE001 - rule 5
            self._give_up(error)
        finally:
            if not is_sealed:
                target.discard()
            copy.on_devices.issued.set()
            self._copy_s = (clock.now_ns() - started_ns) / 1e9
        return is_sealed

    def _demote(self, names: list[str], what: str) -> None:
        if not (new := [name for name in names if name not in self._at_boundary]):
            return
        self._at_boundary.update(new)
        self._store.forget_copies()
        text = f"{shown(new)} {what}. From now on ftrun copies it at the step boundary"
        if not self._page.get(HeartbeatField.UNPROTECTED):
            self._page.note = text
        _log.warning("%s", text)

    def _skip_snapshot(self, step: int, key: str, reason: str) -> None:
        """Skip the snapshot of this step; the slots stay as they are, and later steps try again."""
        self._release()
        self._page.add(HeartbeatField.SKIPPED_COUNT, 1)
        self._context.unprotected.add(key, reason)
        self.commit_wait.skipped(step)
        self._link.withdraw(step)

    def _fail(self, step: int, error: Exception) -> None:
        """Skip the snapshot of this step because of an error that may pass, such as a bad value."""
        self._check = self._copy_of_devices = None
        self._skip_bad_value(step, error)

    def _release(self) -> None:
        # What the state providers have frozen may be large.
        self._verified = None
        self._store.forget_copies()

    def _skip_bad_value(self, step: int, error: Exception) -> None:
        kind = "" if isinstance(error, FtrunError) else f"{type(error).__name__}: "
        is_new = "value" not in self._context.unprotected
        text = f"no snapshots until this is over: {kind}{error}"
        self._skip_snapshot(step, "value", text)
        if is_new and (kind or error.__cause__ is not None):
            _log.warning("rank %d: %s", self._context.rank, text, exc_info=error)

    def _give_up(self, error: Exception) -> None:
        """Stop taking snapshots in this process, because its checks are no longer reliable."""
        self._is_off = True
        self._release()
        kind = "" if isinstance(error, FtrunError) else f"a bug in ftrun: {type(error).__name__}: "
        if isinstance(error, getattr(torch, "AcceleratorError", ())):  # such as a failed assertion
            kind = "the device reports an error of a kernel: "
        text = f"no more snapshots: {kind}{error}"
        self._context.unprotected.add("capture", text)
        _log.warning("rank %d: %s", self._context.rank, text, exc_info=error)
