"""The worker's line to its SMP.

Runs in:  worker, training thread and copy thread; one lock, so one asker at a time.
Takes in: the socket's path, from the context.
Gives:    memory, and word of each seal; every call has a deadline.
Survives: the SMP: a lost line is opened anew at the next call, for its successor listens at the
          same path, and the last seal is told again.

Rule: an SMP that does not answer may cost protection, never the run: what is asked between two
      steps waits for a moment, once in a while.
"""

import contextlib
import os
import threading
from collections.abc import Sequence

from ftrun import clock
from ftrun.errors import LayoutUnknown, MemoryTooSmall, PeerError, PeerTimeout, ProtocolError
from ftrun.ids import Rank, Version
from ftrun.wire.messages.envelope import AnyMessage, Done, Hello, Refused
from ftrun.wire.messages.worker import (
    ArenaGranted,
    AwaitRestored,
    FetchPieces,
    FetchShardHeaders,
    MemoryRefused,
    OpenShards,
    PiecesFetched,
    RequestArena,
    ReserveMemory,
    ShardHeadersFetched,
    ShardSealed,
    ShardSkipped,
    ShardsOpened,
    WithdrawShard,
)
from ftrun.wire.shared_memory.arena import arena_bytes
from ftrun.wire.transport.channel import Channel, ReceivedMessage, connect
from ftrun.worker.context import WorkerContext

_CONNECT_S = 1.0
_ANSWER_S = 60.0
_SLOWEST_BYTES_S = 0.1 * (1 << 30)
"""At which a node allocates arenas at least, of all its ranks together. Measured: 6 GiB/s alone
(2026-11); less where a virtual machine must ask its host for each page."""

_RESERVE_S = 10.0
_WITHDRAW_S = 2.0
_REST_S = 10.0
"""After an answer that has not come, nothing is withdrawn for so long; doubles with each."""

_LONGEST_REST_S = 600.0
_FETCH_S = 24 * 3600.0


