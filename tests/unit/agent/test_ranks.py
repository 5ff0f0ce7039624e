"""Observations of ranks that make no steps: times without a change, and their logs; their cost."""

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue

import pytest
from msgspec.structs import replace

from ftrun import clock
from ftrun.agent.launch.process import ChildProcess, has_ended
from ftrun.agent.launch.warm_start import LaunchSlot, WorkerHandle
from ftrun.agent.observe import ranks, recorder_dumps
from ftrun.agent.observe.ranks import RankObserver, Sampler
from ftrun.agent.observe.recorder import GroupMemory
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
    memory = GroupMemory()
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


@contextmanager
def server(handle: WorkerHandle, folder: Path) -> Iterator[None]:
    """A server of the rank, below a path of its own."""
    handle.slot.page.set(HeartbeatField.HAS_SERVER, 1)
    request = replace(handle.slot.request, rank_socket=str(folder / "socket"))
    handle.slot = LaunchSlot(request, handle.slot.page)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(request.rank_socket)
        listener.listen()
        threading.Thread(target=answer, args=[listener], daemon=True).start()
        yield
        listener.shutdown(socket.SHUT_RDWR)


def test_ranks_that_wait_for_a_stopped_rank_of_another_node_are_dumped_when_they_are_killed(
    handle: WorkerHandle, tmp_path: Path
) -> None:
    dump = tmp_path / "0" / "rank_1"
    with server(handle, tmp_path):
        observer = RankObserver(SimpleQueue(), HangConfig(), tmp_path, lambda _: ())
        for for_s, is_dumped in ((0.5, False), (4.0, True), (11.0, False)):
            observer.observe([handle])
            hang(observer, handle, for_s)
            dump.unlink(missing_ok=True)  # of the hang of 11 s, which stays the only one
            observer.keep_calls([handle])
            assert not dump.exists(), "a kill waits for no file"
            observer._poll()
            assert dump.exists() is is_dumped
            assert not is_dumped or pickle.loads(dump.read_bytes())["entries"] == []
        observer.observe([handle])
        hang(observer, handle, 4.0)
        os.kill(handle.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, handle.pid, os.WSTOPPED)
        observer.keep_calls([handle])
        observer._poll()
        assert not dump.exists(), "a stopped rank does not answer"


def test_dumps_on_a_dead_file_system_delay_the_views_once(
    handle: WorkerHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_dumps, "DUMPS_S", 0.1)
    part = tmp_path / "0" / ".rank_1"
    part.parent.mkdir()
    os.mkfifo(part)  # without a reader, an open for writing hangs
    with server(handle, tmp_path):
        observer = RankObserver(SimpleQueue(), HangConfig(), tmp_path, lambda _: ())
        observer.observe([handle])
        for for_s in (9.0, 9.5, 119.5):
            hang(observer, handle, for_s)
            assert observer.views[0].unresponsive_s >= for_s
        assert not (part.parent / "rank_1").exists()
        assert part.read_bytes(), "the thread continues when the file system answers"


@pytest.mark.parametrize(
    ("cpu_s", "every_s"), [(0.0, 1.0), (0.0015, 1.0), (0.01, 5.0), (0.1, 50.0)]
)
def test_the_cost_of_monitoring_is_bounded_while_ranks_make_steps(
    handle: WorkerHandle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cpu_s: float,
    every_s: float,
) -> None:
    """`cpu_s`: processor time of one sample. Only samples ask the rank and read /proc."""
    now, used, calls = [clock.now_s()], [0.0], list[str]()

    def counted(name: str, result: object) -> Callable[..., object]:
        def call(*_: object, **__: object) -> object:
            calls.append(name)
            used[0] += cpu_s * (name == "trace")
            return result

        return call

    observer = RankObserver(SimpleQueue(), HangConfig(), tmp_path, lambda _: ())
    observer.observe([handle])
    handle.slot.page.set(HeartbeatField.HAS_SERVER, 1)
    monkeypatch.setattr(clock, "now_s", lambda: now[0])
    monkeypatch.setattr(clock, "now_ns", lambda: int(now[0] * 1e9))
    monkeypatch.setattr(clock, "wall_s", lambda: 1e9 + now[0])
    monkeypatch.setattr(clock, "thread_cpu_s", lambda: used[0])
    monkeypatch.setattr(ranks, "read_trace", counted("trace", None))
    monkeypatch.setattr(ranks, "resident_bytes", counted("resident", 0))
    monkeypatch.setattr(ranks, "free_memory", counted("memory", 0))
    monkeypatch.setattr(ranks.SocketStats, "poll", counted("sockets", ()))
    for name in ("process_facts", "take_stack"):
        monkeypatch.setattr(ranks, name, counted(name, None))
    for _ in range(int(100.0 / ranks.POLL_EVERY_S)):
        now[0] += ranks.POLL_EVERY_S
        handle.slot.page.set(HeartbeatField.HEARTBEAT_NS, clock.now_ns())
        observer._poll()
    count = 100.0 / every_s
    assert calls.count("trace") == calls.count("resident") == calls.count("sockets")
    assert count - 2 <= calls.count("trace") <= count + 1
    assert calls.count("memory") <= 20
    assert set(calls) == {"trace", "resident", "sockets", "memory"}
    assert ranks._BOTH_ENDS * used[0] / 100.0 < 0.005, "of a processor"


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
