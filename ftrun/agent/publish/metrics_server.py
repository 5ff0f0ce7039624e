"""HTTP server for /metrics.

Runs in:  agent, threads of its own. Imported only if metrics are enabled.
Takes in: HTTP requests from any client.
Gives:    the newest metrics; 401 if a token is required and missing or wrong.
Survives: anything a client does.

Rule 1: a connection lasts at most CUT_OFF_S, even if the client is slow, and at most
        MAX_CONNECTIONS are open.
Rule 2: the text is built at most once in FRESH_S, for any number of requests.
"""

import hmac
import http.server
import logging
import socket
import socketserver
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ftrun import __version__, clock

CUT_OFF_S = 5.0
MAX_CONNECTIONS = 8
FRESH_S = 1.0
MAX_TOKEN_BYTES = 4096
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_log = logging.getLogger("ftrun")

Text = Callable[[], bytes]


class MetricsServer(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """Server of one port of this node.

    Args:
        text: builds the text of a scrape; called in threads of the server.
        token: bearer token that clients must send; None: no token is required.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = MAX_CONNECTIONS
    allow_reuse_address = True

    def __init__(
        self, host: str, port: int, *, text: Text, token: str | None, cut_off_s: float = CUT_OFF_S
    ) -> None:
        """Bind and listen.

        Raises:
            OSError: the port is in use, or the address does not belong to this machine.
        """
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)
        self.token = token
        self._cut_off_s = cut_off_s
        self._make = text
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._made: tuple[float, bytes] | None = None
        self._open: dict[Any, float] = {}
        self._thread = threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.5}, name="ftrun-metrics",
            daemon=True,
        )  # fmt: skip

    @property
    def address(self) -> str:
        host, port = self.server_address[:2]
        text = host if isinstance(host, str) else host.decode()
        return f"[{text}]:{port}" if ":" in text else f"{text}:{port}"

    @property
    def num_connections(self) -> int:
        with self._lock:
            return len(self._open)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def text(self) -> bytes:
        """The text of a scrape, at most FRESH_S old."""
        with self._making:
            now_s = clock.now_s()
            if self._made is None or now_s - self._made[0] > FRESH_S:
                self._made = (now_s, self._make())
            return self._made[1]

    # --- overrides of socketserver ------------------------------------------------------------

    def server_bind(self) -> None:
        """Bind without resolving the name of this machine, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "ftrun", self.server_address[1]

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Refuse a connection beyond MAX_CONNECTIONS: rule 1."""
        del client_address
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                return False
            self._open[request] = clock.now_s() + self._cut_off_s
            return True

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Close connections older than their limit; runs between requests and twice a second."""
        now_s = clock.now_s()
        with self._lock:
            slow = [request for request, due_s in self._open.items() if now_s >= due_s]
        for request in slow:
            with suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        del request
        _log.debug("a scrape from %s was not answered", client_address, exc_info=True)


class _Handler(http.server.BaseHTTPRequestHandler):
    """Handler of one request."""

    server: MetricsServer
    server_version = f"ftrun/{__version__}"
    sys_version = ""
    timeout = CUT_OFF_S

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if not self._is_known():
            self._answer(401, b"a token is needed: Authorization: Bearer TOKEN\n", "text/plain")
        elif path != "/metrics":
            self._answer(404, b"there is only /metrics\n", "text/plain")
        else:
            self._answer(200, self.server.text(), CONTENT_TYPE)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's
        """Log nothing, because scrapes arrive every few seconds."""

    def _is_known(self) -> bool:
        token = self.server.token
        if token is None:
            return True
        shown = self.headers.get("Authorization", "")
        return hmac.compare_digest(shown.encode("utf-8", "replace"), f"Bearer {token}".encode())

    def _answer(self, code: int, body: bytes, content_type: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        if code == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(body)


def read_token(path: str) -> str:
    """Read the bearer token that clients must send.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is empty.
    """
    with Path(path).open("rb") as file:
        token = file.read(MAX_TOKEN_BYTES).decode("utf-8", "replace").strip()
    if not token:
        raise ValueError(f"{path} is empty")
    return token
