"""Observations of ranks that make no steps: times without a change, and their logs."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

import pytest
from msgspec.structs import replace

from ftrun import clock
from ftrun.agent.launch.process import ChildProcess, has_ended
from ftrun.agent.launch.warm_start import LaunchSlot, WorkerHandle
from ftrun.agent.observe import ranks
from ftrun.agent.observe.ranks import RankObserver, Sampler, _GroupMemory
from ftrun.config.profile import HangConfig
from ftrun.events import ErrorLine
from ftrun.ids import Generation, Rank
from ftrun.monitor.verdicts import OpenMessage, ProcessGroupView
from ftrun.wire.messages.worker import LaunchRequest
from ftrun.wire.shared_memory.pages import (
    HeartbeatField,
    SharedPage,
    create_page,
    create_stack_file,
    leave_calls,
)


def test_a_group_is_still_until_something_is_called_or_over() -> None:
    memory = _GroupMemory()
    one = ProcessGroupView("0", "dp", (0, 1), (), 5, 3.0, enqueued=6)
    message = OpenMessage("send", 1, 7, 3.0)
    seen = [
        (0.0, one),
        (2.0, replace(one, waits_s=5.0)),
        (3.0, replace(one, enqueued=7)),
        (4.0, replace(one, enqueued=7)),
        (5.0, replace(one, enqueued=7, waits_seq=6)),
        (6.0, replace(one, enqueued=7, waits_seq=6, messages=(message,))),
        (8.0, replace(one, enqueued=7, waits_seq=6, messages=(replace(message, waits_s=5.0),))),
    ]
    found = [memory.with_times(3, [group], now_s)[0].still_s for now_s, group in seen]
    assert found == [0.0, 2.0, 0.0, 1.0, 0.0, 0.0, 2.0]
    assert memory.with_times(4, [seen[-1][1]], 9.0)[0].still_s == 0.0
    memory.clear()
    assert memory.with_times(3, [seen[-1][1]], 9.0)[0].still_s == 0.0


@pytest.fixture
def handle() -> Iterator[WorkerHandle]:
    """A rank that has made a step, and hangs."""
    process = subprocess.Popen(["sleep", "100"])
    try:
        fds = {"stack": create_stack_file("1")}
        request = LaunchRequest(Generation(0), Rank(1), 2, os.getpid(), "", descriptors=fds)
        slot = LaunchSlot(request, SharedPage(create_page("rank-1")))
        slot.page.set(HeartbeatField.FIRST_STEP_NS, 1)
        yield WorkerHandle(0, ChildProcess(process.pid, "rank 1"), slot, "warm")
    finally:
        process.kill()
        process.wait()


def hang(observer: RankObserver, handle: WorkerHandle, for_s: float) -> None:
    """One poll after this time without a heartbeat."""
    observer._awake_since_s = 0.0
    handle.slot.page.set(HeartbeatField.HEARTBEAT_NS, clock.now_ns() - int(for_s * 1e9))
    observer._poll()


def test_logs_are_read_before_each_deadline_of_a_hang(handle: WorkerHandle, tmp_path: Path) -> None:
    lines = [(ErrorLine("disk full", f"line {number}", "stderr.log"),) for number in range(9)]
    left = iter(lines)
    settings = HangConfig(suspect_after_s=100.0, kill_after_s=200.0, phase_timeout_s=300.0)
    observer = RankObserver(SimpleQueue(), settings, tmp_path, lambda _: next(left))
    observer.observe([handle])
    shown = []
    for for_s in (60.0, 83.0, 84.5, 86.0, 98.0, 99.5, 150.0, 199.5, 250.0, 299.5, 400.0, 500.0):
        hang(observer, handle, for_s)
        (view,) = observer.views
        shown.append(view.errors[0].line if view.errors else "")
    first, act, kill, leave = (one[0].line for one in lines[:4])
    assert shown == ["", "", "", first, first, first, act, act, kill, kill, leave, leave]
    hang(observer, handle, 0.0)
    hang(observer, handle, 60.0)
    assert observer.views[0].errors == (), "another hang"


def test_logs_on_a_dead_file_system_delay_no_views(
    handle: WorkerHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "LOGS_S", 0.1)
    never, end = os.pipe()
    views_at_read = []

    def read(_: WorkerHandle) -> tuple[ErrorLine, ...]:
        views_at_read.append(observer.views)
        os.read(never, 1)
        return ()

    try:
        observer = RankObserver(SimpleQueue(), HangConfig(suspect_after_s=10.0), tmp_path, read)
        observer.observe([handle])
        for for_s in (8.0, 9.5, 119.5):
            hang(observer, handle, for_s)
            assert observer.views[0].unresponsive_s >= for_s
        (first,) = views_at_read
        assert first[0].unresponsive_s >= 8.0, "the views are published before the logs are read"
    finally:
        os.write(end, b"1")
        os.close(end)


def answer(listener: socket.socket) -> None:
    """The server of a rank, with an empty recorder."""
    with suppress(OSError):
        while True:
            link, _ = listener.accept()
            with link:
                is_list = link.recv(1 << 12).startswith(b"GET")
                body = b'["fr_trace_json"]' if is_list else b'{"entries": []}'
                size = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n"
                link.sendall(size.encode() + body)


def test_dumps_on_a_dead_file_system_delay_the_views_once(
    handle: WorkerHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "DUMPS_S", 0.1)
    handle.slot.page.set(HeartbeatField.HAS_SERVER, 1)
    request = replace(handle.slot.request, rank_socket=str(tmp_path / "socket"))
    handle.slot = LaunchSlot(request, handle.slot.page)
    part = tmp_path / "0" / ".rank_1"
    part.parent.mkdir()
    os.mkfifo(part)  # without a reader, an open for writing hangs
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(request.rank_socket)
        listener.listen()
        threading.Thread(target=answer, args=[listener], daemon=True).start()
        observer = RankObserver(SimpleQueue(), HangConfig(), tmp_path, lambda _: ())
        observer.observe([handle])
        for for_s in (9.0, 9.5, 119.5):
            hang(observer, handle, for_s)
            assert observer.views[0].unresponsive_s >= for_s
        assert not (part.parent / "rank_1").exists()
        assert part.read_bytes(), "the thread continues when the file system answers"
        listener.shutdown(socket.SHUT_RDWR)


TWO_THREADS = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
print("ready", flush=True)
threading.Event().wait()
"""
LAST_CALL = {
    "process_group": ["0", "default_pg"], "collective_seq_id": 8, "op_id": 8, "pg_id": 0,
    "profiling_name": "gloo:all_reduce", "time_created_ns": 1, "retired": False,
}  # fmt: skip


