"""A path or a link is measured over its own connection, within a limit."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import msgspec
import pytest
from made_settings import make_secret

from ftrun.agent.cluster import path_probe
from ftrun.agent.cluster.path_probe import (
    LinkProber,
    PathProber,
    probe,
    probe_path,
    serve_path_probe,
    serve_probe,
)
from ftrun.membership.events import Happening, MessageReceived
from ftrun.recovery.commands import ProbePath
from ftrun.wire.cluster.generation import PathMeasurement
from ftrun.wire.cluster.messages import (
    AnyClusterMessage,
    ProbeLinkRequest,
    ProbeLinkResult,
    ProbePathRequest,
    ProbePathResult,
)
from ftrun.wire.transport.handshake import PeerIdentity, Purpose, unfit
from ftrun.wire.transport.secret import Secret
from tests.contract.answering import WAIT_S, answering, closed_port

SECRET = make_secret()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the limit of half a second, which suits networks and not busy machines."""
    for name in ("DIAL_S", "SHORT_DIAL_S", "TRY_S", "SHORT_TRY_S", "SERVE_S"):
        monkeypatch.setattr(path_probe, name, WAIT_S)


def who(node_id: str, purpose: Purpose = "agent") -> PeerIdentity:
    return PeerIdentity("probe-run", purpose, node_id, 7)


def order_to(port: int, source: str = "127.0.0.1") -> ProbePathRequest:
    return ProbePathRequest(3, "there", "rail0", "lo", source, "127.0.0.1", port)


def probed(order: ProbePathRequest) -> PathMeasurement:
    return probe_path(order, "here", who("here", "path"), SECRET)


@contextmanager
def agent(
    secret: Secret | None = SECRET, *, is_unresponsive: bool = False
) -> Iterator[ProbePathRequest]:
    there = answering(who("there"), secret, serve_path_probe, is_unresponsive=is_unresponsive)
    with there as (_, port):
        yield order_to(port)


def test_a_path_has_a_round_trip_and_a_rate() -> None:
    # The quickest of some, so that it is the path's rate and not the machine's.
    for _ in range(5):
        with agent() as order:
            found = probed(order)
        assert found.problem == ""
        if found.bytes_per_s > 1e6 and found.rtt_s < 1:
            break
    assert (found.source, found.destination, found.rail) == ("here", "there", "rail0")
    assert 0 < found.rtt_s < 1
    assert found.bytes_per_s > 1e6


def test_a_short_try_sends_nothing_but_pings() -> None:
    with agent() as order:
        found = probed(msgspec.structs.replace(order, is_short=True))
    assert found.rtt_s > 0
    assert (found.bytes_per_s, found.problem) == (0.0, "")


def test_no_listener_is_a_dead_path() -> None:
    with closed_port("127.0.0.1") as port:
        found = probed(order_to(port))
    assert found.rtt_s == 0
    assert "refuses" in found.problem


def test_an_address_that_is_not_of_this_node_is_a_dead_path() -> None:
    assert probed(order_to(9, source="203.0.113.9")).problem


def test_another_secret_is_a_dead_path() -> None:
    with agent(make_secret()) as order:
        assert probed(order).problem


def test_a_node_that_does_not_answer_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_probe, "TRY_S", 0.3)
    with agent(is_unresponsive=True) as order:
        started_s = time.monotonic()
        found = probed(order)
        assert time.monotonic() - started_s < WAIT_S / 2
    assert found.rtt_s == 0
    assert "the probe did not finish" in found.problem


@pytest.mark.parametrize("asks", ["here", "lead"])
def test_the_node_check_reports_a_node_that_asked(asks: str) -> None:
    reported: SimpleQueue[tuple[str, Happening | AnyClusterMessage]] = SimpleQueue()
    rpc = PathProber(
        who("here"),
        SECRET,
        post=lambda event: reported.put(("", event)),
        send=lambda node_id, body: reported.put((node_id, body)),
    )
    with agent() as order:
        rpc.take(ProbePath(asks, order))
        where, what = reported.get(timeout=WAIT_S)
    if asks == "here":
        assert isinstance(what, MessageReceived)
        assert what.node_id == "here"
        what = what.message
    else:
        assert where == "lead"
    assert isinstance(what, ProbePathResult)
    assert (what.survey, what.found.destination) == (3, "there")


