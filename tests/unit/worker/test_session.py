"""The loops of a session count boundaries alike, for every exit of a turn; no agent is needed."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from threading import Lock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import ftrun
from ftrun.errors import StateDictFailed, UsageError, ValueNotStorable
from ftrun.worker import session as session_module
from ftrun.worker.session import Session


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), 0.1)


@pytest.fixture
def session() -> Iterator[Session]:
    with attached(model=nn.Linear(2, 2)) as found:
        yield found


def test_without_an_agent_the_loop_runs_and_nothing_is_restored(session: Session) -> None:
    assert list(session.steps(3)) == [0, 1, 2]
    assert (session.step, session.restored, session.generation) == (3, False, 0)
    assert len(session.id) == 12
    handle = session.snapshot()
    assert not session.wait("committed")
    assert not handle.wait("persisted")
    with pytest.raises(UsageError, match="the levels are"):
        session.wait("written")  # type: ignore[arg-type]
    session.report(loss=torch.tensor(1.0))
    with session.phase("eval"):
        pass


def test_a_loss_of_several_numbers_is_refused(session: Session) -> None:
    with pytest.raises(UsageError, match=r"a tensor of shape \[3, 1\]: pass one number"):
        session.report(loss=torch.ones(3, 1))
    session.report(loss=torch.ones(1, 1))


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


def test_a_loader_that_is_not_attached_is_refused_next_to_one_that_is() -> None:
    one, other = DataLoader(range(2)), DataLoader(range(2))
    session = ftrun.attach(model=nn.Linear(2, 2), loader=one)
    with pytest.raises(UsageError):
        next(session.batches(other))
    session.close()


def test_without_an_agent_nothing_that_only_linux_has_is_loaded() -> None:
    program = (
        "import sys, ftrun, torch; ftrun.attach(model=torch.nn.Linear(2, 2));"
        "print([m for m in sys.modules if m in"
        " ('ftrun.wire.shared_memory.arena', 'ftrun.wire.transport.channel',"
        " 'ftrun.worker.snapshot_session', 'ftrun.worker.capture.capture', 'ftrun.linux')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


class Ema:
    """An object of the script's own whose state_dict fails on demand."""

    def __init__(self) -> None:
        self.decay = 0.9
        self.is_broken = False

    def state_dict(self) -> dict[str, object]:
        if self.is_broken:
            raise KeyError("shadow")
        return {"decay": self.decay}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.decay = state["decay"]


@contextmanager
def attached(*given: object, **named: object) -> Iterator[Session]:
    session = ftrun.attach(*given, **named)
    try:
        yield session
    finally:
        session.close()


def test_model_optimizer_and_scheduler_may_be_given_by_position() -> None:
    model, optimizer = made()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with attached(model, optimizer, scheduler, scaler=torch.amp.GradScaler("cpu")) as session:
        assert list(session.steps(1)) == [0]


def test_several_optimizers_may_be_given_as_a_list(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizers = [torch.optim.SGD(part.parameters(), 0.1, momentum=0.9) for part in model]
    with attached(model, optimizer=optimizers) as session:
        for _ in session.steps(3):
            model(torch.ones(1, 2)).sum().backward()
            for one in optimizers:
                one.step()
    assert messages(caplog) == []


def test_a_loader_in_the_place_of_a_scheduler_is_refused_by_name() -> None:
    model, optimizer = made()
    with pytest.raises(UsageError, match=r"scheduler.*loader=loader"):
        ftrun.attach(model, optimizer, DataLoader(range(2)))


def test_the_name_that_ftrun_uses_itself_is_refused() -> None:
    with pytest.raises(UsageError, match="session"):
        ftrun.attach(nn.Linear(2, 2), session={})


def test_a_value_that_cannot_be_stored_is_named_under_plain_python() -> None:
    with pytest.raises(
        ValueNotStorable, match=r"progress\.lock holds a .*skip=\['progress\.lock'\]"
    ):
        ftrun.attach(nn.Linear(2, 2), progress={"lock": Lock()})
    with attached(nn.Linear(2, 2), progress={"lock": Lock()}, skip=["progress.lock"]):
        pass


def test_an_optimizer_whose_state_cannot_be_stored_is_named_after_its_first_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, optimizer = made()
    with attached(model, optimizer) as session:
        for _ in session.steps(3):
            optimizer.state[model.weight]["lock"] = Lock()
            optimizer.step()
    [line] = messages(caplog)
    assert "UNPROTECTED" in line
    assert "optimizer.state.model.weight.lock" in line


def test_an_exception_in_the_scripts_own_state_dict_is_named_as_the_scripts() -> None:
    ema = Ema()
    ema.is_broken = True
    with pytest.raises(
        StateDictFailed, match=r"Ema.state_dict\(\) of ema.*KeyError: 'shadow'"
    ) as found:
        ftrun.attach(nn.Linear(2, 2), ema=ema)
    assert isinstance(found.value.__cause__, KeyError)
    assert not session_module.is_attached()


def test_a_pattern_to_skip_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"state\.x"):
        ftrun.attach(nn.Linear(2, 2), skip=["state.x"])


