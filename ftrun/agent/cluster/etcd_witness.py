"""The register of the outside witness, in an etcd v3 cluster, and the thread that queries it.

Runs in:  agent, in the main thread before the run begins; then only in the thread of
          `WitnessClient`, because a query may block and heartbeats must not wait.
Takes in: queries of the control loop.
Gives:    `WitnessAnswered` to the control loop, for each query or for a later query of its kind.
          ftrun.membership.witness computes the answer. It is written only if the keys have not
          changed since they were read.
Survives: an unreachable endpoint: the next endpoint is tried; a restart of etcd: a new lease is
          requested; a witness that never answers: at most one query of each kind is queued.
Source:   etcd's API guarantees (a transaction is atomic, a range without `serializable` is
          linearizable); Jepsen's test of etcd 3.4.3: keys are safe, locks are not. The lease is
          therefore no proof; only the compare in the transaction counts.

    /ftrun/RUN_ID/register    the counter of generations, its last proposer, the newest plan
    /ftrun/RUN_ID/lead        the leader and its address; bound to its lease

Every request has its own deadline, and a query as a whole has `ANSWER_S`.
"""

import base64
import logging
import math
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import msgspec

from ftrun import clock
from ftrun.config.cluster import EtcdTls
from ftrun.errors import PeerError, UsageError
from ftrun.membership.events import WitnessAnswered, WitnessRegister
from ftrun.membership.witness import WitnessDecision, rule
from ftrun.recovery.commands import QueryWitness, WitnessOperation
from ftrun.wire.cluster.generation import NodeCard

ANSWER_S = 1.5
"""Limit of a query; shorter than the time that a leader may be without an answer."""

TRY_S = 1.0
"""Limit of one request. etcd answers within a few milliseconds, or has no majority."""

CHECK_S = 10.0

CHECK_EVERY_S = 0.5
MIN_LEASE_S = 2
"""Shortest lease of etcd with default settings; etcd extends shorter leases to this."""

_TLS_WORDS = {
    "WRONG_VERSION_NUMBER": "it does not speak TLS",
    "record layer failure": "it does not speak TLS",
    "Hostname mismatch": "its certificate is for another name or address",
    "IP address mismatch": "its certificate is for another name or address",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not signed by the given CA",
    "CERTIFICATE_REQUIRED": "it asks for a certificate of this node that its CA has signed",
    "BAD_CERTIFICATE": "it asks for a certificate of this node that its CA has signed",
    "UNKNOWN_CA": "it asks for a certificate of this node that its CA has signed",
}
"""Texts of the libraries for TLS errors. The first match in this order counts; none of these errors
is temporary."""

_Answer = TypeVar("_Answer")
_JSON = dict[str, Any]


