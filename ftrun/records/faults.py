"""Records of `ftrun inject-fault`, on the node where the fault is made."""

from ftrun.events import Record
from ftrun.records.note import Seconds, Whole


class FaultRecord(Record, frozen=True):
    """One order; `rank` is -1 if the fault is made to a node."""

    id: str
    fault: str
    rank: Whole


class FaultAcceptedRecord(FaultRecord, frozen=True, tag="fault_accepted"):
    """This node has taken an order."""

    at_step: int
    for_s: float
    amount: float
    again: bool
    how: str


class FaultInjected(FaultRecord, frozen=True, tag="fault_injected"):
    """The fault is active."""

    step: Whole
    fired_s: Seconds
    how: str


class FaultReverted(FaultRecord, frozen=True, tag="fault_reverted"):
    """The fault is over, or it was never made."""

    reason: str
