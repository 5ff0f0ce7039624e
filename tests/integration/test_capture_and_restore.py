"""A sealed snapshot holds the state of its boundary, whatever the script does, and is restored.

Each test trains in this process against a real SMP. Each test of the first half uses one known way
to break lazy copies, and compares the newest sealed slot with the state at that boundary. The tests
of the second half restore into new objects.
"""

import dataclasses
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from ftrun import clock
from ftrun.config.profile import SnapshotConfig
from ftrun.errors import ShapeChanged, SnapshotCorrupt, ValueNotStorable
from ftrun.ids import Version
from ftrun.snapshot.layout import PIECE_BYTES
from ftrun.wire.messages import smp as smp_messages
from ftrun.wire.shared_memory.arena import Arena
from ftrun.wire.shared_memory.pages import CommandField, HeartbeatField
from ftrun.wire.transport.channel import ReceivedMessage
from ftrun.worker import smp_client as memory_link
from ftrun.worker.capture.copying import SlotCopy
from ftrun.worker.restore import early_restore
from ftrun.worker.session import Session
from tests.integration.in_process_worker import (
    TIMEOUT_S,
    WIDTH,
    Run,
    assert_same,
    made,
    states,
    wide,
)


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
    """Train, record the state at each boundary, and compare the committed versions with it."""
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
        assert torch.equal(saved[name], tensor.cpu()), name


def ended(name: str) -> None:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()


def test_a_plain_loop_discards_nothing_and_skips_nothing(run: Run) -> None:
    train(run, *made())
    assert run.page.get(HeartbeatField.SEALED_COUNT) == 8
    assert (
        run.page.get(HeartbeatField.DISCARDED_COUNT)
        == run.page.get(HeartbeatField.SKIPPED_COUNT)
        == 0
    )


