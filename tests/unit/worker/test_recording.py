"""Recording for `ftrun verify` changes no number, and leaves modules fully usable."""

import subprocess
import sys
from pathlib import Path

import pytest

from ftrun.wire.verify_records import (
    ATTACHED,
    BATCH,
    BOUNDARY,
    FAILED,
    FORWARD,
    LOSS,
    OPTIMIZER,
    read_records,
)

_HEAD = """
import copy, io, os, pickle, sys
from pathlib import Path
from types import SimpleNamespace
import torch
from torch import nn
from ftrun.wire import run_environment as env
from ftrun.wire.verify_records import VerifyPlan
from ftrun.worker import context as contexts
from ftrun.worker.state.attached import (AttachedState)
from ftrun.worker.capture.recording import Recording

def recording(folder, steps=100):
    page = SimpleNamespace(note="", phase="")
    context = SimpleNamespace(rank=0, world_size=1, generation=0, page=page, restore=None)
    context.recording = found = Recording(context, VerifyPlan(folder, steps))
    contexts.worker_context = lambda: context
    found.install()
    return found

def train(found, wrap=lambda model: model):
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if found is not None:
        attached = AttachedState()
        attached.add("model", model)
        attached.add("optimizer", optimizer)
        found.attached(attached, lambda: {"session": {"step": 0}}, (), 0)
    called = wrap(model)
    loader = torch.utils.data.DataLoader(torch.arange(40.0).reshape(10, 4), 2, shuffle=True)
    for step, batch in enumerate(loader, 1):
        loss = called(batch).square().mean() + torch.rand(1).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if found is not None:
            assert found.boundary(step)
            found.passed(step)
    return model, [torch.get_rng_state(), *model.state_dict().values()]
"""


def run(tmp_path: Path, code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _HEAD + code, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_recorded_training_has_the_same_bits(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
_, plain = train(None)
model, recorded = train(recording(sys.argv[1]))
assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
copy.deepcopy(model)(torch.ones(2, 4))
torch.save(model, io.BytesIO())
pickle.loads(pickle.dumps(model))
""",
    )
    records = read_records(tmp_path / "rank0.0.jsonl")
    turn = [BATCH, FORWARD, LOSS, OPTIMIZER, BOUNDARY]
    assert [record.event for record in records[:11]] == [ATTACHED, *turn, *turn]
    assert records[1].digests.keys() == {"batch", "indices"}
    assert records[4].notes == {"changed": "", "is_attached": "1"}
    assert "tensor optimizer.state.model.0.weight.exp_avg" in records[5].digests


def test_the_last_step_ends_the_process(tmp_path: Path) -> None:
    said = run(tmp_path, "train(recording(sys.argv[1], steps=3)); print('too far')")
    assert said == ""
    assert read_records(tmp_path / "rank0.0.jsonl")[-1].step == 3


_TRAINED = """
found = recording(sys.argv[1])
model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
attached = AttachedState()
attached.add("model", model)
attached.add("optimizer", optimizer)
found.attached(attached, lambda: {"session": {"step": 0}}, (), 0)

def learn():
    loss = model(torch.ones(2, 3)).sum()
    torch.autograd.backward(loss)
    optimizer.step()
"""


def test_what_forwards_and_backwards_may_do(tmp_path: Path) -> None:
    run(
        tmp_path,
        _TRAINED
        + """
from torch.utils.checkpoint import checkpoint

learn()
found.boundary(1)

weights = {name: p * 2 for name, p in model.named_parameters()}
torch.func.functional_call(model, weights, torch.ones(2, 3))  # no weight of the model changes
own = {name: p.detach() for name, p in model.named_parameters()}
torch.func.grad(lambda w: torch.func.functional_call(model, w, torch.ones(2, 3)).sum())(own)
model[1].weight.data.add_(1)
model(torch.ones(2, 3))
found._context.page.phase = "eval"
model(torch.ones(2, 3))
found.boundary(2)

x = torch.ones(2, 3, requires_grad=True)
checkpoint(model, x, use_reentrant=True).sum().backward()
torch.autograd.backward([model(x).sum(), model(x).mean()])
found.boundary(3)
""",
    )
    records = read_records(tmp_path / "rank0.0.jsonl")
    assert FAILED not in [record.event for record in records], records
    turns = [[record for record in records if record.step == step] for step in (1, 2, 3)]
    assert [record.event for record in turns[0]] == [FORWARD, LOSS, OPTIMIZER, BOUNDARY]
    changed = [r.notes.get("changed") for r in turns[1] if r.event == FORWARD]
    assert changed == ["", "model.1.weight", None]
    assert len([r for r in turns[2] if r.event == LOSS]) == 3


def test_what_cannot_be_recorded_is_reported_and_does_not_reach_the_script(tmp_path: Path) -> None:
    run(
        tmp_path,
        _TRAINED
        + """
import collections

class Columns(collections.UserDict):
    def items(self):
        raise RuntimeError("columns are read on demand")

class Wrapper(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = model

    def forward(self, columns):
        return self.inner(columns["x"])

learn()
attached.state["file"] = sys.stdout
assert found.boundary(1)
whole = Wrapper()
again = AttachedState()
again.add("model", whole)
found.attached(again, dict, (), 1)
whole(Columns(x=torch.ones(2, 3)))
""",
    )
    records = read_records(tmp_path / "rank0.0.jsonl")
    boundary = next(record for record in records if record.event == BOUNDARY)
    assert "holds a _io.TextIOWrapper, which a" in boundary.notes["unprotected"]
    assert "tensor SGD.params[0]" in boundary.digests
    (failed,) = (record for record in records if record.event == FAILED)
    assert failed.what == "before_forward: RuntimeError: columns are read on demand"


@pytest.mark.full
def test_a_compiled_module_is_compiled_whole(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
def wrap(model):
    return torch.compile(model, backend="eager", fullgraph=True)

_, plain = train(None, wrap)
_, recorded = train(recording(sys.argv[1]), wrap)
assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
""",
    )
