"""The outside witness in a real etcd: its promises hold under concurrency and failures.

The rules themselves are tested in tests/unit/membership/test_witness.py; these tests cover etcd and
the client library.
"""

import http.server
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from etcd_server import Certificates, EtcdServer, available

from ftrun import clock
from ftrun.agent.cluster import etcd_witness as etcd_register
from ftrun.agent.cluster.etcd_witness import (
    ANSWER_S,
    TRY_S,
    EtcdUnreachable,
    EtcdWitness,
    WitnessClient,
)
from ftrun.config.cluster import EtcdTls
from ftrun.errors import ExitCode, UsageError
from ftrun.membership.events import WitnessAnswered
from ftrun.recovery.commands import QueryWitness, WitnessOperation
from ftrun.wire.cluster.generation import NodeCard
from tests.contract.answering import closed_port
from tests.unit.recovery.made import card, plan

if reason := available():
    pytest.skip(f"needs etcd: {reason}", allow_module_level=True)

WAIT_S = 600.0
LEASE_S = 60.0
"""Does not end while a test runs, however busy the machine is."""
SHORT_S = 2.0
"""Of a lease that is to end."""
TRIES = 5
"""Attempts of which the quickest counts, so that it is the client's time and not the machine's."""
JOB = "/home/user/train.py with --nnodes/--spares 2"


@contextmanager
def started(folder: Path, tls: Certificates | None = None) -> Iterator[EtcdServer]:
    """Start an etcd; repeat if another process takes one of its ports first."""
    for left in (2, 1, 0):
        server = EtcdServer(folder / f"etcd-{left}", tls=tls)
        try:
            server.start()
        except RuntimeError:
            server.kill()
            if not left:
                raise
        else:
            break
    try:
        yield server
    finally:
        server.go_on()
        server.kill()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with started(tmp_path_factory.mktemp("shared")) as server:
        yield server


@pytest.fixture
def own(tmp_path: Path) -> Iterator[EtcdServer]:
    """An etcd that a test may break."""
    with started(tmp_path) as server:
        yield server


@pytest.fixture(autouse=True)
def timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit for an etcd that writes to a busy disk."""
    monkeypatch.setattr(etcd_register, "TRY_S", WAIT_S)
    monkeypatch.setattr(etcd_register, "ANSWER_S", WAIT_S)


@pytest.fixture
def haste(timeout: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of a run, for tests of the time until a request is abandoned."""
    monkeypatch.setattr(etcd_register, "TRY_S", TRY_S)
    monkeypatch.setattr(etcd_register, "ANSWER_S", ANSWER_S)


@pytest.fixture
def run_id(request: pytest.FixtureRequest) -> str:
    return str(request.node.name).replace("[", "-").replace("]", "")


def register(
    *at: EtcdServer | tuple[str, int],
    run_id: str,
    job: str = JOB,
    lease_s: float = LEASE_S,
    tls: EtcdTls | None = None,
) -> EtcdWitness:
    places = [one if isinstance(one, tuple) else (one.host, one.port) for one in at]
    return EtcdWitness(places, run_id, job=job, lease_s=lease_s, tls=tls)


def unreachable(made: EtcdWitness) -> EtcdUnreachable:
    with pytest.raises(EtcdUnreachable) as caught:
        made.check(0.5)
    return caught.value


def refused_at_once(made: EtcdWitness) -> str:
    started_s = time.monotonic()
    with pytest.raises(UsageError) as caught:
        made.check(30.0)
    assert time.monotonic() - started_s < 15.0
    return str(caught.value)


class Node:
    """One agent's connection to the witness."""

    def __init__(self, node_id: str, made: EtcdWitness, incarnation: int = 1) -> None:
        self.card: NodeCard = card(node_id, incarnation)
        self.register = made

    def ask(
        self, operation: WitnessOperation, generation: int = -1, **also: object
    ) -> WitnessAnswered:
        asked = QueryWitness(operation, clock.now_s(), generation, **also)  # type: ignore[arg-type]
        return self.register.ask(asked, self.card)