def test_an_smp_that_is_paused_costs_a_moment_once_in_a_while(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = made()
    run.settings = SnapshotConfig(every=1, commit_timeout_s=0.1)
    asks, asked = memory_link.WorkerSmpClient._ask, []

    def ask(self: memory_link.WorkerSmpClient, *given: Any, **how: Any) -> ReceivedMessage:
        asked.append(given[0])
        return asks(self, *given, **how)

    monkeypatch.setattr(memory_link.WorkerSmpClient, "_ask", ask)
    session = run.attach(model=model, optimizer=optimizer)
    for at in session.steps(60):
        if at == 4:
            run.smp.send_signal(signal.SIGSTOP)
            stopped_s, before = clock.now_s(), len(asked)
        if at == 50:
            paused_s, num_asked = clock.now_s() - stopped_s, len(asked) - before
            run.smp.send_signal(signal.SIGCONT)
            run.committed_version()  # it runs again, also if the machine is busy
        optimizer.zero_grad()
        model(torch.ones(4, WIDTH)).square().mean().backward()
        optimizer.step()
    assert paused_s > memory_link._WITHDRAW_S
    # Whatever other delays a busy machine causes, it asked once and continued.
    assert 1 <= num_asked <= 1 + paused_s / memory_link._REST_S
    assert run.page.get(HeartbeatField.SKIPPED_COUNT) > 30
    assert run.saved()[0] > 50


def test_weights_clipped_through_data_before_the_forward_are_found(run: Run) -> None:
    model, optimizer = made()
    weight = model[0].weight
    train(run, model, optimizer, before=lambda: weight.data.mul_(0.9))
    assert run.page.get(HeartbeatField.DISCARDED_COUNT) == 0
    assert run.page.get(HeartbeatField.SEALED_COUNT) == 8
    assert "model.0.weight" in run.page.note


def test_weights_copied_under_no_grad_before_the_forward_are_found(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = made()
    weight = model[0].weight
    turns, is_changed, copy = itertools.count(), threading.Event(), SlotCopy.copy_lazy

    def change() -> None:
        with torch.no_grad():
            weight.copy_(weight * 0.9)
        if next(turns) == 1:
            is_changed.set()

    def copy_late(self: SlotCopy, table: memoryview) -> None:
        """Delay the first copy; otherwise it might be complete before the weight changes."""
        assert is_changed.wait(TIMEOUT_S)
        copy(self, table)

    monkeypatch.setattr(SlotCopy, "copy_lazy", copy_late)
    run.settings = SnapshotConfig(every=1, commit_timeout_s=TIMEOUT_S, verify_first=0)
    train(run, model, optimizer, before=change)
    assert 1 <= run.page.get(HeartbeatField.DISCARDED_COUNT) <= 2
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
    assert run.page.get(HeartbeatField.DISCARDED_COUNT) == 0


def test_a_softly_updated_target_network_is_copied_at_the_boundary(run: Run) -> None:
    model, optimizer = made()
    target, _ = made()

    def update() -> None:
        with torch.no_grad():
            for mine, theirs in zip(target.parameters(), model.parameters(), strict=True):
                mine.data.copy_(mine.data * 0.9 + theirs.data * 0.1)

    train(run, model, optimizer, before=update, target=target, watched={"target": target})
    assert run.page.get(HeartbeatField.DISCARDED_COUNT) == 0


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
    assert all(torch.equal(saved[name], tensor.cpu()) for name, tensor in end.items())
    assert run.page.get(HeartbeatField.DISCARDED_COUNT) == 0


def test_a_step_that_no_hook_sees_is_found(run: Run) -> None:
    model, optimizer = made()

    def step() -> None:  # like a compiled step: in place, and without torch's hooks
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
    assert run.page.get(HeartbeatField.SEALED_COUNT) >= 6


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
    assert run.page.get(HeartbeatField.DISCARDED_COUNT) == 0


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
    assert torch.equal(saved["model.b.weight"], extra.weight.cpu())
    assert any(name.startswith("optimizer.state.model.b.weight") for name in saved)


def test_nothing_is_taken_in_the_middle_of_an_accumulation(run: Run) -> None:
    model, optimizer = made()
    session = run.attach(model=model, optimizer=optimizer)
    for at in session.steps(8):
        model(torch.ones(4, WIDTH)).square().mean().backward()
        if at % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    assert run.page.get(HeartbeatField.SEALED_COUNT) == 2
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
    assert run.page.get(HeartbeatField.UNPROTECTED) == 1
    assert "notes.fn" in run.page.note


def loop(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, to: int) -> None:
    for _ in session.steps(to):
        optimizer.zero_grad()
        model(torch.rand(4, WIDTH)).square().mean().backward()
        optimizer.step()


def test_everything_comes_back_into_fresh_objects(run: Run) -> None:
    def things() -> dict[str, object]:
        model, optimizer = made()
        return {
            "model": model.to(torch.bfloat16),
            "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
            "table": torch.zeros(3),
            "array": np.zeros(2),
            "notes": {"best": np.float32(0.1), 3: [1, (2, float("inf"))]},
            "dice": torch.Generator(),
        }

    before = things()
    session = run.attach(**before)
    model, optimizer = before["model"], before["optimizer"]
    assert isinstance(model, nn.Module)
    assert isinstance(optimizer, torch.optim.Optimizer)
    for at in session.steps(3):
        model(torch.ones(4, WIDTH, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for state in optimizer.state.values() if at == 2 else ():
            state["exp_avg"] = state["exp_avg"].float()  # wider than the parameter
        before["scheduler"].step()
        before["table"] += at
        before["array"] += at
        before["notes"]["seen"] = at
        torch.rand(1, generator=before["dice"])
    run.committed_version()
    expected = (torch.rand(1), torch.rand(1, generator=before["dice"]))

    after = things()
    after["notes"].clear()
    again = run.attach(**after)
    assert (again.restored, again.step, again.generation) == (True, 3, 1)
    assert (torch.rand(1), torch.rand(1, generator=after["dice"])) == expected
    assert all(map(torch.equal, after["model"].parameters(), model.parameters()))
    mine, theirs = after["optimizer"].state_dict(), optimizer.state_dict()
    for index, state in theirs["state"].items():
        for key, value in state.items():
            assert torch.equal(mine["state"][index][key], value)
            assert mine["state"][index][key].dtype == value.dtype
    assert mine["param_groups"] == theirs["param_groups"]
    assert after["scheduler"].state_dict() == before["scheduler"].state_dict()
    assert torch.equal(after["table"], before["table"])
    assert after["array"].tolist() == before["array"].tolist()
    assert after["notes"] == before["notes"]
    assert type(after["notes"]["best"]) is np.float32


def test_a_restored_run_continues_in_the_same_memory_and_ends_the_same(run: Run) -> None:
    undisturbed, undisturbed_optimizer = made()
    loop(
        run.attach(model=undisturbed, optimizer=undisturbed_optimizer),
        undisturbed,
        undisturbed_optimizer,
        3,
    )
    run.committed_version()
    expected = run.arena_fd()
    model, optimizer = made()
    session = run.attach(model=model, optimizer=optimizer)
    size = os.fstat(expected).st_size
    loop(session, model, optimizer, 6)
    assert os.fstat(run.arena_fd()).st_size == size
    assert len(run.ask(smp_messages.HandOverMemory()).fds) == 1
    assert run.saved()[0] == 6


def test_a_changed_shape_is_named_with_both_shapes(run: Run) -> None:
    model, optimizer = made()
    loop(run.attach(model=model, optimizer=optimizer), model, optimizer, 2)
    other = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))
    with pytest.raises(ShapeChanged) as caught:
        run.attach(model=other, optimizer=torch.optim.AdamW(other.parameters()))
    assert caught.value.key == "model.2.weight"
    assert (caught.value.saved, caught.value.present) == ("F32[3, 600]", "F32[4, 600]")


def test_a_missing_tensor_is_named(run: Run) -> None:
    model, optimizer = made()
    loop(run.attach(model=model, optimizer=optimizer, extra=torch.ones(2)), model, optimizer, 2)
    fresh, fresh_optimizer = made()
    with pytest.raises(ShapeChanged) as caught:
        run.attach(model=fresh, optimizer=fresh_optimizer)
    assert (caught.value.key, caught.value.present) == ("extra", "nothing")


def test_a_corrupt_slot_is_never_loaded_and_is_reported(run: Run) -> None:
    model, optimizer = made()
    loop(run.attach(model=model, optimizer=optimizer), model, optimizer, 2)
    newest = run.committed_version()
    arena = Arena(run.arena_fd(), writable=True)
    slot = arena.find(newest)
    assert slot is not None
    arena.image(slot)[-100_000] ^= 1
    with pytest.raises(SnapshotCorrupt):
        run.attach(model=model, optimizer=optimizer)
    assert run.page.get(HeartbeatField.CORRUPT_SLOT) == 1 + slot
    assert "digest" in run.page.note


def test_a_value_that_cannot_be_stored_is_named_at_attach(run: Run) -> None:
    model, optimizer = made()
    with pytest.raises(ValueNotStorable) as caught:
        run.attach(model=model, optimizer=optimizer, notes={"fns": [len]})
    assert caught.value.key == "notes.fns[0]"


def test_a_group_that_was_added_later_is_there_again(run: Run) -> None:
    model, optimizer = made()
    optimizer = torch.optim.AdamW(model[0].parameters(), lr=0.1)
    session = run.attach(model=model, optimizer=optimizer)
    for at in session.steps(5):
        if at == 2:
            optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.5})
        model.zero_grad()
        model(torch.rand(4, WIDTH)).square().mean().backward()
        optimizer.step()
    fresh, _ = made()
    fresh_optimizer = torch.optim.AdamW(fresh[0].parameters(), lr=0.1)
    run.attach(model=fresh, optimizer=fresh_optimizer)
    assert [group["lr"] for group in fresh_optimizer.param_groups] == [0.1, 0.5]
    assert torch.equal(
        fresh_optimizer.state[fresh[2].weight]["exp_avg"],
        optimizer.state[model[2].weight]["exp_avg"],
    )


