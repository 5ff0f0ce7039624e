"""State of a session in addition to models and optimizers, and how its loops continue.

Each test trains in this process against a real SMP, as `test_capture_and_restore.py` does.
"""

import collections
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import ftrun
from ftrun import clock
from ftrun.config.profile import SnapshotConfig
from ftrun.errors import UsageError
from ftrun.wire.shared_memory.pages import CommandField, HeartbeatField
from ftrun.worker.session import Session
from ftrun.worker.state.data_position import DataPosition
from tests.integration.in_process_worker import TIMEOUT_S, Run

EVERY_THIRD = SnapshotConfig(every=3, commit_timeout_s=TIMEOUT_S)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.close()


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 3)
    return model, torch.optim.SGD(model.parameters(), 0.1)


def begin(run: Run, **named: object) -> tuple[Session, nn.Module, torch.optim.Optimizer]:
    model, optimizer = parts()
    return run.attach(model=model, optimizer=optimizer, **named), model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.rand(2, 3)).sum().backward()
    optimizer.step()


def test_a_boundary_waits_for_the_lease_where_no_optimizer_steps(run: Run) -> None:
    session, *_ = begin(run)
    turns = iter(session.steps(3))
    next(turns)
    run.commands.set(CommandField.LEASE_NS, 1)
    turning = threading.Thread(target=next, args=(turns,), daemon=True)
    turning.start()
    turning.join(0.3)
    assert turning.is_alive()
    assert run.page.get(HeartbeatField.STEP) == 0
    run.commands.set(CommandField.LEASE_NS, clock.now_ns() + 10**12)
    turning.join(TIMEOUT_S)
    assert not turning.is_alive()
    run.commands.set(CommandField.LEASE_NS, 0)


def test_the_state_of_a_session_comes_back_as_it_was_at_the_boundary(run: Run) -> None:
    session, model, optimizer = begin(run)
    assert session.state == {}
    session.state.update(best=1.5, batch=[torch.arange(3), np.arange(2)], nested={"seen": {1, 2}})
    for step in session.steps(2):
        train(model, optimizer)
        session.state["best"] = 0.5 - step
        session.state["batch"][0] += 1
    session.state["best"] = 99.0  # after the last boundary

    session, *_ = begin(run)
    assert session.restored
    assert session.state["best"] == -0.5
    assert session.state["batch"][0].tolist() == [2, 3, 4]
    assert session.state["batch"][1].tolist() == [0, 1]
    assert session.state["nested"] == {"seen": {1, 2}}


def test_what_the_script_holds_of_its_state_stays_in_it_when_weights_are_put_back(
    run: Run,
) -> None:
    progress: dict[str, list[int]] = {"steps": []}
    session, model, optimizer = begin(run, progress=progress)
    history = session.state.setdefault("history", [])
    for step in session.steps(3):
        train(model, optimizer)
        history.append(step)
        progress["steps"].append(step)

    session, model, optimizer = begin(run, progress=progress)
    assert session.state == {"history": [0, 1, 2]}
    history, steps = session.state["history"], progress["steps"]
    session.state["restarts"] = 1
    with torch.no_grad():
        model.weight.zero_()  # the restored state is put in place again
    for step in session.steps(6):
        assert step > 3 or model.weight.any()
        train(model, optimizer)
        history.append(step)
        steps.append(step)

    session, *_ = begin(run, progress=progress)
    assert session.state == {"history": [*range(6)], "restarts": 1}
    assert progress == {"steps": [*range(6)]}


@pytest.mark.filterwarnings("error")
def test_a_reported_loss_may_require_a_gradient(run: Run) -> None:
    session, model, _ = begin(run)
    loss = model(torch.ones(1, 3)).sum()
    session.report(loss=loss)
    assert run.page.loss == loss.item()


def test_a_run_without_a_state_of_its_own_is_restored_by_a_script_that_has_one(run: Run) -> None:
    session, model, optimizer = begin(run)
    for _ in session.steps(1):
        train(model, optimizer)
    session, *_ = begin(run)
    assert session.state == {}
    assert session.step == 1