def two(server: EtcdServer, run_id: str, lease_s: float = LEASE_S) -> tuple[Node, Node]:
    a, b = (Node(one, register(server, run_id=run_id, lease_s=lease_s)) for one in "ab")
    return a, b


def test_first_to_claim_is_the_one_the_others_come_to(shared: EtcdServer, run_id: str) -> None:
    a, b = two(shared, run_id)
    assert a.ask(WitnessOperation.CLAIM).granted
    said = b.ask(WitnessOperation.CLAIM)
    assert (said.granted, said.leader, said.register) == (False, a.card, None)


def test_number_is_promised_once_and_a_plan_is_remembered(shared: EtcdServer, run_id: str) -> None:
    a, b = two(shared, run_id)
    first = a.ask(WitnessOperation.PROMISE, 4)
    assert first.granted
    assert first.register is not None
    assert first.register.life > 0
    accepted = plan(4, "ab", witness=first.register.life)
    assert a.ask(WitnessOperation.ACCEPT, 4, plan=accepted).granted
    said = b.ask(WitnessOperation.PROMISE, 5)
    assert (said.granted, said.leader) == (False, a.card)
    assert said.register is not None
    assert said.register.plan == accepted
    assert a.ask(WitnessOperation.CLEAR).granted
    assert b.ask(WitnessOperation.READ).register is None


def test_lease_that_is_not_renewed_ends_and_the_counter_stays(
    shared: EtcdServer, run_id: str
) -> None:
    a, b = two(shared, run_id, SHORT_S)
    started_s = time.monotonic()
    assert a.ask(WitnessOperation.PROMISE, 4).granted
    while not (said := b.ask(WitnessOperation.PROMISE, 5)).granted:
        assert time.monotonic() - started_s < WAIT_S
        time.sleep(0.05)
    assert time.monotonic() - started_s > SHORT_S - 0.2
    assert said.leader == b.card
    late = a.ask(WitnessOperation.ACCEPT, 4, plan=plan(4, "a"))
    assert (late.granted, late.leader) == (False, b.card)
    assert not a.ask(WitnessOperation.RENEW, 4).granted


def test_lease_that_is_renewed_stays(shared: EtcdServer, run_id: str) -> None:
    lease_s = 2 * SHORT_S
    a, b = two(shared, run_id, lease_s)
    assert a.ask(WitnessOperation.PROMISE, 4).granted
    end_s = time.monotonic() + 2 * lease_s
    while time.monotonic() < end_s:
        assert a.ask(WitnessOperation.RENEW, 4).granted
        assert not b.ask(WitnessOperation.PROMISE, 5).granted
        time.sleep(0.2)


