"""Handles the workers' requests for memory: whether a size fits, and arenas.

Runs in:  the SMP, in the server's thread; jobs allocate the pages of arenas.
Takes in: ReserveMemory, PrepareArena and RequestArena.
Gives:    arenas to workers, duplicates of them to the agent, refusals with sizes in bytes, and to
          the agent the bytes that are needed.
Survives: the death of the SMP: an arena being allocated is lost with it, and the worker requests
          one from the next SMP.

Rule 1: the agent gets a duplicate of each arena before the worker does. An SMP that is killed right
        after the grant therefore loses nothing.
Rule 2: at most one arena is being allocated for a rank. An equal request joins it. A request for
        another shape waits until the allocation ends, and the arena is freed then.
Rule 3: an arena that no worker of the running generation has requested is freed when its allocation
        ends.
Rule 4: memory that is prepared for a layout that is not known yet is not an arena. The agent gets a
        duplicate when it becomes one. Until then it ends with the SMP and with its generation.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from ftrun.errors import MemoryTooSmall
from ftrun.ids import Generation, Rank
from ftrun.smp.client import Requester
from ftrun.smp.jobs import Finish, JobLanes
from ftrun.smp.memory.arenas import Allocation, ArenaStore, create
from ftrun.smp.memory.pools import CapturePools
from ftrun.snapshot.commit_tracker import CommitTracker
from ftrun.wire.crash_points import crash_point
from ftrun.wire.messages import envelope as messages
from ftrun.wire.messages import smp as smp_messages
from ftrun.wire.messages import worker as worker_messages
from ftrun.wire.shared_memory.arena import NO_LAYOUT, ArenaShape

NUM_LANES = 4
"""Number of arenas that are allocated at a time; the kernel clears pages at memory bandwidth."""

_BUG = messages.Refused("internal error in ftrun; see the SMP's log")
_NOT_WANTED = messages.Refused("replaced by a later request of this rank")
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Making:
    """One arena being allocated.

    `generation` is the newest in which it was requested, `requesters` are all clients that
    requested it, `waiting` are requests of the same rank for another shape.
    """

    shape: ArenaShape
    generation: Generation
    requesters: list[Requester]
    waiting: list[tuple[Generation, Requester, worker_messages.RequestArena]] = field(
        default_factory=list
    )

    @property
    def rank(self) -> Rank:
        return Rank(self.shape.rank)


class ArenaRequests:
    """The requests of workers, and the arenas being allocated.

    Args:
        is_short: called when memory is refused, to give back memory that is not needed.
        parity_region_bytes: bytes of the parity and mirrors of other nodes that are allocated now.
        show_pooled: shows the ranks whether they capture through pools.
    """

    def __init__(
        self,
        memory: ArenaStore,
        jobs: JobLanes,
        *,
        tracker: CommitTracker,
        send_to_agent: Callable[..., None],
        is_short: Callable[[], None],
        parity_region_bytes: Callable[[], int],
        show_pooled: Callable[[bool], None],
    ) -> None:
        self._memory = memory
        self._jobs = jobs
        self._tracker = tracker
        self._send_to_agent = send_to_agent
        self._is_short = is_short
        self._parity_region_bytes = parity_region_bytes
        self._making: dict[Rank, _Making] = {}
        self._parity_share = 0.0
        self._is_parity_reported = False
        self.pools = CapturePools(
            memory,
            jobs,
            tracker=tracker,
            show=show_pooled,
            changed=self._report_needed,
            refuse=self._refuse,
        )

    def begin(self, parity_share: float) -> None:
        """Begin a generation; `parity_share` is as in `parity_share` of redundancy/group.py."""
        self._parity_share = parity_share
        self._is_parity_reported = False
        self._report_needed()

    def reserve(self, requester: Requester, body: worker_messages.ReserveMemory) -> None:
        """Reply whether two slots of this size fit in addition to the requests of other ranks."""
        try:
            self._memory.reserve(
                Rank(body.rank), body.image_bytes, world_size=self._tracker.world_size
            )
        except MemoryTooSmall as error:
            self._refuse([requester], error)
        else:
            self.pools.leave()
            requester.send(messages.Done())
            self._check_parity()
        self._report_needed()

    def request(self, requester: Requester, body: worker_messages.RequestArena) -> None:
        shape = ArenaShape(
            body.rank, body.world_size, body.image_bytes, body.num_pieces, body.layout_id
        )
        generation, making = self._tracker.generation, self._making.get(Rank(body.rank))
        if making is not None and making.shape == shape:
            making.generation = generation
            making.requesters.append(requester)
            return
        if making is not None:
            making.waiting.append((generation, requester, body))
            return
        arena = self._memory.grant_again(shape, generation)
        if arena is not None:
            # The agent has its descriptor already: from the allocation, from MemoryHandedOver, or
            # because it sent the descriptor with AdoptMemory.
            self._memory.forget_promise(Rank(body.rank))
            self._report_needed()
            requester.send(granted(shape), fds=(arena.fd,))
            return
        try:
            arena = self._memory.divide_prepared(shape, generation)
        except MemoryTooSmall as error:
            self._report_needed()
            self._refuse([requester], error)
            return
        if arena is not None:
            self._grant(shape, arena.fd, [requester])
            return
        self._make(_Making(shape, generation, [requester]))

    def prepare(self, requester: Requester, body: worker_messages.PrepareArena) -> None:
        shape = ArenaShape(body.rank, body.world_size, body.image_bytes, body.num_pieces, NO_LAYOUT)
        rank = Rank(body.rank)
        fd = self._memory.prepared(shape)
        if fd is not None:
            requester.send(granted(shape), fds=(fd,))
        elif rank in self._making or self._memory.of(rank):
            requester.send(messages.Refused("the rank has an arena"))
        else:
            self._make(_Making(shape, self._tracker.generation, [requester]))

    def _make(self, making: _Making) -> None:
        rank, shape = making.rank, making.shape
        try:
            self._memory.promise(rank, shape.total_bytes, image_bytes=shape.image_bytes)
        except MemoryTooSmall as error:
            self._report_needed()
            self._refuse(making.requesters, error)
            return
        self._report_needed()
        self._making[rank] = making
        self._jobs.submit(
            f"memory-{rank % NUM_LANES}",
            partial(self._allocate, making, self._memory.begin_making(shape)),
            failed=partial(self._not_made, making, None),
        )

    def _allocate(self, making: _Making, allocation: Allocation) -> Finish:
        """Runs in a job's thread."""

        def count(num_bytes: int) -> None:
            allocation.num_bytes = num_bytes

        try:
            fd = create(making.shape, count)
        except MemoryTooSmall as error:
            return partial(self._not_made, making, error)
        return partial(self._made, making, fd)

    def _made(self, making: _Making, fd: int) -> None:
        is_prepared = making.shape.layout_id == NO_LAYOUT
        is_replaced = making.waiting and not is_prepared
        if making.generation != self._tracker.generation or is_replaced:
            for requester in making.requesters:
                requester.send(_NOT_WANTED)
            _log.info("rank %d: freed an arena that is no longer requested", making.rank)
            os.close(fd)
        elif is_prepared:
            self._memory.add_prepared(fd, making.shape)
            self._report_needed()
            for requester in making.requesters:
                requester.send(granted(making.shape), fds=(fd,))
        else:
            self._memory.add(fd, making.generation)
            self._grant(making.shape, fd, making.requesters)
        self._end(making)

    def _grant(self, shape: ArenaShape, fd: int, requesters: list[Requester]) -> None:
        """Give a new arena to the agent, and then to the worker."""
        self._send_to_agent(granted(shape), fds=(fd,))
        self._report_needed()
        crash_point("smp.arena.agent_notified")
        for requester in requesters:
            requester.send(granted(shape), fds=(fd,))
        crash_point("smp.arena.granted")

    def _not_made(self, making: _Making, error: MemoryTooSmall | None) -> None:
        if error is not None:
            self._refuse(making.requesters, error)
        else:
            for requester in making.requesters:
                requester.send(_BUG)
        self._end(making)

    def _end(self, making: _Making) -> None:
        del self._making[making.rank]
        self._memory.end_making(making.rank)
        for generation, requester, body in making.waiting:
            if generation == self._tracker.generation:
                self.request(requester, body)
            else:
                requester.send(_NOT_WANTED)

    @property
    def _all_parity_bytes(self) -> int:
        """Upper bound of bytes for other nodes; replicas need no parity."""
        return int(self._parity_share * self._memory.planned_bytes)

    @property
    def _parity_bytes(self) -> int:
        """The part of the upper bound that is still to be allocated."""
        return max(0, self._all_parity_bytes - self._parity_region_bytes())

    def sealed(self, rank: Rank) -> None:
        """Handle a snapshot: the rank has the memory that it needs, and has restored."""
        self._memory.give_back()
        if self._memory.forget_promise(rank):
            self._report_needed()

    def _report_needed(self) -> None:
        self._send_to_agent(
            smp_messages.MemoryNeeded(
                self._memory.unused_bytes,
                self._all_parity_bytes,
                self._memory.pool_bytes if self.pools.are_complete else 0,
                self._memory.num_freed,
            )
        )

    def _check_parity(self) -> None:
        """Report once per generation if the upper bound of the parity may not fit."""
        parity_bytes = self._parity_bytes
        if not parity_bytes or self._is_parity_reported:
            return
        if not self._memory.known_ranks.issuperset(self._tracker.ranks):
            return
        try:
            self._memory.check(parity_bytes)
        except MemoryTooSmall as error:
            self._is_parity_reported = True
            reason = (
                f"the ranks' snapshots fit, but parity for other nodes may not: both need up to "
                f"{error.needed_bytes / 1e6:,.0f} MB more and {error.available_bytes / 1e6:,.0f} "
                f"MB are free ({error.limit}). Without parity the loss of a node loses its state. "
                "Raise this limit, or use --erasure K+M with a larger K or a smaller M"
            )
            _log.warning("%s", reason)
            self._send_to_agent(smp_messages.SmpNotice("memory", reason))

    def _refuse(self, requesters: list[Requester], error: MemoryTooSmall) -> None:
        self._is_short()
        answer = worker_messages.MemoryRefused(
            needed_bytes=error.needed_bytes,
            available_bytes=error.available_bytes,
            limit=error.limit,
            state_bytes=error.state_bytes,
            num_ranks=error.num_ranks,
            parity_bytes=self._parity_bytes,
        )
        for requester in requesters:
            requester.send(answer)


def granted(shape: ArenaShape) -> worker_messages.ArenaGranted:
    return worker_messages.ArenaGranted(rank=shape.rank, layout_id=shape.layout_id)
