"""Holds the files of `ftrun.save` in memory until they are on storage.

Runs in:  the SMP: requests and results in the server's thread, writes in the lane "files".
Takes in: SaveFile of workers; FileHeld of an agent whose last SMP has ended.
Gives:    the files; FileHeld and FileWritten to the agent; descriptors to workers that load.
Survives: the rank, because the content is in this process's memory; its own death, because the
          agent holds duplicates of the descriptors.

Rule 1: the agent has the duplicate before the worker has the reply, in the order of messages.
Rule 2: one lane writes in the order of the saves, and leaves out a file that a newer save replaced.
        The last save of a path is therefore the last to be written.
Rule 3: a file appears by a rename, when all of its bytes are synced. Until then the old one stays.
Rule 4: a file that was changed after the save, for example by the script or by another node, is
        newer and stays. What this module writes has the time of its save as its mtime, so that a
        write of an earlier save is not mistaken for such a change.
Rule 5: a file that cannot be written stays in memory, and the write is repeated.
"""

import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import xxhash

from ftrun import clock
from ftrun.ids import RunId
from ftrun.linux import at_low_priority
from ftrun.smp.client import Requester
from ftrun.smp.jobs import Finish, IntervalTimer, JobLanes
from ftrun.wire.crash_points import crash_point
from ftrun.wire.messages import envelope as messages
from ftrun.wire.messages import files as file_messages

RETRY_S = 30.0
_CHUNK_BYTES = 16 << 20
_FILE_CLOCK = 5
"""CLOCK_REALTIME_COARSE, of which Linux takes the mtime of a file."""

_NEWER = "the file was changed after this save, so the newer content stays"
_BUG = "internal error in ftrun; see the SMP's log"

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Held:
    """One file; owns the descriptor."""

    file: file_messages.FileHeld
    fd: int
    reason: str = ""
    """Why the last write has failed."""


