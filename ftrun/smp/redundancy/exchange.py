"""One attempt to exchange the bytes of one version within the group.

Runs in:  the SMP. The server thread begins and stops it; the link threads run it in between.
Takes in: a plan on which all nodes of the group agree, and the shards of this node.
Gives:    a complete parity region and an event for it, or the reason of the failure.

A node sends nothing to another node before that node has opened its parity region and announced its
window. A receiving thread therefore never waits for memory.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ftrun.erasure.codec import Codec, choose_codec, self_test
from ftrun.errors import InternalError, LayoutUnknown, MemoryTooSmall, SnapshotCorrupt
from ftrun.smp.jobs import Finish, JobLanes
from ftrun.smp.memory.parity_store import ParityStore, allocate_parity_region
from ftrun.smp.memory.sealed_shards import ArenaMappings, SealedShards
from ftrun.smp.peer_link import PROTECT, OutgoingFrame
from ftrun.smp.peer_listener import PeerListener
from ftrun.smp.redundancy.block_sender import BlockSender, BlockStream, LocalBlocks, MirrorStream
from ftrun.smp.redundancy.group import LocalGroup, record_of
from ftrun.smp.redundancy.mirror import mirror_parts
from ftrun.smp.redundancy.parity_writer import OutgoingRow, ParityWriter
from ftrun.snapshot.redundancy import RedundancyPlan
from ftrun.wire.cluster import transfer as t
from ftrun.wire.crash_points import crash_point
from ftrun.wire.messages.smp import ParityRegionCreated
from ftrun.wire.shared_memory.parity_region import ParityRecord, ParityRegion, ParityRegionState
from ftrun.wire.transport.bulk_socket import Bytes

_log = logging.getLogger(__name__)


class CodecCache:
    """A codec for each k and m, for several threads; lane "protect" tests it before other work."""

    def __init__(self, jobs: JobLanes) -> None:
        self._jobs = jobs
        self._codecs: dict[tuple[int, int], Codec] = {}
        self._problems: dict[tuple[int, int], str] = {}
        self._lock = threading.Lock()

    def get(self, k: int, m: int) -> Codec:
        """Return the codec for k data and m parity blocks; the first call submits its test."""
        with self._lock:
            if (k, m) not in self._codecs:
                self._codecs[k, m] = choose_codec(k, m)
                send = partial(self._problems.__setitem__, (k, m))
                work = partial(_test, self._codecs[k, m], send)
                bug = "internal error in ftrun; see the SMP's log"
                self._jobs.submit("protect", work, failed=partial(send, bug))
            return self._codecs[k, m]

    def problem(self, codec: Codec) -> str:
        return self._problems.get((codec.k, codec.m), "")


def _test(codec: Codec, send: "partial[None]") -> Finish:
    try:
        count = self_test(codec)
    except InternalError as error:
        return partial(send, str(error))
    _log.debug("%s: %d sets of survivors tried", codec.name, count)
    return partial(send, "")


@dataclass(frozen=True, slots=True)
class ProtectorTools:
    """The dependencies of a protector and its exchanges."""

    run: int
    peers: PeerListener
    parity_store: ParityStore
    jobs: JobLanes
    maps: ArenaMappings
    codecs: CodecCache
    send_to_agent: Callable[..., None]
    exchange: "type[Exchange]"


class Exchange:
    """One attempt at one version. The many-node simulation replaces the methods on bytes.

    The callbacks run in the server thread, and never after `stop`.

    Args:
        stored: all data that belongs on this node is stored.
        failed: this node cannot store its part, with the reason; `is_corrupt` if one of its slots
            differs from what was sealed.
    """

    def __init__(
        self,
        shards: SealedShards,
        plan: RedundancyPlan,
        group: LocalGroup,
        *,
        attempt: int,
        tools: ProtectorTools,
        stored: Callable[[], None],
        failed: Callable[..., None],
    ) -> None:
        self.fill: ParityWriter | None = None
        self._shards = shards
        self._plan = plan
        self._group = group
        self._attempt = attempt
        self._tools = tools
        self._stored = stored
        self._failed = failed
        self._region: ParityRegion | None = None
        self._sending: BlockSender | None = None
        self._mirror: Sequence[Bytes] = ()
        self._streams: dict[int, BlockStream] = {}
        self._mirrored: set[int] = set()
        self._windows: dict[int, tuple[int, int]] = {}
        self._is_stopped = False

    def begin(self, rooms: dict[int, int]) -> None:
        """Start the job; `rooms` are the bytes reserved for each mirror here, by position."""
        self._make_in_slot(record_of(self._shards.version, self._plan, rooms, self._group))

    def _make_in_slot(self, record: ParityRecord) -> None:
        slot = self._tools.parity_store.free_slot()
        needs_memory = self._tools.parity_store.take(slot, record) is None
        self._tools.jobs.submit(
            "protect",
            partial(self._make, record, slot, needs_memory=needs_memory),
            failed=partial(self._fail, "internal error in ftrun; see the SMP's log"),
        )

    def let(self, position: int, plan_id: int, below: int) -> None:
        """Record that a node is ready and accepts its gathered stripes below number `below`."""
        self._windows[position] = (plan_id, below)
        self._send()

    @property
    def missing(self) -> int | None:
        """Number of mirrors and rows not yet received; None before the parity region is ready."""
        return self.fill.missing if self.fill is not None else None

    def stop(self) -> None:
        """End the attempt; when this returns, it receives and sends no more bytes."""
        self._is_stopped = True
        if self._sending is not None:
            self._sending.stop()
        if self.fill is not None:
            self.fill.stop()
        self._mirror = ()

    # --- the parity region -------------------------------------------------------------------

    def _make(self, record: ParityRecord, slot: int, *, needs_memory: bool) -> Finish:
        """Runs in a job."""
        try:
            prepared = self._prepare(record, needs_memory=needs_memory)
        except MemoryTooSmall as error:
            reason = (
                f"mirrors and parity need {error.needed_bytes / 1e6:,.0f} MB, but only "
                f"{error.available_bytes / 1e6:,.0f} MB are free ({error.limit}). Use fewer ranks "
                "per node, a larger memory limit, or more nodes in a group"
            )
            return partial(self._no_memory, record, reason)
        except (LayoutUnknown, SnapshotCorrupt) as error:
            return partial(self._fail, str(error), is_corrupt=True)
        return partial(self._made, record, slot, *prepared)

    def _no_memory(self, record: ParityRecord, reason: str) -> None:
        # Less protection until the commit is better than no protection from now on.
        if not self._is_stopped and self._tools.parity_store.give_up_committed():
            _log.warning(
                "overwriting the committed parity region, because a third has no room: %s", reason
            )
            self._make_in_slot(record)
        else:
            self._fail(reason)

    def _made(
        self,
        record: ParityRecord,
        slot: int,
        region: ParityRegion | None,
        blocks: LocalBlocks,
        mirror: Sequence[Bytes],
    ) -> None:
        tools = self._tools
        if region is not None:
            tools.parity_store.put(slot, region)
            tools.send_to_agent(ParityRegionCreated(slot), fds=(region.fd,))
            crash_point("smp.protect.region_created")
        if self._is_stopped:
            return
        self._region = tools.parity_store.take(slot, record)
        assert self._region is not None
        self._region.begin(record)
        self._mirror = mirror
        self._sending = BlockSender(
            blocks, attempt=self._attempt, failed=self._later(partial(self._fail, is_corrupt=True))
        )
        self.fill = self._filled(self._region)
        crash_point("smp.protect.opened")
        self.fill.start()
        self._send()

    # --- bytes -------------------------------------------------------------------------------

    def _prepare(
        self, record: ParityRecord, *, needs_memory: bool
    ) -> tuple[ParityRegion | None, LocalBlocks, Sequence[Bytes]]:
        """Runs in a job; raises MemoryTooSmall, LayoutUnknown or SnapshotCorrupt."""
        blocks = LocalBlocks(self._shards, record, self._tools.run)
        mirror = mirror_parts(self._shards, record)
        return allocate_parity_region(record) if needs_memory else None, blocks, mirror

    def _filled(self, region: ParityRegion) -> ParityWriter:
        group, tools = self._group, self._tools
        return ParityWriter(
            region,
            tools.codecs.get(group.protection.data, group.parity),
            run=tools.run,
            forward=self._forward,
            window=self._report_window,
            full=self._later(self._full),
        )

    def _block_stream(self, sending: BlockSender, position: int) -> BlockStream:
        return BlockStream(sending, position)

    # --- results -----------------------------------------------------------------------------

    def _full(self) -> None:
        if self._is_stopped or self._region is None:
            return
        self._region.mark(ParityRegionState.COMPLETE)
        crash_point("smp.protect.stored")
        self._stored()

    def _fail(self, reason: str, *, is_corrupt: bool = False) -> None:
        if not self._is_stopped:
            self._failed(reason, is_corrupt=is_corrupt)

    # --- sending -----------------------------------------------------------------------------

    def _send(self) -> None:
        group, sending = self._group, self._sending
        if sending is None or self._is_stopped:
            return
        for position, (plan_id, below) in self._windows.items():
            if plan_id != self._plan.id:
                self._fail(f"node {group.nodes[position].node_id} uses another redundancy plan")
                return
            link = self._tools.peers.link(group.nodes[position], PROTECT)
            if position in group.mirrors_at and position not in self._mirrored:
                self._mirrored.add(position)
                link.add(MirrorStream(sending, self._mirror))
            # The gatherer sends its rows to the other parity nodes, whose regions must be ready by
            # then.
            if any(other not in self._windows for other in group.parity_positions(position)):
                continue
            stream = self._streams.get(position)
            if stream is None:
                stream = self._streams[position] = self._block_stream(sending, position)
                link.add(stream)
            stream.let(below)
            link.wake()

    # --- called in threads of links ------------------------------------------------------------

    def _later(self, act: Callable[..., None]) -> Callable[..., None]:
        return lambda *args: self._tools.jobs.post(partial(act, *args))

    def _forward(self, out: OutgoingRow, release: Callable[[], None]) -> None:
        at = self._shards.version
        body = t.BlockData(at.generation, at.step, self._attempt, out.header)
        link = self._tools.peers.find(self._group.nodes[out.position].node_id, PROTECT)
        if link is None or self._is_stopped:
            release()
        else:
            link.send(OutgoingFrame(body, [out.row], release=release))

    def _report_window(self, below: int) -> None:
        at = self._shards.version
        body = t.RoundOpened(at.generation, at.step, self._attempt, self._plan.id, below)
        for position in self._group.others:
            link = self._tools.peers.find(position.node_id, PROTECT)
            if link is not None and not self._is_stopped:
                link.send(OutgoingFrame(body))
