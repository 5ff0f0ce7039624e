"""`ftrun verify` reports whether a restart changes the results of a script, and the reason."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.conftest import in_full
from tests.integration.examples import example

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WAIT_S = 600.0
FEW = ("--steps", "10", "--kills", "1")
"""One kill in the middle of step 6; step 5 has no snapshot, so it is repeated."""

HEAD = """
import os, random
import torch
import ftrun
from torch import nn

torch.manual_seed(3)
random.seed(3)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def draw():
    x = torch.randn(8, 4)
    return x, x.sum(1, keepdim=True)


def loss_of(x, y):
    return nn.functional.mse_loss(model(x), y)


def learn(loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

PREFETCH = """
session = ftrun.attach(model=model, optimizer=optimizer)
best = 1e9
x, y = draw()
while session.step < 100:
    loss = loss_of(x, y)
    best = min(best, loss.item())
    learn(loss)
    x, y = draw()  # for the next step
    session.step_done()
"""

Script = Callable[..., str]


def verify(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the verification, in a temporary folder of its own that is empty afterwards.

    Its path is short: multiprocessing creates sockets in it, whose paths have at most 107 bytes.
    """
    temporary = Path(tempfile.mkdtemp(prefix="v"))
    try:
        return _verify(folder, temporary, *words)
    finally:
        shutil.rmtree(temporary)


def _verify(folder: Path, temporary: Path, *words: str) -> subprocess.CompletedProcess[str]:
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("FTRUN_", "PET_"))}
    done = subprocess.run(
        [sys.executable, "-m", "ftrun", "verify", *words],
        cwd=folder, env={**variables, "TMPDIR": str(temporary)}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    check_nothing_is_left(folder, temporary)
    return done


def check_nothing_is_left(folder: Path, temporary: Path) -> None:
    """No records, no run folder, and no process that uses either."""
    assert not list(temporary.glob("ftrun-verify-*"))
    assert not list(temporary.glob("ftrun-*/verify-*"))
    assert not (folder / "ftrun-logs").exists()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                assert str(temporary).encode() not in (entry / "cmdline").read_bytes()
            except OSError:
                continue


def result(folder: Path, *words: str) -> dict[str, object]:
    done = verify(folder, "--json", *FEW, *words)
    assert done.stdout, done.stderr
    document = json.loads(done.stdout)
    assert document["exit_code"] == done.returncode, done.stderr
    return document


def finding(document: dict[str, object], kind: str) -> dict[str, object]:
    findings = document["findings"]
    assert isinstance(findings, list)
    found = [one for one in findings if one["kind"] == kind]
    assert len(found) == 1, document["text"]
    return found[0]


def line_of(text: str, folder: Path, name: str = "train.py") -> int:
    return next(at for at, line in enumerate((folder / name).read_text().splitlines(), 1)
                if text in line)  # fmt: skip


@pytest.mark.full
def test_a_run_that_ends_early_after_a_restart_is_no_equal_one(
    tmp_path: Path, script: Script
) -> None:
    name = script(
        HEAD
        + """
session = ftrun.attach(model=model, optimizer=optimizer)
for step in session.steps(9 - session.step):
    learn(loss_of(*draw()))
"""
    )
    document = result(tmp_path, name)
    assert document["verdict"] == "differs", document["text"]
    text = str(document["text"])
    assert "the run with kills ends after step 5" in text
    assert "after steps 9 and 9" in text
    assert document["difference"] is None


@pytest.mark.full
def test_equal_two_ranks(tmp_path: Path, script: Script) -> None:
    name = script(
        HEAD
        + """
torch.distributed.init_process_group("gloo")
rank = int(os.environ["RANK"])
model = nn.parallel.DistributedDataParallel(model)
generator = torch.Generator().manual_seed(rank)
session = ftrun.attach(model=model, optimizer=optimizer, data=generator)
for step in session.steps(100):
    x = torch.randn(8, 4, generator=generator) + random.random()
    learn(loss_of(x, x.sum(1, keepdim=True)))
raise SystemExit("a run of a verification ends after its last step")
"""
    )
    done = verify(tmp_path, "--steps", "10", "--kills", "2", "--nproc-per-node", "2", name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "EQUAL: 2 restarts, " in done.stdout
    assert "40 losses" not in done.stdout.split("EQUAL")[1].split("repeated")[0]
    # The plan and the external effects are printed before anything is started.
    head, _, rest = done.stdout.partition("run 1:")
    assert "10 steps with a rank killed after steps 3 and 6" in head
    assert "written 2 or 3 times" in head
    assert "rank 1 killed after step 3" in rest
    assert "rank 0 killed after step 6, resumed from step 4, 2 steps repeated" in rest
    assert "run 3" not in rest


@pytest.mark.parametrize(
    ("title", "words"),
    [
        pytest.param("EMA evaluation", (), marks=pytest.mark.full),
        pytest.param("nanoGPT loop", (), marks=pytest.mark.full),
        pytest.param("N steps over epochs", ("--nproc-per-node", "2"), marks=pytest.mark.full),
        pytest.param("LoRA with accumulation", (), marks=pytest.mark.full),
        pytest.param("GAN", (), marks=pytest.mark.full),
        pytest.param("Own loop with torch.save", ("--steps", "3"), marks=pytest.mark.full),
    ],
)
def test_a_recipe_is_equal_and_nothing_is_found(
    tmp_path: Path, script: Script, title: str, words: tuple[str, ...]
) -> None:
    name = script(example(title, page="getting-started.md"))
    document = result(tmp_path, *words, name)
    assert document["verdict"] == "equal", document["text"]
    assert document["findings"] == [], document["text"]


@pytest.mark.full
def test_a_checkpoint_of_the_script_that_the_second_run_loads_is_named(
    tmp_path: Path, script: Script
) -> None:
    name = script(example("Own loop with torch.save", page="getting-started.md"))
    document = result(tmp_path, name)
    assert document["verdict"] == "not deterministic", document["text"]
    text = str(finding(document, "not deterministic")["text"])
    assert "begins after step 0, and the other one after step 8" in text


@pytest.mark.full  # two runs of two ranks: over 10 s
def test_fsdp_parameters_are_left_alone_while_a_forward_runs(
    tmp_path: Path, script: Script
) -> None:
    """The root then holds whole parameters of its own: the last layer's."""
    name = script(
        HEAD
        + """
from torch.distributed.fsdp import fully_shard

torch.distributed.init_process_group("gloo")
fully_shard(model[0])
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session = ftrun.attach(model=model, optimizer=optimizer)
for step in session.steps(100):
    learn(loss_of(*draw()))
"""
    )
    document = result(tmp_path, "--nproc-per-node", "2", name)
    assert document["verdict"] == "equal", document["text"]
    assert document["findings"] == [], document["text"]


@pytest.mark.full  # in the test below as well, in a loop of a session
def test_prefetched_batch_is_named(tmp_path: Path, script: Script) -> None:
    name = script(HEAD + PREFETCH)
    document = result(tmp_path, name)
    assert document["verdict"] == "differs"
    assert document["exit_code"] == 1
    assert document["restarts"] == [
        {"rank": 0, "step": 5, "resumed_from": 4, "is_restored": True, "repeated": 1}
    ]
    found = finding(document, "prefetched batch")
    assert found["names"] == ["x", "y"]
    best = finding(document, "variable")
    assert best["names"] == ["best"]
    assert "best = 1000000000.0 in place of " in str(best["text"])
    first = line_of("x, y = draw()", tmp_path)
    again = line_of("# for the next step", tmp_path)
    assert f"x (set at {name}:{first}, {name}:{again})" in str(found["text"])
    assert "The state of step 4 was restored exactly" in str(document["text"])
    assert document["difference"]["step"] == 5  # type: ignore[index]


def test_four_mistakes_of_one_script_are_named(tmp_path: Path, script: Script) -> None:
    name = script(
        HEAD
        + """
class Augmented(torch.utils.data.Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        return torch.full((4,), float(index)) + torch.rand(4)


def swap():
    for p, e in zip(model.parameters(), ema.values(), strict=True):
        p.data, e.data = e.data.clone(), p.data.clone()


other = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
ema = {name: p.detach().clone() for name, p in model.named_parameters()}
loader = torch.utils.data.DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=1)
session = ftrun.attach(model=model, optimizer=optimizer, loader=loader, ema=ema)
noise = torch.randn(4, 4)
for epoch in session.epochs(2):
    for batch in session.batches(loader):
        x = batch / 400
        swap()
        with torch.no_grad():
            print(model(x).sum())  # with averaged weights
        swap()
        learn(loss_of(noise, x[:, :1]))
        other.step()
        noise = torch.randn(4, 4)  # for the next step
        for p, e in zip(model.parameters(), ema.values(), strict=True):
            e.data.lerp_(p.data, 0.1)
"""
    )
    document = result(tmp_path, name)
    assert document["verdict"] == "differs"

    def at(text: str) -> str:
        return f"{name}:{line_of(text, tmp_path)}"

    assert finding(document, "augmentation")["where"] == at("in session.batches")
    assert finding(document, "unattached optimizer")["names"] == ["SGD", at("other.step()")]
    assert finding(document, "weight swap")["where"] == at("with averaged weights")
    noise = finding(document, "prefetched batch")
    assert noise["names"] == ["noise"]
    assert finding(document, "variable")["names"] == ["other"]
    places = f"{name}:{line_of('noise = torch', tmp_path)}, {at('# for the next step')}"
    assert f"noise (set at {places})" in str(noise["text"])


@pytest.mark.full
def test_unattached_optimizer_is_named(tmp_path: Path, script: Script) -> None:
    name = script(
        HEAD
        + """
other = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
session = ftrun.attach(model=model, optimizer=optimizer)
for step in session.steps(100):
    learn(loss_of(*draw()))
    other.step()
"""
    )
    document = result(tmp_path, name)
    assert document["verdict"] == "differs"
    found = finding(document, "unattached optimizer")
    assert found["names"] == ["SGD", f"{name}:{line_of('other.step()', tmp_path)}"]
    assert document["difference"]["event"] == "boundary"  # type: ignore[index]


@pytest.mark.full
def test_hidden_weight_swap_is_named(tmp_path: Path, script: Script) -> None:
    name = script(
        HEAD
        + """
ema = {name: p.detach().clone() for name, p in model.named_parameters()}
session = ftrun.attach(model=model, optimizer=optimizer, ema=ema)


def swap():
    for p, e in zip(model.parameters(), ema.values(), strict=True):
        p.data, e.data = e.data.clone(), p.data.clone()


for step in session.steps(100):
    x, y = draw()
    swap()
    with torch.no_grad():
        print(loss_of(x, y))
    swap()
    learn(loss_of(x, y))
    for p, e in zip(model.parameters(), ema.values(), strict=True):
        e.data.lerp_(p.data, 0.1)
"""
    )
    document = result(tmp_path, name)
    found = finding(document, "weight swap")
    assert found["where"] == f"{name}:{line_of('return nn.functional', tmp_path)}"
    assert "model.0.weight" in found["names"]  # type: ignore[operator]


@pytest.mark.full
def test_random_augmentation_in_workers_is_named(tmp_path: Path, script: Script) -> None:
    name = script(
        HEAD
        + """
class Augmented(torch.utils.data.Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        return torch.full((4,), float(index)) + torch.rand(4)


loader = torch.utils.data.DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=1)
session = ftrun.attach(model=model, optimizer=optimizer, loader=loader)
for epoch in session.epochs(2):
    for x in session.batches(loader):
        learn(loss_of(x / 400, x[:, :1]))
"""
    )
    document = result(tmp_path, name)
    assert document["verdict"] == "differs"
    found = finding(document, "augmentation")
    assert "loads the same samples in step 5 with other values" in str(found["text"])
    assert "StatefulDataLoader" in str(found["remedy"])
    assert found["where"] == f"{name}:{line_of('in session.batches', tmp_path)}"


@pytest.mark.full
def test_a_value_that_cannot_be_stored_is_reported_as_a_run_reports_it(
    tmp_path: Path, script: Script
) -> None:
    name = script(
        HEAD
        + """
session = ftrun.attach(model=model, optimizer=optimizer)
for step in session.steps(100):
    learn(loss_of(*draw()))
    if step == 4:
        session.state["file"] = open(__file__)
"""
    )
    document = result(tmp_path, name)
    assert document["verdict"] == "equal", document["text"]
    text = str(finding(document, "reported by ftrun")["text"])
    assert "ftrun reports: no snapshots until this is over: session.state.file holds a" in text


@pytest.mark.full
def test_script_that_is_not_deterministic(tmp_path: Path, script: Script) -> None:
    name = script(HEAD.replace("torch.manual_seed(3)", "torch.seed()") + PREFETCH)
    document = result(tmp_path, name)
    assert document["verdict"] == "not deterministic"
    assert document["exit_code"] == 1
    assert "torch" in finding(document, "not deterministic")["names"]  # type: ignore[operator]
    assert len(document["runs"]) == 2  # type: ignore[arg-type]


@pytest.mark.full
def test_script_without_attach(tmp_path: Path, script: Script) -> None:
    name = script(HEAD + "for step in range(10):\n    learn(loss_of(*draw()))\n")
    done = verify(tmp_path, *FEW, name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Nothing is attached: the script calls no ftrun.attach" in done.stdout
    assert (
        "rank 0 killed after step 5, restarted from the beginning, 5 steps repeated" in done.stdout
    )


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)]
)
def test_signal_leaves_nothing(tmp_path: Path, script: Script, number: signal.Signals) -> None:
    name = script(HEAD + PREFETCH.replace("loss = loss_of", "open('up', 'w'); loss = loss_of")
                  + "    import time; time.sleep(1)\n")  # fmt: skip
    (tmp_path / "tmp").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "ftrun", "verify", name],
        cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        # If this test runs behind a shell's `&`, SIGINT is ignored by all its child processes.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )  # fmt: skip
    try:
        give_up = time.monotonic() + WAIT_S
        while not (tmp_path / "up").exists():
            assert process.poll() is None
            assert time.monotonic() < give_up
            time.sleep(0.05)
        process.send_signal(number)
        process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
    assert process.returncode == 128 + number
    check_nothing_is_left(tmp_path, tmp_path / "tmp")


