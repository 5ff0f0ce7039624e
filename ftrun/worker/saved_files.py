"""`ftrun.save` and `ftrun.load`: torch.save and torch.load at the speed of memory.

Runs in:  worker, in the thread that saves; outside of a run, torch.save and torch.load.
Takes in: objects that torch.save takes.
Gives:    the bytes that torch.save would write, in memory that the SMP holds and writes behind.
Survives: the rank. From the return of `save` on, the SMP and the agent hold the memory.

torch makes the file once, in a memfd. The SMP copies bytes and needs no torch. If memory is short,
the content goes to a nameless file on the target's storage instead, so that saves stay in order.
"""

import io
import logging
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

import torch

from ftrun import clock
from ftrun.errors import PeerError
from ftrun.wire.messages.files import is_newer
from ftrun.worker.context import WorkerContext, is_rehearsal, worker_context

if TYPE_CHECKING:
    from ftrun.worker.smp_client import WorkerSmpClient

_Reply = TypeVar("_Reply")

_CHECK_BYTES = 64 << 20
"""Free memory is checked before each run of this many bytes."""

_AWAIT_S = 30.0
"""Longest wait for an SMP that is being restarted."""

_RETRY_S = 0.1

_link: "tuple[tuple[int, int], WorkerSmpClient] | None" = None
"""With the process and the generation of the connection."""

_is_lost = False
"""No SMP took the last file in time, so the next save tries once."""

_saved: set[str] = set()
"""Paths that this process has given to an SMP, and that may not be written yet."""

_log = logging.getLogger(__name__)


class _MemoryFile(io.RawIOBase):
    """A file in memory that takes bytes only while memory is free."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._checked_bytes = 0
        self.num_bytes = 0
        self.has_room = True
        """If not, the content is incomplete. An error would be replaced by one of torch's."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self.has_room and self.num_bytes + len(view) > self._checked_bytes:
            more = max(len(view), _CHECK_BYTES)
            self.has_room = _is_free(more)
            self._checked_bytes = self.num_bytes + more
        at = 0
        while self.has_room and at < len(view):
            at += os.write(self._fd, view[at:])
        self.num_bytes += at
        return len(view)


def save(obj: object, f: "str | os.PathLike[str] | IO[bytes]", *args: Any, **options: Any) -> None:
    """Save an object as torch.save does; return when its bytes are in memory.

    Under ftrun, the SMP of this node then writes the file, also if this rank is killed, and
    replaces an older one when all bytes are synced. Outside of ftrun, for an open file, and where
    the file cannot be replaced by a rename, this is torch.save. A standby that rehearses a rank
    writes no file: its step is discarded, and the path is the rank's.

    Args:
        obj: as in torch.save.
        f: path, or an open file.
        args: as in torch.save.
        options: as in torch.save.
    """
    context, path = _context(), _path_of(f)
    if path is not None and is_rehearsal():
        _log_once("%s is not saved: this process rehearses, and its step is discarded", path)
        return
    if context is None or path is None or not _can_be_replaced(path):
        torch.save(obj, f, *args, **options)
        return
    fd, num_bytes = _content_of(obj, path, args, options)
    try:
        _hand_over(context, path, fd, num_bytes)
    except PeerError as error:
        _log.warning("%s is written by this rank: %s", path, error)
        torch.save(obj, f, *args, **options)
        _saved.discard(path)
    else:
        _saved.add(path)
    finally:
        os.close(fd)


def load(f: "str | os.PathLike[str] | IO[bytes]", *args: Any, **options: Any) -> Any:
    """Load an object as torch.load does, from memory if the file is not written yet.

    Args:
        f: path, or an open file.
        args: as in torch.load.
        options: as in torch.load.

    Raises:
        PeerError: this process has saved the file, and no SMP says whether it is written.
    """
    context, path = _context(), _path_of(f)
    fd = None if context is None or path is None else _held(context, path)
    if fd is None:
        return torch.load(f, *args, **options)
    try:
        return torch.load(f"/proc/self/fd/{fd}", *args, **options)
    finally:
        os.close(fd)