def test_snapshot_takes_one_whatever_the_interval_is(run: Run) -> None:
    run.settings = SnapshotConfig(every=100, commit_timeout_s=TIMEOUT_S)
    model, optimizer = made()
    session = run.attach(model=model, optimizer=optimizer)
    for at in session.steps(4):
        if at == 2:
            session.snapshot()
        if at == 3:
            assert run.page.get(HeartbeatField.SEALED_STEP) == 3
            assert run.page.get(HeartbeatField.SEALED_COUNT) == 1


def test_a_requested_snapshot_is_taken_after_an_accumulation_that_is_in_progress(run: Run) -> None:
    run.settings = SnapshotConfig(every=1000, commit_timeout_s=TIMEOUT_S)
    model, optimizer = made()
    session = run.attach(model=model, optimizer=optimizer)
    taken = []
    for at in session.steps(8):
        taken.append(run.page.get(HeartbeatField.SEALED_STEP))
        if at == 1:
            run.commands.set(CommandField.CAPTURE_FROM, 2)
        model(torch.ones(4, WIDTH)).square().mean().backward()
        if at % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    assert {*taken} <= {0, 4}, "one, at the first boundary that allows it"
    assert run.page.get(HeartbeatField.SEALED_COUNT) == 2, "the other is the last one of all"


