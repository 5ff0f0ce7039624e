"""Fault orders, and the shared page that delivers an order to a rank.

Runs in:  cli (makes orders), agent (forwards them, writes pages), worker (reads its page).
Takes in: the parsed command line, validated against the catalogue.
Gives:    `FaultOrder`; a `FaultPage` that a rank polls once per step with one word comparison.
Survives: the rank. A page belongs to a rank number and is passed to the rank's next process, which
          sees in it which orders have fired.

Rule 1: The agent writes the order first and its number last. The rank writes step and time first
        and the number last. A visible number therefore implies a complete entry.
Rule 2: A fault fires once. The rank marks it as fired before the act, because most acts end the
        process.
Rule 3: An order that is cancelled before it fires never fires. A fault that lasts polls the page
        while it lasts.
"""

import math
import mmap
import os
from enum import IntEnum

import msgspec

from ftrun.errors import UsageError
from ftrun.wire.fault_catalog import fault_kind
from ftrun.wire.messages.faults import FaultOrder as FaultOrder

FAULT_PREFIX = "ftrun-fault-"  # prefix of all cgroups and files of a fault; the order id follows
PAGE_BYTES = 4096
_ORDER_AT = 512
_REASON_AT = 3072
MAX_FOR_S = 86_400.0


def make_order(  # noqa: PLR0913 - what can be typed
    order_id: str,
    kind_name: str,
    *,
    rank: int | None = None,
    node: str | None = None,
    at_step: int | None = None,
    for_s: float | None = None,
    amount: float | None = None,
    again: bool = False,
) -> FaultOrder:
    """Validate the command line and build the order; raises UsageError."""
    kind = fault_kind(kind_name)
    if kind.by_rank and node is not None:
        raise UsageError(f"{kind.name} acts on a rank: use --rank R, not --node {node}")
    if not kind.by_rank and rank is not None:
        raise UsageError(f"{kind.name} acts on a node: use --node N, not --rank {rank}")
    if rank is not None and rank < 0:
        raise UsageError(f"--rank must be 0 or more, not {rank}")
    if at_step is not None and at_step < 1:
        raise UsageError(f"--at-step must be 1 or more (the end of the first step), not {at_step}")
    if kind.name == "poison-batch" and at_step is None:
        raise UsageError("poison-batch needs --at-step, the step whose batch is bad")
    if for_s is not None and not 0 < for_s <= MAX_FOR_S:
        raise UsageError(f"--for must be above 0 and at most {MAX_FOR_S:.0f} s, not {for_s:g}")
    if amount is not None and not kind.unit:
        raise UsageError(f"{kind.name} takes no --amount")
    if amount is not None and not math.isfinite(amount):
        raise UsageError(f"--amount must be a finite number, not {amount}")
    if again and not (kind.is_inside and kind.by_rank):
        raise UsageError(
            f"{kind.name} cannot be repeated: --again is only for faults that a rank injects"
        )
    return FaultOrder(
        id=order_id,
        kind=kind.name,
        rank=-1 if rank is None else rank,
        node=node or "",
        at_step=at_step or 0,
        for_s=kind.for_s if for_s is None else for_s,
        amount=kind.amount if amount is None else amount,
        again=again,
    )


def make_cancel(request_id: str, order_id: str, *, node: str | None = None) -> FaultOrder:
    """`node` is the node that carries out the order, if the order was given on another node."""
    return FaultOrder(request_id, "", node=node or "", cancels=order_id)


def duration_s(text: str) -> float:
    """Parse `5`, `5s`, `500ms`, `2m` or `1h` into seconds; raises UsageError for other forms."""
    units = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
    number = text.rstrip("msh")
    unit = text[len(number) :] or "s"
    try:
        found = float(number) * units[unit]
    except (ValueError, KeyError):
        found = math.nan
    if not math.isfinite(found):
        raise UsageError(f"--for must be a time such as 500ms, 5s, 2m or 1h, not {text!r}")
    return found


class _Word(IntEnum):
    """Fields of a fault page, 8 bytes each."""

    ORDERED = 0  # number of the newest order
    FIRED = 1  # number of the newest order that has fired
    FIRED_STEP = 2
    FIRED_NS = 3
    ENDED = 4  # number of the newest lasting order that is over
    TIMES = 5  # times that the newest order has fired
    LENGTH = 6  # of the newest order, in bytes
    FAILED = 7  # number of the newest order that failed
    CANCELLED = 8  # number of the newest order that was cancelled


class _Field:
    """One word of a fault page, to be read."""

    def __init__(self, at: _Word) -> None:
        self._at = at

    def __get__(self, page: "FaultPage", _owner: object) -> int:
        return page._words[self._at]


class FaultPage:
    """Fault page of one rank. The agent and the rank write disjoint words of it."""

    ordered = _Field(_Word.ORDERED)
    fired = _Field(_Word.FIRED)
    fired_step = _Field(_Word.FIRED_STEP)
    fired_ns = _Field(_Word.FIRED_NS)
    ended = _Field(_Word.ENDED)
    times = _Field(_Word.TIMES)
    failed = _Field(_Word.FAILED)

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, PAGE_BYTES)
        self._words = memoryview(self._map).cast("q")

    @classmethod
    def create(cls, rank: int) -> "FaultPage":
        fd = os.memfd_create(f"ftrun-faults-{rank}", os.MFD_CLOEXEC)
        os.ftruncate(fd, PAGE_BYTES)
        return cls(fd)

    # --- agent --------------------------------------------------------------------------------

    def put(self, order: FaultOrder) -> int:
        data = msgspec.msgpack.encode(order)
        self._map[_ORDER_AT : _ORDER_AT + len(data)] = data
        self._words[_Word.LENGTH] = len(data)
        self._words[_Word.TIMES] = 0
        self._words[_Word.ORDERED] += 1
        return self.ordered

    def cancel(self, number: int) -> None:
        self._words[_Word.CANCELLED] = number

    @property
    def reason(self) -> str:
        """Reason why the order numbered `failed` could not be carried out."""
        return self._map[_REASON_AT:PAGE_BYTES].partition(b"\0")[0].decode(errors="replace")

    # --- worker -------------------------------------------------------------------------------

    def order(self) -> FaultOrder:
        data = self._map[_ORDER_AT : _ORDER_AT + self._words[_Word.LENGTH]]
        return msgspec.msgpack.decode(data, type=FaultOrder)

    def mark_fired(self, number: int, step: int, now_ns: int) -> None:
        self._words[_Word.FIRED_STEP] = step
        self._words[_Word.FIRED_NS] = now_ns
        self._words[_Word.TIMES] += 1
        self._words[_Word.FIRED] = number

    def is_cancelled(self, number: int) -> bool:
        return self._words[_Word.CANCELLED] == number

    def mark_failed(self, number: int, reason: str) -> None:
        text = reason.encode()[: PAGE_BYTES - _REASON_AT - 1]
        self._map[_REASON_AT:PAGE_BYTES] = text.ljust(PAGE_BYTES - _REASON_AT, b"\0")
        self._words[_Word.FAILED] = number

    def mark_ended(self, number: int) -> None:
        self._words[_Word.ENDED] = number

    def close(self) -> None:
        self._words.release()
        self._map.close()
        os.close(self.fd)


class FaultPages:
    """Fault pages of a node's ranks, each created on first use."""

    def __init__(self) -> None:
        self.by_rank: dict[int, FaultPage] = {}

    def fd_of(self, rank: int) -> int:
        if rank not in self.by_rank:
            self.by_rank[rank] = FaultPage.create(rank)
        return self.by_rank[rank].fd