class LeaderLease(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The holder of the lease."""

    card: NodeCard
    job: str
    """The script and size of the run; another job must not use the same run id."""


class EtcdUnreachable(PeerError):
    """No endpoint of the cluster has answered correctly."""


class _Seen(msgspec.Struct, frozen=True):
    """The values of both keys at the same time."""

    register: WitnessRegister | None
    register_revision: int
    claim: LeaderLease | None
    claim_revision: int
    claim_lease: int


class EtcdWitness:
    """The client of one node for the register."""

    def __init__(
        self,
        endpoints: Sequence[tuple[str, int]],
        run_id: str,
        *,
        job: str,
        lease_s: float,
        tls: EtcdTls | None = None,
    ) -> None:
        """Raises UsageError if the client library is not installed."""
        try:
            from etcd3gw.client import Etcd3Client
        except ImportError as error:
            raise UsageError(
                "--rdzv-backend etcd needs the package etcd3gw, which is not installed for "
                "this python. Install it on every node: pip install 'ftrun[etcd]'"
            ) from error
        self.job = job
        self.name = ", ".join(f"{host}:{port}" for host, port in endpoints)
        kind = {"protocol": "https" if tls is not None else "http"}
        files = tls if tls is not None else EtcdTls()
        named = {"ca_cert": files.ca, "cert_cert": files.cert, "cert_key": files.key}
        self._clients = [
            Etcd3Client(host=host, port=port, timeout=TRY_S, api_path="/v3/", **kind, **named)
            for host, port in endpoints
        ]
        for client in self._clients:
            client.session.trust_env = False  # no proxy is between a node and its cluster
        self._at = 0
        self._folder = f"/ftrun/{run_id}/"
        self._lease_s = max(MIN_LEASE_S, math.ceil(lease_s))
        self._lease: Any = None

    # --- before the run -----------------------------------------------------------------------

    def check(self, wait_s: float = CHECK_S) -> None:
        """Check before training starts that the etcd is reachable and usable.

        Raises:
            EtcdUnreachable: no endpoint answers; this may be temporary.
            UsageError: the endpoint is not an etcd v3, or another run uses this id.
        """
        started_s = clock.now_s()
        while True:
            try:
                seen = self._on_any(self._read, TRY_S * len(self._clients))
            except EtcdUnreachable as error:
                waited_s = clock.now_s() - started_s
                is_there, version = self._version()
                text = self._not_usable(error, waited_s, version)
                if is_there or str(error) in _TLS_WORDS.values():
                    raise UsageError(text) from error
                if waited_s >= wait_s:
                    raise EtcdUnreachable(text) from error
                clock.sleep(CHECK_EVERY_S)
            else:
                if reason := self._taken(seen):
                    raise UsageError(reason)
                return

    def _version(self) -> tuple[bool, str]:
        client = self._clients[self._at]
        try:
            answer = client.session.get(f"{client.base_url}/version", timeout=TRY_S)
        except OSError:  # requests' own errors are OSErrors too
            return False, ""
        try:
            version = str(answer.json()["etcdserver"])
        except (ValueError, KeyError, TypeError):
            return True, ""
        numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
        # If the version is new enough, the cluster may have no leader, which may be temporary.
        return numbers < (3, 4), version

    def _not_usable(self, error: EtcdUnreachable, waited_s: float, version: str) -> str:
        if version:
            what = f"etcd {version} answers"
            todo = "ftrun needs etcd 3.4 or newer, with a leader, without users"
        elif str(error) in _TLS_WORDS.values():
            what = "this node and the etcd do not come together"
            todo = (
                "Check the files that are named: --rdzv-conf cacert=FILE,cert=FILE,key=FILE or "
                "ETCDCTL_CACERT, ETCDCTL_CERT and ETCDCTL_KEY; `etcdctl endpoint health` takes them"
            )
        else:
            what = f"no etcd answers within {waited_s:.0f} s"
            todo = (
                "Check --rdzv-endpoint, that etcd runs there (`etcdctl endpoint health`), and that "
                "its client port is open to this node"
            )
        return f"{what} at {self.name}: {error}. {todo}"

    # --- a question ---------------------------------------------------------------------------

    def ask(self, asked: QueryWitness, me: NodeCard) -> WitnessAnswered:
        try:
            return self._on_any(lambda: self._answer(asked, me), ANSWER_S)
        except EtcdUnreachable as error:
            reason = f"etcd is out of reach at {self.name}: {error}"
            return WitnessAnswered(asked, is_reached=False, reason=reason)

    def _answer(self, asked: QueryWitness, me: NodeCard) -> WitnessAnswered:
        while True:
            # Renew before the read: if the read shows this agent's lease, its full time is left.
            if self._lease is not None and self._lease.refresh() <= 0:
                self._lease = None
            seen = self._read()
            candidate = asked.operation in (WitnessOperation.CLAIM, WitnessOperation.READ)
            if candidate and (reason := self._taken(seen)):
                return WitnessAnswered(asked, is_reached=True, reason=reason, is_final=True)
            leader = seen.claim.card if seen.claim is not None else None
            ruling = rule(asked, me, seen.register, leader, new_life=secrets.randbits(62))
            if not ruling.granted:
                return WitnessAnswered(asked, True, False, seen.register, leader)
            if self._swap(seen, ruling, me):
                return WitnessAnswered(asked, True, True, ruling.register, ruling.leader)

    def _taken(self, seen: _Seen) -> str:
        """Reason why the run id cannot be used: a live run with another job uses it."""
        claim = seen.claim
        if claim is None or claim.job == self.job:
            return ""
        return (
            f"run id {self._folder.split('/')[2]} is taken in the etcd at {self.name}: node "
            f"{claim.card.node_id} at {claim.card.host} runs {claim.job}, and this is {self.job}. "
            "Give this run another --rdzv-id, the same on all its nodes"
        )

    # --- the keys -----------------------------------------------------------------------------

    def _read(self) -> _Seen:
        values: list[tuple[bytes, _JSON]] = self._clients[self._at].get_prefix(self._folder)
        found = {meta["key"].decode(): (value, meta) for value, meta in values}
        register, register_meta = found.get(f"{self._folder}register", (None, {}))
        claim, claim_meta = found.get(f"{self._folder}lead", (None, {}))
        return _Seen(
            msgspec.json.decode(register, type=WitnessRegister) if register is not None else None,
            int(register_meta.get("mod_revision", 0)),
            msgspec.json.decode(claim, type=LeaderLease) if claim is not None else None,
            int(claim_meta.get("mod_revision", 0)),
            int(claim_meta.get("lease", 0)),
        )

    def _swap(self, seen: _Seen, ruling: WitnessDecision, me: NodeCard) -> bool:
        register, leader = f"{self._folder}register", f"{self._folder}lead"
        changes: list[_JSON] = []
        if ruling.register is None and seen.register is not None:
            changes.append(_delete(register))
        elif ruling.register is not None and ruling.register != seen.register:
            changes.append(_put(register, ruling.register))
        if ruling.leader is None and seen.claim is not None:
            changes.append(_delete(leader))
        elif ruling.leader is not None and ruling.leader.identity == me.identity:
            lease = self._lease_id()
            if seen.claim_lease != lease or seen.claim is None or seen.claim.card != me:
                changes.append(_put(leader, LeaderLease(me, self.job), lease))
        if not changes:
            return True
        compare = [_is_at(register, seen.register_revision), _is_at(leader, seen.claim_revision)]
        transaction = {"compare": compare, "success": changes, "failure": []}
        answer: _JSON = self._clients[self._at].transaction(transaction)
        return bool(answer.get("succeeded", False))

    def _lease_id(self) -> int:
        if self._lease is None:
            self._lease = self._clients[self._at].lease(ttl=self._lease_s)
        return int(self._lease.id)

    # --- endpoints ----------------------------------------------------------------------------

    def _on_any(self, do: Callable[[], _Answer], for_s: float) -> _Answer:
        """Call `do` on the endpoint that answered last, or on the next one that answers in time."""
        end_s = clock.now_s() + for_s
        reason = "no time was left to ask"
        for _ in range(2 * len(self._clients)):
            left_s = end_s - clock.now_s()
            if left_s <= 0:
                break
            client = self._clients[self._at]
            client.timeout = min(TRY_S, left_s)
            if self._lease is not None:
                self._lease.client = client
            try:
                return do()
            except Exception as error:  # noqa: BLE001 - whatever a client library or a server does
                reason = _as_text(error)
                self._at = (self._at + 1) % len(self._clients)
        raise EtcdUnreachable(reason)


def _as_text(error: Exception) -> str:
    # The library's errors have their text in other attributes.
    parts = (str(error), getattr(error, "detail_text", ""), str(error.__context__ or ""))
    text = " ".join(str(part) for part in parts if part)
    for sign, words in _TLS_WORDS.items():
        if sign in text:
            return words
    for sign, words in (
        ("refused", "the connection is refused"),
        ("unreachable", "there is no route to it"),
        ("No route", "there is no route to it"),
        ("timed out", "it does not answer in time"),
        ("Name or service", "its name is not known"),
        ("name resolution", "its name is not known"),
        ("Not Found", "it has no v3 API"),
        ("without response", "it ends the connection, as an etcd that speaks TLS only does"),
        ("EOF occurred", "it ends the connection as TLS begins, as an etcd without TLS does"),
        ("EOF_WHILE", "it ends the connection as TLS begins, as an etcd without TLS does"),
        ("closed (EOF)", "it ends the connection as TLS begins, as an etcd without TLS does"),
    ):
        if sign in text:
            return words
    return f"{type(error).__name__}: {text[:200]}"


def _text(value: str | bytes) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else value).decode()


def _is_at(key: str, revision: int) -> _JSON:
    """Compare: the key has this revision; 0: it does not exist."""
    return {"key": _text(key), "result": "EQUAL", "target": "MOD", "mod_revision": revision}


def _put(key: str, value: WitnessRegister | LeaderLease, lease: int = 0) -> _JSON:
    put: _JSON = {"key": _text(key), "value": _text(msgspec.json.encode(value))}
    return {"request_put": put | ({"lease": lease} if lease else {})}


def _delete(key: str) -> _JSON:
    return {"request_delete_range": {"key": _text(key)}}


_log = logging.getLogger(__name__)


class WitnessClient:
    """The queries of one agent, one at a time."""

    def __init__(
        self, register: EtcdWitness, me: NodeCard, post: Callable[[WitnessAnswered], None]
    ) -> None:
        self._register = register
        self._me = me
        self._send = post
        self._questions: SimpleQueue[QueryWitness | None] = SimpleQueue()
        self.failure: Exception | None = None
        """The exception that has ended this thread. The leader has no witness then, and the agent
        must end."""
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="ftrun-witness", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ask(self, asked: QueryWitness) -> None:
        """Queue a query; from any thread, never waits."""
        self._questions.put(asked)

    def close(self) -> None:
        self._questions.put(None)
        self._thread.join(2 * ANSWER_S)

    def _run(self) -> None:
        try:
            while not self._is_over:
                for asked in self._next():
                    self._send(self._register.ask(asked, self._me))
        except Exception as error:  # noqa: BLE001 - any of them ends this agent
            _log.exception("a bug in ftrun has ended the witness thread")
            self.failure = error

    def _next(self) -> list[QueryWitness]:
        """The newest query of each kind since the last call, in order."""
        kept: dict[WitnessOperation, QueryWitness] = {}
        found = self._questions.get()
        with suppress(Empty):
            while found is not None:
                kept.pop(found.operation, None)
                kept[found.operation] = found
                found = self._questions.get_nowait()
            self._is_over = True
        return list(kept.values())
