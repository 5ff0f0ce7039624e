"""The loops of a session count boundaries alike, whatever leaves a turn; no agent is needed."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import ftrun
from ftrun.errors import UsageError
from ftrun.worker.session import Session


@pytest.fixture
def session() -> Iterator[Session]:
    made = ftrun.attach(model=nn.Linear(2, 2))
    yield made
    made.close()


def test_without_an_agent_the_loop_runs_and_nothing_is_restored(session: Session) -> None:
    assert list(session.steps(3)) == [0, 1, 2]
    assert (session.step, session.restored, session.generation) == (3, False, 0)
    assert len(session.id) == 12
    session.snapshot()
    session.report(loss=torch.tensor(1.0))
    with session.phase("eval"):
        pass


def test_a_turn_left_by_break_is_no_boundary(session: Session) -> None:
    for at in session.steps(5):
        if at == 2:
            break
    assert session.step == 2
    assert list(session.steps(4)) == [2, 3]


def test_a_turn_that_ends_in_continue_is_a_boundary(session: Session) -> None:
    for at in session.steps(5):
        if at % 2:
            continue
    assert session.step == 5


def test_a_turn_left_by_an_exception_is_no_boundary(session: Session) -> None:
    def loop() -> None:
        for at in session.steps(5):
            if at == 3:
                raise KeyError

    with pytest.raises(KeyError):
        loop()
    assert session.step == 3


def test_each_batch_is_a_step_and_epochs_are_counted(session: Session) -> None:
    loader = DataLoader(range(4), batch_size=2)
    seen = [
        (epoch, batch.tolist()) for epoch in session.epochs(2) for batch in session.batches(loader)
    ]
    assert seen == [(0, [0, 1]), (0, [2, 3]), (1, [0, 1]), (1, [2, 3])]
    assert session.step == 4


def test_batches_inside_steps_do_not_count_twice(session: Session) -> None:
    data = iter(session.steps(2))
    batches = None
    for _ in data:
        batches = batches or session.batches(DataLoader(range(4)))
        next(batches)
    assert session.step == 2


def test_step_done_is_for_loops_of_the_script(session: Session) -> None:
    session.step_done()
    session.step_done(snapshot=False)
    assert session.step == 2
    loop = session.steps(5)
    next(loop)
    with pytest.raises(UsageError):
        session.step_done()


def test_a_loop_of_the_script_can_have_begun_elsewhere(session: Session) -> None:
    session.begin(done=5)
    session.step_done()
    session.begin(done=9)
    assert session.step == 6


def test_loops_do_not_nest(session: Session) -> None:
    outer = session.steps(2)
    next(outer)
    with pytest.raises(UsageError):
        next(session.steps(2))


def test_a_second_attach_is_refused_until_the_first_is_closed(session: Session) -> None:
    with pytest.raises(UsageError):
        ftrun.attach(model=nn.Linear(2, 2))
    session.close()
    ftrun.attach(model=nn.Linear(2, 2)).close()


def test_an_object_without_state_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="ema"):
        ftrun.attach(model=nn.Linear(2, 2), ema=3)


def test_a_loader_that_is_not_attached_is_refused_beside_one_that_is() -> None:
    one, other = DataLoader(range(2)), DataLoader(range(2))
    session = ftrun.attach(model=nn.Linear(2, 2), loader=one)
    with pytest.raises(UsageError):
        next(session.batches(other))
    session.close()


def test_without_an_agent_nothing_that_only_linux_has_is_loaded() -> None:
    program = (
        "import sys, ftrun, torch; ftrun.attach(model=torch.nn.Linear(2, 2));"
        "print([m for m in sys.modules if m in"
        " ('ftrun.wire.arena', 'ftrun.wire.channel', 'ftrun.worker.protection')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
