"""An etcd for one test (Debian's etcd-server): killed, frozen and started again as needed."""

import contextlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.stopping import stop

START_S = 20.0

Run = Callable[..., "subprocess.Popen[Any]"]


def available() -> str:
    """The reason why no etcd can be started here; empty if one can."""
    return "" if shutil.which("etcd") else "etcd is not installed (Debian: etcd-server)"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class Certificates:
    """A CA for a test, and its certificates; by openssl."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.ca = str(folder / "ca.pem")
        key, subject = folder / "ca.key", "/CN=a CA of a test"
        _openssl(
            "req", "-x509", *_NEW, "-days", 2, "-keyout", key, "-out", self.ca, "-subj", subject
        )

    def of(self, name: str, host: str = "") -> tuple[str, str]:
        """Certificate and key of a client or server; a server's is for its address."""
        cert, key, asks = (self._folder / f"{name}.{end}" for end in ("pem", "key", "csr"))
        if not cert.exists():
            extra = self._folder / f"{name}.extra"
            extra.write_text(f"subjectAltName=IP:{host}\n" if host else "")
            _openssl("req", *_NEW, "-keyout", key, "-out", asks, "-subj", f"/CN={name}")
            signs = ("-CA", self.ca, "-CAkey", self._folder / "ca.key", "-CAcreateserial")
            _openssl(
                "x509", "-req", "-in", asks, *signs, "-days", 2, "-extfile", extra, "-out", cert
            )
        return str(cert), str(key)


_NEW = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def _openssl(*words: object) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)


class EtcdServer:
    """A cluster of one member."""

    def __init__(
        self,
        folder: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        run: "Run | None" = None,
        tls: "Certificates | None" = None,
    ) -> None:
        """Prepares an etcd; `start` starts it.

        Args:
            folder: of its data.
            host: the address it listens at.
            port: for clients; 0: a free one.
            run: starts a command at its place, such as in a node of a virtual cluster.
            tls: it accepts only TLS, and requires client certificates.
        """
        self.folder = folder
        self.host = host
        self.port = port or free_port()
        self._peer_port = free_port() if run is None else self.port + 1
        self._tls = tls
        self._run = run or subprocess.Popen
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def _scheme(self) -> str:
        return "http" if self._tls is None else "https"

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.port}"

    def start(self) -> None:
        """Start with the stored data, if there are any; returns once it answers."""
        client, peer = f"{self._scheme}://{self.endpoint}", f"http://{self.host}:{self._peer_port}"
        words = ["etcd", "--data-dir", str(self.folder / "etcd"), "--name", "one"]
        words += ["--listen-client-urls", client, "--advertise-client-urls", client]
        words += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        words += ["--initial-cluster", f"one={peer}"]
        if self._tls is not None:
            cert, key = self._tls.of("server", self.host)
            words += ["--cert-file", cert, "--key-file", key]
            words += ["--client-cert-auth", "--trusted-ca-file", self._tls.ca]
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "etcd.log").open("ab") as log:
            self._process = self._run(words, stdout=log, stderr=log)
        end_s = time.monotonic() + START_S
        while not self.answers():
            if self._process.poll() is not None or time.monotonic() > end_s:
                tail = (self.folder / "etcd.log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"etcd does not start at {self.endpoint}:\n{tail}")
            time.sleep(0.05)

    def answers(self) -> bool:
        """Whether it has a leader, and so accepts writes."""
        words = [sys.executable, "-c", _ASK, f"{self._scheme}://{self.endpoint}/health"]
        if self._tls is not None:
            words += [self._tls.ca, *self._tls.of("asker")]
        asks = self._run(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return asks.wait() == 0

    def kill(self) -> None:
        """SIGKILL; its stored data stay."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """It accepts connections and answers nothing."""
        if self._process is not None:
            stop(self._process.pid)

    def go_on(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def forget(self) -> None:
        """Kill it, and remove its stored data."""
        self.kill()
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.folder / "etcd")


_ASK = """
import ssl, sys, urllib.request
url, *files = sys.argv[1:]
context = ssl.create_default_context(cafile=files[0]) if files else None
if files:
    context.load_cert_chain(*files[1:])
sys.exit(b"true" not in urllib.request.urlopen(url, timeout=1.0, context=context).read())
"""
