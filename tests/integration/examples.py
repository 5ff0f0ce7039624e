"""The examples of documentation pages, run with and without a rank that is killed."""

import re
import subprocess
import sys
import types
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import WAIT_S, Run, Start

DOCS = Path(__file__).parents[2] / "docs"

RUNS_A_FRAMEWORK = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(1800)]

DIES = """
import os, signal, torch

backward = torch.Tensor.backward
left = {deaths}.get(os.environ.get("TORCHELASTIC_RESTART_COUNT"), 0)
last = int(os.environ.get("WORLD_SIZE", 1)) - 1


def backward_or_die(*args, **kwargs):
    global left
    backward(*args, **kwargs)
    left -= 1
    if left == 0 and int(os.environ["RANK"]) == last:
        os.kill(os.getpid(), signal.SIGKILL)


torch.Tensor.backward = backward_or_die
"""
"""The last rank of a generation dies after this number of its own backward passes."""

REPORTS = """
import hashlib

digest = hashlib.sha256()
for value in model.state_dict().values():
    digest.update(value.detach().cpu().numpy().tobytes())
print(f"digest {os.environ['RANK']} {digest.hexdigest()}", flush=True)
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""

ENDS_AT_ONCE = """
import os

os._exit(0)
"""
"""At the end of an undisturbed script: on a busy machine torch 2.13 with gloo sometimes aborts
when the interpreter ends ("terminate called without an active exception")."""

DIES_ONCE = """
import hashlib, os, signal, time, torch

dies = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"


def die():
    if dies:
        time.sleep(3)  # until the last snapshot is sealed
        os.kill(os.getpid(), signal.SIGKILL)


def digested(value):
    if isinstance(value, torch.Tensor):
        return hashlib.sha256(value.detach().numpy().tobytes()).hexdigest()
    if isinstance(value, dict):
        return {key: digested(one) for key, one in value.items()}
    return [digested(one) for one in value] if isinstance(value, list | tuple) else value


def end(**things):
    for name, value in things.items():
        print("end", name, str(digested(value)).replace(os.getcwd(), ""), flush=True)


"""
"""`die()` kills the rank in the first generation of a run; `end()` shows what is compared."""


def example(
    title: str,
    changes: Mapping[str, str] = types.MappingProxyType({}),
    page: str = "frameworks.md",
) -> str:
    """The first block of code under a title of a page, with some of its words replaced."""
    _, found, rest = (DOCS / page).read_text().partition(f"# {title}\n")
    assert found, f"{page} has no section {title}"
    block = re.search(r"^```python\n(.*?)^```", rest, re.MULTILINE | re.DOTALL)
    assert block is not None
    code = block.group(1)
    for old, new in changes.items():
        assert old in code, f"the example of {title} does not say {old!r}"
        code = code.replace(old, new)
    return code


def each_of(kinds: Mapping[str, Mapping[str, str]]) -> pytest.MarkDecorator:
    """A test for each kind of an example: by its name, the words to replace."""
    return pytest.mark.parametrize("changes", list(kinds.values()), ids=list(kinds))


def loses_a_rank_twice(
    start: Start,
    folder: Path,
    code: str,
    *,
    first: Container[int],
    second: Container[int],
) -> Run:
    """Kill a rank in the middle of an accumulation, and again in a later epoch.

    The seventh backward is the first of two whose gradients make the fourth step. An epoch has
    twelve of them.

    Args:
        start: starts ftrun.
        folder: the working folder of ftrun.
        code: the script; it leaves its model in `model`.
        first: steps that the first restart may go back to.
        second: the same for the second one.
    """
    run = ends_like_undisturbed(start, folder, code, {0: 7, 1: 12})
    steps = restored_steps(run)
    assert len(steps) == 2, f"{steps}\n{run.text}"
    assert steps[0] in first, f"{steps}\n{run.text}"
    assert steps[1] in second, f"{steps}\n{run.text}"
    return run


def ends_like_undisturbed(
    start: Start, folder: Path, code: str, deaths: Mapping[int, int], *words: str
) -> Run:
    """Compare with torchrun, bit for bit.

    Args:
        start: starts ftrun.
        folder: the working folder of ftrun.
        code: the script; it leaves its model in `model`.
        deaths: by generation, the backward after which its last rank dies.
        words: for ftrun.
    """
    reference = folder / "calm"
    reference.mkdir()
    (reference / "train.py").write_text(DIES.format(deaths={}) + code + REPORTS + ENDS_AT_ONCE)
    by_generation = {str(generation): count for generation, count in deaths.items()}
    (folder / "train.py").write_text(DIES.format(deaths=by_generation) + code + REPORTS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    run = start("--nproc-per-node", "2", "--snapshot-every", "1", *words, "train.py")
    undisturbed = _output_of([*torchrun, "train.py"], reference, run)
    assert wait_long(run) == 0, run.text
    assert len(run.journal("generation_started")) == 1 + len(deaths), run.text
    found = digests(run.text)
    assert len(found) == 2, run.text
    assert found == digests(undisturbed), f"{undisturbed}\n{'-' * 80}\n{run.text}"
    return run


def one_rank_ends_like_undisturbed(
    start: Start, folder: Path, code: str, *, restored: list[int]
) -> Run:
    """Compare one rank that dies once with the same script under plain python, bit for bit.

    Args:
        start: starts ftrun.
        folder: the working folder of ftrun.
        code: the script; it calls `die()` and `end()`.
        restored: the steps that the restarts go back to.
    """
    reference = folder / "calm"
    reference.mkdir()
    for place in (reference, folder):
        (place / "train.py").write_text(DIES_ONCE + code)
    run = start("--nproc-per-node", "1", "--snapshot-every", "1", "train.py")
    undisturbed = _output_of([sys.executable, "train.py"], reference, run)
    assert wait_long(run) == 0, run.text
    assert restored_steps(run) == restored, run.text
    found = ends(run.text)
    assert found, run.text
    assert found == ends(undisturbed), f"{undisturbed}\n{'-' * 80}\n{run.text}"
    return run


def _output_of(words: list[str], folder: Path, run: Run) -> str:
    done = subprocess.run(
        words,
        cwd=folder,
        env=run.variables,
        capture_output=True,
        text=True,
        timeout=3 * WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def wait_long(run: Run) -> int:
    """Wait long, because the import of a framework is slow."""
    try:
        return run.process.wait(3 * WAIT_S)
    except subprocess.TimeoutExpired:
        pytest.fail(f"still running after {3 * WAIT_S} s:\n{run.text}")


def digests(text: str) -> list[str]:
    return sorted(re.findall(r"digest \d \w{64}", text))


def ends(text: str) -> list[str]:
    """What the call of `end()` has shown."""
    return re.findall(r"^.*?\bend (\w+ .*)", text, re.MULTILINE)


def restored_steps(run: Run) -> list[int]:
    """The steps that the restarts went back to."""
    restored: list[Any] = [line["restored"] for line in run.journal("generation_started")[1:]]
    return [version["step"] for version in restored if version is not None]
