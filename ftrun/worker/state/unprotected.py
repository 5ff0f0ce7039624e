"""Reasons for which a failure now would lose state, as status shows them.

Runs in:  worker, any of its threads.
Takes in: a reason under a key, and its removal when it no longer holds.
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
"""A function that torch calls in each optimizer step; what it returns would replace arguments."""

_SHOWN, _NOT_SHOWN = "UNPROTECTED", "under ftrun, this script would be UNPROTECTED"

_log = logging.getLogger(__name__)


class UnprotectedReasons:
    """The reasons of one process; it is protected when there are none.

    Args:
        page: shows them; None: no agent reads them, and the log says what it would show.
    """

    def __init__(self, page: SharedPage | None) -> None:
        self._page = page
        self._reasons: dict[str, str] = {}
        self._lock = threading.Lock()

    def __contains__(self, key: str) -> bool:
        return key in self._reasons

    def add(self, key: str, reason: str) -> None:
        """Show a reason in status and log it once. All that hold are shown, oldest first.

        Args:
            key: names the cause; `remove` takes the same key.
            reason: one sentence: what is not protected, the numbers, what to do.
        """
        with self._lock:
            is_new = self._reasons.get(key) != reason
            self._reasons[key] = reason
            self._publish()
        if is_new:
            _log.warning("%s: %s", _SHOWN if self._page is not None else _NOT_SHOWN, reason)

    def add_bug(self, where: str, error: Exception) -> None:
        """Show a fault of ftrun itself, or an error that explains itself.

        Args:
            where: the part that failed, such as "the optimizer hook".
            error: the traceback of a fault is logged, once for each part.
        """
        is_new = (key := f"bug in {where}") not in self
        is_bug = not isinstance(error, FtrunError)
        text = f"a bug in ftrun: {type(error).__name__}: {error}" if is_bug else str(error)
        self.add(key, f"{text} (in {where})")
        if is_new and is_bug:
            _log.warning("this is the traceback; please report it", exc_info=error)

    def guarded(self, hook: Hook) -> Hook:
        """The same hook, for calls that the script makes: its exceptions become reasons here."""

        @functools.wraps(hook)
        def call(*args: Any) -> None:
            try:
                hook(*args)
            except Exception as error:  # noqa: BLE001 - a bug in ftrun must not end the script
                self.add_bug(hook.__qualname__, error)

        return call

    def remove(self, key: str) -> None:
        """The cause is gone; nothing happens if it was not there."""
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
