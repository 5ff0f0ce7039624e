"""The secret with which the processes of one run authenticate each other.

It comes from a file that only its owner can read, never from an argument or a variable's value. No
message, log or exception can show the 32 bytes of a `Secret`. If nodes share a folder, such as the
home folder of a Slurm cluster, they agree on a secret through it. The first node creates the file
atomically, and all others read it.
"""

import contextlib
import errno
import hashlib
import hmac
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from ftrun import clock
from ftrun.errors import UsageError

SECRET_BYTES = 32
MIN_TEXT_CHARACTERS = 32
MAX_FILE_BYTES = 4096
HOW_TO_MAKE = "(umask 077 && head -c 32 /dev/urandom > FILE)"  # one file for all nodes
_HEX = re.compile(r"[0-9a-fA-F]{64}")
_GOOD_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}


class Secret:
    """32 bytes that are never displayed."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        if len(key) != SECRET_BYTES:
            raise ValueError(f"a secret has {SECRET_BYTES} bytes, not {len(key)}")
        self._key = key

    def mac(self, message: bytes) -> bytes:
        return hmac.digest(self._key, message, "sha256")

    def as_memfd(self) -> int:
        """Return a memfd with the 32 bytes, for a process of this node to inherit."""
        fd = os.memfd_create("ftrun-secret", os.MFD_CLOEXEC)
        os.pwrite(fd, self._key, 0)
        return fd

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(self.mac(b"equal?"), other.mac(b"equal?"))

    def __hash__(self) -> int:
        return hash(self.mac(b"hash"))

    def __repr__(self) -> str:
        return "Secret(hidden)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret cannot be serialized")


def load_secret(path: Path) -> Secret:
    """Read 64 hexadecimal digits, 32 bytes, or a line of 32 characters; raises UsageError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise UsageError(
            f"cannot read the secret file {path}: {error.strerror}. Create one with "
            f"{HOW_TO_MAKE}, and copy it to every node"
        ) from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise UsageError(f"the secret file {path} is not a regular file")
        _check_private(path, found)
        data = os.read(fd, MAX_FILE_BYTES + 1)
    finally:
        os.close(fd)
    return _from_bytes(data, path)


def shared_secret_file(folder: Path, key: str, *, deadline_s: float = 10.0) -> Path:
    """Return the secret file for `key` in a shared folder; create it if it is missing.

    Any number of nodes may call this at once with the same key, such as `CLUSTER-JOB-STEP`. All get
    the same secret. Raises UsageError if the folder is unusable, or if another node has not
    completed the file within the deadline.
    """
    if not _GOOD_KEY.fullmatch(key):
        raise UsageError(
            f"{key!r} cannot name a secret file: use letters, digits, '.', '_' and '-'"
        )
    path = folder / f"{key}.secret"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(folder, folder.lstat())
        if not path.exists():
            _make_file(path)
        return _when_complete(path, deadline_s)
    except OSError as error:
        raise UsageError(
            f"cannot store a secret file in {folder}: {error.strerror}. Create one with "
            f"{HOW_TO_MAKE}, and pass it with --secret-file on every node"
        ) from error


def forget_shared_secrets(folder: Path, keys: Iterable[str]) -> None:
    for key in keys:
        with contextlib.suppress(OSError):
            (folder / f"{key}.secret").unlink()


def _make_file(path: Path) -> None:
    unready = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
    data = f"{os.urandom(SECRET_BYTES).hex()}\n".encode()
    unready.unlink(missing_ok=True)
    _write_new(unready, data)
    try:
        os.link(unready, path)
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        # This write is not atomic, so readers wait until the file is complete.
        with contextlib.suppress(FileExistsError):
            _write_new(path, data)
    finally:
        unready.unlink(missing_ok=True)


def _write_new(path: Path, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    try:
        os.write(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)


def _when_complete(path: Path, deadline_s: float) -> Path:
    give_up_s = clock.now_s() + deadline_s
    while True:
        try:
            load_secret(path)
        except UsageError:
            if clock.now_s() > give_up_s:
                raise
        else:
            return path
        clock.sleep(0.05)  # a network file system gives no notification of a change


def _check_private(path: Path, found: os.stat_result) -> None:
    """Require that the owner is this user or root (a mounted secret), and no access for others."""
    if found.st_uid not in (os.getuid(), 0):
        raise UsageError(
            f"{path} belongs to user {found.st_uid}, and you are {os.getuid()}: a file that "
            f"others wrote is not secret. Copy it: install -m 600 {path} MY_FILE"
        )
    if found.st_mode & 0o077:
        wanted = "700" if stat.S_ISDIR(found.st_mode) else "600"
        raise UsageError(
            f"{path} can be read by others (mode {stat.S_IMODE(found.st_mode):o}). Restrict it: "
            f"chmod {wanted} {path} (a Kubernetes Secret: defaultMode: 0400)"
        )


def _from_bytes(data: bytes, path: Path) -> Secret:
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(f"the secret file {path} is longer than {MAX_FILE_BYTES} bytes")
    with contextlib.suppress(UnicodeDecodeError):
        text = data.decode().strip("\r\n")
        if _HEX.fullmatch(text):
            return Secret(bytes.fromhex(text))
        if text.isprintable() and len(text) >= MIN_TEXT_CHARACTERS:
            return Secret(hashlib.sha256(b"ftrun secret\0" + text.encode()).digest())
    if len(data) == SECRET_BYTES:
        return Secret(data)
    raise UsageError(
        f"{path} is not a secret: it has {len(data)} bytes. Use 64 hexadecimal digits, 32 bytes or "
        f"one line of at least {MIN_TEXT_CHARACTERS} characters. Create one with {HOW_TO_MAKE}"
    )
