"""Cadence: what a snapshot costs in all its turns decides how often there is one."""

import os
from collections.abc import Iterator

import pytest

from ftrun.config.profile import SnapshotConfig
from ftrun.wire.shared_memory.pages import (
    CommandField,
    HeartbeatField,
    SharedPage,
    create_command_page,
    create_page,
)
from ftrun.worker.capture.boundaries import SnapshotSchedule, StepActivity

STEP_S = 0.1


@pytest.fixture
def pages() -> Iterator[tuple[SharedPage, SharedPage]]:
    fds = (create_page("beats"), create_command_page())
    yield SharedPage(fds[0]), SharedPage(fds[1])
    for fd in fds:
        os.close(fd)


def snapshot(made: SnapshotSchedule, *turns_s: float, quiet: int = 10) -> None:
    """A copy's turn, those until its commit, and quiet ones after it."""
    for number, step_s in enumerate(turns_s):
        turn = StepActivity.PROTECT if number else StepActivity.COPY
        made.learn(turn, step_s=step_s, copy_s=0.02, blocked_s=0.0)
    for _ in range(quiet):
        made.learn(StepActivity.QUIET, step_s=STEP_S, copy_s=0.02, blocked_s=0.0)


def test_the_copy_alone_costs_its_share(pages: tuple[SharedPage, SharedPage]) -> None:
    made = SnapshotSchedule(SnapshotConfig(overhead_budget=0.02), *pages)
    for _ in range(5):
        snapshot(made, STEP_S * 1.05)
    assert pages[0].get(HeartbeatField.WISHED_EVERY) == 3


def test_turns_that_wait_for_other_nodes_count(pages: tuple[SharedPage, SharedPage]) -> None:
    made = SnapshotSchedule(SnapshotConfig(overhead_budget=0.02), *pages)
    for _ in range(5):
        snapshot(made, STEP_S * 1.1, *[STEP_S * 1.05] * 10)
    assert pages[0].get(HeartbeatField.WISHED_EVERY) == 30


def test_time_that_the_training_stood_still_is_the_least(
    pages: tuple[SharedPage, SharedPage],
) -> None:
    made = SnapshotSchedule(SnapshotConfig(overhead_budget=0.02), *pages)
    snapshot(made, STEP_S)
    made.learn(StepActivity.QUIET, step_s=STEP_S, copy_s=0.0, blocked_s=0.02)
    assert pages[0].get(HeartbeatField.WISHED_EVERY) == 10


def test_without_a_quiet_turn_the_interval_grows_until_there_is_one(
    pages: tuple[SharedPage, SharedPage],
) -> None:
    made = SnapshotSchedule(SnapshotConfig(overhead_budget=1.0), *pages)
    snapshot(made, *[STEP_S] * 8, quiet=0)
    assert pages[0].get(HeartbeatField.WISHED_EVERY) == 16
    snapshot(made, *[STEP_S] * 8, quiet=1)
    assert pages[0].get(HeartbeatField.WISHED_EVERY) == 1


def test_an_interval_holds_from_the_step_that_all_have_heard_of(
    pages: tuple[SharedPage, SharedPage],
) -> None:
    made = SnapshotSchedule(SnapshotConfig(every="auto"), *pages)
    pages[1].set(CommandField.SNAPSHOT_EVERY, 4)
    pages[1].set(CommandField.EVERY_FROM_STEP, 10)
    assert [step for step in range(20) if made.is_due(step)] == [*range(11), 12, 16]
