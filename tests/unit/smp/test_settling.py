"""Snapshots never stop, however late each node receives commits and skips.

The SMPs' commits and the ranks' settling are real, on real command pages. The delays of messages
and the leader are simulated: the leader commits what all nodes are ready for, and orders that the
newest skipped step is abandoned.
"""

import heapq
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from ftrun.ids import Rank, Version, version
from ftrun.recovery.snapshot_coordination import SnapshotAlignment
from ftrun.smp.memory.arenas import ArenaStore
from ftrun.smp.memory.commits import CommitCoordinator
from ftrun.wire.messages import envelope as messages
from ftrun.wire.messages import smp as smp_messages
from ftrun.wire.shared_memory.pages import CommandField, SharedPage, create_command_page
from ftrun.worker.commit_wait import CommitWait

GENERATION = 3
NUM_STEPS = 400


@dataclass
class Delays:
    """In steps: from rank to SMP, from node to leader and back, and of a rank behind the others."""

    socket: float
    network: float
    lateness: float
    protecting: float
    discards: float = 0.0
    """Number of 1,000 snapshots that are found changed during their copy."""


class Run:
    """Nodes with their ranks, an SMP each, and the leader, in simulated time."""

    def __init__(self, num_nodes: int, ranks_each: int, delays: Delays, seed: int) -> None:
        self.random = random.Random(seed)
        self.delays = delays
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.lines: dict[object, float] = {}
        self.num_events = 0
        self.ready: dict[int, tuple[int, int] | None] = dict.fromkeys(range(num_nodes))
        self.ordered = (-1, -1, -1)
        self.alignment = SnapshotAlignment()
        self.step = 0
        self.committed_at: list[tuple[float, int]] = []
        self.num_ranks = num_nodes * ranks_each
        self.nodes = [
            Node(self, position, [Rank(position * ranks_each + i) for i in range(ranks_each)])
            for position in range(num_nodes)
        ]

    def later(self, at_most: float, act: Callable[[], None], *, line: object) -> None:
        """Runs this after a delay; the order within one line is kept."""
        at = max(self.now + self.random.uniform(0.2, 1.0) * at_most, self.lines.get(line, 0.0))
        self.lines[line] = at
        self.num_events += 1
        heapq.heappush(self.events, (at, self.num_events, act))

    def go(self) -> None:
        for step in range(1, NUM_STEPS + 1):
            # A collective in each step: no rank starts the next before all have started this one.
            self.until(float(step))
            self.step = step
            for node in self.nodes:
                for rank in node.ranks:
                    turn = partial(node.step, rank, step)
                    self.later(self.delays.lateness, turn, line=("rank", rank))
            self.until(step + 0.99)

    def until(self, end: float) -> None:
        while self.events and self.events[0][0] <= end:
            self.now, _, act = heapq.heappop(self.events)
            act()
        self.now = end

    def send_to_leader(self, position: int, body: messages.AnyMessage) -> None:
        committed, abandoned, take_from = self.ordered
        match body:
            case smp_messages.VersionReady():
                self.ready[position] = (body.generation, body.step)
                found = set(self.ready.values())
                if len(found) == 1 and body.step > committed:
                    committed = body.step
                    take_from = self.alignment.after_commit(take_from, self.step)
                    self.committed_at.append((self.now, committed))
            case smp_messages.AbandonVersion() if body.step > abandoned:
                take_from = self.alignment.after_skip(take_from, body.step, self.step)
                abandoned = body.step
            case _:
                return
        if (committed, abandoned, take_from) != self.ordered:
            self.ordered = committed, abandoned, take_from
            for node in self.nodes:
                order = partial(node.apply_heartbeat, *self.ordered)
                self.later(self.delays.network, order, line=("order", node.position))


@dataclass
class Slots:
    """The versions in the two slots of a rank."""

    steps: list[int] = field(default_factory=lambda: [-1, -1])


