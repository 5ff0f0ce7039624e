"""The agent holds one duplicate for each file that is not written, and names failures once."""

import os
import socket
from pathlib import Path

from ftrun.agent.snapshots.retained_files import RetainedFiles
from ftrun.agent.snapshots.smp_client import AgentSmpClient
from ftrun.wire.messages.files import FileHeld, FileWritten
from ftrun.wire.run_environment import RunFolder
from ftrun.wire.transport.channel import Channel


def file(number: int, path: str = "/a") -> FileHeld:
    return FileHeld(0, path, 3, 0o644, number)


def result(number: int, reason: str = "", path: str = "/a") -> FileWritten:
    return FileWritten(path, number, 3, 0.1, reason)


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_a_newer_save_replaces_an_older_one_and_a_written_file_is_closed() -> None:
    files = RetainedFiles()
    first, second = os.memfd_create("first"), os.memfd_create("second")
    files.keep(file(1), first)
    files.keep(file(2), second)
    assert (is_open(first), is_open(second)) == (False, True)
    files.written(result(1))  # of the older one, which was being written
    assert files.held == [(file(2), second)]
    files.written(result(2))
    assert not files.held
    assert not is_open(second)
    assert [one.number for one in files.drain_results()] == [1, 2]
    assert files.drain_results() == []


def test_a_failure_is_reported_once_and_shown_until_the_write_succeeds() -> None:
    files = RetainedFiles()
    files.keep(file(1), os.memfd_create("file"))
    assert files.warning == ""
    for _ in range(3):
        files.written(result(1, "No space left on device"))
    assert len(files.drain_results()) == 1
    assert files.held, "the content stays in memory"
    assert files.warning.startswith("/a (No space left on device) of ftrun.save cannot be written")
    files.written(result(1))
    assert files.warning == ""
    assert not files.held


def test_many_failures_are_counted() -> None:
    files = RetainedFiles()
    for at in range(5):
        files.written(result(at, "full", path=f"/{at}"))
    assert "/2 (full) and 2 more of ftrun.save" in files.warning


def test_a_file_that_a_newer_one_has_replaced_is_reported_and_closed() -> None:
    files, fd = RetainedFiles(), os.memfd_create("content")
    files.keep(file(1), fd)
    files.written(FileWritten("/a", 1, 3, 0.1, "it was changed", is_dropped=True))
    assert not is_open(fd)
    assert [one.reason for one in files.drain_results()] == ["it was changed"]
    assert files.warning == ""


def test_without_an_smp_each_file_is_reported_and_stays() -> None:
    files, fds = RetainedFiles(), [os.memfd_create(name) for name in "ab"]
    for number, (path, fd) in enumerate(zip(("/a", "/b"), fds, strict=True)):
        files.keep(file(number, path), fd)
    files.give_up("no SMP")
    assert [(one.path, one.reason) for one in files.drain_results()] == [
        ("/a", "no SMP"),
        ("/b", "no SMP"),
    ]
    assert "/a (no SMP), /b (no SMP) of ftrun.save will not be written" in files.warning
    assert "repeated" not in files.warning
    assert all(map(is_open, fds))
    for fd in fds:
        os.close(fd)


def test_a_file_that_an_smp_sent_before_its_end_is_kept(tmp_path: Path) -> None:
    here, there = socket.socketpair()
    smp = AgentSmpClient(RunFolder(tmp_path), 1.0)
    smp.channel = Channel(here, run_id="run", peer="the SMP")
    its, fd = Channel(there, run_id="run", peer="the agent"), os.memfd_create("content")
    its.send(file(1), fds=(fd,))
    its.close()
    smp.lost()
    ((found, kept),) = smp.files.held
    assert found == file(1)
    assert smp.channel is None
    os.close(fd)
    os.close(kept)
