"""Reads the flight recorder of torch in one rank: completed, entered, and open collectives.

Source:   torch's FlightRecorder, versions 2.8 to 2.15. Counts of `pg_status` are text in JSON.

Rule 1: a collective is over if its state is `completed`, or if it is `retired`. The head of a group
        is the oldest collective that is not over. ProcessGroupNCCL sets the state before it retires
        an entry. An entry that is retired but not completed has therefore timed out: it is not
        over.
Rule 2: a rank has entered a collective if an entry exists or `pg_status` counts it. On a device the
        host runs ahead, so the entry proves nothing about the device.
        The counts of `pg_status` are of the last call. That may be a message, and messages have a
        separate sequence of numbers, so counts of a group with messages are not used. Completed
        entries show whether a group has messages, because the recorder keeps thousands of entries.
Rule 3: `pg_status` identifies a group by a number that differs between ranks. The name of the group
        comes from an entry with this number, or from the rank's page. A destroyed group keeps its
        number and its entries. If its name is used again, only the newest group counts.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from ftrun.monitor.page_values import Backends, decode_groups
from ftrun.monitor.verdicts import (
    RUNTIME,
    CollectiveCall,
    OpenMessage,
    ProcessGroupView,
    group_text,
    is_in,
    short,
)

SHOWN_CALLS = 8
_MESSAGE = re.compile(r"(send|recv) \d+(?:->|<-)(\d+)$")


class RecordedFrame(msgspec.Struct, frozen=True):
    """One frame of the stack of a call."""

    name: str
    filename: str
    line: int


class RecordedCollective(msgspec.Struct, frozen=True):
    """One call of this rank: a collective, or a message between two ranks."""

    process_group: tuple[str, str]
    """Name and description of the group."""
    collective_seq_id: int
    profiling_name: str
    """For example `gloo:all_reduce`, `nccl:send 0->3`; the numbers are ranks within the group."""
    time_created_ns: int
    """Time of the call, on the wall clock."""
    retired: bool
    """The call has ended on this rank, or has timed out."""
    is_p2p: bool = False
    input_sizes: list[list[int]] = []
    state: str = "scheduled"
    """`scheduled`, `started` (only with start events) or `completed`."""
    pg_id: int | None = None
    p2p_seq_id: int = 0
    op_id: int = 0
    time_discovered_completed_ns: int | None = None
    """When torch noticed its end, on the wall clock; 0 or None: it did not, as with gloo."""
    frames: list[RecordedFrame] = []
    """Stack of the call, the innermost frame first; only in torch's own pickles."""

    @property
    def group(self) -> str:
        return self.process_group[0]

    @property
    def op(self) -> str:
        return self.profiling_name.rpartition(":")[2]

    @property
    def sizes(self) -> str:
        shown = " ".join(str(sizes) if sizes else "scalar" for sizes in self.input_sizes[:4])
        return shown + (" ..." if len(self.input_sizes) > 4 else "")

    @property
    def place(self) -> str:
        """Innermost frame of the user's code, `train.py:42 in step`; empty: not recorded."""
        frames = (f"{one.filename}:{one.line} in {one.name}" for one in self.frames)
        return next((short(one) for one in frames if not is_in(one, RUNTIME)), "")

    def is_over(self, *, has_states: bool) -> bool:
        """Whether the call has ended on this rank; `has_states` of its `RecorderSource`."""
        return self.state == "completed" or (self.retired and not has_states)


class GroupStatus(msgspec.Struct, frozen=True):
    """Newest collective of a group in each state, up to 100 ms ago; -1: none yet."""

    last_enqueued_collective: int = -1
    last_completed_collective: int = -1


class GroupConfig(msgspec.Struct, frozen=True):
    """Description of a group in a dump."""

    name: str = ""
    desc: str = ""
    ranks: str = "[]"
    """As text: `[0, 1]`."""


class Trace(msgspec.Struct, frozen=True):
    """One dump of one recorder."""

    version: str = ""
    """Of the format, such as `2.10`."""
    entries: tuple[RecordedCollective, ...] = ()
    pg_config: dict[str, GroupConfig] = {}
    pg_status: dict[int, GroupStatus] = {}


_decoder = msgspec.json.Decoder(Trace, strict=False)


def parse_trace(data: bytes) -> Trace | None:
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError:
        return None


def trace_of(dump: object) -> Trace | None:
    """The trace in an unpickled dump; None if the object is not a dump."""
    try:
        return msgspec.convert(dump, Trace, strict=False)
    except msgspec.MsgspecError:
        return None


def call_text(one: RecordedCollective, *, now_ns: float) -> str:
    """A call in words that continue "its last collective is"; `now_ns` is when it was read."""
    seq = one.p2p_seq_id if one.is_p2p else one.collective_seq_id
    over_ns = one.time_discovered_completed_ns
    end = "had not left"
    if one.is_over(has_states=False):
        end = "had left"
        end += f" for {max(0.0, (now_ns - over_ns) / 1e9):.1f} s" if over_ns else ""
    at = f" at {one.place}" if one.place else ""
    return (
        f"{one.op} #{seq:,} of {group_text(*one.process_group)}, which it had entered{at} "
        f"{_age_s(one, now_ns):.1f} s before it was read, and {end}"
    )


