"""Changes of weights during their lazy copy never reach a sealed slot.

Each test trains in this process against a real SMP, stops the copy of one snapshot at a chosen
piece, changes tensors there, and compares every committed version with the state at its boundary.
No snapshot is verified by digests of all bytes (`verify_first=0`): the lazy copy check has to find
each change by itself.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ftrun.config.profile import SnapshotConfig
from ftrun.snapshot.layout import PIECE_BYTES
from ftrun.wire.shared_memory.pages import HeartbeatField
from ftrun.worker.capture import copying
from ftrun.worker.capture.boundaries import AccumulationTracker
from ftrun.worker.capture.lazy_check import LazyCopyCheck
from ftrun.worker.process import graph_captures, heartbeat
from ftrun.worker.session import Session
from ftrun.worker.state.optimizers import OptimizerWatch
from tests.integration.in_process_worker import TIMEOUT_S, WIDTH, Run, made

AT = 2
"""The step whose snapshot is stopped."""

LAST = 5

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with closing(Run(tmp_path)) as one:
        one.settings = SnapshotConfig(every=1, commit_timeout_s=TIMEOUT_S, verify_first=0)
        yield one


class Gate:
    """Stops the copy of one snapshot: before it begins, or before the digest of a large piece."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._stop_at = -1
        self._count = 0
        self._reached = threading.Event()
        self._may_continue = threading.Event()
        self._copy_lazy = copying.SlotCopy.copy_lazy
        self._digest = copying.digest_of
        monkeypatch.setattr(
            copying.SlotCopy, "copy_lazy", lambda copy, table: self._copy(copy, table)
        )
        monkeypatch.setattr(copying, "digest_of", self._digest_of)

    def stop_at(self, piece: int) -> None:
        """Stop the next copy at this large piece, counted from 1; 0: before it begins."""
        self._reached.clear()
        self._count, self._stop_at = 0, piece

    def wait(self) -> None:
        """Wait until the copy is paused."""
        assert self._reached.wait(TIMEOUT_S)

    def release(self, *, stop_at: int = -1) -> None:
        """Let the copy continue.

        Args:
            stop_at: the large piece at which it stops again.
        """
        self._stop_at = stop_at
        self._reached.clear()
        event, self._may_continue = self._may_continue, threading.Event()
        event.set()

    def _copy(self, copy: copying.SlotCopy, table: memoryview) -> None:
        if self._stop_at == 0:
            self._stop()
        self._copy_lazy(copy, table)

    def _digest_of(self, view: Any) -> int:
        if len(view) == PIECE_BYTES:
            self._count += 1
            if self._count == self._stop_at:
                self._stop()
        return self._digest(view)

    def _stop(self) -> None:
        may_continue = self._may_continue
        self._reached.set()
        assert may_continue.wait(TIMEOUT_S)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def train(
    run: Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    top: Callable[[int, Session], object],
    end: Callable[[int], object] = lambda at: None,
    forward: Callable[[], torch.Tensor] | None = None,
) -> None:
    """Train; compare the committed version of each iteration with the state at its boundary.

    `top` is called at the top of each iteration, `end` at its end, before the boundary; `forward`
    gives the model's output if the test has its own.
    """
    session = run.attach(model=model, optimizer=optimizer)
    seen: dict[int, Tensors] = {}
    for at in session.steps(LAST):
        seen[at] = state_of(model, optimizer)
        top(at, session)
        optimizer.zero_grad()
        out = forward() if forward else model(torch.ones(4, WIDTH))
        out.square().mean().backward()
        optimizer.step()
        if at:
            compare(run, seen)
        end(at)
    seen[LAST] = state_of(model, optimizer)
    compare(run, seen)
    assert run.page.get(HeartbeatField.SEALED_STEP) == LAST
    assert not run.page.get(HeartbeatField.UNPROTECTED)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    names = {parameter: name for name, parameter in model.named_parameters()}
    moments = {
        f"optimizer.state.model.{names[parameter]}.{key}": value.clone()
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }
    tensors = {
        f"model.{name}": tensor.detach().clone()
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    return tensors | moments


def compare(run: Run, seen: dict[int, Tensors]) -> None:
    done, saved = run.saved()
    for name, tensor in seen[done].items():
        assert torch.equal(saved[name], tensor), f"{name} of step {done}"


def stop_the_snapshot_of(step: int, gate: Gate, piece: int) -> Callable[[int], None]:
    """For `train(end=)`: the boundary of this step begins the snapshot that is stopped."""

    def end(at: int) -> None:
        if at == step - 1:
            gate.stop_at(piece)

    return end


def copied(session: Session) -> None:
    """Wait until the current copy has ended."""
    assert session._protection is not None
    assert session._protection._capture is not None
    session._protection._capture.finish()


@pytest.mark.parametrize("piece", [1, 3])
def test_a_swap_that_outlasts_the_copy_is_discarded_and_named(
    run: Run, gate: Gate, piece: int, caplog: pytest.LogCaptureFixture
) -> None:
    """From the second or fourth piece on, average weights are copied."""
    model, optimizer = made()
    weight = model[0].weight

    def top(at: int, session: Session) -> None:
        if at < AT:
            return
        backup = weight.detach().clone()
        if at == AT:
            gate.wait()
        weight.data.copy_(backup * 0.999)
        if at == AT:
            gate.release()
            copied(session)
        weight.data.copy_(backup)

    train(run, model, optimizer, top=top, end=stop_the_snapshot_of(AT, gate, piece))
    assert run.page.get(HeartbeatField.DISCARDED_COUNT) == 1
    assert run.page.get(HeartbeatField.SEALED_COUNT) == LAST - 1
    for text in (run.page.note, caplog.text):
        assert f"model.0.weight changed while the snapshot of step {AT} was copied" in text


def test_a_swap_that_ends_during_the_copy_is_discarded(run: Run, gate: Gate) -> None:
    """The first pieces are copied from average weights, the others from the right ones."""
    model, optimizer = made()
    weight = model[0].weight

    def end(at: int) -> None:
        if at == AT - 1:
            gate.stop_at(1)

    def top(at: int, session: Session) -> None:
        if at == AT:
            gate.wait()
            backup = weight.detach().clone()
            weight.data.mul_(0.5)
            gate.release(stop_at=3)
            gate.wait()
            weight.data.copy_(backup)
            gate.release()

    train(run, model, optimizer, top=top, end=end)
    assert run.page.get(HeartbeatField.DISCARDED_COUNT) == 1
    assert "model.0.weight" in run.page.note


def test_a_swap_between_the_copy_of_a_piece_and_its_digest_is_no_harm(run: Run, gate: Gate) -> None:
    """The piece that is changed is copied, and its digest is taken during the swap."""
    model, optimizer = made()
    piece = slice(4 * PIECE_BYTES // 4, 5 * PIECE_BYTES // 4)

    def top(at: int, session: Session) -> None:
        if at == AT:
            gate.wait()
            tensor = optimizer.state[model[0].weight]["exp_avg_sq"].view(-1)
            backup = tensor.clone()
            tensor.data[piece] = 7.0
            gate.release()
            copied(session)
            tensor.data.copy_(backup)

    # Three tensors of five large pieces and a rest each: parameter, exp_avg, exp_avg_sq.
    train(run, model, optimizer, top=top, end=stop_the_snapshot_of(AT, gate, 15))
    assert run.page.get(HeartbeatField.DISCARDED_COUNT) == 0


def test_a_change_that_stays_after_the_copy_costs_no_snapshot(run: Run) -> None:
    model, optimizer = made()

    def top(at: int, session: Session) -> None:
        if at >= AT:
            copied(session)
            model[0].weight.data.mul_(0.9)

    train(run, model, optimizer, top=top)
    assert run.page.get(HeartbeatField.DISCARDED_COUNT) == 0
    assert run.page.get(HeartbeatField.SEALED_COUNT) == LAST
    assert "model.0.weight changed between a step boundary and the optimizer step" in run.page.note


def test_a_swap_of_optimizer_state_is_discarded(run: Run, gate: Gate) -> None:
    model, optimizer = made()

    def top(at: int, session: Session) -> None:
        if at == AT:
            gate.wait()
            tensor = optimizer.state[model[0].weight]["exp_avg"]
            backup = tensor.clone()
            tensor.data.zero_()
            gate.release()
            copied(session)
            tensor.data.copy_(backup)

    train(run, model, optimizer, top=top, end=stop_the_snapshot_of(AT, gate, 3))
    assert run.page.get(HeartbeatField.DISCARDED_COUNT) == 1
    assert "optimizer.state.model.0.weight.exp_avg" in run.page.note


def test_other_memory_behind_a_weight_and_back_is_saved_right(run: Run, gate: Gate) -> None:
    model, optimizer = made()
    weight = model[0].weight

    def top(at: int, session: Session) -> None:
        if at == AT:
            gate.wait()
        own = weight.data
        weight.data = own * 0.9
        if at == AT:
            gate.release(stop_at=4)
            gate.wait()
        weight.data = own
        if at == AT:
            gate.release()

    train(run, model, optimizer, top=top, end=stop_the_snapshot_of(AT, gate, 2))
    assert run.page.get(HeartbeatField.DISCARDED_COUNT) == 0


def test_a_swap_of_a_weight_with_other_strides_is_discarded(run: Run, gate: Gate) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))
    model[0].weight = nn.Parameter(model[0].weight.detach().t().contiguous().t())
    assert not model[0].weight.is_contiguous()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = model[0].weight

    def top(at: int, session: Session) -> None:
        if at == AT:
            gate.wait()
            backup = weight.detach().clone()
            weight.data.mul_(0.5)
            gate.release()
            copied(session)
            weight.data.copy_(backup)

    train(run, model, optimizer, top=top, end=stop_the_snapshot_of(AT, gate, 0))
    assert run.page.get(HeartbeatField.DISCARDED_COUNT) == 1
    assert "model.0.weight" in run.page.note


