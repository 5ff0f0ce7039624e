"""Access to a URL through fsspec: names, whole objects, and large objects as streams.

Runs in:  the SMP, in its disk lane's thread; the process of ftrun.tools.checkpoints.catalog.
Takes in: a URL; the protocol's library finds the credentials itself.
Gives:    bytes, names with sizes; a `CheckpointError` for every kind of failure.
Survives: nothing. A store that has failed once is opened again for the next checkpoint.

A store has no rename, no lock and no link. A folder therefore has its final name from the first
byte on, and is a checkpoint once its index exists. The removal has the reverse order. The parts
stay. `latest` is an object with the name of a folder.

Rule 1: no listing is cached, because other nodes write to the store too.
Rule 2: a cancelled upload is never closed, because closing publishes an object even if it is
        incomplete.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from ftrun.errors import CheckpointError
from ftrun.ids import Version
from ftrun.smp.checkpoint.index import (
    LATEST_NAME,
    CheckpointPart,
    Sizes,
    StoredCheckpoint,
    parse_stored,
    parse_tagged,
    tagged_name,
)
from ftrun.smp.checkpoint.storage.call_thread import ANSWER_S, CallResult, CallThread
from ftrun.smp.checkpoint.storage.direct_file import Pace
from ftrun.urls import below, password_of, without_password
from ftrun.wire.crash_points import crash_point
from ftrun.wire.messages.checkpoint import INDEX_NAME

BLOCK_BYTES = 16 << 20
_MOST_BLOCKS = 8_000
"""S3 accepts 10,000 parts of an object, other stores accept more."""
READ_BYTES = 16 << 20
_FETCH_BYTES = 1 << 20
"""What FTP reads beyond the requested bytes; other protocols read only those."""
_FLAT = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oci", "oss", "obs", "tos"}
"""Stores without folders. Creating one there may create a bucket with a mistyped name."""


class ObjectReader:
    """An object of a store that is being read."""

    def __init__(self, calls: CallThread, file: Any) -> None:
        self._calls = calls
        self._file = file
        self.size: int = calls(partial(_size, file))

    def read(self, at: int, num_bytes: int) -> bytes:
        """Read `num_bytes` from offset `at`, or fewer at the end of the object."""
        found = b""
        while len(found) < num_bytes:
            more = self._calls(partial(_read_at, self._file, at + len(found), num_bytes))
            if not more:
                break
            found = more[:num_bytes] if not found else found + more[: num_bytes - len(found)]
        return found

    def read_into(self, target: memoryview, at: int = 0) -> int:
        done = 0
        while done < len(target):
            part = self.read(at + done, min(READ_BYTES, len(target) - done))
            if not part:
                break
            target[done : done + len(part)] = part
            done += len(part)
        return done


class ObjectWriter:
    """As `direct_file.DirectFile`, but it copies; `pace` precedes each block of `size` bytes."""

    is_in_place = False

    def __init__(self, calls: CallThread, opened: Callable[[], Any], size: int, pace: Pace) -> None:
        self._calls = calls
        self._pace = pace
        self._block = memoryview(bytearray(size))
        self._filled = 0
        self._sending: CallResult[Any] | None = None
        self._file = calls(opened)  # in the thread of the calls, as all use of it

    def room(self, source: memoryview | None = None) -> memoryview:
        """As `DirectFile.room`; raises CheckpointError if an earlier part could not be sent."""
        if self._filled == len(self._block):
            self._send()
        return self._block[self._filled :]

    def take(self, num_bytes: int) -> None:
        self._filled += num_bytes

    def finish(self) -> None:
        """Publish the object; raises CheckpointError if the store does not accept it."""
        if self._filled:
            self._send()
        self._wait()
        self._calls(self._file.close)

    def give_up(self) -> None:
        with suppress(AttributeError):  # not all are fsspec's own file type
            self._file.closed = True
        with suppress(CheckpointError):
            self._calls(partial(_discard, self._file))

    def _send(self) -> None:
        self._wait()
        self._pace(self._filled)
        data = bytes(self._block[: self._filled])
        self._sending = self._calls.start(partial(self._file.write, data))
        self._filled = 0

    def _wait(self) -> None:
        if self._sending is not None:
            sending, self._sending = self._sending, None
            self._calls.wait(sending)


class FsspecStorage:
    """The checkpoints below a URL, which need not exist. Each call may take `answer_s`.

    Raises CheckpointError if the store cannot be reached, or a required package is not installed.
    """

    is_local = False

    def __init__(self, url: str, stop: threading.Event, *, answer_s: float = ANSWER_S) -> None:
        self.shown = without_password(url)
        """The URL for messages."""
        self._again = partial(FsspecStorage, url, stop, answer_s=answer_s)
        self._calls = CallThread(self.shown, stop, answer_s=answer_s, secret=password_of(url))
        try:
            self._fs, self._root = self._calls(partial(_open, url))
        except CheckpointError:
            self._calls.close()
            raise
        kinds = self._fs.protocol
        self._is_flat = bool(_FLAT & ({kinds} if isinstance(kinds, str) else set(kinds)))

    def __enter__(self) -> "FsspecStorage":
        return self

    def __exit__(self, *_: object) -> None:
        self._calls.close()

    def again(self) -> "FsspecStorage":
        return self._again()

    def path_of(self, name: str) -> str:
        return below(self.shown, name)

    # --- reading ------------------------------------------------------------------------------

    def folders(self) -> list[str]:
        return sorted(one["name"] for one in self._list("") if one["type"] == "directory")

    def checkpoints(self) -> list[StoredCheckpoint]:
        names = [name for name in self.folders() if parse_tagged(name) is not None]
        return sorted(map(self._stored, names), key=lambda one: one.order, reverse=True)

    def describe(self, name: str) -> StoredCheckpoint:
        one = self._stored(name)
        if one.is_incomplete:
            return replace(one, problem=f"{self.path_of(name)} does not exist")
        return one

    def latest_name(self) -> str:
        data = self.read(LATEST_NAME)
        return data.decode(errors="replace").strip() if data is not None else ""

    def sizes(self, folder: str) -> Sizes:
        return {one["name"]: one["size"] for one in self._list(folder) if one["type"] == "file"}

    def names(self, folder: str) -> list[str]:
        return list(self.sizes(folder))

    def changed_s(self, folder: str) -> float | None:
        times = [_time_of(one) for one in self._list(folder) if one["type"] == "file"]
        known = [time_s for time_s in times if time_s is not None]
        return max(known) if known and len(known) == len(times) else None

    def read(self, name: str) -> bytes | None:
        return self._calls(partial(_read, self._fs, self._path(name)))

    @contextmanager
    def open(self, name: str) -> Iterator[ObjectReader]:
        self._calls(self._fs.invalidate_cache)
        path = self._path(name)
        how = partial(self._fs.open, path, "rb", block_size=_FETCH_BYTES, cache_type="none")
        file = self._calls(how)
        try:
            yield ObjectReader(self._calls, file)
        finally:
            with suppress(CheckpointError):
                self._calls(file.close)

    def reading(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def without_readers(self, name: str) -> AbstractContextManager[bool]:
        """Yield True: a store has no locks."""
        return nullcontext(True)

    # --- writing ------------------------------------------------------------------------------

    def exclusive(self) -> AbstractContextManager[None]:
        return nullcontext()

    def lock(self) -> AbstractContextManager[None]:
        return nullcontext()

    def pending_name(self, key: CheckpointPart, *, is_alone: bool) -> str:
        return tagged_name(key, max(0, key.generation))

    def make(self, folder: str = "") -> None:
        if not self._is_flat:
            self._calls(partial(_make, self._fs, self._path(folder)))

    def put(self, name: str, data: bytes | memoryview) -> None:
        self._calls(partial(self._fs.pipe_file, self._path(name), bytes(data)))

    @contextmanager
    def stream(self, name: str, num_bytes: int, pace: Pace) -> Iterator[ObjectWriter]:
        size, path = block_bytes(num_bytes), self._path(name)
        opened = partial(self._fs.open, path, "wb", block_size=size)
        file = ObjectWriter(self._calls, opened, min(size, max(1, num_bytes)), pace)
        try:
            yield file
            file.finish()
        except BaseException:
            file.give_up()
            raise

    def sync(self, folder: str = "") -> None:
        """Do nothing: an object is durable when it is complete."""

    def publish(self, folder: str, version: Version) -> str:
        """Return the name; the index has published the folder."""
        return folder

    def clean_up(self, name: str) -> None:
        """Do nothing: the parts stay."""

    def point_latest(self, name: str) -> None:
        crash_point("smp.checkpoint.link_made")
        self.put(LATEST_NAME, f"{name}\n".encode())

    def remove(self, name: str) -> None:
        """Remove the index first, so that the folder is never offered."""
        names = self.sizes(name)
        if INDEX_NAME in names:
            self.remove_file(f"{name}/{INDEX_NAME}")
            crash_point("smp.checkpoint.pruning")
        others = [self._path(f"{name}/{one}") for one in names if one != INDEX_NAME]
        if self._is_flat:
            self._calls(partial(_remove_all, self._fs, others))
            return
        for path in others:
            self._calls(partial(_remove, self._fs, path))
        self._calls(partial(_remove_folder, self._fs, self._path(name)))

    def discard(self, folder: str) -> None:
        """Remove an unfinished upload, which may cost money or count against a quota.

        Another connection is used: on this one the failed call may still be answered, or it hangs.
        A later checkpoint removes what is stored after this.
        """
        with suppress(CheckpointError), self.again() as fresh:
            fresh.remove(folder)

    def sweep_rest(self, *, is_alone: bool) -> None:
        """Do nothing: a store has nothing outside of checkpoints."""

    def remove_file(self, name: str) -> None:
        self._calls(partial(_remove, self._fs, self._path(name)))

    def _stored(self, name: str) -> StoredCheckpoint:
        data = self.read(f"{name}/{INDEX_NAME}")
        return parse_stored(data, name, self.path_of(name), parse_tagged(name))

    def _path(self, name: str) -> str:
        return below(self._root, name) if name else self._root

    def _list(self, folder: str) -> list[dict[str, Any]]:
        return self._calls(partial(_list, self._fs, self._path(folder)))


def block_bytes(num_bytes: int) -> int:
    """Return the bytes per request for a file of this size: a multiple of 1 MiB."""
    return max(BLOCK_BYTES, -(-num_bytes // _MOST_BLOCKS >> 20) << 20)


def _time_of(details: dict[str, Any]) -> float | None:
    for key in ("mtime", "LastModified", "last_modified", "updated", "modify", "modified"):
        found = details.get(key)
        try:
            if isinstance(found, str):
                if found[:14].isdigit():  # FTP's format
                    found = f"{found[:8]}T{found[8:]}"
                when = datetime.fromisoformat(found)
                return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
            if isinstance(found, datetime):
                return found.timestamp()
            if isinstance(found, int | float):
                return float(found)
        except ValueError:
            continue
    return None


# --- in the thread of the calls --- ----------------------------------------------------------


def _open(url: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]
    except ImportError as error:
        raise CheckpointError(
            f"{without_password(url)} needs fsspec, which is not installed: "
            "pip install 'ftrun[url]', and what the protocol itself needs"
        ) from error
    fs, root = url_to_fs(url, skip_instance_cache=True)
    return fs, root.rstrip("/")


def _list(fs: Any, path: str) -> list[dict[str, Any]]:
    fs.invalidate_cache()
    try:
        found = fs.ls(path or "/", detail=True)
    except FileNotFoundError:
        return []
    # Some stores also list an object with the folder's own name.
    return [
        {**one, "name": one["name"].rstrip("/").rpartition("/")[2]}
        for one in found
        if one["name"].strip("/") != path.strip("/")
    ]


def _read(fs: Any, path: str) -> bytes | None:
    try:
        return bytes(fs.cat_file(path))
    except FileNotFoundError:
        return None


def _make(fs: Any, path: str) -> None:
    fs.invalidate_cache()
    try:
        fs.makedirs(path, exist_ok=True)
    except Exception:
        fs.invalidate_cache()
        if not fs.isdir(path):  # another node may have created it first
            raise


def _remove(fs: Any, path: str) -> None:
    """Remove an object; it may be missing, because another node may remove it too."""
    try:
        fs.rm_file(path)
    except Exception:
        fs.invalidate_cache()
        if fs.exists(path):
            raise


def _remove_all(fs: Any, paths: list[str]) -> None:
    """Remove in few requests, because such stores accept a thousand names in one."""
    fs.invalidate_cache()
    if paths:
        with suppress(FileNotFoundError):
            fs.rm(paths)


def _remove_folder(fs: Any, path: str) -> None:
    with suppress(Exception):
        fs.rmdir(path)


def _size(file: Any) -> int:
    end = int(file.seek(0, 2) or file.tell())
    file.seek(0)
    return end


def _read_at(file: Any, at: int, num_bytes: int) -> bytes:
    if file.tell() != at:
        file.seek(at)
    return bytes(file.read(num_bytes))


def _discard(file: Any) -> None:
    try:
        file.discard()
    except Exception:  # noqa: BLE001 - whatever it cannot do, a later checkpoint removes
        with suppress(Exception):
            file.close()
