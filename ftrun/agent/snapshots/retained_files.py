"""Files of `ftrun.save` that the SMP has not written yet, for its successor.

Runs in the main thread. This object owns the descriptors.
"""

import os
from collections.abc import Sequence

from ftrun.wire.messages.envelope import AnyMessage
from ftrun.wire.messages.files import FileHeld, FileWritten

_SHOWN = 3


class RetainedFiles:
    """Duplicates of files in memory, by path."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[FileHeld, int]] = {}
        self._reasons: dict[str, str] = {}
        """Why files are not written, by path."""
        self._results: list[FileWritten] = []
        self._is_given_up = False

    @property
    def held(self) -> list[tuple[FileHeld, int]]:
        return list(self._held.values())

    def take(self, body: AnyMessage, fds: Sequence[int]) -> None:
        """Handle a message of the SMP; ignore other messages."""
        if isinstance(body, FileHeld):
            self.keep(body, *fds)
        elif isinstance(body, FileWritten):
            self.written(body)

    def keep(self, file: FileHeld, fd: int) -> None:
        before = self._held.pop(file.path, None)
        if before is not None:
            os.close(before[1])
        self._held[file.path] = (file, fd)

    def written(self, result: FileWritten) -> None:
        """Note the result of a write; a newer save of the path may follow it."""
        if not result.reason or result.reason != self._reasons.get(result.path):
            self._results.append(result)  # a failure once, not for each attempt
        if result.reason and not result.is_dropped:
            self._reasons[result.path] = result.reason
            return
        self._reasons.pop(result.path, None)
        held = self._held.get(result.path)
        if held is not None and held[0].number <= result.number:
            os.close(held[1])
            del self._held[result.path]

    def give_up(self, reason: str) -> None:
        """Note that no SMP will write the files, and why."""
        self._is_given_up = True
        for file, _ in self.held:
            self.written(FileWritten(file.path, file.number, file.num_bytes, 0.0, reason))

    def drain_results(self) -> list[FileWritten]:
        found, self._results = self._results, []
        return found

    @property
    def warning(self) -> str:
        """Which files are not written, in words; empty if each write has succeeded."""
        failed = [f"{path} ({reason})" for path, reason in self._reasons.items()]
        if not failed:
            return ""
        more = f" and {len(failed) - _SHOWN} more" if len(failed) > _SHOWN else ""
        names = f"{', '.join(failed[:_SHOWN])}{more} of ftrun.save"
        if self._is_given_up:
            return (
                f"{names} will not be written, and are lost. Later saves are written by the ranks"
            )
        return (
            f"{names} cannot be written. Their content stays in memory, and the write is repeated: "
            "free space, or make the folder writable"
        )
