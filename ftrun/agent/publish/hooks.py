"""Reports incidents to the operator's command and to a webhook.

Each of the two has a thread of its own; `take` runs in any thread that writes the journal. A
failure of a hook causes a `hook_failed` line and a log line only.

Rule 1: data of the run never become part of a command. The shell gets the command as the operator
        has written it; the data are on stdin and in environment variables.
Rule 2: each hook is bounded in time, in the number of waiting incidents, and in the output that is
        kept.
"""

import base64
import http.client
import json
import logging
import os
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import Empty, Full, Queue
from typing import Any, NoReturn

import msgspec

from ftrun import clock
from ftrun.agent.launch.process import run_bounded
from ftrun.config.profile import HooksConfig
from ftrun.events import Record
from ftrun.journal import Journal
from ftrun.records.incidents import IncidentClosed, VerdictRecord
from ftrun.records.run import HookFailed

COMMAND_S = 30.0
WEBHOOK_S = 10.0
MAX_WAITING = 16
MAX_TEXT = 4096
"""Maximum characters of one variable."""
END_S = 10.0
"""Longest delay of the end of a run for hooks in progress."""

_OF_BOTH = ("culprits", "nodes", "error_class")
_OF_VERDICT = (*_OF_BOTH, "victims", "confidence", "evidence", "counter_evidence")
_OF_THE_END = (
    *_OF_BOTH, "detected_s", "recovered_s", "steps_lost", "restored", "verified", "action",
    "actions",
)  # fmt: skip

_log = logging.getLogger("ftrun")

Facts = Callable[[], Mapping[str, object]]
"""Returns the run's present id, script, node and generation."""
Deliver = Callable[[dict[str, Any]], str]
"""Delivers one document; returns the reason of a failure, or an empty string."""


class Hooks:
    """The hooks of one run."""

    def __init__(self, settings: HooksConfig, journal: Journal, *, facts: Facts, cwd: str) -> None:
        self._facts = facts
        self._lines: list[_Line] = []
        if settings.on_incident:
            command = settings.on_incident
            self._lines.append(
                _Line("on_incident", journal, lambda fields: run_command(command, fields, cwd))
            )
        if settings.webhook:
            self._lines.append(_Line("webhook", journal, Webhook(settings.webhook)))

    def take(self, record: Record) -> None:
        """Queue a journal line for the hooks if it concerns an incident; never blocks."""
        if not self._lines or not isinstance(record, VerdictRecord | IncidentClosed):
            return
        report = document(record, self._facts())
        for line in self._lines:
            line.put(report)

    def close(self, give_up_s: float) -> None:
        """Wait for hooks in progress, until this monotonic time."""
        for line in self._lines:
            line.close(give_up_s)


class _Line:
    """Queue of one hook, with the thread that delivers its documents one at a time."""

    def __init__(self, name: str, journal: Journal, deliver: Deliver) -> None:
        self._name = name
        self._journal = journal
        self._deliver = deliver
        self._waiting: Queue[dict[str, Any] | None] = Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name=f"ftrun-{name}", daemon=True)
        self._thread.start()

    def put(self, fields: dict[str, Any]) -> None:
        try:
            self._waiting.put_nowait(fields)
        except Full:
            self._failed(fields, f"the queue is full: {MAX_WAITING} incidents are waiting")

    def close(self, give_up_s: float) -> None:
        with suppress(Full):
            self._waiting.put(None, timeout=max(0.0, give_up_s - clock.now_s()))
        self._thread.join(max(0.0, give_up_s - clock.now_s()))

    def _run(self) -> None:
        while (fields := self._waiting.get()) is not None:
            try:
                reason = self._deliver(fields)
            except Exception as error:  # noqa: BLE001 - nothing that a hook does ends a run
                reason = f"{type(error).__name__}: {error}"
            if reason:
                self._failed(fields, reason)

    def _failed(self, fields: Mapping[str, Any], reason: str) -> None:
        number = fields["number"]
        self._journal.write(HookFailed(self._name, number, fields["event"], reason))
        _log.warning("hooks.%s failed for incident %s: %s", self._name, number, reason)


def document(record: VerdictRecord | IncidentClosed, facts: Mapping[str, object]) -> dict[str, Any]:
    if isinstance(record, VerdictRecord):
        event, kind = "verdict", record.verdict.kind.value
        found = {name: getattr(record.verdict, name) for name in _OF_VERDICT}
    else:
        event, kind = "closed", record.verdict_kind
        found = {name: getattr(record, name) for name in _OF_THE_END}
    about = {"number": record.incident, "verdict_kind": kind, "text": record.text}
    return {"event": event, "time": clock.wall_s(), **facts, **about, **msgspec.to_builtins(found)}


