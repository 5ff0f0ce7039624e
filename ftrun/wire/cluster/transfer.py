"""Messages between the SMPs of several nodes.

Runs in:  the SMP. Pure: values only; `ftrun.wire.transport.bulk_socket` carries them.

A message may be followed by raw bytes; "with bytes" marks these messages. A link carries messages
in one direction, so a reply arrives on the link of the other direction.
"""

import msgspec

from ftrun.wire.messages.smp import NodeAddress


class Transfer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all messages between SMPs of different nodes. Each states its tag."""


# --- any link -------------------------------------------------------------------------------


class LinkHello(Transfer, frozen=True, tag="LinkHello"):
    """First message on each link; its purpose is "protect" or "fetch".

    `session` of a "protect" link is the digest of the group with its addresses. It is equal at both
    ends, unless one end has not received the other's update yet.
    """

    generation: int
    purpose: str
    session: int = 0


# --- protecting a version -------------------------------------------------------------------


class RoundMessage(Transfer, frozen=True):
    """Base of messages about one version; `attempt` grows each time its protection restarts."""

    generation: int
    step: int
    attempt: int


class RoundSealed(RoundMessage, frozen=True, tag="RoundSealed"):
    """The sender's ranks have sealed the version."""

    plan_id: int  # id of the plan that fits the sender's layouts; 0: none, its manifest follows
    replicas: list[list[tuple[int, int]]]  # as returned by `replica_digests`
    part: int = -1
    """Generation in which this group protected the version, if the sender still stores its complete
    part of that protection; -1: it does not."""
    shares: int = 0
    """Identifies what its ranks may share; 0: nothing. All nodes of the group begin to share at the
    commit of a version of which all state the same."""


class ManifestData(RoundMessage, frozen=True, tag="ManifestData"):
    """With bytes: the sender's manifest of the version."""


class RoundOpened(RoundMessage, frozen=True, tag="RoundOpened"):
    """The sender's parity region is ready; it accepts blocks of its stripes below `below`."""

    plan_id: int
    below: int


class MirrorData(RoundMessage, frozen=True, tag="MirrorData"):
    """With bytes: the sender's small state, and what is needed to rebuild the rest."""


class BlockData(RoundMessage, frozen=True, tag="BlockData"):
    """With bytes: one block of a stripe; `header` is its packed fragment header."""

    header: bytes


class RoundStored(RoundMessage, frozen=True, tag="RoundStored"):
    """The sender has stored all mirrors and parity of the version that belong to it."""


class RoundFailed(RoundMessage, frozen=True, tag="RoundFailed"):
    """The sender cannot store its part of the version, for this reason."""

    reason: str


# --- fetching a version ---------------------------------------------------------------------


class FetchPeers(Transfer, frozen=True, tag="FetchPeers"):
    """First message on a "fetch" link: all participants, including the sender."""

    places: list[NodeAddress]


class FetchRequest(Transfer, frozen=True):
    """Base of requests about a version as a group protected it; replies have the same `request`.

    `group` is `ProtectionGroup.id`, `protected_in` the generation in which it was protected.
    """

    request: int
    generation: int
    step: int
    group: int
    protected_in: int


class GetMirror(FetchRequest, frozen=True, tag="GetMirror"):
    """Small state of the node at this position of the group. Reply: FetchData with index 0."""

    position: int


class GetShardHeader(FetchRequest, frozen=True, tag="GetShardHeader"):
    """Header and digest table of a rank's slot. Reply: FetchData with index 0."""

    rank: int


class GetPieces(FetchRequest, frozen=True, tag="GetPieces"):
    """Pieces by their digests, u64 each, from any slot. Reply per index: FetchData or FetchMissing.

    `resolved` are indexes that were answered before a connection was lost; not answered again.
    """

    digests: bytes
    resolved: list[int] = []


class GetBlock(FetchRequest, frozen=True, tag="GetBlock"):
    """The receiver's block of a stripe. Reply: FetchData with the fragment's header."""

    stripe: int


class RebuildBlock(FetchRequest, frozen=True, tag="RebuildBlock"):
    """Rebuild a lost block with the receiver's parity. Reply: FetchData or FetchMissing.

    `position` is the position of the node that has lost the block, `alive` are those that can be
    asked.
    """

    position: int
    stripe: int
    alive: list[int]


class FetchData(Transfer, frozen=True, tag="FetchData"):
    """With bytes: a reply."""

    request: int
    index: int
    header: bytes = b""


class FetchMissing(Transfer, frozen=True, tag="FetchMissing"):
    """Reply: the data is not here, or differs from the protected state."""

    request: int
    index: int
    reason: str


AnyTransfer = (
    LinkHello | RoundSealed | ManifestData | RoundOpened | MirrorData | BlockData | RoundStored
    | RoundFailed | FetchPeers | GetMirror | GetShardHeader | GetPieces | GetBlock | RebuildBlock
    | FetchData | FetchMissing
)  # fmt: skip


class TransferEnvelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message, and the raw bytes that follow it."""

    generation: int
    body: AnyTransfer
    raw_bytes: int = 0  # length of the bytes behind the message
    raw_digest: int | None = None  # their xxh3 digest; None if a fragment's header contains it
