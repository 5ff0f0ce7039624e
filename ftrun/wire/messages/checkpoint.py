"""What agent and SMP say to each other about checkpoints.

Runs in: agent and SMP. Pure; part of the messages in `messages.py`.
"""

from ftrun.wire.checkpoint_owner import CheckpointClaim
from ftrun.wire.messages.message import Message

INDEX_NAME = "index.json"
"""The file that makes a folder a checkpoint."""


class WriteCheckpoint(Message, frozen=True, tag="WriteCheckpoint"):
    """Agent -> SMP: write the newest committed version there.

    Answer, when it is durable: CheckpointWritten, or CheckpointRefused.

    Args:
        directory: absolute; with several nodes a shared one.
        keep: so many checkpoints stay, the newest included.
        version: generation and step of just the one to write. Needed where ranks are on several
            nodes: each is asked for the same, in any order, again where need be.
        token: with a version: equal on all nodes that write it together and different in another
            life of the run or another generation; parts with different ones never mix.
        keep_s: those written longer ago go as well; the newest never goes. 0: none goes by age.
        bytes_per_s: written at the most, on this node; 0: as fast as it goes.
        life: of the run, for the index.
        stream_wait_s: without a version: a snapshot that begins to be captured within this time is
            written while it is, in place of the newest committed one; 0: that one.
    """

    directory: str
    keep: int
    version: tuple[int, int] | None = None
    token: str = ""
    keep_s: float = 0.0
    bytes_per_s: float = 0.0
    life: str = ""
    stream_wait_s: float = 0.0


class ExpediteCheckpoint(Message, frozen=True, tag="HurryCheckpoint"):
    """Agent -> SMP: the run ends, write what is being written as fast as it goes. No answer."""


class CheckpointWritten(Message, frozen=True, tag="CheckpointWritten"):
    """SMP -> agent: the checkpoint is durable, or this node's part of it is.

    Args:
        path: of the finished checkpoint; empty where others are still missing.
        total_bytes: of the checkpoint, or of the part; 0 where all was there already.
        is_part: others are missing; whoever comes last finishes it.
        missing_ranks: those of the others.
        note: what is odd about that, for the journal; empty: nothing.
        ahead_s: so long before its last byte was captured its first was written; 0: after that.
    """

    generation: int
    step: int
    path: str
    total_bytes: int
    seconds: float
    is_part: bool = False
    missing_ranks: list[int] = []
    note: str = ""
    ahead_s: float = 0.0


class CheckpointFailed(Message, frozen=True, tag="CheckpointRefused"):
    """SMP -> agent: it is not written, and why. Not `Refused`: other answers may come first."""

    why: str


class EndCheckpoints(Message, frozen=True, tag="EndCheckpoints"):
    """Agent -> SMP: the run is over; leave a record of that beside its checkpoints. Answer: Done.

    Only the SMP that owns the directory does so.
    """

    exit_code: int
    reason: str
    command: str
    """A digest of script and arguments."""


class LoadCheckpoint(Message, frozen=True, tag="LoadCheckpoint"):
    """Agent -> SMP: fill the arenas from a checkpoint. Answer: CheckpointLoaded or Refused.

    Args:
        directory: absolute.
        world_size: of this run. Of a checkpoint of another one all ranks are loaded, as arenas of
            the old world: OpenImages and other nodes' SMPs serve them.
        local_ranks: those of this node; their arenas are filled.
        only: name of the one checkpoint that will do (the end of `CheckpointLoaded.path`); empty:
            the newest usable.
        life: only those will do that this life of the run has written; empty: any.
        ranks: of each node that loads together with this one, each asked alike. What several need,
            one reads; the others get it of that one once the generation has begun. Of another
            world size each loads a part (`ftrun.snapshot.load_shares.ranks_at`). Empty: this one
            alone.
        node: which of them this is.
        set_aside: checkpoints that no node of this run may load: their names, and the reason each.
        claim: own the directory first; on the node of rank 0.
    """

    directory: str
    world_size: int
    local_ranks: list[int]
    only: str = ""
    life: str = ""
    ranks: list[list[int]] = []
    node: int = 0
    set_aside: dict[str, str] = {}
    claim: CheckpointClaim | None = None


class CheckpointLoaded(Message, frozen=True, tag="CheckpointLoaded"):
    """SMP -> agent: the arenas now hold this version; each came as an ArenaGranted before.

    Its generation is -1: older than all that this run will take. An empty `path` (step -1) means
    that the directory holds no checkpoint, or none that can be used: `problem` then says so.
    `rejected` has the name of each checkpoint that this node cannot use, and the reason.
    `world_size` is that of the checkpoint where it is another than was asked for; else 0.
    `is_share`: other nodes have read a part of it; BeginGeneration says where they are, and
    RestoreReady or RestoreFailed what became of it.
    """

    generation: int
    step: int
    path: str
    rejected: dict[str, str] = {}
    world_size: int = 0
    is_share: bool = False
    problem: str = ""
    is_taken: bool = False
    """The problem: another run that is alive owns the directory."""
