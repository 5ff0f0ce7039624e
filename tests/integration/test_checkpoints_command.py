"""`ftrun checkpoints` lists the checkpoints, finds every damaged byte, and prunes."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ftrun.smp.checkpoint.storage.local import LocalStorage
from ftrun.smp.checkpoint.storage.storage import open_storage
from ftrun.tools.checkpoints.catalog import find_damage
from tests.integration.test_checkpoint_files import Arenas, arenas, load, write

__all__ = ["arenas"]

NEWEST, OLDER = "step-00000003-g0", "step-00000002-g0"


def ftrun(*words: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "ftrun", "checkpoints", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, (done.stdout, done.stderr)
    return done.stdout + done.stderr


@pytest.fixture
def catalog(arenas: Arenas, tmp_path: Path) -> Path:
    for step in (1, 2, 3):
        arenas.seal(step)
        write(arenas, tmp_path)
    return tmp_path


def test_list_reports_what_is_there_and_what_is_not_whole(catalog: Path) -> None:
    (catalog / OLDER / "rank-00001.safetensors").unlink()
    (catalog / ".tmp-step-00000004-g0-00000000-00000000").mkdir()
    found = json.loads(ftrun("list", str(catalog), "--json", code=1))
    assert [one["name"] for one in found["checkpoints"]] == [NEWEST, OLDER, "step-00000001-g0"]
    assert [one["is_latest"] for one in found["checkpoints"]] == [True, False, False]
    assert [bool(one["problems"]) for one in found["checkpoints"]] == [False, True, False]
    assert {one["world_size"] for one in found["checkpoints"]} == {2}
    size = sum(path.stat().st_size for path in (catalog / NEWEST).glob("rank-*"))
    assert found["checkpoints"][0]["num_bytes"] == size
    assert found["unfinished"] == 1
    text = ftrun("list", str(catalog), code=1)
    assert "rank-00001.safetensors" in text
    assert "1 incomplete" in text


def test_every_byte_is_checked(catalog: Path) -> None:
    """A flipped bit anywhere in any file is found, and reported with its file."""
    folder = catalog / NEWEST
    assert "ok       step-00000003-g0: whole" in ftrun("verify", str(catalog), "latest")
    with open_storage(str(catalog), threading.Event()) as storage:
        for path in sorted(folder.iterdir()):
            data = path.read_bytes()
            for at in (0, *range(1, len(data) - 1, len(data) // 10), len(data) - 1):
                path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
                found = find_damage(storage, storage.describe(NEWEST))
                assert found, (path, at)
                assert path.name == "index.json" or all(path.name in one for one in found)
            path.write_bytes(data)
        assert not find_damage(storage, storage.describe(NEWEST))


def test_damage_is_reported_with_the_tensors_that_lie_there(catalog: Path) -> None:
    path = catalog / NEWEST / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    name = next(name for name in header if name != "__metadata__")
    data[start + header[name]["data_offsets"][0]] ^= 1
    path.write_bytes(bytes(data))
    reported = ftrun("verify", str(catalog), NEWEST, code=1)
    assert name in reported
    assert "piece 0 of" in reported


def test_prune_leaves_the_newest_and_what_is_not_a_checkpoint(catalog: Path) -> None:
    (catalog / "notes").touch()
    assert "would be removed  step-00000001-g0" in ftrun(
        "prune", str(catalog), "--keep", "2", "--dry-run"
    )
    assert (catalog / "step-00000001-g0").is_dir()
    hour_ago_s = time.time() - 3600
    os.utime(catalog / OLDER / "index.json", (hour_ago_s, hour_ago_s))
    reported = ftrun("prune", str(catalog), "--keep", "3", "--older-than", "30m")
    assert "removed  step-00000002-g0" in reported
    assert "1 removed, 2 left" in reported
    assert "1 removed, 1 left" in ftrun("prune", str(catalog), "--keep", "1")
    assert sorted(one.name for one in catalog.iterdir() if one.name != ".lock") == [
        "latest", "notes", NEWEST,
    ]  # fmt: skip
    found = load(catalog)
    assert found is not None
    assert found.version.step == 3
    for fd in found.fds:
        os.close(fd)


def test_prune_by_size_leaves_the_newest_and_what_is_being_read(catalog: Path) -> None:
    words = ("prune", str(catalog), "--keep", "9", "--keep-size", "1")
    with LocalStorage(catalog, threading.Event()).reading(OLDER):
        reported = ftrun(*words)
    assert "removed  step-00000001-g0" in reported
    assert f"kept  {OLDER}: a process reads it" in reported
    assert "1 removed, 2 left" in reported
    assert f"removed  {OLDER}" in ftrun(*words)
    assert "0 removed, 1 left" in ftrun(*words)


def test_prune_keeps_the_newest_whole_one_if_the_latest_lacks_a_file(catalog: Path) -> None:
    (catalog / NEWEST / "rank-00001.safetensors").unlink()
    reported = ftrun("prune", str(catalog), "--keep", "1", code=1)
    assert "removed  step-00000001-g0" in reported
    assert f"not whole  {NEWEST}: rank-00001.safetensors" in reported
    assert f"kept  {OLDER}: the newest whole one" in reported
    assert "1 removed, 2 left" in reported
    found = load(catalog)
    assert found is not None
    assert found.version.step == 2
    for fd in found.fds:
        os.close(fd)


@pytest.mark.parametrize(
    ("words", "code", "reported"),
    [
        (["list", "/nowhere"], 1, "/nowhere is not a directory"),
        (["verify", "SHELF", "step-9"], 1, "no checkpoint step-9"),
        (["prune", "SHELF", "--keep", "0"], 2, "--keep is at least 1"),
        (["prune", "SHELF", "--keep", "1", "--older-than", "soon"], 2, "30m, 12h or 7d"),
    ],
)
def test_a_mistake_is_reported(catalog: Path, words: list[str], code: int, reported: str) -> None:
    said = ftrun(*(str(catalog) if word == "SHELF" else word for word in words), code=code)
    assert reported in said
    assert "Traceback" not in said
