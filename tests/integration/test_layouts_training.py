"""A training on plain tensors continues in another tensor-parallel layout, bit for bit.

The rules are those that docs/layouts.md shows.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ftrun.cli.screen.text import count
from tests.integration.conftest import Run, Start
from tests.integration.documented import rule_file

SCRIPTS = Path(__file__).parent / "scripts"
SCRIPT = str(SCRIPTS / "tensor_parallel_training.py")
PIPELINE = str(SCRIPTS / "pipeline_training.py")

pytestmark = pytest.mark.timeout(900)


def reported(run: Run, word: str) -> set[str]:
    """Step and digest of the whole state, which all ranks must print equally."""
    return set(re.findall(rf"{word} (step=\d+ digest=\w+(?: of=\d+)?)", run.text))


def trained(start: Start, folder: str, ranks: int, size: int, steps: int, rules: str = "") -> Run:
    words = ("--checkpoint-dir", folder, "--nproc-per-node", str(ranks))
    run = start(*words, SCRIPT, str(size), str(steps), *([rules] if rules else []))
    assert run.wait() == 0, run.text
    return run


def converted(
    folder: Path, source: str, out: str, *words: str, rules: str = "tensor-parallel.yaml"
) -> str:
    return checkpoints(folder, "convert", source, out, "--rules", rules, *words)


def checkpoints(folder: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "ftrun", "checkpoints", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([(3, 3)], marks=pytest.mark.full),
        pytest.param([(4, 4), (1, 1), (2, 1)], marks=pytest.mark.full),
        pytest.param([(3, 3), (8, 4), (2, 2)], marks=pytest.mark.full),
    ],
    ids=["to 3", "to 4, 1 and 1 of 2", "to 3, 4 of 8 and 2"],
)
def test_parameters_and_moments_are_equal_bit_for_bit_in_another_layout(
    start: Start, tmp_path: Path, sizes: list[tuple[int, int]]
) -> None:
    """Each of `sizes`: the number of ranks, and the tensor-parallel size."""
    rules = tmp_path / "tensor-parallel.yaml"
    rules.write_text(rule_file("tensor-parallel.yaml"))
    steps, before, folder = 6, (4, 2), "saved-0"
    run = trained(start, folder, *before, steps)
    for number, (ranks, size) in enumerate(sizes, start=1):
        last = reported(run, "ends")
        assert len(last) == 1, run.text
        new = f"saved-{number}"
        text = rules.read_text()
        rules.write_text(re.sub(r"mesh: .*", f"mesh: {{dp: {before[0] // before[1]}, "
                                             f"tp: {before[1]}}}", text))  # fmt: skip
        shown = converted(tmp_path, folder, new, "--mesh", f"dp={ranks // size},tp={size}")
        assert f"a checkpoint of {count(ranks, 'rank')}\n" in shown
        steps += 4
        run = trained(start, new, ranks, size, steps)
        assert reported(run, "begins") == last, run.text
        assert "not bitwise" not in run.text
        before, folder = (ranks, size), new
    assert next(iter(reported(run, "ends"))).startswith(f"step={steps} ")


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([(3, 3)], marks=pytest.mark.full),
        pytest.param([(4, 4), (2, 1), (4, 2), (4, 2)], marks=pytest.mark.full),
    ],
    ids=["to 3", "to 4, 1 of 2, 2 of 4 and the same"],
)
def test_a_run_that_declares_its_layout_continues_from_another_by_itself(
    start: Start, tmp_path: Path, sizes: list[tuple[int, int]]
) -> None:
    (tmp_path / "rules.yaml").write_text(rule_file("tensor-parallel.yaml"))
    steps = 6
    run = trained(start, "saved", 4, 2, steps, "rules.yaml")
    for ranks, size in sizes:
        last = reported(run, "ends")
        assert len(last) == 1, run.text
        steps += 4
        run = trained(start, "saved", ranks, size, steps, "rules.yaml")
        assert reported(run, "begins") == last, run.text
    assert next(iter(reported(run, "ends"))).startswith(f"step={steps} ")


@pytest.mark.full
def test_a_converted_checkpoint_reports_its_new_layout(start: Start, tmp_path: Path) -> None:
    rules = tmp_path / "tensor-parallel.yaml"
    rules.write_text(rule_file("tensor-parallel.yaml"))
    run = trained(start, "saved", 4, 2, 3, rules.name)
    last = reported(run, "ends")
    converted(tmp_path, "saved", "one", "--mesh", "dp=1,tp=1")
    assert reported(trained(start, "one", 1, 1, 3, rules.name), "begins") == last
    run = trained(start, "one", 2, 2, 5, rules.name)
    assert reported(run, "begins") == last
    assert run.text.count("not bitwise") == 1


@pytest.mark.slow
@pytest.mark.full
def test_a_run_continues_from_atoms_in_any_layout(start: Start, tmp_path: Path) -> None:
    """It declares its layout, so it needs no rules to make or to load them; or it does not."""
    rules = tmp_path / "tensor-parallel.yaml"
    rules.write_text(rule_file("tensor-parallel.yaml"))
    last = reported(trained(start, "saved", 4, 2, 3, rules.name), "ends")
    assert len(last) == 1
    checkpoints(tmp_path, "export", "saved", "atoms", "--format", "atoms")
    checkpoints(tmp_path, "load", "atoms", "whole")
    run = trained(start, "whole", 3, 3, 5, rules.name)
    assert reported(run, "begins") == last, run.text
    words = ("--rules", rules.name, "--mesh", "dp=2,tp=1")
    checkpoints(tmp_path, "load", "atoms", "cut", *words)
    run = trained(start, "cut", 2, 1, 5)
    assert reported(run, "begins") == last, run.text
    assert "not bitwise" not in run.text


@pytest.mark.full
def test_a_version_that_reports_no_layout_is_refused_in_words(start: Start, tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(rule_file("tensor-parallel.yaml"))
    trained(start, "saved", 4, 2, 3)
    words = ("--checkpoint-dir", "saved", "--nproc-per-node", "3", SCRIPT, "3", "9", "rules.yaml")
    run = start(*words)
    assert run.wait() != 0
    assert "declared no layout" in run.text


# --- pipelines whose stages number their layers from 0 -----------------------------------------

Way = tuple[int, int, str]
"""Stages, tensor-parallel size, layers of each run."""


def piped(start: Start, folder: Path, way: Way, steps: int, *more: str, saved: str) -> Run:
    """A run of this pipeline, with the rules of the page for its sizes and turns."""
    stages, size, runs = way
    turns = len(runs.split(",")) // stages
    rules = rule_file("stages.yaml").replace("of: 5", f"of: 5\n    sizes: [{runs}]")
    name = f"stages-{stages}-{size}-{turns}.yaml"
    mesh = f"mesh: {{pp: {stages}, tp: {size}}}"
    text = re.sub("mesh: .*", mesh, rules).replace("turns: 1", f"turns: {turns}")
    (folder / name).write_text(text)
    script = (PIPELINE, str(stages), str(size), runs, str(steps), name, *more)
    words = ("--checkpoint-dir", saved, "--nproc-per-node", str(stages * size))
    run = start(*words, *script)
    assert run.wait() == 0, run.text
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "others"),
    [
        pytest.param((2, 1, "3,2"), [(3, 1, "2,1,2")], marks=pytest.mark.full),
        pytest.param((2, 2, "1,4"), [(1, 4, "5"), (2, 2, "1,2,1,1")], marks=pytest.mark.full),
        pytest.param((2, 1, "1,1,2,1"), [(3, 1, "1,1,3"), (1, 2, "2,3")], marks=pytest.mark.full),
    ],
    ids=["2 stages to 3", "2x2 to 1x4 to 2x2 in two turns", "two turns to 3 stages to 1x2"],
)
def test_layers_that_each_stage_numbers_again_move_to_other_stages(
    start: Start, tmp_path: Path, first: Way, others: list[Way]
) -> None:
    steps = 5
    run = piped(start, tmp_path, first, steps, saved="saved")
    for way in others:
        last = reported(run, "ends")
        assert len(last) == 1, run.text
        assert next(iter(last)).endswith(" of=68")  # 17 tensors, two moments and a step each
        steps += 3
        run = piped(start, tmp_path, way, steps, saved="saved")
        assert reported(run, "begins") == last, run.text
    assert next(iter(reported(run, "ends"))).startswith(f"step={steps} ")


@pytest.mark.slow
@pytest.mark.full
def test_stages_that_number_their_layers_again_are_converted(start: Start, tmp_path: Path) -> None:
    run = piped(start, tmp_path, (2, 2, "3,2"), 4, "undeclared", saved="saved")
    last = reported(run, "ends")
    (tmp_path / "to.yaml").write_text(
        rule_file("stages.yaml").replace("pp: 2, tp: 2", "pp: 3, tp: 1")
    )
    (tmp_path / "stages.yaml").write_text(rule_file("stages.yaml"))
    converted(tmp_path, "saved", "new", "--to", "to.yaml", rules="stages.yaml")
    run = piped(start, tmp_path, (3, 1, "2,2,1"), 6, "undeclared", saved="new")
    assert reported(run, "begins") == last, run.text
