"""Reads the flight recorders of a rank without the rank's cooperation.

Runs in:  agent, the thread of the rank observer; on a failure the main thread, for a moment.
Takes in: the unix socket of torch's worker server in the rank, whose C++ threads answer even if the
          rank hangs while it holds the GIL; the rank's page.
Gives:    `Recorded`: the groups with their collectives; dumps for torch's own analyzer.
Source:   torch 2.8 to 2.15. ProcessGroupNCCL has a recorder of its own. Its full dump queries a
          device event for each open entry, in the thread that answers, and a query breaks a graph
          capture in any thread of the rank. Its counts (`includecollectives=false`) query nothing,
          nor does `fr_trace_json`, which serves gloo and, from 2.15 on, other backends by name.

Rule 1: no full dump of ProcessGroupNCCL while the page shows a capture, or does not observe them.
        A capture waits while a dump is in progress: `HeartbeatField.READING_NS`.
Rule 2: after one dump of a device's recorder without an answer, only `ping` is sent: its thread
        hangs in the driver, and so would the next one.
Rule 3: recorders of devices are read only of unresponsive ranks. Their times say when the host
        called a collective, which shows no lateness.
"""

import json
import socket
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ftrun import clock
from ftrun.monitor.flight_recorder import (
    RecordedGroups,
    RecorderSource,
    Trace,
    parse_trace,
    recorded_groups,
)
from ftrun.monitor.page_values import Backends, decode_backends
from ftrun.monitor.verdicts import ProcessGroupView
from ftrun.wire.shared_memory.pages import HeartbeatField, SharedPage
from ftrun.wire.transport.channel import short_socket_path

RECORDER_S = 1.0
MAX_ANSWER_BYTES = 64 << 20
_PLAIN = "fr_trace_json"
_NCCL = "dump_nccl_trace_json"
_NCCL_PICKLE = "dump_nccl_trace_pickle?includestacktraces=false"  # stack traces need the GIL
_MARGIN_S = 0.2
_UNANSWERED = "its flight recorder does not answer: the driver of its device may hang"


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the recorders of one rank have said."""

    groups: tuple[ProcessGroupView, ...] = ()
    is_complete: bool = True
    """False: a group or message that is missing in `groups` proves nothing."""
    notes: tuple[str, ...] = ()


class RecorderReader:
    """The recorders of one rank in one generation."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._handlers: frozenset[str] = frozenset()
        self._is_unanswered = False
        """A dump of the device's recorder was not answered: rule 2."""

    def read(self, page: SharedPage, *, deadline_s: float = RECORDER_S) -> Recorded:
        if not page.get(HeartbeatField.HAS_SERVER):
            return Recorded()
        backends = decode_backends(page.backends)
        device = self._of_device(page, backends, deadline_s) if backends.device_backend else None
        if device is not None and "gloo" not in backends.by_device.values():
            return device
        trace = read_trace(self._path, deadline_s=deadline_s)
        found = RecordedGroups()
        if trace is not None:
            found = recorded_groups(trace, RecorderSource(page.groups), now_ns=clock.wall_s() * 1e9)
        if device is None:
            return Recorded(found.views, found.is_complete)
        # Both backends count on their own, under the same name of the group.
        gloo = [msgspec.structs.replace(one, name=f"{one.name} gloo") for one in found.views]
        return Recorded((*device.groups, *gloo), device.is_complete, device.notes)

    def _of_device(self, page: SharedPage, backends: Backends, deadline_s: float) -> Recorded:
        if self._is_unanswered:
            return Recorded(notes=(self._unanswered_note(deadline_s),))
        request, note, may_query = self._request(page, backends, deadline_s)
        if not request:
            return Recorded(is_complete=False, notes=(note,))
        try:
            answer = _ask(self._path, request, deadline_s)
        except TimeoutError:
            self._is_unanswered = may_query
            return Recorded(notes=(_UNANSWERED,))
        except OSError:
            return Recorded()  # it has ended
        finally:
            page.set(HeartbeatField.READING_NS, 0)
        trace = parse_trace(answer)
        if trace is None:
            return Recorded(is_complete=False, notes=("its flight recorder cannot be read",))
        source = RecorderSource(
            page.groups,
            backends,
            is_on_device=True,
            is_timed=bool(page.get(HeartbeatField.TIMED)),
            is_status_only="includecollectives=false" in request,
        )
        found = recorded_groups(trace, source, now_ns=clock.wall_s() * 1e9)
        is_in_graphs = not trace.entries and bool(page.get(HeartbeatField.REPLAYS))
        notes = (note, "collectives captured in a graph are not recorded" if is_in_graphs else "")
        return Recorded(found.views, found.is_complete, tuple(one for one in notes if one))

    def _request(
        self, page: SharedPage, backends: Backends, deadline_s: float
    ) -> tuple[str, str, bool]:
        """The request that is safe now, what it leaves out, and whether it queries the device."""
        name = backends.device_backend
        if name != "nccl":
            return f"{_PLAIN}?backend={name.removesuffix('*')}", "", False
        self._handlers = self._handlers or handlers(self._path, deadline_s)
        if _NCCL not in self._handlers:
            known = "this version of torch has no handler for its flight recorder"
            return "", known if self._handlers else "its server does not answer", False
        if not may_query_device(page, deadline_s):
            note = "only counts of its collectives were read, because a graph may be captured"
            return f"{_NCCL}?includecollectives=false", note, False
        return f"{_NCCL}?onlyactive=true", "", True

    def _unanswered_note(self, deadline_s: float) -> str:
        try:
            _ask(self._path, "ping", deadline_s)
        except OSError:
            return "its flight recorder and its server do not answer"
        return _UNANSWERED

    def dump(self, page: SharedPage) -> bytes | None:
        """A pickle of the recorder of the device, or else the JSON of the others; None: neither."""
        if not page.get(HeartbeatField.HAS_SERVER):
            return None
        name = decode_backends(page.backends).device_backend
        request = _PLAIN if not name else f"{_PLAIN}?backend={name.removesuffix('*')}"
        if name == "nccl":
            if self._is_unanswered or not may_query_device(page, RECORDER_S):
                return None
            request = _NCCL_PICKLE
        try:
            answer = _ask(self._path, request, RECORDER_S)
            if len(answer) >= MAX_ANSWER_BYTES and name == "nccl":
                answer = _ask(self._path, f"{request}&onlyactive=true", RECORDER_S)
        except TimeoutError:
            self._is_unanswered = name == "nccl"
            return None
        except OSError:
            return None
        finally:
            page.set(HeartbeatField.READING_NS, 0)
        return answer if len(answer) < MAX_ANSWER_BYTES else None


