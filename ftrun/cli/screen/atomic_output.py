"""Writes a command's result to stdout, or atomically to a file or folder.

Runs in:  cli, and the process of an export, which must not import torch for it.
Survives: a kill: the staging folder that remains is hidden, and the next export to the same path
          removes it.
"""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from ftrun.errors import CheckpointError, FtrunError


def write_out(out: str | None, text: str, *, flag: str = "--out") -> None:
    """Writes to a file, or to stdout if `out` is None or `-`.

    Args:
        out: the file.
        text: the complete content.
        flag: the flag that names the file, for the error.

    Raises:
        FtrunError: the file cannot be written.
    """
    if out is None or out == "-":
        sys.stdout.write(text)
    else:
        _write(Path(out), text, flag)


def is_stdout(out: str) -> bool:
    """Returns whether `out` is stdout, such as /dev/stdout, which must not be replaced."""
    try:
        return os.path.samestat(os.stat(out), os.fstat(sys.stdout.fileno()))
    except (OSError, ValueError):  # no such file; no stdout
        return False


def _write(path: Path, text: str, flag: str) -> None:
    """Replaces a file atomically, because another process may be reading the old one.

    A symbolic link is kept: its target is replaced. A path that is not a regular file is written in
    place.
    """
    data = text.encode("utf-8", "replace")
    draft: Path | None = None
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        target = path.resolve()
        draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        draft.write_bytes(data)
        draft.replace(target)
    except OSError as error:
        if draft is not None:
            with contextlib.suppress(OSError):
                draft.unlink()
        raise FtrunError(
            f"{path} cannot be written: {error.strerror}. Name another file with {flag}"
        ) from error


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
def staged_output(out: Path) -> Iterator[Path]:
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
