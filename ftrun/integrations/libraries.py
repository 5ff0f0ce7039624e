"""Checks that a framework is installed in a supported version, while an integration is imported."""

import logging
import os
import re
from importlib import metadata
from typing import Any

from ftrun.errors import NotSupportedHere
from ftrun.worker.context import worker_context

_log = logging.getLogger(__name__)


def require(package: str, *, at_least: str) -> None:
    """Raises NotSupportedHere if the package is missing or too old, before it is imported."""
    need = f"ftrun.integrations.{package} needs {package} {at_least} or newer"
    remedy = f"pip install 'ftrun[{package}]'"
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError as error:
        raise NotSupportedHere(
            f"{need}, and none is installed for this Python: {remedy}"
        ) from error
    if _numbers(found) < _numbers(at_least):
        raise NotSupportedHere(f"{need}, and {found} is installed: {remedy}")


def is_inside(what: str) -> bool:
    """Whether ftrun started this process; if not, warns on rank 0 that `what` has no effect."""
    if worker_context() is not None:
        return True
    if os.environ.get("RANK", "0") == "0":
        _log.warning("%s has no effect: ftrun did not start this process", what)
    return False


def numbered(things: list[Any]) -> dict[str, Any]:
    return {str(at): thing for at, thing in enumerate(things)}


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