def test_a_pattern_that_may_match_later_is_named_if_it_does_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    skip = ["model.nothing", "session.state.lock"]
    with attached(nn.Linear(2, 2), skip=skip) as session:
        for _ in session.steps(3):
            session.state["lock"] = Lock()
    [line] = messages(caplog)
    assert "model.nothing has matched nothing" in line


def test_a_parameter_that_is_trained_is_not_skipped() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"model\.weight.*optimizer"):
        ftrun.attach(model, torch.optim.SGD(model.parameters(), 0.1), skip=["model.*"])


def trained(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def test_a_turn_left_by_break_after_the_optimizer_has_stepped_is_a_step() -> None:
    model, optimizer = made()
    loader = DataLoader(range(4))
    with attached(model, optimizer, loader=loader) as session:
        for _ in session.epochs(5):
            for _ in session.batches(loader):
                trained(session, model, optimizer)
                if session.step == 5:
                    break
            if session.step >= 6:
                break
        assert session.step == 6


def test_a_turn_left_by_return_is_one_too() -> None:
    model, optimizer = made()

    def train(session: Session) -> None:
        for at in session.steps(9):
            trained(session, model, optimizer)
            if at == 2:
                return

    with attached(model, optimizer) as session:
        train(session)
        assert session.step == 3


def handed_on(loop: Iterator[int]) -> Iterator[int]:
    yield from loop


def changed(loop: Iterator[int]) -> Iterator[int]:
    for step in loop:
        yield step + 1


@pytest.mark.parametrize("around", [iter, enumerate, handed_on, changed])
def test_a_turn_left_by_an_exception_is_no_step_although_an_optimizer_has_stepped(
    around: Callable[[Iterator[int]], Iterator[object]],
) -> None:
    model, optimizer = made()
    with attached(model, optimizer) as session:
        try:
            for _ in around(session.steps(9)):
                trained(session, model, optimizer)
                _ = {}["missing"] if session.step == 3 else None
        except KeyError:
            pass
        assert session.step == 3


class Bar:
    """A progress bar like tqdm: a generator around its iterable, which it keeps."""

    def __init__(self, iterable: Iterator[int]) -> None:
        self.iterable = iterable
        self.count = 0

    def __iter__(self) -> Iterator[int]:
        iterable = self.iterable
        try:
            for one in iterable:
                self.count += 1
                yield one
        finally:
            self.count = -1


AROUND = [iter, Bar, handed_on, changed, lambda loop: Bar(Bar(loop)), lambda loop: loop]


@pytest.mark.parametrize(
    ("around", "is_held"),
    [*((one, False) for one in AROUND), (Bar, True), (lambda loop: loop, True)],
)
def test_a_turn_left_by_break_is_a_step_inside_a_progress_bar_too(
    around: Callable[[Iterator[int]], Iterator[int]], is_held: bool
) -> None:
    model, optimizer = made()

    def train(session: Session) -> None:
        bar = around(session.steps(9)) if is_held else None
        for _ in bar or around(session.steps(9)):
            trained(session, model, optimizer)
            if session.step == 3:
                break
        assert session.step == 4

    with attached(model, optimizer) as session:
        train(session)


def test_a_turn_left_by_break_is_a_step_although_an_old_traceback_is_held() -> None:
    model, optimizer = made()
    errors: list[Exception] = []
    with attached(model, optimizer) as session:
        for _ in session.steps(9):
            trained(session, model, optimizer)
            try:
                raise KeyError  # noqa: TRY301 - its traceback refers to this frame
            except KeyError as error:
                errors.append(error)
            if session.step == 3:
                break
        assert session.step == 4


def test_a_loop_that_ends_with_its_surrounding_block_has_its_last_turn() -> None:
    model, optimizer = made()
    with attached(model, optimizer) as session:
        for _ in islice(session.steps(9), 3):
            trained(session, model, optimizer)
        assert session.step == 3


def test_a_loop_that_the_next_item_of_another_iterator_ends_by_an_exception_is_not_left() -> None:
    def failing() -> Iterator[int]:
        yield 0
        raise TimeoutError

    with attached(nn.Linear(2, 2)) as session:
        with pytest.raises(TimeoutError):
            for _ in zip(session.steps(9), failing(), strict=False):
                pass
        assert not session._steps_left


def test_a_loop_that_something_else_holds_is_not_taken_for_left() -> None:
    """It is closed later, when the state may be another one."""
    model, optimizer = made()
    with attached(model, optimizer) as session:
        loop = iter(session.steps(9))
        for _ in loop:
            trained(session, model, optimizer)
            break
        model.weight.data.zero_()
        del loop  # by the same frame
        assert session.step == 0


def test_until_ends_the_batches_and_the_epochs_around_them(session: Session) -> None:
    loader = DataLoader(range(4))
    seen = [
        (epoch, int(batch))
        for epoch in session.epochs(9)
        for batch in session.batches(loader, until=6)
    ]
    assert seen == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]
    assert session.step == 6
    assert [int(batch) for _ in session.epochs() for batch in session.batches(loader, until=7)] == [
        2
    ]


