"""Whether a URL can be written to, or begun from, before anything is started.

Runs in:  cli. The store is asked by a process of the SMP's folder, started for it: it is the
          SMP that will do so later, with the same libraries and the same environment.
Takes in: what `--checkpoint-dir` or `--resume` was given.
Gives:    nothing, or a UsageError with the store's own words.
"""

from ftrun.cli.launch.shelf_process import ask
from ftrun.errors import FtrunError, UsageError
from ftrun.urls import without_password
from ftrun.wire.checkpoint_owner import CheckpointOwner

LIMIT_S = 60.0
"""A store that is slower than this now will not take checkpoints either."""


def check_writable(url: str) -> CheckpointOwner | None:
    """Something small was written there and removed; the record of the run that owns it.

    Raises:
        UsageError: with what is wrong.
    """
    try:
        return ask("try", url, limit_s=LIMIT_S).owner
    except FtrunError as error:
        raise UsageError(
            f"--checkpoint-dir {error}. It was tried with a small file. Name another one, or make "
            "it writable; nothing was started"
        ) from error


def check_there(url: str) -> None:
    """A checkpoint is there, or a directory of them.

    Raises:
        UsageError: with what is there instead.
    """
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
