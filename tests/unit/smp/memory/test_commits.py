"""Checks of shared replicas: which versions are committed, on a real command page."""

import os
from typing import Any

import pytest

from ftrun.ids import Rank, Version, version
from ftrun.smp.memory.arenas import ArenaStore
from ftrun.smp.memory.commits import CommitCoordinator
from ftrun.snapshot.replica_shares import ReplicaCheck
from ftrun.wire.messages.smp import BeginGeneration
from ftrun.wire.shared_memory.pages import CommandField, SharedPage, create_command_page

RANKS = [Rank(0), Rank(1)]
GENERATION = 2
FIRST, SECOND, THIRD, FOURTH = (version(GENERATION, step) for step in (5, 6, 7, 8))


def check(digest: int = 1, part: int = 0) -> ReplicaCheck:
    return ReplicaCheck([0, 1], part, digest)


class Node:
    """A node with two ranks, which share; `held` are the versions that a new SMP finds."""

    def __init__(self, held: Version | None = None) -> None:
        fd = create_command_page()
        self.page = SharedPage(fd)
        os.close(fd)
        self.page.set(CommandField.REPLICA_SHARES, 1)
        self.held = held
        self.commits = self.another_smp()

    def another_smp(self) -> CommitCoordinator:
        memory = ArenaStore()
        found = {rank: {self.held} if self.held else set() for rank in RANKS}
        memory.held = lambda _: found  # type: ignore[assignment, method-assign]
        self.sent: list[Any] = []
        made = CommitCoordinator(memory, self.sent.append)
        made.begin(self.page, BeginGeneration(GENERATION, len(RANKS), list(RANKS)))
        return made

    def seal(self, sealed: Version, *checks: ReplicaCheck | None) -> bool:
        """All ranks seal it; return whether it is committed."""
        for rank, one in zip(RANKS, checks, strict=True):
            self.commits.sealed(rank, sealed, one)
        return self.page.get(CommandField.COMMITTED_STEP) == sealed.step

    @property
    def decision(self) -> int:
        return self.page.get(CommandField.REPLICA_SHARES)

    @property
    def count(self) -> int:
        return self.page.get(CommandField.COMMIT_COUNT)


def test_a_version_with_equal_checks_is_committed() -> None:
    node = Node()
    assert node.seal(FIRST, check(), check())
    assert (node.decision, node.count) == (1, 1)


def test_a_difference_ends_the_sharing() -> None:
    node = Node()
    assert not node.seal(FIRST, check(1), check(2))
    assert (node.decision, node.count) == (-1, 0)
    assert node.page.get(CommandField.ABANDONED_STEP) == FIRST.step
    assert [one.ranks for one in node.sent if getattr(one, "kind", "") == "replicas_differ"] == [
        [0, 1]
    ]


@pytest.mark.parametrize("other", [None, check(part=1)])
def test_one_unproven_version_is_discarded_and_two_in_a_row_end_the_sharing(
    other: ReplicaCheck | None,
) -> None:
    node = Node()
    assert not node.seal(FIRST, check(), other)
    assert node.decision == 1
    assert node.seal(SECOND, check(), check())
    assert not node.seal(THIRD, check(), other)
    assert node.decision == 1
    assert not node.seal(FOURTH, check(), other)
    assert node.decision == -1


def test_a_worker_that_connects_again_does_not_pass_without_its_check() -> None:
    node = Node()
    node.commits.sealed(RANKS[0], FIRST, check(1))
    node.commits._memory.held(2)[RANKS[1]].add(FIRST)
    node.commits.resend_sealed(RANKS[1])
    assert node.page.get(CommandField.COMMITTED_STEP) != FIRST.step


def test_checks_that_come_after_the_commit_of_another_smp_discard_nothing() -> None:
    node = Node()
    assert node.seal(FIRST, check(), check())
    node.held = SECOND
    node.commits = node.another_smp()
    assert node.page.get(CommandField.COMMITTED_STEP) == SECOND.step
    for rank, digest in ((RANKS[1], 2), (RANKS[0], 1)):
        node.commits.sealed(rank, SECOND, check(digest))
    assert node.page.get(CommandField.COMMITTED_STEP) == SECOND.step
    assert node.page.get(CommandField.ABANDONED_STEP) < SECOND.step


def test_another_smp_does_not_count_a_commit_again() -> None:
    node = Node()
    assert node.seal(FIRST, check(), check())
    node.held = FIRST
    node.commits = node.another_smp()
    assert node.count == 1
    assert node.seal(SECOND, check(), check())
    assert node.count == 2


def test_what_was_committed_stays_known_and_what_was_not_never_will_be() -> None:
    node = Node()
    known = lambda: [node.commits.is_committed(one) for one in (FIRST, SECOND, THIRD)]  # noqa: E731
    assert known() == [None, None, None]
    node.commits.sealed(RANKS[0], FIRST, check())
    assert known() == [None, None, None]
    assert node.seal(FIRST, check(), check())
    assert known() == [True, None, None]
    node.commits.skipped(SECOND)
    assert known() == [True, False, None]
    assert node.seal(FOURTH, check(), check())
    assert known() == [True, False, False]
    assert node.commits.is_committed(version(GENERATION + 1, 5)) is False


def test_a_skip_is_abandoned_although_a_rank_has_an_abandoned_seal() -> None:
    """Ranks that have left their slots for pools seal no later version."""
    node = Node()
    node.commits.sealed(RANKS[0], FIRST, check())
    node.commits.withdraw(RANKS[1], FIRST)
    node.commits.skipped(THIRD)
    assert node.page.get(CommandField.ABANDONED_STEP) == THIRD.step
    assert node.commits.is_committed(SECOND) is False
