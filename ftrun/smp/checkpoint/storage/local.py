"""The directory of checkpoints: durable files, locks, `latest`, and the removal of leftovers.

Runs in:  the SMP, in its disk lane's thread.
Takes in: the directory, of one node or shared by several.
Gives:    files and folders that are on disk when a function returns.
Survives: a writer killed at any point; a later writer removes its leftovers.

Rule 1: a node that writes alone holds the lock of the folder from begin to end. Any temporary entry
        in the folder is therefore abandoned.
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
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ftrun import clock
from ftrun.errors import CheckpointError
from ftrun.ids import Version
from ftrun.smp.checkpoint.index import read_indexes
from ftrun.smp.checkpoint.storage.direct_file import DirectFile, Pace
from ftrun.wire.crash_points import crash_point
from ftrun.wire.messages.checkpoint import INDEX_NAME

LATEST_NAME = "latest"
LOCK_NAME = ".lock"
GONE = ".tmp-gone-"
"""Prefix of entries that are being removed; any process that finds one may complete the removal."""

LOCK_PATIENCE_S = 30.0
STALE_S = 86_400.0
"""A shared temporary folder is abandoned if it was not changed for this number of seconds."""

_LOCK_RETRY_S = 0.02
_OWN = os.urandom(4).hex()
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[int]:
    """Create and open the directory, and lock it against another run."""
    fd = _open(directory)
    try:
        _lock_now(fd, directory, fcntl.LOCK_EX)
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def locked_shortly(directory: Path, stop: threading.Event) -> Iterator[int]:
    """Create and open the directory, and hold its `.lock`; wait for the lock if necessary."""
    fd = _open(directory)
    lock = -1
    try:
        _lock_now(fd, directory, fcntl.LOCK_SH)  # against a node that writes alone
        lock = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        _wait_for(lock, directory, stop)
        yield fd
    finally:
        os.close(fd)
        if lock >= 0:
            os.close(lock)


@contextlib.contextmanager
def order_lock(directory: Path, stop: threading.Event) -> Iterator[None]:
    """Hold `.lock` of an existing directory; wait for it if necessary."""
    lock = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _wait_for(lock, directory, stop)
        yield
    finally:
        os.close(lock)


def _lock_now(folder_fd: int, directory: Path, how: int) -> None:
    try:
        fcntl.flock(folder_fd, how | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise CheckpointError(
            f"another run writes its checkpoints to {directory}; name another --checkpoint-dir"
        ) from error
    except OSError as error:
        _log.debug("%s cannot be locked: %s", directory, error)


def _wait_for(lock: int, directory: Path, stop: threading.Event) -> None:
    give_up_s = clock.now_s() + LOCK_PATIENCE_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if clock.now_s() > give_up_s or stop.wait(_LOCK_RETRY_S):
                raise CheckpointError(
                    f"{directory / LOCK_NAME} is held by another node for more than "
                    f"{LOCK_PATIENCE_S:.0f} s, or the run is being stopped"
                ) from error
        except OSError as error:
            _log.debug("%s cannot be locked: %s", directory, error)
            return
        else:
            return


def _open(directory: Path) -> int:
    if not directory.is_absolute():
        raise CheckpointError(f"the checkpoint directory {directory} is not an absolute path")
    directory.mkdir(parents=True, exist_ok=True)
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


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
        yield write
        os.fsync(fd)
        temporary.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    finally:
        os.close(fd)


@contextlib.contextmanager
def replaced_large(path: Path, pace: Pace) -> Iterator[DirectFile]:
    """Do the same for a file of many megabytes: past the page cache, at this pace."""
    temporary = path.with_name(f".{path.name}.{_OWN}")
    file = DirectFile(temporary, pace=pace)
    try:
        yield file
        file.finish()
        temporary.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    finally:
        file.close()


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync(fd)
    finally:
        os.close(fd)


def sync(folder_fd: int) -> None:
    try:
        os.fsync(folder_fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems do not support it
            raise


def temporary_name(name: str) -> str:
    return f".tmp-{_OWN}-{name}"


def free_name(directory: Path, version: Version) -> Path:
    """Return an unused path for this version; an earlier life may have left one of that name."""
    name = f"step-{version.step:08d}-g{max(0, version.generation)}"
    path = directory / name
    again = 1
    while path.exists():
        again += 1
        path = directory / f"{name}.{again}"
    return path


def point_latest(directory: Path, path: Path, folder_fd: int) -> None:
    temporary = directory / temporary_name(LATEST_NAME)
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(path.name)
    crash_point("smp.checkpoint.link_made")
    temporary.replace(directory / LATEST_NAME)
    sync(folder_fd)


def is_stale(path: Path) -> bool:
    """True if the path was not changed for `STALE_S`, or does not exist."""
    try:
        return clock.wall_s() - path.lstat().st_mtime > STALE_S
    except OSError:
        return True


def remove(folder: Path) -> None:
    """Delete one of ftrun's folders as far as possible; importing shutil costs 3 ms."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            path.unlink(missing_ok=True)
        folder.rmdir()


@dataclass(frozen=True, slots=True)
class Retention:
    """Which checkpoints are retained, in addition to the last written one.

    Args:
        keep: number of retained checkpoints, including the last written one.
        keep_s: checkpoints written longer ago than this are removed; 0: age does not matter.
        runs: only checkpoints of these runs may be removed; empty: of all runs.
    """

    keep: int
    keep_s: float = 0.0
    runs: frozenset[str] = frozenset()

    def covers(self, run_id: str) -> bool:
        return not self.runs or run_id in self.runs


def to_prune(directory: Path, retention: Retention, *, newest: Path) -> list[Path]:
    others = [
        folder
        for folder, index in read_indexes(directory)
        if folder != newest and retention.covers(index.run_id)
    ]
    spare = max(0, retention.keep - 1)
    old = [one for one in others[:spare] if _age_s(one) > retention.keep_s > 0]
    return others[spare:] + old


def prune(directory: Path, retention: Retention, *, newest: Path) -> list[Path]:
    doomed = to_prune(directory, retention, newest=newest)
    for folder in doomed:
        remove_whole(folder)
    return doomed


def remove_whole(folder: Path) -> None:
    """Remove a checkpoint; the rename makes it invisible at once."""
    doomed = folder.with_name(f"{GONE}{_OWN}-{folder.name}")
    with contextlib.suppress(FileNotFoundError):
        folder.rename(doomed)
    crash_point("smp.checkpoint.pruning")
    remove(doomed)


def _age_s(folder: Path) -> float:
    try:
        return clock.wall_s() - (folder / INDEX_NAME).stat().st_mtime
    except OSError:
        return 0.0
