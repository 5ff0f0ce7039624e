"""Files that the SMP writes behind: order, failures, and the end of the run; real files."""

import os
import select
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftrun.ids import RunId
from ftrun.smp import saved_files
from ftrun.smp.jobs import JobLanes
from ftrun.smp.saved_files import SavedFiles
from ftrun.wire.messages import envelope as messages
from ftrun.wire.messages.files import (
    FileHeld,
    FileWritten,
    OpenSavedFile,
    SavedFileOpened,
    SaveFile,
)


class Client:
    """Keeps what it is sent, and duplicates of the descriptors."""

    def __init__(self) -> None:
        self.bodies: list[messages.AnyMessage] = []
        self.fds: list[int] = []

    def send(self, body: messages.AnyMessage, *, fds: tuple[int, ...] = ()) -> None:
        self.bodies.append(body)
        self.fds += map(os.dup, fds)

    def of(self, kind: type) -> list:
        return [one for one in self.bodies if isinstance(one, kind)]


class Smp:
    """`SavedFiles` with its server's loop."""

    def __init__(self) -> None:
        self.jobs, self.agent = JobLanes(), Client()
        self.files = SavedFiles(RunId("run"), self.jobs, self.agent.send)

    def save(self, path: Path, content: bytes, mode: int = 0o640) -> None:
        worker = Client()
        fd = content_of(content)
        found = path.stat() if path.exists() else None
        before = (0, 0) if found is None else (found.st_ino, found.st_mtime_ns)
        self.files.save(worker, SaveFile(0, str(path), len(content), mode, before), (fd,))
        os.close(fd)
        assert worker.bodies == [messages.Done()]

    def settle(self) -> None:
        """Run the loop until no write is in progress."""
        while self.files._num_jobs:
            assert select.select([self.jobs], [], [], 60.0)[0], "a write does not end"
            self.jobs.finish()

    def results(self) -> list[FileWritten]:
        return self.agent.of(FileWritten)


def content_of(content: bytes) -> int:
    fd = os.memfd_create("content")
    os.write(fd, content)
    return fd


@pytest.fixture
def smp() -> Iterator[Smp]:
    made = Smp()
    yield made
    made.settle()
    made.files.free()
    for fd in made.agent.fds:
        os.close(fd)


def test_a_file_is_written_and_leaves_nothing_else(smp: Smp, tmp_path: Path) -> None:
    content = os.urandom(saved_files._CHUNK_BYTES + 12_345)
    smp.save(tmp_path / "model.pt", content)
    smp.settle()
    assert [one.name for one in tmp_path.iterdir()] == ["model.pt"]
    assert (tmp_path / "model.pt").read_bytes() == content
    assert stat.S_IMODE((tmp_path / "model.pt").stat().st_mode) == 0o640
    (result,) = smp.results()
    assert (result.reason, result.num_bytes) == ("", len(content))


def test_the_agent_holds_a_duplicate_before_the_worker_has_its_reply(
    smp: Smp, tmp_path: Path
) -> None:
    smp.save(tmp_path / "a", b"content")
    (held,) = smp.agent.of(FileHeld)
    assert (held.path, held.num_bytes) == (str(tmp_path / "a"), 7)
    assert os.pread(smp.agent.fds[0], 10, 0) == b"content"


def test_the_last_of_several_saves_wins_and_keeps_the_mode_of_the_file(
    smp: Smp, tmp_path: Path
) -> None:
    path = tmp_path / "last"
    path.write_bytes(b"before")
    path.chmod(0o604)
    for at in range(20):
        smp.save(path, b"save %d" % at)
    smp.settle()
    assert path.read_bytes() == b"save 19"
    assert stat.S_IMODE(path.stat().st_mode) == 0o604
    numbers = [one.number for one in smp.agent.of(FileHeld)]
    assert numbers == sorted(set(numbers))


