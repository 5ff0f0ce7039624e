"""The command line for its users: bad input, help, completion, several runs."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from made_journals import MadeJournal

from ftrun.cli.run import take_folder

FTRUN = [sys.executable, "-m", "ftrun"]


def ftrun(
    *words: str, cwd: Path, variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*FTRUN, *words],
        cwd=cwd,
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime(cwd)), **(variables or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def runtime(folder: Path) -> Path:
    """Not the folder itself: a folder named ftrun there could hide an editable installation."""
    path = folder / "runtime"
    path.mkdir(exist_ok=True)
    return path


def refused(done: subprocess.CompletedProcess[str], *, code: int = 2) -> str:
    """The text of an error: one block on stderr, no traceback, nothing on stdout."""
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith("Error: ")
    assert "Traceback" not in done.stderr
    assert not done.stdout
    return done.stderr


def nothing_started(folder: Path) -> bool:
    return not list(folder.glob("runtime/ftrun/*")) and not (folder / "ftrun-logs").exists()


def test_missing_script(tmp_path: Path) -> None:
    text = refused(ftrun("--nproc-per-node", "2", "train.py", cwd=tmp_path))
    assert f"train.py does not exist; cwd {tmp_path}" in text
    assert nothing_started(tmp_path)


@pytest.mark.parametrize(
    ("old", "new"), [("check", "preflight"), ("snapshots", "checkpoints"), ("render", "manifest")]
)
def test_renamed_command_answers_with_its_name(old: str, new: str, tmp_path: Path) -> None:
    assert f"ftrun {old} is now ftrun {new}" in refused(ftrun(old, "--json", cwd=tmp_path))


def test_misspelled_command_is_no_missing_script(tmp_path: Path) -> None:
    text = refused(ftrun("verfy", "train.py", cwd=tmp_path))
    assert "verfy is neither a command of ftrun nor a script" in text
    assert "Did you mean ftrun verify?" in text
    assert nothing_started(tmp_path)
    (tmp_path / "verfy").touch()
    wrong = {"PET_NPROC_PER_NODE": "x"}
    assert "whole number" in refused(ftrun("verfy", cwd=tmp_path, variables=wrong))


def test_unknown_flag(tmp_path: Path) -> None:
    text = refused(ftrun("--nprocs-per-node", "2", "train.py", cwd=tmp_path))
    assert "Did you mean --nproc-per-node?" in text
    assert nothing_started(tmp_path)


def test_unknown_profile_key(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "mine.yaml").write_text("snapshot:\n  evry: 1\nsmp:\n  orphan_timeout_s: soon\n")
    text = refused(ftrun("--profile", "mine.yaml", "train.py", cwd=tmp_path))
    assert "mine.yaml:2: snapshot.evry: there is no such key; did you mean every?" in text
    assert "mine.yaml:4: smp.orphan_timeout_s" in text
    assert nothing_started(tmp_path)


def test_several_nodes_without_a_place_to_meet(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    assert "--rdzv-endpoint HOST" in refused(ftrun("--nnodes", "2", "train.py", cwd=tmp_path))
    assert nothing_started(tmp_path)


def test_a_master_that_has_no_address(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    done = ftrun("--master-addr", "nowhere.invalid", "train.py", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "--master-addr nowhere.invalid has no address" in done.stderr
    assert "Traceback" not in done.stderr


def test_run_that_is_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime(tmp_path)))
    (tmp_path / "train.py").touch()
    _, lock_fd = take_folder("mine", script="x")
    text = refused(ftrun("--run-id", "mine", "train.py", cwd=tmp_path))
    assert f"run mine is alive (pid {os.getpid()})" in text
    starting = ftrun("status", cwd=tmp_path)
    assert starting.stdout.startswith("STARTING")
    assert json.loads(ftrun("status", "mine", "--json", cwd=tmp_path).stdout)["run_id"] == "mine"
    _, other_fd = take_folder("other", script="x")
    text = refused(ftrun("status", cwd=tmp_path))
    assert "ftrun status mine" in text
    assert "ftrun status other" in text
    os.close(lock_fd)
    os.close(other_fd)


def test_no_run(tmp_path: Path) -> None:
    assert "no run of yours" in refused(ftrun("status", cwd=tmp_path), code=1)
    assert "no run of yours" in refused(ftrun("stop", cwd=tmp_path), code=1)
    assert "no run xyz" in refused(ftrun("status", "xyz", cwd=tmp_path), code=1)
    assert "a/b" in refused(ftrun("stop", "a/b", cwd=tmp_path))


def test_traceback_only_when_asked(tmp_path: Path) -> None:
    done = ftrun("--debug", "train.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert "Traceback" in ftrun("status", cwd=tmp_path, variables={"FTRUN_DEBUG": "1"}).stderr


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["run", "--help"], [], ["--quiet", "-h"]])
def test_help_teaches(words: list[str], tmp_path: Path) -> None:
    done = ftrun(*words, cwd=tmp_path)
    assert done.returncode == 0
    own, torchruns = done.stdout.index("ftrun's own"), done.stdout.index("torchrun's options")
    assert own < done.stdout.index("--snapshot-every") < torchruns
    assert torchruns < done.stdout.index("--rdzv-backend")
    assert "Examples:" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 100


def test_version_and_profiles(tmp_path: Path) -> None:
    assert ftrun("--version", cwd=tmp_path).stdout.startswith("ftrun 0.")
    listed = ftrun("profiles", cwd=tmp_path)
    assert "single-node-gpu" in listed.stdout
    shown = ftrun(
        "profiles",
        "show",
        "laptop",
        "--origin",
        cwd=tmp_path,
        variables={"FTRUN_SMP_ORPHAN_TIMEOUT_S": "7"},
    )
    assert "environment FTRUN_SMP_ORPHAN_TIMEOUT_S" in shown.stdout
    assert "laptop.yaml:" in shown.stdout
    assert "labtop" in refused(ftrun("profiles", "show", "labtop", cwd=tmp_path))


def test_first_word_that_is_a_command_is_one_and_after_run_it_is_a_script(tmp_path: Path) -> None:
    text = refused(ftrun("run", "status", cwd=tmp_path))
    assert "status does not exist" in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("ftrun --npr", "--nproc-per-node"),
        ("ftrun --standalone --snapshot-e", "--snapshot-every"),
        ("ftrun run --rdzv-b", "--rdzv-backend"),
        ("ftrun --start-method fork", "forkserver"),
        ("ftrun --profile lap", "laptop"),
        ("ftrun stat", "status"),
        ("ftrun profiles show sing", "single-node-gpu"),
    ],
)
def test_shell_completion(words: str, expected: str, tmp_path: Path) -> None:
    done = ftrun(
        cwd=tmp_path,
        variables={
            "_FTRUN_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split()) - 1),
        },
    )
    assert expected in done.stdout.split()


def test_completion_script_can_be_shown(tmp_path: Path) -> None:
    # The command determines the shell from the parent process.
    code = f"{shlex.join(FTRUN)} --show-completion; true"
    done = subprocess.run(
        ["bash", "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path, timeout=60
    )
    assert "_FTRUN_COMPLETE=complete_bash" in done.stdout


@pytest.mark.parametrize("encoding", ["ascii", "iso-8859-1"])
def test_output_is_shown_on_a_terminal_that_has_not_all_characters(
    encoding: str, tmp_path: Path
) -> None:
    made = MadeJournal(run_id="r", ranks=1, nodes=1)
    made.begin()
    folder = tmp_path / "ftrun-logs" / "r"
    place = folder / "node0" / "workers" / "r_x" / "attempt_0" / "0"
    place.mkdir(parents=True)
    (folder / "journal.jsonl").write_bytes(b"".join(made.raw()))
    (place / "stdout.log").write_bytes("50 % \u2588\u2588 \n".encode() + b"\xff\n")
    done = ftrun("logs", "r", cwd=tmp_path, variables={"PYTHONIOENCODING": encoding})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        r"node0:0 | 50 % \u2588\u2588 ",
        r"node0:0 | \ufffd",
    ]