@cache
def _log_once(text: str, *values: object) -> None:
    _log.warning(text, *values)


def _context() -> WorkerContext | None:
    """None if there is no SMP in this run."""
    context = worker_context()
    return context if context is not None and context.settings.enabled else None


def _path_of(f: object) -> str | None:
    """The absolute path, without symbolic links; None if this is not a path."""
    return os.path.realpath(f) if isinstance(f, str | os.PathLike) else None


def _can_be_replaced(path: str) -> bool:
    """Whether the SMP can write this file by a rename; torch.save reports what is wrong."""
    found = Path(path)
    is_usual = not found.exists() or (found.is_file() and os.access(path, os.W_OK))
    return is_usual and os.access(found.parent, os.W_OK | os.X_OK)


def _content_of(obj: object, path: str, args: Any, options: Any) -> tuple[int, int]:
    """Return a descriptor of the bytes of the file, and their number."""
    fd = os.memfd_create("ftrun-file", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        into = _MemoryFile(fd)
        torch.save(obj, cast("IO[bytes]", into), *args, **options)
        if into.has_room:
            _seal(fd)
            return fd, into.num_bytes
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    with tempfile.TemporaryFile(dir=Path(path).parent) as file:
        torch.save(obj, file, *args, **options)
        file.flush()
        return os.dup(file.fileno()), file.tell()


def _seal(fd: int) -> None:
    import fcntl  # Linux only

    fixed = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fixed)


def _is_free(num_bytes: int) -> bool:
    from ftrun.linux import available_memory  # Linux only

    return available_memory().num_bytes >= num_bytes


def _hand_over(context: WorkerContext, path: str, fd: int, num_bytes: int) -> None:
    link, mode = _link_of(context), 0o666 & ~_umask()
    before = _identity(path)
    _patiently(lambda: link.save_file(path, fd, num_bytes=num_bytes, mode=mode, before=before))


def _held(context: WorkerContext, path: str) -> int | None:
    link = _link_of(context)
    try:
        found = _patiently(lambda: link.open_saved_file(path))
    except PeerError as error:
        if path in _saved:
            raise PeerError(
                f"{path} was saved, and the process that writes it does not answer: {error}. The "
                "file on the disk may be older: load it by torch.load, or try again"
            ) from error
        _log.warning("%s is read from the disk; a newer save may not be written: %s", path, error)
        return None
    if found is None:
        _saved.discard(path)
        return None
    held, fd = found
    if is_newer(_identity(path), before=held.before, number=held.number):
        os.close(fd)
        return None
    return fd


def _patiently(ask: Callable[[], _Reply]) -> _Reply:
    """Ask an SMP, and its successor if it has ended. Raises PeerError."""
    global _is_lost
    give_up_s = clock.now_s() + (0.0 if _is_lost else _AWAIT_S)
    while True:
        try:
            reply = ask()
        except PeerError:
            # The agent starts another SMP.
            if clock.now_s() >= give_up_s:
                _is_lost = True
                raise
            clock.sleep(_RETRY_S)
        else:
            _is_lost = False
            return reply


def _identity(path: str) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns


def _link_of(context: WorkerContext) -> "WorkerSmpClient":
    """The connection for files, created on first use, after a fork, and in another generation."""
    global _link
    owner = os.getpid(), context.generation
    if _link is None or _link[0] != owner:
        from ftrun.worker.smp_client import WorkerSmpClient  # Linux only

        if _link is not None and _link[0][0] == owner[0]:
            _link[1].close()
        _link = owner, WorkerSmpClient(context)
    return _link[1]


def _umask() -> int:
    """os.umask() would change it for a moment, also for other threads."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1], 8) for line in status if line.startswith("Umask:"))