def test_a_file_that_waits_is_read_from_memory(smp: Smp, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "a"  # it cannot be written yet
    smp.save(path, b"content")
    smp.settle()
    worker = Client()
    smp.files.open(worker, OpenSavedFile(0, str(path)))
    (opened,) = worker.bodies
    assert isinstance(opened, SavedFileOpened)
    assert opened.num_bytes == 7
    assert os.pread(worker.fds[0], 10, 0) == b"content"
    smp.files.open(worker, OpenSavedFile(0, "/other"))
    assert isinstance(worker.bodies[-1], messages.Refused)
    os.close(worker.fds[0])


def test_a_failed_write_is_repeated_until_it_succeeds(
    smp: Smp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_files, "RETRY_S", 0.02)
    path = tmp_path / "folder" / "a"
    smp.save(path, b"content")
    smp.settle()
    assert smp.results()[-1].reason == "No such file or directory"
    path.parent.mkdir()
    while smp.results()[-1].reason:
        assert select.select([smp.jobs], [], [], 60.0)[0], "the write is not repeated"
        smp.jobs.finish()
    assert path.read_bytes() == b"content"


def test_the_end_of_the_run_waits_for_all_files_and_names_what_is_not_written(
    smp: Smp, tmp_path: Path
) -> None:
    agent = Client()
    smp.files.finish(agent)
    assert agent.bodies == [messages.Done()], "there are none"
    missing = tmp_path / "folder" / "b"
    smp.save(tmp_path / "a", b"a")
    smp.save(missing, b"b")
    smp.settle()
    smp.files.finish(agent)
    assert len(agent.bodies) == 1, "there is another attempt first"
    smp.settle()
    assert agent.bodies[1:] == [messages.Refused(f"{missing}: No such file or directory")]
    missing.parent.mkdir()
    smp.files.finish(agent)
    smp.settle()
    assert agent.bodies[2:] == [messages.Done()]
    assert (tmp_path / "a").read_bytes() + missing.read_bytes() == b"ab"


def test_files_of_an_earlier_smp_are_written_unless_a_newer_save_has_replaced_them(
    smp: Smp, tmp_path: Path
) -> None:
    old, other = str(tmp_path / "old"), str(tmp_path / "other")
    smp.save(Path(old), b"newer")
    fds = (content_of(b"older"), content_of(b"other"))
    smp.files.take_back(FileHeld(0, old, 5, 0o600, 1), fds[:1])
    smp.files.take_back(FileHeld(0, other, 5, 0o600, 1 << 62), fds[1:])
    smp.save(tmp_path / "later", b"later")
    smp.settle()
    assert [(tmp_path / one).read_bytes() for one in ("old", "other", "later")] == [
        b"newer", b"other", b"later",
    ]  # fmt: skip
    assert smp.agent.of(FileHeld)[-1].number > 1 << 62, "newer than all of the earlier SMP"
    for fd in fds:
        os.close(fd)


def test_what_an_smp_that_was_killed_left_is_replaced(smp: Smp, tmp_path: Path) -> None:
    path = tmp_path / "a"
    smp.save(path, b"first")
    smp.settle()
    held = smp.agent.of(FileHeld)[0]
    fd = os.memfd_create("short")  # fewer bytes than stated
    with pytest.raises(OSError, match="ends after 0 of 5 bytes"):
        saved_files.write_file(held, fd, salt="run")
    os.close(fd)
    assert [one.name for one in tmp_path.iterdir()] == ["a"]
    assert path.read_bytes() == b"first"


def test_a_new_agent_gets_all_duplicates(smp: Smp, tmp_path: Path) -> None:
    smp.save(tmp_path / "folder" / "a", b"content")
    smp.settle()
    smp.files.send_all()
    assert len(smp.agent.of(FileHeld)) == 2
    assert os.pread(smp.agent.fds[-1], 10, 0) == b"content"


def test_a_file_without_content_is_refused(smp: Smp, tmp_path: Path) -> None:
    worker = Client()
    smp.files.save(worker, SaveFile(0, str(tmp_path / "a"), 1, 0o600), ())
    assert isinstance(worker.bodies[0], messages.Refused)


def test_what_was_written_after_the_save_stays_and_is_reported(smp: Smp, tmp_path: Path) -> None:
    """For example by torch.save while the SMP was lost, or by another node."""
    path = tmp_path / "folder" / "a"
    smp.save(path, b"older")
    smp.settle()  # it cannot be written yet
    path.parent.mkdir()
    time.sleep(0.02)  # a tick of the clock of files
    path.write_bytes(b"newer")
    smp.files.finish(Client())
    smp.settle()
    assert path.read_bytes() == b"newer"
    assert [one.name for one in path.parent.iterdir()] == ["a"]
    last = smp.results()[-1]
    assert last.is_dropped
    assert "changed after this save" in last.reason
    worker = Client()
    smp.files.open(worker, OpenSavedFile(0, str(path)))
    assert isinstance(worker.bodies[0], messages.Refused), "it is not held any more"


def test_a_write_of_an_earlier_save_and_a_clock_that_is_ahead_are_no_change(
    smp: Smp, tmp_path: Path
) -> None:
    path = tmp_path / "a"
    first = FileHeld(0, str(path), 1, 0o600, 100)
    second = FileHeld(0, str(path), 1, 0o600, 200)  # saved before the first was written
    for held, content in ((first, b"1"), (second, b"2")):
        fd = content_of(content)
        saved_files.write_file(held, fd, salt="run")
        os.close(fd)
    assert path.read_bytes() == b"2"
    os.utime(path, ns=(1 << 61, 1 << 61))
    third = FileHeld(0, str(path), 1, 0o600, 300, (path.stat().st_ino, 1 << 61))
    fd = content_of(b"3")
    saved_files.write_file(third, fd, salt="run")
    path.write_bytes(b"script")
    with pytest.raises(FileExistsError):
        saved_files.write_file(third, fd, salt="run")
    os.close(fd)
    assert path.read_bytes() == b"script"
