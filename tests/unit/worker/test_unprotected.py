"""Reasons for lost protection, and hooks whose faults become such reasons."""

import logging

import pytest
import torch

from ftrun.errors import ValueNotStorable
from ftrun.wire.shared_memory.pages import (
    HeartbeatField,
    SharedPage,
    create_page,
)
from ftrun.worker.capture.copying import CopyThread
from ftrun.worker.process import heartbeat
from ftrun.worker.state.unprotected import UnprotectedReasons
from tests.launch_requests import context_of


@pytest.fixture
def page() -> SharedPage:
    return SharedPage(create_page("beat"))


def broken(*_: object) -> None:
    raise KeyError("a broken part")


def test_a_hook_passes_its_arguments_on_and_returns_nothing(page: SharedPage) -> None:
    seen: list[tuple[object, ...]] = []
    hook = UnprotectedReasons(page).guarded(lambda *args: seen.append(args))
    assert hook(1, (2,), {}) is None
    assert seen == [(1, (2,), {})]
    assert not page.get(HeartbeatField.UNPROTECTED)


def test_a_fault_of_a_hook_is_a_reason_and_is_logged_once_with_its_traceback(
    page: SharedPage, caplog: pytest.LogCaptureFixture
) -> None:
    hook = UnprotectedReasons(page).guarded(broken)
    hook()
    hook()
    assert page.get(HeartbeatField.UNPROTECTED) == 1
    assert page.note == "a bug in ftrun: KeyError: 'a broken part' (in broken)"
    assert [record.exc_info is not None for record in caplog.records] == [False, True]


def test_an_error_of_the_script_in_a_hook_is_no_bug(page: SharedPage) -> None:
    def refuse(*_: object) -> None:
        raise ValueNotStorable(key="optimizer.state.lock", kind="lock")

    UnprotectedReasons(page).guarded(refuse)()
    assert page.note.startswith("optimizer.state.lock holds a lock")


def test_a_fault_after_an_optimizer_step_stays_within_ftrun(
    page: SharedPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = context_of(page=page)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    monkeypatch.setattr(heartbeat, "check_finite", broken)
    heartbeat._after_step(context)(optimizer, (), {})
    assert "a bug in ftrun: KeyError: 'a broken part'" in page.note


def test_a_job_that_fails_leaves_the_copy_thread_to_the_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    thread, done = CopyThread(), []
    thread.start(broken)
    thread.wait()
    thread.start(lambda: done.append(1))
    thread.wait()
    assert done == [1]
    assert [(r.levelno, r.name) for r in caplog.records] == [
        (logging.ERROR, "ftrun.worker.capture.copying")
    ]
