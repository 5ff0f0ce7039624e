"""State that an attach does not show: inner optimizers, unattached ones, loads after attach.

Each test trains in this process against a real SMP. Equal means equal in every bit.
"""

import logging
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import Optimizer, _global_optimizer_pre_hooks
from torch.utils.data import DataLoader

from ftrun.config.profile import SnapshotConfig
from ftrun.errors import UsageError, ValueNotStorable
from ftrun.wire.shared_memory.pages import HeartbeatField
from ftrun.worker.process import lease
from ftrun.worker.session import Session
from ftrun.worker.state.attached import AttachedState
from ftrun.worker.state.data_position import DataPosition
from tests.integration.in_process_worker import Run

WIDTH = 8


class SAM(Optimizer):
    """Sharpness-aware minimization in two steps, as it is commonly copied into scripts."""

    def __init__(self, params: Any, base_optimizer: type[Optimizer], **defaults: Any) -> None:
        super().__init__(params, {"rho": 0.05, **defaults})
        self.base_optimizer = base_optimizer(self.param_groups, **defaults)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self) -> None:
        norm = torch.stack([p.grad.norm() for p in self._learned()]).norm()
        for parameter in self._learned():
            self.state[parameter]["old_p"] = parameter.data.clone()
            parameter.add_(parameter.grad * (self.param_groups[0]["rho"] / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for parameter in self._learned():
            parameter.data = self.state[parameter]["old_p"]
        self.base_optimizer.step()
        self.zero_grad()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups

    def _learned(self) -> list[Any]:
        return [p for g in self.param_groups for p in g["params"] if p.grad is not None]


class Lookahead(Optimizer):
    """A subclass that shares the groups of its base and does not call super().__init__()."""

    def __init__(self, base: Optimizer) -> None:
        self._optimizer_step_pre_hooks: Any = OrderedDict()
        self._optimizer_step_post_hooks: Any = OrderedDict()
        self._optimizer_state_dict_pre_hooks: Any = OrderedDict()
        self._optimizer_load_state_dict_pre_hooks: Any = OrderedDict()
        self._optimizer_load_state_dict_post_hooks: Any = OrderedDict()
        self._base_optimizer = base
        self.defaults = base.defaults
        self.param_groups = base.param_groups
        self.state: Any = defaultdict(dict)
        for group in self.param_groups:
            group["count"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._base_optimizer.step()
        for group in self.param_groups:
            group["count"] += 1
            for parameter in group["params"]:
                slow = self.state[parameter].setdefault("slow", parameter.clone())
                if group["count"] % 2 == 0:
                    slow.lerp_(parameter, 0.5)
                    parameter.copy_(slow)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._base_optimizer.zero_grad(set_to_none)


class Wrapper:
    """A wrapper that is no Optimizer; its state_dict omits that of the optimizer in it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.count = 0

    def step(self) -> None:
        self.count += 1
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class WholeWrapper(Wrapper):
    """A wrapper whose state_dict contains that of the optimizer."""

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "inner": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.optimizer.load_state_dict(state["inner"])


class Delegating(Optimizer):
    """A wrapper that shows groups and state of its optimizer as its own, like Accelerate's."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def defaults(self) -> Any:
        return self.optimizer.defaults

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class Averaging(Delegating):
    """A wrapper with a count of its own in `state_dict()`, like PostLocalSGDOptimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {**self.optimizer.state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)
        self.count = state_dict["count"]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.count += 1
        if self.count % 4 == 0:
            with torch.no_grad():
                for group in self.param_groups:
                    torch._foreach_mul_(group["params"], 0.9)


class Counting(torch.optim.AdamW):
    """An optimizer that counts its steps outside of its state, and requires the count."""

    count = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "counts": {"steps": self.count}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.count = state_dict["counts"]["steps"]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        self.param_groups[0]["weight_decay"] = 0.01 * (self.count % 3)
        super().step()


class Collected(torch.optim.AdamW):
    """Its state_dict() fails before the script collects the state, like ZeRO's."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("not consolidated")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.close()


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def adam(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def loss_of(model: nn.Module, at: int) -> torch.Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(at))
    return nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))


def turn(model: nn.Module, optimizer: Any, at: int) -> None:
    optimizer.zero_grad()
    loss_of(model, at).backward()
    if isinstance(optimizer, SAM):
        optimizer.first_step()
        loss_of(model, at).backward()
        optimizer.second_step()
    else:
        optimizer.step()


def values(model: nn.Module) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in model.state_dict().values()]


