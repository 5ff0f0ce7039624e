"""A sealed snapshot always holds the state of its boundary, whatever the script does to it.

Each test trains with one known way to break lazy copies, in this process, against a real SMP,
and compares the newest sealed slot with what the state was at that boundary.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from ftrun import clock
from ftrun.ids import Generation, Incarnation, Rank, RunId, version
from ftrun.wire import messages as m
from ftrun.wire.arena import Arena, verify
from ftrun.wire.channel import connect
from ftrun.wire.pages import Beat, Command, Page, create_command_page, create_page
from ftrun.worker.attached import Attached, by_name
from ftrun.worker.context import SnapshotSettings, WorkerContext
from ftrun.worker.copying import entry_view
from ftrun.worker.session import Session

RUN = RunId("laziness")
WIDTH = 600  # 600 x 600 floats are large enough to be copied in pieces


class Run:
    """One worker's context, and the SMP behind it."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "smp.sock"
        self.smp = subprocess.Popen(
            [
                *(sys.executable, "-m", "ftrun.smp", "--run-id", RUN),
                *("--socket", str(self.socket), "--orphan-s", "60"),
            ]
        )
        give_up_s = clock.now_s() + 30
        while not self.socket.exists() and clock.now_s() < give_up_s:
            os.sched_yield()
        hello = m.Hello(role="agent", pid=os.getpid())
        self.agent = connect(self.socket, run_id=RUN, peer="the SMP", hello=hello, deadline_s=10)
        command_fd, beat_fd = create_command_page(), create_page("beat")
        self.commands, self.page = Page(command_fd), Page(beat_fd)
        self.agent.ask(m.BeginGeneration(0, 1, [0]), fds=(command_fd,))
        self.settings = SnapshotSettings(every=1, commit_wait_s=5)
        self.sessions: list[Session] = []

    def attach(self, **given: object) -> Session:
        context = WorkerContext(
            run_id=RUN,
            rank=Rank(0),
            world_size=1,
            generation=Generation(0),
            incarnation=Incarnation(0),
            page=self.page,
            commands=self.commands,
            arena_fd=None,
            restore=None,
            smp_socket=self.socket,
            settings=self.settings,
        )
        attached = Attached()
        for argument, thing in given.items():
            models = ("model", "optimizer", "scheduler")
            found = by_name(argument, thing) if argument in models else {argument: thing}
            for name, one in found.items():
                attached.add(name, one)
        made = Session(attached, {}, context, None)
        self.sessions.append(made)
        return made

    def saved(self) -> tuple[int, dict[str, torch.Tensor]]:
        """The newest committed step and its tensors, out of the SMP's memory."""
        step = self.page.get(Beat.SEALED_STEP)
        give_up_s = clock.now_s() + 10
        while self.commands.get(Command.COMMITTED_STEP) != step and clock.now_s() < give_up_s:
            os.sched_yield()
        answer = self.agent
        answer.send(m.HandOver())
        received = answer.receive(deadline_s=10)
        while not isinstance(received.body, m.HandedOver):
            received = answer.receive(deadline_s=10)
        for fd in received.fds:
            arena = Arena(fd, writable=True)
            slot = arena.find(version(0, step))
            if slot is not None:
                layout, data = verify(arena, slot, what="test")
                whole = torch.frombuffer(data, dtype=torch.uint8)
                return step, {e.name: entry_view(whole, e).clone() for e in layout.entries}
        raise AssertionError(f"step {step} is not there")

    def close(self) -> None:
        for one in self.sessions:
            one.close()
        self.agent.close()
        self.smp.terminate()
        self.smp.wait(20)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.close()


def train(
    run: Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    turns: int = 8,
    before: Callable[[], object] = lambda: None,
    step: Callable[[], object] | None = None,
    watched: dict[str, nn.Module] | None = None,
    **named: object,
) -> None:
    """Train, remember the state at each boundary, and compare what was committed with it."""
    session = run.attach(model=model, optimizer=optimizer, **named)
    seen: dict[int, dict[str, torch.Tensor]] = {}
    parts = {"model": model, **(watched or {})}
    for at in session.steps(turns):
        if at:
            seen[at] = states(parts)
        before()
        optimizer.zero_grad()
        model(torch.ones(4, WIDTH)).square().mean().backward()
        (step or optimizer.step)()
    seen[turns] = states(parts)
    done, saved = run.saved()
    assert done >= turns - 2
    for name, tensor in seen[done].items():
        assert torch.equal(saved[name], tensor), name


def states(parts: dict[str, nn.Module]) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{key}": tensor.clone()
        for name, part in parts.items()
        for key, tensor in part.state_dict().items()
    }


