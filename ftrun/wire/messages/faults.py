"""What is said about faults on order: cli -> agent, agent -> the agent of another node.

Runs in: cli, agent; the order itself also in the worker. Pure.
"""

import msgspec

from ftrun.wire.messages.message import Message


class FaultOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is to be done to whom, and when.

    Args:
        id: of this order, in the journal.
        kind: a name of the catalogue in fault_kinds.py.
        rank: whom it is done to; -1 where it is done to a node.
        node: name of the node, or its place in the run; empty: the only one, or the rank's.
        at_step: at the end of this step of the run, counted from 1; 0: now.
        for_s: how long it lasts; 0: as long as its kind does by itself.
        amount: how much; what it means depends on the kind.
        again: also in the rank's next processes, each time the step comes.
        cancels: take back the order of this id instead; there is no kind then.
    """

    id: str
    kind: str
    rank: int = -1
    node: str = ""
    at_step: int = 0
    for_s: float = 0.0
    amount: float = 0.0
    again: bool = False
    cancels: str = ""

    @property
    def fires_again(self) -> bool:
        return self.again or self.kind == "poison-batch"


class InjectFault(Message, frozen=True, tag="InjectFault"):
    """Cli -> agent. Answer: FaultTaken, or Refused with what is missing."""

    order: FaultOrder


class FaultAccepted(Message, frozen=True, tag="FaultTaken"):
    """Agent -> cli: it is ordered; the journal says when it fires.

    Args:
        id: of the order.
        node: where it is done.
        how: in words.
    """

    id: str
    node: str
    how: str


class ForwardFault(Message, frozen=True, tag="FaultOrdered"):
    """Agent -> the agent of the node where it is to be done. Answer: FaultAnswer."""

    order: FaultOrder


class ForwardFaultReply(Message, frozen=True, tag="FaultAnswer"):
    """The answer: taken, and how, or refused, and why."""

    id: str
    how: str = ""
    refused: str = ""
