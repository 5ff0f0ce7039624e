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


class OpenSavedFile(Message, frozen=True, tag="OpenSavedFile"):
    """Worker -> SMP: read a file that is not written yet. Reply: SavedFileOpened or Refused."""

    rank: int
    path: str


class SavedFileOpened(Message, frozen=True, tag="SavedFileOpened"):
    """SMP -> worker, with a descriptor of the content."""

    num_bytes: int


class FileHeld(Message, frozen=True, tag="FileHeld"):
    """A file that is not written yet, with a descriptor of its content. No reply.

    SMP -> agent, unsolicited: keep a duplicate; it replaces an older one of the same path. Agent ->
    new SMP: write it.
    """

    rank: int  # that saved it
    path: str
    num_bytes: int
    mode: int
    number: int  # grows from save to save of a node, also over restarts of its SMP


class FileWritten(Message, frozen=True, tag="FileWritten"):
    """SMP -> agent, unsolicited: a file is on storage; or it is not, and stays held."""

    path: str
    number: int
    num_bytes: int
    seconds: float
    reason: str = ""  # why it is not written; empty: it is


class FinishFiles(Message, frozen=True, tag="FinishFiles"):
    """Agent -> SMP: the run ends. Reply after another attempt at each file: Done, or Refused."""


FileMessage = FileHeld | FileWritten | FinishFiles | OpenSavedFile | SaveFile | SavedFileOpened
