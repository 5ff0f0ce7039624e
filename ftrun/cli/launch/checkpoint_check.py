"""Checks before the start that checkpoints can be written to, or restored from, a URL.

Runs in:  cli. A separate process accesses the storage with the libraries and the environment that
          the SMP uses later.
Takes in: the value of `--checkpoint-dir` or `--resume`.
Gives:    nothing, or a UsageError with the error text of the storage.
"""

from ftrun.cli.launch.shelf_process import ask
from ftrun.errors import FtrunError, UsageError
from ftrun.urls import without_password
from ftrun.wire.checkpoint_owner import CheckpointOwner

LIMIT_S = 60.0
"""Seconds; a slower storage cannot take checkpoints either."""


def check_writable(url: str) -> CheckpointOwner | None:
    """Writes and removes a small file at the URL.

    Returns:
        The record of the run that owns the directory.

    Raises:
        UsageError: the URL cannot be written.
    """
    try:
        return ask("try", url, limit_s=LIMIT_S).owner
    except FtrunError as error:
        raise UsageError(
            f"--checkpoint-dir {error}. It was tried with a small file. Name another one, or make "
            "it writable; nothing was started"
        ) from error


def check_there(url: str) -> None:
    directory, _, name = url.rstrip("/").rpartition("/")
    is_one = name == "latest" or name.startswith("step-")
    words = (directory, name) if is_one else (url,)
    wish = f"--resume {without_password(url)}"
    try:
        found = ask("list", *words, limit_s=LIMIT_S)
    except FtrunError as error:
        raise UsageError(f"{wish}: {error}. Nothing was started") from error
    if not any(one.world_size for one in found.checkpoints):
        raise UsageError(f"{wish}: there is no checkpoint of ftrun there. Nothing was started")
