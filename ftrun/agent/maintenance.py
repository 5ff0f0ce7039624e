"""Periodic work that needs no decision, and the exits of this node's components.

Runs in the main thread, once per turn of the loop. Survives zygote and SMP.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from signal import SIGKILL
from typing import TYPE_CHECKING

from ftrun import clock, events
from ftrun.agent.launch.process import ChildProcess, has_ended, reap_strangers
from ftrun.agent.snapshots.checkpoint_orders import CheckpointOrders
from ftrun.agent.snapshots.smp_client import CHECKPOINT_WAIT_S
from ftrun.errors import PeerError, PeerLost
from ftrun.ids import Version
from ftrun.monitor.worker_exits import exit_text
from ftrun.records import snapshots as records
from ftrun.records.run import RankWithoutProgress
from ftrun.recovery import commands
from ftrun.recovery.commands import EndRun
from ftrun.recovery.supervisor import ComponentRestarts
from ftrun.wire.crash_points import crash_point
from ftrun.wire.messages.smp import Inventory
from ftrun.wire.shared_memory.pages import HeartbeatField

if TYPE_CHECKING:
    from ftrun.agent.launcher import Run

_log = logging.getLogger(__name__)

RECONNECT_EVERY_S = 1.0
UNREACHABLE_S = 5.0
"""An SMP that lives and accepts no connection for this long is killed, and another one starts."""

SMP_WAIT_S = 30.0
"""Longest wait for an SMP at the end of the run, before the last checkpoint."""

SMP_POLL_S = 0.05
REAP_EVERY_S = 5.0
REFILL_AFTER_S = 0.5
"""Standbys are forked this many seconds after a restart, because they would compete with it for
processors."""


class Maintenance:
    """Periodic work of one run."""

    def __init__(self, run: "Run") -> None:
        self.smp_is_starting = False
        self.smp_given_up = ""
        """Why there is no SMP any more; empty while there is one."""
        self._run = run
        self._zygote = run.workers.starter.zygote
        """Also after it was disabled, because its children are still reaped."""
        self.checkpoints = CheckpointOrders(run)
        self._refill_due_s: float | None = None
        self._stalled_ranks: set[int] = set()
        self._slow_ranks: set[int] = set()
        self._restarts = ComponentRestarts()
        self._reconnect_due_s = 0.0
        self._reap_due_s = 0.0
        self._unreachable_since_s: float | None = None

    def generation_started(self, now_s: float) -> None:
        self._refill_due_s = self._reap_due_s = now_s + REFILL_AFTER_S
        self.checkpoints.generation_started()
        self._stalled_ranks.clear()
        self._slow_ranks.clear()

    def check_processes(self, now_s: float) -> None:
        run = self._run
        monitor = run.spec.profile.monitor
        run.workers.kill_long_stopped(now_s, monitor.frozen_kill_after_s)
        run.workers.watch_ends()
        run.generations.measure()
        run.generations.keep_arenas()
        run.generations.repeats.poll()
        self._report_no_progress(now_s, monitor.no_progress_report_after_s)
        self._report_slow_captures()
        self._refill(now_s)
        self._reap(now_s)
        self._prepare_standbys()
        run.rehearsals.poll(now_s)
        self.checkpoints.poll(now_s)
        self._report_files()
        if self._bring_up_smp():
            run.generations.configure_new_smp()

    def end(self, command: EndRun, *, is_cancelled: Callable[[], bool]) -> None:
        """Write the committed state and the record of the end to the checkpoint directory."""
        run = self._run
        if run.spec.checkpoint_directory is None:
            return
        give_up_s = clock.now_s() + self._limit_s(command)
        self._await_smp(give_up_s, is_cancelled)
        versions = self._last_versions()
        if versions or run.smp.committed or run.smp.needed.pool_bytes:
            if not self._write_last(versions, give_up_s, is_cancelled):
                self._await_smp(give_up_s, is_cancelled)  # it has ended just now
                if not self._write_last(versions, give_up_s, is_cancelled):
                    run.smp.refused = "the snapshot manager was lost twice"
            self.checkpoints.report()
        run.smp.end_checkpoints(int(command.exit_code), command.reason, run.spec.command_digest)

    def _limit_s(self, command: EndRun) -> float:
        is_stop = command.exit_code > 128 and command.cause is None
        return self._run.spec.profile.stop.grace_s if is_stop else CHECKPOINT_WAIT_S

    def finish_files(self, command: EndRun, *, is_cancelled: Callable[[], bool]) -> None:
        """Have the files of ftrun.save written before the SMP ends."""
        run = self._run
        with suppress(PeerError):
            run.smp.collect()
        if not run.smp.files.held:
            return
        give_up_s, reason = clock.now_s() + self._limit_s(command), ""
        for _ in range(2):  # the SMP may end just now, and its successor gets the files
            self._await_smp(give_up_s, is_cancelled)
            try:
                reason = run.smp.finish_files(give_up_s, is_cancelled)
                break
            except PeerError as error:
                reason = str(error)
                run.smp.lost()
        self._report_files()
        if reason:
            _log.warning("files of ftrun.save are lost: %s", reason)

    def _report_files(self) -> None:
        journal = self._run.journal
        for one in self._run.smp.files.drain_results():
            if one.reason:
                journal.write(records.FileNotWritten(one.reason, one.path))
                _log.warning("%s is not written: %s", one.path, one.reason)
            else:
                journal.write(records.FileWrittenRecord(one.path, one.num_bytes, one.seconds))

    def _await_smp(self, give_up_s: float, is_cancelled: Callable[[], bool]) -> None:
        """Wait for an SMP that starts, or that replaces one that has just been lost."""
        run = self._run
        if not run.spec.profile.snapshot.enabled:
            return
        give_up_s = min(give_up_s, clock.now_s() + SMP_WAIT_S)
        while run.smp.channel is None and not self.smp_given_up:
            if clock.now_s() >= give_up_s or is_cancelled():
                return
            self.handle_exits()
            if self._bring_up_smp(waits=True):
                run.generations.configure_new_smp()
            clock.sleep(SMP_POLL_S)

    def _write_last(
        self, versions: Sequence[Version], give_up_s: float, is_cancelled: Callable[[], bool]
    ) -> bool:
        """Return False if the SMP was lost."""
        run = self._run
        if run.smp.channel is None:
            run.smp.refused = self.smp_given_up or "there is no snapshot manager"
            return True
        try:
            if run.smp.finish_checkpoint(give_up_s, is_cancelled):
                if run.smp.needed.pool_bytes:
                    return True  # no version is in memory
                if run.spec.nodes is None:
                    self.checkpoints.write_newest()
                    run.smp.finish_checkpoint(give_up_s, is_cancelled)
                else:
                    self._write_last_part(versions, give_up_s, is_cancelled)
        except PeerLost:
            run.smp.lost()
            return False
        except PeerError as error:
            run.smp.refused = str(error)
        return True

    def _last_versions(self) -> list[Version]:
        """The versions that the last checkpoint may be made of, the best first.

        While ranks run, it is the version that the leader has reported as committed. After the end
        of a generation, or of the last agent, nodes may know different commits: the candidates are
        what this node holds, at most two, and the newest commit is one of them. On one node the run
        may end before its first commit is reported.
        """
        run = self._run
        if run.spec.nodes is not None and run.generations.has_ranks:
            return [] if self.checkpoints.last_commit is None else [self.checkpoints.last_commit]
        return run.smp.whole_versions

    def _write_last_part(
        self, versions: Sequence[Version], give_up_s: float, is_cancelled: Callable[[], bool]
    ) -> None:
        """Write the parts of these versions in turn, until a complete checkpoint results."""
        run = self._run
        written = run.smp.num_checkpoints
        for wanted in versions:
            self.checkpoints.write_part(wanted, is_urgent=True)
            is_over = run.smp.finish_checkpoint(give_up_s, is_cancelled)
            if not is_over or run.smp.num_checkpoints > written:
                return

    def holdings(self) -> tuple[Inventory, int, int]:
        """What this node holds, and the ports of its next store and of its SMP, once that is up."""
        run = self._run
        self._bring_up_smp(waits=True)
        return run.smp.inventory(), run.stores.next_port, run.smp.port

    def await_next_smp(self) -> None:
        """Called when the SMP has closed its connection; its process ends a little later."""
        child = self._run.smp.child
        if child is not None and child.status is None:
            has_ended(child.pidfd, wait_s=UNREACHABLE_S)
        self.handle_exits()
        self._bring_up_smp(waits=True)

    def _bring_up_smp(self, *, waits: bool = False) -> bool:
        run = self._run
        if not self.smp_is_starting:
            return False
        if not waits and not run.smp.folder.smp_socket.exists():
            return False
        crash_point("agent.smp.listening")
        try:
            run.smp.ready()
            run.node.introduce(run.smp)
        except PeerError as error:
            run.journal.write(records.SmpUnavailable(str(error)))
            return False
        self.smp_is_starting = False
        self._unreachable_since_s = None
        run.journal.write(records.SmpReady(len(run.smp.memory.arenas)))
        return True

    def _reap(self, now_s: float) -> None:
        """Ranks may leave processes behind all the time, which become children of this agent."""
        if now_s > self._reap_due_s:
            self._reap_due_s = now_s + REAP_EVERY_S
            workers = self._run.workers
            ranks = [*workers.handles, *workers.starter.parked.values()]
            known = [handle.child for handle in ranks]
            zygote = self._zygote.children if self._zygote is not None else []
            rehearsed = self._run.rehearsals.children
            reap_strangers([*known, *zygote, *rehearsed, *self._run.smp.children])

    def _refill(self, now_s: float) -> None:
        if self._zygote is None:
            return
        if self._zygote.collect():
            self._refill_due_s = self._refill_due_s or now_s + REFILL_AFTER_S
        if self._refill_due_s is not None and now_s > self._refill_due_s:
            self._refill_due_s = None
            try:
                self._run.stores.prepare()
            except (OSError, RuntimeError) as error:
                # For example too many open files. The next generation can create its store then.
                _log.debug("no store was prepared: %s", error)
                self._refill_due_s = now_s + REFILL_AFTER_S
                return
            self._zygote.refill()

    def _prepare_standbys(self) -> None:
        """Once all ranks have made a step, because this would slow their start."""
        pages = self._run.workers.pages
        if self._zygote is None or not pages:
            return
        if not all(page.get(HeartbeatField.FIRST_STEP_NS) for page in pages):
            return
        compiles = any(page.get(HeartbeatField.COMPILES) for page in pages)
        if compiles and self._restarts_from_zygote():
            self._zygote.import_compiler()
        if self._run.spec.profile.start.device != "off":
            self._zygote.bind(len(pages))

    def _restarts_from_zygote(self) -> bool:
        """Whether the run can restart, and forks its ranks then."""
        spec, workers = self._run.spec, self._run.workers
        budget = spec.profile.restart.budget if spec.max_restarts is None else spec.max_restarts
        can_restart = budget > 0 or spec.nodes is not None
        is_forked = any(one.start != "fresh" for one in workers.handles)
        return can_restart and is_forked and workers.starter.zygote is not None

    def _report_no_progress(self, now_s: float, limit_s: float) -> None:
        if self._run.generations.is_over:
            return  # its ranks are dead or parked
        for slot in self._run.workers.slots:
            heartbeat_ns = slot.page.get(HeartbeatField.HEARTBEAT_NS)
            if not heartbeat_ns:
                continue  # no step yet: importing, compiling, loading data
            unresponsive_s = now_s - heartbeat_ns / 1e9
            if unresponsive_s <= limit_s:
                self._stalled_ranks.discard(slot.rank)
            elif slot.rank not in self._stalled_ranks:
                self._stalled_ranks.add(slot.rank)
                text = (
                    f"rank {slot.rank} without progress for {unresponsive_s:.0f} s (reported after "
                    f"{limit_s:.0f} s, phase {slot.page.phase or 'train'})"
                )
                self._run.journal.write(RankWithoutProgress(text, slot.rank))

    def _report_slow_captures(self) -> None:
        for slot in self._run.workers.slots:
            reason = slot.page.slow_capture
            if reason and slot.rank not in self._slow_ranks:
                self._slow_ranks.add(slot.rank)
                self._run.journal.write(records.CaptureSlowed(reason, slot.rank))

    # --- exits of zygote and SMP ------------------------------------------------------------------

    @property
    def descriptors(self) -> list[int]:
        """Readable when zygote or SMP has ended, or when the SMP has sent a message."""
        run = self._run
        children = (run.smp.child, self._zygote_child())
        found = [one.pidfd for one in children if one is not None and one.status is None]
        return found if run.smp.channel is None else [*found, run.smp.channel.fileno()]

    def handle_exits(self) -> None:
        for event in self._exits():
            self._run.journal.write(event)
            self._execute(self._restarts.handle(event, now_s=clock.now_s()))

    def _execute(self, command: commands.PartCommand) -> None:
        run = self._run
        run.journal.write(command)
        starter = run.workers.starter
        match command:
            case commands.RespawnSmp():
                run.smp.start()
                self.smp_is_starting = True
            case commands.RespawnZygote():
                if starter.zygote is not None:
                    starter.zygote.start()
            case commands.DisableComponent(part="zygote"):
                starter.zygote = None
            case commands.DisableComponent():
                self.smp_given_up = command.reason
                run.smp.files.give_up(f"no process is left to write it: {command.reason}")
                _log.warning("no more snapshots: %s", command.reason)

    def _exits(self) -> list[events.PartEvent]:
        smp, found = self._run.smp, list[events.PartEvent]()
        zygote = self._zygote_child()
        if zygote is not None and zygote.status is None and zygote.reap():
            found.append(events.ZygoteExited(f"the zygote {exit_text(zygote.ended_with)}"))
        try:
            smp.collect()
        except PeerError:
            smp.lost()
        child = smp.child
        if child is not None and child.status is None and child.reap():
            smp.lost()
            found.append(events.SmpExited(f"the SMP {exit_text(child.ended_with)}"))
        elif not self._reconnect(clock.now_s()) and child is None:
            # The exit status of an adopted SMP is unknown here.
            found.append(events.SmpExited("the SMP has closed its connection"))
        return found

    def _reconnect(self, now_s: float) -> bool:
        """Connect again to an SMP that lives and has closed its connection; False if none answers.

        For example the agent was stopped and read nothing, or was importing torch.
        """
        run = self._run
        smp = run.smp
        has_ended = self.smp_is_starting or bool(self.smp_given_up)
        has_ended |= smp.child is not None and smp.child.status is not None
        if smp.channel is not None or has_ended or now_s < self._reconnect_due_s:
            return True
        self._reconnect_due_s = now_s + RECONNECT_EVERY_S
        if smp.reconnect():
            try:
                run.node.introduce(run.smp)
                self._unreachable_since_s = None
                run.journal.write(records.SmpReady(len(smp.memory.arenas)))
                run.generations.configure_new_smp()
                return True
            except PeerError as error:
                run.journal.write(records.SmpUnreachable(str(error)))
                smp.lost()
        self._unreachable_since_s = self._unreachable_since_s or now_s
        if smp.child is not None and now_s - self._unreachable_since_s > UNREACHABLE_S:
            smp.child.signal(SIGKILL)
        return False

    def _zygote_child(self) -> ChildProcess | None:
        zygote = self._run.workers.starter.zygote
        return zygote.child if zygote is not None else None
