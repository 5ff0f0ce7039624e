"""Handles each message that the SMP receives.

Runs in:  the SMP, in the server's thread.
Takes in: messages of clients whose role allows them; results of jobs.
Gives:    replies; VersionCommitted and ArenaGranted to the agent without a request.

Rule: a message from an older generation is refused or dropped.
"""

import json
import logging
import os

from ftrun.errors import LayoutUnknown, ProtocolError
from ftrun.ids import RunId, version
from ftrun.smp.checkpoint.load import LoadedCheckpoint
from ftrun.smp.checkpoint.service import CheckpointService
from ftrun.smp.client import ClientConnection, Requester
from ftrun.smp.jobs import JobLanes
from ftrun.smp.memory.arena_requests import ArenaRequests, granted
from ftrun.smp.memory.arenas import ArenaStore
from ftrun.smp.memory.commits import CommitCoordinator
from ftrun.smp.redundancy.coordinator import RedundancyCoordinator
from ftrun.smp.redundancy.group import parity_share, protecting_of
from ftrun.smp.saved_files import SavedFiles
from ftrun.wire.crash_points import crash_point
from ftrun.wire.messages import checkpoint as checkpoint_messages
from ftrun.wire.messages import envelope as messages
from ftrun.wire.messages import smp as smp_messages
from ftrun.wire.shared_memory.pages import SharedPage
from ftrun.wire.transport.channel import ReceivedMessage
from ftrun.wire.transport.framing import MAX_LOCAL_FRAME_BYTES

MAX_RUN_STATE_BYTES = MAX_LOCAL_FRAME_BYTES - (1 << 20)
"""Largest run state that fits a `MemoryHandedOver` in addition to the ranks."""

_log = logging.getLogger(__name__)


