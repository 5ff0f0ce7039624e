"""One SMP: its own code, over memory and links of the simulation.

`CommitCoordinator`, `Protector`, `ProtectionRounds`, `Exchange`, `ParityStore`, `ArenaStore`,
`RestoreCoordinator` and `PeerDispatch` are those of `ftrun/smp`. This module simulates the layers
below them: timers and jobs in virtual time, an exchange of whole shards instead of blocks, and
reads of a version for ranks that did not take it.
"""

from collections import deque
from collections.abc import Callable, Iterable
from functools import cache
from queue import SimpleQueue
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ftrun.erasure.codec import Codec, choose_codec
from ftrun.erasure.fragments import FragmentHeader, StripeId, block_digest, pack
from ftrun.errors import FetchFailed, FragmentRefused, LayoutUnknown, SnapshotCorrupt
from ftrun.ids import Generation, Rank, RunId, Version, version
from ftrun.smp.jobs import Steps, Wait
from ftrun.smp.memory.commits import CommitCoordinator
from ftrun.smp.memory.parity_store import ParityStore
from ftrun.smp.peer_link import OutgoingFrame
from ftrun.smp.redundancy.block_sender import BlockSender
from ftrun.smp.redundancy.coordinator import Engines, RedundancyCoordinator
from ftrun.smp.redundancy.exchange import Exchange
from ftrun.smp.redundancy.group import LocalGroup, group_of, protecting_of, stripes_of
from ftrun.smp.redundancy.parity_writer import OutgoingRow
from ftrun.smp.restore.downloader import BLOCK, PIECE, DownloadItem
from ftrun.smp.restore.lost_node import LostNode, LostNodeRestore
from ftrun.smp.restore.lost_ranks import LostRanks
from ftrun.wire.cluster import transfer as t
from ftrun.wire.messages import smp as smp_messages
from ftrun.wire.messages.smp import BeginGeneration, PreviousGroup
from ftrun.wire.shared_memory.pages import CommandField
from ftrun.wire.shared_memory.parity_region import ParityRecord
from simulation import memory
from simulation.links import Peers
from simulation.memory import (
    BLOCK_BYTES,
    BLOCKS_PER_RANK,
    STATE_BYTES,
    Arena,
    ArenaMaps,
    Arenas,
    FakeParityRegion,
    HeldShards,
)

if TYPE_CHECKING:
    from simulation.node import Node
    from simulation.world import World

RETRY_S = 0.5
FETCH_FOR_S = 4.0
TICK_S = 0.5
"""Interval at which a generator checks whether waiting is still useful; the real one is shorter."""
RUN = RunId("run")


class Page:
    """As in `ftrun.wire.shared_memory.pages`; it exists as long as the agent or a rank does."""

    def __init__(self, restored: Version | None, kept: Version | None) -> None:
        self._words = [0] * len(CommandField)
        kept = kept if kept is not None else version(-1, -1)
        self.set(CommandField.RETAINED_GENERATION, kept.generation)
        self.set(CommandField.RETAINED_STEP, kept.step)
        at = restored if restored is not None else version(-1, -1)
        self.set(CommandField.COMMITTED_GENERATION, at.generation)
        self.set(CommandField.COMMITTED_STEP, at.step)
        for word in (
            *("ABANDONED_STEP", "COMMITTED_IN", "PROTECTING_STEP", "TAKE_FROM", "CAPTURE_FROM"),
        ):
            self.set(CommandField[word], -1)

    def get(self, at: CommandField) -> int:
        return self._words[at]

    def set(self, at: CommandField, value: int) -> None:
        self._words[at] = value

    @property
    def committed(self) -> tuple[int, int] | None:
        """As `WorkerGroup.committed`."""
        found = (self.get(CommandField.COMMITTED_GENERATION), self.get(CommandField.COMMITTED_STEP))
        return found if found[1] >= 0 else None

    def add(self, at: CommandField, value: int) -> None:
        self._words[at] += value


