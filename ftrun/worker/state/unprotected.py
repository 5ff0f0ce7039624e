"""Reasons why a failure now would lose state; status shows them.

Runs in:  worker, any of its threads.
Gives:    the heartbeat page's UNPROTECTED field and note.
"""

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

from ftrun.errors import FtrunError
from ftrun.wire.shared_memory.pages import HeartbeatField, SharedPage

Hook = Callable[..., None]
"""A function that torch calls in each optimizer step. It must return None, because torch would use
a result as new arguments."""

_OF_CAPTURE = ("capture", "memory", "value", "device memory", "numerical anomaly", "overwritten")

_SHOWN, _NOT_SHOWN = "UNPROTECTED", "under ftrun, this script would be UNPROTECTED"

_log = logging.getLogger(__name__)


class UnprotectedReasons:
    """The reasons of one process; the process is protected if there are none.

    The page shows them. If it is None, no agent reads one, and only the log shows them.
    """

    def __init__(self, page: SharedPage | None) -> None:
        self._page = page
        self._reasons: dict[str, str] = {}
        self._lock = threading.Lock()

    def __contains__(self, key: str) -> bool:
        return key in self._reasons

    def add(self, key: str, reason: str) -> None:
        """Show a reason in status and log it once. All current reasons are shown, the oldest first.

        It is one sentence: what is not protected, the numbers, what to do.
        """
        with self._lock:
            is_new = self._reasons.get(key) != reason
            self._reasons[key] = reason
            self._publish()
        if is_new:
            _log.warning("%s: %s", _SHOWN if self._page is not None else _NOT_SHOWN, reason)

    def add_bug(self, where: str, error: Exception) -> None:
        """Report an unexpected error in ftrun, or an `FtrunError` with its own text.

        Unless it is an `FtrunError`, its traceback is logged, once for each `where`: the part that
        failed, such as "the optimizer hook".
        """
        is_new = (key := f"bug in {where}") not in self
        is_bug = not isinstance(error, FtrunError)
        text = f"a bug in ftrun: {type(error).__name__}: {error}" if is_bug else str(error)
        self.add(key, f"{text} (in {where})")
        if is_new and is_bug:
            _log.warning("this is the traceback; please report it", exc_info=error)

    def guarded(self, hook: Hook) -> Hook:
        """Wrap a hook that the script triggers; its exceptions become reasons."""

        @functools.wraps(hook)
        def call(*args: Any) -> None:
            try:
                hook(*args)
            except Exception as error:  # noqa: BLE001 - a bug in ftrun must not end the script
                self.add_bug(hook.__qualname__, error)

        return call

    def start_again(self) -> None:
        """Show the reasons on another page, without those of the snapshots before it."""
        with self._lock:
            for key in _OF_CAPTURE:
                self._reasons.pop(key, None)
            self._publish()

    def remove(self, key: str) -> None:
        with self._lock:
            if self._reasons.pop(key, None) is not None:
                self._publish()

    def _publish(self) -> None:
        if self._page is None:
            return
        if self._reasons:
            self._page.note = "; ".join(self._reasons.values())
        elif self._page.get(HeartbeatField.UNPROTECTED):
            self._page.note = ""
        self._page.set(HeartbeatField.UNPROTECTED, int(bool(self._reasons)))


def shown(names: list[str], limit: int = 3) -> str:
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")
