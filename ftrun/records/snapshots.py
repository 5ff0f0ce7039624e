"""Records of snapshots and checkpoints: memory, SMPs, protection, storage."""

from ftrun.events import Record
from ftrun.records.note import ReasonRecord, Seconds, Whole


class MemoryAdopted(Record, frozen=True, tag="memory_adopted"):
    """A new agent has taken over the memory of an earlier one."""

    arenas: int
    generation: int


class RunStateRejected(ReasonRecord, frozen=True, tag="run_state_rejected"):
    """The run's persisted state has the form of another version of ftrun."""


class SmpReady(Record, frozen=True, tag="smp_ready"):
    """An SMP answers."""

    arenas: int


class SmpUnavailable(ReasonRecord, frozen=True, tag="smp_unavailable"):
    """An SMP does not start."""


class SmpUnreachable(ReasonRecord, frozen=True, tag="smp_unreachable"):
    """A message did not reach the SMP."""


class FreshStartUsed(ReasonRecord, frozen=True, tag="fresh_start_used"):
    """Ranks are not forked warm."""

    rank: int | None = None  # None: all of them


class StandbyBound(Record, frozen=True, tag="standby_bound"):
    """A standby has initialised the device of a local rank."""

    local_rank: int
    device: str
    free_bytes: int  # memory of the device that is free then; -1: unknown


class StandbyDropped(Record, frozen=True, tag="standby_dropped"):
    """A standby whose device was initialised, or was being initialised, is not used."""

    local_rank: int
    reason: str


class FunctionsPrepared(ReasonRecord, frozen=True, tag="functions_prepared"):
    """Where the functions of start.prepare are called, and why not in the zygote."""

    place: str  # `zygote`, once for all ranks; `standby`, in each of them; `rank`: they failed
    seconds: Seconds = 0.0


class CompilerImported(ReasonRecord, frozen=True, tag="compiler_imported"):
    """The zygote has the modules of torch's compiler; if it does not, the reason."""

    seconds: Seconds = 0.0


class RankRehearsed(ReasonRecord, frozen=True, tag="rank_rehearsed"):
    """A standby has set up as a rank and is parked; if it is not, the reason."""

    rank: int
    seconds: Seconds = 0.0


class CaptureSlowed(ReasonRecord, frozen=True, tag="capture_slowed"):
    """A rank copies from its devices more slowly than it could."""

    rank: int


class CheckpointWrittenRecord(Record, frozen=True, tag="checkpoint_written"):
    """A checkpoint, or this node's part of it, is on storage."""

    generation: Whole
    step: Whole
    path: str
    total_bytes: int
    seconds: Seconds
    ahead_s: Seconds = 0.0  # seconds between the first byte written and the last byte captured


class CheckpointFailedRecord(ReasonRecord, frozen=True, tag="checkpoint_failed"):
    """A checkpoint was not written."""


class FileWrittenRecord(Record, frozen=True, tag="file_written"):
    """A file of ftrun.save is on storage."""

    path: str
    total_bytes: int
    seconds: Seconds


class FileNotWritten(ReasonRecord, frozen=True, tag="file_not_written"):
    """A file of ftrun.save is not written; it stays in memory, or a newer one is there."""

    path: str


class CheckpointRejected(Record, frozen=True, tag="checkpoint_rejected"):
    """A checkpoint is not used."""

    name: str
    reason: str


class SmpRecord(ReasonRecord, frozen=True):
    """What an SMP says of other nodes, and of memory for them."""

    nodes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()


class SmpRestoreSource(SmpRecord, frozen=True, tag="smp_restore_source"):
    """Where the SMP got the state of its ranks from."""


class SmpPeerLost(SmpRecord, frozen=True, tag="smp_peer_lost"):
    """A link to or from another SMP is lost."""


class SmpSourceRejected(SmpRecord, frozen=True, tag="smp_source_rejected"):
    """A source of a restore is damaged."""


class SmpReplicasDiffer(SmpRecord, frozen=True, tag="smp_replicas_differ"):
    """Bytes that were equal on several nodes are not equal any more."""


class SmpUnprotected(SmpRecord, frozen=True, tag="smp_unprotected"):
    """A version is not protected."""


class SmpProtectionStalled(SmpRecord, frozen=True, tag="smp_protection_stalled"):
    """The protection of a version makes no progress."""


class SmpMemory(SmpRecord, frozen=True, tag="smp_memory"):
    """Arenas or parity regions do not fit into memory."""


OF_NOTICE: dict[str, type[SmpRecord]] = {
    "restore": SmpRestoreSource,
    "peer_lost": SmpPeerLost,
    "source_set_aside": SmpSourceRejected,
    "replicas_differ": SmpReplicasDiffer,
    "unprotected": SmpUnprotected,
    "stalled": SmpProtectionStalled,
    "memory": SmpMemory,
}
"""By kind of `SmpNotice`."""
