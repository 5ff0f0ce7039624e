"""Every exception that ftrun raises on purpose, and every exit code.

    FtrunError                      exit 1    catch this to catch them all
    |-- UsageError                  exit 2    the caller can put it right
    |   |-- ProfileInvalid
    |   |-- RunIdTaken                        another script, or a run that is still alive
    |   `-- NotSupportedHere                  the launcher needs Linux
    |-- SnapshotError               exit 77   no state to resume from
    |   |-- MemoryTooSmall                    two slots do not fit
    |   |-- ValueNotStorable                  a key whose value is neither tensor nor plain data
    |   |-- ShapeChanged                      saved and present tensor differ
    |   |-- LayoutUnknown                     the bytes are not an arena of this format
    |   `-- SnapshotCorrupt                   a digest does not match
    |-- CheckpointError             exit 77   a checkpoint on disk cannot be used
    |-- PeerError                   exit 75   another process is gone or broke the protocol
    |   |-- PeerLost
    |   |-- PeerTimeout
    |   |-- ProtocolError
    |   `-- WorkerNotKillable                 SIGKILL does not end it: the node needs attention
    `-- InternalError               exit 70   a broken invariant: a bug in ftrun

What ftrun exists to survive (a worker died, an SMP was killed) is not here. Those are values in
`events.py`: somebody has to decide about them, and an exception only unwinds.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import ClassVar


class ExitCode(IntEnum):
    """What the started process ends with when the user's program is not the cause."""

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
    """The caller can put it right."""

    exit_code: ClassVar[int] = ExitCode.USAGE


class ProfileInvalid(UsageError):
    """A profile has unknown keys or values of the wrong kind; all of them are listed."""

    def __init__(self, *, source: str, problems: Sequence[str]) -> None:
        self.source = source
        self.problems = tuple(problems)
        lines = "".join(f"\n  - {problem}" for problem in problems)
        super().__init__(f"{source} has {len(problems)} problem(s):{lines}")


class RunIdTaken(UsageError):
    """The run id belongs to a run that is alive, or to another script."""


class NotSupportedHere(UsageError):
    """This part of ftrun needs something this machine does not have."""


class SnapshotError(FtrunError):
    """There is no state to resume from, or none can be kept."""

    exit_code: ClassVar[int] = ExitCode.STATE_LOST


class MemoryTooSmall(SnapshotError):
    """Two slots for every rank of the node do not fit into memory."""

    def __init__(self, *, needed_bytes: int, available_bytes: int, limit: str) -> None:
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        self.limit = limit
        super().__init__(
            f"two snapshot slots need {needed_bytes / 1e6:,.0f} MB and {available_bytes / 1e6:,.0f}"
            f" MB are free ({limit}). Use fewer ranks per node or a larger memory limit, or set "
            "snapshot.required to false to train without protection"
        )


class ValueNotStorable(SnapshotError):
    """A value in a state_dict is neither a tensor nor plain data."""

    def __init__(self, *, key: str, kind: str) -> None:
        self.key = key
        self.kind = kind
        super().__init__(
            f"{key} holds a {kind}, which a snapshot cannot store: tensors, arrays, numbers, text, "
            "bytes, None, lists, tuples and dicts of these can. Leave it out of state_dict()"
        )


class ShapeChanged(SnapshotError):
    """What was saved does not fit what is there now."""

    def __init__(self, *, key: str, saved: str, present: str) -> None:
        self.key = key
        self.saved = saved
        self.present = present
        super().__init__(
            f"{key} was saved as {saved} and is {present} now. Restore with the script that made "
            "the snapshot, or start anew with another --run-id"
        )


class LayoutUnknown(SnapshotError):
    """The bytes of an arena or a checkpoint file are not in a format this version knows."""


class SnapshotCorrupt(SnapshotError):
    """A digest does not match: these bytes are not what was captured."""

    def __init__(self, *, what: str, piece: int, pieces: int) -> None:
        self.what = what
        self.piece = piece
        super().__init__(
            f"{what}: the digest of piece {piece} of {pieces} does not match; it is set aside"
        )


class CheckpointError(FtrunError):
    """A checkpoint on disk cannot be used."""

    exit_code: ClassVar[int] = ExitCode.STATE_LOST


class PeerError(FtrunError):
    """Another process is gone or broke the protocol."""

    exit_code: ClassVar[int] = ExitCode.TRY_AGAIN


class PeerLost(PeerError):
    """The other end of a connection is closed."""

    def __init__(self, *, peer: str) -> None:
        self.peer = peer
        super().__init__(f"{peer} has closed the connection; it was stopped or killed")


class PeerTimeout(PeerError):
    """The other end did not answer in time."""

    def __init__(self, *, peer: str, waited_s: float) -> None:
        self.peer = peer
        self.waited_s = waited_s
        super().__init__(f"{peer} has not answered for {waited_s:.1f} s")


class ProtocolError(PeerError):
    """A frame is malformed, too long, or of another run."""


class WorkerNotKillable(PeerError):
    """A worker does not die of SIGKILL; it hangs in the kernel."""


class InternalError(FtrunError):
    """A broken invariant: a bug in ftrun."""

    exit_code: ClassVar[int] = ExitCode.BUG
