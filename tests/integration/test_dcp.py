"""Trainings that only call torch.distributed.checkpoint, with ftrun's writer and reader.

The script is the one of docs/dcp.md. A test adds its parts at the ends of lines: the digest of the
state after a load and at the end, a kill at a step, another way to save.
"""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.conftest import Run, Start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PAGE = Path(__file__).parents[2] / "docs" / "dcp.md"
(EXAMPLE,) = re.findall(r"```python\n(import sys\n.*?)```", PAGE.read_text(), re.DOTALL)

REPORTS = """
import hashlib, os, signal

def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

def report_state(word):
    found = hashlib.sha256()
    for parameter in model.parameters():
        state = training.optimizer.state.get(parameter, {})
        for one in (parameter, state.get("exp_avg"), state.get("exp_avg_sq")):
            if one is not None:
                found.update(whole(one.detach()).numpy().tobytes())
    words = f"step={training.step} digest={found.hexdigest()}"
    say(f"{word} {words}")
    return words

def say(words):
    print(f"{words}\\n", end="", flush=True)  # in one piece: other ranks write too

generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
report_state("begins")
"""
LOOP = "while training.step < steps:\n"
STEPPED = "    training.step += 1\n"
SAVE = 'dcp.save({"training": training}, storage_writer=ftrun.dcp.Writer())\n'
END = "dist.destroy_process_group()\n"
LAST_SAVE = 10
"""Of twelve steps, with a kill after the eleventh."""

KILL = f"""
    if training.step == {LAST_SAVE + 1} and generation == 0 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def example(*, kills: str = "", saves: str = SAVE, at_end: str = "") -> str:
    """The example, which prints its state, with replaced parts."""
    text = EXAMPLE.replace(SAVE, saves).replace(STEPPED, STEPPED + kills)
    return text.replace(LOOP, REPORTS + LOOP).replace(END, f'{at_end}report_state("ends")\n{END}')


def reported(run: Run, word: str) -> list[str]:
    """The output of the ranks, each line once, in order."""
    return list(dict.fromkeys(re.findall(rf"{word} (step=.*)", run.text)))


def undisturbed(start: Start, script: Callable[..., str], kind: str, steps: int = 12) -> str:
    """The final state of two ranks without a failure and without a save."""
    name = script(example(saves="pass\n"), "whole.py")
    run = start("--nproc-per-node", "2", name, kind, str(steps))
    assert run.wait() == 0, run.text
    (found,) = reported(run, "ends")
    return found


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.full)])
def test_a_killed_rank_continues_from_memory(
    start: Start, script: Callable[..., str], kind: str
) -> None:
    run = start("--nproc-per-node", "2", script(example(kills=KILL)), kind, "12")
    assert run.wait() == 0, run.text
    # The other rank may see its collective fail before it is ended, and may print that.
    assert not re.search(r'File ".*/ftrun/(worker|wire|dcp)', run.text), run.text
    assert len(run.journal("generation_started")) == 2
    first, second = reported(run, "begins")
    assert first.startswith("step=0 ")
    assert second.startswith(f"step={LAST_SAVE} ")
    assert reported(run, "ends") == [undisturbed(start, script, kind)]


def chain(start: Start, name: str, *turns: tuple[int, str]) -> None:
    """Runs one after the other, each with its own ranks and sharding, over one directory."""
    last: list[str] = []
    for number, (ranks, kind) in enumerate(turns):
        words = ("--checkpoint-dir", "saved", "--nproc-per-node", str(ranks))
        run = start(*words, name, kind, str(6 * (number + 1)))
        assert run.wait() == 0, run.text
        if number:
            assert reported(run, "begins") == last, run.text
        last = reported(run, "ends")
        assert len(last) == 1, run.text
        assert last[0].startswith(f"step={6 * (number + 1)} ")


def test_what_two_ranks_have_saved_is_loaded_by_one_from_disk(
    start: Start, script: Callable[..., str]
) -> None:
    chain(start, script(example()), (2, "fsdp"), (1, "ddp"))


@pytest.mark.full
def test_any_number_of_ranks_and_any_layout_continues_from_disk(
    start: Start, script: Callable[..., str]
) -> None:
    turns = ((2, "ddp"), (3, "fsdp"), (3, "ddp"), (1, "fsdp"), (2, "fsdp"))
    chain(start, script(example()), *turns)


IN_THE_BACKGROUND = """if "saved" in globals():
            saved.result()
        saved = dcp.async_save(
            {"training": training},
            storage_writer=ftrun.dcp.Writer(),
            process_group=background,
        )