def test_of_many_requests_at_once_one_gets_each_number(shared: EtcdServer, run_id: str) -> None:
    """No lease protects the requests: a node that reads before another one writes reads again."""
    rounds, nodes = 8, "abcdef"
    took: list[list[str]] = [[] for _ in range(rounds)]

    def ask(node_id: str) -> None:
        node = Node(node_id, register(shared, run_id=run_id))
        for number in range(rounds):
            gate.wait(WAIT_S)
            if node.ask(WitnessOperation.PROMISE, number).granted:
                took[number].append(node_id)
            gate.wait(WAIT_S)
            if node_id in took[number]:
                node.register._clients[0].delete(f"/ftrun/{run_id}/lead")

    gate = threading.Barrier(len(nodes))
    threads = [threading.Thread(target=ask, args=(one,)) for one in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert [len(who) for who in took[:-1]] == [1] * (rounds - 1), took


def test_killed_and_started_again_it_remembers(own: EtcdServer, run_id: str) -> None:
    a, b = two(own, run_id)
    assert a.ask(WitnessOperation.PROMISE, 4).granted
    own.kill()
    said, took_s = quickest(a)
    assert took_s < ANSWER_S + 0.5
    assert not said.is_reached
    assert "the connection is refused" in said.reason
    assert own.endpoint in said.reason
    own.start()
    assert a.ask(WitnessOperation.RENEW, 4).granted
    assert not b.ask(WitnessOperation.PROMISE, 5).granted


def quickest(node: Node) -> tuple[WitnessAnswered, float]:
    """The error for an unreachable etcd, and the seconds until it is raised."""
    took_s = []
    while not took_s or (min(took_s) > ANSWER_S + 0.5 and len(took_s) < TRIES):
        started_s = time.monotonic()
        said = node.ask(WitnessOperation.RENEW, 4)
        took_s.append(time.monotonic() - started_s)
    return said, min(took_s)


def test_one_that_does_not_answer_is_given_up_in_time(
    own: EtcdServer, run_id: str, request: pytest.FixtureRequest
) -> None:
    a, _ = two(own, run_id)
    assert a.ask(WitnessOperation.PROMISE, 4).granted
    own.pause()
    request.getfixturevalue("haste")
    said, took_s = quickest(a)
    assert took_s < ANSWER_S + 1.5
    assert (said.is_reached, "in time" in said.reason) == (False, True), said.reason


def test_another_register_after_it_lost_its_memory_has_another_life(
    own: EtcdServer, run_id: str
) -> None:
    a, _ = two(own, run_id)
    before = a.ask(WitnessOperation.PROMISE, 4).register
    own.forget()
    own.start()
    after = a.ask(WitnessOperation.PROMISE, 5).register
    assert before is not None
    assert after is not None
    assert before.life != after.life


def test_next_endpoint_is_tried_where_one_is_dead(shared: EtcdServer, run_id: str) -> None:
    with closed_port("127.0.0.1") as port:
        made = register(("127.0.0.1", port), shared, run_id=run_id)
        made.check()
        assert Node("a", made).ask(WitnessOperation.CLAIM).granted


# --- before training starts ---------------------------------------------------------------------


def test_no_listener_is_reported_with_where_and_after_how_long(run_id: str) -> None:
    with closed_port("127.0.0.1") as port:
        error = unreachable(register(("127.0.0.1", port), run_id=run_id))
    said = str(error)
    at = re.escape(f"at 127.0.0.1:{port}: the connection is refused")
    assert re.search(rf"no etcd answers within [1-9]\d* s {at}", said)
    assert "etcdctl endpoint health" in said
    assert error.exit_code == ExitCode.TRY_AGAIN


@pytest.mark.usefixtures("haste")
def test_an_unresponsive_process_is_reported(run_id: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unresponsive:
        error = unreachable(register(unresponsive.getsockname(), run_id=run_id))
    assert "it does not answer in time" in str(error)


@contextmanager
def http_server(version: str) -> Iterator[tuple[str, int]]:
    """A server that answers as an older etcd, or as another program."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_known = self.path == "/version" and version
            self.send_response(200 if is_known else 404)
            self.end_headers()
            if is_known:
                self.wfile.write(b'{"etcdserver":"%s"}' % version.encode())
            else:
                self.wfile.write(b"404 page not found")

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(404)
            self.end_headers()
            self.wfile.write(b"404 page not found")

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
            """Keep the test's output clean."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield "127.0.0.1", server.server_address[1]
        finally:
            server.shutdown()


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("2.3.8", "etcd 2.3.8 answers at"),
        ("3.3.27", "ftrun needs etcd 3.4 or newer"),
        ("", "it has no v3 API"),
    ],
)
def test_what_is_no_etcd_v3_is_reported_at_once(version: str, said: str, run_id: str) -> None:
    with http_server(version) as at:
        assert said in refused_at_once(register(at, run_id=run_id))


