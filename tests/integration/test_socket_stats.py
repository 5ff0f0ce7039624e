"""The kernel's figures of the connections of a child process, without root."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
from virtual_cluster import available

from ftrun import clock
from ftrun.agent.observe import proc as socket_stats
from ftrun.agent.observe.proc import SocketCounters, SocketStats
from ftrun.monitor.slow.delay_matrix import LinkSample

WAIT_S = 600.0

_CHILD = """
import socket, sys
sock = socket.create_connection((sys.argv[1], int(sys.argv[2])))
for line in sys.stdin:
    sock.sendall(b"x" * int(line))
    print("sent", flush=True)
"""


class Child:
    """A process with one connection to the test; it sends the requested number of bytes."""

    def __init__(self, listener: socket.socket) -> None:
        host, port = listener.getsockname()[:2]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, host, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._sent = 0
        listener.settimeout(WAIT_S)
        try:
            self.sock, _ = listener.accept()
        except BaseException:
            self.process.kill()
            self.process.communicate()
            raise
        self.sock.settimeout(WAIT_S)

    def send(self, count: int, *, read: bool = True) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        if not read:
            return
        left = count
        while left:
            left -= len(self.sock.recv(min(left, 1 << 16)))
        self._sent += count
        give_up_s = clock.now_s() + WAIT_S
        while self._acked() < self._sent:  # its kernel may receive it a moment later
            assert clock.now_s() < give_up_s

    def _acked(self) -> int:
        figures = SocketStats().figures([self.process.pid], clock.now_s())
        return sum(one.bytes_acked for one in figures)

    def close(self) -> None:
        self.sock.close()
        self.process.kill()
        self.process.communicate()


@pytest.fixture(params=["127.0.0.2", "::1"])
def child(request: pytest.FixtureRequest) -> Iterator[Child]:
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    try:
        listener = socket.create_server((request.param, 0), family=family)
    except OSError:
        pytest.skip(f"no {request.param} here")
    with listener:
        found = Child(listener)
    try:
        yield found
    finally:
        found.close()


def observed(stats: SocketStats, child: Child, until_bytes: int) -> LinkSample:
    """Poll until this number of bytes has been acknowledged in total."""
    samples: list[LinkSample] = []
    give_up_s = clock.now_s() + WAIT_S
    while sum(one.bytes for one in samples) < until_bytes:
        assert clock.now_s() < give_up_s, stats.error
        samples += stats.poll([child.process.pid], clock.now_s())
    return LinkSample.together(samples)


def test_bytes_of_a_connection_are_counted_from_look_to_look(child: Child) -> None:
    stats = SocketStats()
    child.send(10_000)
    assert stats.poll([child.process.pid], clock.now_s()) == []  # counts begin here
    shown = stats.connections([child.process.pid], clock.now_s())[child.process.pid]
    assert all(one.acked_s == -1.0 for one in shown)
    child.send(300_000)
    sample = observed(stats, child, 300_000)
    assert sample.to_host == child.sock.getsockname()[0]
    assert sample.bytes == 300_000
    assert 0 <= sample.busy_s < WAIT_S
    assert 0 < sample.rtt_s < 1
    assert sample.unacked_bytes == 0
    shown = stats.connections([child.process.pid], clock.now_s())[child.process.pid]
    known = [(one.remote, one.acked_bytes, one.stalled_s) for one in shown]
    here = child.sock.getsockname()[:2]
    # The child's end is 127.0.0.1 or ::1. A connection within one address is not of two machines.
    is_remote = here[0] != child.sock.getpeername()[0]
    assert known == ([(here, 310_001, 0.0)] if is_remote else [])
    assert all(0.0 <= one.acked_s < WAIT_S for one in shown)
    assert stats.error == ""


def test_figures_name_both_ends(child: Child) -> None:
    child.send(5_000)
    stats = SocketStats()
    (figures,) = stats.figures([child.process.pid], clock.now_s())
    assert figures.local == child.sock.getpeername()[:2]
    assert figures.remote == child.sock.getsockname()[:2]
    assert figures.bytes_sent >= 5_000
    assert figures.retransmits == 0


def test_a_peer_that_reads_nothing_stalls_but_is_not_the_networks_fault(child: Child) -> None:
    stats = SocketStats()
    pid = child.process.pid
    child.send(64 << 20, read=False)
    give_up_s = clock.now_s() + WAIT_S
    while True:  # until its buffers are full
        figures = stats.figures([pid], clock.now_s())
        if figures and figures[0].notsent_bytes and figures[0].window_bytes == 0:
            break
        assert clock.now_s() < give_up_s, figures
    assert not figures[0].is_waiting
    stats.poll([pid], clock.now_s())
    clock.sleep(0.5)
    (sample,) = stats.poll([pid], clock.now_s())
    assert sample.bytes == 0
    assert sample.busy_s < 0.1, "the peer had no window in this time"


def test_a_closed_window_is_no_stall_if_the_kernel_reports_it() -> None:
    """Segments that the peer has no memory for are sent again too."""
    open_window = SocketCounters(
        inode=1, local=("a", 1), remote=("b", 2), rtt_s=0.1, bytes_acked=5, bytes_received=0,
        bytes_sent=9, busy_s=1.0, retransmits=3, unacked_segments=2, notsent_bytes=0,
        window_bytes=500,
    )  # fmt: skip
    assert open_window.is_waiting
    assert replace(open_window, window_bytes=None).is_waiting
    assert not replace(open_window, window_bytes=0).is_waiting
    held_back = replace(open_window, unacked_segments=0, notsent_bytes=1)
    assert not held_back.is_waiting
    assert replace(held_back, window_bytes=1 << 16).is_waiting
    assert not replace(held_back, window_bytes=None).is_waiting


_WITHOUT_ANSWERS = """
import os, socket, subprocess, sys, time
from ftrun.agent.observe.proc import SocketStats
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
listener = socket.create_server(("127.0.0.2", 0))
sender = socket.create_connection(listener.getsockname(), source_address=("127.0.0.1", 0))
receiver, _ = listener.accept()
stats, pid = SocketStats(), os.getpid()