def test_a_rank_that_is_being_ended_is_read_as_one_that_has_ended(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", TWO_THREADS], text=True, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    child = ChildProcess(process.pid, "rank 1")
    child.watch_thread()
    child.signal(signal.SIGKILL)
    try:
        if len(child.descriptors) < 2:
            pytest.skip("needs Linux 6.9: a pidfd of a thread")
        assert has_ended(child.descriptors[1], wait_s=20.0)
        assert child.is_ending()
        assert child.status is None
        fds, path = {"stack": create_stack_file("1")}, str(tmp_path / "socket")
        request = LaunchRequest(Generation(0), Rank(1), 2, os.getpid(), path, descriptors=fds)
        handle = WorkerHandle(0, child, LaunchSlot(request, SharedPage(create_page("1"))), "warm")
        handle.slot.page.set(HeartbeatField.FIRST_STEP_NS, 1)
        handle.slot.page.set(HeartbeatField.HAS_SERVER, 1)
        handle.slot.page.groups = "0=0,1"
        leave_calls(fds["stack"], json.dumps({"entries": [LAST_CALL]}).encode())
        assert handle.state == "ended"
        observer = RankObserver(SimpleQueue(), HangConfig(), tmp_path, lambda _: ())
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()  # the socket of the rank is open, and nothing answers
            observer.examine([handle])
            (view,) = observer.views
            assert view.process == ""
            assert [(group.ranks, group.entered) for group in view.groups] == [((0, 1), 8)]
            sampler = Sampler()
            sampler._due_s = 0.0
            sample = sampler.take([handle])
            assert sample is not None
            assert sample.ranks[0].resident_bytes == 0
            listener.settimeout(0.0)
            with pytest.raises(BlockingIOError):
                listener.accept()
    finally:
        assert child.wait(20.0)
        process.returncode = 0  # `child` has read the status
        process.communicate()