class Jobs:
    """Work takes a little time; its result runs in the server's thread, as all else does."""

    def __init__(self, smp: "Smp") -> None:
        self._smp = smp
        self._lanes: dict[str, deque[Callable[[], Callable[[], None]]]] = {}
        """Pending work of each lane; the first item is in progress."""

    def submit(self, lane: str, work: Callable[[], Callable[[], None]], *, failed: object) -> None:
        waiting = self._lanes.setdefault(lane, deque())
        waiting.append(work)
        if len(waiting) == 1:
            self._begin(waiting)

    def _begin(self, waiting: deque[Callable[[], Callable[[], None]]]) -> None:
        self._smp.later(0.001 + 0.004 * self._smp.random.random(), self._work, waiting)

    def _work(self, waiting: deque[Callable[[], Callable[[], None]]]) -> None:
        finish = waiting[0]()
        if self._smp.random.random() < 0.2:
            self._smp.later(0.01 * self._smp.random.random(), self._end, waiting, finish)
        else:
            self._end(waiting, finish)

    def _end(
        self, waiting: deque[Callable[[], Callable[[], None]]], finish: Callable[[], None]
    ) -> None:
        waiting.popleft()
        if waiting:
            self._begin(waiting)
        finish()

    def post(self, finish: Callable[[], None]) -> None:
        self._smp.run(finish)

    def repeat(self, interval_s: float, poll: Callable[[], None]) -> Callable[[], None]:
        state = SimpleNamespace(is_over=False)

        def turn() -> None:
            if not state.is_over:
                poll()
                self._smp.later(interval_s, turn)

        self._smp.later(interval_s, turn)
        return lambda: setattr(state, "is_over", True)


class Codecs:
    """The real codecs, created once."""

    def get(self, k: int, m: int) -> Codec:
        return _codec(k, m)

    def problem(self, codec: object) -> str:
        return ""


class Watch:
    """Compares replicas on one node; the simulation has none."""

    def __init__(self, *_: object) -> None:
        pass

    def begin(self, *_: object, **__: object) -> None:
        pass

    def contents_of(self, *_: object) -> None:
        pass

    def statement(self, *_: object) -> int:
        return 0

    def decide(self, **_: object) -> None:
        pass

    def poll(self, *_: object) -> None:
        pass


# --- an exchange of whole shards --------------------------------------------------------------


class WholeExchange(Exchange):
    """One attempt at one version: each node sends its state to each other node of the group."""

    _shards: HeldShards

    def _prepare(self, record: ParityRecord, *, needs_memory: bool) -> tuple[Any, Any, Any]:
        ranks = [rank.rank for rank in record.own.ranks]
        raw = _bytes(self._shards.state(ranks))
        region = FakeParityRegion(self._tools.peers.smp.node.memory) if needs_memory else None
        return region, SimpleNamespace(shards=self._shards), [raw]

    def _filled(self, region: FakeParityRegion) -> "WholeFill":
        full = self._later(self._full)
        return WholeFill(region, self._group, self._forward, self._report_window, full)

    def _block_stream(self, sending: BlockSender, position: int) -> "WholeStream":
        return WholeStream(sending, self._mirror[0])


class WholeStream:
    """This node's state, sent once."""

    def __init__(self, sending: BlockSender, raw: bytes) -> None:
        self._sending = sending
        self._raw = raw
        self._is_sent = False
        self._may_send = False

    @property
    def is_over(self) -> bool:
        return self._sending.is_stopped or self._is_sent

    def let(self, below: int) -> None:
        self._may_send |= below > 0

    def take(self) -> OutgoingFrame | None:
        if self.is_over or not self._may_send:
            return None
        self._is_sent = True
        at = self._sending.blocks.shards.version
        body = t.BlockData(at.generation, at.step, self._sending.attempt, b"state")
        return OutgoingFrame(body, [self._raw])


