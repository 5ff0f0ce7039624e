"""Notices by a file or by a command of the operator.

Runs in:  agent, in the thread of each source.
"""

from ftrun.agent.notices.source import Notice, SourceFailed, output_of

_MAX_CHARACTERS = 200


class FileNotices:
    """A file whose existence is a notice; its first line is the reason."""

    name = "file"
    every_s = 0.0

    def __init__(self, path: str) -> None:
        self._path = path

    def poll(self) -> Notice | None:
        try:
            with open(self._path, encoding="utf-8", errors="replace") as file:
                line = file.readline(_MAX_CHARACTERS).strip()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SourceFailed(f"{self._path} cannot be read: {error.strerror}") from error
        return Notice(self.name, line or f"{self._path} exists")


class CommandNotices:
    """A shell command that ends with 0; what it prints is the reason, and no output is no notice.

    It runs with the rights of ftrun.
    """

    name = "command"
    every_s = 0.0

    def __init__(self, command: str) -> None:
        self._command = command

    def poll(self) -> Notice | None:
        printed = output_of(["/bin/sh", "-c", self._command])
        line = printed.partition("\n")[0][:_MAX_CHARACTERS].strip()
        return Notice(self.name, line) if line else None
