"""Processes of a run are found under any name, and ended to the last thread."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ftrun import process_tree

WAIT_S = 600.0

ONLY_A_THREAD = """
import ctypes, os, sys, threading, time
def work():
    while open(f"/proc/{os.getpid()}/stat").read().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    os.write(1, b"main thread has ended\\n")
    time.sleep(600)
threading.Thread(target=work).start()
ctypes.CDLL(None).syscall(60, 0)  # exit of the calling thread alone (x86-64)
"""

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start processes with a mark; all of their session end with the test."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(*argv: str, **variables: str) -> subprocess.Popen[bytes]:
        started.append(
            subprocess.Popen(
                argv,
                env={**os.environ, **variables},
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        )
        return started[-1]

    yield begin
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=WAIT_S)


def first_line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


def test_marked_processes_are_found_under_any_name_and_session(
    start: Start, tmp_path: Path
) -> None:
    mark = process_tree.mark_of(tmp_path)
    tree = "echo other > /proc/$$/comm; setsid sleep 600 & echo $!; wait"
    shell = start("sh", "-c", tree, **{process_tree.MARK: mark})
    inner = int(first_line(shell))
    unknown_peer = start("sh", "-c", "echo up; sleep 600; :", **{process_tree.MARK: f"{mark}2"})
    first_line(unknown_peer)
    assert sorted(process_tree.left_behind(tmp_path)) == sorted([shell.pid, inner])
    assert process_tree.descendants([shell.pid]) == [inner]
    assert process_tree.end_left_behind(tmp_path) == []
    assert process_tree.left_behind(tmp_path) == []
    assert unknown_peer.poll() is None, "another run's"


def test_lasting_processes_are_no_leftovers(start: Start, tmp_path: Path) -> None:
    mark = process_tree.mark_of(tmp_path)
    smp = start(
        "sh", "-c", "echo ftrun-smp > /proc/$$/comm; echo up; sleep 600; :",
        **{process_tree.MARK: mark},
    )  # fmt: skip
    first_line(smp)
    assert smp.pid not in process_tree.left_behind(tmp_path)


OVERWRITES_ITS_ENVIRONMENT = """
import ctypes, time
fields = open("/proc/self/stat").read().rpartition(")")[2].split()
first, end = int(fields[47]), int(fields[48])
ctypes.memset(first, ord("x"), end - first)
print("up", flush=True)
time.sleep(600)
"""


def test_processes_of_a_session_are_found_by_it_alone(start: Start, tmp_path: Path) -> None:
    python = shlex.join([sys.executable, "-c", OVERWRITES_ITS_ENVIRONMENT])
    leader = start(
        "sh",
        "-c",
        f"{python} & exec sleep 0.2",
        **{process_tree.MARK: process_tree.mark_of(tmp_path)},
    )
    process_tree.note_sessions(tmp_path, [leader.pid])
    assert first_line(leader) == b"up\n"
    leader.wait(WAIT_S)
    (inner,) = process_tree.left_behind(tmp_path)
    assert process_tree.session_of(inner) == leader.pid
    assert process_tree.end_left_behind(tmp_path) == []
    assert process_tree.left_behind(tmp_path) == []


def test_sessions_of_other_processes_with_these_numbers_are_left_alone(
    start: Start, tmp_path: Path
) -> None:
    unknown_peer = start("sh", "-c", "echo up; sleep 600; :")
    first_line(unknown_peer)
    process_tree.note_sessions(tmp_path, [unknown_peer.pid])
    notes = tmp_path / "rank-sessions"
    where, line = notes.read_text().splitlines()
    assert process_tree.left_behind(tmp_path)
    pid, start_time = line.split()
    notes.write_text(f"{where}\n{pid} {int(start_time) - 1}")
    assert process_tree.left_behind(tmp_path) == [], "a later process"
    notes.write_text(f"another boot {where}\n{line}")
    assert process_tree.left_behind(tmp_path) == [], "an earlier boot"
    notes.write_text("torn")
    assert process_tree.left_behind(tmp_path) == []


def test_another_folder_of_the_same_name_has_another_mark(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    before = process_tree.mark_of(folder)
    (tmp_path / "taken").mkdir()
    folder.rename(tmp_path / "moved")
    folder.mkdir()
    assert process_tree.mark_of(folder) != before


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the number of a system call")
def test_process_whose_main_thread_has_ended_counts_until_its_last_thread(
    start: Start, tmp_path: Path
) -> None:
    mark = process_tree.mark_of(tmp_path)
    process = start(sys.executable, "-c", ONLY_A_THREAD, **{process_tree.MARK: mark})
    assert first_line(process) == b"main thread has ended\n"
    assert process_tree.state_of(process.pid) == "Z"
    assert process_tree.left_behind(tmp_path) == [process.pid]
    assert process_tree.end_left_behind(tmp_path) == []
    assert process.wait(WAIT_S) == -signal.SIGKILL


def test_signal_reaches_only_the_process_that_was_meant(start: Start) -> None:
    process = start("sleep", "600")
    process_tree.send(process.pid, signal.SIGKILL, still=lambda _pid: False)
    time.sleep(0.1)
    assert process.poll() is None
    process_tree.send(process.pid, signal.SIGKILL, still=lambda _pid: True)
    assert process.wait(WAIT_S) == -signal.SIGKILL
    process_tree.send(process.pid, signal.SIGKILL, still=lambda _pid: True)  # it has ended
