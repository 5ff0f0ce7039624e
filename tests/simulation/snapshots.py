"""One SMP: its own code, over memory and links of the simulation.

`Commits`, `Protector`, `Rounds`, `Exchange`, `Vaults`, `ArenaMemory`, `Restores` and `Receiving`
are those of `ftrun/smp`. Here are the things below them: timers and jobs in virtual time, an
exchange of whole shards instead of blocks, and reads of a version for ranks that did not take it.
"""

from collections import deque
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ftrun.errors import FragmentRefused
from ftrun.ids import Rank, RunId, Version, version
from ftrun.smp.commits import Commits
from ftrun.smp.exchange import Exchange, Prepared
from ftrun.smp.fetcher import FetchEvents, FetchOrder
from ftrun.smp.filling import FillEvents, RowOut
from ftrun.smp.group_work import Engines, GroupWork
from ftrun.smp.links import Frame
from ftrun.smp.protecting import Protecting, protecting_of
from ftrun.smp.sending import Sending
from ftrun.wire import smp_messages
from ftrun.wire import transfer as t
from ftrun.wire.pages import Command
from ftrun.wire.protected import OldGroup
from ftrun.wire.smp_messages import BeginGeneration
from ftrun.wire.vault import VaultRecord
from simulation.links import Peers
from simulation.memory import STATE_BYTES, Arena, ArenaMaps, Arenas, HeldShards, Vault, is_good

if TYPE_CHECKING:
    from simulation.node import Node
    from simulation.world import World

RETRY_S = 0.5
FETCH_FOR_S = 4.0
RUN = RunId("run")


class Page:
    """As in `ftrun.wire.pages`; it lasts as long as the agent or a rank does."""

    def __init__(self, restored: Version | None) -> None:
        self._words = [0] * len(Command)
        at = restored if restored is not None else version(-1, -1)
        self.set(Command.COMMITTED_GENERATION, at.generation)
        self.set(Command.COMMITTED_STEP, at.step)
        for word in (Command.ABANDONED_STEP, Command.COMMITTED_IN):
            self.set(word, -1)
        for word in (Command.PROTECTING_STEP, Command.TAKE_FROM):
            self.set(word, -1)

    def get(self, at: Command) -> int:
        return self._words[at]

    def set(self, at: Command, value: int) -> None:
        self._words[at] = value

    def add(self, at: Command, value: int) -> None:
        self._words[at] += value


class Jobs:
    """Work takes a little time; what it gives is run in the server's thread, as all else is."""

    def __init__(self, smp: "Smp") -> None:
        self._smp = smp

    def submit(self, lane: str, work: Callable[[], Callable[[], None]], *, failed: object) -> None:
        self._smp.later(0.001 + 0.004 * self._smp.random.random(), self._work, work)

    def _work(self, work: Callable[[], Callable[[], None]]) -> None:
        finish = work()
        if self._smp.random.random() < 0.2:
            self._smp.later(0.01 * self._smp.random.random(), finish)
        else:
            finish()

    def post(self, finish: Callable[[], None]) -> None:
        self._smp.run(finish)

    def repeat(self, interval_s: float, look: Callable[[], None]) -> Callable[[], None]:
        state = SimpleNamespace(is_over=False)

        def turn() -> None:
            if not state.is_over:
                look()
                self._smp.later(interval_s, turn)

        self._smp.later(interval_s, turn)
        return lambda: setattr(state, "is_over", True)


class Codecs:
    """Nothing is coded."""

    def get(self, k: int, m: int) -> SimpleNamespace:
        return SimpleNamespace(k=k, m=m)

    def problem(self, codec: object) -> str:
        return ""


class Watch:
    """Compares replicas on one node; there are none."""

    def __init__(self, *_: object) -> None:
        pass

    def look(self, *_: object) -> None:
        pass


# --- an exchange of whole shards --------------------------------------------------------------


