"""Messages between an agent and its SMP about checkpoints, and reports of the checkpoint tools.

The tools (ftrun.tools.checkpoints, ftrun.tools.export) make the reports, and the command line shows
them.
"""

from typing import Literal

import msgspec

from ftrun.snapshot.write_shares import FileExtent
from ftrun.wire.checkpoint_owner import CheckpointClaim, CheckpointOwner
from ftrun.wire.messages.message import Message, VersionMessage

INDEX_NAME = "index.json"  # the file that makes a folder a checkpoint
ATOMS_NAME = "atoms.json"  # the same for atoms, and for what they are made from


class WriteCheckpoint(Message, frozen=True, tag="WriteCheckpoint"):
    """Agent -> SMP: write a version. Reply, when durable: CheckpointWritten or CheckpointFailed."""

    directory: str  # absolute; with several nodes a shared one
    keep: int  # number of checkpoints to retain, including the newest
    version: tuple[int, int] | None = None
    """Generation and step of the version to write. Required if ranks are on several nodes: each
    node gets a request for the same version, in any order, and possibly more than once."""
    token: str = ""
    """Equal on all nodes that write it together, and different in another life of the run or
    another generation. Parts with different tokens are never merged. Empty, without a version: this
    node writes alone, and excludes all other writers until it has finished."""
    keep_s: float = 0.0  # older checkpoints are removed too, but never the newest. 0: no limit
    bytes_per_s: float = 0.0  # limit of this node's write rate; 0: no limit
    life: str = ""
    live_capture_timeout_s: float = 0.0
    """Without a version: if the capture of a snapshot begins within this time, that snapshot is
    written during its capture (live capture). Otherwise the newest committed version is written, if
    all ranks are on this node. 0: no live capture."""
    capture_from: tuple[int, int] | None = None
    """Generation and step: the first capture of this generation from this step on is written. None:
    one of the running generation that is newer than all that is sealed."""
    keep_bytes: int = 0  # older checkpoints are removed while all have more bytes; 0: no limit
    share_timeout_s: float = 0.0
    """Longest wait for the offers of the other nodes, so that bytes that several nodes hold equally
    are written once. 0: this node writes all of its bytes."""
    writers: int = 0  # files written at once, of equal size; 0: one per rank, one after the other


class ExpediteCheckpoint(Message, frozen=True, tag="ExpediteCheckpoint"):
    """Agent -> SMP: the run ends; write the current checkpoint without a rate limit. No reply."""


class CheckpointWritten(VersionMessage, frozen=True, tag="CheckpointWritten"):
    """SMP -> agent: the checkpoint is durable, or this node's part of it is."""

    path: str  # of the complete checkpoint; empty if other parts are missing
    total_bytes: int  # size of the checkpoint, or of the part; 0 if all of it existed already
    seconds: float
    is_part: bool = False  # other parts are missing; the node with the last part completes it
    missing_ranks: list[int] = []  # ranks in the missing parts
    note: str = ""  # what is unusual about this, for the journal; empty: nothing
    ahead_s: float = 0.0  # from the first byte written to the last captured; 0: written after it


class CheckpointFailed(Message, frozen=True, tag="CheckpointFailed"):
    """SMP -> agent: nothing is written. Not `Refused`: other replies may arrive before it."""

    reason: str
    is_superseded: bool = False  # later versions were captured or written in the meantime


class EndCheckpoints(Message, frozen=True, tag="EndCheckpoints"):
    """Agent -> SMP: record the run's end if you own the directory. Reply: Done."""

    exit_code: int
    reason: str
    command: str  # digest of the script and its arguments


class LoadCheckpoint(Message, frozen=True, tag="LoadCheckpoint"):
    """Agent -> SMP: fill the arenas from a checkpoint. Reply: CheckpointLoaded or Refused."""

    directory: str  # absolute
    world_size: int
    """Of this run. If the checkpoint has another world size, all its ranks are loaded, as arenas of
    the previous world. OpenShards and the SMPs of other nodes read from them."""
    local_ranks: list[int]  # ranks of this node, whose arenas are filled
    only: str = ""  # the one acceptable name (end of `CheckpointLoaded.path`); empty: the newest
    life: str = ""  # accept only checkpoints that this life of the run has written; empty: any
    ranks: list[list[int]] = []
    """Of each node that loads together with this one; all nodes get the same list. If several nodes
    need a shard, one node reads it, and the others fetch it from that node after the generation has
    begun. With another world size each node loads a share (`ftrun.snapshot.load_shares.ranks_at`).
    Empty: this node alone."""
    node: int = 0  # index of this node in `ranks`
    excluded: dict[str, str] = {}  # checkpoints that no node may load: names and reasons
    claim: CheckpointClaim | None = None  # of the directory, to be made first; on rank 0's node
    memory_limit_bytes: int = 0  # limit of the profile for snapshots on this node; 0: none
    had_pools: bool = False  # two slots fit only while no rank runs