class SavedFiles:
    """The files of one node that are not written yet, by path."""

    def __init__(self, run_id: RunId, jobs: JobLanes, send_to_agent: Callable[..., None]) -> None:
        self._run_id = run_id
        self._jobs = jobs
        self._send_to_agent = send_to_agent
        self._held: dict[str, _Held] = {}
        self._num_jobs = 0
        self._last_number = 0
        self._finishing: list[Requester] = []
        self._retries = IntervalTimer(jobs, self._retry)

    def serve(
        self,
        requester: Requester,
        body: file_messages.SaveFile | file_messages.OpenSavedFile,
        fds: tuple[int, ...],
    ) -> None:
        if isinstance(body, file_messages.SaveFile):
            self.save(requester, body, fds)
        else:
            self.open(requester, body)

    def save(
        self, requester: Requester, body: file_messages.SaveFile, fds: tuple[int, ...]
    ) -> None:
        if len(fds) != 1:
            requester.send(messages.Refused("a file was sent without its content"))
            return
        # Above the numbers of an earlier SMP, which were times too.
        self._last_number = max(self._last_number + 1, time.clock_gettime_ns(_FILE_CLOCK))
        held = file_messages.FileHeld(
            body.rank, body.path, body.num_bytes, body.mode, self._last_number, body.before
        )
        self._send_to_agent(held, fds=fds)  # rule 1
        crash_point("smp.file.held")
        self._add(held, fds[0])
        requester.send(messages.Done())

    def take_back(self, held: file_messages.FileHeld, fds: tuple[int, ...]) -> None:
        """Write a file of an earlier SMP, unless a newer save has replaced it."""
        before = self._held.get(held.path)
        if len(fds) == 1 and (before is None or before.file.number < held.number):
            self._last_number = max(self._last_number, held.number)
            self._add(held, fds[0])

    def open(self, requester: Requester, body: file_messages.OpenSavedFile) -> None:
        held = self._held.get(body.path)
        if held is None:
            requester.send(messages.Refused(f"{body.path} is not in memory"))
        else:
            file = held.file
            requester.send(
                file_messages.SavedFileOpened(file.num_bytes, file.number, file.before),
                fds=(held.fd,),
            )

    def send_all(self) -> None:
        """Send duplicates of all files to a new agent."""
        for held in self._held.values():
            self._send_to_agent(held.file, fds=(held.fd,))

    def finish(self, requester: Requester) -> None:
        """Reply when every file was written, or has failed after this request."""
        self._finishing.append(requester)
        self._retry()
        self._reply()

    def free(self) -> None:
        self._retries.stop()
        for held in self._held.values():
            os.close(held.fd)
        self._held.clear()

    # --- details -----------------------------------------------------------------------------

    def _add(self, file: file_messages.FileHeld, fd: int) -> None:
        replaced = self._held.pop(file.path, None)
        if replaced is not None:
            os.close(replaced.fd)
        self._held[file.path] = held = _Held(file, os.dup(fd))
        self._submit(held)

    def _submit(self, held: _Held) -> None:
        self._num_jobs += 1
        held.reason = ""
        fd = os.dup(held.fd)  # a newer save closes the other one during the write
        self._jobs.submit(
            "files",
            partial(self._write, held, fd),
            failed=partial(self._written, held, 0.0, _BUG, is_dropped=False),
        )

    def _write(self, held: _Held, fd: int) -> Finish:
        file, started_s, reason, is_dropped = held.file, clock.now_s(), "", False
        try:
            if self._held.get(file.path) is held:  # rule 2
                at_low_priority(partial(write_file, file, fd, salt=self._run_id))
        except FileExistsError as error:
            reason, is_dropped = str(error), True
        except OSError as error:
            reason = error.strerror or str(error)
        finally:
            os.close(fd)
        seconds = clock.now_s() - started_s
        return partial(self._written, held, seconds, reason, is_dropped=is_dropped)

    def _written(self, held: _Held, seconds: float, reason: str, *, is_dropped: bool) -> None:
        self._num_jobs -= 1
        file = held.file
        if self._held.get(file.path) is held:  # no newer save has replaced it
            held.reason = reason
            if reason and not is_dropped:
                _log.debug("%s is not written: %s", file.path, reason)  # the agent warns
                self._retries.start(RETRY_S)
            else:
                del self._held[file.path]
                os.close(held.fd)
            self._send_to_agent(
                file_messages.FileWritten(
                    file.path, file.number, file.num_bytes, seconds, reason, is_dropped
                )
            )
        self._reply()

    def _retry(self) -> None:
        failed = [held for held in self._held.values() if held.reason]
        if not failed:
            self._retries.stop()
        for held in failed:
            self._submit(held)

    def _reply(self) -> None:
        if self._num_jobs:
            return
        reasons = [f"{path}: {held.reason}" for path, held in self._held.items()]
        for requester in self._finishing:
            requester.send(messages.Refused("; ".join(reasons)) if reasons else messages.Done())
        self._finishing.clear()


def write_file(file: file_messages.FileHeld, source: int, *, salt: str) -> None:
    """Write, sync and rename: rule 3. Raises OSError; FileExistsError: rule 4.

    The name of the temporary file is the same in the next attempt, also of another SMP, which
    therefore replaces what a killed one left.
    """
    target = Path(file.path)
    words = f"{salt} {socket.gethostname()} {file.rank} {file.path}".encode()
    temporary = target.with_name(f".ftrun-{xxhash.xxh3_64_hexdigest(words)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(temporary, flags, 0o600)
        try:
            os.fchmod(fd, _mode_of(target, file.mode))
            at = 0
            while at < file.num_bytes:
                count = os.sendfile(fd, source, at, min(_CHUNK_BYTES, file.num_bytes - at))
                if not count:
                    raise OSError(f"the content ends after {at} of {file.num_bytes} bytes")
                at += count
                crash_point("smp.file.copied")
            os.utime(fd, ns=(file.number, file.number))
            os.fsync(fd)
        finally:
            os.close(fd)
        crash_point("smp.file.synced")
        if _is_replaced(file):
            raise FileExistsError(_NEWER)
        os.rename(temporary, target)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
    crash_point("smp.file.renamed")
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _is_replaced(file: file_messages.FileHeld) -> bool:
    try:
        found = os.stat(file.path)
    except OSError:
        return False
    at = (found.st_ino, found.st_mtime_ns)
    return file_messages.is_newer(at, before=file.before, number=file.number)


def _mode_of(target: Path, new: int) -> int:
    try:
        return target.stat().st_mode & 0o7777
    except FileNotFoundError:
        return new
