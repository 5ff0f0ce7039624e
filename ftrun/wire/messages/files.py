"""Messages about files that a worker saves and the SMP writes: `ftrun.save` and `ftrun.load`.

Runs in:  worker, SMP and agent of one node. Pure.
"""

from ftrun.wire.messages.message import Message


class SaveFile(Message, frozen=True, tag="SaveFile"):
    """Worker -> SMP, with a descriptor of the content: write this file. Reply: Done, at once.

    The content does not change any more.
    """

    rank: int
    path: str  # absolute, without symbolic links
    num_bytes: int
    mode: int  # permissions of the file, if it does not exist yet
    before: tuple[int, int] = (0, 0)  # inode and mtime (ns) of the file; zeros: there is none


class OpenSavedFile(Message, frozen=True, tag="OpenSavedFile"):
    """Worker -> SMP: read a file that is not written yet. Reply: SavedFileOpened or Refused."""

    rank: int
    path: str


class SavedFileOpened(Message, frozen=True, tag="SavedFileOpened"):
    """SMP -> worker, with a descriptor of the content."""

    num_bytes: int
    number: int = 1 << 62  # as in FileHeld
    before: tuple[int, int] = (0, 0)


class FileHeld(Message, frozen=True, tag="FileHeld"):
    """A file that is not written yet, with a descriptor of its content. No reply.

    SMP -> agent, unsolicited: keep a duplicate; it replaces an older one of the same path. Agent ->
    new SMP: write it.
    """

    rank: int  # that saved it
    path: str
    num_bytes: int
    mode: int
    number: int  # time of the save, ns; grows from save to save, also over restarts of the SMP
    before: tuple[int, int] = (0, 0)  # as in SaveFile


class FileWritten(Message, frozen=True, tag="FileWritten"):
    """SMP -> agent, unsolicited: a file is on storage; or it is not, and why."""

    path: str
    number: int
    num_bytes: int
    seconds: float
    reason: str = ""  # why it is not written; empty: it is
    is_dropped: bool = False  # it is not held any more, because a newer file is there


class FinishFiles(Message, frozen=True, tag="FinishFiles"):
    """Agent -> SMP: the run ends. Reply after another attempt at each file: Done, or Refused."""


FileMessage = FileHeld | FileWritten | FinishFiles | OpenSavedFile | SaveFile | SavedFileOpened


def is_newer(found: tuple[int, int], *, before: tuple[int, int], number: int) -> bool:
    """Whether a file was changed after a save, and not by the write of an earlier save.

    `found`: its inode and mtime (ns); zeros: there is none. The write of a save sets the mtime to
    the number of the save.
    """
    return found != before and found[1] > number
