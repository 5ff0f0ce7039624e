"""The bytes of one version, out to the group and in from it; one attempt.

Runs in:  the SMP: begun and stopped in the server's thread, in between in those of the links.
Takes in: a plan that all nodes of the group go by, this node's shards.
Gives:    a vault with all that belongs here, and word of it; or the reason why not.

Nothing is sent to a node before it has said that its vault is ready and how far it lets us go,
so no thread that receives ever has to wait for memory.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ftrun.erasure.codec import Codec
from ftrun.erasure.fragments import StripeId
from ftrun.erasure.stripes import Stripes
from ftrun.errors import LayoutUnknown, MemoryTooSmall, SnapshotCorrupt
from ftrun.ids import Generation
from ftrun.smp.jobs import Finish, JobLanes
from ftrun.smp.link_rules import PROTECT
from ftrun.smp.memory.parity_store import ParityStore, make_vault
from ftrun.smp.memory.sealed_shards import ArenaMappings, SealedShards
from ftrun.smp.peer_link import OutgoingFrame
from ftrun.smp.peer_listener import PeerListener
from ftrun.smp.redundancy.block_sender import BlockSender, BlockStream, LocalBlocks, MirrorStream
from ftrun.smp.redundancy.codecs import CodecCache
from ftrun.smp.redundancy.group import LocalGroup, record_of
from ftrun.smp.redundancy.mirror import mirror_parts
from ftrun.smp.redundancy.parity_writer import OutgoingRow, ParityEvents, ParityWriter
from ftrun.snapshot.redundancy import RedundancyPlan
from ftrun.snapshot.stripe_space import StripeSpace
from ftrun.wire.cluster import transfer as t
from ftrun.wire.crash_points import crash_point
from ftrun.wire.shared_memory.parity_region import ParityRecord, ParityRegion, ParityRegionState
from ftrun.wire.transport.bulk_socket import Bytes

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProtectorTools:
    """What a protector works with.

    Args:
        peers: links to the other SMPs.
        vaults: where what comes in is kept.
        jobs: for what takes longer than a message may wait.
        maps: mappings of this node's arenas.
        codecs: one for each k and m.
        exchange: moves the bytes of one attempt.
    """

    peers: PeerListener
    vaults: ParityStore
    jobs: JobLanes
    maps: ArenaMappings
    codecs: CodecCache
    exchange: "type[Exchange]"


@dataclass(frozen=True, slots=True)
class ExchangeTools:
    """What every exchange of this SMP uses.

    Args:
        run: `run_digest` of the run.
        vault_made: tells the agent of new memory: slot and descriptor.
    """

    run: int
    peers: PeerListener
    vaults: ParityStore
    jobs: JobLanes
    codec: Codec
    vault_made: Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class ExchangeEvents:
    """Who is told, in the server's thread and never after `stop`.

    Args:
        stored: all that belongs here is here.
        unable: this node cannot keep its part, and why.
        corrupt: a slot of this node is not what was sealed.
    """

    stored: Callable[[], None]
    unable: Callable[[str], None]
    corrupt: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a job has made ready.

    Args:
        vault: new memory; None where there is enough in the slot.
        space: where this node's blocks lie.
        mirror: its small state.
    """

    vault: ParityRegion | None
    space: StripeSpace
    mirror: Sequence[Bytes]