"""
IS_DONE = f"""
    if training.step == {LAST_SAVE + 1} and generation == 0:
        saved.result()
        dist.barrier()
"""


@pytest.mark.full
def test_a_save_in_the_background_is_continued_from(
    start: Start, script: Callable[..., str]
) -> None:
    text = example(kills=IS_DONE + KILL, saves=IN_THE_BACKGROUND, at_end="saved.result()\n")
    text = text.replace(LOOP, "background = dist.new_group()\n" + LOOP)
    run = start("--nproc-per-node", "2", script(text), "fsdp", "12")
    assert run.wait() == 0, run.text
    assert reported(run, "begins")[1].startswith(f"step={LAST_SAVE} ")
    assert reported(run, "ends") == [undisturbed(start, script, "fsdp")]


FAILS = "try_to_save(training)\n"
TRIES = '''
from torch.distributed.checkpoint.api import CheckpointException

class Fails:
    """Cannot be serialized."""
    def __reduce__(self):
        raise ValueError("no such thing")

def try_to_save(training):
    state = {"training": training, "rank": {dist.get_rank(): dist.get_rank()}}
    if training.step == 4:
        state[f"bad{dist.get_rank()}"] = Fails() if dist.get_rank() == BAD else torch.ones(1)
    label = f"saved/step-{10 * training.step}"
    try:
        dcp.save(state, checkpoint_id=label, storage_writer=ftrun.dcp.Writer(wait_s=20))
    except CheckpointException as error:
        say(f"failed step={training.step}: {'no such thing' in str(error)}")
'''
LABELS = """
for asked in ("elsewhere/step-120", "saved/step-40"):
    reader = ftrun.dcp.Reader()
    before = training.step
    try:
        dcp.load({"training": training}, checkpoint_id=asked, storage_reader=reader)
        say(f"loaded {asked}")
    except CheckpointException as error:
        say(f"refused {asked}: {'the newest snapshot is step 120' in str(error)}")
assert ftrun.dcp.newest_step() == 120
"""


@pytest.mark.full
@pytest.mark.parametrize("who", [0, 1])
def test_what_fails_on_one_rank_is_sent_to_all_and_the_next_save_continues(
    start: Start, script: Callable[..., str], who: int
) -> None:
    text = example(saves=FAILS, at_end=LABELS).replace(LOOP, TRIES.replace("BAD", str(who)) + LOOP)
    run = start("--nproc-per-node", "2", "--checkpoint-dir", "saved", script(text), "ddp", "12")
    assert run.wait() == 0, run.text
    assert run.text.count("failed step=4: True") == 2, run.text
    assert run.text.count("failed") == 2, run.text
    assert run.text.count("loaded elsewhere/step-120") == 2, run.text
    assert run.text.count("refused saved/step-40: True") == 2, run.text
    assert (run.folder / "saved" / "latest").readlink().name.startswith("step-00000120-")


CRASHES = ["worker.capture.marked", "worker.capture.copied", "worker.capture.sealed"]


@pytest.mark.full
@pytest.mark.parametrize("point", CRASHES)
def test_a_rank_that_dies_in_a_save_costs_the_steps_since_the_last(
    start: Start, script: Callable[..., str], tmp_path: Path, point: str
) -> None:
    once = tmp_path / "once"
    variables = {"FTRUN_CRASH_AT": point, "FTRUN_CRASH_ONCE": str(once)}
    words = ("--nproc-per-node", "2", script(example()), "fsdp", "12")
    run = start(*words, env=variables)
    assert run.wait() == 0, run.text
    assert once.exists()
    assert len(run.journal("generation_started")) == 2
    assert reported(run, "ends") == [undisturbed(start, script, "fsdp")]


@pytest.mark.full
def test_a_snapshot_manager_that_dies_between_saves_costs_nothing(
    start: Start, script: Callable[..., str]
) -> None:
    slowly = "    __import__('time').sleep(0.3)\n"
    run = start("--nproc-per-node", "2", script(example(kills=slowly)), "ddp", "12")
    run.wait_for_step(3)
    os.kill(run.pid_of("smp"), signal.SIGKILL)
    assert run.wait() == 0, run.text
    assert len(run.journal("generation_started")) == 1
    assert reported(run, "ends") == [undisturbed(start, script, "ddp")]
