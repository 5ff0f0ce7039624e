"""Atomic creation of an output file or folder.

Runs in:  the process of ftrun.tools.export.__main__, main thread. Does not import torch.
Takes in: the output path.
Gives:    a private staging path to write to; a durable rename to the output path at the end. If
          an error occurs, the output path stays as it was.
Survives: a kill: the staging folder that remains is hidden, and the next export to the same path
          removes it.
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
"""File names that an export writes into a folder; --force may replace only these."""

_OLD = "replaced"


def check_free(out: Path, *, is_folder: bool, may_replace: bool) -> None:
    """Check that an export may create or replace `out`.

    Raises:
        CheckpointError: the parent directory is missing, or `out` exists and must not be replaced.
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
    """Yield a staging path; on success, sync what was written there and move it to `out`.

    Args:
        out: an existing file or folder is replaced; see `check_free`.

    Raises:
        OSError: a write or a rename failed, for example on a full disk. `out` stays as it was.
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
    """Remove the staging folders that killed exports to `out` left."""
    for staging in out.parent.glob(f".{_escaped(out.name)}.export-*"):
        try:
            fd = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # another export holds the lock, or the file system has no locks
        else:
            _put_back(staging, out)
            shutil.rmtree(staging, ignore_errors=True)
        finally:
            os.close(fd)


def _put_back(staging: Path, out: Path) -> None:
    old = staging / _OLD
    if old.exists() and not os.path.lexists(out):
        old.rename(out)


def _sync(made: Path) -> None:
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
        if error.errno != errno.EINVAL:  # some network file systems cannot fsync a folder
            raise
    finally:
        os.close(fd)


def _escaped(name: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", name)