def may_query_device(page: SharedPage, deadline_s: float) -> bool:
    """Whether no graph is captured; if so, captures wait until `READING_NS` is 0 or has passed."""
    page.set(HeartbeatField.READING_NS, clock.now_ns() + int((deadline_s + _MARGIN_S) * 1e9))
    if not page.may_capture:
        return True
    page.set(HeartbeatField.READING_NS, 0)
    return False


def handlers(path: str, deadline_s: float) -> frozenset[str]:
    """Names of the handlers of a rank's server; empty if it does not answer."""
    try:
        found = json.loads(_ask(path, "", deadline_s, method="GET"))
    except (OSError, ValueError):
        return frozenset()
    return frozenset(str(one) for one in found) if isinstance(found, list) else frozenset()


def read_trace(path: str, *, deadline_s: float = RECORDER_S) -> Trace | None:
    """The trace of a rank's recorder that queries no device; None if it does not answer."""
    try:
        return parse_trace(_ask(path, _PLAIN, deadline_s))
    except OSError:
        return None


def _ask(path: str, request: str, deadline_s: float, *, method: str = "POST") -> bytes:
    """Raises: OSError: no answer (TimeoutError), no server, or no such handler."""
    until_s = clock.now_s() + deadline_s
    words = (
        f"{method} /handler/{request} HTTP/1.1\r\nHost: rank\r\nContent-Length: 0\r\n"
        "Connection: close\r\n\r\n"
    )
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as link:
        link.settimeout(deadline_s)
        with short_socket_path(Path(path)) as short:
            link.connect(short)
        link.sendall(words.encode())
        answer = _read_all(link, until_s)
    head, _, body = answer.partition(b"\r\n\r\n")
    if b" 200 " not in head[:32]:
        raise OSError(f"/handler/{request}: {head[:32]!r}")
    return body


def _read_all(link: socket.socket, until_s: float) -> bytes:
    parts, size = [], 0
    while size < MAX_ANSWER_BYTES and (part := link.recv(1 << 18)):
        parts.append(part)
        size += len(part)
        link.settimeout(max(0.01, until_s - clock.now_s()))
    return b"".join(parts)