def test_a_rank_that_gets_a_request_too_late_takes_none_and_reports_it(run: Run) -> None:
    """The others may have taken one at that step, and would wait for its commit."""
    run.be_led()
    run.settings = SnapshotConfig(every=1000, commit_timeout_s=60)
    model, optimizer = made()
    session = run.attach(model=model, optimizer=optimizer)
    for at in session.steps(100):
        if at == 3:
            run.commands.set(CommandField.CAPTURE_FROM, 3)
        if at == 6:
            run.commands.set(CommandField.TAKE_FROM, 5)  # the leader has abandoned step 3
            run.commands.set(CommandField.CAPTURE_FROM, 7)
        if at == 8:
            break
        optimizer.zero_grad()
        model(torch.rand(4, WIDTH)).square().mean().backward()
        optimizer.step()
    session.close()
    reported = run.agent.receive(deadline_s=TIMEOUT_S).body
    while not isinstance(reported, smp_messages.AbandonVersion):
        reported = run.agent.receive(deadline_s=TIMEOUT_S).body
    assert reported.step == 3
    assert run.page.get(HeartbeatField.SEALED_COUNT) == 1
    assert run.page.get(HeartbeatField.SEALED_STEP) == 7


def test_auto_obeys_the_agent_from_the_step_it_names(run: Run) -> None:
    run.settings = SnapshotConfig(every="auto", commit_timeout_s=TIMEOUT_S)
    model, optimizer = made()
    session = run.attach(model=model, optimizer=optimizer)
    run.commands.set(CommandField.EVERY_FROM_STEP, 4)
    run.commands.set(CommandField.SNAPSHOT_EVERY, 5)
    loop(session, model, optimizer, 16)
    assert run.page.get(HeartbeatField.SEALED_COUNT) == 4 + 3 + 1  # and the last step of all
    assert run.page.get(HeartbeatField.SEALED_STEP) == 16
    assert run.page.get(HeartbeatField.REQUESTED_EVERY) >= 1


def test_a_stop_takes_a_last_snapshot_and_waits_at_the_boundary(run: Run) -> None:
    run.settings = SnapshotConfig(every=100, commit_timeout_s=TIMEOUT_S)
    model, optimizer = made()
    session = run.attach(model=model, optimizer=optimizer)
    run.commands.set(CommandField.STOP_AFTER_STEP, 2)
    thread = threading.Thread(target=loop, args=(session, model, optimizer, 4), daemon=True)
    thread.start()
    give_up_s = clock.now_s() + TIMEOUT_S
    while not run.page.get(HeartbeatField.STOPPED_AT_BOUNDARY):
        assert clock.now_s() < give_up_s
        clock.sleep(0.001)
    assert (run.page.get(HeartbeatField.STEP), run.page.get(HeartbeatField.SEALED_STEP)) == (2, 2)
    run.commands.set(CommandField.STOP_AFTER_STEP, 1 << 60)
    thread.join(TIMEOUT_S)
    assert session.step == 4


