"""Location of a run's sockets, and the environment variables of its workers.

Standard library only, because the stub imports it. A `RunFolder` has mode 0700, and is under
XDG_RUNTIME_DIR or in the temporary directory. It holds sockets, the run's spec and a lock. A run
can lose all of it: state is in memory, and the journal is under ftrun-logs/.
"""

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftrun.errors import NotSupportedHere, UsageError
from ftrun.ids import RunId

RUN_ID = "FTRUN_RUN_ID"
GENERATION = "FTRUN_GENERATION"

LAUNCH = "FTRUN_LAUNCH"  # the `LaunchRequest` of this worker, as JSON
VERIFY = "FTRUN_VERIFY"  # a `VerifyPlan` as JSON; set only in the runs of `ftrun verify`
LOG_FOLDER = "FTRUN_LOG_FOLDER"  # parent of the run's log folder; default: ./ftrun-logs
_GOOD_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class _File:
    """A path in the run folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: "RunFolder", _owner: object) -> Path:
        return folder.path / self._name


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of one run."""

    path: Path

    smp_socket = _File("smp.sock")
    agent_socket = _File("agent.sock")
    spec = _File("spec.json")
    lock = _File("lock")  # locked (flock) by the stub until the stub ends
    keep_mark = _File("keep-memory")  # of an agent whose memory, the restored version, stays
    crash_mark = _File("agent-crashed")  # of an agent that ends by its own bug; another replaces it

    @property
    def name(self) -> str:
        """`RUN_ID`, or `RUN_ID@NODE_ID` if the node has its own name on this machine."""
        return self.path.name

    @property
    def run_id(self) -> RunId:
        return RunId(self.name.partition("@")[0])

    def rank_socket(self, rank: int) -> Path:
        """Socket on which a worker's flight recorder can be read; created by the worker."""
        return self.path / f"rank-{rank}.sock"

    def spec_value(self, *keys: str) -> Any:
        """The value at this place of `spec.json`; None if there is none."""
        import json  # only here, because the stub is small

        try:
            found = json.loads(self.spec.read_bytes())
            for key in keys:
                found = found[key]
        except (OSError, ValueError, KeyError):
            return None
        return found

    def remove(self) -> None:
        import shutil  # the SMP loads this module, and needs neither of these

        shutil.rmtree(self.path, ignore_errors=True)


def check_run_id(text: str) -> RunId:
    """Raises UsageError if the text cannot be part of a path, or is too long."""
    if not _GOOD_ID.fullmatch(text):
        raise UsageError(
            f"run id {text!r} is not valid: 1 to 100 letters, digits, '.', '_' or '-', the first "
            "a letter or a digit"
        )
    return RunId(text)


def runs_folder() -> Path:
    """Of all runs of this user; NotSupportedHere if another user can enter it."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and os.access(base, os.W_OK | os.X_OK):
        return _own_folder(Path(base) / "ftrun")
    return _own_folder(Path(_temporary()) / f"ftrun-{os.getuid()}")


def spare_log_folder() -> Path:
    """For runs that cannot write to their working directory; outside, as logs outlive runs."""
    return _own_folder(Path(_temporary()) / f"ftrun-logs-{os.getuid()}")


def _temporary() -> str:
    try:
        import tempfile

        return tempfile.gettempdir()
    except FileNotFoundError as error:
        raise NotSupportedHere(
            "no folder for sockets can be written (TMPDIR, /tmp, /var/tmp or the current one). Set "
            "TMPDIR or XDG_RUNTIME_DIR; a container with a read-only root needs a volume at /tmp"
        ) from error


def _own_folder(path: Path) -> Path:
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not mine or stat.S_IMODE(found.st_mode) & 0o077:
        raise NotSupportedHere(
            f"{path} is not a folder that only you can enter (owner {found.st_uid}, mode "
            f"{stat.S_IMODE(found.st_mode):o}). Remove it, or set XDG_RUNTIME_DIR to a folder of "
            "your own"
        )
    return path


def run_folder(name: str) -> RunFolder:
    """`name` as `RunFolder.name`."""
    return RunFolder(runs_folder() / name)


def all_run_folders() -> list[RunFolder]:
    return [RunFolder(path) for path in sorted(runs_folder().iterdir()) if path.is_dir()]


@contextlib.contextmanager
def short_socket_path(path: Path) -> Iterator[str]:
    """A path of under 108 bytes to a socket, valid in this process inside the `with` block."""
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)
