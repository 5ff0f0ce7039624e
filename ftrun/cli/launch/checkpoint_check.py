"""Runs the process that lists, tests, verifies and prunes checkpoints for the command line.

That process accesses a storage with the libraries and the environment that the SMP uses later.
Every start of a run imports this module, so it does not import rich.
"""

import subprocess
from contextlib import suppress
from typing import TypeVar

import msgspec

from ftrun.cli.stub import python_command
from ftrun.errors import FtrunError, UsageError
from ftrun.urls import without_password
from ftrun.wire.checkpoint_owner import CheckpointOwner
from ftrun.wire.messages.checkpoint import CatalogReport

LIMIT_S = 60.0  # seconds; a slower storage cannot store checkpoints either
_KILL_S = 1.0
_Report = TypeVar("_Report", bound=msgspec.Struct)


def report_of(
    module: str,
    *words: str,
    kind: type[_Report],
    failure: str,
    stdin: bytes = b"",
    limit_s: float | None = None,
) -> _Report:
    """Runs a module as a process and decodes its stdout; raises `failure` if it has no report."""
    command = python_command(module, *words)
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        stdout, _ = process.communicate(stdin, timeout=limit_s)
    except BaseException:
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # it may hang in the kernel, on a file system
            process.wait(_KILL_S)
        assert process.stdout is not None
        process.stdout.close()
        raise
    try:
        return msgspec.json.decode(stdout, type=kind)
    except msgspec.MsgspecError as error:
        raise FtrunError(f"{failure} (exit {process.returncode})") from error


def ask_catalog(*words: str, limit_s: float | None = None) -> CatalogReport:
    """Runs ftrun.tools.checkpoints.catalog; raises its problem as an FtrunError."""
    try:
        found = report_of(
            "ftrun.tools.checkpoints.catalog", *words, kind=CatalogReport, limit_s=limit_s,
            failure="the checkpoints could not be read",
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        url = without_password(words[1])
        raise FtrunError(f"{url} did not answer within {limit_s:.0f} s") from error
    if found.problem:
        raise FtrunError(found.problem)
    return found


def check_writable(url: str) -> CheckpointOwner | None:
    """Writes and removes a small file at the URL; returns the run that owns the directory."""
    try:
        return ask_catalog("try", url, limit_s=LIMIT_S).owner
    except FtrunError as error:
        raise UsageError(
            f"--checkpoint-dir {error}. ftrun tried to write a small file there. Name another "
            "directory, or make it writable; nothing was started"
        ) from error


def check_there(url: str) -> None:
    directory, _, name = url.rstrip("/").rpartition("/")
    is_one = name == "latest" or name.startswith("step-")
    flag = f"--resume {without_password(url)}"
    try:
        found = ask_catalog("list", *((directory, name) if is_one else (url,)), limit_s=LIMIT_S)
    except FtrunError as error:
        raise UsageError(f"{flag}: {error}. Nothing was started") from error
    if not any(one.world_size for one in found.checkpoints):
        raise UsageError(f"{flag}: there is no checkpoint of ftrun there. Nothing was started")
