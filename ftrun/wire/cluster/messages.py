"""Envelope of frames between agents, and messages other than ballots and heartbeats."""

import msgspec

from ftrun.wire.cluster.generation import PathMeasurement
from ftrun.wire.cluster.membership import MembershipMessage
from ftrun.wire.messages.faults import ForwardFault, ForwardFaultReply
from ftrun.wire.messages.message import Message


class JournalLines(Message, frozen=True, tag="JournalLines"):
    """Member -> leader: lines of its journal, for the merged journal."""

    lines: list[str]


class ClusterStatusRequest(Message, frozen=True, tag="ClusterStatusRequest"):
    """Member -> leader, for an operator on its node. Reply: ClusterStatusReply."""

    number: int


class ClusterStatusReply(Message, frozen=True, tag="ClusterStatusReply"):
    """Leader -> member: a JSON document."""

    number: int
    document: bytes


class ReadmitNode(Message, frozen=True, tag="ReadmitNode"):
    """Member -> leader, for an operator on its node: end the exclusion of a node. No reply."""

    node_id: str


class DrainNode(Message, frozen=True, tag="DrainNode"):
    """Member -> leader -> that node, for an operator: leave the run. No reply."""

    node_id: str
    by: str


class ProbeLinkRequest(Message, frozen=True, tag="ProbeLinkRequest"):
    """Leader -> member: measure the link to that node. Reply: ProbeLinkResult."""

    number: int
    receiver: str
    host: str
    port: int


class ProbeLinkResult(Message, frozen=True, tag="ProbeLinkResult"):
    """Member -> leader: result of a link probe. A value of 0 is not known."""

    number: int
    receiver: str
    rtt_s: float = 0.0  # shortest of several round trips
    to_bytes_per_s: float = 0.0
    from_bytes_per_s: float = 0.0
    problem: str = ""


class ProbePathRequest(Message, frozen=True, tag="ProbePathRequest"):
    """Leader -> member: measure the path to that node over one rail. Reply: ProbePathResult."""

    survey: int  # number of the survey that requests it
    destination: str
    rail: str  # name of the rail in this run
    name: str  # name of the member's interface on that rail
    from_host: str  # address of the member on that rail
    host: str
    port: int
    is_short: bool = False  # measure only reachability and round trip


class ProbePathResult(Message, frozen=True, tag="ProbePathResult"):
    """Member -> leader: measurement of a path, or the reason why there is none."""

    survey: int
    found: PathMeasurement
    is_untried: bool = False  # a fault of this node, see `problem`; it says nothing about the path


class RailUnresponsive(Message, frozen=True, tag="RailUnresponsive"):
    """Member -> leader, repeated: nothing arrives from this node over this rail."""

    source: str
    rail: str  # name of the rail in this run
    unresponsive_s: float


PathReport = ProbeLinkResult | ProbePathResult | RailUnresponsive

AnyClusterMessage = (
    MembershipMessage | JournalLines | ClusterStatusRequest | ClusterStatusReply | ForwardFault
    | ForwardFaultReply | ProbeLinkRequest | ProbeLinkResult | ProbePathRequest | ProbePathResult
    | RailUnresponsive | ReadmitNode | DrainNode
)  # fmt: skip


class ClusterEnvelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message between agents, with its fencing tokens."""

    run_id: str
    generation: int
    incarnation: int
    body: AnyClusterMessage
