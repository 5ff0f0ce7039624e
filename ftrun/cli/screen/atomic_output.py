"""Writes a command's result to stdout, or atomically to a file or folder.

Also used by the process of an export. Survives a kill: the staging folder that remains is hidden,
and the next export to the same path removes it.
"""

import contextlib
import errno
import fcntl
import glob
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from ftrun.errors import CheckpointError, FtrunError, UsageError


def requested_files(svg: str | None, html: str | None, *, as_json: bool) -> list[tuple[str, str]]:
    """Returns path and flag of each requested file; `-` is stdout, which takes one document."""
    named = ((svg, "--svg"), (html, "--html"))
    files = [("-" if is_stdout(path) else path, flag) for path, flag in named if path]
    if [path for path, _ in files].count("-") + as_json > 1:
        raise UsageError(
            "only one of --json, --svg - and --html - can have stdout. Name files for the others"
        )
    return files


def write_outputs(
    files: Sequence[tuple[str, str]],
    texts: Mapping[str, Callable[[], str]],
    *,
    document: Callable[[], object] | None,
    show: Callable[[], None],
) -> None:
    """Writes the files, whose texts are by flag; the document or text if stdout is free."""
    for path, flag in files:
        write_out(path, texts[flag](), flag=flag)
    if document is not None:
        write_out(None, json.dumps(document(), indent=1) + "\n")
    elif all(path != "-" for path, _ in files):
        show()
        write_out(None, "".join(f"{path}\n" for path, _ in files))


def write_out(out: str | None, text: str, *, flag: str = "--out") -> None:
    """Writes to a file, or to stdout if `out` is None or `-`; `flag` named the file."""
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
    """Replaces a file, or the target of a link, atomically; writes any other path in place."""
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


def check_free(
    out: Path, *, is_folder: bool, may_replace: bool, ours: Collection[str] = ()
) -> None:
    """Raises CheckpointError if `out` exists and is not an export, or `may_replace` is false.

    `ours` are further names in a folder that an export has written.
    """
    if not out.parent.is_dir():
        raise CheckpointError(f"there is no directory {out.parent}")
    if not os.path.lexists(out):
        return
    if not may_replace:
        raise CheckpointError(f"{out} exists already. Name another path, or add --force")
    if out.is_symlink() or out.is_dir() != is_folder:
        wanted = "a directory" if is_folder else "a file"
        raise CheckpointError(f"{out} exists and is not {wanted}; --force does not remove it")
    if is_folder:
        names = (one.name for one in out.iterdir())
        others = sorted(name for name in names if name not in ours and not _OURS.fullmatch(name))
        if others:
            raise CheckpointError(
                f"{out} has files that no export wrote ({', '.join(others[:3])}); --force does not "
                "remove it"
            )


@contextlib.contextmanager
def staged_output(out: Path) -> Iterator[Path]:
    """Yields a staging path; on success, syncs what was written there and moves it to `out`.

    An existing file or folder is replaced; see `check_free`. Raises OSError if a write or a rename
    failed, for example on a full disk. `out` is then unchanged.
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
        for path in [*made.iterdir(), made] if made.is_dir() else [made]:
            sync_path(path)
        if out.is_dir():
            out.rename(staging / _OLD)
        made.rename(out)
        sync_path(out.parent)
    finally:
        _put_back(staging, out)
        shutil.rmtree(staging, ignore_errors=True)
        os.close(fd)


def _sweep(out: Path) -> None:
    """Removes the staging folders that killed exports to `out` left."""
    for staging in out.parent.glob(f".{glob.escape(out.name)}.export-*"):
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


def sync_path(path: Path) -> None:
    """Makes a file, or the names in a folder, durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network file systems cannot fsync a folder.
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(fd)