def test_generators_of_torch_numpy_and_python_continue_where_they_were(run: Run) -> None:
    def made() -> dict[str, object]:
        return {
            "torch_rng": torch.Generator().manual_seed(1),
            "pcg": np.random.default_rng(1),
            "mersenne": np.random.Generator(np.random.MT19937(1)),
            "philox": np.random.Philox(1),
            "legacy": np.random.RandomState(1),
            "python_rng": random.Random(1),
            "several": [np.random.Generator(np.random.SFC64(1)), random.Random(2)],
        }

    def draw(given: dict[str, object]) -> list[float]:
        one, other = given["several"]
        philox = np.random.Generator(given["philox"])
        return [
            torch.rand(1, generator=given["torch_rng"]).item(),
            *(given[name].random() for name in ("pcg", "mersenne")),
            philox.random(),
            # The second number of a pair, which Python and numpy keep.
            given["legacy"].standard_normal(),
            given["python_rng"].gauss(0, 1),
            one.random(),
            other.gauss(0, 1),
        ]

    given = made()
    session, model, optimizer = begin(run, **given)
    for _ in session.steps(3):
        train(model, optimizer)
        draw(given)
    expected = draw(given)

    again = made()
    begin(run, **again)
    assert draw(again) == expected


class Counter:
    """Two numbers of the script's own."""

    def __init__(self) -> None:
        self.values = {"count": 0, "start": 0}

    def state_dict(self) -> dict[str, int]:
        return dict(self.values)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.values = dict(state)


def test_what_is_skipped_is_in_no_snapshot_and_keeps_the_scripts_own_value(run: Run) -> None:
    skip = ["model.1.*", "progress.*.lock", "counter.start"]

    def made(value: float) -> dict[str, object]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False))
        model[1].running_mean.fill_(value)
        counter = Counter()
        counter.values["start"] = int(value)
        return {
            "model": model,
            "optimizer": torch.optim.SGD(model[0].parameters(), 0.1),
            "progress": {"inner": {"lock": object(), "best": value}},
            "counter": counter,
            "skip": skip,
        }

    given = made(1.0)
    lock = given["progress"]["inner"]["lock"]
    session = run.attach(**given)
    for step in session.steps(2):
        train(given["model"], given["optimizer"])
        given["progress"]["inner"]["best"] = step
        given["counter"].values.update(count=step, start=5)
    names = run.saved()[1]
    assert "model.0.weight" in names
    assert [name for name in names if name.startswith("model.1")] == []

    again = made(7.0)
    own = again["progress"]["inner"]["lock"]
    assert own is not lock
    session = run.attach(**again)
    assert session.restored
    assert again["model"][1].running_mean.tolist() == [7.0] * 3
    assert again["progress"]["inner"] == {"best": 1, "lock": own}
    assert again["counter"].values == {"count": 1, "start": 7}


def test_skipped_values_of_optimizers_modules_and_lists_stay_as_the_script_has_them(
    run: Run,
) -> None:
    class Noted(nn.Linear):
        def get_extra_state(self) -> dict[str, object]:
            return self.extra  # type: ignore[return-value]

        def set_extra_state(self, state: dict[str, object]) -> None:
            self.extra = state  # type: ignore[assignment]

    def made(value: int) -> dict[str, object]:
        model = Noted(3, 3)
        model.extra = {"lock": Lock(), "seen": value}  # type: ignore[assignment]
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        optimizer.param_groups[0].update(cache=Lock(), notes=[value, value])
        optimizer.state[model.weight].update(lock=Lock(), seen=value)
        skip = ["optimizer[0].cache", "optimizer[0].notes[1]", "optimizer.state.*.lock",
                "model._extra_state.lock", "progress.notes[0]", "gone", "history"]  # fmt: skip
        return {"model": model, "optimizer": optimizer, "skip": skip,
                "progress": {"notes": [Lock(), value]}, "gone": {"at": value},
                "history": Counter()}  # fmt: skip

    given = made(1)
    session = run.attach(**given)
    for _ in session.steps(2):
        train(given["model"], given["optimizer"])

    given = made(7)
    model, optimizer = given["model"], given["optimizer"]
    group, state = optimizer.param_groups[0], optimizer.state[model.weight]
    own = (model.extra["lock"], group["cache"], state["lock"], given["progress"]["notes"][0])
    session = run.attach(**given)
    assert session.restored
    group, state = optimizer.param_groups[0], optimizer.state[model.weight]
    assert own == (
        model.extra["lock"], group["cache"], state["lock"], given["progress"]["notes"][0]
    )  # fmt: skip
    assert (model.extra["seen"], group["notes"], state["seen"]) == (1, [1, 7], 1)
    assert given["progress"]["notes"][1] == 1
    assert given["gone"] == {"at": 7}


