"""Determines the committed version and publishes it.

Runs in:  the SMP, in the server's thread.
Takes in: seals, skips and withdrawals of workers; with a group, the leader's decisions through the
          agent.
Gives:    the command page; VersionCommitted and AbandonVersion to the agent; versions to protect.

Without a group this SMP receives the reports of every rank and decides alone: a version that all
ranks have sealed is committed. With a group, the group protects that version, this SMP sends
VersionReady, and the leader decides.

Rule 1: on the command page the counter is written first, and the step before the generation; see
        `_show`.
Rule 2: after a restore COMMITTED_IN is written last, when the restored version is committed in this
        generation. No new snapshot is captured before that.
Rule 3: a step that a rank here has skipped is abandoned as soon as no older step is pending here.
        While an older step is pending, a rank that took the skipped step has seen a commit that
        this node has not received yet. With a group the leader orders the abandonment, on this node
        too. All nodes then receive it at about the same time and take the same step next
        (`ftrun/worker/capture/boundaries.py`).
"""

import logging
from collections.abc import Callable, Sequence

from ftrun.ids import Generation, Rank, Version, version
from ftrun.smp.memory.arenas import ArenaStore
from ftrun.smp.memory.replicas import differing_notice
from ftrun.smp.redundancy.group import LocalGroup
from ftrun.smp.redundancy.protector import Protector
from ftrun.snapshot.commit_tracker import CommitTracker
from ftrun.snapshot.replica_shares import ReplicaCheck, SealChecks
from ftrun.wire.crash_points import crash_point
from ftrun.wire.messages import envelope as messages
from ftrun.wire.messages import smp as smp_messages
from ftrun.wire.shared_memory.pages import CommandField, SharedPage

SendToAgent = Callable[..., None]
_NUM_RECENT = 64
_log = logging.getLogger(__name__)


