"""Messages about injected faults: cli -> agent, and agent -> agent of another node."""

import msgspec

from ftrun.wire.messages.message import Message


class FaultOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One fault to inject: kind, target and time."""

    id: str
    kind: str  # a name in the catalogue, see fault_catalog.py
    rank: int = -1  # target rank; -1 if the target is a node
    node: str = ""  # its name, or position in the run; empty: the only node, or the rank's
    at_step: int = 0  # inject at the end of this step of the run, counted from 1; 0: now
    for_s: float = 0.0  # duration; 0: the default of the kind
    amount: float = 0.0  # its meaning depends on the kind
    again: bool = False  # inject also in the rank's next processes, each time that step is reached
    cancels: str = ""  # id of an order to cancel; `kind` is then empty

    @property
    def fires_again(self) -> bool:
        return self.again or self.kind == "poison-batch"


class InjectFault(Message, frozen=True, tag="InjectFault"):
    """Cli -> agent. Reply: FaultAccepted, or Refused with what is missing."""

    order: FaultOrder


class FaultAccepted(Message, frozen=True, tag="FaultAccepted"):
    """Agent -> cli: the fault is scheduled on `node`; the journal records when it fires."""

    id: str
    node: str
    how: str


class ForwardFault(Message, frozen=True, tag="ForwardFault"):
    """Agent -> agent of the target node. Reply: ForwardFaultReply."""

    order: FaultOrder


class ForwardFaultReply(Message, frozen=True, tag="ForwardFaultReply"):
    """Reply to ForwardFault: how the order was accepted, or why it was refused."""

    id: str
    how: str = ""
    refused: str = ""
