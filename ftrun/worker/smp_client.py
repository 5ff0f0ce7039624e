"""The worker's connection to its SMP.

Runs in:  worker, training thread and copy thread; a lock allows one request at a time.
Takes in: the socket path, from the context.
Gives:    arenas and shard descriptors from the SMP; a notification to it for each seal. Every call
          has a deadline.
Survives: the SMP: the next call reconnects, because the SMP's successor listens at the same path,
          and the last seal is reported again.

Rule: an unresponsive SMP may cost protection, but never the run. Requests between two steps have a
      short deadline, and withdrawals pause after a timeout.
"""

import contextlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from ftrun import clock
from ftrun.errors import LayoutUnknown, MemoryTooSmall, PeerError, PeerTimeout, ProtocolError
from ftrun.ids import Incarnation, Rank, Version
from ftrun.snapshot.replica_shares import ReplicaCheck
from ftrun.wire.messages.envelope import AnyMessage, Done, Hello, Refused
from ftrun.wire.messages.files import OpenSavedFile, SavedFileOpened, SaveFile
from ftrun.wire.messages.worker import (
    ArenaGranted,
    AwaitRestored,
    FetchPieces,
    FetchShardHeaders,
    MemoryRefused,
    OpenShards,
    PiecesFetched,
    PrepareArena,
    RequestArena,
    RequestShares,
    ReserveMemory,
    ShardHeadersFetched,
    ShardSealed,
    ShardSkipped,
    ShardsOpened,
    SharesGranted,
    WithdrawShard,
)
from ftrun.wire.shared_memory.arena import arena_bytes
from ftrun.wire.transport.channel import Channel, ReceivedMessage, connect
from ftrun.worker.context import WorkerContext

_CONNECT_S = 1.0
_ANSWER_S = 60.0
_SLOWEST_BYTES_S = 0.1 * (1 << 30)
"""Lowest rate assumed for a node that allocates arenas for all its ranks together. Measured:
6 GiB/s alone (2026-11); less if a virtual machine must request each page from its host."""

_RESERVE_S = 10.0
_WITHDRAW_S = 2.0
_REST_S = 10.0
"""Seconds without withdrawals after a withdrawal that timed out; doubles with each timeout."""

_LONGEST_REST_S = 600.0
_FETCH_S = 24 * 3600.0


