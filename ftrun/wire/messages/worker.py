"""Messages between a worker and the SMP of its node: memory, sealed shards, what to restore.

Runs in: worker and SMP. Pure.
"""

from ftrun.wire.messages.message import Message


class ReserveMemory(Message, frozen=True, tag="ReserveMemory"):
    """Worker -> SMP: will two slots of this size fit? Done or MemoryRefused.

    Asked at attach with an estimate, and again when the size is known to be larger.
    """

    rank: int
    image_bytes: int


class MemoryRefused(Message, frozen=True, tag="MemoryRefused"):
    """SMP -> worker: what the ranks of the node have asked for does not fit.

    The fields are those of `MemoryTooSmall`.
    """

    needed_bytes: int
    available_bytes: int
    limit: str
    state_bytes: int = 0
    num_ranks: int = 0
    parity_bytes: int = 0


class RequestArena(Message, frozen=True, tag="RequestArena"):
    """Worker -> SMP: memory for a layout. ArenaGranted with one descriptor, or MemoryRefused.

    Asked again while it is being made, it is made once.
    """

    rank: int
    world_size: int
    image_bytes: int
    num_pieces: int
    layout_id: int


class ArenaGranted(Message, frozen=True, tag="ArenaGranted"):
    """SMP -> worker, with the memfd; also SMP -> agent, which keeps a duplicate."""

    rank: int
    layout_id: int


class ShardSealed(Message, frozen=True, tag="ShardSealed"):
    """Worker -> SMP: this rank's shard of a version is sealed. No answer."""

    rank: int
    generation: int
    step: int
    layout_id: int


class WithdrawShard(Message, frozen=True, tag="WithdrawShard"):
    """Worker -> SMP: forget my seal of this version, I am about to overwrite it.

    A rank that skipped or discarded a version which the others have sealed would stop them for
    good: theirs is never committed, and what is not committed is not overwritten. Answer: Done,
    it will never be committed; Refused, it is committed, or about to be.
    """

    rank: int
    generation: int
    step: int


class ShardSkipped(Message, frozen=True, tag="ShardSkipped"):
    """Worker -> SMP: a snapshot of this step fell due and I have taken none. No answer.

    Whoever has seen the last commit a moment earlier may have taken it, and waits for the rest.
    """

    rank: int
    generation: int
    step: int


class AwaitRestored(Message, frozen=True, tag="AwaitRestored"):
    """Worker -> SMP: the arena with this version, which is still on its way from other nodes.

    Answer, when it has come: ArenaGranted with the descriptor; or Refused, where it cannot come.
    """

    rank: int
    generation: int
    step: int


class OpenShards(Message, frozen=True, tag="OpenImages"):
    """Worker -> SMP: every shard of a version that another number of ranks has taken.

    Answer: ImagesOpened with a read-only descriptor for each rank, or Refused.
    """

    rank: int
    generation: int
    step: int
    world_size: int


class ShardsOpened(Message, frozen=True, tag="ImagesOpened"):
    """SMP -> worker, with one memfd per entry: arenas in which the version is sealed.

    Args:
        ranks: of the old world, in the order of the descriptors; those that are here.
    """

    ranks: list[int]


class FetchShardHeaders(Message, frozen=True, tag="FetchHeads"):
    """Worker -> SMP: heads of shards of a version that are on other nodes, or were on lost ones.

    Answer: HeadsFetched with a memfd for each of them (see wire/shard_heads.py), or Refused.

    Args:
        ranks: of the old world.
    """

    rank: int
    generation: int
    step: int
    ranks: list[int]


class ShardHeadersFetched(Message, frozen=True, tag="HeadsFetched"):
    """SMP -> worker, with one memfd per entry."""

    ranks: list[int]


class FetchPieces(Message, frozen=True, tag="FetchPieces"):
    """Worker -> SMP: pieces of such shards, after their heads; no more than 64 MiB in all.

    Answer: PiecesFetched with a memfd that holds them one after the other, or Refused. The
    worker compares each with its digest.

    Args:
        wanted: (old rank, first piece, how many).
    """

    rank: int
    generation: int
    step: int
    wanted: list[tuple[int, int, int]]


class PiecesFetched(Message, frozen=True, tag="PiecesFetched"):
    """SMP -> worker, with one memfd."""

    num_bytes: int
