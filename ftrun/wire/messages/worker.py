"""What a worker receives from the agent, and its messages with the SMP of its node.

Runs in:  agent, standby, worker and SMP. Pure.
"""

from collections.abc import Mapping

import msgspec

from ftrun.config.profile import SnapshotConfig
from ftrun.ids import Generation, Rank, Version
from ftrun.snapshot.replica_shares import ReplicaCheck
from ftrun.wire.messages.message import Message

_READ_BY_DEVICE = (
    *("CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_", "PYTORCH_", "TORCH_", "LD_LIBRARY_PATH"),
    *("HIP_", "HSA_", "ROCR_", "ROCBLAS_", "AMD_", "ZE_", "SYCL_", "ONEAPI_"),
)
_READ_LATER = (
    *("TORCH_NCCL_", "TORCH_FR_", "TORCH_HOME", "TORCH_CUDA_ARCH_LIST", "CUDA_HOME", "CUDA_PATH"),
    "PYTORCH_NVML_BASED_CUDA_CHECK",  # set in the zygote
)


def read_by_device(variables: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in variables.items()
        if name.startswith(_READ_BY_DEVICE) and not name.startswith(_READ_LATER)
    }


REQUEST_IN_MEMORY = b"LaunchRequest"  # to a standby: the first descriptor is a memfd with it


CONFIRM_S = 5.0
"""Longest wait until an agent has noticed that a process of its own node has ended."""


class BindDevice(msgspec.Struct, frozen=True, tag="BindDevice"):
    """Agent -> standby, once, before the launch request: initialise the device of a local rank.

    Reply: DeviceBound.
    """

    local_rank: int
    variables: dict[str, str]  # those that `read_by_device` selects, of the running rank


class DeviceBound(msgspec.Struct, frozen=True):
    """Standby -> agent: reply to BindDevice."""

    device: str = ""  # as torch names it; empty: none was initialised
    free_bytes: int = -1  # memory of the device that is free now; -1: unknown
    problem: str = ""  # Why none was initialised, or must not be used. The standby ends


class LaunchRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Agent -> worker: everything that one rank needs to start.

    A new process reads it from the variable `LAUNCH`. A standby receives it in a memfd, followed by
    the descriptors in the order of `descriptors`.
    """

    generation: Generation
    rank: Rank
    world_size: int
    agent_pid: int  # the worker ends when this process ends
    smp_socket: str
    restore: Version | None = None
    restore_world_size: int = 0  # world size of the version to restore; 0: equal to `world_size`
    skip_batches: int = 0  # number of batches to skip after the restored version
    snapshot: SnapshotConfig = SnapshotConfig()
    start: str = "fresh"  # `warm` or `fresh`
    rank_socket: str = ""  # socket on which its flight recorder can be read; empty: none
    descriptors: dict[str, int] = {}
    """Descriptors by name: `heartbeat` and `command` (pages), `stack` (file for stacks), `arena`
    (absent until a layout is known), `fault` (page; only in a run with --allow-faults), `line`
    (socket to the agent; only if ranks may stay, see `Revoke`), and for a standby `stdout` and
    `stderr`."""
    argv: list[str] = []  # the program and its arguments; as what follows, only for a standby
    is_module: bool = False
    variables: dict[str, str] = {}
    cwd: str = ""
    num_nodes: int = 1  # nodes that run ranks
    has_storage: bool = False  # checkpoints are written
    joins: bool = False  # its groups are local until its first turn; then it joins the others
    rehearses: bool = False  # as `joins`, but it makes one turn alone, discards it, and parks
    confirm_s: float = CONFIRM_S  # longest wait, after a connection has broken, for `Revoke`


def encode_launch(request: LaunchRequest) -> bytes:
    return msgspec.json.encode(request)


def decode_launch(data: bytes | str) -> LaunchRequest:
    """Raises msgspec.MsgspecError if the data is not a request."""
    return msgspec.json.decode(data, type=LaunchRequest)


def decode_binding(data: bytes) -> BindDevice:
    """Raises msgspec.MsgspecError if the data is no order to initialise a device."""
    return msgspec.json.decode(data, type=BindDevice)


class Revoke(msgspec.Struct, frozen=True, tag="Revoke"):
    """Agent -> rank, on its line: this generation is over. Reply: Parked.

    A rank that parks waits on its line for the LaunchRequest of a later generation, as a standby.
    """

    generation: int


class Parked(msgspec.Struct, frozen=True, tag="Parked"):
    """Rank -> agent, on its line: this process waits, and neither communicates nor seals."""

    generation: int  # that is over
    first_step: int = 0  # the oldest step that it can go back to
    last_step: int = 0  # the newest step that it can go to, which is in the same loop
    renewals: int = 0  # generations that this process has joined after its first one
    problem: str = ""  # why it cannot stay, in words; empty: it can


class RankVersionMessage(Message, frozen=True):
    """Base of a rank's messages about one version."""

    rank: int
    generation: int
    step: int


class ReserveMemory(Message, frozen=True, tag="ReserveMemory"):
    """Worker -> SMP, at attach and if it grows: do two slots fit? Reply: Done or MemoryRefused."""

    rank: int
    image_bytes: int