class WholeExchange(Exchange):
    """One attempt at one version: each node sends its state to each other node of the group."""

    _shards: HeldShards

    def _prepare(self, record: VaultRecord, *, needs_memory: bool) -> Prepared:
        ranks = [rank.rank for rank in record.own.ranks]
        raw = _bytes(self._shards.state(ranks))
        vault = Vault(self._tools.peers.smp.node.memory) if needs_memory else None
        return Prepared(vault, None, [raw])

    def _filled(self, vault: Vault, events: FillEvents) -> "WholeFill":
        return WholeFill(vault, self._group, events)

    def _own_blocks(self, space: object) -> SimpleNamespace:
        return SimpleNamespace(shards=self._shards)

    def _block_stream(self, sending: Sending, place: int) -> "WholeStream":
        return WholeStream(sending, self._mirror[0])


class WholeStream:
    """This node's state, once."""

    def __init__(self, sending: Sending, raw: bytes) -> None:
        self._sending = sending
        self._raw = raw
        self._is_sent = False
        self._may_send = False

    @property
    def is_over(self) -> bool:
        return self._sending.is_stopped or self._is_sent

    def let(self, below: int) -> None:
        self._may_send |= below > 0

    def take(self) -> Frame | None:
        if self.is_over or not self._may_send:
            return None
        self._is_sent = True
        at = self._sending.blocks.shards.version
        body = t.BlockOf(at.generation, at.step, self._sending.attempt, b"state")
        return Frame(body, [self._raw])


class WholeFill:
    """A vault that is being filled.

    Where m > 1, a node also waits for word of those that gather for it, as for rows of parity.
    """

    num_bytes = STATE_BYTES

    def __init__(self, vault: Vault, group: Protecting, events: FillEvents) -> None:
        record = vault.record
        assert record is not None
        self._vault = vault
        self._record = record
        self._group = group
        self._events = events
        self._is_active = True
        count = len(group.nodes)
        self._blocks = {place for place in range(count) if place != group.place}
        self._rows = {(group.place - back) % count for back in range(1, group.parity)}
        self._mirrors = {place for place, _ in record.mirrors}

    @property
    def missing(self) -> int:
        return len(self._blocks) + len(self._rows) + len(self._mirrors)

    def start(self) -> None:
        self._events.window(1)
        if not self.missing:
            self._events.full()

    def stop(self) -> None:
        self._is_active = False

    def take_block(self, sender: int, name: str, header: bytes, payload: memoryview) -> None:
        if not self._is_active:
            return
        if header == b"row":
            self._rows.discard(sender)
        elif sender not in self._blocks:
            raise FragmentRefused(what=f"a block of {name}", why="it came before")
        else:
            self._blocks.discard(sender)
            state = int.from_bytes(payload, "little")
            self._vault.given[name] = self._vault.digests[name] = state
            if not self._blocks:
                self._send_on()
        self._count()

    def mirror_room(self, place: int) -> int:
        return STATE_BYTES if place in dict(self._record.mirrors) else 0

    def take_mirror(self, sender: int, payload: bytearray, digest: int) -> None:
        if self._is_active:
            self._mirrors.discard(sender)
            self._vault.mirrored.add(sender)
            self._count()

    def _send_on(self) -> None:
        for place in self._group.parity_places(self._group.place):
            out = RowOut(place, b"row", bytearray(STATE_BYTES))
            self._events.forward(out, lambda: None)

    def _count(self) -> None:
        if not self.missing:
            self._events.full()


def _bytes(state: int) -> bytes:
    return (state & (1 << 64) - 1).to_bytes(STATE_BYTES, "little")


# --- what is restored -------------------------------------------------------------------------


class Served:
    """The restored version, for others."""

    def __init__(self, run: int, wanted: Version, **_: object) -> None:
        self.version = wanted

    def take_in(self, fds: object) -> None:
        pass

    def close(self) -> None:
        pass


class OldShards:
    """Ranks that did not take the version read it in `Smp.read_old`."""

    def __init__(self, world: Any, *_: object) -> None:
        self.world = world

    def note_lost(self, node_id: str, why: str) -> None:
        pass

    def cancel(self) -> None:
        pass


