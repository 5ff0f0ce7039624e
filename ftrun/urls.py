"""Locations of checkpoints: a directory of this machine, or a URL.

A `file://` URL becomes a directory path, because directories have rename, locks and fsync.
"""

import os
import re

_URL = re.compile(r"[a-z][a-z0-9+.-]+://")
_FILE = "file://"
_PASSWORD = re.compile(r"(?<=://)([^/@:]*):([^/@]*)(?=@)")


def is_url(text: str) -> bool:
    """Whether the text is a URL; `located` must have replaced a `file://` URL before."""
    return _URL.match(text) is not None


def located(text: str, *, cwd: str) -> str:
    """Resolves a path against `cwd`, turns a `file://` URL into a path, and keeps other URLs."""
    if text.startswith(_FILE):
        from urllib.parse import unquote

        return os.path.join("/", unquote(text.removeprefix(_FILE)))
    return text if is_url(text) else os.path.join(cwd, text)


def below(url: str, name: str) -> str:
    return f"{url.rstrip('/')}/{name}"


def without_password(url: str) -> str:
    return _PASSWORD.sub(r"\1:***", url)


def password_of(url: str) -> str:
    found = _PASSWORD.search(url)
    return found[2] if found else ""