class WholeFill:
    """A parity region that is being filled.

    If m > 1, a node also waits for a message from the nodes that gather for it, as for rows of
    parity.
    """

    num_bytes = STATE_BYTES

    def __init__(
        self,
        region: FakeParityRegion,
        group: LocalGroup,
        forward: Callable[..., None],
        window: Callable[[int], None],
        full: Callable[[], None],
    ) -> None:
        record = region.record
        assert record is not None
        self._region = region
        self._record = record
        self._group = group
        self._forward, self._window, self._full = forward, window, full
        self._is_active = True
        count = len(group.nodes)
        self._blocks = {position for position in range(count) if position != group.position}
        self._rows = {(group.position - back) % count for back in range(1, group.parity)}
        self._mirrors = {position for position, _ in record.mirrors}

    @property
    def missing(self) -> int:
        return len(self._blocks) + len(self._rows) + len(self._mirrors)

    def start(self) -> None:
        self._window(1)
        if not self.missing:
            self._full()

    def stop(self) -> None:
        self._is_active = False

    def take_block(self, sender: int, name: str, header: bytes, payload: memoryview) -> None:
        if not self._is_active:
            return
        if header == b"row":
            self._rows.discard(sender)
        elif sender not in self._blocks:
            raise FragmentRefused(what=f"a block of {name}", reason="it came before")
        else:
            self._blocks.discard(sender)
            state = int.from_bytes(payload, "little")
            self._region.given[name] = self._region.digests[name] = state
            if not self._blocks:
                self._send_on()
        self._count()

    def mirror_space(self, position: int) -> int:
        return STATE_BYTES if position in dict(self._record.mirrors) else 0

    def take_mirror(self, sender: int, payload: bytearray, digest: int) -> None:
        if self._is_active:
            self._mirrors.discard(sender)
            self._region.mirrored.add(sender)
            self._count()

    def _send_on(self) -> None:
        for position in self._group.parity_positions(self._group.position):
            out = OutgoingRow(position, b"row", bytearray(STATE_BYTES))
            self._forward(out, lambda: None)

    def _count(self) -> None:
        if not self.missing:
            self._full()


@cache
def _codec(k: int, m: int) -> Codec:
    return choose_codec(k, m)


def _bytes(state: int) -> bytes:
    return (state & (1 << 64) - 1).to_bytes(STATE_BYTES, "little")


# --- restored versions ------------------------------------------------------------------------


class Served:
    """The restored version, in the form in which this node can send it to others."""

    def __init__(
        self,
        run: int,
        wanted: Version,
        *,
        maps: ArenaMaps,
        parity_store: ParityStore,
        fds: Any,
        **_: object,
    ) -> None:
        self.version = wanted
        self._run = run
        self._maps = maps
        self._parity_store = parity_store
        self._fds = fds

    def take_in(self, fds: Any) -> None:
        self._fds = fds

    def close(self) -> None:
        pass

    @property
    def shards(self) -> HeldShards:
        return self._maps.hold(self._fds, self.version)

    def region(self, ask: t.FetchRequest) -> tuple[FakeParityRegion, ParityRecord]:
        found = self._parity_store.find(version(ask.generation, ask.step), ask.protected_in)
        record = found.record if found is not None else None
        if record is None or group_of(record).id != ask.group:
            raise LayoutUnknown("this node has no whole part of it")
        return found, record

    def mirror(self, ask: t.GetMirror) -> list[bytes]:
        """The digest of a node's state, like the digest tables in a mirror."""
        region, record = self.region(ask)
        member = record.members[ask.position]
        if ask.position == record.position:
            return [_bytes(self.shards.state(member.ranks))]
        if ask.position not in region.mirrored:
            raise LayoutUnknown(f"the mirror of place {ask.position} is not here")
        if region.mirror(ask.position) is None:
            raise SnapshotCorrupt(what=f"mirror of place {ask.position}", piece=0, pieces=1)
        return [_bytes(region.digests[member.node_id])]

    def piece(self, digest: int) -> bytes:
        for rank, slot in self.shards.slots.items():
            if slot.digest == digest:
                return _bytes(self.shards.state([rank]))
        raise LayoutUnknown("no piece with this digest is here")

    def unit(self, ask: t.GetBlock) -> tuple[bytes, list[bytes]]:
        region, record = self.region(ask)
        stripes = stripes_of(record)
        if stripes.block_of(record.position, ask.stripe) is None:
            return self.row(region, record, ask.stripe)
        raw = _bytes(self.shards.state(record.members[record.position].ranks))
        return self._header(record, ask.stripe, raw), [raw]

    def row(
        self, region: FakeParityRegion, record: ParityRecord, stripe: int
    ) -> tuple[bytes, list[bytes]]:
        """Parity of the state that others have sent."""
        stripes = stripes_of(record)
        codec = Codecs().get(stripes.k, stripes.m)
        row = bytearray(record.block_bytes)
        parity_row = stripes.index(stripe, record.position) - stripes.k
        if parity_row < 0:
            raise LayoutUnknown(f"no parity of stripe {stripe} belongs here")
        for at, position in enumerate(stripes.senders(stripe, record.coded_bytes)):
            name = record.members[position].node_id
            if not memory.is_good(region.given.get(name), region.digests.get(name)):
                raise SnapshotCorrupt(what=f"parity of stripe {stripe}", piece=0, pieces=1)
            block = bytearray(record.block_bytes)
            block[:STATE_BYTES] = _bytes(region.given[name])
            codec.update(stripes.index(stripe, position), block, parity_row, row, first=not at)
        return self._header(record, stripe, row), [row]

    def _header(self, record: ParityRecord, stripe: int, raw: bytes | bytearray) -> bytes:
        header = FragmentHeader(
            StripeId(self._run, record.version, group_of(record).id, stripe),
            Generation(record.protected_in),
            stripes_of(record).index(stripe, record.position),
            block_digest(raw),
        )
        return pack(header)