class CommitCoordinator:
    """Counts seals and commits versions."""

    def __init__(self, memory: ArenaStore, send_to_agent: SendToAgent) -> None:
        self.tracker = CommitTracker()
        self._memory = memory
        self._send_to_agent = send_to_agent
        self._page: SharedPage | None = None
        self._group: LocalGroup | None = None
        self.protector: Protector | None = None
        self._start_from: Version | None = None
        self._checks = SealChecks()
        self._num_unproven = 0
        """Versions in a row whose replicas were not proven to be equal."""
        self._skipped: set[int] = set()
        """Skipped steps, without those that were committed or abandoned."""
        self._reported_skipped = -1
        self._abandoned = -1
        self._recent: tuple[Version, ...] = ()
        """The newest committed versions."""
        self.after_commit: Callable[[], None] = lambda: None

    @property
    def has_started(self) -> bool:
        return self.tracker.generation >= 0

    def world(self) -> CommitTracker:
        """The ranks that take part; before the first generation: those of the adopted memory."""
        if self.has_started:
            return self.tracker
        sizes = [arena.shape.world_size for arena in self._memory.all()]
        return CommitTracker(self._memory.ranks, max(sizes, default=0))

    def is_committed(self, found: Version) -> bool | None:
        """Whether a version of the running generation was committed; None: it may still be.

        Callable from any thread. The newest commit is read first: when a later one is visible,
        `_recent` has the earlier ones.
        """
        committed, abandoned = self.tracker.committed, self._abandoned
        if found in self._recent:
            return True
        is_over = self.tracker.generation != found.generation or abandoned >= found.step
        return False if is_over or (committed is not None and committed > found) else None

    # --- a generation ------------------------------------------------------------------------

    def begin(
        self,
        page: SharedPage,
        body: smp_messages.BeginGeneration,
        group: LocalGroup | None = None,
        *,
        is_new: bool = True,
    ) -> None:
        """Begin a generation: count the seals of these local ranks; publish commits on the page.

        A version of another world size is read from the old arenas. Its protection stays in use
        until a newer version is committed.

        Args:
            page: the command page.
            body: the ranks, and the version that they start from.
            group: protects this node; None: this SMP decides alone.
            is_new: the group or its positions differ from the previous ones.
        """
        generation = Generation(body.generation)
        is_resized = body.restored_world_size not in (0, body.world_size)
        if generation > self.tracker.generation:
            self._skipped.clear()
            self._num_unproven = 0
            self._reported_skipped = -1
            self._abandoned = page.get(CommandField.ABANDONED_STEP)  # written by the previous SMP
        self._page, self._group = page, group
        if group is not None and page.get(CommandField.TAKE_FROM) < 0:
            page.set(CommandField.TAKE_FROM, 0)
        if is_new:
            self._start_from = None
            if body.restored is not None and not is_resized:
                self._start_from = version(*body.restored)
        if is_resized and page.get(CommandField.COMMITTED_IN) < generation:
            page.set(CommandField.COMMITTED_IN, generation)
        self.restart(generation, [Rank(rank) for rank in body.local_ranks], body.world_size)

    def restart(self, generation: Generation, ranks: Sequence[Rank], world_size: int) -> None:
        held = self._memory.held(world_size)
        tracker = self.tracker
        alone = self._group is None
        committed = tracker.begin_generation(
            generation, ranks, world_size, held, decides_alone=alone
        )
        if alone:
            self._show(committed)
            if self._page is not None:
                self._page.set(CommandField.COMMITTED_IN, generation)
        else:
            tracker.committed = self._shown()
            resolved = version(generation, self._abandoned)
            tracker.abandon(max(tracker.committed or resolved, resolved))
            self.protect_complete()

    def protect_complete(self) -> None:
        """Have the group protect the version that every rank here holds, unless it has done so.

        The restored version is protected first. If an SMP of the group was restarted in the middle
        of a generation, that is the committed version.
        """
        tracker = self.tracker
        if self._group is None or self.protector is None or not tracker.ranks:
            return
        wanted = tracker.complete
        if wanted is None or self._awaits_recommit:
            wanted = self._start_from
            held = self._memory.held(tracker.world_size)
            if wanted is None or any(wanted not in held.get(rank, ()) for rank in tracker.ranks):
                return
        if wanted.generation == tracker.generation and self._page is not None:
            self._page.set(CommandField.PROTECTING_STEP, wanted.step)
        self.protector.protect(wanted, self._memory.fds(tracker.ranks))

    def show_pooled(self, is_pooled: bool) -> None:
        """Show the ranks whether they capture through pools."""
        if self._page is not None:
            self._page.set(CommandField.POOLED, int(is_pooled))

    def forget_page(self) -> None:
        self._page = None

    # --- workers -----------------------------------------------------------------------------

    def sealed(self, rank: Rank, sealed: Version, check: ReplicaCheck | None = None) -> None:
        crash_point("smp.commit.seal_received")
        if self._group is not None and sealed.step <= self._abandoned:
            return  # a rank on another node has no shard of this step
        self._checks.add(rank, sealed, check)
        before = self.tracker.complete
        others = (one for one in self.tracker.ranks if one != rank)
        # A version that a new SMP found in memory is complete already, and may be protected.
        is_last = before != sealed and all(self.tracker.pending(one) == sealed for one in others)
        if is_last and not self._are_replicas_equal(sealed):
            return
        committed = self.tracker.sealed(rank, sealed)
        if committed is not None:
            self._finish(committed)
        elif self.tracker.complete not in (None, before):
            self.protect_complete()

    def resend_sealed(self, rank: Rank) -> None:
        """Count the seals of a worker that (re)connects; the previous SMP may have missed them."""
        held = self._memory.held(self.tracker.world_size).get(rank, set())
        for sealed in sorted(held):
            self.sealed(rank, sealed)

    def withdraw(self, rank: Rank, sealed: Version) -> messages.AnyMessage:
        """Void a seal for good while its worker waits, and abandon the step for other ranks."""
        if self.protector is not None and self.protector.is_ready(sealed):
            return messages.Refused(f"{sealed} is protected, and about to be committed")
        if not self.tracker.withdraw(rank, sealed):
            return messages.Refused(f"{sealed} is committed already")
        self._memory.void(rank, sealed)
        if sealed.generation == self.tracker.generation:
            self._abandon_here(sealed.step)
        crash_point("smp.commit.withdrawn")
        return messages.Done()

    def skipped(self, sealed: Version) -> None:
        if sealed.generation == self.tracker.generation:
            self._skipped.add(sealed.step)
            self._report_skipped()

    def corrupt(self, found: Version, reason: str) -> bool:
        """Void a version with a damaged slot; return whether the version is abandoned."""
        _log.warning("%s", reason)
        self._send_to_agent(smp_messages.SmpNotice("source_set_aside", reason))
        if found.generation != self.tracker.generation:
            return False
        self._void(found)
        self._abandon_here(found.step)
        return True

    def _are_replicas_equal(self, found: Version) -> bool:
        """Discard a version if shared replicas differ, or are not proven to be equal.

        If they differ, or are not proven in two versions in a row, ranks store whole tensors from
        then on. One unproven version follows the start of a new SMP, which has no checks of seals
        that it found in memory.
        """
        differ = self._checks.differing(found)
        if not differ and self._checks.is_proven(found):
            self._num_unproven = 0
            return True
        self._num_unproven += 1
        if differ:
            notice = differing_notice(found, differ)
            _log.warning("%s", notice.reason)
            self._send_to_agent(notice)
        else:
            _log.warning("%s is discarded: ranks have stated no check of its replicas", found)
        self._void(found)
        # An SMP that is killed here has not ended the sharing. The check of the next version has
        # the same phase, because nothing was committed, so the next SMP finds the difference again.
        crash_point("smp.commit.replicas_differed")
        if self._page is not None and (differ or self._num_unproven > 1):
            self._page.set(CommandField.REPLICA_SHARES, -1)
        self._abandon_here(found.step)  # last: ranks that see it take the next snapshot
        return False

    def _void(self, found: Version) -> None:
        """Void a version that all local ranks have sealed; the caller abandons it."""
        for rank in self.tracker.ranks:
            self._memory.void(rank, found)

    # --- the leader, through the agent -------------------------------------------------------

    def commit(self, wanted: Version) -> None:
        committed = self.tracker.committed
        is_known = committed is not None and wanted <= committed
        if self._page is None:
            return
        if is_known and not self._awaits_recommit:
            if self.protector is not None and wanted == committed:
                self.protector.committed(wanted)  # its protection was repeated
            return
        self.tracker.commit(wanted)
        self._finish(wanted)

    def abandon(self, generation: int, step: int) -> None:
        if generation == self.tracker.generation:
            self._abandon(step)

    # --- details -----------------------------------------------------------------------------

    @property
    def _awaits_recommit(self) -> bool:
        if self._group is None or self._start_from is None or self._page is None:
            return False
        return self._page.get(CommandField.COMMITTED_IN) < self.tracker.generation

    def _finish(self, committed: Version) -> None:
        self._recent = (*self._recent[1 - _NUM_RECENT :], committed)
        if self.protector is not None:
            self.protector.decide_shares(committed)  # before ranks know the commit
        self._show(committed)
        if self._page is not None:  # Rule 2: last
            self._page.set(CommandField.COMMITTED_IN, self.tracker.generation)
        if self.protector is not None:
            self.protector.committed(committed)
        self._memory.free_replaced(
            committed, ranks=self.tracker.ranks, generation=self.tracker.generation
        )
        self.after_commit()
        crash_point("smp.commit.replaced_freed")
        self._send_to_agent(smp_messages.VersionCommitted(committed.generation, committed.step))
        self._report_skipped()

    def _show(self, committed: Version | None) -> None:
        if self._page is None:
            return
        generation, step = (committed.generation, committed.step) if committed else (-1, -1)
        crash_point("smp.commit.decided")
        # Ranks choose the part of a check by this counter. It precedes the version, because ranks
        # continue as soon as they see that. A new SMP does not count a version again.
        if committed is not None and committed != self._shown():
            self._page.add(CommandField.COMMIT_COUNT, 1)
        # Rule 1: a reader may see the new step with the old generation. That pair names a version
        # older than the one it waits for. It never names a version newer than the committed one:
        # BeginGeneration writes the restore point before any worker runs, and steps only grow from
        # it within a generation. Readers may therefore read the two words in either order. They
        # only check whether (generation, step) has reached the version they wait for.
        self._page.set(CommandField.COMMITTED_STEP, step)
        crash_point("smp.commit.step_shown")
        self._page.set(CommandField.COMMITTED_GENERATION, generation)
        crash_point("smp.commit.shown")

    def _shown(self) -> Version | None:
        """The committed version on the command page, which outlives the SMP that wrote it."""
        if self._page is None or self._page.get(CommandField.COMMITTED_STEP) < 0:
            return None
        return version(
            self._page.get(CommandField.COMMITTED_GENERATION),
            self._page.get(CommandField.COMMITTED_STEP),
        )

    def _abandon_here(self, step: int) -> None:
        self._abandon(step)
        if self._group is not None:
            self._send_to_agent(smp_messages.AbandonVersion(self.tracker.generation, step))

    def _abandon(self, step: int) -> None:
        self._abandoned = max(self._abandoned, step)
        newest = version(self.tracker.generation, step)
        if self._group is not None:
            self.tracker.abandon(newest)
        if self.protector is not None:
            self.protector.abandon(newest)
        if self._page is not None:
            self._page.set(
                CommandField.ABANDONED_STEP, max(self._page.get(CommandField.ABANDONED_STEP), step)
            )
        crash_point("smp.commit.abandoned")
        self._report_skipped()

    def _report_skipped(self) -> None:
        """Abandon the newest step that a rank here has skipped, or report it (rule 3)."""
        if self._awaits_recommit:
            return
        tracker = self.tracker
        committed = tracker.committed
        is_ours = committed is not None and committed.generation == tracker.generation
        resolved = max(self._abandoned, committed.step if committed and is_ours else -1)
        self._skipped = {step for step in self._skipped if step > resolved}
        # A seal of a resolved step stays until the next one; ranks with pools have none.
        found = [one.step for one in map(tracker.pending, tracker.ranks) if one is not None]
        pending = [step for step in found if step > resolved]
        newest = max((step for step in self._skipped if step <= min(pending, default=step)),
                     default=-1)  # fmt: skip
        if self._group is None and newest >= 0:
            self._abandon_here(newest)
        elif newest > self._reported_skipped:
            self._reported_skipped = newest
            self._send_to_agent(smp_messages.AbandonVersion(tracker.generation, newest))