class WorkerSmpClient:
    """Sends requests and notifications to the SMP of this node.

    Raises:
        PeerError: in each request, if the SMP does not answer.
        LayoutUnknown: in each request for shards, if the SMP refuses it.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._channel: Channel | None = None
        self._lock = threading.Lock()
        self._unsent: ShardSealed | None = None
        self._rest_s = _REST_S
        self._rests_until_s = 0.0
        self.reserved_bytes = 0
        """Image size in the last `reserve` request."""

    def reserve(
        self, image_bytes: int, *, frozen_bytes: int = 0, is_between_steps: bool = False
    ) -> None:
        """Request that the SMP reserve memory for two slots.

        Args:
            image_bytes: size of one slot's image.
            frozen_bytes: part of `image_bytes` for parameters that no optimizer updates.
            is_between_steps: the training waits for the answer, so the deadline is shorter.

        Raises:
            MemoryTooSmall: two slots do not fit.
        """
        self.reserved_bytes = image_bytes
        body = ReserveMemory(self._context.rank, image_bytes)
        deadline_s = _WITHDRAW_S if is_between_steps else _RESERVE_S
        _raise_if_refused(self._ask(body, deadline_s=deadline_s), frozen_bytes)

    def prepare_arena(self, *, image_bytes: int, num_pieces: int) -> int:
        """Return the descriptor of memory for an arena; the caller closes it.

        Raises MemoryTooSmall, or ProtocolError if the rank needs none.
        """
        context = self._context
        body = PrepareArena(context.rank, context.world_size, image_bytes, num_pieces)
        return self._arena(body, arena_bytes(image_bytes, num_pieces))

    def request_arena(
        self, *, image_bytes: int, num_pieces: int, layout_id: int, frozen_bytes: int = 0
    ) -> int:
        """Return the descriptor of a new arena; the caller closes it. Raises MemoryTooSmall.

        The deadline allows for a slow node that makes the arenas of all its ranks.
        """
        context = self._context
        body = RequestArena(context.rank, context.world_size, image_bytes, num_pieces, layout_id)
        return self._arena(body, arena_bytes(image_bytes, num_pieces), frozen_bytes)

    def _arena(self, body: AnyMessage, total_bytes: int, frozen_bytes: int = 0) -> int:
        received = self._ask(body, deadline_s=allocation_limit_s(total_bytes))
        _raise_if_refused(received, frozen_bytes)
        if not isinstance(received.body, ArenaGranted) or len(received.fds) != 1:
            raise ProtocolError(f"the SMP answered {received.body!r} to a request for memory")
        return received.fds[0]

    def request_shares(self, key: int, members: Sequence[Rank]) -> tuple[Rank, ...]:
        """Return the ranks that share their replicas with this one; empty if the SMP refuses.

        `key`: see `key_of`. `members`: of the restored shard; empty: the SMP decides.
        """
        body = RequestShares(self._context.rank, key, list(members))
        received = self._ask(body, deadline_s=_WITHDRAW_S)
        if isinstance(received.body, SharesGranted):
            return tuple(map(Rank, received.body.members))
        if not isinstance(received.body, Refused):
            raise ProtocolError(f"the SMP answered {received.body!r} to a request for shares")
        return ()

    def report_sealed(
        self, *, step: int, layout_id: int, check: ReplicaCheck | None = None
    ) -> None:
        """Report a seal; if the SMP is unreachable, `send_again` reports it later."""
        context = self._context
        self._unsent = ShardSealed(context.rank, context.generation, step, layout_id, check)
        self.send_again()

    def send_again(self) -> None:
        """Report the last seal if the SMP has not received it. Ignores an unreachable SMP."""
        if self._unsent is None:
            return
        with self._lock, contextlib.suppress(PeerError):
            for _ in range(2):  # the first send may fail on a connection to an SMP that has ended
                try:
                    self._connected().send(self._unsent, deadline_s=_CONNECT_S)
                except PeerError:
                    self._drop()
                else:
                    self._unsent = None
                    return

    def report_skipped(self, step: int) -> None:
        """Report that this rank has no snapshot of a step. Ignores an unreachable SMP.

        A restarted SMP has no record of skips. Ranks that wait for the commit then time out.
        """
        context = self._context
        with self._lock, contextlib.suppress(PeerError):
            try:
                body = ShardSkipped(context.rank, context.generation, step)
                self._connected().send(body, deadline_s=_CONNECT_S)
            except PeerError:
                self._drop()

    def withdraw(self, step: int) -> bool:
        """Withdraw an uncommitted seal; return whether the SMP confirmed it.

        The training waits for the answer. Without an answer the seal stays valid, and its slot
        stays occupied until the command page shows the step as committed or abandoned.
        """
        context = self._context
        if clock.now_s() < self._rests_until_s:
            return False
        body = WithdrawShard(context.rank, context.generation, step)
        try:
            received = self._ask(body, deadline_s=_WITHDRAW_S)
        except PeerTimeout:
            self._rests_until_s = clock.now_s() + self._rest_s
            self._rest_s = min(2 * self._rest_s, _LONGEST_REST_S)
            return False
        except PeerError:
            return False
        self._rest_s = _REST_S
        return isinstance(received.body, Done)

    def await_restored(self, wanted: Version) -> int:
        """Wait until the version to restore has arrived; return a descriptor of its arena.

        The deadline is 24 h, because the SMP answers if the version cannot be fetched, and the
        connection closes if the SMP ends.
        """
        body = AwaitRestored(self._context.rank, wanted.generation, wanted.step)
        refusal = f"{wanted} cannot be fetched: "
        return self._fetch(body, ArenaGranted, refusal, num_fds=1, deadline_s=_FETCH_S).fds[0]

    def open_images(self, wanted: Version, world_size: int) -> dict[Rank, int]:
        """Return descriptors of a version's shards on this node; the caller closes them."""
        body = OpenShards(self._context.rank, wanted.generation, wanted.step, world_size)
        received = self._fetch(body, ShardsOpened, f"the shards of {wanted} cannot be opened: ")
        assert isinstance(received.body, ShardsOpened)
        return dict(zip(map(Rank, received.body.ranks), received.fds, strict=True))

    def fetch_headers(self, wanted: Version, ranks: Sequence[Rank]) -> tuple[int, ...]:
        """Return descriptors of shard headers from other nodes, in the order of `ranks`."""
        rank = self._context.rank
        body = FetchShardHeaders(rank, wanted.generation, wanted.step, list(ranks))
        return self._fetch(body, ShardHeadersFetched, num_fds=len(ranks), deadline_s=_FETCH_S).fds

    def fetch_pieces(self, wanted: Version, pieces: Sequence[tuple[int, int, int]]) -> int:
        """Return a descriptor of concatenated pieces from other nodes.

        They are given as (rank, index of the first piece, number of pieces).
        """
        rank = self._context.rank
        body = FetchPieces(rank, wanted.generation, wanted.step, list(pieces))
        return self._fetch(body, PiecesFetched, num_fds=1, deadline_s=_FETCH_S).fds[0]

    def save_file(
        self, path: str, fd: int, *, num_bytes: int, mode: int, before: tuple[int, int]
    ) -> None:
        """Hand over the content of a file, which the SMP writes behind."""
        body = SaveFile(self._context.rank, path, num_bytes, mode, before)
        received = self._ask(body, fds=(fd,))
        if not isinstance(received.body, Done):
            raise PeerError(f"the SMP answered {received.body!r} to a file")

    def open_saved_file(self, path: str) -> tuple[SavedFileOpened, int] | None:
        """Return a file that is not written yet, with a descriptor of its content, or None."""
        received = self._ask(OpenSavedFile(self._context.rank, path))
        body = received.body
        return (body, received.fds[0]) if isinstance(body, SavedFileOpened) else None

    def _fetch(
        self,
        body: AnyMessage,
        kind: type[object],
        refusal: str = "",
        *,
        num_fds: int | None = None,
        deadline_s: float = _ANSWER_S,
    ) -> ReceivedMessage:
        received = self._ask(body, deadline_s=deadline_s)
        if isinstance(received.body, Refused):
            raise LayoutUnknown(f"{refusal}{received.body.reason}")
        if not isinstance(received.body, kind) or num_fds not in (None, len(received.fds)):
            raise ProtocolError(f"the SMP answered {received.body!r} to a request for shards")
        return received

    def close(self) -> None:
        """End the connection; a later request connects again, and reports no earlier seal."""
        with self._lock:
            self._unsent = None
            self._drop()

    def _ask(
        self, body: AnyMessage, *, deadline_s: float = _ANSWER_S, fds: tuple[int, ...] = ()
    ) -> ReceivedMessage:
        with self._lock:
            try:
                return self._connected().ask(body, deadline_s=deadline_s, fds=fds)
            except PeerTimeout:
                self._drop()  # at the next request another SMP may listen at this path
                raise
            except PeerError:
                self._drop()
            try:
                return self._connected().ask(body, deadline_s=deadline_s, fds=fds)
            except PeerError:
                self._drop()
                raise

    def _connected(self) -> Channel:
        if self._channel is None:
            context = self._context
            self._channel = connect(
                Path(context.launch.smp_socket),
                run_id=context.run_id,
                peer="the SMP",
                hello=Hello(role="worker", pid=os.getpid(), rank=context.rank),
                deadline_s=_CONNECT_S,
            )
            self._channel.generation = context.generation
            self._channel.incarnation = Incarnation(context.generation)
        return self._channel

    def _drop(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def allocation_limit_s(total_bytes: int) -> float:
    """Deadline for an arena of this size, if all other ranks of the node are served first."""
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return _ANSWER_S + num_ranks * total_bytes / _SLOWEST_BYTES_S


def _raise_if_refused(received: ReceivedMessage, frozen_bytes: int) -> None:
    body = received.body
    if isinstance(body, MemoryRefused):
        raise MemoryTooSmall(
            needed_bytes=body.needed_bytes,
            available_bytes=body.available_bytes,
            limit=body.limit,
            state_bytes=body.state_bytes,
            num_ranks=body.num_ranks,
            parity_bytes=body.parity_bytes,
            frozen_bytes=frozen_bytes,
        )
    if not isinstance(body, (Done, ArenaGranted)):
        raise ProtocolError(f"the SMP answered {body!r} to a request for memory")