def test_an_error_of_the_scripts_signal_handler_ends_a_stop_and_reaches_the_script(
    run: Run,
) -> None:
    class Preempted(Exception):
        pass

    def handler(*_: object) -> None:
        raise Preempted

    def end_when_stopped() -> None:
        give_up_s = clock.now_s() + TIMEOUT_S
        while not run.page.get(HeartbeatField.STOPPED_AT_BOUNDARY):
            assert clock.now_s() < give_up_s
            clock.sleep(0.001)
        os.kill(os.getpid(), signal.SIGTERM)
        clock.sleep(1.0)
        run.commands.set(CommandField.STOP_AFTER_STEP, 1 << 60)

    model, optimizer = made()
    session = run.attach(model=model, optimizer=optimizer)
    run.commands.set(CommandField.STOP_AFTER_STEP, 2)
    before = signal.signal(signal.SIGTERM, handler)
    thread = threading.Thread(target=end_when_stopped, daemon=True)
    try:
        thread.start()
        with pytest.raises(Preempted):
            loop(session, model, optimizer, 4)
        thread.join(TIMEOUT_S)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert session.step == 2
    assert not run.page.get(HeartbeatField.STOPPED_AT_BOUNDARY)
    assert not run.page.get(HeartbeatField.UNPROTECTED), run.page.note


def test_a_seal_that_no_other_rank_follows_is_withdrawn_and_not_waited_for(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_link, "_WITHDRAW_S", TIMEOUT_S)  # the SMP does answer
    run.ask(smp_messages.BeginGeneration(0, 2, [0, 1]), run.command_fd)  # rank 1 never seals
    run.settings = SnapshotConfig(every=1, commit_timeout_s=0.01)
    model, optimizer = made()
    loop(run.attach(model=model, optimizer=optimizer), model, optimizer, 4)
    assert run.page.get(HeartbeatField.SEALED_STEP) == 4
    assert run.page.get(HeartbeatField.SKIPPED_COUNT) == 0
    assert run.commands.get(CommandField.COMMITTED_STEP) == -1


def test_what_is_read_ahead_of_attach_is_what_is_restored(run: Run) -> None:
    model, optimizer = wide()
    loop(run.attach(model=model, optimizer=optimizer), model, optimizer, 3)
    other, its_optimizer = wide()
    context = run.next_context()
    early_restore.begin(context)
    ended("ftrun-early")
    ahead, ready = early_restore._started, early_restore._ready
    assert ahead is not None
    assert len(ahead.right) >= 3 * model[0].weight.nbytes // PIECE_BYTES
    assert ready is not None
    copied = {tensor.data_ptr() for tensor in ahead.copied.values()}
    run.session_of(context, model=other, optimizer=its_optimizer)
    assert_same(model, optimizer, other, its_optimizer)
    state = its_optimizer.state[other[0].weight]
    moments = {state[name].data_ptr() for name in ("exp_avg", "exp_avg_sq")}
    assert moments <= copied, "they were copied again"
    assert ready.take(1) is None, "what is left was not given back"