def test_types_of_the_state_come_back_or_are_refused_by_name(run: Run) -> None:
    session, model, optimizer = begin(run, progress={"count": collections.Counter("aab")})
    session.state["seen"] = collections.defaultdict(list, a=[1])
    for step in session.steps(2):
        train(model, optimizer)
        session.state["batch"] = collections.UserDict(x=1) if step == 0 else {"x": 1}
        if step:
            assert "session.state.batch holds a collections.UserDict" in run.page.note
    progress: dict[str, object] = {}
    session, *_ = begin(run, progress=progress)
    session.state["seen"]["b"].append(2)
    assert session.state["seen"] == {"a": [1], "b": [2]}
    assert progress["count"].most_common(1) == [("a", 2)]


def test_a_pattern_that_begins_with_nothing_attached_is_refused_in_a_run_too(run: Run) -> None:
    with pytest.raises(UsageError, match="typo"):
        begin(run, progress={"best": 1}, skip=["typo.progress"])


def test_the_first_restore_of_a_run_reports_what_is_not_restored(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    session, model, optimizer = begin(run)
    session.state["best"] = 1
    for _ in session.steps(1):
        train(model, optimizer)
    for _ in range(2):
        session, model, optimizer = begin(run)
        for _ in session.steps(session.step + 1):
            train(model, optimizer)
    lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if "Local variables" in line]) == 1
    said = [line for line in lines if "step 1 is restored" in line and "best" in line]
    assert said
    assert "random generators" in said[0]


class Bar:
    """A progress bar, like tqdm: a generator around its argument."""

    def __init__(self, iterable: Iterator[int]) -> None:
        self.iterable = iterable
        self.count = 0

    def __iter__(self) -> Iterator[int]:
        for one in self.iterable:
            self.count += 1
            yield one


@pytest.mark.parametrize("in_bar", [False, True])
def test_a_loop_left_by_break_has_its_last_step_in_a_snapshot_and_no_turn_after_a_restart(
    run: Run, in_bar: bool
) -> None:
    run.settings = EVERY_THIRD
    session, model, optimizer = begin(run)
    for step in Bar(session.steps(9)) if in_bar else session.steps(9):
        train(model, optimizer)
        if step == 4:
            break
    assert run.saved()[0] == session.step == 5
    weight = model.weight.clone()
    drawn = torch.rand(1)

    session, model, optimizer = begin(run)
    assert [*session.steps(9)] == []
    assert torch.equal(model.weight, weight)
    assert torch.equal(torch.rand(1), drawn)


@pytest.mark.parametrize("in_epochs", [False, True])
def test_a_loop_left_by_break_has_no_turn_after_a_restart_in_the_loop_behind_it(
    run: Run, in_epochs: bool
) -> None:
    seen: list[object] = []

    def loop(
        session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, end: int = 30
    ) -> list[object]:
        for epoch in session.epochs(3) if in_epochs else [0]:
            for step in session.steps(10 * epoch + 8):
                seen.append(("warm-up", step))
                train(model, optimizer)
                if step == 10 * epoch + 3:
                    break
            for step in session.steps(10 * epoch + 8):
                seen.append(("main", step))
                if step == end:
                    raise TimeoutError
                train(model, optimizer)
        return seen

    expected = [*undisturbed(loop)]
    seen.clear()
    torch.manual_seed(3)
    with pytest.raises(TimeoutError):
        loop(*begin(run), end=16 if in_epochs else 6)
    run.saved()
    seen.pop()  # this turn is repeated
    assert loop(*begin(run)) == expected


