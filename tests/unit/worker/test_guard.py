"""`session.guard` without an agent: where it may be, and what follows it."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import ftrun
from ftrun.errors import UsageError
from ftrun.worker.session import Session
from ftrun.worker.survivors import guard
from ftrun.worker.survivors.guard import GuardedBlocks, following_lines, is_of_broken_connection

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]"


@pytest.fixture
def session() -> Iterator[Session]:
    made = ftrun.attach(model=nn.Linear(2, 2))
    yield made
    made.close()


def test_without_an_agent_the_block_has_no_effect(session: Session) -> None:
    steps = []
    for step in session.steps(3):
        with session.guard() as turn:
            steps.append(step)
        assert not turn.is_repeated

    def fail(_: int) -> None:
        raise ConnectionResetError(GLOO)

    with pytest.raises(ConnectionResetError):
        list(session.run(fail, steps=4))
    assert (steps, session.step, session.is_rehearsal) == ([0, 1, 2], 3, False)


def test_run_yields_what_each_turn_returns(session: Session) -> None:
    assert list(session.run(lambda step: step * step, steps=4)) == [0, 1, 4, 9]
    assert session.step == 4
    with pytest.raises(ZeroDivisionError):
        list(session.run(lambda step: step // 0, steps=5))


def test_a_loop_over_run_that_is_left_does_not_come_again(session: Session) -> None:
    for result in session.run(lambda step: step, steps=4):
        if result == 1:
            break
    assert session.step == 1


def test_a_guard_outside_of_a_loop_is_refused(session: Session) -> None:
    with pytest.raises(UsageError, match="outside of a loop: it encloses the body"):
        session.guard().__enter__()
    for _ in session.steps(1):
        pass
    with pytest.raises(UsageError, match="outside of a loop"):
        session.guard().__enter__()


def test_a_guard_inside_of_a_guard_is_refused(session: Session) -> None:
    def nested(_: int) -> None:
        session.guard().__enter__()

    with pytest.raises(UsageError, match="inside of another guard"):
        list(session.run(nested, steps=1))
    for _ in session.steps(1):
        with session.guard():
            pass


def test_a_second_guard_in_a_turn_is_refused(session: Session) -> None:
    for _ in session.steps(2):
        with session.guard():
            pass
        with pytest.raises(UsageError, match="twice in one turn of the loop"):
            session.guard().__enter__()


def test_a_guard_that_is_made_and_not_entered_counts_for_nothing(session: Session) -> None:
    for _ in session.steps(1):
        session.guard()
        with session.guard():
            pass


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError(GLOO), True),
        (ConnectionResetError(104, "reset"), True),
        (BrokenPipeError(), True),
        (torch.distributed.DistNetworkError("The client socket has failed"), True),
        (torch.distributed.DistBackendError("NCCL communicator was aborted on rank 0."), True),
        (RuntimeError("shape '[3]' is invalid for input of size 4"), False),
        (ValueError("Connection to the model is lost"), False),
        (FloatingPointError(), False),
    ],
)
def test_a_broken_connection_is_told_from_errors_of_the_script(
    error: Exception, expected: bool
) -> None:
    assert is_of_broken_connection(error) == expected
    wrapped = LookupError("no batch")
    wrapped.__cause__ = error
    assert is_of_broken_connection(wrapped) == expected
    during = LookupError("no batch")
    during.__context__ = error
    assert is_of_broken_connection(during) == expected


def test_errors_that_name_each_other_are_looked_at_once() -> None:
    first, second = LookupError("a"), LookupError("b")
    first.__cause__, second.__cause__ = second, first
    assert not is_of_broken_connection(first)


# --- statements that follow -----------------------------------------------------------------------


class Recorder:
    """Records the frame that enters its block."""

    frame: FrameType

    def guard(self) -> Any:
        return self

    def __enter__(self) -> Any:
        self.frame = sys._getframe(1)
        return self

    def __exit__(self, *_: object) -> None:
        pass


def lines_after(tmp_path: Path, source: str) -> list[int]:
    path = tmp_path / "script.py"
    path.write_text(dedent(source))
    spec = importlib.util.spec_from_file_location("script", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    session = module.__dict__["session"] = Recorder()
    found: list[int] = []

    def enter(_: object) -> Any:
        found[:] = following_lines(sys._getframe(1))
        return session

    Recorder.__enter__ = enter  # type: ignore[method-assign]
    spec.loader.exec_module(module)
    return found


@pytest.mark.parametrize(
    "source",
    [
        """
        for step in range(1):
            with session.guard():
                loss = step
        print(loss)
        """,
        """
        for step in range(1):
            x = step
            with session.guard():
                loss = x
            # A comment, and
            pass
        """,
        """
        for step in range(1):
            with session.guard() as turn:
                loss = step
            if not turn:
                print(loss)
        """,
        """
        def one_step():
            with session.guard():
                loss = 1
            return loss
        for step in range(1):
            one_step()
        """,
        """
        for epoch in range(1):
            for step in range(1):
                with session.guard(
                ):
                    loss = step
            print(epoch)
        """,
        """
        for step in range(1):
            try:
                with session.guard():
                    loss = step
            finally:
                pass
        """,
    ],
)
def test_usual_loops_have_nothing_behind_the_block(tmp_path: Path, source: str) -> None:
    assert lines_after(tmp_path, source) == []


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        (
            """
            for step in range(1):
                with session.guard():
                    loss = step
                print(loss)
                step += 1
            """,
            [5, 6],
        ),
        (
            """
            for step in range(1):
                if step == 0:
                    with session.guard() as turn:
                        loss = step
                    loss += 1
                else:
                    loss = 0
                print(loss)
            """,
            [6, 9],
        ),
        (
            """
            while True:
                match 3:
                    case 3:
                        try:
                            raise ValueError
                        except ValueError:
                            with session.guard():
                                loss = 0
                        print(loss)
                break
            """,
            [10, 11],
        ),
    ],
)
def test_statements_behind_the_block_are_found(
    tmp_path: Path, source: str, lines: list[int]
) -> None:
    assert lines_after(tmp_path, source) == lines


def test_without_a_source_nothing_is_found() -> None:
    session = Recorder()
    found: list[int] = []

    def enter(_: object) -> Any:
        found.append(len(following_lines(sys._getframe(1))))
        return session

    Recorder.__enter__ = enter  # type: ignore[method-assign]
    exec("for _ in [1]:\n with session.guard():\n  pass\n print()", {"session": session})
    assert found == [0]


def test_a_bug_in_the_check_of_statements_does_not_end_the_script(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def breaks(_: FrameType) -> list[int]:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(guard, "following_lines", breaks)
    GuardedBlocks().look_once(sys._getframe())
    assert "a bug in ftrun: statements are not checked" in caplog.text
