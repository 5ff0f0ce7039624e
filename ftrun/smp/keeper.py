"""What the SMP does about each message.

Runs in:  the SMP, in the server's thread.
Takes in: messages of clients whose role allows them; results of jobs.
Gives:    answers, and VersionCommitted and ArenaGranted to the agent, unasked.

Rule 1: the agent gets a duplicate of each arena before the worker does, so an SMP killed right
        after granting loses nothing.
Rule 2: on the command page the step is written before the generation, and the counter last. A
        reader may meet the new step beside the old generation, which names a version older than
        the one it waits for; it never meets one that is newer than what is committed, because
        BeginGeneration puts the restore point there before any worker runs, and steps only grow
        from it within a generation. So readers may read the two words in either order and need
        only ask whether (generation, step) has reached the version they wait for.
Rule 3: what a message brings from an older generation is refused or dropped.
"""

import json
import logging
import os
import threading
from functools import partial
from pathlib import Path

from ftrun.errors import (
    CheckpointError,
    LayoutUnknown,
    MemoryTooSmall,
    ProtocolError,
)
from ftrun.ids import Generation, Rank, RunId, Version, version
from ftrun.smp.checkpoint import ArenaFds, CheckpointWriter
from ftrun.smp.checkpoint_load import Loaded, load_checkpoint
from ftrun.smp.client import Client
from ftrun.smp.jobs import Finish, Jobs
from ftrun.smp.limits import available_memory
from ftrun.smp.memory import ArenaMemory, create
from ftrun.snapshot.versions import CommitTracker
from ftrun.wire import messages as m
from ftrun.wire.arena import ArenaShape
from ftrun.wire.channel import Received
from ftrun.wire.crash_points import crash_point
from ftrun.wire.pages import Command, Page

MAX_RUN_STATE_BYTES = (1 << 20) - (1 << 14)
"""What fits a HandedOver beside the ranks."""

_BUG = m.Refused("a bug in ftrun; the SMP's log has it")
_log = logging.getLogger(__name__)