@dataclass(frozen=True, slots=True)
class RecorderSource:
    """The recorder of a trace, and facts about its groups from other sources."""

    groups: str = ""
    """Ranks of the groups, as on the rank's page."""
    backends: Backends = field(default_factory=Backends)
    is_on_device: bool = False
    """The trace is from the recorder of device collectives."""
    has_states: bool = False
    """Each entry has its state: an entry that is retired but not completed has timed out."""
    is_timed: bool = False
    """The recorder has start events."""
    is_status_only: bool = False
    """The dump was requested without entries."""


@dataclass(frozen=True, slots=True)
class RecordedGroups:
    """The groups of one recorder."""

    views: tuple[ProcessGroupView, ...] = ()
    is_complete: bool = True
    """False: entries were not read, or `pg_status` has a group with an unknown name."""


def recorded_groups(trace: Trace, source: RecorderSource, *, now_ns: float) -> RecordedGroups:
    """Return the groups of a trace; `now_ns` is the wall clock."""
    ranks = decode_groups(source.groups)
    newest: dict[str, int] = {}
    if source.is_on_device:
        numbers = zip(ranks, source.backends.ids, strict=False)
        newest = {name: number for name, number in numbers if number is not None}
    # Numbers grow, so an unknown number below those on the page is of a destroyed group.
    first_unknown = max(newest.values(), default=-1) + 1
    for entry in trace.entries:
        newest[entry.group] = max(entry.pg_id or 0, newest.get(entry.group, 0))
    by_name: dict[str, list[RecordedCollective]] = {}
    for entry in trace.entries:
        if (entry.pg_id or 0) == newest[entry.group]:
            by_name.setdefault(entry.group, []).append(entry)
    statuses: dict[str, GroupStatus] = {}
    is_complete = not source.is_status_only
    if source.is_on_device:
        names = {number: name for name, number in newest.items()}
        statuses = {names[one]: status for one, status in trace.pg_status.items() if one in names}
        is_complete &= all(one in names or one < first_unknown for one in trace.pg_status)
    descs = {one.name: one.desc for one in trace.pg_config.values()}
    views = tuple(
        _view(
            name,
            by_name.get(name, []),
            statuses.get(name),
            desc=descs.get(name, ""),
            ranks=ranks.get(name, ()),
            source=source,
            now_ns=now_ns,
        )
        for name in dict.fromkeys((*by_name, *statuses))
    )
    return RecordedGroups(tuple(one for one in views if one is not None), is_complete)


def _view(
    name: str,
    entries: Sequence[RecordedCollective],
    status: GroupStatus | None,
    *,
    desc: str,
    ranks: tuple[int, ...],
    source: RecorderSource,
    now_ns: float,
) -> ProcessGroupView | None:
    ordered = sorted(entries, key=lambda one: (one.collective_seq_id, one.op_id))
    collectives = [one for one in ordered if not one.is_p2p]
    open_entries = [one for one in ordered if not one.is_over(has_states=source.has_states)]
    messages = _open_messages(open_entries, ranks, now_ns)
    if not collectives and not messages and status is None:
        return None
    head = next((one for one in open_entries if not one.is_p2p), None)
    has_messages = len(collectives) < len(entries)
    enqueued = 0 if status is None or has_messages else max(0, status.last_enqueued_collective)
    waits_seq = head.collective_seq_id if head is not None else 0
    if source.is_status_only and status is not None:
        completed = max(0, status.last_completed_collective)
        waits_seq = completed + 1 if status.last_enqueued_collective > completed else 0
    has_started = None
    if head is not None and (head.state == "started" or source.is_timed):
        has_started = head.state == "started"
    return ProcessGroupView(
        name=name,
        desc=entries[-1].process_group[1] if entries else desc,
        ranks=ranks,
        calls=tuple(
            CollectiveCall(one.collective_seq_id, one.op, one.sizes)
            for index, one in enumerate(collectives)
            if index >= len(collectives) - SHOWN_CALLS or one is head
        ),
        waits_seq=waits_seq,
        waits_s=_age_s(head, now_ns) if head is not None else 0.0,
        enqueued=enqueued,
        messages=messages,
        is_on_device=source.is_on_device,
        has_started=has_started,
        left_s=_left_s(collectives, now_ns),
    )


def _open_messages(
    open_entries: Iterable[RecordedCollective], ranks: Sequence[int], now_ns: float
) -> tuple[OpenMessage, ...]:
    """The oldest open message of each kind and peer, the oldest first."""
    found: dict[tuple[str, int], OpenMessage] = {}
    for one in sorted(open_entries, key=lambda one: one.op_id):
        named = _MESSAGE.search(one.profiling_name)
        if not one.is_p2p or named is None or int(named[2]) >= len(ranks):
            continue  # a coalesced group of messages names no peer; an unknown group has no ranks
        key = (named[1], ranks[int(named[2])])
        found.setdefault(key, OpenMessage(*key, one.p2p_seq_id, _age_s(one, now_ns)))
    return tuple(found.values())


def _left_s(collectives: Iterable[RecordedCollective], now_ns: float) -> float:
    newest_ns = max((one.time_discovered_completed_ns or 0 for one in collectives), default=0)
    return round(max(0.0, (now_ns - newest_ns) / 1e9), 2) if newest_ns else 0.0


def _age_s(entry: RecordedCollective, now_ns: float) -> float:
    return round(max(0.0, (now_ns - entry.time_created_ns) / 1e9), 2)
