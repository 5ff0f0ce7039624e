"""Runs the process that lists, tests, verifies and prunes checkpoints for the command line.

Runs in: cli. Does not import rich, because every start of a run calls it.
"""

import subprocess
import sys

import msgspec

from ftrun.errors import FtrunError
from ftrun.urls import without_password
from ftrun.wire.messages.checkpoint import CatalogReport


def ask(*words: str, limit_s: float | None = None) -> CatalogReport:
    """Runs ftrun.tools.checkpoints.catalog with these words and returns its report.

    Raises:
        FtrunError: the process failed or exceeded the time limit.
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
