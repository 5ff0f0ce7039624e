"""A directory of checkpoints: durable files, locks, an atomic rename, and `latest`.

Runs in:  the SMP, in its disk lane's thread; the process of ftrun.tools.checkpoints.
Takes in: the directory, of one node or shared by several.
Gives:    files and folders that are on disk when a method returns.
Survives: a writer killed at any point; a later writer removes its leftovers.

A checkpoint is written to a folder `.tmp-...`, which is renamed when it is complete. `latest` is a
link, which is renamed last.

Rule 1: a node that writes alone holds the lock of the directory from begin to end. Any temporary
        entry outside of the checkpoints that several nodes have begun is therefore abandoned.
Rule 2: several nodes hold `.lock` only while they inspect and merge. With NFS, other nodes see a
        lock on a file but not one on a folder. Only the order depends on the lock: a rename
        succeeds once, whichever node is first.
Rule 3: temporary names contain a random number of this process, because processes on several nodes
        may have the same pid.
"""

import contextlib
import errno
import fcntl
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from ftrun import clock
from ftrun.errors import CheckpointError
from ftrun.ids import Version
from ftrun.smp.checkpoint.index import (
    LATEST_NAME,
    CheckpointPart,
    Sizes,
    StoredCheckpoint,
    is_stale,
    parse_stored,
    parse_tagged,
    tagged_name,
)
from ftrun.smp.checkpoint.storage.direct_file import DirectFile, Pace
from ftrun.wire.crash_points import crash_point
from ftrun.wire.messages.checkpoint import INDEX_NAME

LOCK_NAME = ".lock"
LOCK_TIMEOUT_S = 30.0
OTHER_WRITER_S = 5.0
"""Longest wait for a run that writes alone, or for `ftrun checkpoints prune`."""
READ_LOCK_TIMEOUT_S = 1.0
"""Longest wait for a process that removes a checkpoint: it holds the lock for a rename."""

_LOCK_RETRY_S = 0.02
_READ_BYTES = 1 << 22
_NAME = re.compile(r"step-\d{8,}-g\d+(\.\d+)?")
_PENDING = ".tmp-"
_GONE = ".tmp-gone-"
"""Prefix of entries that are being removed; any process that finds one may complete the removal."""

_OWN = os.urandom(4).hex()
_log = logging.getLogger(__name__)


