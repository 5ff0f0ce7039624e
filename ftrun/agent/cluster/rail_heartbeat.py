"""Heartbeats over every rail, which show within about a second that a rail is cut.

Runs in:  agent, a thread of its own.
Takes in: the plan of the generation that runs; datagrams of two neighbours over each rail.
Gives:    datagrams for two neighbours; `RailUnresponsive` for the leader, while a neighbour that
          was received over a rail is received no more.
Survives: lost datagrams, firewalls: a neighbour that was never received is not reported.

Ranks that wait for a peer behind a cut rail get no error, because a connection without an answer
lasts for minutes. Agents detect it only if they use that rail themselves.

Rule 1: a missing heartbeat is a suspicion only. The leader has the path probed before it acts.
Rule 2: a datagram has its sender's number, which only grows, and a code that only nodes of the run
        can compute. Without a secret the code proves nothing, as in the rest of such a run.
Rule 3: only nodes of the plan are accepted. The plan that contains a restarted agent follows later.
"""

import hmac
import logging
import selectors
import socket
import threading
from contextlib import suppress
from hashlib import sha256

import msgspec

from ftrun import clock
from ftrun.agent.cluster.control_loop import ClusterControlLoop
from ftrun.membership.events import MessageReceived
from ftrun.network.detect.rails import match_rails
from ftrun.wire.cluster.generation import GenerationPlan, NodeCard, Rail
from ftrun.wire.cluster.messages import RailUnresponsive
from ftrun.wire.transport.secret import Secret
from ftrun.wire.transport.tcp import is_local_address

_log = logging.getLogger(__name__)

EVERY_S = 0.2
UNRESPONSIVE_S = 1.0
REPORT_EVERY_S = 0.4
FORGET_S = 10.0
"""A neighbour without a heartbeat for this time over a rail is not reported there until it is
received again."""
NEIGHBOURS = 2
"""In a ring of the nodes by name: each node sends to this number of the next nodes."""

_CODE_BYTES = 16
_MAX_BYTES = 512


