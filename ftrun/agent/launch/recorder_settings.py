"""Variables for torch's flight recorders in the ranks. Variables that the user has set stay.

TORCH_FR_BUFFER_SIZE overrides TORCH_NCCL_TRACE_BUFFER_SIZE, so it is set only if the user has set
neither. TORCH_NCCL_TRACE_BUFFER_SIZE is never set, because torch warns about it in every rank (seen
with 2.13), and only the dump pipe of 2.8 to 2.11 needs it.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

RECORDED_CALLS = 128
"""Number of collectives in gloo's recorder; reading torch's default of 2,000 takes 15 ms."""

RECORDED_ON_DEVICE = 2000
"""Number of collectives in NCCL's recorder, which is not read while ranks make steps. Torch 2.8 to
2.10 record nothing without a size."""

DUMPS = "fr"
"""Folder of dumps below the logs of a node, with a folder for each generation."""

_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
PIPE_STEM = "recorder_"
_DEVICES = ("dev/nvidia[0-9]*", "dev/kfd")


def has_nccl_devices(root: Path = Path("/")) -> bool:
    """Whether this machine has devices for NCCL or RCCL; opens no device."""
    return any(True for pattern in _DEVICES for _ in root.glob(pattern))


def recorder_variables(
    user: Mapping[str, str], *, dumps: Path, pipes: Path, has_devices: bool
) -> dict[str, str]:
    """Variables that `user` has not set. `pipes` is on a local file system.

    Torch ends a rank that cannot make its pipe.
    """
    found: dict[str, str] = {}
    if not any(name in user for name in _SIZES):
        found[_SIZES[0]] = str(RECORDED_ON_DEVICE if has_devices else RECORDED_CALLS)
    if not has_devices:
        return found
    with suppress(OSError):  # if the disk is full, torch uses its default folder
        dumps.mkdir(parents=True, exist_ok=True)
        if not any(name in user for name in _FILES):
            found |= dict.fromkeys(_FILES, str(dumps / "rank_"))
    if PIPE not in user:
        found[PIPE] = str(pipes / PIPE_STEM)
    return found