def test_script_that_fails(tmp_path: Path, script: Script) -> None:
    name = script(HEAD + "raise ValueError('no such column')\n")
    done = verify(tmp_path, "--folder", "kept", name)
    assert done.returncode == 3
    assert "NOT COMPARED: the script failed without a kill" in done.stdout
    assert "no such column" in done.stdout
    assert str(tmp_path / "kept" / "run1" / "logs") in done.stdout
    assert "no such column" in (tmp_path / "kept" / "run1" / "output.txt").read_text()


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--timeout", "5", r"the time of this run is over \(--timeout\): after \d+ s it has"),
        *in_full(("--max-disk", "1", r"records and logs take \d MiB, and --max-disk allows 1\.")),
    ],
)
def test_a_limit_ends_a_run(
    tmp_path: Path, script: Script, flag: str, value: str, said: str
) -> None:
    name = script("import time\nprint('x' * (3 << 20), flush=True)\ntime.sleep(600)\n")
    done = verify(tmp_path, flag, value, name)
    assert done.returncode == 3, done.stdout + done.stderr
    assert re.search(f"NOT COMPARED: {said}", done.stdout), done.stdout


@pytest.mark.full
def test_time_is_bounded(tmp_path: Path, script: Script) -> None:
    name = script("import time\nprint('begun')\ntime.sleep(600)\n")
    done = verify(tmp_path, "--timeout", "30", name)
    assert done.returncode == 3
    assert "the time of this run is over (--timeout)" in done.stdout
    assert "it has made 0 steps" in done.stdout
    assert "begun" in done.stdout
    assert "ftrun-verify-" not in done.stdout, "the folder is removed"
