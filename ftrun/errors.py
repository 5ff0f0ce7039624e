"""Every exception that ftrun raises on purpose, and every exit code.

Failures that ftrun exists to survive, such as a dead worker or a killed SMP, are not exceptions.
They are values in `events.py`, because recovery must decide about them, and an exception only
unwinds.
"""

import sys
from collections.abc import Sequence
from enum import IntEnum
from typing import ClassVar, Literal


class ExitCode(IntEnum):
    """Exit codes of the started process if the user's program is not the cause."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    BUG = 70
    TRY_AGAIN = 75
    NOT_ENOUGH_NODES = 76
    STATE_LOST = 77
    DO_NOT_RESTART = 93
    INTERRUPTED = 130
    TERMINATED = 143


class FtrunError(Exception):
    """Base of every error that ftrun raises on purpose."""

    exit_code: ClassVar[int] = ExitCode.FAILED


class UsageError(FtrunError):
    """The caller can correct the error."""

    exit_code: ClassVar[int] = ExitCode.USAGE


class _InvalidFile(UsageError):
    """All problems of a source are listed."""

    def __init__(self, *, source: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(f"{count} in {source}:{_lines(problems)}")


class ProfileInvalid(_InvalidFile):
    """A profile has unknown keys or values of the wrong kind."""


class RulesInvalid(_InvalidFile):
    """A file of layout rules has mistakes; each problem names line and column."""


class RulesMismatch(UsageError):
    """Layout rules do not fit the tensors of a checkpoint; the first ten problems are listed."""

    def __init__(self, *, source: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(f"{source} does not fit the checkpoint:{_lines(problems, most=10)}")


class RunIdTaken(UsageError):
    """The run id belongs to a run that is alive, or to another script."""


class FaultRefused(UsageError):
    """A fault cannot be injected here; the error names what is missing."""


class AddressTaken(UsageError):
    """Another process already listens at the address."""

    def __init__(self, *, host: str, port: int) -> None:
        super().__init__(
            f"another process already listens at {host} port {port}. End it, or choose another port"
        )


class NotSupportedHere(UsageError):
    """This machine lacks something that a part of ftrun needs."""


class SnapshotError(FtrunError):
    """There is no state to resume from, or none can be kept."""

    exit_code: ClassVar[int] = ExitCode.STATE_LOST


class SnapshotWaitTimeout(SnapshotError, TimeoutError):
    """A snapshot has not reached the level that the script waits for in time."""


class MemoryTooSmall(SnapshotError):
    """Memory for snapshots does not fit on this node.

    `needed_bytes` are still to be allocated for `num_ranks`; `available_bytes` are free, less the
    margin, under the `limit` that leaves the least. `state_bytes` is one slot of the requesting
    rank, with `frozen_bytes` of parameters that no optimizer updates. `parity_bytes` is an upper
    bound of what parity of other nodes needs in addition.
    """

    def __init__(
        self,
        *,
        needed_bytes: int,
        available_bytes: int,
        limit: str,
        state_bytes: int = 0,
        num_ranks: int = 0,
        parity_bytes: int = 0,
        frozen_bytes: int = 0,
    ) -> None:
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        self.limit = limit
        self.state_bytes = state_bytes
        self.num_ranks = num_ranks
        details = ""
        help_ = "Raise this limit, start fewer ranks per node (--nproc-per-node)"
        if num_ranks:
            ranks = "1 rank" if num_ranks == 1 else f"each of {num_ranks} ranks"
            details = f": two slots for {ranks}, {_mb(state_bytes)} of state in the requesting one"
        if parity_bytes:
            details += f"; parity for other nodes needs up to {_mb(parity_bytes)} more"
            help_ += ", or use --erasure K+M with a larger K or a smaller M"
        if frozen_bytes:
            help_ += (
                f", or leave out parameters that no optimizer updates ({_mb(frozen_bytes)} of this "
                "state) by attach(skip=['model.PART.*']) if the script loads them itself"
            )
        super().__init__(
            f"snapshots need {_mb(needed_bytes)} more on this node and {_mb(available_bytes)} are "
            f"free ({limit}){details}. {help_}. Without snapshot.required the run trains without "
            "snapshots until there is room"
        )


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.0f} MB"


def _lines(texts: Sequence[str], *, most: int = sys.maxsize) -> str:
    shown = [*texts[:most], *([f"and {len(texts) - most} more"] if len(texts) > most else [])]
    return "".join(f"\n  - {one}" for one in shown)


class ProviderFailed(SnapshotError):
    """An object with describe, capture and restore does not do its part."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"the state provider {name}: {reason}")


