"""A road is tried over a connection of its own, in one direction, and given up in time."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import msgspec
import pytest

from ftrun.agent.cluster import path_probe as road_probe
from ftrun.agent.cluster.path_probe import PathProber, serve_road, try_road
from ftrun.membership.events import Happening, MessageReceived
from ftrun.recovery.commands import ProbePath
from ftrun.wire.cluster.messages import AnyClusterMessage, ProbePathRequest, ProbePathResult
from ftrun.wire.transport.handshake import PeerIdentity, Purpose
from ftrun.wire.transport.secret import Secret, make_secret
from tests.contract.answering import WAIT_S, answering, nobody_at

SECRET = make_secret()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second is a limit for networks, and not for machines that are busy."""
    for name in ("DIAL_S", "SHORT_DIAL_S", "TRY_S", "SHORT_TRY_S", "SERVE_S"):
        monkeypatch.setattr(road_probe, name, WAIT_S)


def who(node_id: str, purpose: Purpose = "agent") -> PeerIdentity:
    return PeerIdentity("road-run", purpose, node_id, 7)


@contextmanager
def agent(secret: Secret | None = SECRET, *, is_mute: bool = False) -> Iterator[ProbePathRequest]:
    """An agent that serves one road."""
    with answering(who("there"), secret, serve_road, is_mute=is_mute) as (host, port):
        yield ProbePathRequest(3, "there", "rail0", "lo", "127.0.0.1", host, port)


def test_a_road_has_a_round_trip_and_a_rate() -> None:
    # The quickest of some, so that it is the road's rate and not the machine's.
    for _ in range(5):
        with agent() as order:
            found = try_road(order, "here", who("here", "road"), SECRET)
        assert found.problem == ""
        if found.bytes_per_s > 1e6 and found.rtt_s < 1:
            break
    assert (found.source, found.destination, found.rail) == ("here", "there", "rail0")
    assert 0 < found.rtt_s < 1
    assert found.bytes_per_s > 1e6


def test_a_short_try_sends_nothing_but_pings() -> None:
    with agent() as order:
        short = msgspec.structs.replace(order, is_short=True)
        found = try_road(short, "here", who("here", "road"), SECRET)
    assert found.rtt_s > 0
    assert (found.bytes_per_s, found.problem) == (0.0, "")


def test_nobody_there_is_a_dead_road() -> None:
    with nobody_at("127.0.0.1") as port:
        order = ProbePathRequest(3, "there", "rail0", "lo", "127.0.0.1", "127.0.0.1", port)
        found = try_road(order, "here", who("here", "road"), SECRET)
    assert found.rtt_s == 0
    assert "refuses" in found.problem


def test_an_address_that_is_not_of_this_node_is_a_dead_road() -> None:
    order = ProbePathRequest(3, "there", "rail0", "lo", "203.0.113.9", "127.0.0.1", 9)
    assert try_road(order, "here", who("here", "road"), SECRET).problem


def test_another_secret_is_a_dead_road() -> None:
    with agent(make_secret()) as order:
        assert try_road(order, "here", who("here", "road"), SECRET).problem


def test_who_does_not_answer_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(road_probe, "TRY_S", 0.3)
    with agent(is_mute=True) as order:
        begun_s = time.monotonic()
        found = try_road(order, "here", who("here", "road"), SECRET)
        assert time.monotonic() - begun_s < WAIT_S / 2
    assert found.rtt_s == 0
    assert "did not come to its end" in found.problem


@pytest.mark.parametrize("asks", ["here", "lead"])
def test_the_desk_tells_whoever_asked(asks: str) -> None:
    told: SimpleQueue[tuple[str, Happening | AnyClusterMessage]] = SimpleQueue()
    desk = PathProber(
        who("here"),
        SECRET,
        tell=lambda event: told.put(("", event)),
        send=lambda node_id, body: told.put((node_id, body)),
    )
    with agent() as order:
        desk.take(ProbePath(asks, order))
        where, what = told.get(timeout=WAIT_S)
    if asks == "here":
        assert isinstance(what, MessageReceived)
        assert what.node_id == "here"
        what = what.message
    else:
        assert where == "lead"
    assert isinstance(what, ProbePathResult)
    assert (what.survey, what.found.destination) == (3, "there")


@pytest.mark.parametrize("why", ["full", "no threads", "bug"])
def test_a_desk_that_cannot_try_says_so_at_once(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    def breaks(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    if why == "full":
        monkeypatch.setattr(road_probe, "MAX_AT_ONCE", 0)
    elif why == "bug":
        monkeypatch.setattr(road_probe, "try_road", breaks)
    told: SimpleQueue[AnyClusterMessage] = SimpleQueue()
    desk = PathProber(who("here"), SECRET, tell=lambda _: None, send=lambda _, body: told.put(body))
    with monkeypatch.context() as patch:
        if why == "no threads":
            patch.setattr(threading.Thread, "start", breaks)
        desk.take(
            ProbePath(
                "lead", ProbePathRequest(3, "there", "rail0", "lo", "127.0.0.1", "127.0.0.1", 1)
            )
        )
    answer = told.get(timeout=WAIT_S)
    assert isinstance(answer, ProbePathResult)
    assert answer.is_untried
    assert (answer.survey, answer.found.destination) == (3, "there")
    assert answer.found.problem
