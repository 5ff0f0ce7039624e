"""Writes a command's result to stdout, or atomically to a file.

Runs in: cli.
"""

import contextlib
import os
import sys
from pathlib import Path

from ftrun.errors import FtrunError


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