class LocalStorage:
    """The checkpoints in a directory, which need not exist; `stop` ends waiting for a lock."""

    is_local = True

    def __init__(self, directory: Path, stop: threading.Event) -> None:
        self.shown = str(directory)
        self._directory = directory
        self._stop = stop
        self._is_exclusive = False
        self._gone: list[Path] | None = None
        """What was renamed under a lock, and is removed after it."""

    def path_of(self, name: str) -> str:
        return str(self._directory / name)

    # --- reading ------------------------------------------------------------------------------

    def folders(self) -> list[str]:
        try:
            with os.scandir(self._directory) as entries:
                return sorted(one.name for one in entries if not one.is_file(follow_symlinks=False))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def checkpoints(self) -> list[StoredCheckpoint]:
        """Return all that this package has named, the last written first; empty without a place."""
        found = []
        for name in self.folders():
            pending = parse_tagged(name.removeprefix(_PENDING)) if name[0] == "." else None
            if pending is not None:
                found.append(StoredCheckpoint(name, *pending))
            elif name.startswith("step-"):
                one = self.describe(name)
                if one.index is None or _NAME.fullmatch(name):  # else a copy made by the user
                    found.append(one)
        return sorted(found, key=lambda one: one.order, reverse=True)

    def describe(self, name: str) -> StoredCheckpoint:
        """Return one checkpoint, whatever its name; with a problem if it is missing."""
        path = self._directory / name / INDEX_NAME
        try:
            one = parse_stored(path.read_bytes(), name, str(path.parent), None)
            return replace(one, written_s=path.stat().st_mtime)
        except OSError as error:
            one = parse_stored(None, name, "", None)
            problem = f"{path.parent}: cannot read its index: {error.strerror}"
            may_pass = not isinstance(error, FileNotFoundError)
            return replace(one, problem=problem, may_pass=may_pass)

    def latest_name(self) -> str:
        link = self._directory / LATEST_NAME
        return os.path.basename(os.readlink(link)) if link.is_symlink() else ""

    def read(self, name: str) -> bytes | None:
        try:
            return (self._directory / name).read_bytes()
        except FileNotFoundError:
            return None

    def sizes(self, folder: str) -> Sizes:
        """Return the sizes of the files; empty if the folder does not exist."""
        try:
            with os.scandir(self._directory / folder) as entries:
                return {one.name: one.stat().st_size for one in entries}
        except FileNotFoundError:
            return {}

    def names(self, folder: str) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return os.listdir(self._directory / folder)
        return []

    def changed_s(self, folder: str) -> float | None:
        """Return the wall time of the last addition; None if unknown."""
        try:
            return (self._directory / folder).lstat().st_mtime
        except OSError:
            return None

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator["LocalFile"]:
        fd = os.open(self._directory / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield LocalFile(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """Keep the checkpoint from being pruned; if the file system has no locks, do nothing.

        Raises CheckpointError if another process removes it just now.
        """
        path = self._directory / name / INDEX_NAME
        with contextlib.ExitStack() as ends:
            with contextlib.suppress(OSError):
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                ends.callback(os.close, fd)
                if not _flock(fd, fcntl.LOCK_SH, READ_LOCK_TIMEOUT_S, self._stop):
                    _log.warning("%s is locked, so it is read without a lock", path)
                if not (path.exists() and os.path.samestat(path.stat(), os.fstat(fd))):
                    raise CheckpointError(f"{path.parent} was removed by another process")
            yield

    @contextlib.contextmanager
    def without_readers(self, name: str) -> Iterator[bool]:
        """Exclude new readers of a checkpoint; yield False if a process reads it already."""
        has_none = True
        with contextlib.ExitStack() as ends:
            try:
                # With NFS, an exclusive lock needs a descriptor for writing.
                fd = os.open(self._directory / name / INDEX_NAME, os.O_RDWR | os.O_CLOEXEC)
                ends.callback(os.close, fd)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                has_none = False
            except OSError as error:
                _log.debug("%s cannot be locked: %s", self.path_of(name), error)
            yield has_none

    def again(self) -> AbstractContextManager["LocalStorage"]:
        """Return the same storage, usable also after this one is closed or has failed."""
        return contextlib.nullcontext(self)

    # --- writing ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Exclude other runs while a single node writes."""
        with self._removing_later(), _locked(self._directory, fcntl.LOCK_EX, self._stop):
            self._is_exclusive = True
            try:
                yield
            finally:
                self._is_exclusive = False

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Exclude other nodes of the run while this one inspects and merges."""
        if self._is_exclusive:
            yield
            return
        with (
            self._removing_later(),
            _locked(self._directory, fcntl.LOCK_SH, self._stop),  # against one that writes alone
            order_lock(self._directory, self._stop),
        ):
            yield

    @contextlib.contextmanager
    def _removing_later(self) -> Iterator[None]:
        """Removals only rename under the lock inside this context: large files take minutes."""
        self._gone = []
        try:
            yield
        finally:
            gone, self._gone = self._gone, None
            for path in gone:
                _remove(path)

    def pending_name(self, key: CheckpointPart, *, is_alone: bool) -> str:
        """Return the folder of all parts that can be merged with this one."""
        if is_alone:
            return _temporary_name(f"step-{key.step}")
        return f"{_PENDING}{tagged_name(key, key.generation)}"

    def make(self, folder: str) -> None:
        (self._directory / folder).mkdir(exist_ok=True)

    def put(self, name: str, data: bytes | memoryview) -> None:
        """Write a file; it is complete and durable, or as it was before."""
        with replaced(self._directory / name) as write:
            write(data)

    def stream(self, name: str, num_bytes: int, pace: Pace) -> AbstractContextManager[DirectFile]:
        return replaced_large(self._directory / name, pace)

    def sync(self, folder: str = "") -> None:
        """Make the names in the folder durable."""
        fd = os.open(self._directory / folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno != errno.EINVAL:  # some network file systems do not support it
                raise
        finally:
            os.close(fd)

    def publish(self, folder: str, version: Version) -> str:
        """Rename the folder to an unused name; an earlier life may have left this version."""
        name = first = f"step-{version.step:08d}-g{max(0, version.generation)}"
        again = 1
        while (self._directory / name).exists():
            again += 1
            name = f"{first}.{again}"
        (self._directory / folder).rename(self._directory / name)
        return name

    def clean_up(self, name: str) -> None:
        """Remove parts, offers, and what is left of killed writers and of earlier attempts."""
        index = self.describe(name).index
        kept = {one for shard in index.shards for one in shard.names} if index else set[str]()
        patterns = ("part-*.json", "offer-*", ".*", *(("rank-*",) if kept else ()))
        for path in (one for pattern in patterns for one in (self._directory / name).glob(pattern)):
            if path.name not in kept:
                path.unlink(missing_ok=True)

    def point_latest(self, name: str) -> None:
        temporary = self._directory / _temporary_name(LATEST_NAME)
        temporary.unlink(missing_ok=True)
        try:
            temporary.symlink_to(name)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            _log.debug("%s has no links: %s", self._directory, error)
            return  # the index says which checkpoint is the newest one
        crash_point("smp.checkpoint.link_made")
        temporary.replace(self._directory / LATEST_NAME)
        self.sync()

    def remove(self, name: str) -> None:
        """Rename it first: no reader sees it, and no node completes it, from then on."""
        gone = self._directory / f"{_GONE}{_OWN}-{name}"
        while gone.exists():  # the rest of an earlier one, such as files that NFS keeps
            gone = gone.with_name(f"{gone.name}-")
        with contextlib.suppress(FileNotFoundError):
            (self._directory / name).rename(gone)
        crash_point("smp.checkpoint.pruning")
        if self._gone is not None:
            self._gone.append(gone)
        else:
            _remove(gone)

    def discard(self, folder: str) -> None:
        _remove(self._directory / folder)

    def sweep_rest(self, *, is_alone: bool) -> None:
        """Remove abandoned temporary entries.

        If several nodes write, `.lock` is held, so a temporary `latest` link belongs to a killed
        node. If locks have no effect, it may belong to an active node. That node fails, and finds
        the checkpoint finished at the next request.
        """
        for path in self._directory.glob(f"{_PENDING}*"):
            if parse_tagged(path.name.removeprefix(_PENDING)) is not None:
                continue
            if path in (self._gone or ()):
                continue  # removed after the lock
            is_over = path.name.startswith(_GONE) or path.name.endswith(f"-{LATEST_NAME}")
            if is_alone or is_over or is_stale(self.changed_s(path.name)):
                _remove(path)


# --- locks --- --------------------------------------------------------------------------------


@contextlib.contextmanager
def _locked(directory: Path, how: int, stop: threading.Event) -> Iterator[None]:
    """Create the directory and lock it.

    LOCK_EX excludes all other runs and nodes; LOCK_SH excludes one that writes alone.
    """
    if not directory.is_absolute():
        raise CheckpointError(f"the checkpoint directory {directory} is not an absolute path")
    directory.mkdir(parents=True, exist_ok=True)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not _flock(fd, how, OTHER_WRITER_S, stop):
            raise CheckpointError(
                f"another run writes its checkpoints to {directory}, or they are being removed. "
                "Two runs need two directories (--checkpoint-dir)"
            )
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def order_lock(directory: Path, stop: threading.Event) -> Iterator[None]:
    """Hold `.lock` of an existing directory; wait for it if necessary."""
    lock = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        if not _flock(lock, fcntl.LOCK_EX, LOCK_TIMEOUT_S, stop):
            raise CheckpointError(
                f"{directory / LOCK_NAME} is held by another node for more than "
                f"{LOCK_TIMEOUT_S:.0f} s, or the run is being stopped"
            )
        yield
    finally:
        os.close(lock)


def _flock(fd: int, how: int, limit_s: float, stop: threading.Event) -> bool:
    """Lock a descriptor; False if another process holds it too long. No locks: as if locked."""
    give_up_s = clock.now_s() + limit_s
    while True:
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
        except BlockingIOError:
            if clock.now_s() > give_up_s or stop.wait(_LOCK_RETRY_S):
                return False
        except OSError as error:
            _log.debug("a checkpoint directory cannot be locked: %s", error)
            return True
        else:
            return True


# --- files --- --------------------------------------------------------------------------------


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Callable[[memoryview | bytes], None]]:
    """Write a file through the yielded function; on exit it is on disk under its final name."""
    temporary = path.with_name(f".{path.name}.{_OWN}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)

    def write(data: memoryview | bytes) -> None:
        left = memoryview(data).cast("B")
        while left:
            left = left[os.write(fd, left) :]

    try:
        with _renamed(temporary, path):
            yield write
            os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def replaced_large(path: Path, pace: Pace) -> Iterator[DirectFile]:
    """Do the same for a file of many megabytes: past the page cache, at this pace."""
    temporary = path.with_name(f".{path.name}.{_OWN}")
    file = DirectFile(temporary, pace=pace)
    try:
        with _renamed(temporary, path):
            yield file
            file.finish()
    finally:
        file.close()


@contextlib.contextmanager
def _renamed(temporary: Path, path: Path) -> Iterator[None]:
    """Give a file its final name at the end; remove it if it fails."""
    try:
        yield
        temporary.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file that is being read."""

    fd: int
    size: int

    def read(self, at: int, num_bytes: int) -> bytes:
        """Read `num_bytes` from offset `at`, or fewer at the end of the file."""
        return os.pread(self.fd, num_bytes, at)

    def read_into(self, target: memoryview, at: int = 0) -> int:
        done = 0
        while done < len(target):
            got = os.preadv(self.fd, [target[done : done + _READ_BYTES]], at + done)
            if not got:
                break
            done += got
        return done


def _temporary_name(name: str) -> str:
    return f"{_PENDING}{_OWN}-{name}"


def _remove(path: Path) -> None:
    """Delete a folder of files, or a file, as far as possible; importing shutil costs 3 ms."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            for file in path.iterdir():
                file.unlink(missing_ok=True)
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
