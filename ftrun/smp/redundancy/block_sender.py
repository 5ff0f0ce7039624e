"""Sends the blocks and the mirror of this node when a version is protected.

Runs in:  the SMP, in the threads of the outgoing links.
Takes in: the shards of a version, the gatherer of each block, and the window of each gatherer.
Gives:    frames that refer to the bytes in the arenas. Each piece is compared with its digest
          before it is sent.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence

from ftrun.erasure.fragments import BlockDigest, FragmentHeader, StripeId, pack
from ftrun.errors import LayoutUnknown, SnapshotCorrupt
from ftrun.ids import Generation
from ftrun.smp.memory.sealed_shards import SealedShards
from ftrun.smp.peer_link import OutgoingFrame
from ftrun.smp.redundancy.group import group_of, stripes_of
from ftrun.snapshot.redundancy import StripeSpace
from ftrun.wire.cluster.transfer import BlockData, MirrorData
from ftrun.wire.shared_memory.parity_region import ParityRecord
from ftrun.wire.transport.bulk_socket import Bytes, digest_of


class LocalBlocks:
    """The blocks of a node, read in place; raises LayoutUnknown if shards and record differ."""

    def __init__(self, shards: SealedShards, record: ParityRecord, run: int) -> None:
        pieces = {int(rank): shard.layout.pieces for rank, shard in shards.shards.items()}
        self.shards = shards
        self.space = StripeSpace(record.own, pieces, record.block_bytes)
        self.stripes = stripes_of(record)
        self.position = record.position
        self._run = run
        self._version, self._group_id = record.version, group_of(record).id
        self._protected_in = Generation(record.protected_in)

    def read(self, block: int) -> tuple[bytes, list[memoryview]]:
        """Return a block's packed header and its checked bytes; raises as `SealedShards`."""
        self.shards.check(self.space.pieces_in(block))
        views = self.shards.views(self.space.extents(block))
        stripe = self.stripes.stripe_of(self.position, block)
        header = FragmentHeader(
            StripeId(self._run, self._version, self._group_id, stripe),
            self._protected_in,
            self.stripes.index(stripe, self.position),
            BlockDigest(sum(map(len, views)), digest_of(views)),
        )
        return pack(header), views


class BlockSender:
    """One attempt to send one version; `stop` ends its streams.

    `failed` is called at most once, in a link's thread, if local data differs from the sealed data.
    """

    def __init__(self, blocks: LocalBlocks, *, attempt: int, failed: Callable[[str], None]) -> None:
        self.blocks = blocks
        self.attempt = attempt
        self.is_stopped = False
        self._failed = failed
        self._lock = threading.Lock()

    def stop(self) -> None:
        self.is_stopped = True

    def fail(self, reason: str) -> None:
        """Stop all streams, and report the reason if they were not stopped before."""
        with self._lock:
            was_stopped, self.is_stopped = self.is_stopped, True
        if not was_stopped:
            self._failed(reason)


class BlockStream:
    """Sends the blocks of this node whose stripes one other node gathers, in stripe order."""

    def __init__(self, sending: BlockSender, gatherer: int) -> None:
        self._sending = sending
        blocks = sending.blocks
        stripes = blocks.stripes
        self._below = 0
        mine = range(blocks.space.num_blocks)
        wanted = ((block, stripes.stripe_of(blocks.position, block)) for block in mine)
        self._left = deque(
            (block, stripe // stripes.n)
            for block, stripe in wanted
            if stripes.parity_nodes(stripe)[0] == gatherer
        )

    @property
    def is_over(self) -> bool:
        return self._sending.is_stopped or not self._left

    def let(self, below: int) -> None:
        """Allow to send blocks of the gatherer's stripes whose numbers are below `below`."""
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
    """Sends the mirror of this node once."""

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