class Keeper:
    """The arenas, what is committed in them, and where both are shown."""

    def __init__(self, run_id: RunId, jobs: Jobs) -> None:
        self.memory = ArenaMemory()
        self.tracker = CommitTracker()
        self.agent: Client | None = None
        self._run_id = run_id
        self._jobs = jobs
        self._page: Page | None = None
        self._run_state = b""
        self._stop = threading.Event()
        self._writer = CheckpointWriter(
            run_id, free_bytes=lambda: available_memory().num_bytes, stop=self._stop
        )

    @property
    def has_begun(self) -> bool:
        return self.tracker.generation >= 0

    def is_over(self, envelope: m.Envelope) -> bool:
        """It comes from a generation that has ended: its sender is being killed."""
        return envelope.generation < self.tracker.generation

    # --- worker ----------------------------------------------------------------------------

    def reserve(self, client: Client, body: m.ReserveMemory) -> None:
        try:
            self.memory.reserve(Rank(body.rank), body.image_bytes)
        except MemoryTooSmall as error:
            client.tell(_refusal(error))
        else:
            client.tell(m.Done())

    def request_arena(self, client: Client, body: m.RequestArena) -> None:
        shape = ArenaShape(
            body.rank, body.world_size, body.image_bytes, body.num_pieces, body.layout_id
        )
        rank = Rank(body.rank)
        arena = self.memory.grant_again(shape, self.tracker.generation)
        if arena is not None:
            # The agent has it: from its making, from HandOver, or it brought it itself.
            client.tell(_granted(shape), fds=(arena.fd,))
            return
        try:
            self.memory.promise(rank, shape.total_bytes)
        except MemoryTooSmall as error:
            client.tell(_refusal(error))
            return
        self._jobs.submit(
            "memory",
            partial(self._make_arena, client, shape),
            failed=partial(self._not_made, client, rank, _BUG),
        )

    def _make_arena(self, client: Client, shape: ArenaShape) -> Finish:
        try:
            fd = create(shape)
        except MemoryTooSmall as error:
            return partial(self._not_made, client, Rank(shape.rank), _refusal(error))
        return partial(self._made, client, fd, shape)

    def _made(self, client: Client, fd: int, shape: ArenaShape) -> None:
        self.memory.add(fd, self.tracker.generation)
        self._grant(client, fd, shape)

    def _not_made(self, client: Client, rank: Rank, answer: m.AnyMessage) -> None:
        self.memory.forget_promise(rank)
        client.tell(answer)

    def _grant(self, client: Client, fd: int, shape: ArenaShape) -> None:
        self._tell_agent(_granted(shape), fds=(fd,))
        crash_point("smp.arena.agent_told")
        client.tell(_granted(shape), fds=(fd,))
        crash_point("smp.arena.granted")

    def shard_sealed(self, rank: Rank, sealed: Version) -> None:
        crash_point("smp.commit.seal_heard")
        committed = self.tracker.sealed(rank, sealed)
        if committed is None:
            return
        self._show(committed)
        self.memory.free_replaced(
            committed, ranks=self.tracker.ranks, generation=self.tracker.generation
        )
        crash_point("smp.commit.replaced_freed")
        self._tell_agent(m.VersionCommitted(committed.generation, committed.step))

    def withdraw(self, rank: Rank, sealed: Version) -> m.AnyMessage:
        """Void a seal while its worker waits, so that no later SMP finds and commits it.

        The others are told: whoever waits for this version to be committed need not any more.
        """
        if not self.tracker.withdraw(rank, sealed):
            return m.Refused(f"{sealed} is committed already")
        self.memory.void(rank, sealed)
        if self._page is not None and sealed.generation == self.tracker.generation:
            newest = max(self._page.get(Command.ABANDONED_STEP), sealed.step)
            self._page.set(Command.ABANDONED_STEP, newest)
        crash_point("smp.commit.withdrawn")
        return m.Done()

    def hear_again(self, rank: Rank) -> None:
        """A worker (re)connects: take the seals that the last SMP may have died with."""
        held = self.memory.held(self.tracker.world_size).get(rank, set())
        for sealed in sorted(held):
            self.shard_sealed(rank, sealed)

    def _show(self, committed: Version | None) -> None:
        if self._page is None:
            return
        generation, step = (committed.generation, committed.step) if committed else (-1, -1)
        crash_point("smp.commit.decided")
        self._page.set(Command.COMMITTED_STEP, step)
        crash_point("smp.commit.step_shown")
        self._page.set(Command.COMMITTED_GENERATION, generation)
        if committed is not None:
            self._page.add(Command.COMMIT_COUNT, 1)
        crash_point("smp.commit.shown")

    # --- agent -----------------------------------------------------------------------------

    def begin_generation(self, body: m.BeginGeneration, received: Received) -> m.AnyMessage:
        if len(received.fds) != 1:
            raise ProtocolError("BeginGeneration comes with one descriptor, the command page")
        if body.generation < self.tracker.generation:
            return m.Refused(
                f"generation {body.generation} is over, this is {self.tracker.generation}"
            )
        try:
            page = Page(received.fds[0])
        except (OSError, ValueError) as error:
            raise ProtocolError(f"the command page cannot be mapped: {error}") from error
        if body.generation > self.tracker.generation:
            self.memory.forget_promises()
        self._page = page
        self._begin(
            Generation(body.generation), [Rank(r) for r in body.local_ranks], body.world_size
        )
        return m.Done()

    def _begin(self, generation: Generation, ranks: list[Rank], world_size: int) -> None:
        committed = self.tracker.begin_generation(
            generation, ranks, world_size, self.memory.held(world_size)
        )
        self._show(committed)

    def inventory(self) -> m.AnyMessage:
        return m.Inventory(self.memory.offers())

    def void_after(self, body: m.VoidAfter) -> m.AnyMessage:
        count = self.memory.void_after(version(body.generation, body.step))
        _log.info("%d slots later than %s are void", count, version(body.generation, body.step))
        if self.has_begun:
            tracker = self.tracker
            self._begin(tracker.generation, list(tracker.ranks), tracker.world_size)
        return m.Done()

    def hand_over(self, client: Client) -> None:
        arenas = self.memory.all()
        client.tell(
            m.HandedOver([arena.shape.rank for arena in arenas], self._run_state),
            fds=tuple(arena.fd for arena in arenas),
        )

    def adopt(self, body: m.Adopt, received: Received) -> m.AnyMessage:
        if len(received.fds) != len(body.ranks):
            raise ProtocolError(
                f"Adopt names {len(body.ranks)} ranks and brings {len(received.fds)} descriptors"
            )
        problems = []
        for rank, fd in zip(body.ranks, received.fds, strict=True):
            ours = os.dup(fd)
            try:
                self.memory.adopt(ours, rank=rank, generation=self.tracker.generation)
            except LayoutUnknown as error:
                os.close(ours)
                problems.append(f"rank {rank}: {error}")
        if self.has_begun:
            self._begin(self.tracker.generation, list(self.tracker.ranks), self.tracker.world_size)
        crash_point("smp.adopted")
        return m.Refused("; ".join(problems)) if problems else m.Done()

    def keep_run_state(self, body: m.KeepRunState) -> m.AnyMessage:
        if len(body.run_state) > MAX_RUN_STATE_BYTES:
            return m.Refused(
                f"{len(body.run_state)} bytes of run state, at most {MAX_RUN_STATE_BYTES} are kept"
            )
        self._run_state = body.run_state
        return m.Done()

    def write_checkpoint(self, client: Client, body: m.WriteCheckpoint) -> None:
        if not self.tracker.sees_all:
            client.tell(m.CheckpointRefused("not all ranks of the run are on this node"))
            return
        fds = {
            rank: [os.dup(arena.fd) for arena in self.memory.of(rank)] for rank in self.memory.ranks
        }
        self._jobs.submit(
            "disk",
            partial(self._write, client, body, fds, self.tracker.world_size),
            failed=partial(client.tell, m.CheckpointRefused(_BUG.why)),
        )

    def _write(
        self, client: Client, body: m.WriteCheckpoint, fds: ArenaFds, world_size: int
    ) -> Finish:
        try:
            done = self._writer.write(
                fds, world_size=world_size, directory=Path(body.directory), keep=body.keep
            )
        except CheckpointError as error:
            return partial(client.tell, m.CheckpointRefused(str(error)))
        finally:
            for some in fds.values():
                for fd in some:
                    os.close(fd)
        answer = m.CheckpointWritten(
            generation=done.version.generation,
            step=done.version.step,
            path=str(done.path),
            total_bytes=done.total_bytes,
            seconds=done.seconds,
        )
        return partial(client.tell, answer)

    def load_checkpoint(self, client: Client, body: m.LoadCheckpoint) -> None:
        self._jobs.submit(
            "disk", partial(self._load, client, body), failed=partial(client.tell, _BUG)
        )

    def _load(self, client: Client, body: m.LoadCheckpoint) -> Finish:
        directory = Path(body.directory)
        try:
            loaded = load_checkpoint(
                directory,
                world_size=body.world_size,
                ranks=[Rank(rank) for rank in body.local_ranks],
                check=_check_available,
            )
        except (CheckpointError, MemoryTooSmall) as error:
            return partial(client.tell, m.Refused(str(error)))
        if loaded is None:
            return partial(client.tell, m.CheckpointLoaded(generation=-1, step=-1, path=""))
        return partial(self._loaded, client, directory, loaded)

    def _loaded(self, client: Client, directory: Path, loaded: Loaded) -> None:
        self._writer.remember(directory, loaded.version, loaded.path)
        self.memory.put_instead(loaded.fds, self.tracker.generation)
        for arena in self.memory.all():
            self._tell_agent(_granted(arena.shape), fds=(arena.fd,))
        crash_point("smp.checkpoint.loaded")
        client.tell(
            m.CheckpointLoaded(
                generation=loaded.version.generation,
                step=loaded.version.step,
                path=str(loaded.path),
                notes=loaded.notes,
            )
        )

    # --- anyone ----------------------------------------------------------------------------

    def status(self, extra: dict[str, object]) -> m.AnyMessage:
        committed = self.tracker.committed
        document = {
            "role": "smp",
            "run_id": self._run_id,
            "pid": os.getpid(),
            **extra,
            "generation": self.tracker.generation,
            "world_size": self.tracker.world_size,
            "committed": [committed.generation, committed.step] if committed else None,
            "bytes": self.memory.allocated_bytes,
            "arenas": [
                {
                    "rank": arena.shape.rank,
                    "bytes": arena.shape.total_bytes,
                    "layout_id": f"{arena.shape.layout_id:016x}",
                    "slots": [
                        {
                            "state": slot.state.name.lower(),
                            "generation": slot.generation,
                            "step": slot.step,
                        }
                        for slot in arena.slots()
                    ],
                }
                for arena in self.memory.all()
            ],
        }
        return m.Status(json.dumps(document).encode())

    def free(self) -> None:
        """Give up what is being written, and all memory."""
        self._stop.set()
        self.memory.free()
        self._page = None

    def _tell_agent(self, body: m.AnyMessage, *, fds: tuple[int, ...] = ()) -> None:
        if self.agent is not None:
            self.agent.tell(body, fds=fds)


def _granted(shape: ArenaShape) -> m.ArenaGranted:
    return m.ArenaGranted(rank=shape.rank, layout_id=shape.layout_id)


def _refusal(error: MemoryTooSmall) -> m.MemoryRefused:
    return m.MemoryRefused(
        needed_bytes=error.needed_bytes, available_bytes=error.available_bytes, limit=error.limit
    )


def _check_available(needed_bytes: int) -> None:
    available = available_memory()
    if needed_bytes > available.num_bytes:
        raise MemoryTooSmall(
            needed_bytes=needed_bytes,
            available_bytes=available.num_bytes,
            limit=available.limit,
        )
