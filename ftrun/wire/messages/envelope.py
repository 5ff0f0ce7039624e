"""Envelope of frames on a node, and messages that every process uses.

Runs in:  every process. Pure.

An `Envelope` states the run, the generation, and the incarnation of the sender. A receiver drops
messages that are older than its own state. Descriptors accompany a message (SCM_RIGHTS);
`Envelope.num_fds` is their number.
"""

import msgspec

from ftrun.wire.messages.checkpoint import CheckpointMessage
from ftrun.wire.messages.faults import FaultAccepted, InjectFault
from ftrun.wire.messages.files import FileMessage
from ftrun.wire.messages.message import Message
from ftrun.wire.messages.smp import SmpMessage
from ftrun.wire.messages.worker import WorkerMessage

PROTOCOL_VERSION = 1


class Hello(Message, frozen=True, tag="Hello"):
    """First message on each connection to an SMP or an agent."""

    role: str  # "worker", "agent" or "cli"
    pid: int
    rank: int = -1
    protocol: int = PROTOCOL_VERSION


class Done(Message, frozen=True, tag="Done"):
    """Reply: the request was carried out."""


class Refused(Message, frozen=True, tag="Refused"):
    """Reply: the request was not carried out; the reason is in words for the user."""

    reason: str


# --- cli -> agent or orphaned SMP -------------------------------------------------------------


class StatusRequest(Message, frozen=True, tag="StatusRequest"):
    """Cli -> agent or SMP. Reply: StatusReply."""


class StatusReply(Message, frozen=True, tag="StatusReply"):
    """Agent or SMP -> cli: a JSON document, see docs/operations.md."""

    document: bytes


class StopRequest(Message, frozen=True, tag="StopRequest"):
    """Cli -> agent: stop as on SIGTERM. Reply: Done, sent before the stop is complete."""


class ReadmitRequest(Message, frozen=True, tag="ReadmitRequest"):
    """Cli -> agent: end the exclusion of a node. Reply: Done, when the leader is asked to."""

    node_id: str


class DrainRequest(Message, frozen=True, tag="DrainRequest"):
    """Cli -> agent: have a node leave the run. Reply: Done, when it is asked to."""

    node_id: str


AnyMessage = (
    Hello | Done | Refused | StatusRequest | StatusReply | StopRequest | ReadmitRequest
    | DrainRequest
    | InjectFault | FaultAccepted | CheckpointMessage | FileMessage | SmpMessage | WorkerMessage
)  # fmt: skip


class Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message with its fencing tokens."""

    run_id: str
    generation: int
    incarnation: int
    body: AnyMessage
    num_fds: int = 0
    question: int = 0  # number of a question, also in its reply; 0: neither of them
