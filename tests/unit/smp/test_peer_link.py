"""When a link redials, when its node counts as lost, and which links a session admits."""

import contextlib
import queue
import socket
import threading
from collections.abc import Iterator

import pytest

from ftrun.errors import PeerError
from ftrun.smp.peer_link import (
    FETCH,
    FIRST_PAUSE_S,
    PROTECT,
    LinkEndpoints,
    LinkRules,
    PeerLink,
    admits,
)
from ftrun.wire.cluster.transfer import LinkHello
from ftrun.wire.messages.smp import NodeAddress
from ftrun.wire.transport.handshake import PeerIdentity, accept_handshake
from tests.exhausted import no_descriptors

TIMEOUT_S = 10.0


def failed(rules: LinkRules, now_s: float, *, refused: bool = False, away: bool = False) -> str:
    return rules.dial_failed("why", is_refused=refused, is_turned_away=away, now_s=now_s)


def test_a_node_that_does_not_answer_is_reported_once_when_the_patience_is_over() -> None:
    rules = LinkRules(dials_again_first=False, timeout_s=TIMEOUT_S)
    rules.begin_dialing(5.0)
    assert failed(rules, 14.0, refused=True) == ""
    assert failed(rules, 15.1) == "why"
    assert rules.is_lost
    assert failed(rules, 16.0) == ""
    assert rules.connected(17.0), "it was lost, and is there again"
    assert not rules.is_lost


def test_a_link_to_fetch_reports_a_lost_node_only_if_it_refuses_a_new_connection() -> None:
    rules = LinkRules(dials_again_first=True, timeout_s=TIMEOUT_S)
    rules.begin_dialing(0.0)
    assert failed(rules, 0.1, refused=True) == "", "it may not listen yet"
    assert not rules.connected(0.2)
    assert rules.disconnected("reset") == ""
    assert not rules.is_lost
    rules.begin_dialing(1.0)
    assert failed(rules, 1.1, refused=True) == "why"


def test_a_link_to_protect_reports_every_lost_connection() -> None:
    rules = LinkRules(dials_again_first=False, timeout_s=TIMEOUT_S)
    rules.begin_dialing(0.0)
    assert not rules.connected(0.0)
    assert rules.disconnected("reset") == "reset"
    assert rules.is_lost


def test_another_process_at_the_address_is_reported_at_once() -> None:
    rules = LinkRules(dials_again_first=False, timeout_s=TIMEOUT_S)
    rules.begin_dialing(0.0)
    assert failed(rules, 0.1, away=True) == "why"


def test_pauses_grow_while_connections_are_brief() -> None:
    rules = LinkRules(dials_again_first=False, timeout_s=TIMEOUT_S)
    rules.begin_dialing(0.0)
    assert [rules.pause_s() for _ in range(6)] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0]
    rules.begin_dialing(0.0)
    assert rules.pause_s() == FIRST_PAUSE_S
    rests = []
    for _ in range(6):
        rules.connected(1.0)
        rests.append(rules.rest_s(1.05))
    assert rests == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    rules.connected(1.0)
    assert rules.rest_s(1.2) == FIRST_PAUSE_S


def test_a_session_admits_links_of_its_generation_and_group() -> None:
    def says(generation: int, purpose: str, session: int) -> bool | None:
        hello = LinkHello(generation, purpose, session)
        return admits(hello, generation=3, session=7)

    assert says(3, PROTECT, 7)
    assert says(3, PROTECT, 8) is None, "its group changes, or that of this node"
    assert says(3, FETCH, 0)
    assert says(2, FETCH, 0) is False
    assert says(4, PROTECT, 7) is None


@contextlib.contextmanager
def listening(*answers: PeerIdentity) -> Iterator[tuple[int, "queue.Queue[str]"]]:
    """Answer one connection after the other as these processes; put the outcomes in the queue."""
    found: queue.Queue[str] = queue.Queue()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def run() -> None:
            for one in answers:
                with contextlib.suppress(OSError), server.accept()[0] as sock:
                    try:
                        accept_handshake(sock, one, None)
                        found.put(f"linked to {one.node_id} {one.incarnation}")
                    except PeerError:
                        found.put("refused")

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield server.getsockname()[1], found
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize("purpose", [FETCH, PROTECT])
def test_an_smp_that_still_names_the_old_agent_of_its_node_is_dialled_again(purpose: str) -> None:
    old, new = (PeerIdentity("run", "smp", "b", number) for number in (1, 2))
    lost: queue.Queue[str] = queue.Queue()
    with listening(old, old, new) as (port, found):
        link = PeerLink(ends(port, purpose), lost=lost.put, linked=lambda: None)
        link.start()
        assert [found.get(timeout=30) for _ in range(3)] == ["refused", "refused", "linked to b 2"]
        link.close()
    # The listener ends the last connection, which may be reported.
    assert not [reason for reason in lost.queue if "incarnation" in reason]


def test_an_smp_of_another_node_is_reported_at_once() -> None:
    lost: queue.Queue[str] = queue.Queue()
    with listening(PeerIdentity("run", "smp", "c", 2)) as (port, _):
        link = PeerLink(ends(port, FETCH), lost=lost.put, linked=lambda: None)
        link.start()
        assert "expected node b, incarnation 2" in lost.get(timeout=30)
        link.close()


def test_a_link_without_a_descriptor_is_dialled_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)
        port = server.getsockname()[1]
        socket.getaddrinfo("127.0.0.1", port)  # the first call loads a module
        link = PeerLink(ends(port, FETCH), lost=lambda _: None, linked=lambda: None)
        with no_descriptors():
            link.start()
            link._thread.join(2 * FIRST_PAUSE_S)
        server.accept()[0].close()
        link.close()


def ends(port: int, purpose: str) -> LinkEndpoints:
    own = PeerIdentity("run", "smp", "a", 1)
    position = NodeAddress("b", 2, "127.0.0.1", port, [0])
    return LinkEndpoints(own, position, LinkHello(3, purpose, 0), None, TIMEOUT_S)
