"""Ranks: a step completes when all ranks of one generation are in it.

The state of the world is one number. Each step computes the next number from it and from the
generation. Two timelines never have the same number.
"""

from typing import TYPE_CHECKING

import xxhash

from ftrun.events import ExitKind, WorkerExit
from ftrun.ids import Rank, Version, version
from ftrun.wire.cluster.generation import GenerationPlan
from ftrun.wire.shared_memory.pages import CommandField
from ftrun.worker.commit_wait import CommitWait
from simulation.memory import Arena

if TYPE_CHECKING:
    from simulation.node import Node
    from simulation.run import Simulation
    from simulation.snapshots import Smp
    from simulation.survivors import RankProcesses

_STUCK_S = 0.25
BEGINNING = 1


def next_state(state: int, generation: int, step: int) -> int:
    return xxhash.xxh3_64_intdigest(f"{state} {generation} {step}".encode())


class Ranks:
    """The workers of one node in one generation."""

    def __init__(
        self, node: "Node", plan: GenerationPlan, group: "Group", processes: "RankProcesses"
    ) -> None:
        self.node = node
        self.plan = plan
        self.group = group
        self.processes = processes
        self.are_alive = True
        self.are_suspended = False
        self.lease_s: float | None = None
        """Time until which they may step, on the clock of their node; None: no limit."""
        self.are_ready = False
        """They have their state, and wait for the others."""
        self.step = 0
        self.first_step = 0
        self.stop_after = -1
        self.state = 0
        self.has_finished = self.is_revoked = False
        member = plan.member(node.node_id)
        assert member is not None
        self.locals = tuple(member.ranks)
        assert node.page is not None
        self.page = node.page
        restored = node.restored_in.get(plan.generation)
        self.commit_wait = CommitWait(self.page, plan.generation, restored)
        self.passes = 0
        """Number of due snapshots that it skips without a report, because it received an interval
        late.
        """
        self.newest_seals: dict[Rank, int] = {}
        self.answered = self.last_step = self.newest_taken = -1
        """Requests of checkpoints, as `SnapshotSchedule` and `Capture` have them."""

    @property
    def sealed(self) -> tuple[int, int] | None:
        """As `WorkerGroup.sealed`."""
        steps = self.newest_seals.values()
        return (min(steps), max(steps)) if steps else None

    @property
    def has_stepped(self) -> bool:
        return self.are_ready and self.step > self.first_step

    @property
    def is_parked(self) -> bool:
        return self.processes.is_parked

    @property
    def can_move(self) -> bool:
        if not self.are_alive or self.are_suspended or not self.node.is_running:
            return False
        if self.node.is_stuck:
            return False
        return self.lease_s is None or self.node.monotonic_s <= self.lease_s

    @property
    def is_at_boundary(self) -> bool:
        return self.are_alive and 0 <= self.stop_after == self.step

    @property
    def waits(self) -> bool:
        """It was ordered to stop at a boundary, and has reached it."""
        return 0 <= self.stop_after <= self.step

    def kill(self) -> None:
        self.are_alive = False
        self.group.is_broken = True

    def revoke(self) -> None:
        """The groups of its processes are aborted, and its last seal is done or given up."""
        self.group.is_broken = self.is_revoked = True


