"""Handshake by which two processes on two nodes prove that they belong to one run.

Runs in:  agent, SMP; in a thread that exists for one handshake, with its own deadline.
Takes in: a new TCP socket, the run's secret or None, the own identity.
Gives:    an `AuthSession`: the peer's identity, and a key for each direction.

    dialler                                              acceptor
    HELLO   protocol, has a secret?, nonce        ->
                                                  <-     HELLO   the same
    CLAIM   identity, code over all so far        ->
                                                  <-     CLAIM   the same
    WELCOME code over all so far                  ->

Each of these can be replaced by REFUSED with a reason in words, which ends the handshake.

Rule 1: A side with a secret communicates only with a peer that proves the same secret. The codes
        cover both nonces, both roles and all earlier bytes. They can therefore not be replayed,
        reflected or spliced.
Rule 2: Until the dialler is authenticated, it gets a nonce or a reason, nothing else.
Rule 3: A reason reveals nothing about a secret. No content from the other side is used before its
        code is verified. Its reason is shown only as text without control characters.
Rule 4: At most 4 KiB are read, within one deadline. An announced length allocates nothing.
Rule 5: If neither side has a secret, the exchange is the same and proves nothing. The session then
        has empty keys, and `is_authenticated` is false.
"""

import hmac
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import sha256
from typing import Annotated, Literal

import msgspec

import ftrun
from ftrun import clock
from ftrun.errors import HandshakeRefused, PeerError, PeerLost, PeerTimeout, ProtocolError
from ftrun.wire.messages.envelope import PROTOCOL_VERSION
from ftrun.wire.transport.framing import decode_body
from ftrun.wire.transport.secret import Secret
from ftrun.wire.transport.tcp import how_lost, name_of_peer

Purpose = Literal["agent", "smp", "probe", "path", "ring"]
"""A "probe" and a "path" are connections of an agent to another agent for one measurement. A probe
measures the link. A "path" measures one rail in one direction. A "ring" is a collective check."""

_TALKS_WITH: dict[Purpose, Purpose] = {
    "agent": "agent", "smp": "smp", "probe": "agent", "path": "agent", "ring": "agent",
}  # fmt: skip
_Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")]
_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Version = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9.+_-]{0,100}\Z")]


class PeerIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Identity of a peer: run, purpose, node, incarnation, and software versions."""

    run_id: _Name
    purpose: Purpose
    node_id: _Name
    incarnation: _Number
    torch: _Version = ""
    ftrun: _Version = ftrun.__version__

    def __str__(self) -> str:
        return f"{self.purpose} of node {self.node_id}"


def unfit(own: PeerIdentity, peer: PeerIdentity) -> str:
    """Why `own` must not communicate with `peer`, worded for the user of `own`; empty if it may."""
    if peer.run_id != own.run_id:
        return (
            f"it belongs to run {peer.run_id}, and this is run {own.run_id}. Use the same "
            "--run-id on every node, or another --rdzv-endpoint for another run"
        )
    if own.purpose != _TALKS_WITH[peer.purpose] and peer.purpose != _TALKS_WITH[own.purpose]:
        return f"it expects an {peer.purpose}, and this is an {own.purpose}"
    if peer.node_id == own.node_id:
        return (
            f"both nodes are named {own.node_id}. Use a different --node-id on each node, and "
            "do not start two nodes on one machine without it"
        )
    for what, here, there in (("ftrun", own.ftrun, peer.ftrun), ("torch", own.torch, peer.torch)):
        if here != there:
            return (
                f"node {peer.node_id} has {what} {there or 'of an unknown version'}, and node "
                f"{own.node_id} has {what} {here or 'of an unknown version'}. Install the same "
                "version on every node"
            )
    return ""


HANDSHAKE_S = 3.0
MAX_BYTES = 4096
MAX_REASON_CHARACTERS = 500
NONCE_BYTES = 32

Admit = Callable[[PeerIdentity], str]  # why an authenticated peer is rejected, in words; or empty


@dataclass(frozen=True, slots=True)
class AuthSession:
    """Result of a handshake. The keys are empty if the run has no secret."""

    own: PeerIdentity
    peer: PeerIdentity
    send_key: bytes = field(repr=False)
    receive_key: bytes = field(repr=False)
    is_authenticated: bool


def dial_handshake(
    sock: socket.socket,
    own: PeerIdentity,
    secret: Secret | None,
    *,
    admit: Admit = lambda _: "",
    deadline_s: float = HANDSHAKE_S,
) -> AuthSession:
    """Run the dialler's side. If it raises, the caller must close the socket.

    Raises HandshakeRefused by one of the two sides with its reason, ProtocolError if the listener
    does not speak this protocol, PeerLost, or PeerTimeout.
    """
    talk = _Talk(sock, deadline_s=deadline_s)
    hello = talk.send(_Kind.HELLO, _hello(secret))
    theirs = talk.receive(_Kind.HELLO)
    _check_hello(talk, theirs, secret, own_nonce=hello[-NONCE_BYTES:])
    proof = _Proof(secret, hello[-NONCE_BYTES:], theirs[-NONCE_BYTES:])
    talk.send(_Kind.CLAIM, proof.claim(b"dialler", talk.digest, own))
    peer = _check_claim(talk, b"acceptor", proof, own, admit)
    talk.send(_Kind.WELCOME, proof.code(b"welcome", talk.digest))
    talk.release()
    to_acceptor, to_dialler = proof.keys(talk.digest)
    return AuthSession(own, peer, to_acceptor, to_dialler, secret is not None)


def accept_handshake(
    sock: socket.socket,
    own: PeerIdentity,
    secret: Secret | None,
    *,
    admit: Admit = lambda _: "",
    deadline_s: float = HANDSHAKE_S,
    hello_s: float = HANDSHAKE_S,
) -> AuthSession:
    """Run the acceptor's side. The first message must arrive within `hello_s`. Raises as above."""
    talk = _Talk(sock, deadline_s=min(hello_s, deadline_s))
    theirs = talk.receive(_Kind.HELLO)
    talk.extend(deadline_s)
    nonce = os.urandom(NONCE_BYTES)
    _check_hello(talk, theirs, secret, own_nonce=nonce)
    talk.send(_Kind.HELLO, _hello(secret, nonce))
    proof = _Proof(secret, theirs[-NONCE_BYTES:], nonce)
    peer = _check_claim(talk, b"dialler", proof, own, admit)
    talk.send(_Kind.CLAIM, proof.claim(b"acceptor", talk.digest, own))
    expected = proof.code(b"welcome", talk.digest)
    if not hmac.compare_digest(talk.receive(_Kind.WELCOME), expected):
        raise ProtocolError(f"{talk.peer} ends the handshake with a wrong code")
    talk.release()
    to_acceptor, to_dialler = proof.keys(talk.digest)
    return AuthSession(own, peer, to_dialler, to_acceptor, secret is not None)


