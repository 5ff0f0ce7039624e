"""Grants capture pools to ranks, if two slots of their state do not fit.

Runs in:  the SMP, in the server's thread; a job allocates the memory.
Takes in: RequestPool of each rank of this node.
Gives:    a pool to each rank, or refusals; POOLED on the command page.
Survives: its own death: workers request pools from the next SMP. What a pool holds is of no use
          without its worker, so no other process holds duplicates.

Rule 1: all ranks of the node capture through pools, or none, because a version needs all ranks.
        The first request sets POOLED, and memory is divided when every rank has requested a pool.
        By then each rank has restored its state, and has left its arena.
Rule 2: an arena with the committed version is kept until a checkpoint of a pool is complete. Until
        then it holds the newest state. After it, a restart must not choose the older version.
Rule 3: pools take at most half of the free memory, less what writing needs, because the training
        shares the rest. A limit of the profile may be used whole.
"""

import logging
import os
from collections.abc import Callable, Mapping
from functools import partial

from ftrun import clock
from ftrun.errors import MemoryTooSmall
from ftrun.ids import Generation, Rank, Version
from ftrun.smp.client import Requester
from ftrun.smp.jobs import Finish, JobLanes
from ftrun.smp.memory.arenas import ArenaStore
from ftrun.snapshot.commit_tracker import CommitTracker
from ftrun.snapshot.layout import PAGE_BYTES
from ftrun.wire.crash_points import crash_point
from ftrun.wire.messages import envelope as messages
from ftrun.wire.messages import worker as worker_messages
from ftrun.wire.shared_memory.pool import LEAST_POOL_BYTES, create_pool

_LANE = "memory-pools"
_FREED_S = 1.0
"""Within this time, agent and stub have closed their descriptors of freed arenas."""

_BUG = messages.Refused("internal error in ftrun; see the SMP's log")
_OVER = messages.Refused("the generation has ended")
_log = logging.getLogger(__name__)


class CapturePools:
    """The pools of one generation.

    Args:
        show: shows the ranks whether they capture through pools.
        changed: called when memory was granted or freed.
        refuse: sends a refusal to all of these requesters.
    """

    def __init__(
        self,
        memory: ArenaStore,
        jobs: JobLanes,
        *,
        tracker: CommitTracker,
        show: Callable[[bool], None],
        changed: Callable[[], None],
        refuse: Callable[[list[Requester], MemoryTooSmall], None],
    ) -> None:
        self.fds: dict[Rank, int] = {}
        self._memory = memory
        self._jobs = jobs
        self._tracker = tracker
        self._show = show
        self._changed = changed
        self._refuse = refuse
        self._waiting: dict[Rank, tuple[Requester, int]] = {}
        """Requests, with the number of bytes that are of use."""
        self._is_making = False
        self.num_ended = 0
        """Increases when captures into earlier pools are of no use any more."""

    @property
    def are_complete(self) -> bool:
        """Whether every rank of this node has a pool."""
        ranks = self._tracker.ranks
        return bool(ranks) and self.fds.keys() >= set(ranks)

    def request(self, requester: Requester, body: worker_messages.RequestPool) -> None:
        rank = Rank(body.rank)
        if rank in self.fds:
            requester.send(worker_messages.PoolGranted(rank), fds=(self.fds[rank],))
            return
        if not self._waiting and not self.fds:
            self._show(True)
        self._waiting[rank] = requester, body.num_bytes
        self._make_if_all_wait()

    def _make_if_all_wait(self) -> None:
        if self._is_making or not self._waiting:
            return
        if not {*self._waiting, *self.fds} >= set(self._tracker.ranks):
            return
        freed = self._memory.free_unless_committed(self._tracker.committed)
        if freed:
            self._changed()
        self._is_making = True
        wanted = {rank: num_bytes for rank, (_, num_bytes) in self._waiting.items()}
        self._jobs.submit(
            _LANE,
            partial(self._make, self._tracker.generation, wanted, wait_s=freed and _FREED_S),
            failed=partial(self._made, self._tracker.generation, {}, None),
        )

    def written(self, complete: Version) -> None:
        """A checkpoint of these pools is complete: free older versions in memory (rule 2)."""
        if self._memory.free_older(complete):
            self._changed()
        crash_point("smp.pool.older_freed")

    def leave(self) -> None:
        """Two slots fit again: the ranks return to snapshots in memory."""
        if self.are_complete:
            _log.info("memory for two slots is free again: the capture pools are freed")
            self.free()
            self._changed()

    def free(self) -> None:
        self._show(False)
        self.num_ended += 1
        for fd in self.fds.values():
            os.close(fd)
        self.fds.clear()
        self._memory.pool_bytes = 0
        for requester, _ in self._waiting.values():
            requester.send(_OVER)
        self._waiting.clear()

    def _make(self, generation: Generation, wanted: Mapping[Rank, int], *, wait_s: float) -> Finish:
        """Runs in a job's thread."""
        clock.sleep(wait_s)
        made: dict[Rank, int] = {}
        try:
            room = self._memory.pool_room(_least_bytes(wanted), max(wanted.values()))
            for rank, num_bytes in wanted.items():
                size = max(min(num_bytes, room // len(wanted) - PAGE_BYTES), PAGE_BYTES)
                made[rank] = create_pool(rank, size // PAGE_BYTES * PAGE_BYTES)
        except (MemoryTooSmall, OSError) as error:
            for fd in made.values():
                os.close(fd)
            refused = error if isinstance(error, MemoryTooSmall) else _refused(error, wanted)
            return partial(self._made, generation, {}, refused)
        return partial(self._made, generation, made, None)

    def _made(
        self, generation: Generation, made: Mapping[Rank, int], error: MemoryTooSmall | None
    ) -> None:
        self._is_making = False
        if generation != self._tracker.generation:
            for fd in made.values():
                os.close(fd)
            self._make_if_all_wait()  # of this generation, whose requests came in the meantime
            return
        waiting, self._waiting = self._waiting, {}
        if error is not None:
            self._show(False)
            self._refuse([requester for requester, _ in waiting.values()], error)
            return
        self.fds.update(made)
        self._memory.pool_bytes = sum(os.fstat(fd).st_size for fd in self.fds.values())
        self._changed()
        crash_point("smp.pool.created")
        for rank, (requester, _) in waiting.items():
            if rank in self.fds:
                requester.send(worker_messages.PoolGranted(rank), fds=(self.fds[rank],))
            else:
                requester.send(_BUG)


def _least_bytes(wanted: Mapping[Rank, int]) -> int:
    """No rank is given less than this, unless a whole slot is smaller."""
    return sum(min(LEAST_POOL_BYTES, num_bytes) for num_bytes in wanted.values())


def _refused(error: OSError, wanted: Mapping[Rank, int]) -> MemoryTooSmall:
    return MemoryTooSmall(
        needed_bytes=_least_bytes(wanted),
        available_bytes=0,
        limit=f"the kernel refused it: {error}",
        state_bytes=max(wanted.values()),
        num_ranks=len(wanted),
    )