def undisturbed_values(make: Callable[[nn.Module], Any], steps: int) -> list[torch.Tensor]:
    """The end of an undisturbed training."""
    model = network()
    optimizer = make(model)
    scheduler = torch.optim.lr_scheduler.StepLR(scheduled(optimizer), 3, 0.5)
    for at in range(steps):
        turn(model, optimizer, at)
        scheduler.step()
    return values(model)


def scheduled(optimizer: Any) -> Optimizer:
    return optimizer if isinstance(optimizer, Optimizer) else optimizer.optimizer


def sam(model: nn.Module) -> Optimizer:
    return SAM(model.parameters(), torch.optim.AdamW, lr=0.05)


MAKERS: dict[str, Callable[[nn.Module], Any]] = {
    "sam": sam,
    "lookahead": lambda model: Lookahead(adam(model)),
    "nested": lambda model: Lookahead(Delegating(adam(model))),
    "wrapper": lambda model: Wrapper(adam(model)),
    "whole wrapper": lambda model: WholeWrapper(adam(model)),
    "delegating": lambda model: Delegating(adam(model)),
    "averaging": lambda model: Averaging(adam(model)),
    "averaging in lookahead": lambda model: Lookahead(Averaging(adam(model))),
    "counting": lambda model: Counting(model.parameters(), lr=0.05),
    "collected": lambda model: Collected(model.parameters(), lr=0.05),
}


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
@pytest.mark.parametrize("kind", MAKERS)
def test_an_inner_optimizer_comes_back(run: Run, kind: str) -> None:
    make = MAKERS[kind]
    for steps in (5, 10):
        model = network(seed=steps)
        if steps == 5:
            model.load_state_dict(network().state_dict())
        optimizer = make(model)
        scheduler = torch.optim.lr_scheduler.StepLR(scheduled(optimizer), 3, 0.5)
        session = run.attach(model=model, optimizer=optimizer, scheduler=scheduler)
        for at in session.steps(steps):
            turn(model, optimizer, at)
            scheduler.step()
        run.committed_version()
        assert not run.page.get(HeartbeatField.UNPROTECTED), run.page.note
    assert session.restored
    assert all(map(torch.equal, values(model), undisturbed_values(make, 10)))


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
@pytest.mark.parametrize("kind", ["wrapper", "whole wrapper", "delegating", "lookahead"])
def test_the_gradients_of_an_inner_optimizer_count_as_accumulation(run: Run, kind: str) -> None:
    model = network()
    optimizer = MAKERS[kind](model)
    session = run.attach(model=model, optimizer=optimizer)
    for at in session.steps(8):
        loss_of(model, at).backward()
        if at % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    assert run.page.get(HeartbeatField.SEALED_COUNT) == 2


def test_one_optimizer_behind_two_wrappers_is_captured_once(run: Run) -> None:
    model = network()
    inner = adam(model)
    session = run.attach(
        model=model, optimizer={"outer": Delegating(inner), "again": Wrapper(inner)}, more=inner
    )
    for at in session.steps(2):
        turn(model, inner, at)
    saved = run.saved()[1]
    assert sum("exp_avg_sq" in name for name in saved) == len(list(model.parameters()))