def test_small_tensors_are_copied_before_the_script_can_change_them(run: Run, gate: Gate) -> None:
    model, optimizer = made()

    def top(at: int, session: Session) -> None:
        if at == AT:
            gate.wait()
        small = [p for p in model.parameters() if p.numel() <= WIDTH * 3]
        assert len(small) == 3
        backup = [p.detach().clone() for p in small]
        for parameter in small:
            parameter.data.zero_()
        if at == AT:
            gate.release()
            copied(session)
        for parameter, saved in zip(small, backup, strict=True):
            parameter.data.copy_(saved)

    train(run, model, optimizer, top=top, end=stop_the_snapshot_of(AT, gate, 0))
    assert run.page.get(HeartbeatField.DISCARDED_COUNT) == 0
    assert run.page.get(HeartbeatField.SEALED_COUNT) == LAST
    assert not run.page.note


@pytest.mark.parametrize("how", ["block", "statements", "the same again"])
def test_a_swap_inside_a_phase_waits_for_the_copy(
    run: Run, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    model, optimizer = made()
    weight = model[0].weight
    copies, is_about_to_swap, is_copied = copying.SlotCopy.copy_lazy, threading.Event(), []

    def copy_late(self: copying.SlotCopy, table: memoryview) -> None:
        """Copy as late as the call of `phase` can see."""
        assert is_about_to_swap.wait(TIMEOUT_S)
        threading.Event().wait(0.2)
        copies(self, table)
        is_copied.append(1)

    monkeypatch.setattr(copying.SlotCopy, "copy_lazy", copy_late)

    def swap() -> None:
        assert len(is_copied) == run.page.get(HeartbeatField.SEALED_COUNT) > 0
        backup = weight.detach().clone()
        weight.data.mul_(0.999)
        weight.data.copy_(backup)
        weight.data.mul_(0.999)  # a phase may also leave other weights behind

    def top(at: int, session: Session) -> None:
        is_about_to_swap.set()
        if at == 0:
            return
        if how == "block":
            with session.phase("eval"):
                swap()
        else:
            session.phase("eval")
            swap()
            if how == "statements":
                session.phase("train")
        is_about_to_swap.clear()

    def end(at: int) -> None:
        is_about_to_swap.set() if at + 1 == LAST else None

    train(run, model, optimizer, top=top, end=end)
    assert run.page.get(HeartbeatField.DISCARDED_COUNT) == 0
    assert run.page.get(HeartbeatField.SEALED_COUNT) == LAST
    assert not run.page.note


def test_a_turn_that_reports_train_again_does_not_wait_for_the_copy(run: Run, gate: Gate) -> None:
    model, optimizer = made()

    def top(at: int, session: Session) -> None:
        session.phase("train")
        if at == AT:
            gate.release()

    train(run, model, optimizer, top=top, end=stop_the_snapshot_of(AT, gate, 0))
    assert run.page.get(HeartbeatField.SEALED_COUNT) == LAST


BUG = "a bug in ftrun: KeyError: 'a broken part'"


def break_it(owner: object, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a function of ftrun fail as a bug would."""

    def fail(*_: object, **__: object) -> None:
        raise KeyError("a broken part")

    monkeypatch.setattr(owner, name, fail)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (AccumulationTracker, "before_step"),
        (OptimizerWatch, "_before_step"),
        (LazyCopyCheck, "observe"),
        (copying.SlotCopy, "copy_lazy"),
        (copying.SlotCopy, "differing"),
        (heartbeat, "step_done"),
        (AccumulationTracker, "boundary"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_bug_in_ftrun_ends_protection_and_not_the_training(
    run: Run, monkeypatch: pytest.MonkeyPatch, owner: object, name: str
) -> None:
    break_it(owner, name, monkeypatch)
    model, optimizer = made()
    run.settings = SnapshotConfig(every=1, commit_timeout_s=TIMEOUT_S, verify_first=1)
    session = run.attach(model=model, optimizer=optimizer)
    for _ in session.steps(LAST):
        with session.phase("eval"):
            pass
        optimizer.zero_grad()
        model(torch.ones(4, WIDTH)).square().mean().backward()
        optimizer.step()
    assert session.step == LAST
    assert int(optimizer.state[model[0].weight]["step"]) == LAST
    assert run.page.get(HeartbeatField.UNPROTECTED) == 1
    assert BUG in run.page.note


def test_a_bug_in_the_phase_hook_ends_protection_and_not_the_training(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = made()
    session = run.attach(model=model, optimizer=optimizer)
    for at in session.steps(2):
        if at:
            break_it(LazyCopyCheck, "observe", monkeypatch)
            session.phase("eval")
            assert BUG in run.page.note
        optimizer.zero_grad()
        model(torch.ones(4, WIDTH)).square().mean().backward()
        optimizer.step()
    assert session.step == 2


def test_a_buffer_that_is_a_view_of_a_weight_is_saved_right(run: Run, gate: Gate) -> None:
    """The script changes 8 bytes of the weight through the buffer, too few for the samples."""
    model, optimizer = made()
    weight = model[0].weight
    model.register_buffer("window", weight.data[300, 10:12])

    def top(at: int, session: Session) -> None:
        if at == AT:
            gate.wait()
        model.window.data.add_(1.0)
        if at == AT:
            gate.release()
            copied(session)

    train(run, model, optimizer, top=top, end=stop_the_snapshot_of(AT, gate, 0))


def test_state_made_in_inference_mode_is_saved_right(run: Run, gate: Gate) -> None:
    """Such tensors have no version counter; a few of their bytes are changed under the copy."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def top(at: int, session: Session) -> None:
        if at == 0:
            with torch.inference_mode():
                optimizer.state[model.weight]["momentum_buffer"] = torch.zeros(WIDTH, WIDTH)
        if at == AT:
            gate.wait()
            with torch.inference_mode():
                optimizer.state[model.weight]["momentum_buffer"][300, 10:12] += 1
            gate.release()
            copied(session)

    step = optimizer.step

    def step_in_inference_mode(closure: None = None) -> None:
        with torch.inference_mode():
            step()

    optimizer.step = step_in_inference_mode  # type: ignore[method-assign]
    train(run, model, optimizer, top=top, end=stop_the_snapshot_of(AT, gate, 0))


def test_tied_scalar_and_empty_parameters_are_saved_right(run: Run) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH, bias=False)
            self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
            self.tied.weight = self.first.weight
            self.empty = nn.Parameter(torch.zeros(0, WIDTH))
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.tied(self.first(x)).tanh() * self.scale + self.empty.sum()

    torch.manual_seed(0)
    model = Odd()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(run, model, optimizer, top=lambda at, session: None)
    assert run.page.get(HeartbeatField.DISCARDED_COUNT) == 0
    assert not run.page.note


def test_a_model_that_gets_other_memory_between_steps_is_saved_right(run: Run) -> None:
    model, optimizer = made()

    def top(at: int, session: Session) -> None:
        if at == AT:
            model.to(torch.float64).to(torch.float32)

    train(run, model, optimizer, top=top)


def test_a_step_in_another_thread_waits_for_the_copy(run: Run, gate: Gate) -> None:
    model, optimizer = made()
    step = optimizer.step

    def step_elsewhere(closure: None = None) -> None:
        thread = threading.Thread(target=step)
        thread.start()
        gate.release()
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()

    optimizer.step = step_elsewhere  # type: ignore[method-assign]

    def top(at: int, session: Session) -> None:
        if at == AT:
            gate.wait()

    train(run, model, optimizer, top=top, end=stop_the_snapshot_of(AT, gate, 2))
    assert run.page.get(HeartbeatField.DISCARDED_COUNT) == 0


class DefaultStream:
    """The only stream of a device."""

    device = torch.device("cpu")


def test_the_replay_of_a_graph_waits_for_the_copy(
    run: Run, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay fires no hook of an optimizer, and no version counter counts its writes."""
    model, optimizer = made()
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device=None: DefaultStream)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: model[0].weight.data.mul_(2))

    def top(at: int, session: Session) -> None:
        if at == AT:
            gate.wait()
            replay = threading.Thread(target=torch.cuda.CUDAGraph.replay, args=[gate])
            replay.start()
            replay.join(0.2)
            assert replay.is_alive()
            gate.release()
            replay.join(TIMEOUT_S)

    with closing(graph_captures.GraphObserver()) as observer:
        monkeypatch.setattr(graph_captures, "observer", lambda: observer)
        train(run, model, optimizer, top=top, end=stop_the_snapshot_of(AT, gate, 1))
    assert run.page.get(HeartbeatField.DISCARDED_COUNT) == 0
    assert run.page.get(HeartbeatField.SEALED_COUNT) == LAST


def test_a_forward_with_other_weights_by_functional_call_costs_nothing(
    run: Run, gate: Gate
) -> None:
    model, optimizer = made()

    def top(at: int, session: Session) -> None:
        if at == AT:
            gate.wait()
            average = {name: p.detach() * 0.9 for name, p in model.named_parameters()}
            torch.func.functional_call(model, average, torch.ones(4, WIDTH))
            gate.release()

    train(run, model, optimizer, top=top, end=stop_the_snapshot_of(AT, gate, 2))
    assert run.page.get(HeartbeatField.DISCARDED_COUNT) == 0
    assert not run.page.note
