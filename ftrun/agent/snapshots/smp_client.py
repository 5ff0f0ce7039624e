"""The agent's side of the SMP: starts it, sends requests, and hands over retained memory.

Runs in the main thread. The agent holds duplicates of the SMP's memfds, which the next SMP
receives.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ftrun import clock
from ftrun.agent.launch.process import ChildProcess, python_command, spawn
from ftrun.agent.snapshots.retained_files import RetainedFiles
from ftrun.agent.snapshots.retained_memory import RetainedMemory
from ftrun.errors import FtrunError, PeerError, PeerLost, PeerTimeout
from ftrun.ids import Rank, Version, version
from ftrun.recovery.commands import AbandonStep, CommitSnapshot
from ftrun.recovery.snapshot_coordination import MAX_WRITES
from ftrun.wire.cluster.generation import VersionPair
from ftrun.wire.messages import checkpoint as checkpoint_messages
from ftrun.wire.messages import envelope as messages
from ftrun.wire.messages import files as file_messages
from ftrun.wire.messages import smp as smp_messages
from ftrun.wire.messages import worker as worker_messages
from ftrun.wire.run_environment import RunFolder
from ftrun.wire.shared_memory.pages import CommandField, SharedPage
from ftrun.wire.transport.channel import Channel, ReceivedMessage, connect
from ftrun.wire.transport.secret import Secret

START_WAIT_S = 20.0
ANSWER_WAIT_S = 30.0
CHECKPOINT_WAIT_S = 3600.0
SHARE_WAIT_S = 10.0
"""Longest wait of an SMP for those that write the same checkpoint; then it writes all its bytes."""

END_WAIT_S = 5.0
"""Limit for the record of the run's end. Without the record, the next run has to check for some
seconds whether this run is alive."""
NOTHING = version(-9, -1)
"""Older than every version, including versions from a checkpoint."""


@dataclass
class AgentSmpClient:
    """The connection to the current SMP, and the memory of this and earlier SMPs."""

    folder: RunFolder
    orphan_timeout_s: float
    child: ChildProcess | None = None
    """None before the start, and for an SMP that outlived its agent: the stub is its parent."""
    channel: Channel | None = None
    committed: Version | None = None
    last_checkpoint: checkpoint_messages.CheckpointWritten | None = None
    last_checkpoint_s: float = 0.0
    num_checkpoints: int = 0
    num_commits: int = 0
    was_adopted: bool = False
    """The memory comes from an earlier `ftrun` of this run."""
    refused: str = ""
    """Reason why the last checkpoint could not be written."""
    superseded: list[str] = field(default_factory=list)
    """Reasons why versions were not written, because later ones were captured or written."""
    memory: RetainedMemory = field(default_factory=RetainedMemory)
    files: RetainedFiles = field(default_factory=RetainedFiles)
    needed: smp_messages.MemoryNeeded = field(default_factory=lambda: smp_messages.MemoryNeeded(0))
    """What snapshots need on this node, as the SMP reported it last."""
    had_pools: bool = False
    """Ranks have captured through pools since the last commit."""
    ready_version: Version | None = None
    """The newest version that this node holds and its group protects, in this generation."""
    survives: int = 0
    """Number of nodes of the group that may be lost without losing `ready_version`."""
    unprotected_reason: str = ""
    abandoned_step: int = -1
    restore_failed: str = ""
    restore_lost_links: bool = False
    unreachable: tuple[str, ...] = ()
    is_restored: bool = False
    """Every local rank has the version that its generation starts from."""
    notices: deque[smp_messages.SmpNotice] = field(default_factory=lambda: deque(maxlen=100))
    last_part: checkpoint_messages.CheckpointWritten | None = None
    """This node's newest checkpoint part, if parts of other nodes are still missing."""
    port: int = 0
    """The port for the SMPs of other nodes; 0: none."""
    answer_wait_s: float = ANSWER_WAIT_S
    _generation: int = -1
    _local_ranks: frozenset[Rank] = frozenset()
    _run_state: bytes = b""
    num_writes: int = 0
    """Checkpoints that the SMP is writing."""
    new_checkpoints: list[checkpoint_messages.CheckpointWritten] = field(default_factory=list)
    """Those that were written since the list was cleared."""
    persisted: VersionPair | None = None
    """The newest version of which this node has completed a checkpoint."""
    new_commits: list[Version] = field(default_factory=list)
    """Versions that were committed since the list was cleared; on one node."""
    _holds_more: bool = False
    """The SMP may have freed an arena at the last commit. It sends no message for that."""

    @property
    def children(self) -> list[ChildProcess]:
        return [self.child] if self.child is not None else []

    def find(self) -> bytes | None:
        """Adopt an SMP that outlived its agent, and its memory.

        Return the persisted state, or None.
        """
        try:
            self.channel = self._connect(1.0)
            handed = self.channel.ask(smp_messages.HandOverMemory(), deadline_s=self.answer_wait_s)
        except PeerError:
            return None
        if not isinstance(handed.body, smp_messages.MemoryHandedOver):
            return None
        self._hold(handed.body, handed.fds)
        self._run_state = handed.body.run_state
        self.was_adopted = bool(self.memory.arenas)
        return self._run_state

    def reconnect(self) -> bool:
        """Connect to the same SMP again, and take duplicates of its current memory."""
        try:
            self.channel = self._connect(START_WAIT_S)
            self._hold_the_same()
        except PeerError:
            self.lost()
            return False
        return True

    def _hold_the_same(self) -> None:
        handed = self._ask(smp_messages.HandOverMemory())
        if isinstance(handed.body, smp_messages.MemoryHandedOver):
            self._hold(handed.body, handed.fds)

    def _hold(self, handed: smp_messages.MemoryHandedOver, fds: Sequence[int]) -> None:
        """Replace the held duplicates by those of this SMP's memory."""
        self.memory.close()
        num_arenas = len(handed.ranks)
        for rank, fd in zip(handed.ranks, fds[:num_arenas], strict=True):
            self.memory.keep(Rank(rank), fd)
        for slot, fd in zip(handed.parity_slots, fds[num_arenas:], strict=True):
            self.memory.retain_parity_region(slot, fd)

    def start(self) -> None:
        words = ["--run-id", self.folder.run_id, "--socket", str(self.folder.smp_socket)]
        argv = python_command("ftrun.smp", *words, "--orphan-s", str(self.orphan_timeout_s))
        if self.memory.held or self.memory.parity_regions:
            argv.append("--adopt")
        self.folder.smp_socket.unlink(missing_ok=True)
        self.child = spawn(argv, name="smp", variables=os.environ)

    def ready(self) -> None:
        """Connect to the SMP that was started, and hand over the memory.

        PeerError after `START_WAIT_S`.
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
        if self.memory.held or self.memory.parity_regions:
            self._hand_over()
        if self._run_state:
            self._ask(smp_messages.PersistRunState(self._run_state))
        for file, fd in self.files.held:
            self.channel.send(file, fds=(fd,))

    def complete(self, fds: list[int]) -> None:
        """Finish the hand-over to an adopted SMP if its own agent ended before.

        The workers of such an SMP wait for a hand-over, which may be empty. `fds` are arenas that
        the stub retained. After a PeerError this object holds all of the memory.
        """
        if self.memory.held or self.memory.parity_regions:
            for fd in fds:
                os.close(fd)  # duplicates of the same memory
            return
        self.memory.adopt(fds)
        self._hand_over()

    def _hand_over(self) -> None:
        memory = self.memory
        slots = sorted(memory.parity_regions)
        body = smp_messages.AdoptMemory([rank for rank, _ in memory.held], slots)
        parity_fds = (memory.parity_regions[slot] for slot in slots)
        self._ask(body, fds=(*(fd for _, fd in memory.held), *parity_fds))

    def listen_for_peers(self, host: str, secret: Secret | None, others: Sequence[str] = ()) -> int:
        """Make the SMP open a port for the SMPs of other nodes; return the port."""
        fds = () if secret is None else (secret.as_memfd(),)
        try:
            answer = self._ask(smp_messages.ListenForPeers(host, list(others)), fds=fds).body
        finally:
            for fd in fds:
                os.close(fd)
        self.port = answer.port if isinstance(answer, smp_messages.ListeningForPeers) else 0
        return self.port

    def own(self, ranks: Iterable[int]) -> None:
        self._local_ranks = frozenset(Rank(rank) for rank in ranks)

    def begin_generation(self, body: smp_messages.BeginGeneration, command_page: int) -> None:
        self.ready_version, self.abandoned_step, self.restore_failed = None, -1, ""
        self.survives = 0
        self.is_restored = self.restore_lost_links = False
        self._generation = body.generation
        self.own(body.local_ranks)
        if self.channel is not None:
            self.channel.generation = body.generation
            self._ask(body, fds=(command_page,))

    def commit(self, committed: Version) -> None:
        if self.channel is not None:
            self.channel.send(smp_messages.CommitVersion(committed.generation, committed.step))

    def abandon(self, generation: int, step: int) -> None:
        """Report that no uncommitted version up to this step will ever be committed."""
        if self.channel is not None:
            self.channel.send(smp_messages.AbandonVersion(generation, step))

    def inventory(self) -> smp_messages.Inventory:
        """Slots and parity regions. The SMP does not change them until the next generation."""
        if self.channel is not None:
            with suppress(PeerError):
                answer = self._ask(smp_messages.InventoryRequest(freeze_versions=True)).body
                if isinstance(answer, smp_messages.Inventory):
                    return answer
        return smp_messages.Inventory(self.memory.offers())

    def persist_run_state(self, state: bytes) -> None:
        self._run_state = state
        if self.channel is not None:
            self._ask(smp_messages.PersistRunState(state))

    @property
    def whole_versions(self) -> list[Version]:
        return self.memory.whole_versions(self._local_ranks)

    def void_after(self, newest: Version) -> int:
        """Void all later versions for good; the workers must be dead."""
        if self.channel is not None:
            with suppress(PeerError):
                self._ask(smp_messages.VoidAfter(newest.generation, newest.step))
        return self.memory.void(lambda found: found > newest)

    def begin_checkpoint(self, order: checkpoint_messages.WriteCheckpoint) -> bool:
        """Have a version written; `collect` receives the answer.

        Return False if this node writes `MAX_WRITES` checkpoints already.
        """
        if self.channel is None:
            return True  # the failure is reported as that of the SMP
        if self.num_writes >= MAX_WRITES:
            return False
        self.channel.send(order)
        self.num_writes += 1
        return True

    def finish_checkpoint(self, give_up_s: float, is_cancelled: Callable[[], bool]) -> bool:
        """Wait for the checkpoints in progress, until `give_up_s` of the monotonic clock.

        False if it was cancelled or is too late.
        """
        if self.num_writes and self.channel is not None:
            self.channel.send(checkpoint_messages.ExpediteCheckpoint())
        while self.num_writes and self.channel is not None:
            if is_cancelled() or clock.now_s() > give_up_s:
                self.refused = "it was not written in time; the previous checkpoint is kept"
                self.num_writes = 0
                return False
            with suppress(PeerTimeout):
                self._take(self.channel.receive(deadline_s=0.1))
        return True

    def finish_files(self, give_up_s: float, is_cancelled: Callable[[], bool]) -> str:
        """Have all files written; return why one is not, empty if all are. Raises PeerError."""
        if self.channel is None:
            raise PeerLost(peer="the SMP")
        number = self.channel.send_request(file_messages.FinishFiles())
        while not is_cancelled() and clock.now_s() < give_up_s:
            with suppress(PeerTimeout):
                received = self.channel.receive(deadline_s=0.1)
                if received.envelope.question == number:
                    body = received.body
                    return body.reason if isinstance(body, messages.Refused) else ""
                self._take(received)
        return "they were not written in time"

    def load_checkpoint(
        self, body: checkpoint_messages.LoadCheckpoint
    ) -> checkpoint_messages.CheckpointLoaded | str:
        answer = self._ask(body, deadline_s=CHECKPOINT_WAIT_S).body
        if isinstance(answer, checkpoint_messages.CheckpointLoaded):
            return answer
        return answer.reason if isinstance(answer, messages.Refused) else repr(answer)

    def end_checkpoints(self, exit_code: int, reason: str, command: str) -> None:
        body = checkpoint_messages.EndCheckpoints(exit_code, reason, command)
        if self.channel is not None:
            with suppress(PeerError):
                self._ask(body, deadline_s=END_WAIT_S)

    def await_restored(self) -> None:
        """Wait until the restored version is here or failed; PeerError after CHECKPOINT_WAIT_S."""
        give_up_s = clock.now_s() + CHECKPOINT_WAIT_S
        while self.channel is not None and not (self.is_restored or self.restore_failed):
            self._take(self.channel.receive(deadline_s=give_up_s - clock.now_s()))

    def collect(self) -> None:
        """Handle the SMP's unsolicited messages; PeerLost if it has ended."""
        if self.channel is not None:
            for received in self.channel.receive_ready():
                self._take(received)
            if self._holds_more:
                self._holds_more = False
                with suppress(PeerTimeout):
                    self._hold_the_same()

    def drain_notices(self) -> list[smp_messages.SmpNotice]:
        found = list(self.notices)
        self.notices.clear()
        return found

    def lost(self) -> None:
        if self.channel is not None:
            with suppress(FtrunError):  # what the SMP has sent before its end, such as a file
                for received in self.channel.receive_ready():
                    self._take(received)
            self.channel.close()
        self.channel, self.unreachable = None, ()
        self.num_writes, self.needed = 0, smp_messages.MemoryNeeded(0)

    def shutdown(self) -> None:
        if self.channel is not None:
            with suppress(FtrunError):
                self._ask(smp_messages.Shutdown(), deadline_s=10.0)
            self.lost()
        if self.child is not None and not self.child.wait(5.0):
            self.child.signal(9)
            self.child.wait(5.0)
        self.memory.close()

    def _ask(
        self, body: messages.AnyMessage, *, fds: tuple[int, ...] = (), deadline_s: float = 0.0
    ) -> ReceivedMessage:
        """Send a request, and handle unsolicited messages that arrive before its answer.

        A late answer is discarded. `deadline_s` is the longest time without any message; 0:
        `answer_wait_s`.

        Raises:
            PeerLost: the SMP has ended.
            PeerTimeout: the SMP has not answered in time.
        """
        if self.channel is None:
            raise PeerLost(peer="the SMP")
        number = self.channel.send_request(body, fds=fds)
        while True:
            received = self.channel.receive(deadline_s=deadline_s or self.answer_wait_s)
            if received.envelope.question == number:
                return received
            self._take(received)

    def _take(self, received: ReceivedMessage) -> None:
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
                self.had_pools = False
                self.new_commits.append(self.committed)
                if self.committed.generation == self._generation:
                    self.memory.drop_other_ranks(self._local_ranks)
                self.memory.drop_previous_layouts(self.committed)
                self._holds_more = self.memory.has_more_than(self.committed)
            case checkpoint_messages.CheckpointWritten(is_part=True):
                self._end_write(body.note)
                self.last_part = body
            case checkpoint_messages.CheckpointWritten():
                self._end_write("")
                self.last_checkpoint = body
                written = (body.generation, body.step)
                self.persisted = max(self.persisted or written, written)
                self.new_checkpoints.append(body)
                self.last_part = None  # set only for a newer version that is incomplete
                self.num_checkpoints += 1
                self.last_checkpoint_s = clock.now_s()
            case checkpoint_messages.CheckpointFailed(is_superseded=True):
                self._end_write(self.refused)
                self.superseded.append(body.reason)
            case checkpoint_messages.CheckpointFailed():
                self._end_write(body.reason)
            case _:
                self._take_of_protection(received)

    def _end_write(self, refused: str) -> None:
        self.num_writes, self.refused = max(0, self.num_writes - 1), refused

    def _take_of_protection(self, received: ReceivedMessage) -> None:
        body = received.body
        match body:
            case smp_messages.ParityRegionCreated():
                self.memory.retain_parity_region(body.slot, *received.fds)
            case smp_messages.MemoryNeeded():
                self._holds_more |= body.num_freed > self.needed.num_freed
                self.needed = body
                self.had_pools |= body.pool_bytes > 0
            case smp_messages.ParityRegionFreed():
                self.memory.drop_parity_region(body.slot)
            case smp_messages.VersionReady():
                self.ready_version = version(body.generation, body.step)
                self.survives, self.unprotected_reason = body.survives, body.reason
            case smp_messages.AbandonVersion() if body.generation == self._generation:
                self.abandoned_step = max(self.abandoned_step, body.step)
            case smp_messages.RestoreReady():
                self.is_restored = True
            case smp_messages.RestoreFailed():
                self.restore_failed, self.restore_lost_links = body.reason, body.is_link
            case smp_messages.PeersUnreachable():
                self.unreachable = tuple(body.nodes)
            case smp_messages.SmpNotice():
                self.notices.append(body)
            case _:
                self.files.take(body, received.fds)

    def _connect(self, deadline_s: float) -> Channel:
        return connect(
            self.folder.smp_socket,
            run_id=self.folder.run_id,
            peer="the SMP",
            hello=messages.Hello("agent", os.getpid()),
            deadline_s=deadline_s,
        )


