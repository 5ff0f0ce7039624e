"""Writes and loads checkpoints for the agent, in parallel with all other work.

Runs in:  the SMP: requests and answers in the server thread, work in the disk lane.
Takes in: WriteCheckpoint and LoadCheckpoint.
Gives:    their answers; the arenas of what was loaded.
"""

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from ftrun import clock
from ftrun.errors import (
    CheckpointError,
    CheckpointsTaken,
    MemoryTooSmall,
    NoneOfThisRun,
    NoUsableCheckpoint,
)
from ftrun.ids import Rank, RunId, version
from ftrun.linux import available_memory
from ftrun.smp.checkpoint.live_capture import CaptureFilter
from ftrun.smp.checkpoint.load import LoadedCheckpoint, LoadJob, load_checkpoint
from ftrun.smp.checkpoint.shared_load import LoadGroup
from ftrun.smp.checkpoint.slot_reader import ArenaFds
from ftrun.smp.checkpoint.storage.direct_file import KEEP_S, CopyBuffers, Throttle
from ftrun.smp.checkpoint.storage.owner import RENEW_S, CheckpointOwnership
from ftrun.smp.checkpoint.storage.storage import Retention, open_storage, sweep_run
from ftrun.smp.checkpoint.write_job import WriteJob, WriterContext, WriteResult, reported
from ftrun.smp.checkpoint.writer import CheckpointWriter
from ftrun.smp.client import Requester
from ftrun.smp.jobs import Finish, IntervalTimer, JobLanes, at_low_priority
from ftrun.smp.memory.arenas import ArenaStore
from ftrun.snapshot.commit_tracker import CommitTracker
from ftrun.urls import without_password
from ftrun.wire.checkpoint_owner import OWNER_NAME, CheckpointClaim
from ftrun.wire.messages import checkpoint as checkpoint_messages
from ftrun.wire.messages import envelope as messages

_log = logging.getLogger(__name__)
_BUG = "internal error in ftrun; see the SMP's log"


class CheckpointService:
    """Writes and loads. `loaded` runs before the agent's answer; `is_attended`: it is connected."""

    def __init__(
        self,
        run_id: RunId,
        jobs: JobLanes,
        memory: ArenaStore,
        loaded: Callable[[LoadedCheckpoint], None],
        is_attended: Callable[[], bool],
    ) -> None:
        self._run_id = run_id
        self._jobs = jobs
        self._memory = memory
        self._loaded = loaded
        self._stop = threading.Event()
        self._owner = CheckpointOwnership(run_id, self._stop, is_attended)
        self._hurries = threading.Event()
        self._throttle = Throttle(self._stop)
        self._room = CopyBuffers(lambda: available_memory().num_bytes)
        self._tidying = IntervalTimer(jobs, self._clean_up)
        self._writer = CheckpointWriter(WriterContext(run_id, self._room, self._throttle))

    def write(
        self,
        requester: Requester,
        body: checkpoint_messages.WriteCheckpoint,
        tracker: CommitTracker,
    ) -> None:
        """Write the named version, limited to the ranks on this node.

        Without a name, all ranks of the world are on this node. The version is then the one that
        they are capturing, or the newest that all hold. The generation of `tracker` ends the
        capture.
        """
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
            follow=CaptureFilter(
                generation,
                is_over=lambda: tracker.generation != generation,
                hurries=self._hurries.is_set,
                wait_s=body.live_capture_timeout_s,
            ),
            share_wait_s=body.share_timeout_s if body.version is not None else 0.0,
            num_writers=body.writers,
        )
        fds = {
            rank: [os.dup(arena.fd) for arena in self._memory.of(rank)]
            for rank in self._memory.ranks
        }
        self._jobs.submit(
            "disk",
            partial(self._write, requester, order, fds),
            failed=partial(requester.send, checkpoint_messages.CheckpointFailed(_BUG)),
        )

    def load(self, requester: Requester, body: checkpoint_messages.LoadCheckpoint) -> None:
        self._jobs.submit(
            "disk",
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

        self._jobs.submit("disk", ended, failed=partial(requester.send, messages.Refused(_BUG)))

    def expedite(self) -> None:
        """Remove the rate limit of the running write, and shorten its waits for a capture."""
        self._throttle.bytes_per_s = 0.0
        self._hurries.set()

    def stop(self) -> None:
        self._stop.set()

    def give_back(self) -> None:
        if self._room.num_bytes:
            self._jobs.submit("disk", self._room.drop)

    def _write(self, requester: Requester, order: WriteJob, fds: ArenaFds) -> Finish:
        started_s = clock.now_s()
        try:
            done = at_low_priority(partial(self._written, order, fds))
        except CheckpointError as error:
            return partial(self._send, requester, checkpoint_messages.CheckpointFailed(str(error)))
        finally:
            for fd in (fd for some in fds.values() for fd in some):
                os.close(fd)
            self._room_is_free()
        return partial(self._send, requester, _answer(done, clock.now_s() - started_s))

    def _send(self, requester: Requester, done: messages.AnyMessage) -> None:
        requester.send(done)
        self._tidying.start(KEEP_S)

    def _clean_up(self) -> None:
        def cleaned_up() -> Finish | None:
            self._room_is_free()
            return None if self._room.num_bytes else self._tidying.stop

        self._jobs.submit("disk", cleaned_up)

    def _room_is_free(self) -> None:
        with suppress(OSError):  # the free memory cannot be read just now
            self._room.begin()

    def _written(self, order: WriteJob, fds: ArenaFds) -> WriteResult:
        with reported(order):
            runs = self._owner.check(order.where, order.life)
        order = replace(order, retention=replace(order.retention, runs=runs))
        return self._writer.write(fds, order)

    def _load(self, requester: Requester, body: checkpoint_messages.LoadCheckpoint) -> Finish:
        self._room.drop()
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
        order = LoadJob(
            world_size=body.world_size,
            ranks=[Rank(rank) for rank in body.local_ranks],
            check=check_available,
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
