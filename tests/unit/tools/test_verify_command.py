"""The arguments of `ftrun verify`: accepted, passed to its runs, or refused."""

import re
import sys
from pathlib import Path

import pytest

from ftrun.cli.launch.command_line import parse
from ftrun.errors import UsageError
from ftrun.tools.verify import command
from ftrun.tools.verify.command import FLAGS, Options, options_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ftrun starts runs on Linux only")


@pytest.fixture(autouse=True)
def _script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PET_NNODES", raising=False)


def options(*words: str) -> Options:
    return options_of(parse(words, more=FLAGS))


def test_defaults() -> None:
    found = options("train.py")
    assert (found.steps, found.num_kills, found.timeout_s) == (20, 2, 600)
    assert found.disk_bytes == 1 << 30
    assert found.folder is None


def test_flags_of_a_run_are_passed_on_and_its_own_are_not() -> None:
    given = "--steps 30 --nproc-per-node=2 --start fresh --json -m --set hang.kill_after_s=60 train"
    found = options(*given.split(), "--steps", "7", "--json")
    assert found.steps == 30
    assert found.is_json
    words = ["--start=fresh", "--set=hang.kill_after_s=60", "--nproc-per-node=2", "--module", "--"]
    assert list(found.words) == [*words, "train", "--steps", "7", "--json"]


def test_flags_that_a_verification_replaces_are_left_out() -> None:
    given = "--run-id big --checkpoint-dir /data --max-restarts 0 --snapshot-every 9 --no-snapshots"
    assert options(*given.split(), "train.py").words == ("--", "train.py")


def test_chosen_steps() -> None:
    assert options("--at", "7,14", "train.py").kill_steps == (7, 14)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "no script is given"),
        ("missing.py", "missing.py does not exist"),
        ("--steps 0 train.py", "--steps is a whole number"),
        ("--kills x train.py", "--kills is a whole number"),
        ("--kills 20 train.py", "needs more than --steps 20"),
        ("--at 14,7 train.py", "increasing steps below --steps 20"),
        ("--at 20 train.py", "increasing steps below --steps 20"),
        ("--nnodes 2 --rdzv-endpoint a train.py", "runs on one node"),
        ("--spares 1 --rdzv-endpoint a train.py", "runs on one node"),
        ("--kill train.py", "not a flag"),
        ("--kill-at 3 train.py", "Did you mean --kills?"),
        ("--step 3 train.py", "Did you mean --steps?"),
    ],
)
def test_refused(words: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        options(*words.split())


def test_help_teaches_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.verify(["--help"]) == 0
    text = capsys.readouterr().out
    assert "ftrun verify --nproc-per-node 2 train.py" in text
    assert "--max-disk MIB" in text
    assert "Exit codes" in text
