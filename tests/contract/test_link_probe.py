"""A probe measures a link over a connection of its own, and gives up in time."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from ftrun.agent.cluster import link_probe
from ftrun.agent.cluster.link_probe import LinkProber, probe, serve_probe
from ftrun.wire.cluster.messages import ProbeLinkRequest, ProbeLinkResult
from ftrun.wire.transport.handshake import PeerIdentity, Purpose, unfit
from ftrun.wire.transport.secret import Secret, make_secret
from tests.contract.answering import WAIT_S, answering, nobody_at

SECRET = make_secret()


def who(node_id: str, purpose: Purpose = "agent") -> PeerIdentity:
    return PeerIdentity("probe-run", purpose, node_id, 7)


@contextmanager
def agent(secret: Secret | None = SECRET, *, is_mute: bool = False) -> Iterator[ProbeLinkRequest]:
    """An agent that serves one probe."""
    with answering(who("there"), secret, serve_probe, is_mute=is_mute) as (host, port):
        yield ProbeLinkRequest(1, "there", host, port)


def test_a_probe_tells_round_trip_and_both_rates() -> None:
    with agent() as order:
        found = probe(order, who("here", "probe"), SECRET)
    assert found.problem == ""
    assert found.receiver == "there"
    assert 0 < found.rtt_s < WAIT_S
    assert found.to_bytes_per_s > 0
    assert found.from_bytes_per_s > 0


def test_a_wrong_secret_is_no_probe() -> None:
    with agent(make_secret()) as order:
        found = probe(order, who("here", "probe"), SECRET)
    assert found.problem
    assert found.rtt_s == 0


def test_who_does_not_answer_is_given_up() -> None:
    with agent(is_mute=True) as order:
        found = probe(order, who("here", "probe"), SECRET, limit_s=0.2)
    assert "did not come to its end" in found.problem
    assert found.to_bytes_per_s == 0


def test_nobody_there() -> None:
    with nobody_at("127.0.0.1") as port:
        found = probe(ProbeLinkRequest(3, "there", "127.0.0.1", port), who("here", "probe"), None)
    assert found.number == 3
    assert "refuses" in found.problem or found.problem


def test_a_prober_that_goes_away_is_an_error_of_the_server() -> None:
    left, right = socket.socketpair(socket.AF_UNIX)
    left.close()
    with right, pytest.raises(OSError, match=r"."):
        serve_probe(right)


def test_one_probe_at_a_time_and_a_pause_between_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_probe, "PAUSE_S", WAIT_S)  # it is not over, however busy the machine
    desk = LinkProber(who("here"), SECRET)
    found: list[ProbeLinkResult] = []
    came, may_end = threading.Event(), threading.Event()

    def answer(one: ProbeLinkResult) -> None:
        found.append(one)
        came.set()
        may_end.wait(WAIT_S)

    with agent() as order:
        assert desk.take(order, answer)
        assert came.wait(WAIT_S)
        assert not desk.take(order, answer)
        may_end.set()
    assert [one.problem for one in found] == [""]
    with desk._busy:
        pass
    assert not desk.take(order, answer)


@pytest.mark.parametrize(
    ("own", "peer", "is_fit"),
    [
        ("agent", "agent", True),
        ("smp", "smp", True),
        ("agent", "probe", True),
        ("probe", "agent", True),
        ("probe", "probe", False),
        ("smp", "probe", False),
        ("probe", "smp", False),
        ("agent", "smp", False),
    ],
)
def test_a_probe_speaks_with_agents_only(own: Purpose, peer: Purpose, is_fit: bool) -> None:
    mine, theirs = who("here", own), msgspec.structs.replace(who("there", peer), incarnation=8)
    assert (unfit(mine, theirs) == "") is is_fit