def test_attach_continues_where_it_meets_the_reader(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = wide()
    loop(run.attach(model=model, optimizer=optimizer), model, optimizer, 3)
    other, its_optimizer = wide()
    context = run.next_context()
    read = early_restore.EarlyRestore._copy

    def first_only(self: early_restore.EarlyRestore, *given: object) -> bool:
        """Only the part before it is taken over in the middle of the second tensor."""
        if self.copied:
            self.take_over()
        return read(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(early_restore.EarlyRestore, "_copy", first_only)
    early_restore.begin(context)
    ended("ftrun-early")
    ahead = early_restore._started
    assert ahead is not None
    assert len(ahead.copied) == 1
    run.session_of(context, model=other, optimizer=its_optimizer)
    assert_same(model, optimizer, other, its_optimizer)


def test_a_piece_that_is_not_right_is_found_by_attach_though_it_was_read_ahead(run: Run) -> None:
    model, optimizer = wide()
    loop(run.attach(model=model, optimizer=optimizer), model, optimizer, 3)
    context = run.next_context()
    assert context.arena_fd is not None
    assert context.restore is not None
    arena = Arena(context.arena_fd, writable=True)
    slot = arena.find(context.restore)
    assert slot is not None
    arena.image(slot)[-(1 << 20)] ^= 1
    early_restore.begin(context)
    ended("ftrun-early")
    with pytest.raises(SnapshotCorrupt):
        run.session_of(context, **dict(zip(("model", "optimizer"), wide(), strict=True)))
    assert run.page.get(HeartbeatField.CORRUPT_SLOT) == 1 + slot


def test_an_arena_that_is_none_costs_the_preparation_and_nothing_else(run: Run) -> None:
    model, optimizer = wide()
    loop(run.attach(model=model, optimizer=optimizer), model, optimizer, 1)
    fd = os.memfd_create("no arena")
    context = run.next_context()
    launch = msgspec.structs.replace(
        context.launch, descriptors={**context.launch.descriptors, "arena": fd}
    )
    context = dataclasses.replace(context, launch=launch)
    early_restore.begin(context)
    ended("ftrun-early")
    assert early_restore.take(Version(0, 1)) is None
    early_restore.release()
    os.close(fd)


def test_a_run_that_is_over_before_its_memory_is_made_waits_for_it(run: Run) -> None:
    run.settings = SnapshotConfig(every=1, commit_timeout_s=0)
    model, optimizer = made()
    session = run.attach(model=model, optimizer=optimizer)
    loop(session, model, optimizer, 1)
    assert run.page.get(HeartbeatField.SEALED_STEP) == 1


def test_a_dead_smp_costs_snapshots_and_not_the_run(run: Run) -> None:
    run.settings = SnapshotConfig(every=1, commit_timeout_s=0.01)
    model, optimizer = made()
    session = run.attach(model=model, optimizer=optimizer)
    loop(session, model, optimizer, 3)
    run.smp.kill()
    run.smp.wait(20)
    loop(session, model, optimizer, 6)
    assert session.step == 6
    assert run.page.get(HeartbeatField.SKIPPED_COUNT) >= 2
    assert not run.page.get(HeartbeatField.UNPROTECTED)


def test_what_falls_due_while_a_version_is_protected_is_skipped_and_not_waited_for(
    run: Run,
) -> None:
    run.be_led()
    run.settings = SnapshotConfig(every=1, commit_timeout_s=60)  # longer than this test may take
    model, optimizer = made()
    session = run.attach(model=model, optimizer=optimizer)
    loop(session, model, optimizer, 4)
    assert run.page.get(HeartbeatField.SEALED_COUNT) == 1
    assert run.page.get(HeartbeatField.SKIPPED_COUNT) == 3
    assert run.commands.get(CommandField.PROTECTING_STEP) == 1
    assert run.commands.get(CommandField.ABANDONED_STEP) == -1
    run.commit(1, take_from=6)
    loop(session, model, optimizer, 6)
    assert run.page.get(HeartbeatField.SEALED_STEP) == 6
    assert run.page.get(HeartbeatField.SEALED_COUNT) == 2, "step 5 is before it"
    assert run.page.get(HeartbeatField.SKIPPED_COUNT) == 3


def test_a_rank_that_has_skipped_what_others_may_have_taken_waits_for_a_later_step(
    run: Run,
) -> None:
    run.be_led()
    run.settings = SnapshotConfig(every=1, commit_timeout_s=60)
    model, optimizer = made()
    session = run.attach(model=model, optimizer=optimizer)
    loop(session, model, optimizer, 4)
    run.commit(1, take_from=3)  # received too late: step 3 is over
    loop(session, model, optimizer, 5)
    assert run.page.get(HeartbeatField.SEALED_STEP) == 1
    reported = run.agent.receive(deadline_s=TIMEOUT_S).body
    while not isinstance(reported, smp_messages.AbandonVersion) or reported.step < 5:
        reported = run.agent.receive(deadline_s=TIMEOUT_S).body
    run.commands.set(CommandField.TAKE_FROM, 7)
    loop(session, model, optimizer, 7)
    assert run.page.get(HeartbeatField.SEALED_STEP) == 7


def test_nothing_is_taken_after_a_restore_before_the_leader_has_committed_it(run: Run) -> None:
    run.be_led()
    model, optimizer = made()
    loop(run.attach(model=model, optimizer=optimizer), model, optimizer, 1)
    run.commit(1, take_from=2)
    model, optimizer = made()
    session = run.attach(model=model, optimizer=optimizer)
    assert run.commands.get(CommandField.COMMITTED_IN) == -1
    loop(session, model, optimizer, 3)
    assert run.page.get(HeartbeatField.SEALED_COUNT) == 0
    assert run.page.get(HeartbeatField.SKIPPED_COUNT) == 2
    run.commit(1, take_from=4)
    loop(session, model, optimizer, 4)
    assert run.page.get(HeartbeatField.SEALED_STEP) == 4
