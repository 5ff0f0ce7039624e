"""Reads the flight recorders of a rank without the rank's cooperation.

Runs in the thread of the rank observer; on a failure in the main thread, for a moment. The C++
threads of torch's worker server in the rank answer even if the rank hangs while it holds the GIL.
That of torch 2.8 and 2.9 has no handler for gloo: the rank writes its calls to its stack file.

Source:   torch 2.8 to 2.15. ProcessGroupNCCL has a recorder of its own. Its full dump queries a
          device event for each open entry, in the thread that answers, and a query breaks a graph
          capture in any thread of the rank. Its counts (`includecollectives=false`) query nothing,
          nor does `fr_trace_json`, which serves gloo and, from 2.15 on, other backends by name.

Rule 1: no full dump of ProcessGroupNCCL while the page shows a capture, or does not observe them.
        A capture waits while a dump is in progress: `HeartbeatField.READING_NS`. A dump without an
        answer may still be in progress, so the field is then left to expire.
Rule 2: after one dump of a device's recorder without an answer, while the server answers a `ping`,
        only `ping` is sent: the dump's thread hangs in the driver, and so would the next one.
Rule 3: recorders of devices are read only of unresponsive ranks. Their times say when the host
        called a collective, which shows no lateness.
Rule 4: an answer that is shorter than it says is not used: the rank has ended within it.
"""

import json
import re
import socket
import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
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
from ftrun.monitor.order.messages import left_order, message_counts, with_waited
from ftrun.monitor.page_values import Backends, decode_backends, decode_groups
from ftrun.monitor.verdicts import MessageCount, ProcessGroupView
from ftrun.wire.shared_memory.pages import HeartbeatField, SharedPage, left_calls
from ftrun.wire.transport.channel import short_socket_path

RECORDER_S = 1.0
MAX_ANSWER_BYTES = 64 << 20
_PLAIN = "fr_trace_json"
_NCCL = "dump_nccl_trace_json"
_NCCL_PICKLE = "dump_nccl_trace_pickle?includestacktraces=false"  # stack traces need the GIL
_MARGIN_S = 2.0
"""A dump may still query events for this long after its deadline."""

_HEAD_END = b"\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_MAX_HEAD_BYTES = 1 << 16
_UNANSWERED = "its flight recorder does not answer: the driver of its device may hang"
_UNREADABLE = "its flight recorder cannot be read"
_NOT_WRITTEN = "torch before 2.10 shows collectives of gloo only while its interpreter is free"


class RecorderError(OSError):
    """A rank's server has answered with an error, or with too many bytes."""


class AnswerTooLargeError(RecorderError):
    """More than `MAX_ANSWER_BYTES`."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the recorders of one rank have said."""

    groups: tuple[ProcessGroupView, ...] = ()
    is_complete: bool = True
    """False: a group or message that is missing in `groups` proves nothing."""
    notes: tuple[str, ...] = ()
    message_counts: tuple[MessageCount, ...] = ()
    left_order: str = ""
    answer: bytes = b""
    """JSON of the recorder of gloo; empty: it was not read. Of a device torch writes a dump."""


def with_messages(recorded: Recorded, page: SharedPage, *, is_stopped: bool) -> Recorded:
    """With the messages on the page of a rank, which no recorder has.

    A stopped rank waits for nothing: it is the cause of what it does not do.
    """
    messages, groups = page.messages(), decode_groups(page.groups)
    number = 0 if is_stopped else page.get(HeartbeatField.MESSAGE_WAITED)
    waited = next((one for one in messages if one.number == number), None)
    return replace(
        recorded,
        groups=with_waited(recorded.groups, waited, groups, now_ns=clock.now_ns()),
        message_counts=message_counts(messages, groups),
        left_order=left_order(messages, page.get(HeartbeatField.STEP)),
    )


