"""A file or a folder that is there as a whole, or not at all.

Runs in:  the process of ftrun.tools.export.__main__, main thread. Loads no torch.
Takes in: where it is to be; a path of this process's own to write to.
Gives:    all of it durable and in its place at the end; nothing where something goes wrong.
Survives: a kill: what it leaves is hidden, and removed by the next export to the same place.
"""

import contextlib
import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from ftrun.errors import CheckpointError

_OURS = re.compile(
    r"model-\d{5,}-of-\d{5,}\.safetensors|model\.safetensors\.index\.json|__\d+_\d+\.distcp|\.metadata"
)
"""Names of files in folders that an export writes, and so may replace."""

_OLD = "replaced"


def check_free(out: Path, *, is_folder: bool, may_replace: bool) -> None:
    """Something may be put there.

    Raises:
        CheckpointError: it is there already, and may not or must not be replaced.
    """
    if not out.parent.is_dir():
        raise CheckpointError(f"there is no directory {out.parent}")
    if not os.path.lexists(out):
        return
    if not may_replace:
        raise CheckpointError(f"{out} is there already. Name another place, or add --force")
    if out.is_symlink() or out.is_dir() != is_folder:
        wanted = "a directory" if is_folder else "a file"
        raise CheckpointError(f"{out} is there and is not {wanted}; --force does not remove it")
    if is_folder:
        others = sorted(one.name for one in out.iterdir() if not _OURS.fullmatch(one.name))
        if others:
            raise CheckpointError(
                f"{out} holds what no export has written ({', '.join(others[:3])}), so --force "
                "does not remove it"
            )


@contextlib.contextmanager
def new_place(out: Path) -> Iterator[Path]:
    """A path to write to; what is there at the end takes its place, durable.

    Args:
        out: what is there is replaced; see `check_free`.

    Raises:
        OSError: there is no room, or another reason not to write; then `out` is as it was.
    """
    _sweep(out)
    staging = out.with_name(f".{out.name}.export-{os.urandom(4).hex()}")
    staging.mkdir()
    fd = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        made = staging / out.name
        yield made
        _sync(made)
        if out.is_dir():
            out.rename(staging / _OLD)
        made.rename(out)
        _sync_folder(out.parent)
    finally:
        _put_back(staging, out)
        shutil.rmtree(staging, ignore_errors=True)
        os.close(fd)


def _sweep(out: Path) -> None:
    """Remove what killed exports to this place have left."""
    for staging in out.parent.glob(f".{_escaped(out.name)}.export-*"):
        try:
            fd = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # at work, or nobody can tell
        else:
            _put_back(staging, out)
            shutil.rmtree(staging, ignore_errors=True)
        finally:
            os.close(fd)


def _put_back(staging: Path, out: Path) -> None:
    """What was to be replaced, where the replacement did not come."""
    old = staging / _OLD
    if old.exists() and not os.path.lexists(out):
        old.rename(out)


def _sync(made: Path) -> None:
    """Have a file, or a folder with all its files, on disk."""
    for path in [*made.iterdir()] if made.is_dir() else [made]:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    if made.is_dir():
        _sync_folder(made)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems have no such thing
            raise
    finally:
        os.close(fd)


def _escaped(name: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", name)
