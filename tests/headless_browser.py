"""A real headless browser, for tests of pages: chromium, controlled over a pipe.

    with Browser() as browser:
        page = browser.open(path, width=1100, dark=True)
        assert page.requests == [path.as_uri()]
        page.picture(picture_path)

It uses the browser's own debugging protocol (JSON, each message ended by a zero byte, on
descriptors 3 and 4), so that it needs nothing but the browser. `found()` returns its path, or None.
"""

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import signal
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_ANSWER_S = 60.0
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
    "about:blank",
)


def found() -> str | None:
    """The browser on this machine."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One loaded page."""

    def __init__(self, browser: "Browser", session: str) -> None:
        self._browser = browser
        self._session = session
        self.requests: list[str] = []
        """Every requested address, including that of the page itself."""
        self.complaints: list[str] = []
        """The messages that the browser has written to its console."""

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.ask(method, params, self._session, self)

    def value(self, expression: str) -> Any:
        """The value of an expression of JavaScript; works also in a page that allows no script."""
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def picture(self, path: Path) -> None:
        """The whole page, as PNG."""
        shot = self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def print_to(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.ask("Page.printToPDF")["data"]))

    def take(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Log.entryAdded":
            self.complaints.append(params["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(str(params["args"]))
        elif method == "Page.javascriptDialogOpening":
            self.complaints.append(f"a dialog: {params['message']}")
            self._browser.send("Page.handleJavaScriptDialog", {"accept": False}, self._session)


class Browser:
    """Starts one; ends it and removes all its remains."""

    def __init__(self) -> None:
        path = found()
        assert path is not None
        self._folder = tempfile.mkdtemp(prefix="ftrun-browser-")
        self._numbers = itertools.count(1)
        self._buffer = b""
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        # Both above 4, so that the two copies do not overwrite descriptors still to be copied.
        high = [os.dup(os.dup(os.dup(fd))) for fd in (theirs_in, theirs_out)]
        log = os.open(os.path.join(self._folder, "log"), os.O_WRONLY | os.O_CREAT, 0o600)
        self._pid = os.posix_spawn(
            path,
            [path, f"--user-data-dir={self._folder}", *_FLAGS],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, log, 1),
                (os.POSIX_SPAWN_DUP2, log, 2),
                (os.POSIX_SPAWN_DUP2, high[0], 3),
                (os.POSIX_SPAWN_DUP2, high[1], 4),
            ],
            setpgroup=0,
        )
        for fd in (theirs_in, theirs_out, *high, log):
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._to)
        os.close(self._from)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def open(
        self, path: Path, *, width: int = 1100, dark: bool = False, media: str = "screen"
    ) -> Page:
        """Load a file and wait until it has been drawn."""
        target = self.ask("Target.createTarget", {"url": "about:blank"})["targetId"]
        reported = self.ask("Target.attachToTarget", {"targetId": target, "flatten": True})
        page = Page(self, reported["sessionId"])
        for domain in ("Page", "Network", "Log", "Runtime"):
            page.ask(f"{domain}.enable")
        page.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=900, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.ask("Emulation.setEmulatedMedia", media=media, features=[scheme])
        page.ask("Page.navigate", url=path.as_uri())
        deadline_s = time.monotonic() + _ANSWER_S
        ready = "document.readyState === 'complete' && location.href !== 'about:blank'"
        while not page.value(ready):
            assert time.monotonic() < deadline_s, f"{path} does not load"
        page.value("document.body.offsetHeight")
        return page

    def send(self, method: str, params: dict[str, Any], session: str = "") -> int:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        return number

    def ask(
        self, method: str, params: dict[str, Any], session: str = "", page: Page | None = None
    ) -> dict[str, Any]:
        """The answer; events that arrive before it go to the page."""
        number = self.send(method, params, session)
        deadline_s = time.monotonic() + _ANSWER_S
        while True:
            message = self._next(deadline_s)
            if message.get("id") == number:
                assert "error" not in message, (method, message["error"])
                return message["result"]  # type: ignore[no-any-return]
            if page is not None and message.get("sessionId") == session and "method" in message:
                page.take(message["method"], message.get("params", {}))

    def _next(self, deadline_s: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left_s = deadline_s - time.monotonic()
            ready, _, _ = select.select([self._from], [], [], max(left_s, 0.0))
            assert ready, "the browser does not answer"
            data = os.read(self._from, 1 << 20)
            assert data, "the browser has ended"
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(text)  # type: ignore[no-any-return]
