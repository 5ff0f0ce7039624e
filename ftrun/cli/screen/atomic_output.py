"""What a command writes for somebody: to stdout, or a file whole or not at all.

Runs in: cli.
"""

import contextlib
import os
import sys
from pathlib import Path

from ftrun.errors import FtrunError


def write_out(out: str | None, text: str, *, flag: str = "--out") -> None:
    """Into a file, or to stdout where none is named, or `-`.

    Args:
        out: the file.
        text: all of it.
        flag: by which it was named.

    Raises:
        FtrunError: it cannot be written.
    """
    if out is None or out == "-":
        sys.stdout.write(text)
    else:
        _write(Path(out), text, flag)


def is_stdout(out: str) -> bool:
    """Such as /dev/stdout; a file that we are redirected into must not be replaced."""
    try:
        return os.path.samestat(os.stat(out), os.fstat(sys.stdout.fileno()))
    except (OSError, ValueError):  # no such file; no stdout
        return False


def _write(path: Path, text: str, flag: str) -> None:
    """A file whole or not at all: somebody may be looking at the one before.

    A link stays, and so does what is no file; that is written into.
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
