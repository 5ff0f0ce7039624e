"""The ownership of a checkpoint directory: one run at a time, for its whole life.

Runs in:  the SMP: claimed and checked in its disk lane's thread, renewed in a separate thread.
Takes in: a `CheckpointClaim` on the node of rank 0; the id of the run.
Gives:    a `CheckpointsTaken` for the second run; the runs whose checkpoints belong to this run.
Survives: a killed owner: its record is no longer renewed.

Rule 1: clocks of two machines are never compared. An owner is alive if its record changes while it
        is watched. It is dead if the record does not change for `STALE_RENEWALS` intervals.
Rule 2: a claim takes over at once a record of the same life (another SMP or node of this run) or of
        this process. It also takes over a record whose run has ended, and a record whose process no
        longer exists, see `_is_gone`. The same run id is not enough, because two jobs of one script
        on one port have the same run id.
Rule 3: an owner whose record another life has taken over writes no more checkpoints.
Rule 4: if a record cannot be written, the run continues. Each renewal tries again to write it.
"""

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from ftrun import clock
from ftrun.errors import CheckpointError, CheckpointsTaken
from ftrun.ids import RunId
from ftrun.smp.checkpoint.storage.fsspec import FsspecStorage
from ftrun.smp.checkpoint.storage.local import order_lock
from ftrun.urls import is_url, without_password
from ftrun.wire.checkpoint_owner import (
    OWNER_NAME,
    CheckpointClaim,
    CheckpointOwner,
    decode_owner,
    encode_owner,
)

RENEW_S = 5.0
URL_RENEW_S = 20.0
STALE_RENEWALS = 4
"""A record that is not renewed for this number of intervals belongs to a dead owner."""

_SETTLE_S = 1.0
"""Seconds between writing a claim and checking it, for stores without locks."""
_READ_TRIES = 5
_MOST_RUNS = 50
_log = logging.getLogger(__name__)

_REST_S = 600.0
"""A record takes a moment to write, so an older temporary file is abandoned."""


