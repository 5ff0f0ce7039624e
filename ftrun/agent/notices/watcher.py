"""Asks the sources of notices that the profile names, and has this node leave at the first notice.

Runs in:  agent; one thread for each source, because each may block.
Takes in: `notices.sources` and `notices.every_s` of the profile.
Gives:    `RunSignals.ask_leave` once; a warning and a journal line if a source does not answer.
Survives: sources that hang, fail or lie: one costs a thread, and at worst one drain of this node.
"""

import logging
import threading
from collections.abc import Callable, Sequence

from ftrun import clock
from ftrun.agent.notices.clouds import AwsNotices, AzureNotices, GoogleNotices
from ftrun.agent.notices.cluster import KubernetesNotices, SlurmNotices
from ftrun.agent.notices.local import CommandNotices, FileNotices
from ftrun.agent.notices.source import NoticeSource, SourceFailed
from ftrun.config.profile import NoticesConfig
from ftrun.errors import UsageError
from ftrun.journal import Journal
from ftrun.records.run import NoticeSourceFailed

_log = logging.getLogger("ftrun")

_OPTIONAL: dict[str, Callable[..., NoticeSource]] = {
    "aws": AwsNotices,
    "aws-rebalance": lambda *base: AwsNotices(*base, with_rebalance=True),
    "google": GoogleNotices,
    "azure": AzureNotices,
    "slurm": SlurmNotices,
}
"""Sources that may have an argument: another address of the metadata server, or the node's name."""
_REQUIRED: dict[str, Callable[[str], NoticeSource]] = {
    "file": FileNotices,
    "command": CommandNotices,
}


def source_of(text: str) -> NoticeSource:
    """The source of one entry of `notices.sources`. Raises UsageError."""
    name, separator, argument = text.partition(":")
    if name in _REQUIRED and argument:
        return _REQUIRED[name](argument)
    if name in _OPTIONAL and bool(argument) == bool(separator):
        return _OPTIONAL[name](*[argument] if argument else [])
    if text == "kubernetes":
        return KubernetesNotices()
    raise UsageError(
        f"notices.sources: {text!r} is no source. There are aws, aws-rebalance, google, azure, "
        "each also with :URL of another metadata server, kubernetes, slurm, file:PATH, command:LINE"
    )


class NoticeWatcher:
    """The threads of all sources of one node."""

    def __init__(
        self,
        settings: NoticesConfig,
        journal: Journal,
        leave: Callable[[str], None],
        sources: Sequence[NoticeSource] = (),
    ) -> None:
        """Raises UsageError: a source is unknown."""
        self._every_s = settings.every_s
        self._journal = journal
        self._leave = leave
        self._sources = [*map(source_of, settings.sources), *sources]
        self._is_over = threading.Event()
        self._lock = threading.Lock()

    def start(self) -> None:
        for source in self._sources:
            name = f"ftrun-notices-{source.name}"
            threading.Thread(target=self._watch, args=(source,), name=name, daemon=True).start()

    def close(self) -> None:
        """The threads are not awaited: a source may hang."""
        self._is_over.set()

    def _watch(self, source: NoticeSource) -> None:
        every_s = max(self._every_s, source.every_s)
        problem = ""
        while not self._is_over.is_set():
            asked_s = clock.now_s()
            try:
                notice, problem_now = source.poll(), ""
            except SourceFailed as error:
                notice, problem_now = None, str(error)
            except Exception as error:  # noqa: BLE001 - a source may answer anything
                notice, problem_now = None, f"{type(error).__name__}: {error}"
            if problem_now and not problem:
                self._journal.write(NoticeSourceFailed(source.name, problem_now))
                _log.warning("no notices from %s: %s", source.name, problem_now)
            problem = problem_now
            if notice is not None:
                self._take(notice.text)
                return
            self._is_over.wait(max(0.0, asked_s + every_s - clock.now_s()))

    def _take(self, text: str) -> None:
        with self._lock:
            if self._is_over.is_set():
                return
            self._is_over.set()  # the node leaves; another notice would say the same
        self._leave(f"notice of {text}")
