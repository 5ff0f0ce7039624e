"""Connects this node to its neighbours in a collective check, and runs its part in a process.

Runs in:  a thread for each check; `accept` in the thread of a handshake.
Takes in: the leader's order, which its heartbeats repeat; connections of the previous node.
Gives:    a `CollectiveResult`, for the next heartbeat. Ranks never wait for it.
Survives: a neighbour that does not take part: after JOIN_S the check ends without a comparison.

    dialler (previous node)             acceptor (next node)
    digest of the order           ->
    pieces, see collective.py     <->

Rule 1: both ends have the same order of the same leader, and each is the neighbour that the order
        names. Otherwise the positions differ, and right sums count as wrong.
"""

import os
import socket
import subprocess
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial

import msgspec

from ftrun import clock
from ftrun.agent.cluster.collective import HARD_LIMIT_S, PieceKeys, RingPart
from ftrun.agent.launch.process import awaited, python_command
from ftrun.errors import PeerError
from ftrun.monitor.slow.collective_check import CollectiveResult, NodeIdentity
from ftrun.wire.cluster.membership import CollectiveRing
from ftrun.wire.transport.handshake import AuthSession, PeerIdentity, dial_handshake
from ftrun.wire.transport.secret import Secret
from ftrun.wire.transport.tcp import dial, tune

JOIN_S = 10.0
"""For the next node to accept and the previous one to dial: its agent may be importing torch."""
DIAL_S = 3.0
PROCESS_S = HARD_LIMIT_S + 5.0
WRONG_SUM = "FTRUN_WRONG_SUM"
"""A variable for tests, used in runs with --allow-faults: this node computes wrong sums."""
_CHECK_BYTES = 32
_Arrival = tuple[AuthSession, str, socket.socket]


