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
from ftrun.wire.crash_points import crash_point
from ftrun.wire.messages import checkpoint as checkpoint_messages
from ftrun.wire.messages import envelope as messages
from ftrun.wire.messages import smp as smp_messages
from ftrun.wire.shared_memory.pages import SharedPage
from ftrun.wire.transport.channel import ReceivedMessage

MAX_RUN_STATE_BYTES = (1 << 20) - (1 << 14)
"""Largest run state that fits a `MemoryHandedOver` in addition to the ranks."""

_log = logging.getLogger(__name__)


class MessageHandler:
    """Owns the arenas, the commits, the checkpoints and the redundancy of one node."""

    def __init__(self, run_id: RunId, jobs: JobLanes) -> None:
        self.memory = ArenaStore()
        self.commits = CommitCoordinator(self.memory, self._tell_agent)
        self.agent: ClientConnection | None = None
        self.checkpoints = CheckpointService(
            run_id, jobs, self.memory, self._loaded, lambda: self.agent is not None
        )
        self.group_work = RedundancyCoordinator(
            run_id,
            memory=self.memory,
            commits=self.commits,
            jobs=jobs,
            tell_agent=self._tell_agent,
        )
        self.requests = ArenaRequests(
            self.memory,
            jobs,
            tracker=self.commits.tracker,
            tell_agent=self._tell_agent,
            is_short=self.checkpoints.give_back,
            vault_bytes=lambda: self.group_work.vaults.allocated_bytes,
        )
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
        if body.generation > before:
            self.memory.forget_promises()
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

    def hand_over(self, asker: Requester) -> None:
        arenas = self.memory.all()
        vaults = self.group_work.vaults
        asker.tell(
            smp_messages.MemoryHandedOver(
                [one.shape.rank for one in arenas], self._run_state, vaults.slots
            ),
            fds=(*(one.fd for one in arenas), *vaults.fds),
        )

    def adopt(
        self, body: smp_messages.AdoptMemory, received: ReceivedMessage
    ) -> messages.AnyMessage:
        num_ranks, num_vaults = len(body.ranks), len(body.vault_slots)
        if len(received.fds) != num_ranks + num_vaults:
            raise ProtocolError(
                f"AdoptMemory names {num_ranks} ranks and {num_vaults} parity regions, with "
                f"{len(received.fds)} descriptors"
            )
        problems = []
        for at, fd in enumerate(received.fds):
            ours = os.dup(fd)
            try:
                if at < num_ranks:
                    generation = self.commits.tracker.generation
                    self.memory.adopt(ours, rank=body.ranks[at], generation=generation)
                else:
                    self.group_work.vaults.adopt(ours, body.vault_slots[at - num_ranks])
            except LayoutUnknown as error:
                os.close(ours)
                rank = f"rank {body.ranks[at]}" if at < num_ranks else "a parity region"
                problems.append(f"{rank}: {error}")
        self.group_work.count_again()
        crash_point("smp.adopted")
        return messages.Refused("; ".join(problems)) if problems else messages.Done()

    def keep_run_state(self, body: smp_messages.PersistRunState) -> messages.AnyMessage:
        if len(body.run_state) > MAX_RUN_STATE_BYTES:
            return messages.Refused(
                f"{len(body.run_state)} bytes of run state; the limit is {MAX_RUN_STATE_BYTES}"
            )
        self._run_state = body.run_state
        return messages.Done()

    def write_checkpoint(self, asker: Requester, body: checkpoint_messages.WriteCheckpoint) -> None:
        tracker = self.commits.world()
        if body.version is None and not tracker.sees_all:
            why = "not all ranks of the run are on this node, and no version is named"
            asker.tell(checkpoint_messages.CheckpointFailed(why))
        else:
            self.checkpoints.write(asker, body, tracker)

    def _loaded(self, loaded: LoadedCheckpoint) -> None:
        self.group_work.restores.share(loaded.rest)
        self.memory.put_instead(loaded.fds, self.commits.tracker.generation)
        for arena in self.memory.all():
            self._tell_agent(granted(arena.shape), fds=(arena.fd,))
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
        self.group_work.free()
        self.memory.free()
        self.commits.forget_page()

    def _tell_agent(self, body: messages.AnyMessage, *, fds: tuple[int, ...] = ()) -> None:
        if self.agent is not None:
            self.agent.tell(body, fds=fds)
