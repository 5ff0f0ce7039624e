"""A real FTP server on loopback, in a thread of the test: pyftpdlib, with injected faults.

It represents any remote store: one connection, names and streams; whole folders, but no rename that
ftrun uses, no lock and no link.
"""

import errno
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # asyncore, removed in python 3.12
    from pyftpdlib.authorizers import DummyAuthorizer
    from pyftpdlib.handlers import DTPHandler, FTPHandler
    from pyftpdlib.ioloop import IOLoop
    from pyftpdlib.log import config_logging
    from pyftpdlib.servers import FTPServer

_CHANGES = ("STOR", "DELE", "MKD", "RMD")


class FtpServer:
    """One server; started by its constructor.

    Args:
        root: the folder that a login sees as /.
        host: where it listens.
        port: 0: any free port.
        die_at: the number of a change (a file begun, its middle, a name created or removed) at
            which it dies with all its connections, as a killed process does; 0: never.
        quota_bytes: it accepts this number of bytes, then its disk is full.
        may_write: the login's permission.
    """

    def __init__(
        self,
        root: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        die_at: int = 0,
        quota_bytes: int = 1 << 60,
        may_write: bool = True,
    ) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.changes = 0
        """Number of changes so far."""
        self.is_dead = False
        self._die_at = die_at
        self._left_bytes = quota_bytes
        self._frozen = threading.Event()
        self._ended = threading.Event()
        config_logging(level=50)
        authorizer = DummyAuthorizer()
        rights = "elradfmwMT" if may_write else "elr"
        authorizer.add_user("me", "s3cret", str(root), perm=rights)
        kind = type("Handler", (_Handler,), {"authorizer": authorizer, "owner": self})
        kind.dtp_handler = type("Data", (_Data,), {"owner": self})
        self._ioloop = IOLoop()
        self._server = FTPServer((host, port), kind, ioloop=self._ioloop)
        self.port: int = self._server.address[1]
        self._thread = threading.Thread(target=self._serve, name="ftp", daemon=True)
        self._thread.start()

    def url(self, path: str = "run") -> str:
        return url_of("127.0.0.1", self.port, path)

    def freeze(self) -> None:
        """It accepts connections and bytes, within its kernel's buffers, and sends nothing."""
        self._frozen.set()

    def thaw(self) -> None:
        self._frozen.clear()

    def close(self) -> None:
        self._ended.set()
        self._thread.join(10)

    def change(self) -> None:
        """Count one change; the server may die at it."""
        self.changes += 1
        if self.changes == self._die_at:
            raise SystemExit

    def take(self, num_bytes: int) -> None:
        self._left_bytes -= num_bytes
        if self._left_bytes < 0:
            raise OSError(errno.ENOSPC, "No space left on device")

    def _serve(self) -> None:
        try:
            while not self._ended.is_set():
                if self._frozen.is_set():
                    self._ended.wait(0.02)
                else:
                    self._server.serve_forever(timeout=0.02, blocking=False, handle_exit=False)
        except SystemExit:
            self.is_dead = True
        finally:
            self._server.close_all()


def url_of(host: str, port: int, path: str = "run") -> str:
    return f"ftp://me:s3cret@{host}:{port}/{path}"


class _Handler(FTPHandler):  # type: ignore[misc]
    owner: FtpServer
    auth_failed_timeout = 0.01

    def process_command(self, cmd: str, *args: Any, **kwargs: Any) -> None:
        if cmd in _CHANGES:
            self.owner.change()
        super().process_command(cmd, *args, **kwargs)


class _Data(DTPHandler):  # type: ignore[misc]
    owner: FtpServer

    def enable_receiving(self, type: str, cmd: str) -> None:  # noqa: A002
        super().enable_receiving(type, cmd)
        whole, self._has_started = self.file_obj.write, False

        def write(data: bytes) -> int:
            self.owner.take(len(data))
            if not self._has_started and len(data) > 1:
                whole(data[: len(data) // 2])
                self.file_obj.flush()
                self._has_started = True
                self.owner.change()
                data = data[len(data) // 2 :]
            return int(whole(data))

        self.file_obj = _Writing(self.file_obj, write)


class _Writing:
    """A file whose bytes pass through the server's faults."""

    def __init__(self, file: Any, write: Any) -> None:
        self._file = file
        self.write = write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def ftp_server(root: Path, **how: Any) -> Iterator[FtpServer]:
    server = FtpServer(root, **how)
    try:
        yield server
    finally:
        server.close()


def main() -> None:
    """`python -m tests.ftp_server FOLDER HOST PORT`: runs until it is killed."""
    folder, host, port = sys.argv[1:]
    FtpServer(Path(folder), host=host, port=int(port))
    threading.Event().wait()


if __name__ == "__main__":
    main()