def test_a_port_with_the_digits_of_an_http_status_is_no_status() -> None:
    error = ConnectionError(
        "HTTPSConnectionPool(host='127.0.0.1', port=40427): Max retries exceeded with url: /v3 "
        "(Caused by SSLError(SSLEOFError(8, '[SSL: UNEXPECTED_EOF_WHILE_READING] EOF occurred')))"
    )
    assert "as an etcd without TLS does" in etcd_register._as_text(error)


def test_run_id_of_a_living_other_run_is_refused(shared: EtcdServer, run_id: str) -> None:
    a = Node("a", register(shared, run_id=run_id))
    assert a.ask(WitnessOperation.CLAIM).granted
    other = register(shared, run_id=run_id, job="/home/other/train.py with --nnodes/--spares 2")
    said = refused_at_once(other)
    assert f"run id {run_id} is taken" in said
    assert "node a at a.local runs /home/user/train.py" in said
    final = Node("x", other).ask(WitnessOperation.CLAIM)
    assert (final.is_final, final.reason) == (True, said)
    assert a.ask(WitnessOperation.RENEW, 0).granted


# --- TLS --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def secured(
    certificates: Certificates, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EtcdServer]:
    """An etcd that accepts only TLS and requires client certificates."""
    with started(tmp_path_factory.mktemp("secured"), certificates) as server:
        yield server


def test_both_show_their_certificates(
    secured: EtcdServer, certificates: Certificates, run_id: str
) -> None:
    cert, key = certificates.of("node")
    tls = EtcdTls(ca=certificates.ca, cert=cert, key=key)
    made = register(secured, run_id=run_id, tls=tls)
    made.check()
    assert Node("a", made).ask(WitnessOperation.CLAIM).granted


@pytest.mark.parametrize(
    ("shows", "said"),
    [
        ("no certificate", "it asks for a certificate of this node"),
        ("of another CA", "it asks for a certificate of this node"),
        ("system's CAs", "not signed by the given CA"),
    ],
)
def test_unknown_client_is_rejected_at_once(
    secured: EtcdServer,
    certificates: Certificates,
    tmp_path: Path,
    run_id: str,
    shows: str,
    said: str,
) -> None:
    cert, key = Certificates(tmp_path).of("node") if shows == "of another CA" else ("", "")
    tls = EtcdTls(ca=certificates.ca, cert=cert or None, key=key or None)
    tls = EtcdTls() if shows == "system's CAs" else tls
    assert said in refused_at_once(register(secured, run_id=run_id, tls=tls))


def test_tls_on_one_side_only_is_reported(
    shared: EtcdServer, secured: EtcdServer, certificates: Certificates, run_id: str
) -> None:
    for server, tls, said in (
        (secured, None, "as an etcd that speaks TLS only does"),
        (shared, EtcdTls(ca=certificates.ca), "as an etcd without TLS does"),
    ):
        # If the rest of a request arrives after the end, the client sees a reset.
        for _ in range(TRIES):
            found = str(unreachable(register(server, run_id=run_id, tls=tls)))
            if "ConnectionResetError" not in found:
                break
        assert said in found


# --- the thread -------------------------------------------------------------------------------


def test_questions_do_not_pile_up_while_it_is_unresponsive(own: EtcdServer, run_id: str) -> None:
    received: list[WitnessAnswered] = []
    a, _ = two(own, run_id)
    own.pause()
    thread = WitnessClient(a.register, a.card, received.append)
    for number in range(100):
        thread.ask(QueryWitness(WitnessOperation.RENEW, clock.now_s(), number))
    thread.ask(QueryWitness(WitnessOperation.PROMISE, clock.now_s(), 7))
    thread.start()
    own.go_on()
    thread.ask(QueryWitness(WitnessOperation.CLEAR, clock.now_s()))
    thread.close()
    operations = [one.asked.operation for one in received]
    assert operations[-1] is WitnessOperation.CLEAR
    renewed = [one.asked for one in received if one.asked.operation is WitnessOperation.RENEW]
    assert [one.generation for one in renewed] == [99]