@pytest.mark.parametrize("make", [adam, sam, MAKERS["lookahead"]])
def test_groups_that_the_script_holds_stay_those_of_the_optimizer_after_a_restore(
    run: Run, make: Callable[[nn.Module], Any]
) -> None:
    for steps in (2, 4):
        model = network()
        optimizer = make(model)
        groups, group = optimizer.param_groups, optimizer.param_groups[0]
        parameters = group["params"]
        session = run.attach(model=model, optimizer=optimizer)
        for at in session.steps(steps):
            group["lr"] = 0.5**at
            turn(model, optimizer, at)
        run.committed_version()
    assert session.restored
    assert optimizer.param_groups is groups
    assert groups[0] is group
    assert group["params"] is parameters
    expected = network()
    optimizer = make(expected)
    for at in range(4):
        optimizer.param_groups[0]["lr"] = 0.5**at
        turn(expected, optimizer, at)
    assert all(map(torch.equal, values(model), values(expected)))


def test_a_wrapper_without_defaults_is_attached(run: Run) -> None:
    model = network()
    wrapper = Lookahead(adam(model))
    del wrapper.defaults
    session = run.attach(model=model, optimizer=wrapper)
    for at in session.steps(2):
        turn(model, wrapper, at)
    assert not run.page.get(HeartbeatField.UNPROTECTED), run.page.note


def test_tensors_outside_of_an_optimizers_state_are_reported(run: Run) -> None:
    model = network()
    optimizer = adam(model)
    optimizer.slow = [[p.detach().clone() for p in model.parameters()]]  # type: ignore[attr-defined]
    session = run.attach(model=model, optimizer=optimizer)
    for at in session.steps(2):
        turn(model, optimizer, at)
    assert run.page.get(HeartbeatField.UNPROTECTED)
    assert "keeps tensors in slow" in run.page.note


def test_momentum_of_a_sparse_gradient_is_reported_by_its_name(run: Run) -> None:
    model = nn.Embedding(6, WIDTH, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session = run.attach(model=model, optimizer=optimizer)
    for _ in session.steps(2):
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert run.page.get(HeartbeatField.UNPROTECTED)
    assert "momentum_buffer" in run.page.note
    assert "bug" not in run.page.note


def test_an_optimizer_that_steps_inside_of_ddp_is_refused(run: Run) -> None:
    model = network()
    optimizer = adam(model)
    optimizer._overlap_with_ddp = True  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="overlap_with_ddp"):
        run.attach(model=model, optimizer=optimizer)


def test_an_optimizer_that_was_wrapped_since_the_snapshot_is_restored_without_the_wrapper(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    model = network()
    optimizer = adam(model)
    for at in run.attach(model=model, optimizer=optimizer).steps(2):
        turn(model, optimizer, at)
    run.committed_version()
    other = network(seed=1)
    wrapped = Lookahead(adam(other))
    with caplog.at_level(logging.WARNING):
        run.attach(model=other, optimizer=wrapped)
    assert "has no state of optimizer._base_optimizer" in caplog.text
    assert all(map(torch.equal, values(model), values(other)))


def test_gradients_that_stay_while_others_step_are_reported(run: Run) -> None:
    run.settings = SnapshotConfig(every=1000)
    model = network()
    first, last = model[0], model[2]  # type: ignore[index]
    optimizers = {"first": adam(first), "last": adam(last)}
    session = run.attach(model=model, optimizer=optimizers)
    for at in session.steps(104):
        assert bool(run.page.get(HeartbeatField.UNPROTECTED)) == (100 <= at < 103)
        loss_of(model, at).backward()
        optimizers["last"].step()
        optimizers["last"].zero_grad()
        if at == 102:
            note = "optimizer.first has gradients but has not stepped during 100 steps of other"
            assert note in run.page.note
            optimizers["first"].step()
            optimizers["first"].zero_grad()


def test_an_optimizer_that_rests_after_a_restart_keeps_no_snapshot_from_being_taken(
    run: Run,
) -> None:
    for steps in (3, 6):  # in two phases: the first optimizer has no step in the second one
        model = network()
        first, last = model[0], model[2]  # type: ignore[index]
        optimizers = {"first": adam(first), "last": adam(last)}
        session = run.attach(model=model, optimizer=optimizers)
        for at in session.steps(steps):
            first.requires_grad_(at < 3)
            last.requires_grad_(at >= 3)
            if at != 4:  # an iteration in which no optimizer steps
                turn(model, optimizers["first" if at < 3 else "last"], at)
        assert run.page.get(HeartbeatField.SEALED_COUNT) == 3
        run.committed_version()
    assert session.restored


def test_gradients_of_the_turn_before_are_reported(run: Run) -> None:
    model = network()
    optimizer = adam(model)
    session = run.attach(model=model, optimizer=optimizer)
    for at in session.steps(4):
        assert bool(run.page.get(HeartbeatField.UNPROTECTED)) == (at == 3)
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, at).backward()
    assert "optimizer uses gradients of the turn before" in run.page.note


