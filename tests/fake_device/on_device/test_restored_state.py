"""A session on the device: what it restores is bitwise the state of the boundary, on its device."""

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import fake
from torch import nn

from ftrun.config.profile import SnapshotConfig
from ftrun.errors import SnapshotCorrupt
from ftrun.sharding.rules import ShardingRules
from ftrun.snapshot.layout import SMALL_BYTES
from ftrun.worker.capture.device_copies import Device
from ftrun.worker.restore import early_restore, shard
from ftrun.worker.state.attached import declared
from ftrun.worker.state.determinism import put_back, take_all
from tests.integration.in_process_worker import TIMEOUT_S, Run

DEVICE = torch.device("privateuseone", 0)  # its name "fake" is unknown while tests are collected
WIDTH = 600


@pytest.fixture(params=[0, 3], ids=["lazy", "verified"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Run]:
    with closing(Run(tmp_path)) as one:
        one.settings = SnapshotConfig(
            every=1, commit_timeout_s=TIMEOUT_S, verify_first=request.param
        )
        yield one


def made() -> dict[str, Any]:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.Flatten(),
        nn.Linear(8 * 25, WIDTH),
        nn.Linear(WIDTH, WIDTH),
    )
    model = model.to(DEVICE).to(memory_format=torch.channels_last)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01)}


def step(parts: dict[str, Any], number: int) -> None:
    given = torch.Generator().manual_seed(number)
    x = torch.randn(16, 4, 5, 5, generator=given).to(DEVICE)
    parts["model"](x).square().mean().backward()
    parts["optimizer"].step()
    parts["optimizer"].zero_grad()


def state_of(parts: dict[str, Any]) -> dict[str, torch.Tensor]:
    torch.accelerator.synchronize(DEVICE)
    found = {name: one.detach().cpu().clone() for name, one in parts["model"].state_dict().items()}
    for index, state in parts["optimizer"].state_dict()["state"].items():
        found |= {f"{index}.{key}": value.cpu().clone() for key, value in state.items()}
    return found


@pytest.mark.parametrize("mode", ["lazy", "threads"])
@pytest.mark.parametrize("where", ["default", "own"])
def test_a_restore_is_bitwise(run: Run, mode: str, where: str) -> None:
    current = torch.accelerator.current_stream(DEVICE)
    with torch.Stream(DEVICE) if where == "own" else current:
        parts = made()
        session = run.attach(**parts)
        for number in range(4):
            step(parts, number)
            session.step_done()
        wanted = state_of(parts)
        drawn = torch.rand(5, device=DEVICE).cpu()
        session._protection.finish()  # type: ignore[union-attr]
        again = made()
        restored = run.attach(**again)
        assert restored.restored
        assert torch.equal(torch.rand(5, device=DEVICE).cpu(), drawn)
        found = state_of(again)
        assert found.keys() == wanted.keys()
        assert [name for name in wanted if not torch.equal(wanted[name], found[name])] == []
        state = again["optimizer"].state
        weight = again["model"][0].weight
        assert state[weight]["exp_avg"].device == DEVICE
        assert state[weight]["exp_avg"].stride() == weight.stride()


def large() -> nn.Module:
    """Its weight has three pieces of 4 MiB."""
    return nn.Linear(1500, 2000, device=DEVICE)


def test_two_threads_restore_the_same_bytes(run: Run, second_thread: list[int]) -> None:
    model = large()
    run.attach(model=model).step_done()
    run.sessions[-1]._protection.finish()  # type: ignore[union-attr]
    second_thread.clear()
    again = large()
    assert run.attach(model=again).restored
    assert 2 in second_thread
    assert torch.equal(again.weight.cpu(), model.weight.cpu())