class _Folder:
    """A record in a directory."""

    renew_s = RENEW_S

    def __init__(self, directory: str, stop: threading.Event) -> None:
        self.shown = directory
        self._path = Path(directory) / OWNER_NAME
        self._stop = stop

    def read(self) -> bytes | None:
        """Return None if there is no record."""
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            return None

    def write(self, data: bytes) -> None:
        temporary = self._path.with_name(f"{OWNER_NAME}.{os.getpid()}")
        try:
            temporary.write_bytes(data)
            temporary.replace(self._path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    @contextmanager
    def claiming(self) -> Iterator[None]:
        """Read and write a claim in this context; after it, only one claim is valid."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with order_lock(self._path.parent, self._stop):
            for rest in self._path.parent.glob(f"{OWNER_NAME}.*"):  # of SMPs that were killed
                with suppress(OSError):
                    if clock.wall_s() - rest.stat().st_mtime > _REST_S:
                        rest.unlink()
            yield


class _Url:
    """A record in a store, with a new connection for each access."""

    renew_s = URL_RENEW_S

    def __init__(self, url: str, stop: threading.Event) -> None:
        self.shown = without_password(url)
        self._url = url
        self._stop = stop

    def read(self) -> bytes | None:
        with FsspecStorage(self._url, self._stop) as store:
            return store.read(OWNER_NAME)

    def write(self, data: bytes) -> None:
        with FsspecStorage(self._url, self._stop) as store:
            store.make()
            store.put(OWNER_NAME, data)

    @contextmanager
    def claiming(self) -> Iterator[None]:
        yield
        self._stop.wait(_SETTLE_S)


_Place = _Folder | _Url


class CheckpointOwnership:
    """The right to write checkpoints; without an agent (`is_attended`) nothing is renewed."""

    def __init__(
        self, run_id: RunId, stop: threading.Event, is_attended: Callable[[], bool]
    ) -> None:
        self._is_attended = is_attended
        self._run_id = run_id
        self._stop = stop
        self._lock = threading.Lock()
        self._claim: CheckpointClaim | None = None
        self._record: CheckpointOwner | None = None
        """The last written record; None if this process owns nothing."""
        self._taken = ""
        self._thread: threading.Thread | None = None

    def claim(self, claim: CheckpointClaim) -> None:
        """Own the directory from now on.

        Raises CheckpointsTaken if another running run owns it. After CheckpointError or
        OSError the owner is unknown, and `renew` tries again.
        """
        with self._lock:
            try:
                self._own(claim)
            except BaseException:
                self._claim = None
                raise
        self._start()

    def renew(self, claim: CheckpointClaim | None) -> None:
        """Renew this claim in the background; None if another node of the run does."""
        self._claim, self._taken = claim, ""
        if claim is None:
            self._record = None
        else:
            self._start()

    def check(self, where: str, life: str) -> frozenset[str]:
        """Return the runs whose checkpoints this run may remove in the directory.

        Raises CheckpointError if another run has taken over the directory. `life` is the life of
        this run; nodes without rank 0 have no claim that names it.
        """
        if self._taken:
            raise CheckpointError(self._taken)
        position = _place(where, self._stop)
        record = self._found(position)
        if record is None:
            return frozenset((str(self._run_id),))
        if record.life != life and not record.ended_s:
            raise CheckpointError(_as_text(record, position.shown))
        own = record.runs if record.run_id == self._run_id else ()
        return frozenset((str(self._run_id), *own))

    def end(self, exit_code: int, reason: str, command: str) -> None:
        with self._lock:
            record, claim = self._record, self._claim
            self._claim = self._record = None
            if record is None or claim is None:
                return
            position = _place(claim.directory, self._stop)
            found = self._found(position)
            if found is None or found.life == record.life:
                ended = encode_owner(
                    record,
                    ended_s=clock.wall_s(),
                    exit_code=exit_code,
                    reason=reason,
                    command=command,
                )
                position.write(ended)

    # --- the renewal thread --- --------------------------------------------------------------

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ftrun-owner", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        wait_s = 0.0
        while not self._stop.wait(wait_s):
            claim = self._claim
            wait_s = RENEW_S if claim is None else _place(claim.directory, self._stop).renew_s
            if claim is None or not self._is_attended() or self._taken:
                continue
            try:
                with self._lock:
                    self._renew(claim)
            except CheckpointsTaken as error:
                if claim is self._claim:  # else `renew` has cleared it for a newer claim
                    self._taken = str(error)
                _log.warning("%s", error)
            except (CheckpointError, OSError) as error:
                _log.debug("cannot renew %s: %s", OWNER_NAME, error)
            except Exception:  # noqa: BLE001 - a thread's loop: a bug costs the record, not the run
                _log.exception("internal error: the owner record of the checkpoints is not renewed")

    def _renew(self, claim: CheckpointClaim) -> None:
        if claim is not self._claim:
            return
        record = self._record
        if record is None or record.life != claim.life:
            self._own(claim)
            return
        position = _place(claim.directory, self._stop)
        with position.claiming():
            found = self._found(position)
            if found is not None and found.life != record.life:
                raise CheckpointsTaken(_as_text(found, position.shown))
            self._write(position, record, heartbeat=record.heartbeat + 1)

    # --- claiming -----------------------------------------------------------------------------

    def _own(self, claim: CheckpointClaim) -> None:
        position = _place(claim.directory, self._stop)
        self._claim = claim
        while True:
            with position.claiming():
                before = self._found(position)
                if self._is_free(before, claim):
                    self._write(position, self._made(claim, before), heartbeat=0)
                    before = None
            if before is not None:
                self._await_death(position, before)
                continue
            found = self._found(position)
            if found is None or found.life == claim.life:
                return

    def _is_free(self, record: CheckpointOwner | None, claim: CheckpointClaim) -> bool:
        # An agent killed during a load has persisted no plan, so its successor has a new life.
        own = self._record.life if self._record is not None else claim.life
        if record is None or record.ended_s or record.life in (claim.life, own):
            return True
        return _is_gone(record, self._run_id)

    def _await_death(self, position: _Place, before: CheckpointOwner) -> None:
        """Wait until the owner counts as dead; raises CheckpointsTaken if it renews its record."""
        limit_s = STALE_RENEWALS * position.renew_s
        _log.warning(
            "%s belongs to run %s; checking for up to %.0f s whether that run is alive",
            position.shown,
            before.run_id,
            limit_s,
        )
        give_up_s = clock.now_s() + limit_s
        while clock.now_s() < give_up_s:
            if self._stop.wait(position.renew_s / 10):
                raise CheckpointError("the run is being stopped")
            found = self._found(position)
            if found is None or found.ended_s or _is_gone(found, self._run_id):
                return
            if (found.life, found.heartbeat) != (before.life, before.heartbeat):
                raise CheckpointsTaken(_as_text(found, position.shown))
        with position.claiming():
            found = self._found(position)
            if found is not None and (found.life, found.heartbeat) == (
                before.life,
                before.heartbeat,
            ):
                ended_s = clock.wall_s()
                position.write(encode_owner(found, ended_s=ended_s, reason="it is not renewed"))

    def _made(self, claim: CheckpointClaim, before: CheckpointOwner | None) -> CheckpointOwner:
        same = before is not None and before.run_id == self._run_id
        older = before.runs if before is not None and (claim.inherits or same) else []
        others = [run_id for run_id in older if run_id != self._run_id]
        now_s = clock.wall_s()
        return CheckpointOwner(
            run_id=str(self._run_id),
            life=claim.life,
            node=socket.gethostname(),
            pid=os.getpid(),
            machine=_machine(),
            num_nodes=claim.num_nodes,
            since_s=now_s,
            renewed_s=now_s,
            heartbeat=0,
            runs=[*others[-_MOST_RUNS:], str(self._run_id)],
        )

    def _found(self, position: _Place) -> CheckpointOwner | None:
        """Read the record; None if there is none, or if it stays damaged after retries."""
        for _ in range(_READ_TRIES):
            data = position.read()
            found = decode_owner(data)
            if data is None or found is not None or self._stop.wait(_SETTLE_S / _READ_TRIES):
                return found
        return None

    def _write(self, position: _Place, record: CheckpointOwner, *, heartbeat: int) -> None:
        data = encode_owner(record, heartbeat=heartbeat, renewed_s=clock.wall_s())
        position.write(data)
        self._record = decode_owner(data)


def _place(where: str, stop: threading.Event) -> _Place:
    return _Url(where, stop) if is_url(where) else _Folder(where, stop)


def _machine() -> str:
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _is_gone(record: CheckpointOwner, run_id: RunId) -> bool:
    """True if its process was on this machine and no longer exists, and its run has no other node.

    A run of a single node has no other node. If the record has this run's id, its node was this
    node, because only one stub at a time holds the run folder of an id. If other nodes of that run
    still existed, they would have admitted this node, and it would claim with their life.
    """
    if not record.machine or record.machine != _machine():
        return False
    is_last = record.num_nodes == 1 or record.run_id == run_id
    return is_last and not Path(f"/proc/{record.pid}").exists()


def _as_text(record: CheckpointOwner, where: str) -> str:
    since = f"{datetime.fromtimestamp(record.since_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
    return (
        f"{where} belongs to run {record.run_id} since {since} (node {record.node}, pid "
        f"{record.pid}), and that run is alive. Two runs, even with one id, would load and remove "
        "each other's checkpoints. Use another --checkpoint-dir, or end that run: ftrun stop "
        f"{record.run_id}"
    )
