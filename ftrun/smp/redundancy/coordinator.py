"""Everything that this SMP does together with the SMPs of other nodes.

Runs in:  the SMP, in the server thread; its components have threads of their own. `PeerDispatch`
          runs in the threads of the incoming links.
Takes in: the members of the group, per generation; frames of other SMPs.
Gives:    protected versions; restored versions, fetched and served. Blocks and mirrors go to the
          parity region in the link's own thread, messages to `Protector` in the server thread,
          requests and answers to `FetchRpc`.
Survives: a change of generation: parity regions are retained. Parity regions outlive the SMP if the
          agent holds duplicates of their descriptors.

Rule: a new generation, or new positions in the same one, ends all work in progress at once. The
      links are closed, and no message of the old group is accepted.
"""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from ftrun.erasure.fragments import run_digest
from ftrun.errors import FragmentRefused, ProtocolError, SnapshotCorrupt, UsageError
from ftrun.ids import Rank, RunId, Version, version
from ftrun.smp.jobs import JobLanes, Runner
from ftrun.smp.memory.arenas import ArenaStore
from ftrun.smp.memory.commits import CommitCoordinator
from ftrun.smp.memory.parity_store import ParityStore
from ftrun.smp.memory.replicas import ReplicaMonitor
from ftrun.smp.memory.sealed_shards import ArenaMappings
from ftrun.smp.peer_link import FETCH, PROTECT
from ftrun.smp.peer_listener import IncomingLink, PeerListener, PeerSession
from ftrun.smp.redundancy.exchange import CodecCache, Exchange, ProtectorTools
from ftrun.smp.redundancy.group import LocalGroup
from ftrun.smp.redundancy.protector import Protector
from ftrun.smp.redundancy.rebuilder import Rebuilder
from ftrun.smp.restore.fetch import Fetch
from ftrun.smp.restore.lost_ranks import LostRanks
from ftrun.smp.restore.previous_world import PreviousWorld, PreviousWorldShards
from ftrun.smp.restore.restore_server import RestoreServer
from ftrun.smp.restore.restores import RestoreCoordinator
from ftrun.smp.restore.rpc import FetchRpc
from ftrun.smp.restore.shard_reads import ShardReads
from ftrun.snapshot.manifest import NodeManifest
from ftrun.snapshot.redundancy import MAX_BLOCK_BYTES
from ftrun.wire.cluster import transfer as t
from ftrun.wire.messages import envelope as messages
from ftrun.wire.messages import smp as smp_messages
from ftrun.wire.shared_memory.pages import CommandField, SharedPage
from ftrun.wire.transport.handshake import PeerIdentity
from ftrun.wire.transport.secret import SECRET_BYTES, Secret

MAX_EXCLUDED = 100

SendToAgent = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Engines:
    """The components that read memory and move bytes; the many-node simulation replaces them."""

    peers: PeerListener
    maps: ArenaMappings
    codecs: CodecCache
    runner: Runner
    exchange: type[Exchange] = Exchange
    lost_ranks: type[LostRanks] = LostRanks
    served: type[RestoreServer] = RestoreServer
    previous_shards: type[PreviousWorldShards] = PreviousWorldShards
    replica_watch: type[ReplicaMonitor] = ReplicaMonitor