class Fetch:
    """Slots of the restored version, from other nodes: tried until the patience is over."""

    def __init__(self, order: FetchOrder, desk: Any, events: FetchEvents) -> None:
        self._order = order
        self._events = events
        self._smp: Smp = desk._peers.smp
        self._is_cancelled = False
        self._since_s = self._smp.world.now_s

    def start(self) -> None:
        self._smp.later(0.02 + 0.3 * self._smp.random.random(), self._try)

    def cancel(self) -> None:
        self._is_cancelled = True

    def _try(self) -> None:
        if self._is_cancelled:
            return
        order, smp = self._order, self._smp
        state = smp.state_of(order.wanted, order.ranks, order.groups)
        if state is not None:
            made = {rank: Arena(rank, order.world_size, smp.memory.removed) for rank in order.ranks}
            for arena in made.values():
                arena.seal(order.wanted, state)
            self._events.done(made, STATE_BYTES)
        elif smp.world.now_s - self._since_s < FETCH_FOR_S:
            smp.later(RETRY_S, self._try)
        else:
            self._events.failed(f"{order.wanted} cannot be fetched", False)


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
        self.commits = Commits(self.arenas, self._tell_agent)
        self.peers = Peers(self)
        engines = Engines(
            self.peers,
            ArenaMaps(),
            Codecs(),
            exchange=WholeExchange,
            fetcher=Fetch,
            served=Served,
            old_shards=OldShards,
            replica_watch=Watch,
        )
        self.work = GroupWork(
            RUN,
            memory=self.arenas,
            commits=self.commits,
            jobs=Jobs(self),
            tell_agent=self._tell_agent,
            engines=engines,
        )
        self.body: BeginGeneration | None = None
        for arena in list(self.memory.arenas):
            self.arenas.add(arena, self.commits.tracker.generation)
        self.memory.map_vaults(self.work.vaults)

    @property
    def world(self) -> "World":
        return self.node.world

    @property
    def generation(self) -> int:
        return int(self.commits.tracker.generation)

    @property
    def committed(self) -> Version | None:
        """As the command page shows it, in this generation."""
        page = self.node.page
        if page is None or page.get(Command.COMMITTED_IN) < self.generation:
            return None
        return self.commits.tracker.committed

    # --- threads ------------------------------------------------------------------------------

    def run(self, what: Callable[..., None], *args: Any) -> None:
        """Do this in the server's thread, after what it does now."""
        self._inbox.append((what, args))
        if self._is_busy:
            return
        self._is_busy = True
        try:
            while self._inbox and self.is_alive:
                what, args = self._inbox.popleft()
                what(*args)
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

    def _tell_agent(self, body: Any, *, fds: tuple[Any, ...] = ()) -> None:
        match body:
            case smp_messages.VaultMade():
                if self.node.agent is not None:
                    self.memory.keep_vault(body.slot, *fds)
            case smp_messages.VaultFreed():
                if self.node.agent is not None:
                    self.memory.drop_vault(body.slot)
            case smp_messages.VersionCommitted():
                self.node.has_committed(version(body.generation, body.step))
        self.node.told_by_smp(body)

    # --- the agent ----------------------------------------------------------------------------

    def begin_generation(self, body: BeginGeneration) -> None:
        self.run(self._begin, body)

    def _begin(self, body: BeginGeneration) -> None:
        self.body = body
        page = self.node.page
        assert page is not None
        self.work.begin_generation(body, protecting_of(body), page)
        committed = self.commits.tracker.committed
        if not body.group and body.local_ranks and committed is not None:
            self.node.has_committed(committed)  # alone, it commits what it begins with

    def inventory(self) -> smp_messages.Inventory:
        found: list[smp_messages.Inventory] = []
        body = smp_messages.TakeInventory(stand_still=True)
        self.run(lambda: found.append(self.work.inventory(body)))
        return found[0]

    def void_after(self, newest: Version) -> None:
        self.run(self.work.void_after, newest)

    def commit(self, wanted: Version) -> None:
        self.run(self.commits.commit, wanted)

    def abandon(self, generation: int, step: int) -> None:
        self.run(self.commits.abandon, generation, step)

    def load(self, arenas: Iterable[Arena]) -> None:
        """A checkpoint was read into these."""
        self.run(self.arenas.put_instead, list(arenas), self.commits.tracker.generation)

    # --- workers ------------------------------------------------------------------------------

    def arena_for(self, rank: int) -> Arena:
        """The one that a worker of the running generation writes to."""
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

    def hear_again(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self.run(self.commits.hear_again, Rank(rank))

    # --- other nodes' memory --------------------------------------------------------------------

    def read_old(self, wanted: Version, groups: Iterable[OldGroup]) -> int | None:
        """The state, read by ranks of another world from wherever its shards lie."""
        groups = list(groups)
        ranks = [rank for group in groups for node in group.nodes for rank in node.ranks]
        return self.state_of(wanted, ranks, groups)

    def state_of(
        self, wanted: Version, ranks: Iterable[int], groups: Iterable[OldGroup]
    ) -> int | None:
        """The state in the shards of these ranks; None if one is not had."""
        groups = list(groups)
        states = {self._shard(rank, wanted, groups) for rank in ranks}
        if None in states or not states:
            return None
        # What a rank reads is the digest's business; that all read the same is the run's.
        return max(state for state in states if state is not None)

    def _shard(self, rank: int, wanted: Version, groups: list[OldGroup]) -> int | None:
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

    def _rebuild(self, owner: int, wanted: Version, group: OldGroup) -> int | None:
        """A lost node's state from the rest of its group."""
        if group.parity < 1:
            return None
        missing, found, has_mirror = 0, [], False
        for node in group.nodes:
            peer = self._peer(node.node_id, node.smp_port)
            part = peer.good_part(wanted, group) if peer is not None else None
            whole = peer is not None and all(
                peer.good_state(wanted, rank) is not None for rank in node.ranks
            )
            if part is None or not whole:
                missing += 1
            if part is not None and group.nodes[owner].node_id in part.given:
                found.append(part.given[group.nodes[owner].node_id])
                has_mirror |= owner in part.mirrored
        return found[0] if has_mirror and missing <= group.parity else None

    def _peer(self, node_id: str, port: int) -> "Smp | None":
        """The SMP of a node, where it is reached at the port that is known."""
        if node_id == self.node.node_id:
            return self
        peer = self.node.neighbour(node_id)
        smp = peer.smp if peer is not None else None
        if smp is None or not smp.is_alive or smp.port != port:
            return None
        network, mine = self.node.network, self.node.node_id
        both = network.passes(mine, node_id) and network.passes(node_id, mine)
        return smp if both and smp.generation == self.generation else None

    def good_state(self, wanted: Version, rank: int) -> int | None:
        """What a slot holds, if that is what was sealed; a corrupt one is set aside."""
        for arena in self.memory.arenas:
            slot = arena.find(wanted) if arena.rank == rank else None
            if slot is not None:
                if is_good(slot.state, slot.digest):
                    return slot.state
                self.set_aside(rank, wanted)
        return None

    def set_aside(self, rank: int, wanted: Version) -> None:
        self.arenas.void(Rank(rank), wanted)
        self.world.trace(self.node.node_id, f"sets its slot of {wanted} aside")

    def good_part(self, wanted: Version, group: OldGroup) -> Vault | None:
        part = self.work.vaults.find(wanted, group.generation)
        record = part.record if part is not None else None
        if part is None or record is None:
            return None
        if [one.node_id for one in record.members] != [one.node_id for one in group.nodes]:
            return None
        if all(is_good(part.given[one], part.digests[one]) for one in sorted(part.given)):
            return part
        return None


def as_version(pair: tuple[int, int] | None) -> Version | None:
    return version(*pair) if pair is not None else None