def variables_of(fields: Mapping[str, Any]) -> dict[str, str]:
    return {
        "FTRUN_INCIDENT_EVENT": _text(fields.get("event")),
        "FTRUN_INCIDENT_NUMBER": _text(fields.get("number")),
        "FTRUN_INCIDENT_RUN_ID": _text(fields.get("run_id")),
        "FTRUN_INCIDENT_KIND": _text(fields.get("verdict_kind")),
        "FTRUN_INCIDENT_TEXT": _text(fields.get("text")),
        "FTRUN_INCIDENT_CULPRITS": _text(fields.get("culprits")),
        "FTRUN_INCIDENT_NODES": _text(fields.get("nodes")),
        "FTRUN_INCIDENT_ACTION": _text(fields.get("action")),
    }


def run_command(
    command: str, fields: Mapping[str, Any], cwd: str, limit_s: float = COMMAND_S
) -> str:
    """Run the operator's command; return the reason of a failure, or an empty string."""
    body = json.dumps(fields, default=str).encode()
    variables = {**os.environ, **variables_of(fields)}
    reason, printed = run_bounded(
        ["/bin/sh", "-c", command], limit_s=limit_s, variables=variables, stdin=body, cwd=cwd
    )
    return f"{reason}: {printed}" if reason and printed else reason


class Webhook:
    """Sends documents to one URL.

    The limit of urllib is for each wait, and name resolution has none. So each delivery has a
    thread, which is abandoned after `limit_s`.
    """

    def __init__(self, url: str, limit_s: float = WEBHOOK_S) -> None:
        self._url = url
        self._limit_s = limit_s
        self._thread: threading.Thread | None = None
        self._opener = urllib.request.OpenerDirector()
        for handler in (
            urllib.request.ProxyHandler(),
            urllib.request.HTTPHandler(),
            urllib.request.HTTPSHandler(),
            urllib.request.HTTPDefaultErrorHandler(),
            urllib.request.HTTPErrorProcessor(),
            _NoRedirect(),
        ):
            self._opener.add_handler(handler)

    def __call__(self, fields: Mapping[str, Any]) -> str:
        if self._thread is not None and self._thread.is_alive():
            return "the previous delivery is still in progress"
        result: Queue[str] = Queue()
        body = json.dumps(fields, default=str).encode()
        name = "ftrun-webhook-post"
        self._thread = threading.Thread(
            target=lambda: result.put(self._post(body)), name=name, daemon=True
        )
        self._thread.start()
        try:
            return result.get(timeout=self._limit_s)
        except Empty:
            return f"no answer within {self._limit_s:g} s"

    def _post(self, body: bytes) -> str:
        headers = {"Content-Type": "application/json", "User-Agent": "ftrun"}
        try:
            url, credentials = _without_credentials(self._url)
            request = urllib.request.Request(url, body, {**headers, **credentials}, method="POST")
            with self._opener.open(request, timeout=self._limit_s):
                return ""
        except urllib.error.HTTPError as error:
            error.close()
            return f"it answered {error.code} {error.reason}"
        except (http.client.InvalidURL, ValueError):  # the text may contain a password
            return "hooks.webhook is not a valid address"
        except Exception as error:  # noqa: BLE001 - many kinds, down to those of http.client
            return f"{type(error).__name__}: {error}"


def _without_credentials(url: str) -> tuple[str, dict[str, str]]:
    """The URL without its name and password, and the header that contains them."""
    parts = urllib.parse.urlsplit(url)
    credentials, at, host = parts.netloc.rpartition("@")
    if not at:
        return url, {}
    encoded = base64.b64encode(urllib.parse.unquote_to_bytes(credentials)).decode()
    return parts._replace(netloc=host).geturl(), {"Authorization": f"Basic {encoded}"}


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, so that an incident is sent only to the configured URL."""

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> NoReturn:
        shown = newurl[:200]
        raise urllib.error.HTTPError(
            req.full_url, code, f"and points to {shown}: redirects are not followed", headers, fp
        )


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, list | tuple):
        return ",".join(_text(one) for one in value)[:MAX_TEXT]
    # A variable can hold neither NUL nor a lone surrogate.
    plain = str(value).replace("\0", "").encode("utf-8", "replace").decode()
    return plain[:MAX_TEXT]