class CollectiveCheck:
    """The collective checks of one agent, one at a time."""

    def __init__(self, *, allow_faults: bool) -> None:
        self._has_fault = allow_faults and bool(os.environ.get(WRONG_SUM))
        self._identity: PeerIdentity | None = None
        self._secret: Secret | None = None
        self._report: Callable[[CollectiveResult], None] | None = None
        self._busy = threading.Lock()
        self._arrival = threading.Condition()
        self._arrived: _Arrival | None = None
        """The newest connection of a previous node, and the check that it is for."""
        self._children: set[subprocess.Popen[bytes]] = set()
        self._is_closed = False

    def join(
        self,
        identity: PeerIdentity,
        secret: Secret | None,
        report: Callable[[CollectiveResult], None],
    ) -> None:
        self._identity = msgspec.structs.replace(identity, purpose="ring")
        self._secret, self._report = secret, report

    def close(self) -> None:
        self._is_closed = True
        for child in list(self._children):
            child.kill()
        with self._arrival:
            self._keep(None)
            self._arrival.notify_all()

    def take(self, ring: CollectiveRing) -> None:
        """Start a check, from any thread, without waiting."""
        with suppress(RuntimeError):  # no more threads: this node does not take part
            threading.Thread(
                target=self._work, args=(ring,), name="ftrun-collective", daemon=True
            ).start()

    def accept(self, sock: socket.socket, session: AuthSession) -> None:
        """Keep a copy of the connection of a previous node until the check that it is for."""
        sock.settimeout(DIAL_S)
        head = sock.recv(_CHECK_BYTES, socket.MSG_WAITALL)
        if len(head) < _CHECK_BYTES:
            return
        with self._arrival:
            self._keep((session, head.hex(), sock.dup()))
            self._arrival.notify_all()

    def on_one_machine(self, num_bytes: int) -> dict[NodeIdentity, CollectiveResult]:
        """Two processes, on the first and the last CPU that this process may use; waits."""
        cpus = sorted(os.sched_getaffinity(0))
        nodes = ((f"CPU {cpus[0]}", 0), (f"CPU {cpus[-1]}", 1))
        pairs = [socket.socketpair() for _ in nodes]
        children = []
        with ExitStack() as reaping:
            with ExitStack() as closing:
                for sock in (*pairs[0], *pairs[1]):
                    closing.enter_context(sock)
                for at in range(len(nodes)):
                    part = RingPart(
                        check="",
                        nodes=nodes,
                        position=at,
                        num_bytes=num_bytes,
                        fds=(pairs[at][0].fileno(), pairs[at - 1][1].fileno()),
                        cpu=cpus[-at],
                        has_fault=self._has_fault and at == 0,
                    )
                    children.append(self._start(part, PieceKeys()))
                    reaping.callback(self._reap, children[-1])
            found = [self._result(child, "", len(nodes)) for child in children]
        return dict(zip(nodes, found, strict=True))

    # --- the thread of a check ----------------------------------------------------------------

    def _work(self, ring: CollectiveRing) -> None:
        with self._busy:
            try:
                result = self._check(ring)
            except (PeerError, OSError) as error:
                result = CollectiveResult(ring.check, len(ring.nodes), problem=str(error))
        if self._report is not None and not self._is_closed:
            self._report(result)

    def _check(self, ring: CollectiveRing) -> CollectiveResult:
        assert self._identity is not None
        me, count = self._identity.node_id, len(ring.nodes)
        at = [card.node_id for card in ring.nodes].index(me)
        following = ring.nodes[(at + 1) % count]
        with dial(following.host, following.port, DIAL_S) as out:
            session = dial_handshake(
                out, self._identity, self._secret, admit=partial(_other_than, following.identity)
            )
            out.sendall(bytes.fromhex(ring.check))
            before, source = self._previous(ring, ring.nodes[at - 1].identity)
            with source:
                for sock in (out, source):
                    tune(sock, bulk=True, user_timeout_s=HARD_LIMIT_S)
                part = RingPart(
                    check=ring.check,
                    nodes=tuple(card.identity for card in ring.nodes),
                    position=at,
                    num_bytes=ring.num_bytes,
                    fds=(out.fileno(), source.fileno()),
                    has_fault=self._has_fault,
                )
                keys = PieceKeys(
                    (session.send_key, before.send_key), (session.receive_key, before.receive_key)
                )
                child = self._start(part, keys)
        return self._result(child, ring.check, count)

    def _previous(
        self, ring: CollectiveRing, identity: NodeIdentity
    ) -> tuple[AuthSession, socket.socket]:
        """The connection of the previous node; waits until it has dialled."""
        give_up_s = clock.now_s() + JOIN_S
        with self._arrival:
            while not _is_from(self._arrived, identity, ring.check):
                left_s = give_up_s - clock.now_s()
                if left_s <= 0 or self._is_closed:
                    raise TimeoutError(f"the previous node has not connected within {JOIN_S:g} s")
                self._arrival.wait(left_s)
            assert self._arrived is not None
            session, _, sock = self._arrived
            self._arrived = None
        return session, sock

    def _keep(self, new: _Arrival | None) -> None:
        old, self._arrived = self._arrived, new
        if old is not None:
            old[2].close()

    def _start(self, part: RingPart, keys: PieceKeys) -> subprocess.Popen[bytes]:
        words = msgspec.json.encode(part).decode()
        child = subprocess.Popen(
            python_command("ftrun.agent.cluster.collective", words),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=part.fds,
        )
        awaited.add(child.pid)
        self._children.add(child)
        if self._is_closed:
            child.kill()
        assert child.stdin is not None
        with suppress(OSError), child.stdin:  # if it has ended, its result is missing
            child.stdin.write(msgspec.json.encode(keys))
        child.stdin = None  # `communicate` would flush it
        return child

    def _result(self, child: subprocess.Popen[bytes], check: str, count: int) -> CollectiveResult:
        try:
            data, _ = child.communicate(timeout=PROCESS_S)
            return msgspec.json.decode(data, type=CollectiveResult)
        except subprocess.TimeoutExpired:
            problem = f"its process was not done within {PROCESS_S:g} s"
        except msgspec.MsgspecError:
            problem = f"its process has ended with {child.returncode}"
        finally:
            self._reap(child)
        return CollectiveResult(check, count, problem=problem)

    def _reap(self, child: subprocess.Popen[bytes]) -> None:
        with child:  # closes its pipes, and waits
            child.kill()
        self._children.discard(child)
        awaited.discard(child.pid)


def _other_than(expected: NodeIdentity, peer: PeerIdentity) -> str:
    is_expected = (peer.node_id, peer.incarnation) == expected
    return "" if is_expected else f"the collective check expects another agent of {expected[0]}"


def _is_from(arrived: _Arrival | None, identity: NodeIdentity, check: str) -> bool:
    if arrived is None:
        return False
    peer = arrived[0].peer
    return (peer.node_id, peer.incarnation, arrived[1]) == (*identity, check)
