"""Reads the file that assigns nodes to switches, once before the start.

Runs in: cli. The content goes into the run's specification, so that agents do not need the file.
"""

from pathlib import Path
from typing import Any

import yaml

from ftrun.errors import UsageError
from ftrun.network.detect.leaves import leaves_from_file, leaves_from_slurm

_MAX_BYTES = 8 << 20
_SLURM_WORD = "switchname="


def read_topology(path: str | None) -> tuple[dict[str, Any] | None, str]:
    """Returns a parsed YAML file, or the text of Slurm's topology.conf.

    Raises:
        UsageError: the file cannot be read, or has neither format.
    """
    if path is None:
        return None, ""
    try:
        data = Path(path).read_bytes()[: _MAX_BYTES + 1]
        text = data.decode("utf-8")
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"--topology {path} cannot be read: {why}") from error
    if len(data) > _MAX_BYTES:
        raise UsageError(f"--topology {path} has more than {_MAX_BYTES >> 20} MiB: is it the file?")
    try:
        if _SLURM_WORD in text.lower():
            leaves_from_slurm(text, {})
            return None, text
        found = yaml.safe_load(text)
        leaves_from_file(found, [])
    except (UsageError, yaml.YAMLError) as error:
        raise UsageError(
            f"--topology {path} is not understood: {error}. Write switches with their nodes, as in "
            "leaf1: [node1, node2], or give Slurm's topology.conf"
        ) from error
    return found, ""