class MessageHandler:
    """Owns the arenas, the commits, the checkpoints and the redundancy of one node."""

    def __init__(self, run_id: RunId, jobs: JobLanes) -> None:
        self.memory = ArenaStore()
        self.commits = CommitCoordinator(self.memory, self._send_to_agent)
        self.agent: ClientConnection | None = None
        self.checkpoints = CheckpointService(
            run_id,
            jobs,
            self.memory,
            self.commits,
            self._loaded,
            lambda: self.agent is not None,
            lambda: self.requests.pools,
        )
        self.group_work = RedundancyCoordinator(
            run_id,
            memory=self.memory,
            commits=self.commits,
            jobs=jobs,
            send_to_agent=self._send_to_agent,
        )
        self.requests = ArenaRequests(
            self.memory,
            jobs,
            tracker=self.commits.tracker,
            send_to_agent=self._send_to_agent,
            is_short=self.checkpoints.give_back,
            parity_region_bytes=lambda: self.group_work.parity_store.allocated_bytes,
            show_pooled=self.commits.show_pooled,
        )
        self.files = SavedFiles(run_id, jobs, self._send_to_agent)
        self._run_id = run_id
        self._run_state = b""

    def is_over(self, envelope: messages.Envelope) -> bool:
        """Whether the message is of an ended generation, whose sender is being killed."""
        return envelope.generation < self.commits.tracker.generation

    # --- agent -----------------------------------------------------------------------------

    def begin_generation(
        self, body: smp_messages.BeginGeneration, received: ReceivedMessage
    ) -> messages.AnyMessage:
        if len(received.fds) != 1:
            raise ProtocolError("BeginGeneration needs one descriptor, the command page")
        before = self.commits.tracker.generation
        if body.generation < before:
            return messages.Refused(
                f"generation {body.generation} has ended; the current one is {before}"
            )
        try:
            page = SharedPage(received.fds[0])
        except (OSError, ValueError) as error:
            raise ProtocolError(f"the command page cannot be mapped: {error}") from error
        group = protecting_of(body)
        self.memory.limit_bytes = body.memory_limit_bytes
        if body.generation > before:
            self.memory.forget_requests()
            self.requests.pools.free()
        self.requests.begin(parity_share(group))
        self.group_work.begin_generation(body, group, page)
        self.checkpoints.own(body.claim)
        return messages.Done()

    def void_after(self, body: smp_messages.VoidAfter) -> messages.AnyMessage:
        newest = version(body.generation, body.step)
        count = self.group_work.void_after(newest)
        if count:
            _log.info("discarded %d slots and parity regions later than %s", count, newest)
        return messages.Done()

    def hand_over(self, requester: Requester) -> None:
        arenas = self.memory.all()
        parity_store = self.group_work.parity_store
        requester.send(
            smp_messages.MemoryHandedOver(
                [one.shape.rank for one in arenas], self._run_state, parity_store.slots
            ),
            fds=(*(one.fd for one in arenas), *parity_store.fds),
        )
        self.files.send_all()

    def adopt(
        self, body: smp_messages.AdoptMemory, received: ReceivedMessage
    ) -> messages.AnyMessage:
        num_ranks, num_parity_regions = len(body.ranks), len(body.parity_slots)
        if len(received.fds) != num_ranks + num_parity_regions:
            raise ProtocolError(
                f"AdoptMemory names {num_ranks} ranks and {num_parity_regions} parity regions, "
                f"with {len(received.fds)} descriptors"
            )
        problems = []
        for at, fd in enumerate(received.fds):
            ours = os.dup(fd)
            try:
                if at < num_ranks:
                    generation = self.commits.tracker.generation
                    self.memory.adopt(ours, rank=body.ranks[at], generation=generation)
                else:
                    self.group_work.parity_store.adopt(ours, body.parity_slots[at - num_ranks])
            except LayoutUnknown as error:
                os.close(ours)
                rank = f"rank {body.ranks[at]}" if at < num_ranks else "a parity region"
                problems.append(f"{rank}: {error}")
        self.group_work.count_again()
        crash_point("smp.adopted")
        return messages.Refused("; ".join(problems)) if problems else messages.Done()

    def persist_run_state(self, body: smp_messages.PersistRunState) -> messages.AnyMessage:
        if len(body.run_state) > MAX_RUN_STATE_BYTES:
            return messages.Refused(
                f"{len(body.run_state)} bytes of run state; the limit is {MAX_RUN_STATE_BYTES}"
            )
        self._run_state = body.run_state
        return messages.Done()

    def write_checkpoint(
        self, requester: Requester, body: checkpoint_messages.WriteCheckpoint
    ) -> None:
        tracker = self.commits.world()
        if body.version is None and body.capture_from is None and not tracker.sees_all:
            reason = "not all ranks of the run are on this node, and no version is named"
            requester.send(checkpoint_messages.CheckpointFailed(reason))
        else:
            self.checkpoints.write(requester, body, tracker)

    def _loaded(self, loaded: LoadedCheckpoint) -> None:
        self.group_work.restores.share(loaded.rest)
        self.memory.put_instead(loaded.fds, self.commits.tracker.generation)
        for arena in self.memory.all():
            self._send_to_agent(granted(arena.shape), fds=(arena.fd,))
        crash_point("smp.checkpoint.loaded")

    # --- any client ------------------------------------------------------------------------

    def status(self, extra: dict[str, object]) -> messages.AnyMessage:
        committed = self.commits.tracker.committed
        document = {
            "role": "smp",
            "run_id": self._run_id,
            "pid": os.getpid(),
            **extra,
            "generation": self.commits.tracker.generation,
            "world_size": self.commits.tracker.world_size,
            "committed": [committed.generation, committed.step] if committed else None,
            "bytes": self.memory.allocated_bytes,
            "group_work": self.group_work.status(),
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
        return messages.StatusReply(json.dumps(document).encode())

    def free(self) -> None:
        self.checkpoints.stop()
        self.requests.pools.free()
        self.files.free()
        self.group_work.free()
        self.memory.free()
        self.commits.forget_page()

    def _send_to_agent(self, body: messages.AnyMessage, *, fds: tuple[int, ...] = ()) -> None:
        if self.agent is not None:
            self.agent.send(body, fds=fds)