def test_the_steps_before_a_break_at_the_top_of_a_turn_are_in_a_snapshot(run: Run) -> None:
    run.settings = EVERY_THIRD
    session, model, optimizer = begin(run)
    for _ in session.steps(9):
        if session.step == 5:
            break
        train(model, optimizer)
    assert run.saved()[0] == session.step == 5
    weight = model.weight.clone()

    session, model, _ = begin(run)
    assert [*session.steps(9)] == []
    assert torch.equal(model.weight, weight)


def test_a_loop_that_is_closed_later_reports_which_step_is_kept(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run.settings = EVERY_THIRD
    session, model, optimizer = begin(run)
    loop = iter(session.steps(9))
    for step in loop:
        train(model, optimizer)
        if step == 4:
            break
    del loop
    assert run.saved()[0] == 3
    lines = [record.getMessage() for record in caplog.records]
    (line,) = [one for one in lines if one.startswith("no snapshot at step 5:")]
    assert line.endswith("The newest snapshot is of step 3")


def test_an_exception_takes_no_snapshot_of_half_a_turn(run: Run) -> None:
    run.settings = EVERY_THIRD
    session, model, optimizer = begin(run)
    with pytest.raises(KeyError):  # noqa: PT012 - the loop is what raises
        for step in session.steps(9):
            train(model, optimizer)
            _ = {}["missing"] if step == 4 else None
    assert run.saved()[0] == 3


def undisturbed(loop: Callable[..., list[object]]) -> list[object]:
    """The values of the loop under plain python."""
    torch.manual_seed(3)
    model, optimizer = parts()
    session = ftrun.attach(model, optimizer)
    try:
        return loop(session, model, optimizer)
    finally:
        session.close()


def test_batches_left_by_break_end_their_pass_and_the_epochs_continue(run: Run) -> None:
    loader = DataLoader(torch.arange(6), shuffle=True)

    def loop(
        session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, last: int = 3
    ) -> list[object]:
        seen: list[object] = []
        for epoch in session.epochs(last):
            for batch in session.batches(loader):
                seen.append((epoch, int(batch)))
                train(model, optimizer)
                if session.batch_index == 3:
                    break
            seen.append("evaluated")
        return seen

    expected = undisturbed(loop)
    torch.manual_seed(3)
    assert loop(*begin(run), last=1) == expected[:5]
    # The snapshot is of the break, so the end of that epoch is repeated.
    assert loop(*begin(run)) == expected[4:]


@pytest.mark.parametrize("taken", [2, 4])
def test_batches_inside_steps_begin_a_new_pass_in_each_turn_after_restarts_too(
    run: Run, taken: int
) -> None:
    loader = DataLoader(torch.arange(8), batch_size=2, shuffle=True)

    def loop(
        session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, last: int = 6
    ) -> list[object]:
        seen: list[object] = []
        for step in session.steps(last):
            for index, batch in enumerate(session.batches(loader)):
                seen.append((step, batch.tolist()))
                if index + 1 == taken:
                    break
            train(model, optimizer)
            seen.append(torch.rand(1).item())
        return seen

    expected = undisturbed(loop)
    torch.manual_seed(3)
    found = loop(*begin(run), last=2)
    for last in (3, 6):
        torch.manual_seed(99)
        found += loop(*begin(run), last=last)
    assert found == expected


def test_a_generator_of_a_loader_that_the_script_seeds_after_attach_continues(run: Run) -> None:
    generator = torch.Generator()
    loader = DataLoader(torch.arange(8), batch_size=2, shuffle=True, generator=generator)

    def loop(
        session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, last: int = 5
    ) -> list[object]:
        generator.manual_seed(4)
        seen: list[object] = []
        for _ in session.steps(last):
            train(model, optimizer)
            seen.append(torch.rand(1, generator=generator).item())
            seen += [batch.tolist() for batch in session.batches(loader)]
        return seen

    expected = undisturbed(loop)
    torch.manual_seed(3)
    found = loop(*begin(run, feeds={"loader": DataPosition("loader", loader)}), last=2)
    found += loop(*begin(run, feeds={"loader": DataPosition("loader", loader)}))
    assert found == expected


@pytest.mark.parametrize("first", [2, 4, 5])
def test_until_continues_in_the_same_pass_after_a_restart_as_without_one(
    run: Run, first: int
) -> None:
    loader = DataLoader(torch.arange(4), shuffle=True)

    def loop(
        session: Session,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *untils: int,
    ) -> list[object]:
        seen: list[object] = []
        for until in untils or (first, 7):
            while session.step < until:
                for batch in session.batches(loader, until=until):
                    seen.append(int(batch))
                    train(model, optimizer)
        return [*seen, *torch.rand(2).tolist()]

    expected = undisturbed(loop)
    torch.manual_seed(3)
    assert loop(*begin(run), first)[:first] == expected[:first]
    assert run.saved()[0] == first
    assert loop(*begin(run)) == expected[first:]


@pytest.mark.parametrize("error", ["value", "state_dict"])
def test_a_value_that_cannot_be_stored_costs_the_snapshots_while_it_is_there(
    run: Run, error: str
) -> None:
    counter = Counter()
    session, model, optimizer = begin(run, counter=counter)
    notes: list[str] = []
    for step in session.steps(9):
        notes.append(run.page.note if run.page.get(HeartbeatField.UNPROTECTED) else "")
        train(model, optimizer)
        if step in (3, 6):
            bad = step == 3
            if error == "value":
                session.state.update(lock=Lock() if bad else None)
            else:
                counter.values = None if bad else {"count": step}
    assert run.saved()[0] == 9
    assert [bool(note) for note in notes[:7]] == [False] * 4 + [True] * 3
    named = {"value": "session.state.lock holds a _thread.lock", "state_dict": "Counter.state_dict"}
    assert all(named[error] in note for note in notes[4:7])
    assert not run.page.get(HeartbeatField.UNPROTECTED)
    assert run.page.get(HeartbeatField.SKIPPED_COUNT) == 3


def test_the_index_of_a_batch_continues_in_the_middle_of_a_pass(run: Run) -> None:
    loader = DataLoader(torch.arange(5), shuffle=True)

    def loop(
        session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, end: int = 99
    ) -> list[object]:
        seen: list[object] = []
        for epoch in session.epochs(2):
            for batch in session.batches(loader):
                if session.step == end:
                    raise TimeoutError(seen)
                seen.append((epoch, session.batch_index, int(batch)))
                train(model, optimizer)
        return seen

    expected = undisturbed(loop)
    torch.manual_seed(3)
    with pytest.raises(TimeoutError):
        loop(*begin(run), end=3)
    run.saved()
    assert loop(*begin(run)) == expected[3:]


def test_optimizers_given_as_a_list_come_back_each_with_its_own_state(run: Run) -> None:
    def made() -> tuple[Session, nn.Sequential, list[torch.optim.Optimizer]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        optimizers = [
            torch.optim.SGD(model[0].parameters(), 0.1, momentum=0.9),
            torch.optim.Adam(model[1].parameters(), 0.2),
        ]
        return run.attach(model=model, optimizer=optimizers), model, optimizers

    session, model, optimizers = made()
    for _ in session.steps(2):
        model(torch.rand(2, 2)).square().sum().backward()
        for one in optimizers:
            one.step()
    session, again, others = made()
    assert session.restored
    for one, its in zip(optimizers, others, strict=True):
        its_state = list(its.state.values())
        for state, other in zip(one.state.values(), its_state, strict=True):
            assert all(torch.equal(value, other[key]) for key, value in state.items())
    assert all(map(torch.equal, model.parameters(), again.parameters()))
