"""What a frame between two agents may hold, and the messages beside ballots and heartbeats.

Runs in:  every agent. Pure.
Takes in: what a node knows of itself.
Gives:    structs; `ClusterEnvelope` is what a frame between agents holds.
"""

import msgspec

from ftrun.wire.cluster.heartbeats import Heartbeat, LeaderHeartbeat
from ftrun.wire.cluster.membership import (
    Accept,
    Accepted,
    Join,
    JoinAccepted,
    JoinPending,
    JoinRejected,
    LeaderInfo,
    Prepare,
    PrepareRejected,
    Promise,
)
from ftrun.wire.cluster.rails import PathMeasurement
from ftrun.wire.messages.faults import ForwardFault, ForwardFaultReply
from ftrun.wire.messages.message import Message


class JournalLines(Message, frozen=True, tag="JournalLines"):
    """Member -> lead: lines of its journal, for the merged one."""

    lines: list[str]


class ClusterStatusRequest(Message, frozen=True, tag="AskClusterStatus"):
    """Member -> lead, for an operator on its node. Answer: ClusterStatus."""

    number: int


class ClusterStatusReply(Message, frozen=True, tag="ClusterStatus"):
    """Lead -> member: a JSON document."""

    number: int
    document: bytes


class ProbeLinkRequest(Message, frozen=True, tag="AskProbe"):
    """Lead -> member: measure the way from you to that node. Answer: ProbeFound."""

    number: int
    receiver: str
    host: str
    port: int


class ProbeLinkResult(Message, frozen=True, tag="ProbeFound"):
    """Member -> lead: what a probe of a link has found. A figure that is 0 is not known."""

    number: int
    receiver: str
    rtt_s: float = 0.0
    """The shortest of some."""
    to_bytes_per_s: float = 0.0
    from_bytes_per_s: float = 0.0
    problem: str = ""


class ProbePathRequest(Message, frozen=True, tag="AskRoad"):
    """Lead -> member: try the way from you to that node over one rail. Answer: RoadTried."""

    survey: int
    """Number of the survey that asks."""
    destination: str
    rail: str
    """As the run calls it."""
    name: str
    """Of your interface on it."""
    from_host: str
    """Your address on it."""
    host: str
    port: int
    is_short: bool = False
    """Only whether it is there, and the round trip."""


class ProbePathResult(Message, frozen=True, tag="RoadTried"):
    """Member -> lead: what the way is like, or why nothing could be found."""

    survey: int
    found: PathMeasurement
    is_untried: bool = False
    """The fault is this node's own, as `problem` says: nothing is known of the road."""


class RailSilent(Message, frozen=True, tag="RoadSilent"):
    """Member -> lead: I hear this node no more over this rail; said again while it is so."""

    source: str
    rail: str
    """As the run calls it."""
    silent_s: float


RoadWord = ProbeLinkResult | ProbePathResult | RailSilent

AnyClusterMessage = (
    Join
    | JoinPending
    | LeaderInfo
    | JoinAccepted
    | JoinRejected
    | Prepare
    | Promise
    | PrepareRejected
    | Accept
    | Accepted
    | Heartbeat
    | LeaderHeartbeat
    | JournalLines
    | ClusterStatusRequest
    | ClusterStatusReply
    | ForwardFault
    | ForwardFaultReply
    | ProbeLinkRequest
    | ProbeLinkResult
    | ProbePathRequest
    | ProbePathResult
    | RailSilent
)


class ClusterEnvelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message between agents, with its fencing tokens."""

    run_id: str
    generation: int
    incarnation: int
    body: AnyClusterMessage
