"""What a source of notices is; requests over HTTP and commands of sources.

Runs in:  agent, in the thread of each source.

A notice says that this node will soon be taken away: its machine is preempted, repaired or drained.
"""

import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ssl import SSLContext
from typing import NamedTuple, Protocol

from ftrun.agent.launch.process import run_bounded
from ftrun.errors import FtrunError

TIMEOUT_S = 2.0
COMMAND_S = 10.0
MAX_BYTES = 1 << 20


class SourceFailed(FtrunError):
    """A source did not answer, or not in its protocol; it is asked again."""


@dataclass(frozen=True, slots=True)
class Notice:
    """This node will be taken away."""

    source: str
    reason: str
    at: str = ""
    """When, as the source writes it; empty: it does not say."""

    @property
    def text(self) -> str:
        return f"{self.source}: {self.reason}{f' at {self.at}' if self.at else ''}"


class NoticeSource(Protocol):
    """Says whether this node will be taken away. One thread asks it, repeatedly."""

    name: str
    every_s: float
    """Shortest time between two questions, by what its server allows; 0: no limit."""

    def poll(self) -> Notice | None:
        """Raises SourceFailed."""


class Reply(NamedTuple):
    """An answer over HTTP."""

    status: int
    headers: Mapping[str, str]
    text: str


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A metadata server never redirects, and a token must not follow one."""

    def redirect_request(self, *_: object) -> None:
        return None


def fetch(
    url: str,
    headers: Mapping[str, str] | None = None,
    *,
    method: str = "GET",
    timeout_s: float = TIMEOUT_S,
    tls: SSLContext | None = None,
) -> Reply:
    """One request, never through a proxy. Any status is an answer.

    Raises:
        SourceFailed: there is no answer, or more than `MAX_BYTES`.
    """
    handlers = [urllib.request.ProxyHandler({}), _NoRedirect()]
    if tls is not None:
        handlers.append(urllib.request.HTTPSHandler(context=tls))
    request = urllib.request.Request(url, headers=dict(headers or {}), method=method)
    place = url.partition("?")[0]
    try:
        try:
            answer = urllib.request.build_opener(*handlers).open(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            body = answer.read(MAX_BYTES + 1)
    except (OSError, ValueError, urllib.error.URLError) as error:
        reason = getattr(error, "reason", None) or error
        raise SourceFailed(f"{place} does not answer: {reason}") from error
    except Exception as error:  # http.client has errors of its own for an answer that is cut off
        raise SourceFailed(f"{place}: {type(error).__name__}: {error}") from error
    if len(body) > MAX_BYTES:
        raise SourceFailed(f"{place} answers with more than {MAX_BYTES} bytes")
    return Reply(answer.status or 0, dict(answer.headers), body.decode("utf-8", "replace"))


def expected(reply: Reply, url: str, *statuses: int) -> Reply:
    """Raises SourceFailed for any other status."""
    if reply.status not in statuses:
        raise SourceFailed(f"{url} answers {reply.status}: {reply.text[:200].strip()}")
    return reply


def output_of(argv: Sequence[str], limit_s: float = COMMAND_S) -> str:
    """What a command prints. Raises SourceFailed: it fails, or takes longer than `limit_s`."""
    try:
        reason, printed = run_bounded(argv, limit_s=limit_s)
    except OSError as error:
        raise SourceFailed(f"{argv[0]} cannot be started: {error.strerror}") from error
    if reason:
        raise SourceFailed(f"{argv[0]}: {reason}{f': {printed[-200:]}' if printed else ''}")
    return printed
