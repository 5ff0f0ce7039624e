"""`ftrun manifest` as typed on a command line; the page shows exactly what it prints."""

import re
import shlex
import stat
from pathlib import Path

import pytest
import yaml
from manifest_schema import problems
from typer.testing import CliRunner

from ftrun.errors import FtrunError, UsageError
from ftrun.tools.manifests import command as manifests

PAGE = Path(__file__).parents[3] / "docs" / "slurm-kubernetes.md"


def rendered(words: list[str]) -> str:
    done = CliRunner().invoke(manifests.app, words)
    if done.exception is not None:
        raise done.exception
    return done.stdout


def examples() -> list[tuple[str, str]]:
    """Each command of the page that has a block right below it, and the block."""
    pattern = r"^((?:    [^\n]*\\\n)*    [^\n]*\n)\n```\w+\n(.*?)^```"
    found = re.findall(pattern, PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return [(command.replace("\\\n", " ").strip(), text) for command, text in found]


@pytest.mark.parametrize(("command", "text"), examples())
def test_the_page_shows_what_is_printed(command: str, text: str) -> None:
    ftrun, manifest, *words = shlex.split(command)
    assert (ftrun, manifest) == ("ftrun", "manifest")
    assert rendered(words) == text


def test_the_page_has_both() -> None:
    assert [shlex.split(command)[2] for command, _ in examples()] == ["slurm", "kubernetes"]


@pytest.mark.parametrize("kind", ["slurm", "kubernetes", "kubeflow"])
def test_every_option_is_on_the_page(kind: str) -> None:
    said = rendered([kind, "--help"])
    options = set(re.findall(r"^  (?:-h, )?(--[a-z-]+)", said, re.MULTILINE)) - {"--help"}
    assert len(options) > 10
    assert {option for option in options if f"`{option}" not in PAGE.read_text()} == set()


def test_it_is_written_into_a_file_that_is_new(tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    words = ["slurm", "--out", str(path), "--", "train.py"]
    assert rendered(words) == ""
    assert path.read_text() == rendered(["slurm", "--", "train.py"])
    assert stat.S_IMODE(path.stat().st_mode) & 0o500 == 0o500
    path.write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        rendered(words)
    assert path.read_text() == "mine"
    with pytest.raises(FtrunError, match="cannot be written: No such file"):
        rendered(["slurm", "--out", str(tmp_path / "no" / "job.sh"), "--", "train.py"])


@pytest.mark.parametrize(
    "words", [["--nnodes", "4", "train.py"], ["--time", "1h", "--checkpoint-dir=/x", "train.py"]]
)
def test_words_of_ftrun_belong_behind_the_hyphens(words: list[str]) -> None:
    with pytest.raises(UsageError, match="Put -- before the words"):
        rendered(["slurm", *words])


def test_a_runtime_needs_neither_words_nor_a_script() -> None:
    words = ["kubeflow", "--image", "registry.example/train:1"]
    assert rendered(words) == rendered([*words, "--"])
    assert "kind: TrainJob" not in rendered(words)
    assert "kind: TrainJob" in rendered([*words, "--", "--nnodes", "2", "train.py"])


def test_the_trainjob_of_the_page_is_valid() -> None:
    (text,) = re.findall(r"^```yaml\n(apiVersion: trainer.*?)^```", PAGE.read_text(),
                         re.MULTILINE | re.DOTALL)  # fmt: skip
    assert problems(yaml.safe_load(text)) == []


def test_a_script_alone_needs_no_hyphens() -> None:
    assert rendered(["slurm", "train.py"]) == rendered(["slurm", "--", "train.py"])