class RedundancyCoordinator:
    """Owns the parity regions and the links, and connects protection with restore."""

    def __init__(
        self,
        run_id: RunId,
        *,
        memory: ArenaStore,
        commits: CommitCoordinator,
        jobs: JobLanes,
        send_to_agent: SendToAgent,
        engines: Engines | None = None,
    ) -> None:
        self.parity_store = ParityStore()
        self.excluded: deque[str] = deque(maxlen=MAX_EXCLUDED)
        self._run_id = run_id
        self._memory = memory
        self._commits = commits
        self._send_to_agent = send_to_agent
        if engines is None:
            engines = Engines(PeerListener(), ArenaMappings(), CodecCache(jobs), Runner())
        self._engines = engines
        self._peers, self._maps = self._engines.peers, self._engines.maps
        self._codecs = self._engines.codecs
        self._rebuilder: Rebuilder | None = None
        tools = ProtectorTools(
            run=run_digest(run_id),
            peers=self._peers,
            parity_store=self.parity_store,
            jobs=jobs,
            maps=self._maps,
            codecs=self._codecs,
            send_to_agent=send_to_agent,
            exchange=self._engines.exchange,
        )
        self.replicas = self._engines.replica_watch(jobs, self._maps, send_to_agent)
        self._protector = Protector(tools, corrupt=commits.corrupt, replicas=self.replicas)
        self._rpc = FetchRpc(
            self._peers,
            excluded=lambda error, ask: jobs.post(partial(self._note, error, ask)),
            runner=self._engines.runner,
        )
        self.restores = RestoreCoordinator(
            memory,
            self._rpc,
            jobs,
            send_to_agent=send_to_agent,
            here=self._all_here,
            lost_ranks=self._engines.lost_ranks,
        )
        self.range_fetches = ShardReads(memory, jobs)
        memory.give_back = self.range_fetches.free_copies
        commits.protector = self._protector
        commits.after_commit = self._committed
        memory.after_free = self._serve_arenas
        self._peers.events = PeerDispatch(self._protector, self._rpc, jobs)

    def listen(self, hosts: list[str], fds: tuple[int, ...]) -> messages.AnyMessage:
        if len(fds) > 1:
            raise ProtocolError("ListenForPeers takes at most one descriptor, the secret")
        secret = None
        if fds:
            try:
                secret = Secret(os.pread(fds[0], SECRET_BYTES + 1, 0))
            except (OSError, ValueError) as error:
                raise ProtocolError(f"the secret cannot be read: {error}") from error
        try:
            return smp_messages.ListeningForPeers(self._peers.listen(hosts, secret))
        except UsageError as error:
            return messages.Refused(str(error))

    def begin_generation(
        self, body: smp_messages.BeginGeneration, group: LocalGroup | None, page: SharedPage
    ) -> None:
        restored = version(*body.restored) if body.restored is not None else None
        is_new = self._begin(body, group, page, restored)
        ranks = [Rank(rank) for rank in body.local_ranks]
        self.replicas.begin(page, body.generation, ranks, is_alone=group is None)
        self._commits.begin(page, body, group, is_new=is_new)
        own = group.nodes[group.position] if group is not None else body.own
        self.restores.begin(body, restored, own)

    def _begin(
        self,
        body: smp_messages.BeginGeneration,
        group: LocalGroup | None,
        page: SharedPage,
        restored: Version | None,
    ) -> bool:
        """Begin this group from this version; return False if the group is unchanged."""
        if group is not None and group == self._protector.group:
            return False
        self._stop()
        self._maps.keep_only(arena.fd for arena in self._memory.all())
        served = self._served(restored)
        # A broken link reconnects over another rail after its kernel has given the connection up.
        has_ways = group is not None and any(len(node.rails) > 1 for node in group.nodes)
        if served is not None:
            self._rebuilder = Rebuilder(
                self._rpc,
                served,
                run=run_digest(self._run_id),
                codec_for=self._codecs.get,
                timeout_s=body.timeout_s / (2 if has_ways else 3),
            )
        own = group.nodes[group.position] if group is not None else body.own
        rebuild = self._rebuilder.ask if self._rebuilder is not None else None
        if group is None or own is None:
            self._rpc.begin(served, rebuild, own)
            self._protector.begin(None)
            self._read_previous(body, served, own)
            if own is not None:
                self._begin_links(body, own, None)
            return True
        kept, protected_in = restored, body.protected_in
        has_committed = page.get(CommandField.COMMITTED_STEP) >= 0
        if has_committed and page.get(CommandField.COMMITTED_IN) == body.generation:
            kept = version(
                page.get(CommandField.COMMITTED_GENERATION), page.get(CommandField.COMMITTED_STEP)
            )
            protected_in = group.generation
        retained = version(
            page.get(CommandField.RETAINED_GENERATION), page.get(CommandField.RETAINED_STEP)
        )
        self.parity_store.keep(kept, protected_in, retained)
        self._rpc.begin(served, rebuild, own)
        self._read_previous(body, served, own)
        self._begin_links(body, own, group)
        self._protector.begin(group)
        return True

    def _begin_links(
        self,
        body: smp_messages.BeginGeneration,
        own: smp_messages.NodeAddress,
        group: LocalGroup | None,
    ) -> None:
        """Admit the links of this generation. Without a group there are only fetch links."""
        number, others = (group.number, len(group.others)) if group is not None else (0, 0)
        identity = PeerIdentity(self._run_id, "smp", own.node_id, own.incarnation)
        pace_bytes_s = body.pace_bytes_s / max(1, others)
        self._peers.begin(
            PeerSession(
                identity, body.generation, number, body.timeout_s, pace_bytes_s, tuple(own.rails)
            )
        )

    def _read_previous(
        self,
        body: smp_messages.BeginGeneration,
        served: RestoreServer | None,
        own: smp_messages.NodeAddress | None,
    ) -> None:
        is_resized = body.restored_world_size not in (0, body.world_size)
        groups = body.restore_from if is_resized else body.read_from
        if served is None or not (groups or is_resized):
            return
        world = PreviousWorld(
            served.version, groups, own, body.node_id, num_readers=len(body.local_ranks)
        )
        rebuild = self._rebuilder.rebuild if self._rebuilder is not None else None
        fetch = Fetch(self._rpc, timeout_s=body.timeout_s)
        self.range_fetches.begin(self._engines.previous_shards(world, fetch, served, rebuild))

    def _all_here(self) -> None:
        """Serve the restored version to other nodes, because every local rank now has it."""
        self._serve_arenas()
        self._commits.protect_complete()

    def _serve_arenas(self) -> None:
        """Serve what is in memory now; duplicates of freed arenas would keep their memory."""
        if self._rpc.served is not None:
            self._rpc.served.take_in(self._memory.fds(self._memory.ranks))

    def _committed(self) -> None:
        """Stop serving the restored version once a newer version is committed."""
        tracker = self._commits.tracker
        served, newest = self._rpc.served, tracker.committed
        if newest is not None and self._protector.group is None:
            self.replicas.poll(newest, lambda: self._memory.fds(self._commits.tracker.ranks))
        if served is not None and newest is not None and newest > served.version:
            self.restores.share(None)
            self.range_fetches.begin(None)
            if self._rebuilder is not None:
                self._rebuilder.stop()
                self._rebuilder = None
            self._rpc.begin(None, None, self._rpc.own)
        self._maps.keep_only(arena.fd for arena in self._memory.all())

    def inventory(self, body: smp_messages.InventoryRequest) -> smp_messages.Inventory:
        if body.freeze_versions:
            self._protector.freeze_versions()  # the reported inventory must stay true
        return smp_messages.Inventory(
            self._memory.offers(), self.parity_store.parts(), list(self.excluded)
        )

    def void_after(self, newest: Version) -> int:
        """Void all later versions; return the number of slots and parity regions that held one."""
        self._protector.void_after(newest)
        count = self.parity_store.void_after(newest) + self._memory.void_after(newest)
        self.count_again()
        return count

    def count_again(self) -> None:
        if self._commits.has_started:
            tracker = self._commits.tracker
            self._commits.restart(tracker.generation, tracker.ranks, tracker.world_size)
            self.restores.recheck()

    def status(self) -> dict[str, object]:
        return {
            "parity_bytes": self.parity_store.allocated_bytes,
            "sent_bytes": self._peers.num_sent_bytes,
            "protected": msgspec.to_builtins(self.parity_store.parts()),
            **self._protector.status(),
        }

    def free(self) -> None:
        self._stop()
        self.restores.stop()
        self.restores.share(None)
        self._protector.begin(None)
        self._peers.close()
        self._rpc.begin(None, None)
        self._maps.keep_only(())
        self.parity_store.free()

    def _stop(self) -> None:
        self.restores.cancel()
        self.range_fetches.begin(None)
        self._protector.stop()
        if self._rebuilder is not None:
            self._rebuilder.stop()
            self._rebuilder = None

    def _served(self, restored: Version | None) -> RestoreServer | None:
        if restored is None:
            return None
        return self._engines.served(
            run_digest(self._run_id),
            restored,
            maps=self._maps,
            fds=self._memory.fds(self._memory.ranks),
            parity_store=self.parity_store,
            load=self.restores.share_of(restored),
        )

    def _note(self, error: SnapshotCorrupt, ask: t.FetchRequest) -> None:
        """Reject data of this node that was found damaged, and report it."""
        wanted = version(ask.generation, ask.step)
        if error.rank is not None:
            # The slot counts as missing until it is restored. If the protection counted as
            # damaged, it would stay so although the restored slot makes it complete.
            self._memory.void(Rank(error.rank), wanted)
            self.count_again()
        elif isinstance(ask, t.GetMirror):
            self.parity_store.drop_damaged_mirror(wanted, ask.protected_in, ask.position)
        elif isinstance(ask, t.GetBlock | t.RebuildBlock):
            self.parity_store.note_damage(wanted, ask.protected_in)
        if str(error) not in self.excluded:
            self.excluded.append(str(error))
            self._send_to_agent(smp_messages.SmpNotice("source_set_aside", str(error)))


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
        """Dispatch one frame; raises PeerError if the link must be closed."""
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
                partial(self._protector.received, source.hello.session, source.node_id, body)
            )
        else:
            raise ProtocolError(f"{type(body).__name__} is not allowed on a {PROTECT} link")

    def lost(self, node_id: str, purpose: str, reason: str) -> None:
        if purpose == PROTECT:
            self._jobs.post(partial(self._protector.lost, node_id, reason))
        else:
            self._rpc.lost(node_id, reason)

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
        position = group.position_of(source.node_id)
        payload = self._staging()[:size]
        source.socket.receive_raw(envelope, [payload])
        if position is None:
            return
        try:
            fill.take_block(position, source.node_id, body.header, payload)
        except FragmentRefused as error:
            self._damaged(source, body, str(error))

    def _take_mirror(
        self, source: IncomingLink, envelope: t.TransferEnvelope, body: t.MirrorData
    ) -> None:
        found = self._protector.fill_of(source.hello.session, body)
        position = found[1].position_of(source.node_id) if found is not None else None
        if found is None or position is None:
            source.socket.receive_raw(envelope, None)
            return
        fill, _ = found
        if envelope.raw_bytes > fill.mirror_space(position):
            source.socket.receive_raw(envelope, None)
            self._damaged(
                source, body, f"the mirror of {source.node_id} is larger than its reserved memory"
            )
            return
        payload = bytearray(envelope.raw_bytes)
        is_whole = source.socket.receive_raw(envelope, [memoryview(payload)])
        if not is_whole or envelope.raw_digest is None:
            self._damaged(source, body, f"the mirror of {source.node_id} was damaged in transit")
            return
        fill.take_mirror(position, payload, envelope.raw_digest)

    def _take_manifest(
        self, source: IncomingLink, envelope: t.TransferEnvelope, body: t.ManifestData
    ) -> None:
        if envelope.raw_bytes > MAX_MANIFEST_BYTES:
            raise ProtocolError(f"a manifest of {envelope.raw_bytes} bytes")
        raw = bytearray(envelope.raw_bytes)
        if not source.socket.receive_raw(envelope, [memoryview(raw)]):
            self._damaged(source, body, f"the manifest of {source.node_id} was damaged in transit")
            return
        try:
            manifest = _MANIFEST.decode(raw)
        except msgspec.MsgspecError as error:
            raise ProtocolError(
                f"the manifest of {source.node_id} is not valid: {error}"
            ) from error
        session, node_id = source.hello.session, source.node_id
        self._jobs.post(partial(self._protector.manifest_came, session, node_id, body, manifest))

    def _damaged(self, source: IncomingLink, body: t.RoundMessage, reason: str) -> None:
        _log.warning("%s", reason)
        session, node_id = source.hello.session, source.node_id
        self._jobs.post(partial(self._protector.damaged, session, node_id, body, reason))

    def _staging(self) -> memoryview:
        """Return this thread's own staging block, which is allocated once."""
        if not hasattr(_of_thread, "block"):
            _of_thread.block = memoryview(bytearray(MAX_BLOCK_BYTES))
        found = _of_thread.block
        assert isinstance(found, memoryview)
        return found