class _Kind(IntEnum):
    HELLO = 0xF1
    CLAIM = 0xF2
    WELCOME = 0xF3
    REFUSED = 0xF4


_FRAME = struct.Struct("<BH")
_HELLO = struct.Struct(f"<8sIB{NONCE_BYTES}s")
_MAGIC = b"ftrun/hs"
_CODE_BYTES = 32
_DECODER = msgspec.msgpack.Decoder(PeerIdentity)


def _hello(secret: Secret | None, nonce: bytes | None = None) -> bytes:
    nonce = os.urandom(NONCE_BYTES) if nonce is None else nonce
    return _HELLO.pack(_MAGIC, PROTOCOL_VERSION, secret is not None, nonce)


class _Talk:
    """Frames of a handshake, bounded in bytes and time, and hashed for the codes."""

    def __init__(self, sock: socket.socket, *, deadline_s: float) -> None:
        self._sock = sock
        self._left_bytes = MAX_BYTES
        self._deadline_s = deadline_s
        self._give_up_s = clock.now_s() + deadline_s
        self._received = sha256(b"ftrun handshake")
        self.peer = name_of_peer(sock)

    @property
    def digest(self) -> bytes:
        return self._received.digest()

    def send(self, kind: _Kind, body: bytes) -> bytes:
        frame = _FRAME.pack(kind, len(body)) + body
        self._received.update(frame)
        with self._within_deadline():
            self._sock.sendall(frame)
        return body

    def receive(self, wanted: _Kind) -> bytes:
        start = self._take(_FRAME.size)
        kind, length = _FRAME.unpack(start)
        if kind not in (wanted, _Kind.REFUSED):
            raise ProtocolError(f"{self.peer} does not use ftrun's protocol")
        body = self._take(length)
        if kind == _Kind.REFUSED:
            raise HandshakeRefused(peer=self.peer, reason=_in_plain_words(body), is_ours=False)
        self._received.update(start + body)
        return body

    def refuse(self, reason: str, *, reported: str) -> HandshakeRefused:
        """Send `reported` to the other side if possible; return the error with `reason`."""
        body = reported[:MAX_REASON_CHARACTERS].encode()
        with suppress(PeerError), self._within_deadline():
            self._sock.sendall(_FRAME.pack(_Kind.REFUSED, len(body)) + body)
            self._sock.shutdown(socket.SHUT_WR)
        return HandshakeRefused(peer=self.peer, reason=reason, is_ours=True)

    def extend(self, deadline_s: float) -> None:
        """Replace the deadline by this one, which counts from the start of the handshake."""
        self._give_up_s += deadline_s - self._deadline_s
        self._deadline_s = deadline_s

    def release(self) -> None:
        self._sock.settimeout(None)

    def _take(self, num_bytes: int) -> bytes:
        if num_bytes > self._left_bytes:
            raise ProtocolError(
                f"{self.peer} sends more than {MAX_BYTES} bytes before it is authenticated"
            )
        self._left_bytes -= num_bytes
        found = b""
        while len(found) < num_bytes:
            with self._within_deadline():
                more = self._sock.recv(num_bytes - len(found))
            if not more:
                raise PeerLost(peer=self.peer, how="closed")
            found += more
        return found

    @contextmanager
    def _within_deadline(self) -> Iterator[None]:
        """Limits the calls of the socket; raises PeerTimeout or PeerLost."""
        left_s = self._give_up_s - clock.now_s()
        if left_s <= 0:
            raise PeerTimeout(peer=self.peer, waited_s=self._deadline_s)
        try:
            self._sock.settimeout(left_s)
            yield
        except TimeoutError as error:
            raise PeerTimeout(peer=self.peer, waited_s=self._deadline_s) from error
        except OSError as error:
            raise PeerLost(peer=self.peer, how=how_lost(error)) from error