class CheckpointLoaded(VersionMessage, frozen=True, tag="CheckpointLoaded"):
    """SMP -> agent: the arenas now contain this version. Each was sent before as an ArenaGranted.

    Its generation is -1: older than every snapshot that this run will take. An empty `path` (step
    -1) means that the directory has no usable checkpoint; `problem` then has the reason, if it has
    any checkpoint. `rejected` has the name of each checkpoint that this node cannot use, and the
    reason. `world_size` is that of the checkpoint if it differs from the requested one; otherwise
    0. `is_share`: other nodes have read a part of it. BeginGeneration then says where those parts
    are, and RestoreReady or RestoreFailed reports the result.
    """

    path: str
    rejected: dict[str, str] = {}
    world_size: int = 0
    is_share: bool = False
    problem: str = ""
    is_taken: bool = False  # the problem is that another live run owns the directory


CheckpointMessage = (
    CheckpointFailed | CheckpointLoaded | CheckpointWritten | EndCheckpoints | ExpediteCheckpoint
    | LoadCheckpoint | WriteCheckpoint
)  # fmt: skip

Format = Literal["safetensors", "dcp", "state_dict", "atoms"]
FORMATS: tuple[Format, ...] = ("safetensors", "dcp", "state_dict", "atoms")

DTYPE_WORDS = {"bf16": "BF16", "fp16": "F16", "fp32": "F32", "fp64": "F64"}
"""Target types of floating-point tensors, with the names that safetensors uses."""


class ShardFileLocation(msgspec.Struct, frozen=True):
    """One rank's files of a checkpoint, and the digests of its table and header."""

    rank: int
    path: str
    digests_path: str
    num_bytes: int
    table_digest: str  # hexadecimal, as in the index
    header_digest: str
    extents: list[FileExtent] = []  # with the paths of the files; empty: `path` is the whole image


class CheckpointLocation(msgspec.Struct, frozen=True):
    """One checkpoint, described by its index."""

    path: str
    run_id: str
    step: int
    world_size: int
    shards: list[ShardFileLocation]


class ExportJob(msgspec.Struct, frozen=True):
    """Source, target and format of one export."""

    source: CheckpointLocation
    format: Format
    out: str
    dtype: str = ""  # name in safetensors; empty: unchanged
    only: tuple[str, ...] = ()
    file_bytes: int = 5_000_000_000
    num_writers: int = 1
    may_replace: bool = False


class ExportReport(msgspec.Struct, frozen=True):
    """Result of one export."""

    checkpoint: str
    step: int
    format: str
    out: str
    files: tuple[str, ...] = ()
    num_tensors: int = 0
    num_bytes: int = 0  # total size of all files
    seconds: float = 0.0
    left_out: tuple[str, ...] = ()  # content that the format cannot represent, each item in words
    notes: tuple[str, ...] = ()  # further notes for the operator
    problem: str = ""  # why nothing was written, in words
    exit_code: int = 0


class CheckpointInfo(msgspec.Struct, frozen=True):
    """One checkpoint, or a folder that looks like one."""

    name: str
    path: str
    is_latest: bool = False
    run_id: str = ""
    generation: int = -1
    step: int = -1
    world_size: int = 0
    num_bytes: int = 0  # total size of its files
    written_s: float = 0.0  # wall time; 0: not known
    problems: tuple[str, ...] = ()  # why it cannot be used, in words; empty: no problem was found


class CatalogReport(msgspec.Struct, frozen=True):
    """A directory of checkpoints, the most recently written first."""

    directory: str
    checkpoints: list[CheckpointInfo]
    unfinished: int = 0  # folders with an incomplete checkpoint; a later one removes them
    checked_bytes: int = 0
    seconds: float = 0.0
    removed: tuple[str, ...] = ()
    being_read: tuple[str, ...] = ()  # old ones that a process reads, and that are kept
    found: CheckpointLocation | None = None  # the single checkpoint that was requested
    owner: CheckpointOwner | None = None  # of the last run that wrote there; for the action `try`
    problem: str = ""  # why nothing could be done, in words


class ConvertReport(msgspec.Struct, frozen=True):
    """Result of converting one checkpoint into another."""

    source: str = ""
    path: str = ""
    step: int = -1
    mesh_before: str = ""
    mesh_after: str = ""
    world_size: int = 0
    num_tensors: int = 0
    num_bytes: int = 0  # total size of its files
    is_linked: bool = False  # the layout is the same, so that nothing was converted
    missing_shares: tuple[int, ...] = ()  # numbers of the workers that have not written yet
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    problem: str = ""  # why there is no result, in words
    exit_code: int = 0
