"""Reasons for which a failure now would lose state, as status shows them.

Runs in:  worker, any of its threads.
Takes in: a reason under a key, and its removal when it no longer holds.
Gives:    the heartbeat page's UNPROTECTED field and note.
"""

import logging
import threading

from ftrun.wire.pages import Beat, Page

_log = logging.getLogger(__name__)


class UnprotectedReasons:
    """The reasons of one process; it is protected when there are none."""

    def __init__(self, page: Page) -> None:
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
            _log.warning("UNPROTECTED: %s", reason)

    def remove(self, key: str) -> None:
        """The cause is gone; nothing happens if it was not there."""
        with self._lock:
            if self._reasons.pop(key, None) is not None:
                self._publish()

    def _publish(self) -> None:
        if self._reasons:
            self._page.note = "; ".join(self._reasons.values())
        elif self._page.get(Beat.UNPROTECTED):
            self._page.note = ""
        self._page.set(Beat.UNPROTECTED, int(bool(self._reasons)))
