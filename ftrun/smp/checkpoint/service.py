"""Writes and loads checkpoints for the agent, in parallel with all other work.

Runs in:  the SMP: requests and answers in the server thread, work in the threads of the lanes.
Takes in: WriteCheckpoint and LoadCheckpoint.
Gives:    their answers; the arenas of what was loaded.

Two checkpoints are written at the same time, each in a lane with its own memory for copies. A lane
that reads slots of a version copies them before they are overwritten. A third order waits in a
lane, so its slots may be overwritten; the agent sends none.
"""

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from ftrun import clock
from ftrun.config.profile import MEMORY_LIMIT
from ftrun.errors import (
    CheckpointError,
    CheckpointsTaken,
    CheckpointSuperseded,
    MemoryTooSmall,
    NoneOfThisRun,
    NoUsableCheckpoint,
)
from ftrun.ids import Generation, Rank, RunId, Version, version
from ftrun.linux import at_low_priority, available_memory
from ftrun.smp.checkpoint.live_capture import CaptureFilter
from ftrun.smp.checkpoint.load import LoadedCheckpoint, LoadJob, load_checkpoint
from ftrun.smp.checkpoint.shared_load import LoadGroup
from ftrun.smp.checkpoint.slot_reader import ArenaFds
from ftrun.smp.checkpoint.storage.direct_file import KEEP_S, CopyBuffers, Throttle
from ftrun.smp.checkpoint.storage.owner import RENEW_S, CheckpointOwnership
from ftrun.smp.checkpoint.storage.storage import Retention, open_storage, sweep_run
from ftrun.smp.checkpoint.write_job import (
    EqualBytes,
    VersionClaims,
    WriteJob,
    WriterContext,
    WriteResult,
    reported,
)
from ftrun.smp.checkpoint.writer import CheckpointWriter
from ftrun.smp.client import Requester
from ftrun.smp.jobs import Finish, IntervalTimer, JobLanes
from ftrun.smp.memory.arenas import ArenaStore, SmpArena
from ftrun.smp.memory.commits import CommitCoordinator
from ftrun.smp.memory.pools import CapturePools
from ftrun.snapshot.commit_tracker import CommitTracker
from ftrun.urls import without_password
from ftrun.wire.checkpoint_owner import OWNER_NAME, CheckpointClaim
from ftrun.wire.messages import checkpoint as checkpoint_messages
from ftrun.wire.messages import envelope as messages

LANES = ("disk", "disk-2")
_log = logging.getLogger(__name__)
_BUG = "internal error in ftrun; see the SMP's log"


@dataclass
class _Lane:
    """A thread that writes, its memory for copies, and the jobs in it with their descriptors."""

    name: str
    room: CopyBuffers
    writer: CheckpointWriter
    jobs: list[tuple[WriteJob, ArenaFds]] = field(default_factory=list)


