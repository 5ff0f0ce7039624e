"""The recipes of docs/getting-started.md, killed twice, end like an undisturbed run.

The undisturbed run is under plain python, or torchrun if there are two ranks.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import WAIT_S, Run, Start
from tests.integration.examples import DIES, ENDS_AT_ONCE, example, restored_steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PAGE = "getting-started.md"

REPORTS = """
import hashlib

digest = hashlib.sha256()
for name, thing in sorted(globals().copy().items()):
    if isinstance(thing, (torch.nn.Module, torch.optim.Optimizer)):
        held = thing.state_dict()
        digest.update(repr([name, {**held, **held.get("state", {})}]).encode())
        for tensor in torch.utils._pytree.tree_leaves(held):
            if isinstance(tensor, torch.Tensor):
                digest.update(tensor.detach().numpy().tobytes())
values = torch.utils._pytree.tree_leaves(session.state)
digest.update(repr([v.tolist() if isinstance(v, torch.Tensor) else v for v in values]).encode())
print(f"digest {session.step} {digest.hexdigest()}", flush=True)
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""
"""Step, and a digest of every model, every optimizer and `session.state`."""


def recipe(title: str) -> str:
    return example(title, page=PAGE) + REPORTS


def digests(text: str) -> list[str]:
    return re.findall(r"digest (\d+ \w{64})", text)


def undisturbed(folder: Path, code: str, ranks: int = 1) -> list[str]:
    """The output of the script at its end without ftrun."""
    undisturbed = folder / "calm"
    undisturbed.mkdir()
    (undisturbed / "train.py").write_text(code + ENDS_AT_ONCE)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [sys.executable, *(torchrun if ranks > 1 else []), "train.py"],
        cwd=undisturbed,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = digests(done.stdout)
    assert len(found) == ranks
    return found


def started(start: Start, folder: Path, code: str, *words: str, ranks: int = 1) -> Run:
    (folder / "train.py").write_text(code)
    return start("--nproc-per-node", str(ranks), *words, "train.py")


@pytest.mark.parametrize(
    ("title", "ranks", "deaths"),
    [
        pytest.param("nanoGPT loop", 1, {"0": 6, "1": 5}, marks=pytest.mark.full),
        pytest.param("N steps over epochs", 2, {"0": 7, "1": 5}, marks=pytest.mark.full),
        pytest.param("LoRA with accumulation", 1, {"0": 10, "1": 8}, marks=pytest.mark.full),
        pytest.param("EMA evaluation", 1, {"0": 6, "1": 5}, marks=pytest.mark.full),
        pytest.param("GAN", 1, {"0": 10, "1": 7}, marks=pytest.mark.full),
        pytest.param("Own loop with torch.save", 1, {"0": 6, "1": 5}, marks=pytest.mark.full),
        pytest.param("Replay buffer", 1, {"0": 6, "1": 5}, marks=pytest.mark.full),
    ],
)
def test_a_recipe_killed_twice_ends_as_undisturbed(
    start: Start, tmp_path: Path, title: str, ranks: int, deaths: dict[str, int]
) -> None:
    code = recipe(title)
    killed = DIES.format(deaths=deaths) + code
    run = started(start, tmp_path, killed, "--snapshot-every", "1", ranks=ranks)
    expected = undisturbed(tmp_path, code, ranks)
    assert run.wait() == 0, run.text
    assert digests(run.text) == expected, run.text
    first, second = restored_steps(run)
    assert 0 < first < second, run.text
    assert run.text.count("Local variables") == 1, run.text


KILLED_AFTER_THE_LOOP = """
import os, signal, time

if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
    while not os.path.exists("die"):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_rank_killed_after_the_loop_and_a_finished_run_started_again_end_with_the_result(
    start: Start, tmp_path: Path
) -> None:
    code = recipe("nanoGPT loop")
    words = ("--snapshot-every", "1", "--checkpoint-dir", "kept")
    run = started(start, tmp_path, code.replace(REPORTS, KILLED_AFTER_THE_LOOP + REPORTS), *words)
    expected = undisturbed(tmp_path, code)
    run.wait_until("committed", lambda: committed_step(run) == 16)
    (tmp_path / "die").touch()
    assert run.wait() == 0, run.text
    assert restored_steps(run) == [16]
    assert digests(run.text) == expected
    assert run.text.count("step 16, best") == 2

    again = start("--nproc-per-node", "1", *words, "train.py")
    assert again.wait() == 0, again.text
    assert digests(again.text) == expected


LEFT_BY_BREAK = """
import torch
import ftrun

torch.manual_seed(0)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters(), 0.1)
loader = torch.utils.data.DataLoader(torch.randn(4, 2), shuffle=True)
session = ftrun.attach(model, optimizer, loader=loader)
step = session.step
for epoch in session.epochs(100):
    for batch in session.batches(loader):
        model(batch).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step >= 6:
            break
    if step >= 6:
        break
"""


@pytest.mark.full
def test_a_loop_left_by_break_inside_epochs_has_its_last_step_on_disk(
    start: Start, tmp_path: Path
) -> None:
    """The interval alone would have left the newest snapshot at step 4."""
    code = LEFT_BY_BREAK + REPORTS
    words = ("--snapshot-every", "4", "--checkpoint-dir", "kept")
    run = started(start, tmp_path, code, *words)
    assert run.wait() == 0, run.text
    expected = digests(run.text)
    assert expected[0].startswith("6 ")
    assert (tmp_path / "kept" / "latest").readlink().name.startswith("step-00000006-")

    again = start("--nproc-per-node", "1", *words, "train.py")
    assert again.wait() == 0, again.text
    assert digests(again.text) == expected
    assert "was left by break or return at step 6" in again.text


def committed_step(run: Run) -> object:
    snapshots = run.status().get("snapshots") or {}
    return snapshots.get("step")  # type: ignore[attr-defined]