class _Proof:
    """Codes and keys derived from one secret and two nonces; all are empty without a secret."""

    def __init__(self, secret: Secret | None, dialler: bytes, acceptor: bytes) -> None:
        # HKDF-Extract (RFC 5869), with the secret as its key: both are 32 bytes of HMAC.
        self._seed = b"" if secret is None else secret.mac(b"ftrun session\0" + dialler + acceptor)

    def code(self, role: bytes, digest: bytes) -> bytes:
        return self._expand(b"code " + role + b"\0" + digest)

    def keys(self, digest: bytes) -> tuple[bytes, bytes]:
        return self._expand(b"key dialler\0" + digest), self._expand(b"key acceptor\0" + digest)

    def claim(self, role: bytes, digest: bytes, own: PeerIdentity) -> bytes:
        reported = msgspec.msgpack.encode(own)
        return self.code(role, digest + reported) + reported

    def _expand(self, info: bytes) -> bytes:
        return hmac.digest(self._seed, info + b"\x01", "sha256") if self._seed else b""


def _check_hello(talk: _Talk, theirs: bytes, secret: Secret | None, *, own_nonce: bytes) -> None:
    if len(theirs) != _HELLO.size or not theirs.startswith(_MAGIC):
        raise ProtocolError(f"{talk.peer} does not use ftrun's protocol")
    _, protocol, has_secret, nonce = _HELLO.unpack(theirs)
    if protocol != PROTOCOL_VERSION:
        raise talk.refuse(
            f"its ftrun uses protocol {protocol}, and this one, {ftrun.__version__}, uses "
            f"{PROTOCOL_VERSION}. Install the same ftrun on every node",
            reported=f"your protocol is {protocol}, and theirs is {PROTOCOL_VERSION} (ftrun "
            f"{ftrun.__version__}). Install the same ftrun on every node",
        )
    if bool(has_secret) != (secret is not None):
        ours = "this side has a secret, and the other has none"
        other = "this side has no secret, and the other has one"
        ours, other = (ours, other) if secret is not None else (other, ours)
        cure = ". Use the same --secret-file on every node"
        raise talk.refuse(ours + cure, reported=other + cure)
    if hmac.compare_digest(nonce, own_nonce):
        raise ProtocolError(f"{talk.peer} repeats our own nonce")


def _check_claim(
    talk: _Talk, role: bytes, proof: _Proof, own: PeerIdentity, admit: Admit
) -> PeerIdentity:
    """Verify the other side's claim. Its code is checked before any other part of it is used."""
    before = talk.digest
    body = talk.receive(_Kind.CLAIM)
    cut = len(proof.code(role, before))
    code, reported = body[:cut], body[cut:]
    if not hmac.compare_digest(code, proof.code(role, before + reported)):
        reason = "the secret differs. Use the same --secret-file on every node of the run"
        slurm = "; without one, nodes of a Slurm step need one home folder, also in containers"
        raise talk.refuse(reason + slurm, reported=reason)
    peer = decode_body(_DECODER, reported)
    if peer == own:
        # No refusal: an address of several nodes may lead to another one the next time.
        raise ProtocolError(f"{talk.peer} is this process itself")
    if reason := unfit(own, peer) or admit(peer):
        raise talk.refuse(f"{peer}: {reason}", reported=unfit(peer, own) or reason)
    return peer


def _in_plain_words(body: bytes) -> str:
    """Text of an unauthenticated peer without characters that could act on a terminal or a log."""
    text = body[: 4 * MAX_REASON_CHARACTERS].decode(errors="replace")
    plain = "".join(char if char.isprintable() else " " for char in text)
    return " ".join(plain.split())[:MAX_REASON_CHARACTERS]
