"""What the SMPs of several nodes say to each other.

Runs in:  the SMP. Pure: values only; `transfer_socket.py` carries them.

A message may have raw bytes behind it; "with bytes" says which. A link carries them in one
direction, so an answer comes on the link that goes the other way.
"""

import msgspec

from ftrun.wire.messages.protected import NodeAddress


class Transfer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all messages between SMPs of different nodes. Each states its tag."""


# --- any link -------------------------------------------------------------------------------


class LinkHello(Transfer, frozen=True, tag="LinkHello"):
    """First on each link: what it is for.

    Args:
        purpose: "protect" or "fetch".
        session: of a link to protect: digest of the group with its places; both ends have the
            same, or one of them has not heard of the other's news yet.
    """

    generation: int
    purpose: str
    session: int = 0


# --- protecting a version -------------------------------------------------------------------


class RoundMessage(Transfer, frozen=True):
    """About one version; `attempt` grows each time its protection begins again."""

    generation: int
    step: int
    attempt: int


class RoundSealed(RoundMessage, frozen=True, tag="Sealed"):
    """My ranks have sealed it.

    Args:
        plan_id: the plan that fits my layouts; 0: none, my manifest follows.
        replicas: as `replica_digests` gives them.
        part: I have my whole part of it from that generation, by this group; -1: I have not.
    """

    plan_id: int
    replicas: list[list[tuple[int, int]]]
    part: int = -1


class ManifestData(RoundMessage, frozen=True, tag="ManifestOf"):
    """With bytes: my manifest of it."""


class RoundOpened(RoundMessage, frozen=True, tag="Open"):
    """My vault is ready for it; of the stripes I gather you may send those below `below`."""

    plan_id: int
    below: int


class MirrorData(RoundMessage, frozen=True, tag="MirrorOf"):
    """With bytes: my small state and what is needed to rebuild the rest."""


class BlockData(RoundMessage, frozen=True, tag="BlockOf"):
    """With bytes: one block of a stripe; `header` is its packed fragment header."""

    header: bytes


class RoundStored(RoundMessage, frozen=True, tag="Stored"):
    """All mirrors and parity of it that belong to me are here."""


class RoundFailed(RoundMessage, frozen=True, tag="Unable"):
    """I cannot keep my part of it, and why."""

    why: str


# --- fetching a version ---------------------------------------------------------------------


class FetchPeers(Transfer, frozen=True, tag="Meet"):
    """First on a link to fetch: who takes part, the sender among them."""

    places: list[NodeAddress]


class FetchRequest(Transfer, frozen=True):
    """About a version as a group protected it; answers carry the same `request`.

    Args:
        group: `Group.id` of its members.
        protected_in: the generation in which it was protected.
    """

    request: int
    generation: int
    step: int
    group: int
    protected_in: int


class GetMirror(FetchRequest, frozen=True, tag="AskMirror"):
    """The small state of the node at this place of the group. Answer: Found with index 0."""

    place: int


class GetShardHeader(FetchRequest, frozen=True, tag="AskHead"):
    """Header and digest table of a rank's slot. Answer: Found with index 0."""

    rank: int


class GetPieces(FetchRequest, frozen=True, tag="AskPieces"):
    """Pieces by their digests, u64 each, from any slot. Found or NotHeld for each index.

    Args:
        settled: indexes that were answered before a connection was lost; not answered again.
    """

    digests: bytes
    settled: list[int] = []


class GetBlock(FetchRequest, frozen=True, tag="AskUnit"):
    """Your block of a stripe, data or parity. Answer: Found with the fragment's header."""

    stripe: int


class RebuildBlock(FetchRequest, frozen=True, tag="AskRebuilt"):
    """Rebuild a block of the node at `place` out of your parity. Found or NotHeld.

    Args:
        place: of the node that has lost it.
        stripe: in which the block lies.
        alive: places of the group that can be asked.
    """

    place: int
    stripe: int
    alive: list[int]


class FetchData(Transfer, frozen=True, tag="Found"):
    """With bytes: an answer."""

    request: int
    index: int
    header: bytes = b""


class FetchMissing(Transfer, frozen=True, tag="NotHeld"):
    """An answer: not here, or not as it was protected."""

    request: int
    index: int
    why: str


AnyTransfer = (
    LinkHello
    | RoundSealed
    | ManifestData
    | RoundOpened
    | MirrorData
    | BlockData
    | RoundStored
    | RoundFailed
    | FetchPeers
    | GetMirror
    | GetShardHeader
    | GetPieces
    | GetBlock
    | RebuildBlock
    | FetchData
    | FetchMissing
)


class TransferEnvelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message, and what follows it.

    Args:
        generation: the running one.
        raw_bytes: length of the bytes behind the message.
        raw_digest: their xxh3; where a fragment's header has it, it is not said twice.
    """

    generation: int
    body: AnyTransfer
    raw_bytes: int = 0
    raw_digest: int | None = None