class GroupMemory:
    """Since when nothing has changed in each group of each rank."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, str], tuple[object, float]] = {}

    def clear(self) -> None:
        self._seen.clear()

    def with_times(
        self, rank: int, groups: Sequence[ProcessGroupView], now_s: float
    ) -> tuple[ProcessGroupView, ...]:
        found = []
        for group in groups:
            open_messages = tuple((one.op, one.peer, one.seq) for one in group.messages)
            state = (group.waits_seq, group.entered, open_messages)
            before, since_s = self._seen.get((rank, group.name), (state, now_s))
            since_s = since_s if before == state else now_s
            self._seen[rank, group.name] = state, since_s
            found.append(msgspec.structs.replace(group, still_s=round(now_s - since_s, 2)))
        return tuple(found)


class RecorderReader:
    """The recorders of one rank in one generation; for the observer's and the main thread."""

    def __init__(self, path: str, *, stack_fd: int = -1) -> None:
        self._path = path
        self._stack_fd = stack_fd
        self._handlers: frozenset[str] = frozenset()
        self._is_unanswered = False
        """A dump of the device's recorder was not answered: rule 2."""
        self._lock = threading.Lock()
        """One request at a time, because the end of one clears `READING_NS`."""

    def read(self, page: SharedPage, *, deadline_s: float = RECORDER_S) -> Recorded:
        """Read all groups; `deadline_s` is for each of a few requests."""
        if not page.get(HeartbeatField.HAS_SERVER):
            return Recorded()
        if not self._lock.acquire(timeout=deadline_s):
            return Recorded(is_complete=False)
        try:
            return self._read(page, deadline_s)
        finally:
            self._lock.release()

    def calls(self, page: SharedPage, *, deadline_s: float) -> bytes:
        """JSON of the recorder of gloo; empty: no answer, or its collectives are on a device."""
        is_on_device = bool(decode_backends(page.backends).device_backend)
        if is_on_device or not page.get(HeartbeatField.HAS_SERVER):
            return b""
        if not self._lock.acquire(timeout=deadline_s):
            return b""
        try:
            return self._of_gloo(page, deadline_s)
        finally:
            self._lock.release()

    def dump(self, page: SharedPage) -> bytes | None:
        """A pickle of the recorder of the device, or else the JSON of the others; None: neither."""
        if not page.get(HeartbeatField.HAS_SERVER):
            return None
        with self._lock:
            try:
                return self._dump(page)
            except OSError:
                return None

    def _read(self, page: SharedPage, deadline_s: float) -> Recorded:
        backends = decode_backends(page.backends)
        device = self._of_device(page, backends, deadline_s) if backends.device_backend else None
        if device is not None and "gloo" not in backends.by_device.values():
            return device
        answer = self._of_gloo(page, deadline_s)
        trace = parse_trace(answer)
        notes: tuple[str, ...] = ()
        if trace is None and self._handlers and _PLAIN not in self._handlers:
            notes = (_NOT_WRITTEN,)
        found = RecordedGroups()
        if trace is not None:
            found = recorded_groups(trace, RecorderSource(page.groups), now_ns=clock.wall_s() * 1e9)
        if device is None:
            return Recorded(found.views, found.is_complete, notes, answer=answer)
        # Both backends count on their own, under the same name of the group.
        gloo = [msgspec.structs.replace(one, name=f"{one.name} gloo") for one in found.views]
        return Recorded((*device.groups, *gloo), device.is_complete, (*device.notes, *notes))

    def _of_gloo(self, page: SharedPage, deadline_s: float) -> bytes:
        """The trace as JSON; empty: no answer."""
        try:
            self._handlers = self._handlers or handlers(self._path, deadline_s)
            if _PLAIN in self._handlers:
                return _ask(self._path, _PLAIN, deadline_s)
        except OSError:
            return b""
        return self._written(page, deadline_s)

    def _written(self, page: SharedPage, deadline_s: float) -> bytes:
        """The trace that a thread of the rank writes on request; empty: not in time."""
        number = page.get(HeartbeatField.CALLS_ASKED) + 1
        page.set(HeartbeatField.CALLS_ASKED, number)
        until_s = clock.now_s() + deadline_s
        while page.get(HeartbeatField.CALLS_WRITTEN) != number:
            if clock.now_s() >= until_s:
                return b""
            clock.sleep(0.01)
        return left_calls(self._stack_fd)

    def _of_device(self, page: SharedPage, backends: Backends, deadline_s: float) -> Recorded:
        if self._is_unanswered:
            return Recorded(notes=(self._silent_note(deadline_s),))
        try:
            if backends.device_backend != "nccl":
                answer = _ask(self._path, _plain_request(backends), deadline_s)
                return _recorded(answer, page, backends)
            return self._of_nccl(page, backends, deadline_s)
        except TimeoutError:
            return Recorded(notes=(self._silent_note(deadline_s),))
        except RecorderError:
            return Recorded(is_complete=False, notes=(_UNREADABLE,))
        except OSError:
            return Recorded()  # it has ended

    def _of_nccl(self, page: SharedPage, backends: Backends, deadline_s: float) -> Recorded:
        self._handlers = self._handlers or handlers(self._path, deadline_s)
        if _NCCL not in self._handlers:
            note = "this version of torch has no handler for its flight recorder"
            return Recorded(is_complete=False, notes=(note,))
        # Not only active entries: the others show which groups have messages.
        answer = self._query(page, _NCCL, deadline_s)
        if answer is not None:
            return _recorded(answer, page, backends, has_states=True)
        counts = _ask(self._path, f"{_NCCL}?includecollectives=false", deadline_s)
        found = _recorded(counts, page, backends, is_status_only=True)
        note = "only counts of its collectives were read, because a graph may be captured"
        return replace(found, notes=(note, *found.notes))

    def _dump(self, page: SharedPage) -> bytes | None:
        backends = decode_backends(page.backends)
        if backends.device_backend != "nccl":
            return _ask(self._path, _plain_request(backends), RECORDER_S)
        if self._is_unanswered:
            return None
        try:
            return self._query(page, _NCCL_PICKLE, RECORDER_S)
        except AnswerTooLargeError:
            return self._query(page, f"{_NCCL_PICKLE}&onlyactive=true", RECORDER_S)

    def _query(self, page: SharedPage, request: str, deadline_s: float) -> bytes | None:
        """As `_ask`, for a request that queries events; None: a graph may be captured."""
        if not may_query_device(page, deadline_s):
            return None
        try:
            answer = _ask(self._path, request, deadline_s)
        except TimeoutError:
            self._is_unanswered = self._answers_ping(deadline_s)
            raise
        except OSError:
            page.set(HeartbeatField.READING_NS, 0)
            raise
        page.set(HeartbeatField.READING_NS, 0)
        return answer

    def _answers_ping(self, deadline_s: float) -> bool:
        """False of a process that is stopped, starved, or has ended."""
        try:
            _ask(self._path, "ping", deadline_s)
        except OSError:
            return False
        return True

    def _silent_note(self, deadline_s: float) -> str:
        if not self._answers_ping(deadline_s):
            return "its server does not answer"
        return _UNANSWERED if self._is_unanswered else "its flight recorder does not answer"


