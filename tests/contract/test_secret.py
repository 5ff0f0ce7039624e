"""A secret is read from a private file, agreed on by several nodes at once, and never shown."""

import copy
import errno
import os
import pickle
import re
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
from made_settings import make_secret

from ftrun.errors import UsageError
from ftrun.wire.transport.secret import (
    HOW_TO_MAKE,
    Secret,
    forget_shared_secrets,
    load_secret,
    shared_secret_file,
)

TIMEOUT_S = 60.0
CANARY = b"canary-canary-canary-canary-0123"


def file_with(folder: Path, data: bytes, mode: int = 0o600) -> Path:
    path = folder / "secret"
    path.write_bytes(data)
    path.chmod(mode)
    return path


def refused(path: Path) -> str:
    with pytest.raises(UsageError) as caught:
        load_secret(path)
    return str(caught.value)


def test_three_forms_are_secrets(tmp_path: Path) -> None:
    key = bytes(range(128, 160))
    raw = load_secret(file_with(tmp_path, key))
    assert raw == Secret(key)
    assert raw == load_secret(file_with(tmp_path, key.hex().encode()))
    assert raw == load_secret(file_with(tmp_path, key.hex().upper().encode() + b"\r\n"))
    words = load_secret(file_with(tmp_path, b"correct horse battery staple, and more"))
    assert words == load_secret(file_with(tmp_path, b"correct horse battery staple, and more\n"))
    assert words != raw


def test_text_of_32_characters_is_the_same_with_and_without_its_newline(tmp_path: Path) -> None:
    assert len(CANARY) == 32
    bare = load_secret(file_with(tmp_path, CANARY))
    assert bare == load_secret(file_with(tmp_path, CANARY + b"\n"))


@pytest.mark.parametrize(
    "data",
    [b"", b"short", bytes(31), bytes(33), b"two lines\n" * 10, b"x" * 5000],
    ids=["empty", "short", "31 bytes", "33 bytes", "lines", "long"],
)
def test_what_is_no_secret_is_refused_without_being_shown(tmp_path: Path, data: bytes) -> None:
    said = refused(file_with(tmp_path, data))
    assert "secret" in said
    assert not data or data[:9].decode() not in said.replace("secret", "")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_file_that_others_can_read_is_refused_with_the_cure(tmp_path: Path, mode: int) -> None:
    path = file_with(tmp_path, CANARY, mode)
    assert f"chmod 600 {path}" in refused(path)


def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = file_with(tmp_path, CANARY)
    if os.getuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(path, 12345, 12345)
    assert "12345" in refused(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    assert "cannot read" in refused(tmp_path / "none")
    assert "is not a regular file" in refused(tmp_path)


def test_a_pipe_does_not_hold_us_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert "is not a regular file" in refused(tmp_path / "pipe")


def test_the_command_that_is_shown_makes_one(tmp_path: Path) -> None:
    path = tmp_path / "made"
    subprocess.run(["sh", "-c", HOW_TO_MAKE.replace("FILE", str(path))], check=True, timeout=30)
    assert isinstance(load_secret(path), Secret)


def test_a_secret_does_not_show() -> None:
    secret = Secret(CANARY)
    texts = [repr(secret), str(secret), f"{secret}", f"{secret!r:>40}", f"{[secret]}"]
    with pytest.raises(TypeError) as caught:
        pickle.dumps(secret)
    texts.append(repr(caught.value))
    with pytest.raises(TypeError):
        copy.deepcopy(secret)
    with pytest.raises(ValueError, match="32") as short:
        Secret(CANARY[:-1])
    texts.append(repr(short.value))
    assert not any("canary" in text for text in texts)
    assert not hasattr(secret, "__dict__")


def test_secrets_are_equal_by_what_they_are() -> None:
    assert Secret(CANARY) == Secret(CANARY)
    assert hash(Secret(CANARY)) == hash(Secret(CANARY))
    assert make_secret() != make_secret()
    assert Secret(CANARY) != CANARY


def test_what_a_run_has_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    kept = shared_secret_file(tmp_path, "job-1-r1")
    shared_secret_file(tmp_path, "job-1")
    forget_shared_secrets(tmp_path, ["job-1", "never-there"])
    assert list(tmp_path.iterdir()) == [kept]


def test_a_shared_file_is_made_once_and_privately(tmp_path: Path) -> None:
    folder = tmp_path / "of" / "run"
    path = shared_secret_file(folder, "cluster-12-0")
    first = load_secret(path)
    assert load_secret(shared_secret_file(folder, "cluster-12-0")) == first
    assert load_secret(shared_secret_file(folder, "cluster-12-1")) != first
    assert path.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    assert re.fullmatch(r"[0-9a-f]{64}\n", path.read_text())
    assert sorted(p.name for p in folder.iterdir()) == [
        "cluster-12-0.secret",
        "cluster-12-1.secret",
    ]


def test_many_that_come_at_once_agree(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from ftrun.wire.transport.secret import shared_secret_file\n"
        "sys.stdin.readline()\n"
        "print(shared_secret_file(pathlib.Path(sys.argv[1]), 'k').read_text().strip())"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "folder")]
    with ExitStack() as ends:
        made = []
        for _ in range(6):
            process = ends.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            ends.callback(process.kill)
            made.append(process)
        for process in made:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        said = {process.communicate(timeout=TIMEOUT_S)[0].strip() for process in made}
    assert len(said) == 1
    assert re.fullmatch(r"[0-9a-f]{64}", said.pop())


def test_without_hard_links_readers_wait_for_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", no_links)
    folder = tmp_path / "folder"
    folder.mkdir(0o700)
    path = folder / "k.secret"
    path.touch(0o600)  # another node has just begun
    writer = threading.Timer(0.2, path.write_text, [f"{CANARY.hex()}\n"])
    writer.start()
    try:
        assert load_secret(shared_secret_file(folder, "k", deadline_s=TIMEOUT_S)) == Secret(CANARY)
    finally:
        writer.join(TIMEOUT_S)
    assert isinstance(load_secret(shared_secret_file(folder, "other")), Secret)


def test_a_writer_that_never_ends_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(0o700)
    (folder / "k.secret").touch(0o600)
    with pytest.raises(UsageError):
        shared_secret_file(folder, "k", deadline_s=0.1)


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(0o755)
    folder.chmod(0o755)
    with pytest.raises(UsageError) as caught:
        shared_secret_file(folder, "k")
    assert f"chmod 700 {folder}" in str(caught.value)
    with pytest.raises(UsageError):
        shared_secret_file(folder, "../k")
    with pytest.raises(UsageError) as caught:
        shared_secret_file(Path("/proc/nowhere"), "k")
    assert "--secret-file" in str(caught.value)
