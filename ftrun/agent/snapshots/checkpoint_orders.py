"""Orders of checkpoints to the SMP of this node, and what became of them.

Runs in the main thread. On several nodes the leader decides when a checkpoint is due
(`ftrun.recovery.snapshot_coordination`), on one node this module does.
"""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ftrun import clock
from ftrun.agent.snapshots.smp_client import SHARE_WAIT_S
from ftrun.errors import PeerError
from ftrun.ids import Version, version
from ftrun.records import snapshots as records
from ftrun.recovery.snapshot_coordination import MAX_WRITES
from ftrun.wire.cluster.generation import VersionPair
from ftrun.wire.messages.checkpoint import WriteCheckpoint
from ftrun.wire.shared_memory.pages import CommandField, HeartbeatField, most

if TYPE_CHECKING:
    from ftrun.agent.launcher import Run

_ANY_WAIT_S = 1e9

_log = logging.getLogger(__name__)


class CheckpointOrders:
    """The checkpoints of one run."""

    def __init__(self, run: "Run") -> None:
        self.not_written = ""
        """Why the last checkpoint was not written; empty if it was."""
        self.last_commit: Version | None = None
        """On several nodes: the newest version that the leader has reported as committed."""
        self.newest_order: Version | None = None
        """The newest version that was to be written by its name; on several nodes by the leader."""
        self.num_skipped = 0
        """Due versions that were not written, because the storage is slower than they are due."""
        self._is_unordered = False
        """The newest due version is committed, and not ordered to be written."""
        self._run = run
        self._due_s = clock.now_s() + run.spec.profile.checkpoint.every_s
        self._persist_step = 0
        """Newest step for which a checkpoint was begun because a rank waits for it."""

    def generation_started(self) -> None:
        self._persist_step = 0

    def poll(self, now_s: float) -> None:
        """Begin the checkpoints that are due on one node, and report those that have ended."""
        run = self._run
        new, run.smp.new_commits = run.smp.new_commits, []
        if run.spec.checkpoint_directory is not None and run.spec.nodes is None:
            self._begin_due(new, now_s)
            if run.workers.commands is not None:
                run.workers.commands.show_levels(None, run.smp.persisted)
        self.report()
        self._show_reasons()

    def _begin_due(self, new: Sequence[Version], now_s: float) -> None:
        run, settings = self._run, self._run.spec.profile.checkpoint
        commands = run.workers.commands
        if commands is not None and commands.get(CommandField.POOLED):
            if run.smp.needed.pool_bytes:
                self._request_pooled(now_s)
            return
        for found in filter(self._is_due_at, new):
            self.newest_order = found
            self._begin(self._write_order(found))
        # The page, because a new SMP reports no commit of what it finds in memory.
        committed = run.workers.committed()
        if committed is not None and self._is_awaited(committed):
            self._due_s = now_s + settings.every_s
            self.write_part(version(*committed), is_urgent=True)
        elif now_s > self._due_s and not settings.every_steps:
            if run.workers.progress().attached and settings.live_capture_timeout_s:
                self._due_s = now_s + settings.every_s
                self.write_capture(-1)
            elif run.smp.committed or committed is not None:
                self._due_s = now_s + settings.every_s
                self._begin(self._write_order())

    def _request_pooled(self, now_s: float) -> None:
        """Request the next capture into the pools, unless one is awaited or being written.

        It is awaited as long as the generation lasts: ranks that begin it wait for a reader.
        """
        run, every_steps = self._run, self._run.spec.persist_every
        if run.smp.num_writes or (not every_steps and now_s <= self._due_s):
            return
        self._due_s = now_s + run.spec.profile.checkpoint.every_s
        step = most(run.workers.pages, HeartbeatField.STEP)
        next_step = (step // every_steps + 1) * every_steps if every_steps else step + 1
        self._capture(next_step, _ANY_WAIT_S)

    def write_part(self, wanted: Version, *, is_urgent: bool = False) -> None:
        """Write this node's part of a version that all nodes write now."""
        self.newest_order = wanted
        self._is_unordered = False
        self._begin(self._write_order(wanted, is_urgent=is_urgent))

    def write_newest(self) -> None:
        """On one node: write the last checkpoint of the run, and exclude other writers."""
        self._run.smp.begin_checkpoint(self._write_order(is_urgent=True))

    def write_capture(self, from_step: int) -> None:
        """Request a snapshot from this step on, and write it while it is captured.

        -1: from the first step that no rank here has passed.
        """
        run = self._run
        if from_step < 0 or run.generations.is_alone:  # the leader does not know the step in time
            from_step = most(run.workers.pages, HeartbeatField.STEP) + 1
        wait_s = run.spec.profile.checkpoint.live_capture_timeout_s
        wait_s += 2 * run.rank_observer.p99_s
        self._capture(from_step, wait_s)

    def _capture(self, from_step: int, wait_s: float) -> None:
        run = self._run
        if run.workers.commands is not None:
            run.workers.commands.set(CommandField.CAPTURE_FROM, from_step)
        self._begin(self._write_order(capture_from=from_step, wait_s=wait_s))

    def committed(self, found: Version) -> None:
        """On several nodes: a version is committed; the leader may order it to be written."""
        self.last_commit = found
        if self._run.spec.nodes is not None and self._is_due_at(found):
            self.num_skipped += self._is_unordered
            self._is_unordered = True

    def _is_due_at(self, found: Version) -> bool:
        every = self._run.spec.persist_every
        return every > 0 and found.step % every == 0

    def _begin(self, order: WriteCheckpoint) -> None:
        run = self._run
        if not order.directory or not run.generations.holds_ranks:
            return
        try:
            self.num_skipped += not run.smp.begin_checkpoint(order)
        except PeerError as error:
            run.journal.write(records.CheckpointFailedRecord(str(error)))

    def _write_order(
        self,
        wanted: Version | None = None,
        *,
        capture_from: int = -1,
        wait_s: float = 0.0,
        is_urgent: bool = False,
    ) -> WriteCheckpoint:
        """Without a version: the capture, if one is given, else the newest committed version."""
        run = self._run
        settings, generations = run.spec.profile.checkpoint, run.generations
        is_alone = is_urgent and wanted is None
        return WriteCheckpoint(
            run.spec.checkpoint_directory or "",
            settings.keep,
            (wanted.generation, wanted.step) if wanted is not None else None,
            "" if is_alone else generations.token,
            keep_s=settings.max_age_s,
            bytes_per_s=0.0 if is_urgent else settings.max_bytes_per_s,
            life=generations.life,
            live_capture_timeout_s=wait_s,
            capture_from=(generations.number, capture_from) if capture_from >= 0 else None,
            keep_bytes=settings.keep_bytes,
            share_timeout_s=0.0 if run.spec.nodes is None else SHARE_WAIT_S,
            writers=settings.writers,
        )

    def _is_awaited(self, committed: VersionPair) -> bool:
        """Whether a rank waits for a checkpoint; true once for each step, and for each SMP."""
        run = self._run
        step = most(run.workers.pages, HeartbeatField.PERSIST_STEP)
        if run.smp.channel is None:
            # It may have ended while it was writing.
            self._persist_step, self.newest_order = 0, None
            return False
        persisted = run.smp.persisted
        if persisted is not None and persisted >= (run.generations.number, step):
            return False
        if not self._persist_step < step <= committed[1]:
            return False
        if run.smp.num_writes >= MAX_WRITES:
            return False
        self._persist_step = committed[1]
        return self.newest_order != version(*committed)

    def _show_reasons(self) -> None:
        run = self._run
        page, not_protected = run.workers.commands, run.smp.unprotected_reason
        if page is None:
            return
        if page.not_protected != not_protected:
            page.not_protected = not_protected
        not_persisted = "" if run.smp.num_writes else self.not_written
        if page.not_persisted != not_persisted:
            page.not_persisted = not_persisted

    def report(self) -> None:
        run = self._run
        new, run.smp.new_checkpoints = run.smp.new_checkpoints, []
        superseded, run.smp.superseded = run.smp.superseded, []
        by_steps = bool(run.spec.persist_every)
        if by_steps:
            self.num_skipped += len(superseded)
        # With pools, no memory has the version, so the next one does not make up for it.
        is_needed = not by_steps or run.smp.needed.pool_bytes > 0
        if superseded and is_needed and not new and not run.smp.num_writes:
            run.smp.refused = superseded[-1]
        if run.smp.refused:
            run.journal.write(records.CheckpointFailedRecord(run.smp.refused))
            _log.warning("no checkpoint was written: %s", run.smp.refused)
            self.not_written, run.smp.refused = run.smp.refused, ""
        for written in new:
            self.not_written = ""
            run.journal.write(
                records.CheckpointWrittenRecord(
                    written.generation,
                    written.step,
                    written.path,
                    written.total_bytes,
                    written.seconds,
                    written.ahead_s,
                )
            )