class PreviousShards:
    """Ranks that did not take the version read it in `Smp.read_previous`."""

    def __init__(self, world: Any, fetch: object, *_: object) -> None:
        self.world, self.fetch = world, fetch


class Fetch(LostRanks):
    """Sources of slots. Without a protection, the nodes' inventories give them."""

    def _opened(self, raw: bytearray, lost: LostNode) -> int:
        return int.from_bytes(raw, "little")

    def _begin(self, lost: LostNode, mirror: int, fds: dict[Rank, Arena]) -> "WholeWork":
        for rank in lost.ranks:
            fds[rank] = self._arena(rank)
        return WholeWork(lost, mirror, fds, self._job.notice)

    def _close(self, fds: dict[Rank, Arena]) -> None:
        fds.clear()

    def _copy_slots(self, lost: LostNode) -> Steps[dict[Rank, Arena]]:
        smp, job = self._fetch.rpc.runner.smp, self._job
        give_up_s = smp.world.now_s + FETCH_FOR_S
        yield Wait(SimpleQueue(), 0.3 * smp.random.random())
        while (state := smp.state_of(job.wanted, lost.ranks, [lost.group])) is None:
            if smp.world.now_s > give_up_s:
                raise FetchFailed(lost.missing("its slot", []))
            yield Wait(SimpleQueue(), RETRY_S)
        made = {rank: self._arena(rank) for rank in lost.ranks}
        for arena in made.values():
            arena.seal(job.wanted, state)
        return made

    def _arena(self, rank: Rank) -> Arena:
        return Arena(rank, self._job.world_size, self._fetch.rpc.runner.smp.memory.removed)


