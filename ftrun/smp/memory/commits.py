"""Which version is committed, and where that is shown.

Runs in:  the SMP, in the server's thread.
Takes in: seals, skips and withdrawals of workers; with a group, the lead's decisions by the agent.
Gives:    the command page; VersionCommitted and AbandonVersion to the agent; versions to protect.

Without a group this SMP sees every rank and decides alone: what all have sealed is committed. With
one it has the group protect that, says VersionReady, and the lead decides.

Rule 1: on the command page the step is written before the generation, and the counter last. A
        reader may meet the new step beside the old generation, which names a version older than
        the one it waits for; it never meets one that is newer than what is committed, because
        BeginGeneration puts the restore point there before any worker runs, and steps only grow
        from it within a generation. So readers may read the two words in either order and need
        only ask whether (generation, step) has reached the version they wait for.
Rule 2: after a restore COMMITTED_IN is written last of all, when the restored version is committed
        in this generation. Nothing new is captured before.
Rule 3: a step that a rank here has skipped is abandoned as soon as nothing older is pending here:
        whoever has taken it has seen a commit that this node has not seen yet. With a group the
        lead orders that, on this node too, so that all nodes hear of it at about the same time
        and take the same step next (`ftrun/worker/capture/settling.py`).
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ftrun.ids import Generation, Rank, Version, version
from ftrun.smp.memory.arenas import ArenaStore
from ftrun.smp.redundancy.group import LocalGroup
from ftrun.smp.redundancy.protector import Protector
from ftrun.snapshot.commit_tracker import CommitTracker
from ftrun.wire.crash_points import crash_point
from ftrun.wire.messages import envelope as messages
from ftrun.wire.messages import smp as smp_messages
from ftrun.wire.shared_memory.pages import CommandField, SharedPage

TellAgent = Callable[..., None]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GenerationStart:
    """What the ranks of a generation start from.

    Args:
        group: protects this node; None: this SMP decides alone.
        version: None where they start from the beginning.
        is_resized: another number of ranks took it: it is read where it lies, and what protected
            it then protects it until something newer is committed.
        is_new: group or places are not what they were.
    """

    group: LocalGroup | None = None
    version: Version | None = None
    is_resized: bool = False
    is_new: bool = True


class CommitCoordinator:
    """Seals in, commits out."""

    def __init__(self, memory: ArenaStore, tell_agent: TellAgent) -> None:
        self.tracker = CommitTracker()
        self._memory = memory
        self._tell_agent = tell_agent
        self._page: SharedPage | None = None
        self._group: LocalGroup | None = None
        self._protector: Protector | None = None
        self._start_from: Version | None = None
        self._skipped: set[int] = set()
        """Steps, those that are settled left out."""
        self._told_skipped = -1
        self._abandoned = -1
        self._after_commit: Callable[[], None] = lambda: None

    @property
    def has_begun(self) -> bool:
        return self.tracker.generation >= 0

    def world(self) -> CommitTracker:
        """Who takes part; before a generation has begun: the ranks of the memory handed over."""
        if self.has_begun:
            return self.tracker
        sizes = [arena.shape.world_size for arena in self._memory.all()]
        return CommitTracker(self._memory.ranks, max(sizes, default=0))

    def protect_with(self, protector: Protector) -> None:
        """Have this one protect what is complete, where there is a group."""
        self._protector = protector

    def after_commit(self, told: Callable[[], None]) -> None:
        """Call this after each commit, when what it has replaced is freed."""
        self._after_commit = told

    # --- a generation ------------------------------------------------------------------------

    def begin(
        self,
        page: SharedPage,
        generation: Generation,
        ranks: Sequence[Rank],
        world_size: int,
        start: GenerationStart,
    ) -> None:
        """Count for these ranks from now on.

        Args:
            page: where commits are shown.
            generation: seals of others do not count.
            ranks: the local ones.
            world_size: how many there are in all.
            start: what they start from, and who protects this node.
        """
        if generation > self.tracker.generation:
            self._skipped.clear()
            self._told_skipped = -1
            self._abandoned = page.get(CommandField.ABANDONED_STEP)  # by the SMP before this one
        self._page, self._group = page, start.group
        if start.group is not None and page.get(CommandField.TAKE_FROM) < 0:
            page.set(CommandField.TAKE_FROM, 0)
        if start.is_new:
            self._start_from = None if start.is_resized else start.version
        if start.is_resized and page.get(CommandField.COMMITTED_IN) < generation:
            page.set(CommandField.COMMITTED_IN, generation)
        self.begin_again(generation, ranks, world_size)

    def begin_again(self, generation: Generation, ranks: Sequence[Rank], world_size: int) -> None:
        """The slots are not what they were: count them anew."""
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
            settled = version(generation, self._abandoned)
            tracker.abandon(max(tracker.committed or settled, settled))
            self.protect_complete()

    def protect_complete(self) -> None:
        """Have the group protect what every rank here holds, if it has not done so yet.

        First of all what they start from; in the middle of a generation, where an SMP of the group
        was started anew, what is committed.
        """
        tracker = self.tracker
        if self._group is None or self._protector is None or not tracker.ranks:
            return
        wanted = tracker.complete
        if wanted is None or self._awaits_recommit:
            wanted = self._start_from
            held = self._memory.held(tracker.world_size)
            if wanted is None or any(wanted not in held.get(rank, ()) for rank in tracker.ranks):
                return
        if wanted.generation == tracker.generation and self._page is not None:
            self._page.set(CommandField.PROTECTING_STEP, wanted.step)
        fds = {rank: [one.fd for one in self._memory.of(rank)] for rank in tracker.ranks}
        self._protector.protect(wanted, fds)

    def forget_page(self) -> None:
        """Nothing is shown any more."""
        self._page = None

    # --- workers -----------------------------------------------------------------------------

    def sealed(self, rank: Rank, sealed: Version) -> None:
        """A rank has sealed a version."""
        crash_point("smp.commit.seal_heard")
        if self._group is not None and sealed.step <= self._abandoned:
            return  # a rank elsewhere has none of it
        before = self.tracker.complete
        committed = self.tracker.sealed(rank, sealed)
        if committed is not None:
            self._finish(committed)
        elif self.tracker.complete not in (None, before):
            self.protect_complete()

    def hear_again(self, rank: Rank) -> None:
        """A worker (re)connects: take the seals that the last SMP may have died with."""
        held = self._memory.held(self.tracker.world_size).get(rank, set())
        for sealed in sorted(held):
            self.sealed(rank, sealed)

    def withdraw(self, rank: Rank, sealed: Version) -> messages.AnyMessage:
        """Void a seal while its worker waits, so that no later SMP finds and commits it.

        The others are told: whoever waits for this version to be committed need not any more.
        """
        if self._protector is not None and self._protector.is_ready(sealed):
            return messages.Refused(f"{sealed} is protected, and about to be committed")
        if not self.tracker.withdraw(rank, sealed):
            return messages.Refused(f"{sealed} is committed already")
        self._memory.void(rank, sealed)
        if sealed.generation == self.tracker.generation:
            self._abandon_here(sealed.step)
        crash_point("smp.commit.withdrawn")
        return messages.Done()

    def skipped(self, sealed: Version) -> None:
        """A rank has none of this step, and the others may be waiting for it."""
        if sealed.generation == self.tracker.generation:
            self._skipped.add(sealed.step)
            self._tell_skipped()

    def corrupt(self, found: Version, why: str) -> bool:
        """A slot of this version is not what was sealed; whether the version is abandoned."""
        _log.warning("%s", why)
        self._tell_agent(smp_messages.SmpNotice("source_set_aside", why))
        if found.generation != self.tracker.generation:
            return False
        for rank in self.tracker.ranks:
            self._memory.void(rank, found)
        self._abandon_here(found.step)
        return True

    # --- the lead, by the agent --------------------------------------------------------------

    def commit(self, wanted: Version) -> None:
        """Every node of the run is ready for this version."""
        committed = self.tracker.committed
        is_known = committed is not None and wanted <= committed
        if self._page is None:
            return
        if is_known and not self._awaits_recommit:
            if self._protector is not None and wanted == committed:
                self._protector.committed(wanted)  # protected once more
            return
        self.tracker.commit(wanted)
        self._finish(wanted)

    def abandon(self, generation: int, step: int) -> None:
        """A rank elsewhere has none of this step."""
        if generation == self.tracker.generation:
            self._abandon(step)

    # --- details -----------------------------------------------------------------------------

    @property
    def _awaits_recommit(self) -> bool:
        """The restored version is not committed in this generation yet."""
        if self._group is None or self._start_from is None or self._page is None:
            return False
        return self._page.get(CommandField.COMMITTED_IN) < self.tracker.generation

    def _finish(self, committed: Version) -> None:
        self._show(committed)
        if self._page is not None:
            self._page.set(CommandField.COMMITTED_IN, self.tracker.generation)
        if self._protector is not None:
            self._protector.committed(committed)
        self._memory.free_replaced(
            committed, ranks=self.tracker.ranks, generation=self.tracker.generation
        )
        self._after_commit()
        crash_point("smp.commit.replaced_freed")
        self._tell_agent(smp_messages.VersionCommitted(committed.generation, committed.step))
        self._tell_skipped()

    def _show(self, committed: Version | None) -> None:
        if self._page is None:
            return
        generation, step = (committed.generation, committed.step) if committed else (-1, -1)
        crash_point("smp.commit.decided")
        self._page.set(CommandField.COMMITTED_STEP, step)
        crash_point("smp.commit.step_shown")
        self._page.set(CommandField.COMMITTED_GENERATION, generation)
        if committed is not None:
            self._page.add(CommandField.COMMIT_COUNT, 1)
        crash_point("smp.commit.shown")

    def _shown(self) -> Version | None:
        """What the command page says: it outlives the SMP that has written it."""
        if self._page is None or self._page.get(CommandField.COMMITTED_STEP) < 0:
            return None
        return version(
            self._page.get(CommandField.COMMITTED_GENERATION),
            self._page.get(CommandField.COMMITTED_STEP),
        )

    def _abandon_here(self, step: int) -> None:
        """A rank of this node has none of it: nobody can commit it."""
        self._abandon(step)
        if self._group is not None:
            self._tell_agent(smp_messages.AbandonVersion(self.tracker.generation, step))

    def _abandon(self, step: int) -> None:
        self._abandoned = max(self._abandoned, step)
        newest = version(self.tracker.generation, step)
        if self._group is not None:
            self.tracker.abandon(newest)
        if self._protector is not None:
            self._protector.abandon(newest)
        if self._page is not None:
            self._page.set(
                CommandField.ABANDONED_STEP, max(self._page.get(CommandField.ABANDONED_STEP), step)
            )
        crash_point("smp.commit.abandoned")
        self._tell_skipped()

    def _tell_skipped(self) -> None:
        """Have the newest step abandoned that a rank here has skipped: rule 3."""
        if self._awaits_recommit:
            return
        tracker = self.tracker
        committed = tracker.committed
        is_ours = committed is not None and committed.generation == tracker.generation
        settled = max(self._abandoned, committed.step if committed and is_ours else -1)
        self._skipped = {step for step in self._skipped if step > settled}
        pending = [one.step for one in map(tracker.pending, tracker.ranks) if one is not None]
        newest = max((step for step in self._skipped if step <= min(pending, default=step)),
                     default=-1)  # fmt: skip
        if self._group is None and newest >= 0:
            self._abandon_here(newest)
        elif newest > self._told_skipped:
            self._told_skipped = newest
            self._tell_agent(smp_messages.AbandonVersion(tracker.generation, newest))