REPEAT_S = 1.0


class UnconfirmedCommands:
    """The newest commands of one generation that the command page does not show yet."""

    def __init__(self) -> None:
        self._generation = -1
        self._committed: Version | None = None
        self._abandoned_step = -1
        self._due_s = 0.0

    def add(self, command: CommitSnapshot | AbandonStep, generation: int, *, now_s: float) -> None:
        if generation != self._generation:
            self._generation, self._committed, self._abandoned_step = generation, None, -1
        if isinstance(command, CommitSnapshot):
            self._committed = command.version
        else:
            self._abandoned_step = command.step
        self._due_s = now_s + REPEAT_S

    def due(
        self, page: SharedPage, generation: int, *, now_s: float
    ) -> list[CommitSnapshot | AbandonStep]:
        """Commands that the SMP of this generation has not executed, at most every `REPEAT_S`."""
        if now_s < self._due_s or generation != self._generation:
            return []
        self._due_s = now_s + REPEAT_S
        found: list[CommitSnapshot | AbandonStep] = []
        shown = version(
            page.get(CommandField.COMMITTED_GENERATION), page.get(CommandField.COMMITTED_STEP)
        )
        is_current = page.get(CommandField.COMMITTED_IN) >= generation
        if self._committed is not None and not (is_current and shown >= self._committed):
            found.append(CommitSnapshot(self._committed))
        if page.get(CommandField.ABANDONED_STEP) < self._abandoned_step:
            found.append(AbandonStep(self._abandoned_step))
        return found
