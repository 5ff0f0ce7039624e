"""Messages between ranks (send, recv) that have no entry in a flight recorder, as with gloo.

Rule 1: The call with number n of one group, sender, receiver and tag is met by call n of the other
        side. A rank whose peer has not made that call waits for the peer.
Rule 2: A rank has left its order if its messages in the last completed step differ from those of
        the two steps before, which are equal; or if those of the current step differ so far. A
        schedule that changes by design has no such steps, so it proves nothing.
"""

import zlib
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from ftrun.monitor.slow.samples import Entered
from ftrun.monitor.verdicts import MessageCount, OpenMessage, ProcessGroupView, group_text

ANY = -1
"""The peer of a recv of any rank."""
_DEFAULT_GROUP = "0"

_Call = tuple[int, bool, int, int]
"""Key of the group, whether it is a send, peer and tag."""


@dataclass(frozen=True, slots=True)
class RecordedMessage:
    """One call of send or recv; times are of the monotonic clock in ns, and 0 if not yet."""

    number: int
    """Counted by the rank, from 1."""
    step: int
    """Steps that the rank had completed."""
    called_ns: int
    waited_ns: int
    """The rank began to wait for its end."""
    ended_ns: int
    """The wait has ended, also with an error."""
    total_ns: int
    """Time that the rank has waited for messages, up to `ended_ns`."""
    group: int
    """`group_key` of its process group."""
    tag: int
    count: int
    """Number of calls with the same group, operation, peer and tag, with this one."""
    peer: int
    """The other rank, or `ANY`."""
    is_send: bool

    @property
    def op(self) -> str:
        return "send" if self.is_send else "recv"

    @property
    def call(self) -> _Call:
        return self.group, self.is_send, self.peer, self.tag


def group_key(name: str) -> int:
    return zlib.crc32(name.encode())


def message_counts(
    messages: Iterable[RecordedMessage], groups: Iterable[str]
) -> tuple[MessageCount, ...]:
    """Number of calls of each kind that is among these messages."""
    names = {group_key(name): name for name in groups}
    newest = {one.call: one for one in messages}
    return tuple(
        MessageCount(names.get(one.group, ""), one.op, one.peer, one.tag, one.count)
        for one in newest.values()
    )


def with_waited(
    views: Sequence[ProcessGroupView],
    waited: RecordedMessage | None,
    groups: Mapping[str, tuple[int, ...]],
    *,
    now_ns: int,
) -> tuple[ProcessGroupView, ...]:
    """The groups of a rank, with the message that it waits for."""
    names = {group_key(name): name for name in groups}
    if waited is None or waited.group not in names:
        return tuple(views)
    name = names[waited.group]
    own = next((one for one in views if one.name == name), None)
    desc = own.desc if own is not None else "default_pg" if name == _DEFAULT_GROUP else ""
    waits_s = round(max(0.0, (now_ns - waited.waited_ns) / 1e9), 2)
    message = OpenMessage(
        waited.op, waited.peer, waited.count, waits_s, tag=waited.tag, is_counted=True
    )
    group = ProcessGroupView(
        name, desc, groups[name], own.calls if own is not None else (), messages=(message,)
    )
    return (*(one for one in views if one is not own), group)


def waits_before(
    entered: Iterable[Entered], messages: Sequence[RecordedMessage]
) -> tuple[tuple[Entered, ...], tuple[float, ...]]:
    """The total time that the rank had waited for messages when it entered each collective.

    A collective before all of these messages is left out, because that time is not known.
    """
    ended = sorted((one.ended_ns / 1e9, one.total_ns / 1e9) for one in messages if one.ended_ns)
    if messages and messages[0].number == 1:
        ended.insert(0, (-inf, 0.0))
    found = [(one, bisect_right(ended, (one[2], inf))) for one in entered]
    known = [(one, ended[at - 1][1]) for one, at in found if at]
    return tuple(one for one, _ in known), tuple(total_s for _, total_s in known)


def left_order(messages: Sequence[RecordedMessage], step: int) -> str:
    """How a rank has left the order of its earlier steps, as in rule 2; empty: it has not.

    Args:
        messages: the newest ones, the oldest first.
        step: steps that the rank has completed.
    """
    if not messages:
        return ""
    by_step: dict[int, list[RecordedMessage]] = {}
    for one in messages:
        by_step.setdefault(one.step, []).append(one)
    first = messages[0].step + (messages[0].number != 1)  # older messages of it may be missing
    for judged in (step - 1, step):
        before = [by_step.get(judged - back, []) for back in (1, 2)]
        usual, other = ([one.call for one in calls] for calls in before)
        if judged - 2 < first or not usual or usual != other:
            continue
        own = by_step.get(judged, [])
        for index in range(max(len(own), len(usual))):
            if index < min(len(own), len(usual)) and own[index].call == usual[index]:
                continue
            if index >= len(own) and judged == step:
                break  # the rest may follow
            return _difference(judged, index, own, before[0])
    return ""


def _difference(
    step: int, index: int, own: Sequence[RecordedMessage], usual: Sequence[RecordedMessage]
) -> str:
    found, wanted = (_text(calls[index]) if index < len(calls) else "" for calls in (own, usual))
    which = f"message {index + 1} of step {step + 1:,}"
    if not found:
        return f"{which} is missing, which was {wanted} in the two steps before"
    if not wanted:
        return f"{which} is {found}; the two steps before had {len(usual)}"
    return f"{which} is {found}, which was {wanted} in the two steps before"


def _text(one: RecordedMessage) -> str:
    return message_text(one.op, one.peer, one.tag)


def message_text(op: str, peer: int, tag: int = 0) -> str:
    """`send to rank 3 with tag 7`."""
    other = "any rank" if peer == ANY else f"rank {peer}"
    with_tag = f" with tag {tag}" if tag else ""
    return f"{op} {'to' if op == 'send' else 'from'} {other}{with_tag}"


def call_of(group: ProcessGroupView) -> str:
    """What a rank waits for in this group."""
    if not group.waits_seq:
        first = group.messages[0]
        return f"{message_text(first.op, first.peer, first.tag)} of {group_name(group)}"
    call = group.call(group.waits_seq)
    op = call.op if call is not None else "a collective"
    return f"{op} #{group.waits_seq:,} of {group_name(group)}"


def waited_s(group: ProcessGroupView) -> float:
    return group.waits_s if group.waits_seq else group.messages[0].waits_s


def group_name(group: ProcessGroupView) -> str:
    return group_text(group.name, group.desc)
