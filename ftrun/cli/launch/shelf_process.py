"""The process that reads, tries and removes checkpoints for the command line.

Runs in:  cli; it waits for a process of ftrun.tools.checkpoints.catalog. Does not load rich: every
          start asks here.
Takes in: the words for it.
Gives:    what it has said.
"""

import subprocess
import sys

import msgspec

from ftrun.errors import FtrunError
from ftrun.urls import without_password
from ftrun.wire.messages.shelf_facts import CatalogReport


def ask(*words: str, limit_s: float | None = None) -> CatalogReport:
    """What the process of ftrun.tools.checkpoints.catalog says.

    Raises:
        FtrunError: it could not do it, or not in time.
    """
    safe_path = ["-P"] if sys.flags.safe_path else []
    command = [sys.executable, *safe_path, "-m", "ftrun.tools.checkpoints.catalog", *words]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, check=False, timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        where = without_password(words[1])
        raise FtrunError(f"{where} has not answered for {limit_s:.0f} s") from error
    try:
        found = msgspec.json.decode(done.stdout, type=CatalogReport)
    except msgspec.MsgspecError as error:
        raise FtrunError(f"the checkpoints could not be read (exit {done.returncode})") from error
    if found.problem:
        raise FtrunError(found.problem)
    return found
