"""A wait ends when its level is reached, when it cannot be, or in time; pages are real."""

import threading
import time
from collections.abc import Callable

import msgspec
import pytest

from ftrun.errors import SnapshotError, SnapshotWaitTimeout, UsageError
from ftrun.ids import Version, version
from ftrun.wire.shared_memory.pages import CommandField, HeartbeatField, SharedPage
from ftrun.worker.commit_wait import CommitWait
from ftrun.worker.context import WorkerContext
from ftrun.worker.snapshot_wait import Level, LevelWait, SnapshotHandle, check_level
from tests.launch_requests import context_of, launch_request

NOW = version(2, 8)
BEFORE = version(1, 6)


def made(**changes: object) -> tuple[WorkerContext, LevelWait]:
    """A rank of generation 2, of two nodes with a checkpoint directory, that has sealed step 8."""
    request = launch_request(generation=2, num_nodes=2, has_storage=True)
    context = context_of(msgspec.structs.replace(request, **changes))
    commit_wait = CommitWait(context.commands, 2, BEFORE)
    commit_wait.sealed(NOW.step)
    return context, LevelWait(context, commit_wait, lambda: None)


def commit(page: SharedPage, shown: Version = NOW) -> None:
    page.show_version(CommandField.COMMITTED_GENERATION, (shown.generation, shown.step))


def protect(page: SharedPage, shown: Version = NOW) -> None:
    page.show_version(CommandField.PROTECTED_GENERATION, (shown.generation, shown.step))


def persist(page: SharedPage, shown: Version = NOW) -> None:
    page.show_version(CommandField.PERSISTED_GENERATION, (shown.generation, shown.step))


def soon(page: SharedPage, *changes: Callable[[SharedPage], object]) -> threading.Thread:
    def work() -> None:
        for change in changes:
            time.sleep(0.02)
            change(page)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_a_sealed_version_is_sealed_at_once() -> None:
    _, wait = made()
    assert wait.until("sealed", NOW, 0.0)


@pytest.mark.parametrize(
    ("level", "changes"),
    [
        ("committed", (commit,)),
        ("protected", (commit, protect)),
        ("persisted", (commit, persist)),
    ],
)
def test_a_wait_ends_when_the_page_shows_the_level(
    level: Level, changes: tuple[Callable[[SharedPage], object], ...]
) -> None:
    context, wait = made()
    context.page.set(HeartbeatField.FIRST_STEP_NS, 1)
    thread = soon(context.commands, *changes)
    assert wait.until(level, NOW, 60.0)
    thread.join()
    assert context.page.get(HeartbeatField.HEARTBEAT_NS), "a rank that waits shows that it lives"
    assert context.page.phase == ""


def test_a_newer_version_takes_the_place_of_an_older_one() -> None:
    context, wait = made()
    for show in (commit, protect, persist):
        show(context.commands, version(2, 9))
    assert all(wait.until(level, NOW, 0.0) for level in ("committed", "protected", "persisted"))


def test_a_version_of_an_earlier_generation_is_no_newer_one() -> None:
    context, wait = made()
    commit(context.commands)
    persist(context.commands, version(1, 900))
    with pytest.raises(SnapshotWaitTimeout, match="no checkpoint of it, or of a newer version"):
        wait.until("persisted", NOW, 0.0)


def test_the_restored_version_is_committed_and_one_of_a_checkpoint_is_persisted() -> None:
    _, wait = made()
    assert wait.until("committed", BEFORE, 0.0)
    context, _ = made(has_storage=True)
    loaded = version(-1, 40)
    commit_wait = CommitWait(context.commands, 2, loaded)
    assert LevelWait(context, commit_wait, lambda: None).until("persisted", loaded, 0.0)
    assert context.page.get(HeartbeatField.PERSIST_STEP) == 0, "no checkpoint is requested"


def test_a_checkpoint_is_requested_only_of_a_committed_version() -> None:
    context, wait = made()
    with pytest.raises(SnapshotWaitTimeout):
        wait.until("persisted", NOW, 0.0)
    assert context.page.get(HeartbeatField.PERSIST_STEP) == 0
    commit(context.commands)
    with pytest.raises(SnapshotWaitTimeout):
        wait.until("persisted", NOW, 0.0)
    assert context.page.get(HeartbeatField.PERSIST_STEP) == NOW.step


