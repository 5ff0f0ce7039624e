"""Dispatches the frames of incoming links.

Runs in:  the SMP, in the threads of the incoming links; messages are posted to the server thread.
Takes in: frames.
Gives:    blocks and mirrors to the parity region that is being filled, in the link's own thread;
          messages to `Protector`; requests and answers to `FetchRpc`.
"""

import logging
import threading
from functools import partial

import msgspec

from ftrun.errors import FragmentRefused, ProtocolError
from ftrun.smp.jobs import JobLanes
from ftrun.smp.link_rules import FETCH, PROTECT
from ftrun.smp.peer_listener import IncomingLink
from ftrun.smp.redundancy.protector import Protector
from ftrun.smp.restore.rpc import FetchRpc
from ftrun.snapshot.manifest import NodeManifest
from ftrun.snapshot.redundancy import MAX_BLOCK_BYTES
from ftrun.wire.cluster import transfer as t

MAX_MANIFEST_BYTES = 1 << 28
# Created once at import: msgspec 0.22 crashes if two threads create one for the same types at once.
_MANIFEST = msgspec.msgpack.Decoder(NodeManifest)
_of_thread = threading.local()
_log = logging.getLogger(__name__)


class PeerDispatch:
    """The `PeerEvents` of this SMP."""

    def __init__(self, protector: Protector, rpc: FetchRpc, jobs: JobLanes) -> None:
        self._protector = protector
        self._rpc = rpc
        self._jobs = jobs

    def received(self, source: IncomingLink, envelope: t.TransferEnvelope) -> None:
        """Dispatch one frame.

        Raises:
            PeerError: the link must be closed.
        """
        body = envelope.body
        if source.hello.purpose == FETCH:
            self._rpc.received(source, envelope)
        elif isinstance(body, t.BlockData):
            self._take_block(source, envelope, body)
        elif isinstance(body, t.MirrorData):
            self._take_mirror(source, envelope, body)
        elif isinstance(body, t.ManifestData):
            self._take_manifest(source, envelope, body)
        elif isinstance(body, t.RoundMessage) and not envelope.raw_bytes:
            self._jobs.post(
                partial(self._protector.heard, source.hello.session, source.node_id, body)
            )
        else:
            raise ProtocolError(f"{type(body).__name__} is not for a link to {PROTECT}")

    def lost(self, node_id: str, purpose: str, why: str) -> None:
        if purpose == PROTECT:
            self._jobs.post(partial(self._protector.lost, node_id, why))
        else:
            self._rpc.lost(node_id, why)

    def linked(self, node_id: str, purpose: str) -> None:
        if purpose == PROTECT:
            self._jobs.post(partial(self._protector.linked, node_id))
        else:
            self._rpc.linked(node_id)

    # --- the link's thread -----------------------------------------------------------------

    def _take_block(
        self, source: IncomingLink, envelope: t.TransferEnvelope, body: t.BlockData
    ) -> None:
        found = self._protector.fill_of(source.hello.session, body)
        size = envelope.raw_bytes
        if found is None or size > MAX_BLOCK_BYTES:
            source.socket.receive_raw(envelope, None)
            return
        fill, group = found
        place = group.place_of(source.node_id)
        payload = self._staging()[:size]
        source.socket.receive_raw(envelope, [payload])
        if place is None:
            return
        try:
            fill.take_block(place, source.node_id, body.header, payload)
        except FragmentRefused as error:
            self._damaged(source, body, str(error))

    def _take_mirror(
        self, source: IncomingLink, envelope: t.TransferEnvelope, body: t.MirrorData
    ) -> None:
        found = self._protector.fill_of(source.hello.session, body)
        place = found[1].place_of(source.node_id) if found is not None else None
        if found is None or place is None:
            source.socket.receive_raw(envelope, None)
            return
        fill, _ = found
        if envelope.raw_bytes > fill.mirror_room(place):
            source.socket.receive_raw(envelope, None)
            self._damaged(source, body, f"the mirror of {source.node_id} has no room here")
            return
        payload = bytearray(envelope.raw_bytes)
        is_whole = source.socket.receive_raw(envelope, [memoryview(payload)])
        if not is_whole or envelope.raw_digest is None:
            self._damaged(source, body, f"the mirror of {source.node_id} is not what it sent")
            return
        fill.take_mirror(place, payload, envelope.raw_digest)

    def _take_manifest(
        self, source: IncomingLink, envelope: t.TransferEnvelope, body: t.ManifestData
    ) -> None:
        if envelope.raw_bytes > MAX_MANIFEST_BYTES:
            raise ProtocolError(f"a manifest of {envelope.raw_bytes} bytes")
        raw = bytearray(envelope.raw_bytes)
        if not source.socket.receive_raw(envelope, [memoryview(raw)]):
            self._damaged(source, body, f"the manifest of {source.node_id} is not what it sent")
            return
        try:
            manifest = _MANIFEST.decode(raw)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"the manifest of {source.node_id} is none: {error}") from error
        session, node_id = source.hello.session, source.node_id
        self._jobs.post(partial(self._protector.manifest_came, session, node_id, body, manifest))

    def _damaged(self, source: IncomingLink, body: t.RoundMessage, why: str) -> None:
        _log.warning("%s", why)
        session, node_id = source.hello.session, source.node_id
        self._jobs.post(partial(self._protector.damaged, session, node_id, body, why))

    def _staging(self) -> memoryview:
        """Return this thread's own staging block, which is allocated once."""
        if not hasattr(_of_thread, "block"):
            _of_thread.block = memoryview(bytearray(MAX_BLOCK_BYTES))
        found = _of_thread.block
        assert isinstance(found, memoryview)
        return found
