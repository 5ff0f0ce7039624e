"""Files of ftrun.save reach the disk, whatever is killed, and are read from memory until then."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.integration.conftest import Start, in_full, script, start

__all__ = ["script", "start"]

pytestmark = [pytest.mark.launch, pytest.mark.slow, pytest.mark.timeout(900)]

SAVE = """
import os, signal, sys
import torch
import ftrun

path, size = sys.argv[1], int(sys.argv[2])
generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if generation == 0:
    for at in range(3):
        ftrun.save({"at": at, "weight": torch.full((size,), float(at))}, path)
    found = ftrun.load(path, weights_only=True)
    print("read", found["at"], flush=True)
    if "die" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
else:
    found = ftrun.load(path, map_location="cpu")
    print("read again", found["at"], torch.equal(found["weight"], torch.full((size,), 2.0)))
"""

MB = 1 << 18  # floats


def check_file(path: Path, size: int) -> None:
    found = torch.load(path, weights_only=True)
    assert found["at"] == 2, "the last save wins"
    assert torch.equal(found["weight"], torch.full((size,), 2.0))
    assert [one.name for one in path.parent.iterdir()] == [path.name], "nothing else is left"


POINTS = ["smp.file.copied", *in_full("", "smp.file.held", "smp.file.synced", "smp.file.renamed")]


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_of_the_rank_and_of_the_smp_after_a_save_does_not_lose_the_file(
    start: Start, script: str, tmp_path: Path, point: str
) -> None:
    """The SMP is killed at this point of its first write, and the rank after its last save."""
    path = tmp_path / "files" / "a.pt"
    path.parent.mkdir()
    crash = {"FTRUN_CRASH_AT": point, "FTRUN_CRASH_ONCE": str(tmp_path / "once")}
    words = (script(SAVE), str(path), str(20 * MB), "die")
    run = start("--nproc-per-node", "1", *words, env=crash if point else {})
    assert run.wait() == 0, run.text
    assert (tmp_path / "once").exists() == bool(run.journal("smp_respawned")) == bool(point)
    assert "read 2\n" in run.text
    assert "read again 2 True" in run.text
    check_file(path, 20 * MB)
    (*_, written) = run.journal("file_written")
    assert written["path"] == str(path)
    assert written["total_bytes"] == path.stat().st_size


WAITS = """
import time
while not os.path.exists("end"):
    time.sleep(0.02)
"""


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small file system")
    folder = tmp_path / "files"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.full
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_full_disk_is_shown_and_the_file_is_written_when_there_is_room(
    start: Start, script: str, tmp_path: Path, small: Path, is_killed: bool
) -> None:
    """Also if agent and SMP are killed, one after the other, while it waits in memory."""
    path = small / "a.pt"
    run = start("--nproc-per-node", "1", script(SAVE + WAITS), str(path), str(10 * MB))
    run.wait_until("named", lambda: run.journal("file_not_written"))
    assert run.journal("file_not_written")[0]["reason"] == "No space left on device"
    warnings = " ".join(run.status()["warnings"])  # type: ignore[arg-type]
    assert f"{path} (No space left on device) of ftrun.save cannot be written" in warnings
    run.wait_until("saved", lambda: "read 2\n" in run.text)
    assert list(small.iterdir()) == []
    if is_killed:
        os.kill(run.pid_of("agent"), signal.SIGKILL)
        run.wait_until("in the next agent", lambda: "read again 2 True" in run.text)
        os.kill(run.pid_of("smp"), signal.SIGKILL)
        run.wait_until("in the next SMP", lambda: run.journal("smp_ready"))
    subprocess.run(["mount", "-o", "remount,size=64m", small], check=True)
    (tmp_path / "end").touch()
    assert run.wait() == 0, run.text
    check_file(path, 10 * MB)


@pytest.mark.full
def test_a_run_that_is_stopped_writes_its_files_first(
    start: Start, script: str, tmp_path: Path
) -> None:
    path = tmp_path / "files" / "a.pt"
    path.parent.mkdir()
    waits = "\nprint('saved', flush=True)\nimport time\ntime.sleep(1000)\n"
    run = start("--nproc-per-node", "1", script(SAVE + waits), str(path), str(100 * MB))
    run.wait_until("saved", lambda: "saved\n" in run.text)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143, run.text
    check_file(path, 100 * MB)
