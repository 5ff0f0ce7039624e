"""Snapshot commands are repeated until the command page shows that the SMP has executed them."""

import os
from collections.abc import Iterator

import pytest

from ftrun.agent.snapshots.smp_client import REPEAT_S, UnconfirmedCommands
from ftrun.ids import version
from ftrun.recovery.commands import AbandonStep, CommitSnapshot
from ftrun.wire.shared_memory.pages import CommandField, SharedPage, create_command_page

LATER_S = 10.0 + REPEAT_S


@pytest.fixture
def page() -> Iterator[SharedPage]:
    fd = create_command_page()
    yield SharedPage(fd)
    os.close(fd)


def show(page: SharedPage, *, generation: int, step: int, within: int) -> None:
    page.set(CommandField.COMMITTED_STEP, step)
    page.set(CommandField.COMMITTED_GENERATION, generation)
    page.set(CommandField.COMMITTED_IN, within)


def test_a_commit_is_repeated_until_it_is_shown(page: SharedPage) -> None:
    orders = UnconfirmedCommands()
    commit = CommitSnapshot(version(2, 5))
    orders.add(commit, 2, now_s=10.0)
    assert orders.due(page, 2, now_s=10.0) == []
    assert orders.due(page, 2, now_s=LATER_S) == [commit]
    assert orders.due(page, 2, now_s=LATER_S) == []
    assert orders.due(page, 2, now_s=LATER_S + REPEAT_S) == [commit]
    show(page, generation=2, step=5, within=2)
    assert orders.due(page, 2, now_s=LATER_S + 9.0) == []


def test_a_restored_version_counts_only_in_the_generation_that_has_committed_it(
    page: SharedPage,
) -> None:
    orders = UnconfirmedCommands()
    orders.add(CommitSnapshot(version(1, 5)), 2, now_s=10.0)
    show(page, generation=1, step=5, within=1)
    assert orders.due(page, 2, now_s=LATER_S) == [CommitSnapshot(version(1, 5))]
    show(page, generation=1, step=5, within=2)
    assert orders.due(page, 2, now_s=LATER_S + REPEAT_S) == []


def test_an_abandoned_step_is_repeated_until_it_is_shown(page: SharedPage) -> None:
    orders = UnconfirmedCommands()
    orders.add(AbandonStep(7), 2, now_s=10.0)
    assert orders.due(page, 2, now_s=LATER_S) == [AbandonStep(7)]
    page.set(CommandField.ABANDONED_STEP, 8)
    assert orders.due(page, 2, now_s=LATER_S + REPEAT_S) == []


def test_nothing_is_repeated_in_another_generation(page: SharedPage) -> None:
    orders = UnconfirmedCommands()
    orders.add(AbandonStep(7), 2, now_s=10.0)
    assert orders.due(page, 3, now_s=LATER_S) == []
    orders.add(CommitSnapshot(version(3, 9)), 3, now_s=10.0)
    assert orders.due(page, 3, now_s=LATER_S) == [CommitSnapshot(version(3, 9))]