@pytest.mark.parametrize("reason", ["full", "no threads", "bug"])
def test_a_node_check_that_cannot_try_is_reported_at_once(
    monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    def breaks(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    if reason == "full":
        monkeypatch.setattr(path_probe, "MAX_AT_ONCE", 0)
    elif reason == "bug":
        monkeypatch.setattr(path_probe, "probe_path", breaks)
    reported: SimpleQueue[AnyClusterMessage] = SimpleQueue()
    rpc = PathProber(
        who("here"), SECRET, post=lambda _: None, send=lambda _, body: reported.put(body)
    )
    with monkeypatch.context() as patch:
        if reason == "no threads":
            patch.setattr(threading.Thread, "start", breaks)
        rpc.take(ProbePath("lead", order_to(1)))
    answer = reported.get(timeout=WAIT_S)
    assert isinstance(answer, ProbePathResult)
    assert answer.is_untried
    assert (answer.survey, answer.found.destination) == (3, "there")
    assert answer.found.problem


@contextmanager
def link_agent(
    secret: Secret | None = SECRET, *, is_unresponsive: bool = False
) -> Iterator[ProbeLinkRequest]:
    there = answering(who("there"), secret, serve_probe, is_unresponsive=is_unresponsive)
    with there as (host, port):
        yield ProbeLinkRequest(1, "there", host, port)


def test_a_probe_reports_round_trip_and_both_rates() -> None:
    with link_agent() as order:
        found = probe(order, who("here", "probe"), SECRET)
    assert found.problem == ""
    assert found.receiver == "there"
    assert 0 < found.rtt_s < WAIT_S
    assert found.to_bytes_per_s > 0
    assert found.from_bytes_per_s > 0


def test_a_wrong_secret_is_no_probe() -> None:
    with link_agent(make_secret()) as order:
        found = probe(order, who("here", "probe"), SECRET)
    assert found.problem
    assert found.rtt_s == 0


def test_a_node_that_does_not_answer_is_given_up() -> None:
    with link_agent(is_unresponsive=True) as order:
        found = probe(order, who("here", "probe"), SECRET, limit_s=0.2)
    assert "the probe did not finish" in found.problem
    assert found.to_bytes_per_s == 0


def test_no_listener() -> None:
    with closed_port("127.0.0.1") as port:
        found = probe(ProbeLinkRequest(3, "there", "127.0.0.1", port), who("here", "probe"), None)
    assert found.number == 3
    assert "refuses" in found.problem or found.problem


def test_a_prober_that_goes_away_is_an_error_of_the_server() -> None:
    left, right = socket.socketpair(socket.AF_UNIX)
    left.close()
    with right, pytest.raises(OSError, match=r"."):
        serve_probe(right)


def test_one_probe_at_a_time_and_a_pause_between_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_probe, "PAUSE_S", WAIT_S)  # it is not over, however busy the machine
    rpc = LinkProber(who("here"), SECRET)
    found: list[ProbeLinkResult] = []
    came, may_end = threading.Event(), threading.Event()

    def answer(one: ProbeLinkResult) -> None:
        found.append(one)
        came.set()
        may_end.wait(WAIT_S)

    with link_agent() as order:
        assert rpc.take(order, answer)
        assert came.wait(WAIT_S)
        assert not rpc.take(order, answer)
        may_end.set()
    assert [one.problem for one in found] == [""]
    with rpc._busy:
        pass
    assert not rpc.take(order, answer)


@pytest.mark.parametrize(
    ("own", "peer", "is_fit"),
    [
        *(("agent", "agent", True), ("smp", "smp", True), ("agent", "probe", True)),
        *(("probe", "agent", True), ("probe", "probe", False), ("smp", "probe", False)),
        *(("probe", "smp", False), ("agent", "smp", False)),
    ],
)
def test_a_probe_speaks_with_agents_only(own: Purpose, peer: Purpose, is_fit: bool) -> None:
    mine, theirs = who("here", own), msgspec.structs.replace(who("there", peer), incarnation=8)
    assert (unfit(mine, theirs) == "") is is_fit
