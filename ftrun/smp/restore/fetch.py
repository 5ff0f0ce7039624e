"""Fetches the restored version for local ranks that have no slot of it.

Runs in:  the SMP, in a thread of its own for the duration of the fetch. The result is reported to
          the server thread.
Takes in: the group that protected the version, and the present addresses of its nodes.
Gives:    a sealed arena for each such rank, equal in every byte to the lost one; or an error that
          names rank, version, nodes, and what is missing.

The fetch first gets the mirror of the lost node, which lists the location of all other bytes. It
then requests replicas from any node that has a piece with that digest, and blocks from the
survivors, which rebuild them. All these requests run at once. Finally it compares every piece with
the digest table and the table with the mirror, and seals the slot.
"""

import logging
import os
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ftrun.errors import FetchFailed, FtrunError, LayoutUnknown
from ftrun.ids import Generation, Rank, Version
from ftrun.smp.memory.arenas import create
from ftrun.smp.peer_link import OutgoingFrame
from ftrun.smp.redundancy.mirror import Mirror
from ftrun.smp.restore.asking import DownloadSession
from ftrun.smp.restore.bare_fetch import fetch_slot, shape_of
from ftrun.smp.restore.lost_node import LostNode, LostNodeRestore, check_mirror
from ftrun.smp.restore.previous_world import PreviousWorld, PreviousWorldShards
from ftrun.smp.restore.rpc import FetchRpc
from ftrun.smp.waits import Steps, Wait
from ftrun.wire.cluster import transfer as t
from ftrun.wire.crash_points import crash_point
from ftrun.wire.messages.smp import NodeAddress, PreviousGroup
from ftrun.wire.shared_memory.arena import Arena

MAX_MIRROR_BYTES = 1 << 30
_TICK_S = 0.1
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FetchJob:
    """What to fetch.

    Args:
        wanted: the version.
        generation: the running one.
        ranks: the local ranks that have no slot of it.
        groups: the groups that protected it; together they contain all these ranks.
        world_size: of the version.
        own: the address to which other nodes send their answers.
        check: raises MemoryTooSmall if this number of bytes does not fit.
    """

    wanted: Version
    generation: Generation
    ranks: Sequence[Rank]
    groups: Sequence[PreviousGroup]
    world_size: int
    own: NodeAddress
    patience_s: float
    check: Callable[[int], None]


@dataclass(frozen=True, slots=True)
class FetchEvents:
    """Callbacks, run in the thread that fetches.

    Args:
        done: descriptors of sealed arenas by rank, which the receiver closes; and the bytes
            received.
        failed: the reason of the failure, and whether connections to nodes were lost.
        notice: data that was rejected on the way.
    """

    done: Callable[[dict[Rank, int], int], None]
    failed: Callable[[str, bool], None]
    notice: Callable[[str], None]