class WorkerSmpClient:
    """Asks the SMP, and tells it."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._channel: Channel | None = None
        self._lock = threading.Lock()
        self._untold: ShardSealed | None = None
        self._rest_s = _REST_S
        self._rests_until_s = 0.0
        self.reserved_bytes = 0
        """Of one slot, in the last question whether two fit."""

    def reserve(
        self, image_bytes: int, *, frozen_bytes: int = 0, is_between_steps: bool = False
    ) -> None:
        """Ask whether two slots of this size fit.

        Args:
            image_bytes: of one slot.
            frozen_bytes: of these, for parameters that no optimizer updates.
            is_between_steps: the training waits for the answer.

        Raises:
            MemoryTooSmall: they do not.
            PeerError: the SMP cannot be asked.
        """
        self.reserved_bytes = image_bytes
        body = ReserveMemory(self._context.rank, image_bytes)
        deadline_s = _WITHDRAW_S if is_between_steps else _RESERVE_S
        _raise_if_refused(self._ask(body, deadline_s=deadline_s), frozen_bytes)

    def request_arena(
        self, *, image_bytes: int, num_pieces: int, layout_id: int, frozen_bytes: int = 0
    ) -> int:
        """The descriptor of a new arena, the caller's to close.

        Waits for as long as a slow node may take to allocate such arenas for all its ranks.

        Raises:
            MemoryTooSmall, PeerError.
        """
        context = self._context
        received = self._ask(
            RequestArena(context.rank, context.world_size, image_bytes, num_pieces, layout_id),
            deadline_s=allocation_limit_s(arena_bytes(image_bytes, num_pieces)),
        )
        _raise_if_refused(received, frozen_bytes)
        if not isinstance(received.body, ArenaGranted) or len(received.fds) != 1:
            raise ProtocolError(f"the SMP answered {received.body!r} to a request for memory")
        return received.fds[0]

    def tell_sealed(self, *, step: int, layout_id: int) -> None:
        """Tell of a seal; where the SMP is gone, `tell_again` does it later."""
        context = self._context
        self._untold = ShardSealed(context.rank, context.generation, step, layout_id)
        self.tell_again()

    def tell_again(self) -> None:
        """Tell of the last seal if that has not worked yet. Never raises for a missing SMP."""
        if self._untold is None:
            return
        with self._lock, contextlib.suppress(PeerError):
            for _ in range(2):  # the first may find a line whose other end is long dead
                try:
                    self._connected().send(self._untold, deadline_s=_CONNECT_S)
                except PeerError:
                    self._drop()
                else:
                    self._untold = None
                    return

    def tell_skipped(self, step: int) -> None:
        """Tell that this rank has none of a step. Never raises for a missing SMP.

        One that is started anew begins with no rank's skips: whoever waits gives up by itself.
        """
        context = self._context
        with self._lock, contextlib.suppress(PeerError):
            try:
                body = ShardSkipped(context.rank, context.generation, step)
                self._connected().send(body, deadline_s=_CONNECT_S)
            except PeerError:
                self._drop()

    def withdraw(self, step: int) -> bool:
        """Take back a seal that was not committed; whether the SMP agrees to forget it.

        The training waits for the answer. One that does not come leaves the seal as it was: its
        slot stays taken, until the SMP is heard of by the command page.
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
        """A descriptor of the arena with the version to restore, once it has come from elsewhere.

        However long that takes: the SMP answers where it cannot come, and where the SMP is gone
        the connection is.

        Raises:
            LayoutUnknown: it cannot be had.
            PeerError: the SMP cannot be asked.
        """
        body = AwaitRestored(self._context.rank, wanted.generation, wanted.step)
        received = self._ask(body, deadline_s=_FETCH_S)
        if isinstance(received.body, Refused):
            raise LayoutUnknown(f"{wanted} is not to be had: {received.body.why}")
        if not isinstance(received.body, ArenaGranted) or len(received.fds) != 1:
            raise ProtocolError(f"the SMP answered {received.body!r} to a wait for {wanted}")
        return received.fds[0]

    def open_images(self, wanted: Version, world_size: int) -> dict[Rank, int]:
        """Descriptors of the shards of a version on this node, by rank, the caller's to close.

        Args:
            wanted: the version.
            world_size: of the ranks that took it.

        Raises:
            LayoutUnknown: the SMP refuses.
            PeerError: it cannot be asked.
        """
        body = OpenShards(self._context.rank, wanted.generation, wanted.step, world_size)
        received = self._ask(body)
        if isinstance(received.body, Refused):
            raise LayoutUnknown(f"the shards of {wanted} cannot be opened: {received.body.why}")
        if not isinstance(received.body, ShardsOpened):
            raise ProtocolError(f"the SMP answered {received.body!r} to a question about shards")
        return dict(zip(map(Rank, received.body.ranks), received.fds, strict=True))

    def fetch_heads(self, wanted: Version, ranks: Sequence[Rank]) -> tuple[int, ...]:
        """Descriptors of the heads of shards that are elsewhere, in this order.

        Raises:
            LayoutUnknown: one of them is not to be had.
            PeerError: the SMP cannot be asked.
        """
        rank = self._context.rank
        body = FetchShardHeaders(rank, wanted.generation, wanted.step, list(ranks))
        return self._fetch(body, ShardHeadersFetched, len(ranks))

    def fetch_pieces(self, wanted: Version, pieces: Sequence[tuple[int, int, int]]) -> int:
        """A descriptor of pieces of such shards, one after the other; raises as `fetch_heads`.

        Args:
            wanted: the version.
            pieces: (rank, first, how many).
        """
        rank = self._context.rank
        body = FetchPieces(rank, wanted.generation, wanted.step, list(pieces))
        return self._fetch(body, PiecesFetched, 1)[0]

    def _fetch(self, body: AnyMessage, kind: type[object], num_fds: int) -> tuple[int, ...]:
        received = self._ask(body, deadline_s=_FETCH_S)
        if isinstance(received.body, Refused):
            raise LayoutUnknown(received.body.why)
        if not isinstance(received.body, kind) or len(received.fds) != num_fds:
            raise ProtocolError(f"the SMP answered {received.body!r} to a question about shards")
        return received.fds

    def close(self) -> None:
        with self._lock:
            self._drop()

    def _ask(self, body: AnyMessage, *, deadline_s: float = _ANSWER_S) -> ReceivedMessage:
        with self._lock:
            try:
                return self._connected().ask(body, deadline_s=deadline_s)
            except PeerTimeout:
                self._drop()  # whoever listens there at the next question may be another
                raise
            except PeerError:
                self._drop()
            try:
                return self._connected().ask(body, deadline_s=deadline_s)
            except PeerError:
                self._drop()
                raise

    def _connected(self) -> Channel:
        if self._channel is None:
            context = self._context
            self._channel = connect(
                context.smp_socket,
                run_id=context.run_id,
                peer="the SMP",
                hello=Hello(role="worker", pid=os.getpid(), rank=context.rank),
                deadline_s=_CONNECT_S,
            )
            self._channel.generation = context.generation
            self._channel.incarnation = context.incarnation
        return self._channel

    def _drop(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def allocation_limit_s(total_bytes: int) -> float:
    """Longest wait for an arena of this size: other ranks of the node may come first."""
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
        raise ProtocolError(f"the SMP answered {body!r} to a question about memory")
