"""What this node sends of its own shards when a version is protected.

Runs in:  the SMP, in the threads of the links that go out.
Takes in: the shards of a version, where each block of them goes, how far the receiver lets us.
Gives:    frames whose bytes lie in the arenas; every piece is compared with its digest first.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ftrun.erasure.fragments import BlockDigest, FragmentHeader, StripeId, pack
from ftrun.erasure.stripes import Stripes
from ftrun.errors import LayoutUnknown, SnapshotCorrupt
from ftrun.ids import Generation
from ftrun.smp.memory.sealed_shards import SealedShards
from ftrun.smp.peer_link import OutgoingFrame
from ftrun.snapshot.stripe_space import StripeSpace
from ftrun.wire.cluster.transfer import BlockData, MirrorData
from ftrun.wire.transport.bulk_socket import Bytes, digest_of


@dataclass(frozen=True, slots=True)
class LocalBlocks:
    """A node's blocks, as they lie in its slots.

    Args:
        of: a stripe id of this version; its stripe does not matter.
        made_in: the generation in which it is protected.
        place: this node's.
    """

    shards: SealedShards
    space: StripeSpace
    stripes: Stripes
    of: StripeId
    made_in: Generation
    place: int

    def read(self, block: int) -> tuple[bytes, list[memoryview]]:
        """A block's header and its bytes where they lie, compared with their digests.

        Raises:
            SnapshotCorrupt: a piece is not what was captured.
            LayoutUnknown: a rank is not here.
        """
        self.shards.check(self.space.pieces_in(block))
        views = self.shards.views(self.space.extents(block))
        stripe = self.stripes.stripe_of(self.place, block)
        header = FragmentHeader(
            StripeId(self.of.run, self.of.version, self.of.group, stripe),
            self.made_in,
            self.stripes.index(stripe, self.place),
            BlockDigest(sum(map(len, views)), digest_of(views)),
        )
        return pack(header), views


class BlockSender:
    """One version, or one attempt at it, on its way out. Its streams end when it is stopped.

    Args:
        blocks: of this node.
        attempt: for the frames.
        failed: called once, in a link's thread, where something here is not as it was sealed.
    """

    def __init__(self, blocks: LocalBlocks, *, attempt: int, failed: Callable[[str], None]) -> None:
        self.blocks = blocks
        self.attempt = attempt
        self.is_stopped = False
        self._failed = failed
        self._lock = threading.Lock()

    def stop(self) -> None:
        self.is_stopped = True

    def fail(self, why: str) -> None:
        """Stop all streams, and say why if nobody has stopped them before."""
        with self._lock:
            was_stopped, self.is_stopped = self.is_stopped, True
        if not was_stopped:
            self._failed(why)


class BlockStream:
    """The blocks of this node whose stripes one other node gathers, in order of stripe."""

    def __init__(self, sending: BlockSender, gatherer: int) -> None:
        self._sending = sending
        blocks = sending.blocks
        stripes = blocks.stripes
        self._below = 0
        mine = range(blocks.space.num_blocks)
        wanted = ((block, stripes.stripe_of(blocks.place, block)) for block in mine)
        self._left = deque(
            (block, stripe // stripes.n)
            for block, stripe in wanted
            if stripes.parity_nodes(stripe)[0] == gatherer
        )

    @property
    def is_over(self) -> bool:
        return self._sending.is_stopped or not self._left

    def let(self, below: int) -> None:
        """The gatherer takes stripes below this number of those it gathers."""
        self._below = max(self._below, below)

    def take(self) -> OutgoingFrame | None:
        if self.is_over or self._left[0][1] >= self._below:
            return None
        block, _ = self._left.popleft()
        own = self._sending.blocks
        try:
            header, views = own.read(block)
        except (SnapshotCorrupt, LayoutUnknown) as error:
            self._sending.fail(str(error))
            return None
        version = own.shards.version
        body = BlockData(version.generation, version.step, self._sending.attempt, header)
        return OutgoingFrame(body, views)


class MirrorStream:
    """The mirror of this node, once."""

    def __init__(self, sending: BlockSender, parts: Sequence[Bytes]) -> None:
        self._sending = sending
        self._parts = parts
        self._is_sent = False

    @property
    def is_over(self) -> bool:
        return self._sending.is_stopped or self._is_sent

    def take(self) -> OutgoingFrame | None:
        if self.is_over:
            return None
        self._is_sent = True
        version = self._sending.blocks.shards.version
        body = MirrorData(version.generation, version.step, self._sending.attempt)
        return OutgoingFrame(body, self._parts, digest_of(self._parts))