def made(
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def test_a_plain_loop_discards_nothing_and_skips_nothing(run: Run) -> None:
    train(run, *made())
    assert run.page.get(Beat.SEALED_COUNT) == 8
    assert run.page.get(Beat.DISCARDED_COUNT) == run.page.get(Beat.SKIPPED_COUNT) == 0


def test_weights_clipped_through_data_before_the_forward_are_found(run: Run) -> None:
    model, optimizer = made()
    weight = model[0].weight
    train(run, model, optimizer, before=lambda: weight.data.mul_(0.9))
    assert run.page.get(Beat.DISCARDED_COUNT) == 1
    assert "model.0.weight" in run.page.note


def test_weights_copied_under_no_grad_before_the_forward_are_found(run: Run) -> None:
    model, optimizer = made()
    weight = model[0].weight

    def change() -> None:
        with torch.no_grad():
            weight.copy_(weight * 0.9)

    run.settings = SnapshotSettings(every=1, commit_wait_s=5, proof_first=0)
    train(run, model, optimizer, before=change)
    assert 1 <= run.page.get(Beat.DISCARDED_COUNT) <= 2
    assert "model.0.weight" in run.page.note


def test_new_memory_behind_a_parameter_is_found(run: Run) -> None:
    model, optimizer = made()
    weight = model[0].weight

    def change() -> None:
        weight.data = weight.data * 0.9

    train(run, model, optimizer, before=change)


def test_weights_clipped_after_the_step_are_no_harm(run: Run) -> None:
    model, optimizer = made()

    def step() -> None:
        optimizer.step()
        model[0].weight.data.clamp_(-0.01, 0.01)

    train(run, model, optimizer, step=step)
    assert run.page.get(Beat.DISCARDED_COUNT) == 0


def test_a_softly_updated_target_network_is_copied_at_the_boundary(run: Run) -> None:
    model, optimizer = made()
    target, _ = made()

    def update() -> None:
        with torch.no_grad():
            for mine, theirs in zip(target.parameters(), model.parameters(), strict=True):
                mine.data.copy_(mine.data * 0.9 + theirs.data * 0.1)

    train(run, model, optimizer, before=update, target=target, watched={"target": target})
    assert run.page.get(Beat.DISCARDED_COUNT) == 0


def test_an_optimizer_inside_the_backward_waits_for_the_copy(run: Run) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    by_index = {str(at): one for at, one in enumerate(optimizers.values())}
    session = run.attach(model=model, optimizer=by_index)
    for _ in session.steps(6):
        model(torch.ones(4, WIDTH)).square().mean().backward()
    end = states({"model": model})
    done, saved = run.saved()
    assert done == 6
    assert all(torch.equal(saved[name], tensor) for name, tensor in end.items())
    assert run.page.get(Beat.DISCARDED_COUNT) == 0


def test_a_step_that_no_hook_sees_is_found(run: Run) -> None:
    model, optimizer = made()

    def step() -> None:  # like a compiled step: in place, and past torch's hooks
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)

    train(run, model, optimizer, step=step)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, while tracing
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_step_is_saved_right(run: Run, backend: str) -> None:
    model, optimizer = made()
    step = torch.compile(optimizer.step, backend=backend)
    train(run, model, optimizer, step=step)
    assert run.page.get(Beat.SEALED_COUNT) >= 6


def test_batchnorm_and_an_average_of_the_model_are_saved_as_they_were(run: Run) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    train(
        run,
        model,
        optimizer,
        before=lambda: average.update_parameters(model),
        ema=average,
        watched={"ema": average},
    )
    assert run.page.get(Beat.DISCARDED_COUNT) == 0


def test_a_group_added_later_gets_new_memory(run: Run) -> None:
    model, optimizer = made()
    extra = nn.Linear(WIDTH, 2)
    session = run.attach(model={"a": model, "b": extra}, optimizer=optimizer)
    for at in session.steps(6):
        if at == 3:
            optimizer.add_param_group({"params": list(extra.parameters())})
        optimizer.zero_grad()
        x = torch.ones(4, WIDTH)
        (model(x).square().mean() + extra(x).square().mean()).backward()
        optimizer.step()
    done, saved = run.saved()
    assert done == 6
    assert torch.equal(saved["model.b.weight"], extra.weight)
    assert any(name.startswith("optimizer.state.model.b.weight") for name in saved)


def test_nothing_is_taken_in_the_middle_of_an_accumulation(run: Run) -> None:
    model, optimizer = made()
    session = run.attach(model=model, optimizer=optimizer)
    for at in session.steps(8):
        model(torch.ones(4, WIDTH)).square().mean().backward()
        if at % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    assert run.page.get(Beat.SEALED_COUNT) == 2
    assert run.saved()[0] == 8


def test_a_value_that_appears_later_and_cannot_be_stored_costs_protection_only(run: Run) -> None:
    model, optimizer = made()
    notes: dict[str, object] = {}
    session = run.attach(model=model, optimizer=optimizer, notes=notes)
    for at in session.steps(4):
        if at == 2:
            notes["fn"] = len
        optimizer.zero_grad()
        model(torch.ones(4, WIDTH)).square().mean().backward()
        optimizer.step()
    assert session.step == 4
    assert run.page.get(Beat.UNPROTECTED) == 1
    assert "notes.fn" in run.page.note