class _Pulse(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    run_id: str
    node_id: str
    incarnation: int
    rail: str
    number: int


_DECODER = msgspec.msgpack.Decoder(_Pulse)
Key = tuple[str, str]
"""Node id, and the run's name for a rail."""


class RailHeartbeat:
    """The rail heartbeats of one node."""

    def __init__(
        self, run_id: str, card: NodeCard, secret: Secret | None, control_loop: ClusterControlLoop
    ) -> None:
        self._run_id = run_id
        self._card = card
        self._secret = secret
        self._control_loop = control_loop
        self._sockets: dict[str, socket.socket] = {}
        """By the address of this node's rail."""
        self._selector = selectors.DefaultSelector()
        self._received: dict[Key, float] = {}
        self._newest: dict[Key, tuple[int, int]] = {}
        self._said_s: dict[Key, float] = {}
        self._number = 0
        self._plan: GenerationPlan | None = None
        self._out: list[tuple[socket.socket, str, Rail]] = []
        self._expected: dict[Key, int] = {}
        """The incarnation of each expected sender."""

    def start(self) -> None:
        if len(self._card.rails) < 2:
            return
        for rail in self._card.rails:
            with suppress(OSError):
                self._open(rail)
        threading.Thread(target=self._run, name="ftrun-pulse", daemon=True).start()

    def _open(self, rail: Rail) -> None:
        family = socket.AF_INET6 if ":" in rail.host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_DGRAM)
        try:
            sock.bind((rail.host, rail.port))
        except OSError as error:
            sock.close()
            _log.debug("no pulse over %s: %s", rail.name, error)
            raise
        sock.setblocking(False)
        self._sockets[rail.host] = sock
        self._selector.register(sock, selectors.EVENT_READ)

    def _run(self) -> None:
        due_s = before_s = clock.now_s()
        while True:
            now_s = clock.now_s()
            if now_s - before_s > UNRESPONSIVE_S / 2:
                # This process was paused, so the gap proves nothing about its neighbours.
                self._received = dict.fromkeys(self._received, now_s)
            before_s = now_s
            if now_s >= due_s:
                due_s = now_s + EVERY_S
                self._check_plan()
                self._send()
                self._judge(now_s)
            for key, _ in self._selector.select(max(0.0, due_s - clock.now_s())):
                assert isinstance(key.fileobj, socket.socket)
                # nothing more to read, or the kernel reports that an earlier datagram was refused
                with suppress(OSError):
                    while True:
                        self._take(key.fileobj.recv(_MAX_BYTES))

    def _check_plan(self) -> None:
        plan = self._control_loop.plan
        if plan is self._plan:
            return
        self._plan = plan
        self._out, self._expected = [], {}
        cards = plan.voters if plan is not None else []
        me = self._card.node_id
        names = sorted(card.node_id for card in cards)
        if me not in names:
            return
        at = names.index(me)
        count = min(NEIGHBOURS, len(names) - 1)
        after = [names[(at + step) % len(names)] for step in range(1, count + 1)]
        ahead = [names[(at - step) % len(names)] for step in range(1, count + 1)]
        matched = match_rails({card.node_id: card.rails for card in cards if card.rails})
        for name, on in matched.items():
            sock = self._sockets.get(on[me].host) if me in on else None
            if sock is not None:
                near = [on[one] for one in {*after, *ahead} if one in on]
                self._leave_by(sock, on[me], near)
                self._out += [(sock, name, on[one]) for one in after if one in on]
                lives = {card.node_id: card.incarnation for card in cards}
                self._expected |= {(one, name): lives[one] for one in ahead if one in on}
        self._received = {
            key: at_s for key, at_s in self._received.items() if key in self._expected
        }

    def _leave_by(self, sock: socket.socket, rail: Rail, near: list[Rail]) -> None:
        """Bind the socket to the interface too, because two interfaces may be in one network."""
        # Datagrams to this machine itself use the loopback.
        is_here = any(is_local_address(there.host) for there in near)
        name = b"" if is_here else rail.name.encode()
        with suppress(OSError):  # not every kernel allows this without privilege
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name)

    def _send(self) -> None:
        self._number += 1
        for sock, name, there in self._out:
            pulse = _Pulse(
                self._run_id, self._card.node_id, self._card.incarnation, name, self._number
            )
            body = msgspec.msgpack.encode(pulse)
            with suppress(OSError):  # no route, or no buffer space: the other nodes detect it
                sock.sendto(self._code(body) + body, (there.host, there.port))

    def _take(self, data: bytes) -> None:
        code, body = data[:_CODE_BYTES], data[_CODE_BYTES:]
        if not hmac.compare_digest(code, self._code(body)):
            return
        try:
            pulse = _DECODER.decode(body)
        except msgspec.MsgspecError:
            return
        key = (pulse.node_id, pulse.rail)
        newest = self._newest.get(key)
        is_old = newest is not None and newest[0] == pulse.incarnation and pulse.number <= newest[1]
        is_meant = pulse.run_id == self._run_id and self._expected.get(key) == pulse.incarnation
        if not is_meant or is_old:
            return
        self._newest[key] = (pulse.incarnation, pulse.number)
        self._received[key] = clock.now_s()

    def _judge(self, now_s: float) -> None:
        for key, received_s in list(self._received.items()):
            unresponsive_s = now_s - received_s
            if unresponsive_s >= FORGET_S:
                del self._received[key]
            elif (
                unresponsive_s >= UNRESPONSIVE_S
                and now_s - self._said_s.get(key, 0.0) >= REPORT_EVERY_S
            ):
                self._said_s[key] = now_s
                self._report(RailUnresponsive(*key, unresponsive_s))

    def _report(self, body: RailUnresponsive) -> None:
        control_loop, me = self._control_loop, self._card.node_id
        leader = control_loop.member.leader_card
        if control_loop.leads:
            control_loop.post(MessageReceived(me, body))
        elif leader is not None and control_loop.thread is not None:
            control_loop.thread.send(leader.node_id, body)

    def _code(self, body: bytes) -> bytes:
        data = b"ftrun rail pulse" + body
        found = self._secret.mac(data) if self._secret is not None else sha256(data).digest()
        return found[:_CODE_BYTES]