class Node:
    """The real commits of an SMP and the real settling of its ranks."""

    def __init__(self, run: Run, position: int, ranks: Sequence[Rank]) -> None:
        self.run, self.position, self.ranks = run, position, ranks
        fd = create_command_page()
        self.page = SharedPage(fd)
        os.close(fd)
        self.commits = CommitCoordinator(ArenaStore(), self.send_to_agent)
        self.commits.protector = self  # type: ignore[assignment]
        self.ready: Version | None = None
        group: Any = SimpleNamespace()  # it exists: commits need no more than that
        body = smp_messages.BeginGeneration(GENERATION, run.num_ranks, list(ranks))
        self.commits.begin(self.page, body, group)
        self.commit_wait = {rank: CommitWait(self.page, GENERATION, None) for rank in ranks}
        self.slots = {rank: Slots() for rank in ranks}
        self.done = (-1, -1)

    def step(self, rank: Rank, step: int) -> None:
        """As `Capture` at a boundary, without waiting for slower ranks."""
        if step < self.page.get(CommandField.TAKE_FROM):
            return
        commit_wait = self.commit_wait[rank]
        if not commit_wait.is_free:
            last = commit_wait.newest_sealed
            if last is not None and not commit_wait.is_under_way:
                commit_wait.skipped(last.step)
                self.commits.withdraw(rank, last)
            commit_wait.skipped(step)
            self.receive(rank, lambda: self.commits.skipped(version(GENERATION, step)))
            return
        if self.run.random.random() < self.run.delays.discards / 1000:
            commit_wait.skipped(step)
            self.commits.withdraw(rank, version(GENERATION, step))
            return
        committed = commit_wait.committed
        slots = self.slots[rank].steps
        kept = slots.index(committed.step) if committed and committed.step in slots else 1
        assert committed is None or committed.step in slots, "the version is overwritten"
        slots[1 - kept] = step
        commit_wait.sealed(step)
        self.receive(rank, lambda: self.commits.sealed(rank, version(GENERATION, step)))

    def receive(self, rank: Rank, act: Callable[[], None]) -> None:
        self.run.later(self.run.delays.socket, act, line=("socket", rank))

    def send_to_agent(self, body: messages.AnyMessage, *_: object) -> None:
        send = partial(self.run.send_to_leader, self.position, body)
        self.run.later(self.run.delays.network, send, line=("report", self.position))

    def apply_heartbeat(self, committed: int, abandoned: int, take_from: int) -> None:
        self.page.set(CommandField.TAKE_FROM, max(take_from, self.page.get(CommandField.TAKE_FROM)))
        done, self.done = self.done, (committed, abandoned)
        if committed > done[0]:
            held = [self.slots[rank].steps for rank in self.ranks]
            assert all(committed in steps for steps in held), "a rank has lost the version"
            self.commits.commit(version(GENERATION, committed))
        if abandoned > done[1]:
            self.commits.abandon(GENERATION, abandoned)

    # --- in place of the protector: other nodes store it after a while ------------------------

    def protect(self, wanted: Version, _fds: Mapping[Rank, Sequence[int]]) -> None:
        ready = partial(self.report_ready, wanted)
        self.run.later(self.run.delays.protecting, ready, line=("protect", self.position))

    def report_ready(self, wanted: Version) -> None:
        if self.commits.tracker.complete == wanted:
            self.ready = wanted
            self.send_to_agent(
                smp_messages.VersionReady(wanted.generation, wanted.step, survives=1)
            )

    def is_ready(self, wanted: Version) -> bool:
        return self.ready == wanted

    def abandon(self, newest: Version) -> None:
        pass

    def decide_shares(self, newest: Version) -> None:
        pass

    def committed(self, newest: Version) -> None:
        pass


@pytest.mark.parametrize("discards", [0, 30])
@pytest.mark.parametrize("lateness", [0.05, 0.9])
@pytest.mark.parametrize("network", [0.02, 0.5, 1.5, 6.0])
@pytest.mark.parametrize(("num_nodes", "ranks_each"), [(2, 1), (2, 2), (4, 1), (3, 2)])
def test_commits_continue_however_late_words_arrive(
    num_nodes: int, ranks_each: int, network: float, lateness: float, discards: float
) -> None:
    for seed in range(6):
        run = Run(num_nodes, ranks_each, Delays(0.1, network, lateness, 1.0, discards), seed)
        run.go()
        times = [0.0, *(at for at, _ in run.committed_at), float(NUM_STEPS)]
        longest = max(later - sooner for sooner, later in pairwise(times))
        # Found in one round trip, restarted in the next; more of them to learn the delay.
        limit = (1 + 0.4 * discards) * (6 + 8 * network)
        assert longest < limit, (seed, run.committed_at[-3:])


def test_what_was_committed_before_is_kept_while_ranks_start_from_another_version() -> None:
    fd = create_command_page()
    page, restored, before = SharedPage(fd), version(1, 6), version(0, 3)
    os.close(fd)
    page.set(CommandField.RETAINED_GENERATION, before.generation)
    page.set(CommandField.RETAINED_STEP, before.step)
    commit_wait = CommitWait(page, 2, restored)
    assert commit_wait.slot_to_fill({before: 0}.get) == 1
    assert commit_wait.slot_to_fill({before: 1}.get) == 0
    assert commit_wait.slot_to_fill({restored: 0, before: 1}.get) == 1
    assert commit_wait.slot_to_fill({}.get) == 0
    page.set(CommandField.COMMITTED_STEP, 9)
    page.set(CommandField.COMMITTED_GENERATION, 2)
    assert commit_wait.slot_to_fill({before: 0, version(2, 9): 1}.get) == 0