@pytest.mark.parametrize(
    ("level", "changes", "reason"),
    [
        ("protected", {"num_nodes": 1}, "all ranks are on one node"),
        ("persisted", {"has_storage": False}, "start it with --checkpoint-dir"),
    ],
)
def test_a_level_that_the_run_does_not_have_is_refused_at_once(
    level: Level, changes: dict[str, object], reason: str
) -> None:
    _, wait = made(**changes)
    with pytest.raises(SnapshotError, match=f"step 8 .* is not {level}: .*{reason}"):
        wait.until(level, NOW, 600.0)


def test_an_abandoned_step_is_given_up() -> None:
    context, wait = made()
    thread = soon(context.commands, lambda page: page.set(CommandField.ABANDONED_STEP, NOW.step))
    with pytest.raises(SnapshotError, match="a rank has no snapshot of this step"):
        wait.until("protected", NOW, 600.0)
    thread.join()


def test_a_version_that_the_group_cannot_protect_is_refused_with_its_reason() -> None:
    context, wait = made()
    context.commands.not_protected = "node n1 is unreachable"
    commit(context.commands)
    with pytest.raises(SnapshotError, match="is not protected: node n1 is unreachable"):
        wait.until("protected", NOW, 600.0)


def test_a_failed_checkpoint_ends_the_wait_and_an_older_failure_does_not() -> None:
    context, wait = made()
    commit(context.commands)
    context.commands.not_persisted = "the disk was full"
    with pytest.raises(SnapshotWaitTimeout, match=r"after 0\.05 s: the disk was full"):
        wait.until("persisted", NOW, 0.05)
    attempt = ("", "the disk is full")
    changes = [lambda page, text=text: setattr(page, "not_persisted", text) for text in attempt]
    thread = soon(context.commands, *changes)
    with pytest.raises(SnapshotError, match="is not persisted: the disk is full") as raised:
        wait.until("persisted", NOW, 600.0)
    thread.join()
    assert not isinstance(raised.value, SnapshotWaitTimeout)


def test_a_late_commit_is_a_timeout_with_the_reason_of_this_rank() -> None:
    context, wait = made()
    context.page.set(HeartbeatField.UNPROTECTED, 1)
    context.page.note = "no memory"
    with pytest.raises(SnapshotWaitTimeout, match=r"another rank .* \(UNPROTECTED: no memory\)"):
        wait.until("committed", NOW, 0.0)
    commit(context.commands)
    with pytest.raises(TimeoutError, match="`ftrun status` has the reason"):
        wait.until("protected", NOW, 0.0)


def test_without_a_snapshot_there_is_nothing_to_wait_for() -> None:
    context = context_of(launch_request())
    wait = LevelWait(context, CommitWait(context.commands, 0, None), lambda: None)
    with pytest.raises(SnapshotError, match="this rank has taken no snapshot yet"):
        wait.until("sealed", None, 0.0)


def test_a_copy_in_progress_counts_towards_the_limit_of_a_wait() -> None:
    context, wait = made()
    context.page.set(HeartbeatField.FIRST_STEP_NS, 1)
    copied = threading.Event()
    with pytest.raises(SnapshotWaitTimeout, match=r"not sealed after 0\.02 s: .* still copied"):
        wait.until("sealed", None, 0.02, copied.wait)
    assert context.page.get(HeartbeatField.HEARTBEAT_NS)
    copied.set()
    assert wait.until("sealed", None, 0.0, copied.wait)


def test_an_unknown_level_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="the levels are 'sealed', 'committed', 'protected'"):
        check_level("durable")


def test_a_handle_has_its_version_after_the_boundary_only() -> None:
    handle = SnapshotHandle(lambda *_: True)
    with pytest.raises(UsageError, match="at the boundary that ends this step"):
        handle.version("sealed")
    handle.step = 8
    handle.passed(NOW, "")
    assert handle.version("sealed") == NOW


@pytest.mark.parametrize(
    ("reason", "shown"), [("", "has gradients that it has not stepped with"), ("NaN", "NaN")]
)
def test_a_handle_of_a_snapshot_that_was_not_taken_has_the_reason(reason: str, shown: str) -> None:
    handle = SnapshotHandle(lambda *_: True)
    handle.step = 9
    handle.passed(NOW, reason)
    with pytest.raises(SnapshotError, match=f"no snapshot was taken at step 9: .*{shown}"):
        handle.version("committed")