def test_an_attach_that_fails_leaves_no_hook(run: Run) -> None:
    model = network()
    optimizer = adam(model)
    before = list(_global_optimizer_pre_hooks.values())
    with pytest.raises(ValueNotStorable):
        run.attach(model=model, optimizer=optimizer, broken={"lock": threading.Lock()})
    left = [one for one in _global_optimizer_pre_hooks.values() if one not in before]
    assert {one.__module__ for one in left} <= {lease.__name__}  # it stays for the process


# --- optimizers that are not attached --------------------------------------------------------


def test_a_second_optimizer_that_takes_over_is_reported_before_its_state_is_lost(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    model = network()
    first = adam(model)
    second = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session = run.attach(model=model, optimizer=first)
    with caplog.at_level(logging.WARNING):
        for at in session.steps(8):
            if at == 4:
                assert not run.page.get(HeartbeatField.UNPROTECTED)
            if at == 6:
                assert run.page.get(HeartbeatField.UNPROTECTED)
            turn(model, first if at < 4 else second, at)
    assert (
        "optimizer SGD, which updates model.0.weight and 3 more, is not attached: its state is in "
        "no snapshot; pass it to attach(optimizer={...})"
    ) in run.page.note
    assert caplog.text.count("UNPROTECTED: optimizer SGD") == 1


def test_an_unattached_optimizer_next_to_state_that_cannot_be_stored_is_no_bug(run: Run) -> None:
    model = network()
    optimizer = adam(model)
    second = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session = run.attach(model=model, optimizer=optimizer)
    for at in session.steps(3):
        turn(model, optimizer, at)
        turn(model, second, at)
        optimizer.state[model[0].weight]["lock"] = threading.Lock()  # type: ignore[index]
    assert "optimizer SGD, which updates model.0.weight and 3 more" in run.page.note
    assert "optimizer.state.model.0.weight.lock" in run.page.note
    assert "bug" not in run.page.note


def test_an_optimizer_without_state_that_lives_for_one_turn_is_not_reported(run: Run) -> None:
    model = network()
    optimizer = adam(model)
    session = run.attach(model=model, optimizer=optimizer)
    for at in session.steps(4):
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        turn(model, inner, at)
        turn(model, optimizer, at)
    assert not run.page.get(HeartbeatField.UNPROTECTED)


def test_an_optimizer_of_a_model_that_is_not_attached_is_logged_once(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    model, other = network(), network()
    optimizer, its = adam(model), adam(other)
    session = run.attach(model=model, optimizer=optimizer)
    with caplog.at_level(logging.WARNING):
        for at in session.steps(4):
            turn(model, optimizer, at)
            turn(other, its, at)
    assert not run.page.get(HeartbeatField.UNPROTECTED)
    assert caplog.text.count("4 parameters that are not attached") == 1


# --- loaders ---------------------------------------------------------------------------------


def test_a_loader_that_is_attached_and_iterated_by_hand_is_reported(run: Run) -> None:
    model = network()
    optimizer = adam(model)
    loader = DataLoader(range(64))
    feeds = {"loader.train": DataPosition("loader.train", loader)}
    session = run.session_of(run.next_context(), feeds, model=model, optimizer=optimizer)
    by_hand = iter(loader)
    for at in session.steps(3):
        assert bool(run.page.get(HeartbeatField.UNPROTECTED)) == (at == 2)
        next(by_hand)
        turn(model, optimizer, at)
    assert "loader.train has given no batch" in run.page.note
    assert "session.batches(loader)" in run.page.note
    batches = session.batches(loader)
    for at in session.steps(5):
        next(batches)
        turn(model, optimizer, at)
    assert not run.page.get(HeartbeatField.UNPROTECTED)


def test_a_second_loader_may_wait_for_its_time(run: Run) -> None:
    model = network()
    optimizer = adam(model)
    loaders = {name: DataLoader(range(64)) for name in ("train", "val")}
    feeds = {f"loader.{name}": DataPosition(f"loader.{name}", one) for name, one in loaders.items()}
    session = run.session_of(run.next_context(), feeds, model=model, optimizer=optimizer)
    for at, _ in zip(range(4), session.batches(loaders["train"]), strict=False):
        turn(model, optimizer, at)
    assert not run.page.get(HeartbeatField.UNPROTECTED)


def test_a_second_loader_that_is_iterated_by_hand_is_reported(run: Run) -> None:
    model = network()
    optimizer = adam(model)
    loaders = {name: DataLoader(range(64)) for name in ("train", "unlabeled", "val", "rare")}
    feeds = {f"loader.{name}": DataPosition(f"loader.{name}", one) for name, one in loaders.items()}
    session = run.session_of(run.next_context(), feeds, model=model, optimizer=optimizer)
    by_hand, rare = iter(loaders["unlabeled"]), iter(loaders["rare"])
    for at, _ in zip(range(12), session.batches(loaders["train"]), strict=False):
        assert ("loader.unlabeled has given no batch" in run.page.note) == (at >= 4)
        next(by_hand)
        if at % 4 == 2:
            next(rare)
            next(iter(loaders["val"]))
        turn(model, optimizer, at)
    assert run.page.note.count("has given no batch") == 1
    for _ in zip(range(2), session.batches(loaders["unlabeled"]), strict=False):
        turn(model, optimizer, session.step)
    assert not run.page.get(HeartbeatField.UNPROTECTED)


class Flaky:
    """A loader of the script's own, whose state_dict() fails for some time."""

    is_broken = False

    def __iter__(self) -> Iterator[int]:
        return iter(range(64))

    def state_dict(self) -> dict[str, Any]:
        if self.is_broken:
            raise KeyError("worker 3")
        return {}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        """Ignore the state."""


def test_a_loader_whose_own_state_dict_fails_is_named_and_costs_those_snapshots_only(
    run: Run,
) -> None:
    model = network()
    optimizer = adam(model)
    loader = Flaky()
    feeds = {"loader": DataPosition("loader", loader)}
    session = run.session_of(run.next_context(), feeds, model=model, optimizer=optimizer)
    batches = session.batches(loader)
    for at in session.steps(6):
        next(batches)
        loader.is_broken = at in (2, 3)
        turn(model, optimizer, at)
        if at == 4:
            assert run.page.get(HeartbeatField.UNPROTECTED)
            assert run.page.note == (
                "no snapshots until this is over: Flaky.state_dict() of loader, which the script "
                "has attached, raised KeyError: 'worker 3'"
            )
    assert not run.page.get(HeartbeatField.UNPROTECTED)
    assert run.page.get(HeartbeatField.SEALED_COUNT) == 4


# --- loads after attach ----------------------------------------------------------------------


def trained(run: Run) -> tuple[nn.Module, Optimizer, Session]:
    """A training of five steps, and objects into which it is restored."""
    model = network()
    optimizer = adam(model)
    for at in run.attach(model=model, optimizer=optimizer).steps(5):
        turn(model, optimizer, at)
    run.committed_version()
    model = network(seed=1)
    optimizer = adam(model)
    return model, optimizer, run.attach(model=model, optimizer=optimizer)


def load_others(model: nn.Module, optimizer: Optimizer, what: str = "both") -> None:
    """Load weights and state of another training, as a script does with its own checkpoint."""
    other = network(seed=2)
    its = adam(other)
    for at in range(2):
        turn(other, its, at)
    if what != "optimizer":
        model.load_state_dict(other.state_dict())
    if what != "model":
        optimizer.load_state_dict(its.state_dict())


def assert_goes_on(session: Session, model: nn.Module, optimizer: Optimizer) -> None:
    for at in session.steps(8):
        turn(model, optimizer, at)
    undisturbed = network()
    its = adam(undisturbed)
    for at in range(8):
        turn(undisturbed, its, at)
    assert all(map(torch.equal, values(model), values(undisturbed)))


def test_what_is_loaded_after_attach_gives_way_to_the_restored_state(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer, session = trained(run)
    load_others(model, optimizer)
    with caplog.at_level(logging.WARNING):
        assert_goes_on(session, model, optimizer)
    assert "the script has overwritten the restored model." in caplog.text
    assert "the state of step 5 is put back; load before attach" in caplog.text
    assert not run.page.get(HeartbeatField.UNPROTECTED)


def test_an_optimizer_that_is_loaded_after_attach_gives_way_too(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer, session = trained(run)
    optimizer.load_state_dict(optimizer.state_dict() | {"state": {}})
    with caplog.at_level(logging.WARNING):
        assert_goes_on(session, model, optimizer)
    assert "the restored optimizer.state.model.0.weight" in caplog.text


def test_parameters_that_are_replaced_after_attach_get_the_restored_values(run: Run) -> None:
    model, optimizer, session = trained(run)
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter)
    assert_goes_on(session, model, optimizer)


@pytest.mark.parametrize("change", ["none", "move", "same"])
def test_what_keeps_its_values_is_not_reported(
    run: Run, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer, session = trained(run)
    if change == "move":
        model.to("cpu")
        for parameter in model.parameters():  # as a move does: new memory, the same values
            parameter.data = parameter.data.clone()
    elif change == "same":
        model.load_state_dict(model.state_dict())
    with caplog.at_level(logging.WARNING):
        assert_goes_on(session, model, optimizer)
    assert "overwritten" not in caplog.text


def own_loop(session: Session, model: nn.Module, optimizer: Any, to: int) -> None:
    while session.step < to:
        turn(model, optimizer, session.step)
        session.step_done()


@pytest.mark.parametrize("what", ["both", "model", "optimizer"])
def test_a_loop_of_the_scripts_own_reports_what_it_cannot_put_back(run: Run, what: str) -> None:
    model, optimizer, session = trained(run)
    load_others(model, optimizer, what)
    own_loop(session, model, optimizer, 7)
    assert run.page.get(HeartbeatField.UNPROTECTED)
    assert f"the restored {'optimizer' if what == 'optimizer' else 'model'}." in run.page.note
    assert "does not continue from step 5; load before attach" in run.page.note


@pytest.mark.parametrize("has_begin", [True, False])
def test_a_loop_of_the_scripts_own_without_a_load_reports_nothing(
    run: Run, has_begin: bool
) -> None:
    model, optimizer, session = trained(run)
    if has_begin:
        load_others(model, optimizer)
        session.begin()
    with torch.no_grad():  # a layer that the loop normalizes is not a load
        model[2].bias.mul_(0.5)  # type: ignore[index]
    own_loop(session, model, optimizer, 7)
    assert not run.page.get(HeartbeatField.UNPROTECTED)


# --- flags and groups that are set after attach ------------------------------------------------


def frozen(model: nn.Module) -> None:
    model[0].weight.requires_grad_(False)  # type: ignore[index]


def at_first(model: nn.Module, optimizer: Optimizer) -> None:
    """The values that a script sets between attach and its loop."""
    frozen(model)
    model.train()
    optimizer.param_groups[0].update(lr=0.05, betas=(0.9, 0.999))


def set_later(model: nn.Module, optimizer: Optimizer) -> None:
    """The values that it sets in one iteration."""
    model[0].weight.requires_grad_()  # type: ignore[index]
    model[1].eval()  # type: ignore[index]
    optimizer.param_groups[0].update(lr=0.01, betas=(0.8, 0.99))


def test_flags_and_groups_set_after_attach_give_way_to_the_restored_ones(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    def train(model: nn.Module, optimizer: Optimizer, steps: Iterator[int]) -> None:
        for at in steps:
            turn(model, optimizer, at)
            if at == 2:
                set_later(model, optimizer)

    undisturbed = network()
    its = adam(undisturbed)
    at_first(undisturbed, its)
    train(undisturbed, its, iter(range(8)))
    for steps in (5, 8):
        model = network()
        optimizer = adam(model)
        session = run.attach(model=model, optimizer=optimizer)
        at_first(model, optimizer)
        with caplog.at_level(logging.WARNING):
            train(model, optimizer, session.steps(steps))
        run.committed_version()
    assert all(map(torch.equal, values(model), values(undisturbed)))
    assert [part.training for part in model.modules()] == [True, True, False, True]
    assert (
        "after attach the script has set model.0.weight.requires_grad, model.1.training, "
        "optimizer.param_groups[0].lr and 1 more otherwise than at step 5"
    ) in caplog.text
    assert caplog.text.count("otherwise than at step") == 1


def test_a_flag_that_each_turn_sets_for_itself_is_not_in_its_way(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    for steps in (3, 6):
        model = network()
        optimizer = adam(model)
        session = run.attach(model=model, optimizer=optimizer)
        model.train()
        with caplog.at_level(logging.WARNING):
            for at in session.steps(steps):
                model.train()
                assert all(part.training for part in model.modules())
                turn(model, optimizer, at)
                model.eval()
                loss_of(model, at)
                model.train()
        run.committed_version()
    assert session.restored
    assert "otherwise than" not in caplog.text


def test_a_phase_ends_with_the_next_boundary_and_a_block_with_itself(run: Run) -> None:
    model = network()
    optimizer = adam(model)
    session = run.attach(model=model, optimizer=optimizer)
    for at in session.steps(3):
        if at == 0:
            session.phase("eval")
            assert run.page.phase == "eval"
        if at == 1:
            assert run.page.phase == "train"
        turn(model, optimizer, at)
    before = run.page.phase
    with session.phase("eval"):
        session.step_done()
        assert run.page.phase == "eval"
        stepped_ns = run.page.get(HeartbeatField.HEARTBEAT_NS)
    assert run.page.phase == before
    assert run.page.get(HeartbeatField.HEARTBEAT_NS) > stepped_ns, "its end is progress"


def test_a_second_session_counts_its_steps_after_those_of_the_first(run: Run) -> None:
    model = network()
    optimizer = adam(model)
    session = run.attach(model=model, optimizer=optimizer)
    for at in session.steps(3):
        turn(model, optimizer, at)
    context = session._context
    session.close()
    attached = AttachedState(modules={"model": model}, optimizers={"optimizer": optimizer})
    later = Session(attached, {}, context, None, is_first=False)
    for at in later.steps(4):
        turn(model, optimizer, at)
    later.close()
    assert run.page.get(HeartbeatField.STEP) == 7
    assert run.page.get(HeartbeatField.SEALED_STEP) == 3
    assert "a second session is in no snapshot" in run.page.note


def test_a_block_in_a_plain_phase_returns_to_it_and_the_boundary_ends_it(run: Run) -> None:
    model = network()
    optimizer = adam(model)
    session = run.attach(model=model, optimizer=optimizer)
    for at in session.steps(2):
        turn(model, optimizer, at)
        session.phase("eval")
        with session.phase("save"):
            assert run.page.phase == "save"
        assert run.page.phase == "eval"
        if at == 0:
            session.snapshot()
    assert run.page.phase != "eval"