class CheckpointService:
    """Writes and loads.

    Args:
        commits: which versions are committed.
        loaded: runs before the agent's answer.
        is_attended: the agent is connected.
        pools: returns the capture pools of this node's ranks.
    """

    def __init__(
        self,
        run_id: RunId,
        jobs: JobLanes,
        memory: ArenaStore,
        commits: CommitCoordinator,
        loaded: Callable[[LoadedCheckpoint], None],
        is_attended: Callable[[], bool],
        pools: Callable[[], CapturePools],
    ) -> None:
        self._run_id = run_id
        self._jobs = jobs
        self._memory = memory
        self._commits = commits
        self._loaded = loaded
        self._pools = pools
        self._stop = threading.Event()
        self._owner = CheckpointOwnership(run_id, self._stop, is_attended)
        self._hurries = threading.Event()
        self._throttle = Throttle(self._stop)
        self._tidying = IntervalTimer(jobs, self._clean_up)
        claims, equal_bytes = VersionClaims(), EqualBytes()
        self._lanes = [self._lane(name, claims, equal_bytes) for name in LANES]
        memory.after_add = self._take_in

    def _lane(self, name: str, claims: VersionClaims, equal_bytes: EqualBytes) -> _Lane:
        room = CopyBuffers(lambda: available_memory().num_bytes)
        context = WriterContext(self._run_id, room, self._throttle, claims, equal_bytes)
        return _Lane(name, room, CheckpointWriter(context))

    def write(
        self,
        requester: Requester,
        body: checkpoint_messages.WriteCheckpoint,
        tracker: CommitTracker,
    ) -> None:
        """Write the named version, limited to the ranks on this node.

        Without a name it is the requested capture, or the newest that all ranks hold, if they are
        all on this node. If an earlier order awaits a capture, that one gets it.
        """
        if body.capture_from is not None and self._is_capture_awaited(body.capture_from[0]):
            reason = "an earlier order awaits the requested snapshot"
            requester.send(checkpoint_messages.CheckpointFailed(reason, is_superseded=True))
            return
        self._throttle.bytes_per_s = body.bytes_per_s
        self._hurries.clear()
        generation = tracker.generation
        order = WriteJob(
            where=body.directory,
            ranks=tuple(sorted(tracker.ranks)),
            world_size=tracker.world_size,
            retention=Retention(body.keep, body.keep_s, keep_bytes=body.keep_bytes),
            version=version(*body.version) if body.version is not None else None,
            token=body.token,
            life=body.life,
            follow=self._capture(body, tracker),
            hurries=self._hurries.is_set,
            is_over=lambda: tracker.generation != generation,
            share_wait_s=body.share_timeout_s,
            num_writers=body.writers,
        )
        fds = {rank: [os.dup(arena.fd) for arena in self._memory.of(rank)] for rank in order.ranks}
        lane = min(self._lanes, key=lambda one: len(one.jobs))
        lane.jobs.append((order, fds))
        failed = checkpoint_messages.CheckpointFailed(_BUG)
        self._jobs.submit(
            lane.name,
            partial(self._write, requester, lane, order, fds),
            failed=partial(self._end, requester, lane, order, fds, failed),
        )

    def _is_capture_awaited(self, generation: int) -> bool:
        follows = [job.follow for lane in self._lanes for job, _ in lane.jobs]
        return any(
            one is not None and one.generation == generation and not one.has_begun.is_set()
            for one in follows
        )

    def _capture(
        self, body: checkpoint_messages.WriteCheckpoint, tracker: CommitTracker
    ) -> CaptureFilter | None:
        if body.capture_from is None:
            return None
        generation, pools = Generation(body.capture_from[0]), self._duplicated_pools()
        num_ended = self._pools().num_ended

        def is_over() -> bool:
            now = self._pools()
            # Ranks that have begun to capture through pools take no other snapshot.
            has_changed = now.num_ended != num_ended if pools else now.are_complete
            return tracker.generation != generation or has_changed

        return CaptureFilter(
            generation,
            is_over=is_over,
            hurries=self._hurries.is_set,
            wait_s=body.live_capture_timeout_s,
            is_committed=self._commits.is_committed,
            from_step=body.capture_from[1],
            pools=pools,
        )

    def _duplicated_pools(self) -> dict[Rank, int]:
        """Empty unless all ranks here capture through pools."""
        pools = self._pools()
        return {r: os.dup(fd) for r, fd in pools.fds.items()} if pools.are_complete else {}

    def _take_in(self, arena: SmpArena) -> None:
        """Show a new arena to the jobs, because the capture that a job awaits may be in it."""
        for lane in self._lanes:
            for _, fds in lane.jobs:
                if (rank := Rank(arena.shape.rank)) in fds:
                    fds[rank].append(os.dup(arena.fd))

    def load(self, requester: Requester, body: checkpoint_messages.LoadCheckpoint) -> None:
        self._hurries.set()  # no capture of an ended generation is awaited
        self._pools().num_ended += 1  # nor is it newer than what is loaded
        self._jobs.submit(
            LANES[0],
            partial(self._load, requester, body),
            failed=partial(requester.send, messages.Refused(_BUG)),
        )

    def own(self, claim: CheckpointClaim | None) -> None:
        """Renew the owner record of the directory from now on; None if another node does."""
        self._owner.renew(claim)

    def end(self, requester: Requester, body: checkpoint_messages.EndCheckpoints) -> None:
        def ended() -> Finish:
            try:
                self._owner.end(body.exit_code, body.reason, body.command)
            except (CheckpointError, OSError) as error:
                _log.warning("cannot record the end of the run next to its checkpoints: %s", error)
            return partial(requester.send, messages.Done())

        self._jobs.submit(LANES[0], ended, failed=partial(requester.send, messages.Refused(_BUG)))

    def expedite(self) -> None:
        """Remove the rate limit of the running write, and shorten its waits for a capture."""
        self._throttle.bytes_per_s = 0.0
        self._hurries.set()

    def stop(self) -> None:
        self._stop.set()

    def give_back(self) -> None:
        for lane in self._lanes:
            if lane.room.num_bytes:
                self._jobs.submit(lane.name, lane.room.drop)

    def _write(self, requester: Requester, lane: _Lane, order: WriteJob, fds: ArenaFds) -> Finish:
        started_s = clock.now_s()
        answer: messages.AnyMessage
        pooled: Version | None = None
        try:
            done = at_low_priority(partial(self._written, lane, order, fds))
            answer = _answer(done, clock.now_s() - started_s)
            if done.is_pooled and not done.missing_ranks:
                pooled = done.version
        except CheckpointError as error:
            is_superseded = isinstance(error, CheckpointSuperseded)
            answer = checkpoint_messages.CheckpointFailed(str(error), is_superseded)
        finally:
            _free(lane.room)
        return partial(self._end, requester, lane, order, fds, answer, pooled)

    def _end(
        self,
        requester: Requester,
        lane: _Lane,
        order: WriteJob,
        fds: ArenaFds,
        answer: messages.AnyMessage,
        pooled: Version | None = None,
    ) -> None:
        """`pooled`: the complete version that came through pools."""
        lane.jobs = [one for one in lane.jobs if one[1] is not fds]
        for fd in (fd for some in fds.values() for fd in some):
            os.close(fd)
        for fd in order.follow.pools.values() if order.follow is not None else ():
            os.close(fd)
        requester.send(answer)
        is_current = order.follow is not None and not order.follow.is_over()
        if pooled is not None and is_current:
            self._pools().written(pooled)
        self._tidying.start(KEEP_S)

    def _clean_up(self) -> None:
        def cleaned_up(lane: _Lane) -> Finish | None:
            _free(lane.room)
            is_empty = not any(one.room.num_bytes for one in self._lanes)
            return self._tidying.stop if is_empty else None

        for lane in self._lanes:
            self._jobs.submit(lane.name, partial(cleaned_up, lane))

    def _written(self, lane: _Lane, order: WriteJob, fds: ArenaFds) -> WriteResult:
        with reported(order):
            runs = self._owner.check(order.where, order.life)
        order = replace(order, retention=replace(order.retention, runs=runs))
        return lane.writer.write(fds, order)

    def _load(self, requester: Requester, body: checkpoint_messages.LoadCheckpoint) -> Finish:
        for lane in self._lanes:
            lane.room.drop()
        try:
            if body.claim is not None:
                self._claim(body.claim)
            loaded = self._loaded_from(body)
        except CheckpointsTaken as error:
            return partial(requester.send, _none_loaded({}, str(error), is_taken=True))
        except NoUsableCheckpoint as error:
            problem = "" if isinstance(error, NoneOfThisRun) else str(error)
            return partial(requester.send, _none_loaded(error.rejected, problem))
        except (CheckpointError, OSError) as error:
            # The directory itself is named, so that the leader repeats the load on all nodes before
            # the run ends.
            where = without_password(body.directory)
            return partial(requester.send, _none_loaded({where: str(error)}, str(error)))
        except MemoryTooSmall as error:
            return partial(requester.send, messages.Refused(str(error)))
        if loaded is None:
            return partial(requester.send, _none_loaded({}, ""))
        return partial(self._put, requester, body, loaded)

    def _claim(self, claim: CheckpointClaim) -> None:
        """Claim the directory; if the record cannot be written, load without it.

        A failed claim must not leave good checkpoints unread. Raises CheckpointsTaken if another
        run that is alive owns it.
        """
        try:
            self._owner.claim(claim)
        except CheckpointsTaken:
            raise
        except (CheckpointError, OSError) as error:
            _log.warning(
                "cannot write %s in %s, so a second run with this directory is not refused; "
                "trying again every %.0f s: %s",
                OWNER_NAME,
                without_password(claim.directory),
                RENEW_S,
                error,
            )

    def _loaded_from(self, body: checkpoint_messages.LoadCheckpoint) -> LoadedCheckpoint | None:
        def check(num_bytes: int) -> None:
            limit_bytes, name = body.memory_limit_bytes, MEMORY_LIMIT
            if body.had_pools or self._pools().are_complete:
                limit_bytes, name = 1, "the ranks need the memory"
            if 0 < limit_bytes < num_bytes:
                raise MemoryTooSmall(
                    needed_bytes=num_bytes, available_bytes=limit_bytes, limit=name
                )
            check_available(num_bytes)

        order = LoadJob(
            world_size=body.world_size,
            ranks=[Rank(rank) for rank in body.local_ranks],
            check=check,
            only=body.only,
            life=body.life,
            group=LoadGroup(body.ranks, body.node) if body.ranks else None,
            excluded=body.excluded,
        )
        loaded = load_checkpoint(body.directory, order, self._stop)
        with (
            suppress(CheckpointError, OSError),
            open_storage(body.directory, self._stop) as storage,
        ):
            sweep_run(storage, self._run_id)
        return loaded

    def _put(
        self,
        requester: Requester,
        body: checkpoint_messages.LoadCheckpoint,
        loaded: LoadedCheckpoint,
    ) -> None:
        self._loaded(loaded)
        requester.send(
            checkpoint_messages.CheckpointLoaded(
                generation=loaded.version.generation,
                step=loaded.version.step,
                path=loaded.path,
                rejected=loaded.rejected,
                world_size=loaded.world_size if loaded.world_size != body.world_size else 0,
                is_share=loaded.rest is not None,
            )
        )


def _free(room: CopyBuffers) -> None:
    with suppress(OSError):  # the free memory cannot be read just now
        room.begin()


def _none_loaded(
    rejected: dict[str, str], problem: str, *, is_taken: bool = False
) -> checkpoint_messages.CheckpointLoaded:
    return checkpoint_messages.CheckpointLoaded(
        generation=-1, step=-1, path="", rejected=rejected, problem=problem, is_taken=is_taken
    )


def _answer(done: WriteResult, seconds: float) -> checkpoint_messages.CheckpointWritten:
    is_part = bool(done.missing_ranks)
    return checkpoint_messages.CheckpointWritten(
        generation=done.version.generation,
        step=done.version.step,
        path="" if is_part else done.path,
        total_bytes=done.total_bytes,
        seconds=seconds,
        is_part=is_part,
        missing_ranks=list(done.missing_ranks),
        note=done.note,
        ahead_s=done.ahead_s,
    )


def check_available(needed_bytes: int) -> None:
    """Raise MemoryTooSmall if this number of bytes does not fit."""
    available_memory().check(needed_bytes)