class WholeWork(LostNodeRestore):
    """The state of one lost node in transfer: from its owner, or in blocks that are rebuilt."""

    def __init__(
        self,
        lost: LostNode,
        digest: int,
        arenas: dict[Rank, Arena],
        notice: Callable[[str], None],
    ) -> None:
        self._lost = lost
        self._digest = digest
        self._arenas = arenas
        self._notice = notice
        self._room = bytearray(STATE_BYTES)
        self._blocks: dict[int, DownloadItem] = {}

    def items(self) -> list[DownloadItem]:
        owner = self._lost.owner
        if owner is None:
            return self._block_items()
        sources, view = deque([owner.node_id]), memoryview(self._room)
        return [DownloadItem(PIECE, self._digest, STATE_BYTES, [view], sources, self._digest, True)]

    def _block_items(self) -> list[DownloadItem]:
        lost = self._lost
        stripes = lost.protection.stripes(BLOCK_BYTES)
        for block in range(BLOCKS_PER_RANK * len(lost.group.nodes[lost.position].ranks)):
            stripe = stripes.stripe_of(lost.position, block)
            keepers = [at for at in stripes.parity_nodes(stripe) if at in lost.alive_positions]
            names = deque(lost.group.nodes[at].node_id for at in keepers)
            room = memoryview(bytearray(BLOCK_BYTES))
            self._blocks[block] = DownloadItem(BLOCK, stripe, BLOCK_BYTES, [room], names)
        return list(self._blocks.values())

    def _copy_twins(self) -> None:
        pass

    def _bad_items(self) -> list[DownloadItem]:
        items = self._blocks.values()
        return [item for item in items if not self._is_good(item.views[0][:STATE_BYTES])]

    def seal(self) -> None:
        raw = self._blocks[0].views[0][:STATE_BYTES] if self._blocks else self._room
        state = int.from_bytes(raw, "little")
        for arena in self._arenas.values():
            arena.seal(self._lost.wanted, state)

    def close(self) -> None:
        pass

    def _is_good(self, raw: memoryview) -> bool:
        return memory.is_good(int.from_bytes(raw, "little"), self._digest)


class Runner:
    """Drives generators in virtual time."""

    def __init__(self, smp: "Smp") -> None:
        self.smp = smp
        self.waiting: dict[int, tuple[Steps[None], Wait]] = {}
        self._count = 0

    def now_s(self) -> float:
        return self.smp.world.now_s

    def start(self, name: str, steps: Steps[None]) -> None:
        self.smp.later(0.001, self._resume, steps, None)

    def poll(self) -> None:
        """An event has occurred: resumes the generators that waited for it."""
        for number, (steps, wait) in list(self.waiting.items()):
            if not wait.events.empty() and self.waiting.pop(number, None) is not None:
                self._resume(steps, wait.events.get())

    def _resume(self, steps: Steps[None], event: object) -> None:
        try:
            wait = steps.send(event)
            while not wait.events.empty():
                wait = steps.send(wait.events.get())
        except StopIteration:
            return
        self._count += 1
        self.waiting[self._count] = (steps, wait)
        if wait.timeout_s is not None:
            self.smp.later(max(wait.timeout_s, TICK_S), self._too_late, self._count)

    def _too_late(self, number: int) -> None:
        found = self.waiting.pop(number, None)
        if found is not None:
            self._resume(found[0], None)