class Group:
    """All ranks of one generation."""

    def __init__(self, simulation: "Simulation", plan: GenerationPlan) -> None:
        self.simulation = simulation
        self.plan = plan
        self.ranks: dict[str, Ranks] = {}
        self.step = 0
        self.is_broken = False
        """A rank of it is dead: the generation never makes another step."""
        self.is_going = False

    def joined(self, ranks: Ranks) -> None:
        """The ranks of one node have their state."""
        if not ranks.plan.is_of(self.plan):
            self.simulation.invariants.fail(f"ranks of two plans join {self.plan.generation}")
        self.ranks[ranks.node.node_id] = ranks
        ranks.are_ready = True
        if len(self.ranks) == len(self.plan.members) and not self.is_going:
            self.is_going = True
            self.step = ranks.step
            self._next()

    def _next(self) -> None:
        simulation = self.simulation
        simulation.world.after(simulation.scenario.step_s, self._try)

    def _try(self) -> None:
        if self.is_broken:
            return
        failing = self.simulation.failing
        if failing is not None and (ranks := failing(self)) is not None:
            kinds = self.simulation.failing_kinds
            self.fail(ranks, kinds[self.plan.generation % len(kinds)])
            return
        if not self._can_step():
            self.simulation.world.after(_STUCK_S, self._try)
            return
        self.step += 1
        members = [self.ranks[node_id] for node_id in sorted(self.ranks)]
        for ranks in members:
            ranks.state = next_state(ranks.state, self.plan.generation, self.step)
            ranks.step = self.step
        self.simulation.invariants.step_made(self, members)
        last_step = self.simulation.last_step
        if 0 <= last_step <= self.step:
            self._finish(members)
            return
        self._capture(members)
        self._next()

    def _can_step(self) -> bool:
        members = self.ranks
        if any(not ranks.can_move or ranks.waits for ranks in members.values()):
            return False
        passes = self.simulation.network.passes
        first, *others = sorted(members)
        # In a ring every node is a neighbour of the first node's tree, so that these links suffice.
        return all(passes(first, one) and passes(one, first) for one in others)

    def _capture(self, members: list[Ranks]) -> None:
        taken = version(self.plan.generation, self.step)
        for ranks in members:
            is_requested = self._is_requested(ranks, taken)
            if not is_requested and not is_due(ranks, self.step, self.simulation.scenario.every):
                continue
            if ranks.passes and ranks.stop_after != self.step:
                ranks.passes -= 1
            else:
                self._take(ranks, taken)

    def _is_requested(self, ranks: Ranks, taken: Version) -> bool:
        """As `ftrun.worker.capture.boundaries` does it; a step that was missed is reported."""
        last, ranks.last_step = ranks.last_step, self.step
        requested = ranks.page.get(CommandField.CAPTURE_FROM)
        first = max(requested, ranks.page.get(CommandField.TAKE_FROM))
        if requested <= ranks.answered or self.step < first:
            return False
        ranks.answered = requested
        if last < first:
            self.simulation.num_requested += 1
            return True
        self.simulation.num_missed += 1
        smp = ranks.node.smp
        if last > ranks.newest_taken and smp is not None and smp.is_alive:
            ranks.commit_wait.skipped(last)
            smp.skipped(version(taken.generation, last))
        return False

    def _take(self, ranks: Ranks, taken: Version) -> None:
        """As `ftrun.worker.capture.capture` does it."""
        smp = ranks.node.smp
        if smp is None or not smp.is_alive:
            ranks.commit_wait.skipped(taken.step)  # the next SMP receives it with the next step
            return
        if not is_free(ranks) and (
            ranks.commit_wait.is_under_way or not self._take_back(ranks, smp)
        ):
            ranks.commit_wait.skipped(taken.step)
            smp.skipped(taken)
            return
        ranks.node.world.trace(ranks.node.node_id, f"captures {taken}")
        ranks.newest_taken = int(taken.step)
        arenas = [smp.arena_for(rank) for rank in ranks.locals]
        places = [slot_to_overwrite(ranks, arena) for arena in arenas]
        for arena, position in zip(arenas, places, strict=True):
            arena.empty(position)
        delay_s = 0.02 + 0.2 * ranks.node.random.random()
        for arena, position in zip(arenas, places, strict=True):
            ranks.node.later(delay_s, self._seal, ranks, arena, position, taken, ranks.state)
            delay_s += 0.02 * ranks.node.random.random()

    @staticmethod
    def _take_back(ranks: Ranks, smp: "Smp") -> bool:
        """Withdraws the newest seal, which no other rank needs any more."""
        last = ranks.commit_wait.newest_sealed
        if last is not None:
            ranks.commit_wait.skipped(last.step)
            for rank in ranks.locals:
                smp.withdraw(rank, last)
        return is_free(ranks)

    def _seal(self, ranks: Ranks, arena: Arena, at: int, taken: Version, state: int) -> None:
        if not ranks.are_alive or ranks.is_revoked:
            return
        if ranks.is_parked:
            self.simulation.invariants.fail(f"a parked rank of {ranks.node.node_id} seals")
        self.simulation.invariants.sealed(taken, state)
        arena.seal(taken, state, at)
        ranks.commit_wait.sealed(taken.step)
        ranks.newest_seals[arena.rank] = int(taken.step)
        smp = ranks.node.smp
        if smp is not None and smp.is_alive:
            smp.sealed(arena.rank, taken)

    def _finish(self, members: list[Ranks]) -> None:
        for ranks in members:
            ranks.has_finished = True
            ranks.are_alive = False
            ranks.node.ranks_ended(ranks, ExitKind.FINISHED)
        self.is_broken = True

    def fail(self, ranks: Ranks, kind: ExitKind = ExitKind.SIGNAL) -> None:
        """A rank of one node has ended; the others may notice."""
        ranks.kill()
        ranks.node.ranks_ended(ranks, kind)
        for node_id in sorted(self.ranks):
            other = self.ranks[node_id]
            has_moved = self.step > other.first_step
            if other is not ranks and has_moved and ranks.node.random.random() < 0.5:
                delay_s = 0.01 + 0.3 * ranks.node.random.random()
                other.node.later(delay_s, self._raises, other)

    def _raises(self, ranks: Ranks) -> None:
        if ranks.are_alive:
            ranks.are_alive = False
            ranks.node.ranks_ended(ranks, ExitKind.EXCEPTION)


def is_due(ranks: Ranks, step: int, every: int) -> bool:
    """As `ftrun.worker.capture.boundaries` does it."""
    if ranks.stop_after == step:
        return True
    return step % every == 0 and step >= ranks.page.get(CommandField.TAKE_FROM)


def is_free(ranks: Ranks) -> bool:
    return ranks.commit_wait.is_free


def slot_to_overwrite(ranks: Ranks, arena: Arena) -> int:
    """The slot without the committed version."""
    return ranks.commit_wait.slot_to_fill(arena.position_of)


def exit_of(ranks: Ranks, rank: int, kind: ExitKind) -> WorkerExit:
    code = {ExitKind.FINISHED: 0, ExitKind.SIGNAL: -9}.get(kind, 1)
    text = f"rank {rank} of node {ranks.node.node_id}: {kind.value}"
    return WorkerExit(Rank(rank), kind, code, text, "", f"{kind.value} {ranks.step}")