class MemoryRefused(Message, frozen=True, tag="MemoryRefused"):
    """SMP -> worker: memory of this node's ranks does not fit; fields of `MemoryTooSmall`."""

    needed_bytes: int
    available_bytes: int
    limit: str
    state_bytes: int = 0
    num_ranks: int = 0
    parity_bytes: int = 0


class RequestArena(Message, frozen=True, tag="RequestArena"):
    """Worker -> SMP: provide memory for a layout.

    Reply: ArenaGranted with one descriptor, or MemoryRefused. A repeated request for an arena that
    is being created does not create a second one.
    """

    rank: int
    world_size: int
    image_bytes: int
    num_pieces: int
    layout_id: int


class PrepareArena(Message, frozen=True, tag="PrepareArena"):
    """Worker -> SMP, at attach: allocate memory for a layout that is not known yet.

    The next RequestArena of this rank gets the same memory if it is large enough. Reply:
    ArenaGranted with one descriptor and layout 0, MemoryRefused, or Refused.
    """

    rank: int
    world_size: int
    image_bytes: int
    num_pieces: int


class RequestPool(Message, frozen=True, tag="RequestPool"):
    """Worker -> SMP: two slots do not fit, and checkpoints are written: provide a capture pool.

    Reply, when every rank of the node has requested one: PoolGranted with one descriptor,
    MemoryRefused, or Refused.
    """

    rank: int
    num_bytes: int  # of its state; more is of no use


class PoolGranted(Message, frozen=True, tag="PoolGranted"):
    """SMP -> worker, with the memfd."""

    rank: int


class ArenaGranted(Message, frozen=True, tag="ArenaGranted"):
    """SMP -> worker, with the memfd; also SMP -> agent, which keeps a duplicate."""

    rank: int
    layout_id: int


class ShardSealed(RankVersionMessage, frozen=True, tag="ShardSealed"):
    """Worker -> SMP: this rank's shard of a version is sealed. No reply."""

    layout_id: int
    check: ReplicaCheck | None = None  # of shared replicas; None: whole tensors are stored


class RequestShares(Message, frozen=True, tag="RequestShares"):
    """Worker -> SMP: which ranks share their replicas with this one? Reply: SharesGranted.

    Refused if the tensors that were compared had another key, or not all members are on this node.
    """

    rank: int
    key: int  # of this rank's tensors, see `key_of` in snapshot/replica_shares.py
    members: list[int] = []  # that continue to share a restored shard; empty: as decided


class SharesGranted(Message, frozen=True, tag="SharesGranted"):
    """SMP -> worker: this rank stores the share of its position among these ranks."""

    members: list[int]


class WithdrawShard(RankVersionMessage, frozen=True, tag="WithdrawShard"):
    """Worker -> SMP: withdraw this rank's seal of a version, because the slot will be overwritten.

    Without this message, a rank that discards a version which the others have sealed would stop all
    snapshots. That version is never committed, and an uncommitted version is not overwritten.
    Reply: Done if the version will never be committed. Refused if it is committed, or about to be.
    """


class ShardSkipped(RankVersionMessage, frozen=True, tag="ShardSkipped"):
    """Worker -> SMP: no snapshot of this due step here. No reply.

    A rank that saw the last commit earlier may have taken it, and waits for the others.
    """


class AwaitRestored(RankVersionMessage, frozen=True, tag="AwaitRestored"):
    """Worker -> SMP: this version from other nodes. Reply on arrival: ArenaGranted or Refused."""


class OpenShards(RankVersionMessage, frozen=True, tag="OpenShards"):
    """Worker -> SMP: open the local shards of another world size. Reply: ShardsOpened, Refused."""

    world_size: int


class ShardsOpened(Message, frozen=True, tag="ShardsOpened"):
    """SMP -> worker, with a read-only memfd for each of these ranks of the previous world."""

    ranks: list[int]


class FetchShardHeaders(RankVersionMessage, frozen=True, tag="FetchShardHeaders"):
    """Worker -> SMP: headers from other nodes. Reply: ShardHeadersFetched or Refused."""

    ranks: list[int]


class ShardHeadersFetched(Message, frozen=True, tag="ShardHeadersFetched"):
    """SMP -> worker, with one memfd per entry, see snapshot/shard_header.py."""

    ranks: list[int]


class FetchPieces(RankVersionMessage, frozen=True, tag="FetchPieces"):
    """Worker -> SMP: fetch pieces of such shards, after their headers; at most 64 MiB in total.

    Reply: PiecesFetched with a memfd that contains them in order, or Refused. The worker verifies
    each piece against its digest. `wanted` is (rank of the previous world, first piece, number of
    pieces).
    """

    wanted: list[tuple[int, int, int]]


class PiecesFetched(Message, frozen=True, tag="PiecesFetched"):
    """SMP -> worker, with one memfd."""

    num_bytes: int


WorkerMessage = (
    ArenaGranted | AwaitRestored | FetchPieces | FetchShardHeaders | MemoryRefused | OpenShards
    | PiecesFetched | PoolGranted | PrepareArena | RequestArena | RequestPool | RequestShares
    | ReserveMemory | ShardHeadersFetched | ShardSealed | ShardSkipped | ShardsOpened
    | SharesGranted | WithdrawShard
)  # fmt: skip