class Smp:
    """One SMP process."""

    def __init__(self, node: "Node", port: int) -> None:
        self.node = node
        self.port = port
        self.is_alive = True
        self.random = node.random
        self.memory = node.memory
        self._inbox: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._is_busy = False
        self.arenas = Arenas(self.memory)
        self.commits = CommitCoordinator(self.arenas, self._send_to_agent)
        self.peers = Peers(self)
        self.runner = Runner(self)
        engines = Engines(
            self.peers,
            ArenaMaps(),
            Codecs(),
            self.runner,
            exchange=WholeExchange,
            lost_ranks=Fetch,
            served=Served,
            previous_shards=PreviousShards,
            replica_watch=Watch,
        )
        self.work = RedundancyCoordinator(
            RUN,
            memory=self.arenas,
            commits=self.commits,
            jobs=Jobs(self),
            send_to_agent=self._send_to_agent,
            engines=engines,
        )
        self.body: BeginGeneration | None = None
        for arena in list(self.memory.arenas):
            self.arenas.add(arena, self.commits.tracker.generation)
        self.memory.map_parity_regions(self.work.parity_store)

    @property
    def world(self) -> "World":
        return self.node.world

    @property
    def generation(self) -> int:
        return int(self.commits.tracker.generation)

    @property
    def committed(self) -> Version | None:
        """Same value as in the command page of this generation."""
        page = self.node.page
        if page is None or page.get(CommandField.COMMITTED_IN) < self.generation:
            return None
        return self.commits.tracker.committed

    # --- threads ------------------------------------------------------------------------------

    def run(self, what: Callable[..., None], *args: Any) -> None:
        """Runs this in the server's thread, after its current work."""
        self._inbox.append((what, args))
        if self._is_busy:
            return
        self._is_busy = True
        try:
            while self._inbox and self.is_alive:
                what, args = self._inbox.popleft()
                what(*args)
                if self.runner.waiting and not self._inbox:
                    self.runner.poll()
        finally:
            self._is_busy = False

    def later(self, delay_s: float, what: Callable[..., None], *args: Any) -> None:
        self.node.later(delay_s, self._fire, what, args)

    def _fire(self, what: Callable[..., None], args: tuple[Any, ...]) -> None:
        if self.is_alive:
            self.run(what, *args)

    def die(self) -> None:
        if self.is_alive:
            self.is_alive = False
            self.peers.die()
            self.memory.smp_died()

    def _send_to_agent(self, body: Any, *, fds: tuple[Any, ...] = ()) -> None:
        match body:
            case smp_messages.ParityRegionCreated():
                if self.node.agent is not None:
                    self.memory.retain_parity_region(body.slot, *fds)
            case smp_messages.ParityRegionFreed():
                if self.node.agent is not None:
                    self.memory.drop_parity_region(body.slot)
            case smp_messages.VersionCommitted():
                self.node.has_committed(version(body.generation, body.step))
            case smp_messages.RestoreReady() if self._is_alone:
                self.node.has_committed(version(body.generation, body.step))
        self.node.reported_by_smp(body)

    # --- the agent ----------------------------------------------------------------------------

    def begin_generation(self, body: BeginGeneration) -> None:
        self.run(self._begin, body)

    @property
    def _is_alone(self) -> bool:
        """This node runs all ranks, and no group protects it."""
        return self.body is not None and not self.body.group and bool(self.body.local_ranks)

    def _begin(self, body: BeginGeneration) -> None:
        self.body = body
        page = self.node.page
        assert page is not None
        self.work.begin_generation(body, protecting_of(body), page)
        committed = self.commits.tracker.committed
        if self._is_alone and committed is not None:
            self.node.has_committed(committed)  # it commits the version from which it starts

    def inventory(self) -> smp_messages.Inventory:
        found: list[smp_messages.Inventory] = []
        body = smp_messages.InventoryRequest(freeze_versions=True)
        self.run(lambda: found.append(self.work.inventory(body)))
        return found[0]

    def void_after(self, newest: Version) -> None:
        self.run(self.work.void_after, newest)

    def commit(self, wanted: Version) -> None:
        self.run(self.commits.commit, wanted)

    def abandon(self, generation: int, step: int) -> None:
        self.run(self.commits.abandon, generation, step)

    def load(self, arenas: Iterable[Arena]) -> None:
        self.run(self.arenas.put_instead, list(arenas), self.commits.tracker.generation)

    # --- workers ------------------------------------------------------------------------------

    def arena_for(self, rank: int) -> Arena:
        """The arena to which a worker of the running generation writes."""
        generation = self.commits.tracker.generation
        size = self.commits.tracker.world_size
        for held in self.arenas.of(Rank(rank)):
            if held.shape.world_size == size:
                again = self.arenas.grant_again(held.shape, generation)
                assert again is not None
                return again.fd
        return self.arenas.add(Arena(rank, size, self.memory.removed), generation).fd

    def sealed(self, rank: int, taken: Version) -> None:
        self.run(self.commits.sealed, Rank(rank), taken)

    def skipped(self, taken: Version) -> None:
        self.run(self.commits.skipped, taken)

    def withdraw(self, rank: int, taken: Version) -> None:
        self.run(self.commits.withdraw, Rank(rank), taken)

    def resend_sealed(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self.run(self.commits.resend_sealed, Rank(rank))

    # --- other nodes' memory --------------------------------------------------------------------

    def read_previous(self, wanted: Version, groups: Iterable[PreviousGroup]) -> int | None:
        """The state that ranks of another world read from the nodes that store the shards."""
        groups = list(groups)
        ranks = [rank for group in groups for node in group.nodes for rank in node.ranks]
        return self.state_of(wanted, ranks, groups)

    def state_of(
        self, wanted: Version, ranks: Iterable[int], groups: Iterable[PreviousGroup]
    ) -> int | None:
        """The state in the shards of these ranks; None if a shard is missing."""
        groups = list(groups)
        states = {self._shard(rank, wanted, groups) for rank in ranks}
        if None in states or not states:
            return None
        # The digest checks what a rank reads. The run checks that all ranks read the same.
        return max(state for state in states if state is not None)

    def _shard(self, rank: int, wanted: Version, groups: list[PreviousGroup]) -> int | None:
        for group in groups:
            held = next((at for at, node in enumerate(group.nodes) if rank in node.ranks), None)
            if held is None:
                continue
            peer = self._peer(group.nodes[held].node_id, group.nodes[held].smp_port)
            state = peer.good_state(wanted, rank) if peer is not None else None
            if state is None:
                state = self._rebuild(held, wanted, group)
            if state is not None:
                return state
        return None

    def _rebuild(self, owner: int, wanted: Version, group: PreviousGroup) -> int | None:
        """A lost node's state, rebuilt from the rest of its group."""
        if group.parity < 1:
            return None
        missing, found, has_mirror = list[bool](), list[int](), False
        for node in group.nodes:
            peer = self._peer(node.node_id, node.smp_port)
            part = peer.good_part(wanted, group) if peer is not None else None
            whole = peer is not None and all(
                peer.good_state(wanted, rank) is not None for rank in node.ranks
            )
            missing.append(part is None or not whole)
            if part is not None and group.nodes[owner].node_id in part.given:
                found.append(part.given[group.nodes[owner].node_id])
                has_mirror |= part.mirror(owner) is not None
        is_tolerated = memory.tolerates(missing, group.parity, is_ring=group.is_ring)
        return found[0] if has_mirror and is_tolerated else None

    def _peer(self, node_id: str, port: int) -> "Smp | None":
        """The SMP of a node, if it is reachable at the known port."""
        if node_id == self.node.node_id:
            return self
        peer = self.node.network.nodes.get(node_id)
        smp = peer.smp if peer is not None else None
        if smp is None or not smp.is_alive or smp.port != port:
            return None
        network, mine = self.node.network, self.node.node_id
        both = network.connects(mine, node_id)
        return smp if both and smp.generation == self.generation else None

    def good_state(self, wanted: Version, rank: int) -> int | None:
        """The content of a slot if it equals what was sealed; a corrupt slot is rejected."""
        for arena in self.memory.arenas:
            slot = arena.find(wanted) if arena.rank == rank else None
            if slot is not None:
                if memory.is_good(slot.state, slot.digest):
                    return slot.state
                self.excluded(rank, wanted)
        return None

    def excluded(self, rank: int, wanted: Version) -> None:
        self.arenas.void(Rank(rank), wanted)
        self.world.trace(self.node.node_id, f"sets its slot of {wanted} aside")

    def good_part(self, wanted: Version, group: PreviousGroup) -> FakeParityRegion | None:
        part = self.work.parity_store.find(wanted, group.generation)
        record = part.record if part is not None else None
        if part is None or record is None:
            return None
        if [one.node_id for one in record.members] != [one.node_id for one in group.nodes]:
            return None
        if all(memory.is_good(part.given[one], part.digests[one]) for one in sorted(part.given)):
            return part
        # As `RedundancyCoordinator._note`: what a read finds damaged is not offered again.
        for position in part.mirrored_positions():
            self.work.parity_store.drop_damaged_mirror(wanted, group.generation, position)
        self.work.parity_store.note_damage(wanted, group.generation)
        self.world.trace(self.node.node_id, f"sets its part of {wanted} aside")
        return None


def as_version(pair: tuple[int, int] | None) -> Version | None:
    return version(*pair) if pair is not None else None
