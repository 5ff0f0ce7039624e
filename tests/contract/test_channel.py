"""Messages and descriptors arrive complete, in order and from this run, or not at all."""

import gc
import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftrun import clock
from ftrun.errors import PeerLost, PeerTimeout, ProtocolError
from ftrun.wire.messages.envelope import Done, Envelope, Hello, Refused
from ftrun.wire.messages.smp import HandOverMemory, MemoryHandedOver, PersistRunState
from ftrun.wire.shared_memory.pages import HeartbeatField, SharedPage, create_page
from ftrun.wire.transport.channel import Channel, accept, connect, credentials, listen
from ftrun.wire.transport.framing import encode

TIMEOUT_S = 30.0


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    gc.collect()  # what other tests have left is not counted
    before = len(os.listdir("/proc/self/fd"))
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    left, right = Channel(a, run_id="run", peer="b"), Channel(b, run_id="run", peer="a")
    yield left, right
    left.close()
    right.close()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_message_carries_run_generation_and_incarnation(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    left.generation, left.incarnation = 3, 4
    left.send(Done())
    assert right.receive(deadline_s=TIMEOUT_S).envelope == Envelope("run", 3, 4, Done())


def test_descriptors_arrive_with_their_message(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    pages = [create_page("test"), create_page("test")]
    for number, fd in enumerate(pages):
        SharedPage(fd).set(HeartbeatField.STEP, number + 10)
    left.send(Refused("none with this one"))
    left.send(MemoryHandedOver([0, 1], b""), fds=tuple(pages))
    left.send(Done())
    for fd in pages:
        os.close(fd)
    assert right.receive(deadline_s=TIMEOUT_S).fds == ()
    received = right.receive(deadline_s=TIMEOUT_S)
    assert [SharedPage(fd).get(HeartbeatField.STEP) for fd in received.fds] == [10, 11]
    assert not any(os.get_inheritable(fd) for fd in received.fds)
    assert right.receive(deadline_s=TIMEOUT_S).fds == ()
    for fd in received.fds:
        os.close(fd)


def test_descriptors_that_no_process_took_are_closed_with_the_channel(
    ends: tuple[Channel, Channel],
) -> None:
    left, right = ends
    fd = create_page("test")
    left.send(MemoryHandedOver([0], b""), fds=(fd,))
    left.send(MemoryHandedOver([0], b""), fds=(fd,))
    os.close(fd)
    os.close(right.receive(deadline_s=TIMEOUT_S).fds[0])


def test_a_frame_that_comes_byte_by_byte_is_one_message() -> None:
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    channel = Channel(b, run_id="run", peer="a")
    for byte in encode(Envelope("run", 0, 0, Refused("slow"))):
        assert channel.receive_ready() == []
        a.send(bytes([byte]))
    assert channel.receive(deadline_s=TIMEOUT_S).body == Refused("slow")
    a.close()
    channel.close()


def test_a_message_longer_than_the_socket_buffer_arrives(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    body = PersistRunState(bytes(900_000))
    sender = threading.Thread(target=left.send, args=(body,))
    sender.start()
    assert right.receive(deadline_s=TIMEOUT_S).body == body
    sender.join(TIMEOUT_S)
    assert not sender.is_alive()


def test_a_message_of_another_run_is_a_protocol_error(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    left.run_id = "other"
    left.send(Done())
    with pytest.raises(ProtocolError):
        right.receive(deadline_s=TIMEOUT_S)


def test_descriptors_that_do_not_come_are_a_protocol_error(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    os.write(left.fileno(), encode(Envelope("run", 0, 0, Done(), num_fds=1)))
    with pytest.raises(ProtocolError):
        right.receive(deadline_s=TIMEOUT_S)


def test_an_answer_that_comes_late_is_not_taken_for_that_to_the_next_question(
    ends: tuple[Channel, Channel],
) -> None:
    requester, answerer = ends
    with pytest.raises(PeerTimeout):
        requester.ask(HandOverMemory(), deadline_s=0.05)
    fd = create_page("test")
    late = answerer.receive(deadline_s=TIMEOUT_S).envelope.question
    answerer.send(MemoryHandedOver([0], b""), fds=(fd,), question=late)
    os.close(fd)

    def answer() -> None:
        answerer.send(Refused("no process has asked"))
        asked = answerer.receive(deadline_s=TIMEOUT_S)
        answerer.send(Done(), question=asked.envelope.question)

    thread = threading.Thread(target=answer)
    thread.start()
    assert requester.ask(PersistRunState(b"x"), deadline_s=TIMEOUT_S).body == Done()
    thread.join(TIMEOUT_S)
    assert requester.receive(deadline_s=TIMEOUT_S).body == Refused("no process has asked")


def test_no_answer_is_a_timeout_after_the_deadline(ends: tuple[Channel, Channel]) -> None:
    _, right = ends
    with pytest.raises(PeerTimeout):
        right.receive(deadline_s=0.05)


def test_a_peer_that_takes_nothing_is_a_timeout(ends: tuple[Channel, Channel]) -> None:
    left, _ = ends
    with pytest.raises(PeerTimeout):
        left.send(PersistRunState(bytes(1_000_000)), deadline_s=0.05)


def test_a_closed_end_is_a_lost_peer_after_its_last_message(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    left.send(Done())
    left.close()
    assert [one.body for one in right.receive_ready()] == [Done()]
    with pytest.raises(PeerLost):
        right.receive_ready()
    with pytest.raises(PeerLost):
        right.send(Done())


def test_receive_ready_never_waits_even_after_a_send(ends: tuple[Channel, Channel]) -> None:
    left, _ = ends
    left.send(Done(), deadline_s=TIMEOUT_S)
    before_s = clock.now_s()
    assert left.receive_ready() == []
    assert clock.now_s() - before_s < TIMEOUT_S / 2


def test_connect_sends_hello_to_a_listener(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    path = folder / "test.sock"
    path.touch()  # a stale socket, or any other file there
    server = listen(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in folder.iterdir()] == ["test.sock"]
    caller = connect(
        path, run_id="run", peer="it", hello=Hello(role="cli", pid=7), deadline_s=TIMEOUT_S
    )
    answerer = accept(server, run_id="run")
    assert answerer is not None
    assert answerer.receive(deadline_s=TIMEOUT_S).body == Hello(role="cli", pid=7)
    caller.send(HandOverMemory())
    assert answerer.receive(deadline_s=TIMEOUT_S).body == HandOverMemory()
    answerer.send(Done())
    assert caller.receive(deadline_s=TIMEOUT_S).body == Done()
    for end in (caller, answerer, server):
        end.close()


def test_without_a_listener(tmp_path: Path) -> None:
    hello = Hello(role="cli", pid=7)
    with pytest.raises(PeerLost):
        connect(tmp_path / "none", run_id="r", peer="it", hello=hello, deadline_s=1.0)


def test_the_kernel_reports_whose_process_is_at_the_other_end() -> None:
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    assert credentials(a) == (os.getpid(), os.getuid())
    assert struct.calcsize("3i") == 12
    a.close()
    b.close()
