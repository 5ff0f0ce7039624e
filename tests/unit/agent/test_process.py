"""Children of the agent: their end is reported before the kernel has freed their memory."""

import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from launch_requests import launch_request

from ftrun.agent.launch.process import ChildProcess, has_ended
from ftrun.agent.launch.warm_start import LaunchSlot, WorkerHandle, _woken
from ftrun.wire.shared_memory.pages import SharedPage, create_page

WAIT_S = 20.0
START = """
import os, sys, threading, time
ended = threading.Event()
threads = [threading.Thread(target=time.sleep, args=(600,), daemon=True) for _ in range(3)]
threads.insert(0, threading.Thread(target=ended.wait, daemon=True))
for thread in threads:
    thread.start()
memory = b"x" * (64 << 20)
print("ready", flush=True)
for line in sys.stdin:
    if line == "end a thread\\n":
        ended.set()
        threads[0].join()
        print("ended", flush=True)
    else:
        os._exit(int(line))
"""

Start = Callable[[], tuple["subprocess.Popen[str]", ChildProcess]]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[tuple[subprocess.Popen[str], ChildProcess]] = []

    def run() -> tuple["subprocess.Popen[str]", ChildProcess]:
        process = subprocess.Popen(
            [sys.executable, "-c", START],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        started.append((process, ChildProcess(process.pid, "a rank")))
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return started[-1]

    yield run
    for process, child in started:
        child.signal(signal.SIGKILL)
        child.wait(WAIT_S)
        process.returncode = 0  # `child` has read the status
        process.communicate()


def order(process: "subprocess.Popen[str]", text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{text}\n")
    process.stdin.flush()


def watched(child: ChildProcess) -> int:
    child.watch_thread()
    if len(child.descriptors) < 2:
        pytest.skip("needs Linux 6.9: a pidfd of a thread")
    assert not child.is_ending()
    return child.descriptors[1]


def test_a_killed_process_is_ending_before_it_has_ended(start: Start) -> None:
    _, child = start()
    child.signal(signal.SIGSTOP)
    child.signal(signal.SIGCONT)
    thread = watched(child)
    child.signal(signal.SIGKILL)
    assert has_ended(thread, wait_s=WAIT_S)
    assert child.is_ending()
    assert child.ended_with == -signal.SIGKILL
    assert child.status is None  # only `reap` and `wait` prove the end
    assert child.descriptors == [child.pidfd]
    assert child.wait(WAIT_S)
    assert child.status == child.ended_with == -signal.SIGKILL
    assert child.descriptors == []


def test_a_failure_is_reported_and_an_end_with_0_is_not(start: Start) -> None:
    for code in (3, 0):
        process, child = start()
        thread = watched(child)
        order(process, str(code))
        assert has_ended(thread, wait_s=WAIT_S)
        assert child.is_ending() == (code != 0)
        assert child.wait(WAIT_S)
        assert child.ended_with == code


def test_a_thread_that_ends_alone_is_replaced_by_another_one(start: Start) -> None:
    process, child = start()
    thread = watched(child)
    order(process, "end a thread")
    assert has_ended(thread, wait_s=WAIT_S)
    assert not child.is_ending()
    assert child.descriptors == [child.pidfd]
    thread = watched(child)
    child.signal(signal.SIGKILL)
    assert has_ended(thread, wait_s=WAIT_S)
    assert child.is_ending()


def test_a_process_is_watched_a_few_times_at_most_in_a_generation(start: Start) -> None:
    _, child = start()
    for _ in range(3):
        watched(child)
        child._unwatch()
    child.watch_thread()
    assert len(child.descriptors) == 1
    line, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with line, its_end:
        slot = LaunchSlot(launch_request(), SharedPage(create_page("rank-0")), line)
        assert _woken(WorkerHandle(0, child, slot, "warm"), slot.request) is child
    child.watch_thread()
    assert len(child.descriptors) == 2


def test_a_stopped_process_is_not_ending(start: Start) -> None:
    _, child = start()
    thread = watched(child)
    child.signal(signal.SIGSTOP)
    assert not has_ended(thread, wait_s=0.2)
    assert not child.is_ending()
    assert child.is_stopped()
