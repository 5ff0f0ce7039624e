"""The agent's side of the SMP: starts it, asks it things, hands it the memory of the one before.

Runs in:  agent, main thread.
Takes in: the run folder.
Gives:    restore points, checkpoints; duplicates of its memory, see `held_memory`.
Survives: the SMP: its memfds are held here too and are handed to the next one.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ftrun import clock
from ftrun.agent.launch.process import ChildProcess, python_command, spawn
from ftrun.agent.snapshots.retained_memory import RetainedMemory
from ftrun.config import CheckpointConfig
from ftrun.errors import FtrunError, PeerError, PeerLost, PeerTimeout
from ftrun.ids import Rank, Version, version
from ftrun.wire.messages import checkpoint as checkpoint_messages
from ftrun.wire.messages import envelope as messages
from ftrun.wire.messages import smp as smp_messages
from ftrun.wire.messages import worker as worker_messages
from ftrun.wire.run_environment import RunFolder
from ftrun.wire.transport.channel import Channel, ReceivedMessage, connect
from ftrun.wire.transport.secret import Secret

START_WAIT_S = 20.0
ANSWER_WAIT_S = 30.0
CHECKPOINT_WAIT_S = 3600.0
END_WAIT_S = 5.0
"""For the record of the end; without it another run looks for a while whether this one is alive."""


@dataclass
class AgentSmpClient:
    """One SMP at a time, and the memory of all of them."""

    folder: RunFolder
    orphan_s: float
    child: ChildProcess | None = None
    """None also where the SMP was found alive: then it is the stub's child, not ours."""
    channel: Channel | None = None
    committed: Version | None = None
    last_checkpoint: checkpoint_messages.CheckpointWritten | None = None
    last_checkpoint_s: float = 0.0
    num_checkpoints: int = 0
    num_commits: int = 0
    was_adopted: bool = False
    """The memory comes from an earlier `ftrun` of this run."""
    refused: str = ""
    """Why the last checkpoint could not be written."""
    memory: RetainedMemory = field(default_factory=RetainedMemory)
    ready_version: Version | None = None
    """The newest version that this node holds and its group protects, in this generation."""
    survives: int = 0
    """So many nodes of the group may go, for that version."""
    survives_why: str = ""
    abandoned_step: int = -1
    restore_failed: str = ""
    restore_lost_links: bool = False
    unreachable: tuple[str, ...] = ()
    """Nodes that the SMP cannot reach now."""
    is_restored: bool = False
    """Every local rank has the version that its generation starts from."""
    notices: deque[smp_messages.SmpNotice] = field(default_factory=lambda: deque(maxlen=100))
    last_part: checkpoint_messages.CheckpointWritten | None = None
    """Written after the newest checkpoint: a part whose other parts were not complete then."""
    port: int = 0
    """Where the SMPs of other nodes reach this one; 0: nowhere."""
    answer_wait_s: float = ANSWER_WAIT_S
    _generation: int = -1
    _local_ranks: frozenset[Rank] = frozenset()
    _run_state: bytes = b""
    writing: bool = False

    @property
    def children(self) -> list[ChildProcess]:
        return [self.child] if self.child is not None else []

    def find(self) -> bytes | None:
        """Adopt an SMP that outlived its agent: its memory, and what the last agent left there.

        None when there is no SMP.
        """
        try:
            self.channel = self._connect(1.0)
            handed = self.channel.ask(smp_messages.HandOverMemory(), deadline_s=self.answer_wait_s)
        except PeerError:
            return None
        if not isinstance(handed.body, smp_messages.MemoryHandedOver):
            return None
        arenas = handed.fds[: len(handed.body.ranks)]
        for rank, fd in zip(handed.body.ranks, arenas, strict=True):
            self.memory.keep(Rank(rank), fd)
        vaults = handed.fds[len(arenas) :]
        for slot, fd in zip(handed.body.vault_slots, vaults, strict=True):
            self.memory.keep_vault(slot, fd)
        self._run_state = handed.body.run_state
        self.was_adopted = bool(self.memory.arenas)
        return self._run_state

    def reconnect(self) -> bool:
        """Another connection to the SMP that was found; whether it takes one."""
        try:
            self.channel = self._connect(START_WAIT_S)
        except PeerError:
            return False
        return True

    def start(self) -> None:
        """Start an SMP without waiting for it; `ready` waits."""
        words = ["--run-id", self.folder.run_id, "--socket", str(self.folder.smp_socket)]
        argv = python_command("ftrun.smp", *words, "--orphan-s", str(self.orphan_s))
        if self.memory.held or self.memory.vaults:
            argv.append("--adopt")
        self.folder.smp_socket.unlink(missing_ok=True)
        self.child = spawn(argv, name="smp", variables=os.environ)

    def ready(self) -> None:
        """Connect to the SMP that was started, and hand it the memory of the one before.

        Raises:
            PeerError: it does not come up.
        """
        give_up_s = clock.now_s() + START_WAIT_S
        while True:
            try:
                self.channel = self._connect(START_WAIT_S)
                break
            except PeerLost:
                if clock.now_s() > give_up_s or (self.child is not None and self.child.reap()):
                    raise
                clock.sleep(0.005)
        if self.memory.held or self.memory.vaults:
            self._hand_over()
        if self._run_state:
            self._ask(smp_messages.PersistRunState(self._run_state))

    def complete(self, fds: list[int]) -> None:
        """Bring the SMP that was found what its own agent did not live to bring it.

        One that was started for memory lets its workers wait until some has come, be it none.

        Args:
            fds: arenas that were kept elsewhere, from now on this object's.

        Raises:
            PeerError: it is gone by now; what it had and these are kept here.
        """
        if self.memory.held or self.memory.vaults:
            for fd in fds:
                os.close(fd)  # of the same memory
            return
        self.memory.adopt(fds)
        self._hand_over()

    def _hand_over(self) -> None:
        memory = self.memory
        body = smp_messages.AdoptMemory([rank for rank, _ in memory.held], sorted(memory.vaults))
        self._ask(body, fds=(*(fd for _, fd in memory.held), *memory.vault_fds))

    def listen_for_peers(self, host: str, secret: Secret | None, others: Sequence[str] = ()) -> int:
        """Have it open a port for the SMPs of other nodes; which one.

        Args:
            host: the address of this node.
            secret: of the run.
            others: addresses of its other rails.
        """
        fds = () if secret is None else (secret.as_memfd(),)
        try:
            answer = self._ask(smp_messages.ListenForPeers(host, list(others)), fds=fds).body
        finally:
            for fd in fds:
                os.close(fd)
        self.port = answer.port if isinstance(answer, smp_messages.ListeningForPeers) else 0
        return self.port

    def own(self, ranks: Iterable[int]) -> None:
        """Say which ranks this node had in the generation of the last agent."""
        self._local_ranks = frozenset(Rank(rank) for rank in ranks)

    def begin_generation(self, body: smp_messages.BeginGeneration, command_page: int) -> None:
        """Say who takes part from now on, and what is to be restored."""
        self.ready_version, self.abandoned_step, self.restore_failed = None, -1, ""
        self.is_restored = self.restore_lost_links = False
        self._generation = body.generation
        self.own(body.local_ranks)
        if self.channel is not None:
            self.channel.generation = body.generation
            self._ask(body, fds=(command_page,))

    def commit(self, committed: Version) -> None:
        """Every node of the run is ready with this version."""
        if self.channel is not None:
            self.channel.send(smp_messages.CommitVersion(committed.generation, committed.step))

    def abandon(self, generation: int, step: int) -> None:
        """No uncommitted version up to this step will ever be committed."""
        if self.channel is not None:
            self.channel.send(smp_messages.AbandonVersion(generation, step))

    def inventory(self) -> smp_messages.Inventory:
        """What this node holds: its own slots, and its parts in protections.

        It stays as it is told until the next generation begins.
        """
        if self.channel is not None:
            with suppress(PeerError):
                answer = self._ask(smp_messages.InventoryRequest(stand_still=True)).body
                if isinstance(answer, smp_messages.Inventory):
                    return answer
        return smp_messages.Inventory(self.memory.offers())

    def keep_run_state(self, state: bytes) -> None:
        self._run_state = state
        if self.channel is not None:
            self._ask(smp_messages.PersistRunState(state))

    @property
    def whole_versions(self) -> list[Version]:
        """What all ranks here have sealed, committed or not, the newest first."""
        return self.memory.whole_versions(self._local_ranks)

    def void_after(self, newest: Version) -> int:
        """Make sure that no later version ever comes back; the workers must be dead."""
        if self.channel is not None:
            with suppress(PeerError):
                self._ask(smp_messages.VoidAfter(newest.generation, newest.step))
        return self.memory.void(lambda found: found > newest)

    def begin_checkpoint(
        self,
        directory: str,
        settings: CheckpointConfig,
        part_of: Version | None = None,
        token: str = "",
        *,
        life: str,
        is_urgent: bool = False,
    ) -> None:
        """Have the newest committed version written; the answer comes with `collect`.

        Args:
            directory: where.
            settings: how many stay, how fast it may be written.
            part_of: on several nodes: the version of which this node writes its part.
            token: equal on all nodes that write it together, and in no other generation.
            is_urgent: as fast as it goes.
            life: of the run, for the index.
        """
        if self.channel is not None and not self.writing:
            pair = (part_of.generation, part_of.step) if part_of is not None else None
            body = checkpoint_messages.WriteCheckpoint(
                directory,
                settings.keep,
                pair,
                token,
                keep_s=settings.keep_s,
                bytes_per_s=0.0 if is_urgent else settings.bytes_per_s,
                life=life,
                stream_wait_s=0.0 if is_urgent else settings.stream_wait_s,
            )
            self.channel.send(body)
            self.writing = True

    def finish_checkpoint(self, limit_s: float, is_cancelled: Callable[[], bool]) -> bool:
        """Wait for the checkpoint that is being written, so long at most; whether it is over."""
        give_up_s = clock.now_s() + limit_s
        if self.writing and self.channel is not None:
            self.channel.send(checkpoint_messages.ExpediteCheckpoint())
        while self.writing and self.channel is not None:
            if is_cancelled() or clock.now_s() > give_up_s:
                self.refused = "it was not done in time; the one before stays"
                self.writing = False
                return False
            with suppress(PeerTimeout):
                self._take(self.channel.receive(deadline_s=0.1))
        return True

    def load_checkpoint(
        self, body: checkpoint_messages.LoadCheckpoint
    ) -> checkpoint_messages.CheckpointLoaded | str:
        """Fill the arenas from a checkpoint; or why that is not possible."""
        answer = self._ask(body, deadline_s=CHECKPOINT_WAIT_S).body
        if isinstance(answer, checkpoint_messages.CheckpointLoaded):
            return answer
        return answer.why if isinstance(answer, messages.Refused) else repr(answer)

    def end_checkpoints(self, exit_code: int, reason: str, command: str) -> None:
        """Leave a record of the end beside the checkpoints, if this node owns them."""
        body = checkpoint_messages.EndCheckpoints(exit_code, reason, command)
        if self.channel is not None:
            with suppress(PeerError):
                self._ask(body, deadline_s=END_WAIT_S)

    def await_restored(self) -> None:
        """Wait until all of the version is here that was restored, or it is known why it is not.

        Raises:
            PeerError: the SMP is gone, or says neither.
        """
        give_up_s = clock.now_s() + CHECKPOINT_WAIT_S
        while self.channel is not None and not (self.is_restored or self.restore_failed):
            self._take(self.channel.receive(deadline_s=give_up_s - clock.now_s()))

    def collect(self) -> None:
        """Take in what the SMP has said unasked.

        Raises:
            PeerLost: it is gone.
        """
        if self.channel is not None:
            for received in self.channel.receive_ready():
                self._take(received)

    def take_notices(self) -> list[smp_messages.SmpNotice]:
        """What the SMP had to tell the journal since the last call."""
        found = list(self.notices)
        self.notices.clear()
        return found

    def lost(self) -> None:
        """Forget the connection to an SMP that is gone; its memory is kept."""
        if self.channel is not None:
            self.channel.close()
        self.channel, self.unreachable = None, ()
        self.writing = False

    def shutdown(self) -> None:
        """End the SMP and free its memory, whether it answers or not."""
        if self.channel is not None:
            with suppress(FtrunError):
                self._ask(smp_messages.Shutdown(), deadline_s=10.0)
            self.lost()
        if self.child is not None and not self.child.wait(5.0):
            self.child.signal(9)
            self.child.wait(5.0)
        self.memory.close()

    def _ask(
        self,
        body: messages.AnyMessage,
        *,
        fds: tuple[int, ...] = (),
        deadline_s: float = 0.0,
    ) -> ReceivedMessage:
        """Ask, and take in whatever the SMP says unasked before its answer.

        Args:
            body: the question.
            fds: that go with it.
            deadline_s: so long the SMP may say nothing; 0: as long as to most questions.

        Raises:
            PeerLost: it is gone.
            PeerTimeout: it has not answered; should it do so later, nobody takes that for another
                answer.
        """
        if self.channel is None:
            raise PeerLost(peer="the SMP")
        number = self.channel.pose(body, fds=fds)
        while True:
            received = self.channel.receive(deadline_s=deadline_s or self.answer_wait_s)
            if received.envelope.question == number:
                return received
            self._take(received)

    def _take(self, received: ReceivedMessage) -> None:
        """Deal with what was not asked for, or not any more."""
        body = received.body
        if received.envelope.question:
            received.close()
            return
        match body:
            case worker_messages.ArenaGranted():
                self.memory.keep(Rank(body.rank), *received.fds)
            case smp_messages.VersionCommitted():
                self.committed = version(body.generation, body.step)
                self.num_commits += 1
                if self.committed.generation == self._generation:
                    self.memory.drop_other_ranks(self._local_ranks)
                self.memory.drop_old_layouts(self.committed)
            case checkpoint_messages.CheckpointWritten(is_part=True):
                self.writing, self.refused, self.last_part = False, body.note, body
            case checkpoint_messages.CheckpointWritten():
                self.last_checkpoint, self.refused, self.writing = body, "", False
                self.last_part = None  # of a newer version that not all nodes hold
                self.num_checkpoints += 1
                self.last_checkpoint_s = clock.now_s()
            case checkpoint_messages.CheckpointFailed():
                self.refused, self.writing = body.why, False
            case _:
                self._take_of_protection(received)

    def _take_of_protection(self, received: ReceivedMessage) -> None:
        """The same for what the SMP says of other nodes."""
        body = received.body
        match body:
            case smp_messages.ParityRegionCreated():
                self.memory.keep_vault(body.slot, *received.fds)
            case smp_messages.VaultFreed():
                self.memory.drop_vault(body.slot)
            case smp_messages.VersionReady():
                self.ready_version = version(body.generation, body.step)
                self.survives, self.survives_why = body.survives, body.why
            case smp_messages.AbandonVersion() if body.generation == self._generation:
                self.abandoned_step = max(self.abandoned_step, body.step)
            case smp_messages.RestoreReady():
                self.is_restored = True
            case smp_messages.RestoreFailed():
                self.restore_failed, self.restore_lost_links = body.why, body.is_link
            case smp_messages.PeersUnreachable():
                self.unreachable = tuple(body.nodes)
            case smp_messages.SmpNotice():
                self.notices.append(body)
            case _:
                pass

    def _connect(self, deadline_s: float) -> Channel:
        return connect(
            self.folder.smp_socket,
            run_id=self.folder.run_id,
            peer="the SMP",
            hello=messages.Hello("agent", os.getpid()),
            deadline_s=deadline_s,
        )