def ends():
    found = {one.local[0]: one for one in stats.connections([pid], time.monotonic())[pid]}
    return found["127.0.0.1"], found["127.0.0.2"]

def until(condition):
    while not condition(*ends()):
        time.sleep(0.05)

sender.sendall(b"x" * 1000)
until(lambda one, other: one.acked_bytes == 1001 and other.received_bytes == 1000)
assert all(one.stalled_s == 0 for one in ends())
drop = f"4,32 0 0 26,21 0 1 {int.from_bytes(socket.inet_aton(sys.argv[1]))},6 0 0 2,6 0 0 0"
subprocess.run(["tc", "qdisc", "add", "dev", "lo", "clsact"], check=True)
words = ["tc", "filter", "add", "dev", "lo", "egress", "bpf", "da", "bytecode", drop]
subprocess.run(words, check=True)
ends()
sender.sendall(b"y" * 500)
until(lambda one, other: one.stalled_s > 1)
one, other = ends()

assert one.remote == other.local and one.local == other.remote
assert other.stalled_s == 0, other
print(one.acked_bytes - 1, other.received_bytes, flush=True)
subprocess.run(["tc", "qdisc", "delete", "dev", "lo", "clsact"], check=True)
until(lambda one, other: one.stalled_s == 0 and one.acked_bytes == 1501)
sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
sender.setblocking(False)
for _ in range(3):  # its buffer and the receiver's window get full
    try:
        while True:
            sender.send(b"z" * 65536)
    except BlockingIOError:
        time.sleep(0.5)
        assert ends()[0].stalled_s == 0, ends()
"""


@pytest.mark.skipif(available() is not None, reason=f"needs namespaces: {available()}")
@pytest.mark.parametrize(
    ("dropped", "received"), [("127.0.0.1", 1000), ("127.0.0.2", 1500)], ids=["data", "answers"]
)
def test_a_connection_without_acknowledgements_stalls_and_both_ends_show_the_direction(
    dropped: str, received: int
) -> None:
    """Packets of one end are dropped. A receiver that reads nothing is no stall."""
    command = ["unshare", "--net", "--", sys.executable, "-c", _WITHOUT_ANSWERS, dropped]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1000", str(received)]


def test_a_connection_that_comes_later_is_counted_whole(child: Child) -> None:
    stats = SocketStats()
    child.send(1_000)
    stats.poll([child.process.pid], 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        other = Child(listener)
    try:
        other.send(7_000)
        pids = [child.process.pid, other.process.pid]
        total = 0
        give_up_s = clock.now_s() + WAIT_S
        while total < 7_000:
            assert clock.now_s() < give_up_s
            total += sum(one.bytes for one in stats.poll(pids, 1.0))
        assert total in (7_000, 7_001)  # the side that opens a connection counts its SYN
    finally:
        other.close()


def test_ended_processes_have_no_connections() -> None:
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"],
                           capture_output=True, text=True, check=True)  # fmt: skip
    stats = SocketStats()
    assert stats.poll([int(ended.stdout)], 0.0) == []
    assert stats.poll([], 1.0) == []


def test_a_kernel_that_does_not_answer_is_reported_and_does_no_harm(
    child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_stats, "_SOCK_DIAG_BY_FAMILY", 99)
    stats = SocketStats()
    assert stats.poll([child.process.pid], 0.0) == []
    assert "the kernel does not report connections" in stats.error
    monkeypatch.undo()
    stats.poll([child.process.pid], 20.0)
    assert stats.error == ""


_AS_NOBODY = """
import ctypes, encodings.idna, os, socket, sys
from ftrun.agent.observe.proc import SocketStats
os.setgid(65534)
os.setuid(65534)
started, reported = os.pipe()
pid = os.fork()
if pid == 0:
    # A process that changed its user is hidden from others of that user until it execs.
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
    sock = socket.create_connection((sys.argv[1], int(sys.argv[2])))
    sock.sendall(b"12345")
    os.write(reported, b"1")
    sock.recv(1)
    os._exit(0)
os.read(started, 1)
stats = SocketStats()
print(len(stats.figures([pid], 0.0)), stats.error, flush=True)
os.waitpid(pid, 0)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_no_rights_are_needed_for_ones_own_children() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        looker = subprocess.Popen(
            [sys.executable, "-c", _AS_NOBODY, host, str(port)], stdout=subprocess.PIPE, text=True
        )
        try:
            listener.settimeout(WAIT_S)
            sock, _ = listener.accept()
            assert looker.stdout is not None
            assert looker.stdout.readline().split() == ["1"]
            sock.close()
            assert looker.wait(WAIT_S) == 0
        finally:
            looker.kill()
            looker.communicate()