def test_a_damaged_piece_is_found_by_the_second_thread(
    run: Run, second_thread: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    run.attach(model=large()).step_done()
    run.sessions[-1]._protection.finish()  # type: ignore[union-attr]
    digest = shard.digest_of

    def damaged(content: Any) -> int:
        is_second = threading.current_thread().name.startswith("ftrun-copy-2")
        return 1 if is_second else digest(content)

    monkeypatch.setattr(shard, "digest_of", damaged)
    # The early restore may have compared pieces that the second thread then does not compare.
    monkeypatch.setattr(early_restore, "digest_of", lambda _: 1)
    with pytest.raises(SnapshotCorrupt):
        run.attach(model=large())
    assert second_thread


# --- another number of ranks, another layout ------------------------------------------------------


class Wide(nn.Module):
    """Rank 0's part of a model over `size` ranks: rows of one weight, columns of the others."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.rows = parameter(1, 800, 300, at=(slice(0, 800 // size), slice(None)))
        self.columns = parameter(2, 300, 800, at=(slice(None), slice(0, 800 // size)))
        self.turned = parameter(3, 400, 800, at=(slice(None), slice(0, 800 // size)), turns=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.rows.t() @ self.columns.t() @ self.turned[:300]


def parameter(seed: int, *shape: int, at: tuple[slice, slice], turns: bool = False) -> nn.Parameter:
    """Some items of random ones; `turns`: the first dimension has the smallest stride."""
    given = torch.Generator().manual_seed(seed)
    found = (torch.randn(shape, generator=given) / 30)[at]
    return nn.Parameter((found.t().contiguous().t() if turns else found.contiguous()).to(DEVICE))


def trained(run: Run, layout: ShardingRules | None) -> dict[str, Any]:
    """Three steps of one rank, each with a snapshot."""
    model = Wide(1)
    parts = {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01),
        "average": {"rows": model.rows.detach() + 1},
    }
    session = run.attach(layout=layout, **parts)
    for number in range(3):
        x = torch.randn(8, 300, generator=torch.Generator().manual_seed(number)).to(DEVICE)
        model(x).square().mean().backward()
        parts["optimizer"].step()
        parts["optimizer"].zero_grad()
        session.step_done()
    session._protection.finish()  # type: ignore[union-attr]
    return parts


@pytest.fixture
def put_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each copy to the device through page-locked buffers."""
    counts, put = list[int](), Device.put

    def counted(device: Device, target: torch.Tensor, fill: Any) -> None:
        counts.append(target.nbytes)
        put(device, target, fill)

    monkeypatch.setattr(Device, "put", counted)
    return counts


RULES = """
mesh: {dp: 1, tp: 1}
shard:
  - {name: model.rows, axis: tp, dim: 0}
  - {name: [model.columns, model.turned], axis: tp, dim: 1}
replicate:
  - "average*"
"""


@pytest.mark.parametrize("mode", ["lazy", "threads"])
@pytest.mark.parametrize("rules", ["", RULES], ids=["another number of ranks", "another layout"])
def test_a_restore_into_another_world_is_bitwise_and_uses_the_buffers(
    run: Run, mode: str, rules: str, tmp_path: Path, put_bytes: list[int]
) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(rules)
    before = trained(run, declared(path, {"tp": 1}, 1) if rules else None)
    put_bytes.clear()
    model = Wide(2 if rules else 1)
    nn.init.zeros_(model.columns)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    average: dict[str, torch.Tensor] = {}
    attached = run.session_of(
        run.next_context(world_size=2),
        layout=declared(path, {"tp": 2}, 2) if rules else None,
        model=model,
        optimizer=optimizer,
        average=average,
    )
    assert attached.restored
    torch.accelerator.synchronize(DEVICE)
    large = [average["rows"]]
    assert torch.equal(average["rows"].cpu(), before["average"]["rows"].cpu())
    assert average["rows"].device == DEVICE
    for name, one in model.named_parameters():
        old = before["model"].get_parameter(name)
        part = tuple(slice(0, size) for size in one.shape)
        assert torch.equal(one.cpu(), old[part].cpu()), name
        state, its = optimizer.state[one], before["optimizer"].state[old]
        for key in ("exp_avg", "exp_avg_sq"):
            assert state[key].device == DEVICE
            assert torch.equal(state[key].cpu(), its[key][part].cpu()), (name, key)
        assert state["step"] == its["step"]
        large += [one, state["exp_avg"], state["exp_avg_sq"]]
    assert model.turned.stride() == (1, 400)
    assert min(one.nbytes for one in large) >= SMALL_BYTES
    assert sum(put_bytes) == sum(one.nbytes for one in large)


def test_the_loss_is_reported_without_a_wait(run: Run) -> None:
    parts = made()
    session = run.attach(**parts)
    for number in range(3):
        session.report(loss=torch.full((), float(number), device=DEVICE))
        assert fake.num_pending()
    torch.accelerator.synchronize(DEVICE)
    session.report(loss=torch.full((), 9.0, device=DEVICE))
    assert run.page.loss == 2.0


def test_the_scale_of_losses_is_copied_without_a_wait(run: Run) -> None:
    parts = {**made(), "scaler": torch.amp.GradScaler("fake")}
    session = run.attach(**parts)
    for number in range(2):
        step(parts, number)
        parts["scaler"].scale(torch.ones((), device=DEVICE))
        parts["scaler"]._scale.fill_(1024.0 * (number + 1))
        session.step_done()
    session._protection.finish()  # type: ignore[union-attr]
    again = {**made(), "scaler": torch.amp.GradScaler("fake")}
    run.attach(**again)
    assert again["scaler"].state_dict() == {**parts["scaler"].state_dict(), "scale": 2048.0}


def test_random_states_are_by_device_and_the_rest_follows() -> None:
    taken = take_all()
    assert len(taken["fake"]) == 2
    drawn = [torch.rand(3, device=f"fake:{index}").cpu() for index in range(2)]
    put_back(taken)
    assert torch.equal(torch.rand(3, device="fake:0").cpu(), drawn[0])
    put_back({**taken, "fake": taken["fake"][:1]})
    assert torch.equal(torch.rand(3, device="fake:0").cpu(), drawn[0])
    second = torch.rand(3, device="fake:1").cpu()
    put_back({**taken, "fake": taken["fake"][:1]})
    assert torch.equal(torch.rand(3, device="fake:1").cpu(), second)