def _plain_request(backends: Backends) -> str:
    name = backends.device_backend.removesuffix("*")
    return f"{_PLAIN}?backend={name}" if name else _PLAIN


def _recorded(
    answer: bytes,
    page: SharedPage,
    backends: Backends,
    *,
    has_states: bool = False,
    is_status_only: bool = False,
) -> Recorded:
    trace = parse_trace(answer)
    if trace is None:
        return Recorded(is_complete=False, notes=(_UNREADABLE,))
    source = RecorderSource(
        page.groups,
        backends,
        is_on_device=True,
        has_states=has_states,
        is_timed=bool(page.get(HeartbeatField.TIMED)),
        is_status_only=is_status_only,
    )
    found = recorded_groups(trace, source, now_ns=clock.wall_s() * 1e9)
    is_idle = not any(group.is_waiting for group in found.views)
    is_in_graphs = is_idle and bool(page.get(HeartbeatField.REPLAYS))
    notes = ("collectives captured in a graph are not recorded",) if is_in_graphs else ()
    return Recorded(found.views, found.is_complete, notes)


def may_query_device(page: SharedPage, deadline_s: float) -> bool:
    """Whether no graph is captured; if so, captures wait until `READING_NS` is 0 or has passed."""
    page.set(HeartbeatField.READING_NS, clock.now_ns() + int((deadline_s + _MARGIN_S) * 1e9))
    if not page.may_capture:
        return True
    page.set(HeartbeatField.READING_NS, 0)
    return False


def handlers(path: str, deadline_s: float) -> frozenset[str]:
    """Names of the handlers of a rank's server; OSError as from `_ask`."""
    try:
        found = json.loads(_ask(path, "", deadline_s, method="GET"))
    except ValueError as error:
        raise RecorderError("the server's list of handlers cannot be read") from error
    return frozenset(str(one) for one in found) if isinstance(found, list) else frozenset()


def read_trace(path: str) -> Trace | None:
    """The trace of a rank's recorder that queries no device; None if it does not answer."""
    try:
        return parse_trace(_ask(path, _PLAIN, RECORDER_S))
    except OSError:
        return None


def _ask(path: str, request: str, deadline_s: float, *, method: str = "POST") -> bytes:
    """The body of an answer.

    Raises:
        TimeoutError: it did not arrive within the deadline.
        RecorderError: it is an error, or too large.
        OSError: no server, or it has ended within the answer.
    """
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
        return _read_body(link, until_s)


def _read_body(link: socket.socket, until_s: float) -> bytes:
    data, size = bytearray(), -1
    while size < 0 or len(data) < size:
        left_s = until_s - clock.now_s()
        if left_s <= 0:
            raise TimeoutError("the answer is not complete")
        link.settimeout(left_s)
        part = link.recv(1 << 18)
        if not part:
            raise ConnectionResetError("the answer ends early")
        data += part
        if size < 0 and (end := data.find(_HEAD_END)) >= 0:
            size = _size_of_body(bytes(data[:end]))
            del data[: end + len(_HEAD_END)]
        if size < 0 and len(data) > _MAX_HEAD_BYTES:
            raise RecorderError("the answer is not HTTP")
    return bytes(data[:size])


def _size_of_body(head: bytes) -> int:
    length = _LENGTH.search(head)
    if not head.startswith(b"HTTP/1.") or head.split(b" ")[1:2] != [b"200"] or length is None:
        raise RecorderError(f"the answer is {head[:32]!r}")
    if int(length[1]) > MAX_ANSWER_BYTES:
        raise AnswerTooLargeError(f"the answer has {int(length[1]):,} bytes")
    return int(length[1])