class Exchange:
    """One attempt at one version. The simulation of many nodes replaces the methods on bytes."""

    def __init__(
        self,
        shards: SealedShards,
        plan: RedundancyPlan,
        group: LocalGroup,
        *,
        attempt: int,
        tools: ExchangeTools,
        events: ExchangeEvents,
    ) -> None:
        self.fill: ParityWriter | None = None
        self._shards = shards
        self._plan = plan
        self._group = group
        self._attempt = attempt
        self._tools = tools
        self._events = events
        self._vault: ParityRegion | None = None
        self._sending: BlockSender | None = None
        self._mirror: Sequence[Bytes] = ()
        self._streams: dict[int, BlockStream] = {}
        self._mirrored: set[int] = set()
        self._windows: dict[int, tuple[int, int]] = {}
        self._is_stopped = False

    def begin(self, rooms: dict[int, int]) -> None:
        """Have the memory made, and what goes out described.

        Args:
            rooms: bytes for each mirror that comes here, by place.
        """
        self._make_in_slot(record_of(self._shards.version, self._plan, rooms, self._group))

    def _make_in_slot(self, record: ParityRecord) -> None:
        slot = self._tools.vaults.free_slot()
        needs_memory = self._tools.vaults.take(slot, record) is None
        self._tools.jobs.submit(
            "protect",
            partial(self._make, record, slot, needs_memory=needs_memory),
            failed=partial(self._fail, "a bug in ftrun; the SMP's log has it"),
        )

    def let(self, place: int, plan_id: int, below: int) -> None:
        """A node's vault is ready, and it takes what is below this stripe of those it gathers."""
        self._windows[place] = (plan_id, below)
        self._send()

    @property
    def missing(self) -> int | None:
        """Mirrors and rows that have not come; None before the vault is ready."""
        return self.fill.missing if self.fill is not None else None

    def stop(self) -> None:
        """No byte of it comes in or goes out any more when this returns."""
        self._is_stopped = True
        if self._sending is not None:
            self._sending.stop()
        if self.fill is not None:
            self.fill.stop()
        self._mirror = ()

    # --- the vault ---------------------------------------------------------------------------

    def _make(self, record: ParityRecord, slot: int, *, needs_memory: bool) -> Finish:
        """In a job."""
        try:
            prepared = self._prepare(record, needs_memory=needs_memory)
        except MemoryTooSmall as error:
            why = (
                f"mirrors and parity need {error.needed_bytes / 1e6:,.0f} MB and "
                f"{error.available_bytes / 1e6:,.0f} MB are free ({error.limit}). Use fewer ranks "
                "per node, a larger memory limit, or more nodes in a group"
            )
            return partial(self._no_memory, record, why)
        except (LayoutUnknown, SnapshotCorrupt) as error:
            return partial(self._find_corrupt, str(error))
        return partial(self._made, record, slot, prepared)

    def _no_memory(self, record: ParityRecord, why: str) -> None:
        # Less protection until the commit is better than none from now on.
        if not self._is_stopped and self._tools.vaults.give_up_committed():
            _log.warning("no third vault, the last committed protection is overwritten: %s", why)
            self._make_in_slot(record)
        else:
            self._fail(why)

    def _made(self, record: ParityRecord, slot: int, prepared: Prepared) -> None:
        tools = self._tools
        if prepared.vault is not None:
            tools.vaults.put(slot, prepared.vault)
            tools.vault_made(slot, prepared.vault.fd)
            crash_point("smp.protect.vault_made")
        if self._is_stopped:
            return
        self._vault = tools.vaults.take(slot, record)
        assert self._vault is not None
        self._vault.begin(record)
        self._mirror = prepared.mirror
        self._sending = BlockSender(
            self._own_blocks(prepared.space),
            attempt=self._attempt,
            failed=self._later(self._find_corrupt),
        )
        events = ParityEvents(
            forward=self._forward, window=self._tell_window, full=self._later(self._full)
        )
        self.fill = self._filled(self._vault, events)
        crash_point("smp.protect.opened")
        self.fill.start()
        self._send()

    # --- bytes -------------------------------------------------------------------------------

    def _prepare(self, record: ParityRecord, *, needs_memory: bool) -> Prepared:
        """In a job.

        Raises:
            MemoryTooSmall: there is no memory for a vault.
            LayoutUnknown, SnapshotCorrupt: a slot of this node is not what was sealed.
        """
        shards = self._shards
        pieces = {int(rank): shard.layout.pieces for rank, shard in shards.shards.items()}
        space = StripeSpace(record.own, pieces, record.block_bytes)
        mirror = mirror_parts(shards, record)
        return Prepared(make_vault(record) if needs_memory else None, space, mirror)

    def _filled(self, vault: ParityRegion, events: ParityEvents) -> ParityWriter:
        tools = self._tools
        return ParityWriter(
            vault, tools.codec, run=tools.run, group=self._group.group_id, events=events
        )

    def _block_stream(self, sending: BlockSender, place: int) -> BlockStream:
        return BlockStream(sending, place)

    def _own_blocks(self, space: StripeSpace) -> LocalBlocks:
        group = self._group
        return LocalBlocks(
            shards=self._shards,
            space=space,
            stripes=Stripes(len(group.nodes), group.parity, self._plan.block_bytes),
            of=StripeId(self._tools.run, self._shards.version, group.group_id, 0),
            made_in=Generation(group.generation),
            place=group.place,
        )

    # --- how it ends -------------------------------------------------------------------------

    def _full(self) -> None:
        if self._is_stopped or self._vault is None:
            return
        self._vault.mark(ParityRegionState.COMPLETE)
        crash_point("smp.protect.stored")
        self._events.stored()

    def _fail(self, why: str) -> None:
        if not self._is_stopped:
            self._events.unable(why)

    def _find_corrupt(self, why: str) -> None:
        if not self._is_stopped:
            self._events.corrupt(why)

    # --- out ---------------------------------------------------------------------------------

    def _send(self) -> None:
        """Send to each node what it has room for by now."""
        group, sending = self._group, self._sending
        if sending is None or self._is_stopped:
            return
        for place, (plan_id, below) in self._windows.items():
            if plan_id != self._plan.id:
                self._fail(f"node {group.nodes[place].node_id} goes by another plan")
                return
            link = self._tools.peers.link(group.nodes[place], PROTECT)
            if place in group.mirrors_at and place not in self._mirrored:
                self._mirrored.add(place)
                link.add(MirrorStream(sending, self._mirror))
            # Its rows go on to the other parity nodes, whose vaults must be ready by then.
            if any(other not in self._windows for other in group.parity_places(place)):
                continue
            stream = self._streams.get(place)
            if stream is None:
                stream = self._streams[place] = self._block_stream(sending, place)
                link.add(stream)
            stream.let(below)
            link.wake()

    # --- called in threads of links ------------------------------------------------------------

    def _later(self, act: Callable[..., None]) -> Callable[..., None]:
        return lambda *args: self._tools.jobs.post(partial(act, *args))

    def _forward(self, out: OutgoingRow, release: Callable[[], None]) -> None:
        at = self._shards.version
        body = t.BlockData(at.generation, at.step, self._attempt, out.header)
        link = self._tools.peers.find(self._group.nodes[out.place].node_id, PROTECT)
        if link is None or self._is_stopped:
            release()
        else:
            link.tell(OutgoingFrame(body, [out.row], release=release))

    def _tell_window(self, below: int) -> None:
        at = self._shards.version
        body = t.RoundOpened(at.generation, at.step, self._attempt, self._plan.id, below)
        for place in self._group.others:
            link = self._tools.peers.find(place.node_id, PROTECT)
            if link is not None and not self._is_stopped:
                link.tell(OutgoingFrame(body))
