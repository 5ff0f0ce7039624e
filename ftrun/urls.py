"""Where checkpoints go: a directory of this machine, or a URL.

Runs in: every process. Pure.

`file://` names a directory, and is one from here on: directories have rename, locks and fsync.
"""

import os
import re

_URL = re.compile(r"[a-z][a-z0-9+.-]+://")
_FILE = "file://"
_PASSWORD = re.compile(r"(?<=://)([^/@:]*):([^/@]*)(?=@)")


def is_url(text: str) -> bool:
    """Not a path of this machine; `file://` is none either, once `located` has seen it."""
    return _URL.match(text) is not None


def located(text: str, *, cwd: str) -> str:
    """An absolute path, or a URL as it is.

    Args:
        text: as it was typed, or a path.
        cwd: what a relative path counts from.
    """
    if text.startswith(_FILE):
        from urllib.parse import unquote

        return os.path.join("/", unquote(text.removeprefix(_FILE)))
    return text if is_url(text) else os.path.join(cwd, text)


def below(url: str, name: str) -> str:
    """A name in a folder."""
    return f"{url.rstrip('/')}/{name}"


def without_password(url: str) -> str:
    """The same for journals, status and messages."""
    return _PASSWORD.sub(r"\1:***", url)


def password_of(url: str) -> str:
    """Empty: it has none."""
    found = _PASSWORD.search(url)
    return found[2] if found else ""