class Fetcher:
    """One fetch."""

    def __init__(self, order: FetchJob, desk: FetchRpc, events: FetchEvents) -> None:
        self._order = order
        self._desk = desk
        self._events = events
        self._asking = DownloadSession(desk, patience_s=order.patience_s)
        self._bare: PreviousWorldShards | None = None

    def start(self) -> None:
        self._asking.begin("ftrun-fetch", self._run())

    def cancel(self) -> None:
        self._asking.cancel()
        if self._bare is not None:
            self._bare.cancel()

    # --- the fetch thread --- ----------------------------------------------------------------

    def _run(self) -> Steps[None]:
        fds: dict[Rank, int] = {}
        try:
            for lost in self._lost_nodes():
                found = self._fetch_bare(lost) if lost.group.parity < 1 else self._fetch(lost)
                fds.update((yield from found))
        except FtrunError as error:
            self._give_up(fds, str(error))
        except Exception:  # noqa: BLE001
            # This is the main loop of a thread, so a bug must give an answer and not a hang.
            _log.exception("a fetch ended in a bug of ftrun")
            self._give_up(fds, "a bug in ftrun; the SMP's log has it")
        else:
            if self._asking.is_cancelled:
                self._close(fds)
            else:
                self._events.done(fds, self._asking.num_bytes)

    def _lost_nodes(self) -> list[LostNode]:
        """Return the nodes whose state is fetched.

        Raises:
            FetchFailed: no known group has protected one of the ranks.
        """
        order = self._order
        found = [
            LostNode(
                order.wanted,
                group,
                place,
                [Rank(rank) for rank in node.ranks if rank in order.ranks],
                order.own.node_id,
            )
            for group in order.groups
            for place, node in enumerate(group.nodes)
        ]
        missing = set(order.ranks) - {rank for lost in found for rank in lost.ranks}
        if missing:
            raise FetchFailed(
                f"ranks {sorted(missing)}, {order.wanted}: no group is known that has protected it"
            )
        return [lost for lost in found if lost.ranks]

    def _give_up(self, fds: dict[Rank, int], why: str) -> None:
        self._close(fds)
        if not self._asking.is_cancelled:
            self._events.failed(why, self._asking.has_lost)

    def _fetch(self, lost: LostNode) -> Steps[dict[Rank, int]]:
        """Return arenas of the requested ranks of one node.

        Raises:
            FtrunError: the fetch is not possible.
        """
        self._desk.meet(list(lost.group.nodes))
        for node in lost.alive:
            self._desk.tell(node.node_id, OutgoingFrame(t.FetchPeers(lost.alive)))
        mirror = yield from self._mirror(lost)
        crash_point("smp.fetch.mirror_taken")
        fds: dict[Rank, int] = {}
        work: LostNodeRestore | None = None
        try:
            work = self._begin(lost, mirror, fds)
            yield from self._fill(lost, work)
            work.seal()
            crash_point("smp.fetch.sealed")
        except BaseException:
            self._close(fds)
            raise
        finally:
            if work is not None:
                work.close()
        return fds

    # --- bytes -------------------------------------------------------------------------------

    def _opened(self, raw: bytearray, lost: LostNode) -> Mirror:
        """Parse the mirror; raise LayoutUnknown if it is not the mirror of this node."""
        mirror = Mirror(memoryview(raw))
        check_mirror(mirror, lost)
        return mirror

    def _begin(self, lost: LostNode, mirror: Mirror, fds: dict[Rank, int]) -> LostNodeRestore:
        """Create arenas, put their descriptors into `fds`, and copy into them what is on this node.

        Raises:
            FtrunError: the fetch is not possible.
        """
        shapes = {Rank(head.rank): head.shape for head in mirror.head.ranks}
        self._order.check(sum(shapes[rank].total_bytes for rank in lost.ranks))
        arenas: dict[Rank, Arena] = {}
        try:
            for rank in lost.ranks:
                fds[rank] = create(shapes[rank])
                arenas[rank] = Arena(fds[rank], writable=True)
            served = self._desk.served
            held = served.shards if served is not None else None
            return LostNodeRestore(lost, mirror, arenas, held)
        except BaseException:
            for arena in arenas.values():
                arena.close()
            raise

    def _close(self, fds: dict[Rank, int]) -> None:
        for fd in fds.values():
            os.close(fd)
        fds.clear()

    def _fetch_bare(self, lost: LostNode) -> Steps[dict[Rank, int]]:
        """Fetch without parity: copy whole slots from the memory of a node.

        Raises:
            FtrunError: the fetch is not possible.
        """
        yield from ()  # the calls below wait by themselves
        order, served = self._order, self._desk.served
        assert served is not None
        world = PreviousWorld(
            order.wanted, order.groups, order.own, order.own.node_id, order.patience_s
        )
        self._bare = shards = PreviousWorldShards(world, self._desk, served, None)
        self._desk.on_lost(shards.note_lost)
        shapes = {rank: shape_of(shards, rank, order.world_size) for rank in lost.ranks}
        order.check(sum(shape.total_bytes for shape in shapes.values()))
        fds: dict[Rank, int] = {}
        try:
            for rank, shape in shapes.items():
                fds[rank] = fetch_slot(shards, rank, order.wanted, shape)
        except BaseException:
            self._close(fds)
            raise
        return fds

    # --- requests --- ------------------------------------------------------------------------

    def _mirror(self, lost: LostNode) -> Steps[Mirror]:
        """Get the small state of the lost node from one of the nodes that store it.

        Raises:
            FetchFailed: no node can deliver it.
        """
        problems = []
        for node in lost.mirror_holders:
            try:
                raw = yield from self._ask_mirror(lost, node)
                mirror = self._opened(raw, lost)
            except (LayoutUnknown, FetchFailed) as error:
                problems.append(f"{node.node_id}: {error}")
            else:
                return mirror
        raise FetchFailed(lost.missing("its small state", problems))

    def _ask_mirror(self, lost: LostNode, node: NodeAddress) -> Steps[bytearray]:
        sink = _MirrorSink()
        requests = self._desk.requests
        number = requests.open(sink)
        wanted = lost.wanted
        ask = t.GetMirror(
            number,
            wanted.generation,
            wanted.step,
            lost.group_id,
            lost.group.generation,
            place=lost.place,
        )
        now_s = self._desk.runner.now_s
        give_up_s = now_s() + self._order.patience_s
        try:
            self._desk.tell(node.node_id, OutgoingFrame(ask))
            while True:
                refusal = yield Wait(sink.answers, _TICK_S)
                if refusal is not None:
                    return sink.answer(refusal)
                why = self._asking.why_lost(node.node_id)
                if self._asking.is_cancelled or now_s() > give_up_s or why:
                    raise FetchFailed(why or f"silent for {self._order.patience_s:.0f} s")
        finally:
            requests.close(number)

    def _fill(self, lost: LostNode, work: LostNodeRestore) -> Steps[None]:
        """Download all that the mirror does not contain, until every digest matches.

        Raises:
            FetchFailed: no source can deliver an item.
        """
        items = work.items()
        while True:
            failed = yield from self._asking.steps(items, work.question)
            if self._asking.is_cancelled:
                raise FetchFailed("it was given up")
            if failed and not work.has_blocks and all(item.is_coded for item in failed):
                # The other nodes rebuild what the node itself can no longer deliver.
                items = work.block_items()
                continue
            if failed:
                raise FetchFailed(lost.missing(work.describe(failed[0]), failed[0].problems))
            work.copy_twins()
            items = work.bad_items()
            if not items:
                return
            for item in items:
                why = f"{item.source}: what it has rebuilt is not what was captured"
                self._events.notice(f"stripe {item.key}, {lost.wanted}: {why}")
                item.problems.append(why)


class _MirrorSink:
    """The `ResponseSink` of a request for a mirror, whose length only its holder knows."""

    def __init__(self) -> None:
        self._raw: bytearray | None = None
        self._is_here = False
        self.answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        """The reason why the mirror does not arrive; empty if it has arrived."""

    def answer(self, refusal: str) -> bytearray:
        """Return the mirror.

        Raises:
            FetchFailed: it will not arrive.
        """
        if refusal or self._raw is None:
            raise FetchFailed(refusal)
        return self._raw

    def room(self, index: int, num_bytes: int) -> Sequence[memoryview] | None:
        if index or self._is_here or not 0 < num_bytes <= MAX_MIRROR_BYTES:
            return None
        self._raw = bytearray(num_bytes)
        return [memoryview(self._raw)]

    def arrived(self, index: int, header: bytes, digest: int | None) -> None:
        self._is_here = True
        self.answers.put("" if digest is not None else "it has sent no digest")

    def refused(self, index: int, why: str) -> None:
        self.answers.put(why or "it was refused")