class ValueNotStorable(SnapshotError):
    """A value in a state_dict is neither a tensor nor plain data."""

    def __init__(self, *, key: str, kind: str) -> None:
        self.key = key
        self.kind = kind
        self.can_skip = True  # `attach(skip=...)` accepts it: no parameter of an optimizer
        super().__init__(key, kind)

    def __str__(self) -> str:
        text = (
            f"{self.key} holds a {self.kind}, which a snapshot cannot store: tensors, arrays, "
            "numbers, text, bytes, None, lists, tuples and dicts of these can"
        )
        return f"{text}. Leave it out by attach(skip=[{self.key!r}])" if self.can_skip else text


class StateDictFailed(SnapshotError):
    """A method of an object that the script has attached raised when ftrun asked for its state."""

    def __init__(self, *, name: str, method: str, error: Exception) -> None:
        self.name = name
        super().__init__(
            f"{method}() of {name}, which the script has attached, raised "
            f"{type(error).__name__}: {error}"
        )


class ShapeChanged(SnapshotError):
    """Saved values do not fit the present ones; the first ten of all are listed."""

    def __init__(
        self, *, key: str, saved: str, present: str, others: Sequence[tuple[str, str, str]] = ()
    ) -> None:
        self.key, self.saved, self.present = key, saved, present
        self.others = tuple(others)
        reported = [
            f"{k} was saved as {s} and is {p} now" for k, s, p in [(key, saved, present), *others]
        ]
        many = f"{len(reported)} saved values do not fit:{_lines(reported, most=10)}\n"
        super().__init__(
            f"{many if others else reported[0] + '. '}Restore with the script that made the "
            "snapshot, "
            "or start a new run with another --run-id"
        )


class StructureChanged(SnapshotError):
    """The script has changed objects since `attach`; the first three changes are shown."""

    def __init__(self, changes: Sequence[str]) -> None:
        more = len(changes) - 3
        super().__init__(
            "no new snapshots, because a restart could not restore them into the objects that the "
            f"script builds before attach: {'; '.join(changes[:3])}"
            + (f"; and {more} more" if more > 0 else "")
            + ". Older snapshots are retained. Make this change before attach"
        )


class LayoutUnknown(SnapshotError):
    """The bytes of an arena or a checkpoint file are in an unknown format."""


class TensorIncomplete(SnapshotError):
    """The shards of all ranks do not cover a whole tensor."""

    def __init__(
        self,
        *,
        key: str,
        shape: Sequence[int],
        hole: str,
        chunks: Sequence[str],
        unplaced: Sequence[int] = (),
    ) -> None:
        self.key = key
        self.shape = tuple(shape)
        self.hole = hole
        self.unplaced = tuple(unplaced)
        shown = ", ".join(chunks[:4]) + (f" and {len(chunks) - 4} more" if len(chunks) > 4 else "")
        strided = (
            f" Ranks {', '.join(map(str, unplaced))} hold parts that are no single block of it, "
            "such as partial sums or strided shards."
            if unplaced
            else ""
        )
        super().__init__(
            f"{key} of shape {list(shape)} cannot be assembled for another number of ranks: no "
            f"rank has saved {hole}; saved: {shown or 'none'}.{strided} Start as many ranks as "
            "took the snapshot"
        )


class RanksDiffer(SnapshotError):
    """Ranks have saved different values under a name that can have only one value."""

    def __init__(self, *, key: str, ranks: tuple[int, int], values: tuple[str, str]) -> None:
        self.key = key
        self.ranks = ranks
        self.values = values
        super().__init__(
            f"{key} is {values[0]} on rank {ranks[0]} and {values[1]} on rank {ranks[1]} of the "
            "snapshot, so another number of ranks cannot load it. Start as many ranks as "
            "took it, or shard it as a DTensor"
        )


class SnapshotCorrupt(SnapshotError):
    """A digest does not match: these bytes are not the captured ones."""

    def __init__(self, *, what: str, piece: int, pieces: int, rank: int | None = None) -> None:
        self.what = what
        self.piece = piece
        self.rank = rank  # owner of the shard, if the bytes are those of another process
        super().__init__(
            f"{what}: the digest of piece {piece} of {pieces} does not match; it is rejected"
        )


