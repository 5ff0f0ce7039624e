"""From arguments to a spec: which source overrides which, and errors before anything starts."""

import importlib.abc
import importlib.machinery
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec.structs import replace

from ftrun.cli.commands.stop import stop
from ftrun.cli.launch.command_line import parse
from ftrun.cli.run import (
    MAX_TEMPORARY_BYTES,
    build_spec,
    check_checkpoint_directory,
    check_resume,
    check_text,
    take_folder,
    temporary_folder_warning,
    with_log_folder,
)
from ftrun.cli.runs import sweep
from ftrun.config.profile import Profile
from ftrun.config.run_spec import RunSpec
from ftrun.errors import FtrunError, RunIdTaken, UsageError
from ftrun.wire.run_environment import RunFolder, run_folder
from ftrun.wire.transport.channel import listen


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "train.py").write_text("")
    return tmp_path


def spec(words: str, variables: Mapping[str, str] | None = None) -> RunSpec:
    return build_spec(parse(words.split()), variables=variables or {})


def refused(words: str, variables: Mapping[str, str] | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        spec(words, variables)
    return str(caught.value)


def test_plain_run(place: Path) -> None:
    made = spec("--nproc 2 train.py --lr 1")
    assert made.script == str(place / "train.py")
    assert made.torchrun_argv == ["--nproc-per-node=2", "--", "train.py", "--lr", "1"]
    assert made.run_id.startswith("train-")
    assert made.log_folder == str(place / "ftrun-logs" / made.run_id)
    assert made.max_restarts is None
    assert made.profile == Profile()


def test_each_own_flag_sets_its_key(place: Path) -> None:
    made = spec(
        "--snapshot-every 3 --snapshot-required --orphan-timeout 5 --checkpoint-dir c"
        " --checkpoint-every 7 --checkpoint-keep 4 --start fresh --preload a --preload b --grace 9"
        " --forward-signals usr1,SIGUSR2 --no-snapshots --set restart.budget=2 -q --debug train.py"
    )
    assert made.profile.snapshot.every == 3
    assert made.profile.snapshot.required
    assert not made.profile.snapshot.enabled
    assert made.profile.smp.orphan_timeout_s == 5
    assert made.profile.checkpoint.directory == str(place / "c")
    assert made.profile.checkpoint.every_s == 7
    assert made.profile.checkpoint.keep == 4
    assert made.profile.start.mode == "fresh"
    assert made.profile.start.preload == ["a", "b"]
    assert made.profile.stop.grace_s == 9
    assert made.profile.stop.forward_signals == ["SIGUSR1", "SIGUSR2"]
    assert made.profile.restart.budget == 2
    assert made.quiet
    assert made.debug


@pytest.mark.parametrize(
    ("words", "every_s", "every_steps"),
    [
        ("--checkpoint-every 1step", 600.0, 1),
        ("--checkpoint-every 250steps", 600.0, 250),
        ("--checkpoint-every 7 --checkpoint-every 2step", 600.0, 2),
        ("--set checkpoint.every_steps=5 --checkpoint-every 7", 7, 0),
    ],
)
def test_checkpoints_are_due_by_time_or_by_steps(
    words: str, every_s: float, every_steps: int
) -> None:
    found = spec(f"{words} --checkpoint-dir c train.py")
    assert found.profile.checkpoint.every_s == every_s
    assert found.profile.checkpoint.every_steps == found.persist_every == every_steps
    assert spec(f"{words} train.py").persist_every == 0, "without a directory"
    assert "0step" in refused("--checkpoint-every 0step train.py")


def test_flag_before_ftrun_variable_before_pet_variable() -> None:
    both = {"FTRUN_MAX_RESTARTS": "2", "PET_MAX_RESTARTS": "1"}
    assert spec("--max-restarts 0 train.py", both).max_restarts == 0
    assert spec("train.py", both).max_restarts == 2
    assert spec("train.py", {"PET_MAX_RESTARTS": "1"}).max_restarts == 1
    assert "3.5" in refused("--max-restarts 3.5 train.py")


def test_profile_by_variable_and_flag() -> None:
    assert spec("train.py", {"FTRUN_PROFILE": "laptop"}).profile.restart.budget == 5
    assert spec("--profile default train.py", {"FTRUN_PROFILE": "laptop"}).profile == Profile()
    assert spec("--quiet train.py").quiet
    assert spec("train.py", {"FTRUN_QUIET": "1"}).quiet
    assert not spec("train.py", {"FTRUN_QUIET": "0"}).quiet


def test_run_id_comes_from_the_rendezvous_unless_given() -> None:
    assert spec("--rdzv-id job7 train.py").run_id == "job7"
    assert spec("train.py", {"PET_RDZV_ID": "job8"}).run_id == "job8"
    assert spec("--rdzv-id none train.py").run_id.startswith("train-")
    assert spec("--run-id a --rdzv-id b train.py").run_id == "a"
    assert spec("train.py", {"FTRUN_RUN_ID": "outer"}).run_id.startswith("train-")
    assert "a/b" in refused("--run-id a/b train.py")


def test_missing_script_names_the_near_one_and_the_folder(place: Path) -> None:
    text = refused("trian.py")
    assert f"trian.py does not exist; cwd {place}" in text
    assert "Did you mean train.py?" in text
    assert "no script" in refused("--standalone")
    assert "nowhere" in refused("-m nowhere.at.all")
    assert "no-such-command" in refused("--no-python no-such-command")


def test_module_and_command_are_found(place: Path) -> None:
    (place / "package").mkdir()
    (place / "package" / "__init__.py").write_text("")
    assert spec("-m package.training").script == "package.training"
    assert spec("package.training", {"PET_MODULE": "1"}).script == "package.training"
    assert spec("-m sys").script == "sys"
    assert os.path.isabs(spec("--no-python sh -c true").script)


def test_a_module_of_an_editable_install_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder is not on the path: a finder of its own knows it."""

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(
            self, name: str, path: object, target: object = None
        ) -> importlib.machinery.ModuleSpec | None:
            if name != "installed_for_editing":
                return None
            return importlib.machinery.ModuleSpec(name, None)

    words = "-m installed_for_editing.train"
    assert "there is no module named installed_for_editing" in refused(words)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder()])
    assert spec(words).script == "installed_for_editing.train"


def test_an_argument_that_is_not_text_is_refused(place: Path) -> None:
    made = spec(os.fsdecode(b"train.py data/Andr\xe9"))
    with pytest.raises(UsageError, match=r"the argument data/Andr\\xe9 is not UTF-8"):
        check_text(made)


def test_flag_of_a_newer_torch_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _name: "2.8.1+cpu")
    assert "needs torch 2.12" in refused("--shutdown-timeout 3 train.py")
    assert "--show-completion" in refused("--print-completion bash")


def test_unknown_signal_is_named() -> None:
    assert "'USR9'" in refused("--forward-signals USR1,USR9 train.py")


@pytest.fixture
def taken(place: Path) -> Iterator[RunFolder]:
    folder, lock_fd = take_folder("mine", script="/a.py")
    yield folder
    os.close(lock_fd)


def test_live_run_id_is_refused_with_its_pid(taken: RunFolder) -> None:
    with pytest.raises(RunIdTaken) as caught:
        take_folder("mine", script="/a.py")
    assert f"pid {os.getpid()}" in str(caught.value)


def test_a_look_at_the_lock_is_no_run(place: Path) -> None:
    """`sweep` of another start opens it for a moment, and then removes the folder."""
    folder, lock_fd = take_folder("mine", script="/a.py")
    os.ftruncate(lock_fd, 0)  # like the lock of a run that is being started

    def let_go() -> None:
        time.sleep(0.2)
        folder.remove()
        os.close(lock_fd)

    with ThreadPoolExecutor() as pool:
        pool.submit(let_go)
        _, mine_fd = take_folder("mine", script="/a.py")
    assert folder.lock.exists()
    os.close(mine_fd)


def test_folder_of_a_dead_run_is_taken_over() -> None:
    folder, lock_fd = take_folder("mine", script="/a.py")
    folder.spec.write_text('{"script": "/a.py"}')
    os.close(lock_fd)
    folder, lock_fd = take_folder("mine", script="/b.py")
    os.close(lock_fd)
    assert folder.path.stat().st_mode & 0o777 == 0o700


def test_orphan_is_adopted_by_its_own_script_only() -> None:
    folder, lock_fd = take_folder("mine", script="/a.py")
    folder.spec.write_text('{"script": "/a.py"}')
    os.close(lock_fd)
    with listen(folder.smp_socket):
        with pytest.raises(RunIdTaken) as caught:
            take_folder("mine", script="/b.py")
        assert "/a.py" in str(caught.value)
        _, lock_fd = take_folder("mine", script="/a.py")
        os.close(lock_fd)
        assert folder.smp_socket.exists()


def test_stop_removes_the_folder_of_a_run_of_which_nothing_is_left(taken: RunFolder) -> None:
    """Its processes were killed; some of them may have been dying at the last sweep."""
    gone = run_folder("gone")
    gone.path.mkdir(mode=0o700)
    gone.lock.touch()
    with pytest.raises(FtrunError, match="no run gone is alive"):
        stop("gone")
    assert not gone.path.exists()
    assert taken.path.exists()


def test_sweep_removes_what_no_node_holds(taken: RunFolder) -> None:
    dead, lock_fd = take_folder("dead", script="/a.py")
    os.close(lock_fd)
    unlocked = run_folder("unlocked")
    unlocked.path.mkdir()
    sweep()
    assert taken.path.exists()
    assert not dead.path.exists()
    assert unlocked.path.exists()


def test_logs_go_elsewhere_where_the_working_directory_cannot_be_written(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    made = spec("train.py")
    away = replace(made, log_folder=f"/proc/ftrun-logs/{made.run_id}")
    with pytest.raises(UsageError, match="Name another folder in FTRUN_LOG"):
        with_log_folder(away, is_given=True)
    other = place / f"ftrun-logs-{os.getuid()}" / made.run_id
    assert with_log_folder(away, is_given=False).log_folder == str(other)
    said = capsys.readouterr().err
    assert "the logs cannot be written to /proc/ftrun-logs" in said
    assert f"They are in {other}" in said
    assert with_log_folder(made, is_given=False) == made


def test_number_of_ranks_is_checked_before_anything_starts() -> None:
    for wrong in ("x", "0", "-1", "00", "1.5", ""):
        assert "--nproc-per-node is a whole number" in refused(f"--nproc-per-node={wrong} train.py")
    for right in ("1", "16", "auto", "cpu", "gpu", "xpu"):
        spec(f"--nproc-per-node={right} train.py")
    assert "PET_NPROC_PER_NODE" in refused("train.py", {"PET_NPROC_PER_NODE": "two"})
    spec("--nproc-per-node 2 train.py", {"PET_NPROC_PER_NODE": "two"})


def test_a_directory_for_checkpoints_is_tried_before_anything_starts(place: Path) -> None:
    check_checkpoint_directory(spec("train.py"))
    check_checkpoint_directory(spec("--checkpoint-dir new/folder train.py"))
    assert list((place / "new" / "folder").iterdir()) == []
    (place / "file").touch()
    for words, reported in (
        ("file/below", "cannot be written: Not a directory"),
        ("/proc/here", "cannot be written: No such file or directory"),
    ):
        with pytest.raises(UsageError, match=reported):
            check_checkpoint_directory(spec(f"--checkpoint-dir {words} train.py"))


def test_a_url_stays_one_but_that_of_a_file_is_a_directory(place: Path) -> None:
    for typed, meant in (
        ("ftp://me@host/run", "ftp://me@host/run"),
        (f"file://{place}/a%20b", f"{place}/a b"),
        ("saved", f"{place}/saved"),
        ("a:b", f"{place}/a:b"),
    ):
        found = spec(f"--checkpoint-dir {typed} --resume {typed} train.py")
        assert found.checkpoint_directory == meant
        assert found.resume_path == meant
    (place / "ftrun.yaml").write_text(f"checkpoint:\n  directory: file://{place}/of-profile\n")
    found = spec("--profile ./ftrun.yaml train.py")
    assert found.checkpoint_directory == f"{place}/of-profile"
    check_checkpoint_directory(found)
    assert (place / "of-profile").is_dir()


def test_what_is_to_be_resumed_is_looked_for_before_anything_starts(place: Path) -> None:
    for wish in ("auto", "never"):
        check_resume(spec(f"--resume {wish} train.py"))
    (place / "saved" / "step-00000007-g0").mkdir(parents=True)
    (place / "file").touch()
    for words, reported in (
        ("nowhere", "nowhere does not exist"),
        ("file", "file is a file"),
        ("saved", "there is no checkpoint of ftrun in"),
        ("saved/step-00000007-g0", "there is no checkpoint of ftrun in"),
        ("saved --no-snapshots", "--no-snapshots disables them"),
    ):
        with pytest.raises(UsageError, match=reported):
            check_resume(spec(f"--resume {words} train.py"))
    (place / "saved" / "step-00000007-g0" / "index.json").touch()
    (place / "atoms").mkdir()
    (place / "atoms" / "atoms.json").touch()
    for flag, check in (
        ("--resume", check_resume),
        ("--checkpoint-dir", check_checkpoint_directory),
    ):
        with pytest.raises(UsageError, match=r"holds atoms.*ftrun checkpoints load .*atoms DIR"):
            check(spec(f"{flag} atoms train.py"))
    for right in ("saved", "saved/step-00000007-g0"):
        check_resume(spec(f"--resume {right} train.py"))


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path stays below the limit, wherever pytest puts its own."""
    with tempfile.TemporaryDirectory(prefix="ftrun-", dir="/tmp") as folder:
        yield Path(folder)


def test_a_temporary_folder_in_which_loader_workers_hang_is_named(short: Path) -> None:
    fits = short / ("x" * (MAX_TEMPORARY_BYTES - len(str(short)) - 1))
    assert temporary_folder_warning(str(fits)) == ""
    warning = temporary_folder_warning(f"{fits}x")
    assert "76 bytes" in warning
    script = short / "loader.py"
    script.write_text(
        "import socket, sys, tempfile\n"
        "from multiprocessing import connection\n"
        "address = connection.arbitrary_address('AF_UNIX')\n"
        "socket.socket(socket.AF_UNIX).bind(address)\n"
    )
    for folder, is_good in ((fits, True), (Path(f"{fits}x"), False)):
        folder.mkdir()
        done = subprocess.run([sys.executable, script], env={"TMPDIR": str(folder)},
                              capture_output=True, text=True, timeout=60, check=False)  # fmt: skip
        assert (done.returncode == 0) is is_good, done.stderr
