"""Whether a framework is there, and in a version that is known to fit.

Runs in:  worker, while an integration is imported; under plain python too.
Takes in: the name of the package and the oldest version.
Gives:    nothing, or an error that says what to install.
"""

import logging
import os
import re
from importlib import metadata

from ftrun.errors import NotSupportedHere
from ftrun.worker.context import worker_context

_log = logging.getLogger(__name__)


def require(package: str, *, at_least: str) -> None:
    """Look at what is installed, before it is imported.

    Raises:
        NotSupportedHere: it is not there, or too old.
    """
    remedy = f"pip install 'ftrun[{package}]'"
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError as error:
        raise NotSupportedHere(
            f"ftrun.integrations.{package} needs {package} {at_least} or newer, and none is "
            f"installed for this Python: {remedy}"
        ) from error
    if _numbers(found) < _numbers(at_least):
        raise NotSupportedHere(
            f"ftrun.integrations.{package} needs {package} {at_least} or newer, and {found} is "
            f"installed: {remedy}"
        )


def is_inside(what: str) -> bool:
    """Whether ftrun has started this process; where it has not, say that `what` does nothing."""
    if worker_context() is not None:
        return True
    if os.environ.get("RANK", "0") == "0":
        _log.warning("%s does nothing: this process was not started by ftrun", what)
    return False


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
