"""Checkpoints as the agent asks for them: written and loaded beside everything else.

Runs in:  the SMP: asked and answered in the server's thread, done in the disk lane's.
Takes in: WriteCheckpoint and LoadCheckpoint.
Gives:    their answers; the arenas of what was loaded.
"""

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from ftrun.errors import CheckpointError, MemoryTooSmall
from ftrun.ids import Rank, RunId, version
from ftrun.smp.checkpoint import CheckpointWriter, Written
from ftrun.smp.checkpoint_files import Retention
from ftrun.smp.checkpoint_folders import sweep_run
from ftrun.smp.checkpoint_load import Loaded, load_checkpoint
from ftrun.smp.checkpoint_parts import PartOrder, PartWriter
from ftrun.smp.checkpoint_shard import ArenaFds
from ftrun.smp.client import Client
from ftrun.smp.jobs import Finish, Jobs
from ftrun.smp.limits import available_memory
from ftrun.smp.memory import ArenaMemory
from ftrun.smp.pace import Throttle
from ftrun.smp.url_checkpoint import UrlOrder, UrlWriter
from ftrun.smp.url_folders import sweep_url
from ftrun.smp.url_load import load_from_url
from ftrun.urls import is_url
from ftrun.wire import checkpoint_messages, messages

_BUG = "a bug in ftrun; the SMP's log has it"


class Checkpoints:
    """Writes and loads on behalf of the agent.

    Args:
        run_id: goes into the index of a checkpoint.
        jobs: has the lane "disk".
        memory: whose shards are written, and which keeps what is loaded.
        loaded: called with what was loaded, before the agent is answered.
    """

    def __init__(
        self, run_id: RunId, jobs: Jobs, memory: ArenaMemory, loaded: Callable[[Loaded], None]
    ) -> None:
        self._run_id = run_id
        self._jobs = jobs
        self._memory = memory
        self._loaded = loaded
        self._stop = threading.Event()
        self._throttle = Throttle(self._stop)
        self._writer = CheckpointWriter(run_id, free_bytes=_free_bytes, throttle=self._throttle)
        self._parts = PartWriter(run_id, free_bytes=_free_bytes, throttle=self._throttle)
        self._urls = UrlWriter(run_id, free_bytes=_free_bytes, throttle=self._throttle)

    def write(
        self,
        client: Client,
        body: checkpoint_messages.WriteCheckpoint,
        world_size: int,
        ranks: Sequence[Rank],
    ) -> None:
        """Write the version that is named, as far as it is here.

        Without one, all ranks of the world are here, and it is the newest that all hold.
        """
        self._throttle.bytes_per_s = body.bytes_per_s
        fds = {
            rank: [os.dup(arena.fd) for arena in self._memory.of(rank)]
            for rank in self._memory.ranks
        }
        self._jobs.submit(
            "disk",
            partial(self._write, client, body, fds, world_size, tuple(sorted(ranks))),
            failed=partial(client.tell, checkpoint_messages.CheckpointRefused(_BUG)),
        )

    def load(self, client: Client, body: checkpoint_messages.LoadCheckpoint) -> None:
        self._jobs.submit(
            "disk",
            partial(self._load, client, body),
            failed=partial(client.tell, messages.Refused(_BUG)),
        )

    def hurry(self) -> None:
        """Write what is being written as fast as it goes."""
        self._throttle.bytes_per_s = 0.0

    def stop(self) -> None:
        """Give up what is being written."""
        self._stop.set()

    def _write(
        self,
        client: Client,
        body: checkpoint_messages.WriteCheckpoint,
        fds: ArenaFds,
        world_size: int,
        ranks: tuple[Rank, ...],
    ) -> Finish:
        try:
            done = self._written(body, fds, world_size, ranks)
        except CheckpointError as error:
            return partial(client.tell, checkpoint_messages.CheckpointRefused(str(error)))
        finally:
            _close(fds.values())
        return partial(client.tell, _answer(done))

    def _written(
        self,
        body: checkpoint_messages.WriteCheckpoint,
        fds: ArenaFds,
        world_size: int,
        ranks: tuple[Rank, ...],
    ) -> Written:
        where, retention = body.directory, Retention(body.keep, body.keep_s)
        wanted = version(*body.version) if body.version is not None else None
        if is_url(where):
            return self._urls.write(
                fds, UrlOrder(where, ranks, world_size, retention, wanted, body.token, body.life)
            )
        directory = Path(where)
        if wanted is None:
            return self._writer.write(
                fds,
                world_size=world_size,
                directory=directory,
                retention=retention,
                life=body.life,
            )
        return self._parts.write(
            fds,
            PartOrder(wanted, ranks, world_size, directory, retention, body.token, body.life),
        )

    def _load(self, client: Client, body: checkpoint_messages.LoadCheckpoint) -> Finish:
        try:
            loaded = self._loaded_from(body)
        except (CheckpointError, MemoryTooSmall) as error:
            return partial(client.tell, messages.Refused(str(error)))
        if loaded is None:
            return partial(
                client.tell, checkpoint_messages.CheckpointLoaded(generation=-1, step=-1, path="")
            )
        return partial(self._put, client, body, loaded)

    def _loaded_from(self, body: checkpoint_messages.LoadCheckpoint) -> Loaded | None:
        ranks = [Rank(rank) for rank in body.local_ranks]
        if is_url(body.directory):
            loaded = load_from_url(
                body.directory,
                world_size=body.world_size,
                ranks=ranks,
                check=check_available,
                stop=self._stop,
                only=body.only,
                life=body.life,
            )
            sweep_url(body.directory, self._stop, self._run_id)
            return loaded
        directory = Path(body.directory)
        loaded = load_checkpoint(
            directory,
            world_size=body.world_size,
            ranks=ranks,
            check=check_available,
            only=body.only,
            life=body.life,
        )
        with suppress(OSError):
            sweep_run(directory, self._run_id)
        return loaded

    def _put(
        self, client: Client, body: checkpoint_messages.LoadCheckpoint, loaded: Loaded
    ) -> None:
        if is_url(body.directory):
            self._urls.remember(body.directory, loaded.version, str(loaded.path))
        else:
            self._writer.remember(Path(body.directory), loaded.version, Path(loaded.path))
        self._loaded(loaded)
        client.tell(
            checkpoint_messages.CheckpointLoaded(
                generation=loaded.version.generation,
                step=loaded.version.step,
                path=str(loaded.path),
                notes=loaded.notes,
                world_size=loaded.world_size if loaded.world_size != body.world_size else 0,
            )
        )


def _answer(done: Written) -> checkpoint_messages.CheckpointWritten:
    is_part = bool(done.missing_ranks)
    return checkpoint_messages.CheckpointWritten(
        generation=done.version.generation,
        step=done.version.step,
        path="" if is_part else str(done.path),
        total_bytes=done.total_bytes,
        seconds=done.seconds,
        is_part=is_part,
        missing_ranks=list(done.missing_ranks),
        note=done.note,
    )


def _free_bytes() -> int:
    return available_memory().num_bytes


def check_available(needed_bytes: int) -> None:
    """Raises: MemoryTooSmall: so many bytes do not fit."""
    available = available_memory()
    if needed_bytes > available.num_bytes:
        raise MemoryTooSmall(
            needed_bytes=needed_bytes,
            available_bytes=available.num_bytes,
            limit=available.limit,
        )


def _close(some: Iterable[Sequence[int]]) -> None:
    for fds in some:
        for fd in fds:
            os.close(fd)