def test_passes_until_a_number_of_steps_continue_where_they_stopped(session: Session) -> None:
    loader = DataLoader(range(4))
    seen: list[int] = []
    for until in (3, 6):
        while session.step < until:
            seen += [int(batch) for batch in session.batches(loader, until=until)]
    assert seen == [0, 1, 2, 3, 0, 1]


def test_until_is_refused_where_another_loop_counts(session: Session) -> None:
    for _ in session.steps(1):
        with pytest.raises(UsageError, match="until"):
            next(session.batches(DataLoader(range(4)), until=3))


def test_the_index_of_a_batch_is_that_in_its_pass(session: Session) -> None:
    loader = DataLoader(range(3))
    seen = [session.batch_index for _ in session.epochs(2) for _ in session.batches(loader)]
    assert seen == [0, 1, 2, 0, 1, 2]
    with pytest.raises(UsageError):
        _ = session.batch_index


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another one, without groups and state of its own, like Accelerate's."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def step(self) -> None:  # type: ignore[override]
        self.inner.step()


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_wrapper_around_an_optimizer_is_checked_under_plain_python_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Linear(2, 2)
    optimizer = Wrapper(torch.optim.SGD(model.parameters(), 0.1))
    with attached(model, optimizer) as session:
        for _ in session.steps(3):
            trained(session, model, optimizer)
    assert messages(caplog) == []


def test_an_optimizer_that_cannot_be_captured_is_refused_under_plain_python_too() -> None:
    model, optimizer = made()
    optimizer._overlap_with_ddp = True
    with pytest.raises(UsageError, match="overlap_with_ddp"):
        ftrun.attach(model, optimizer)
    assert not session_module.is_attached()


def add_module(model: nn.Module) -> torch.optim.Optimizer | None:
    model.add_module("extra", nn.Linear(2, 2))
    return None


def use_another_optimizer(model: nn.Module) -> torch.optim.Optimizer | None:
    return torch.optim.SGD(model.parameters(), 0.1)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (add_module, "parameter model.extra.weight was added after attach"),
        (use_another_optimizer, "optimizer SGD, which updates model.0.weight and 1 more, is not"),
    ],
)
def test_what_would_be_unprotected_is_reported_under_plain_python(
    caplog: pytest.LogCaptureFixture,
    change: Callable[[nn.Module], torch.optim.Optimizer | None],
    found: str,
) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with attached(model, optimizer) as session:
        other = None
        for step in session.steps(3):
            other = other if step else change(model)
            trained(session, model, other or optimizer)
    [line] = messages(caplog)
    assert line.startswith("under ftrun, this script would be UNPROTECTED: ")
    assert found in line