class FragmentRefused(SnapshotError):
    """A fragment is not the requested one, or its bytes are not the protected ones."""

    def __init__(self, *, what: str, reason: str) -> None:
        self.what = what
        self.reason = reason
        super().__init__(f"{what} is rejected: {reason}")


class StripeLost(SnapshotError):
    """Too few good fragments of a stripe are left to rebuild its lost blocks."""

    def __init__(
        self, *, what: str, have: Sequence[str], needed: int, problems: Sequence[str]
    ) -> None:
        self.have, self.problems = tuple(have), tuple(problems)
        super().__init__(
            f"{what} cannot be rebuilt: {len(have)} of {needed} good fragments are available "
            f"({', '.join(have) or 'none'}). Resume from an older version or a checkpoint. "
            f"Missing or rejected:{_lines(problems)}"
        )


class FetchFailed(SnapshotError):
    """No reachable node has the data of a restored version."""


class CheckpointError(FtrunError):
    """A checkpoint on disk cannot be used."""

    exit_code: ClassVar[int] = ExitCode.STATE_LOST


class CheckpointSuperseded(CheckpointError):
    """A checkpoint was not written, because later versions were captured or written first."""


class NoUsableCheckpoint(CheckpointError):
    """Checkpoints exist, and this node can use none of them."""

    def __init__(self, text: str, rejected: dict[str, str]) -> None:
        self.rejected = rejected  # the reason for each, by name
        super().__init__(text)


class NoneOfThisRun(NoUsableCheckpoint):
    """No checkpoint is known to be of this run; unreadable ones may be of it or of others."""


class CheckpointsTaken(CheckpointError):
    """Another run that is alive writes its checkpoints to the same directory."""

    exit_code: ClassVar[int] = ExitCode.USAGE


class DirectoryTaken(SnapshotError):
    """`CheckpointsTaken`, as the SMP reports it to the agent."""

    exit_code: ClassVar[int] = ExitCode.USAGE


class PeerError(FtrunError):
    """Another process is lost or broke the protocol."""

    exit_code: ClassVar[int] = ExitCode.TRY_AGAIN


HowLost = Literal["refused", "reset", "closed", "silent", "unreachable", "unknown"]
"""What the kernel reports of a lost peer.

`refused`: its kernel answers, and no process listens. `reset`, `closed`: its kernel ended the
connection. `silent`: the peer sends no answer, or takes no data. `unreachable`: no known
route leads there. `unknown`: its name has no address.
"""

_LOST_IN_WORDS: dict[HowLost, str] = {
    "refused": "refuses the connection: nothing listens there",
    "reset": "has reset the connection: it was killed, or the connection was cut",
    "closed": "has closed the connection: it ended, or closed this connection alone",
    "silent": "does not answer: it is frozen, off, or cut off",
    "unreachable": "cannot be reached: the network has no route to it",
    "unknown": "has a name for which there is no address",
}


class PeerLost(PeerError):
    """The other end of a connection is lost, or there never was one."""

    def __init__(self, *, peer: str, how: HowLost = "closed") -> None:
        self.peer = peer
        self.how: HowLost = how
        super().__init__(f"{peer} {_LOST_IN_WORDS[how]}")


class PeerTimeout(PeerError):
    """The other end did not answer in time."""

    def __init__(self, *, peer: str, waited_s: float) -> None:
        self.peer = peer
        super().__init__(f"{peer} has not answered for {waited_s:.1f} s")


class HandshakeRefused(PeerError):
    """Two processes of two nodes do not belong together; one of them rejected the other."""

    def __init__(self, *, peer: str, reason: str, is_ours: bool) -> None:
        self.peer = peer
        self.reason = reason
        self.is_ours = is_ours
        super().__init__(
            f"{peer} is refused: {reason}" if is_ours else f"{peer} refuses us: {reason}"
        )


class ProtocolError(PeerError):
    """A frame is malformed, too long, or of another run."""


class JoinRefused(FtrunError):
    """A rank cannot join the ranks that stay; all ranks are then started again."""


class SetUpDiffers(FtrunError):
    """A process that sets up a rank alone does something else than the rank did before."""

    def __init__(self, present: str, recorded: str) -> None:
        super().__init__(
            f"this rank is set up alone, and its set-up differs: {present}, in place of "
            f"{recorded}. All ranks are started again"
        )


class InternalError(FtrunError):
    """A broken invariant: a bug in ftrun."""

    exit_code: ClassVar[int] = ExitCode.BUG
