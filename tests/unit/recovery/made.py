"""Nodes, generations and answers for the tests of recovery."""

from collections.abc import Iterable
from typing import Any

import msgspec
from made_settings import changed, made_settings

from ftrun.config.cluster import ClusterSize, MembershipSettings
from ftrun.membership.leader.failure_detector import FailureDetector, PeerState
from ftrun.recovery.commands import JournalEntry
from ftrun.wire.cluster.generation import GenerationPlan, NodeCard, PlanMember, VersionPair
from ftrun.wire.cluster.membership import Promise
from ftrun.wire.messages.smp import GroupMember, Inventory, ProtectionPart, ShardOffer

SETTINGS = made_settings(ClusterSize(2, 4, 1), budget=5, backoff_max_s=4.0)


def settings(**changes: object) -> MembershipSettings:
    return changed(SETTINGS, **changes)


def card(node_id: str, incarnation: int = 1, **changes: object) -> NodeCard:
    """A node of one rank, which listens at its own host."""
    found = NodeCard(node_id, incarnation, f"{node_id}.local", 29400, 1)
    return msgspec.structs.replace(found, **changes)


def cards(node_ids: Iterable[str | NodeCard]) -> list[NodeCard]:
    """A card for each name; a value that is already a card stays unchanged."""
    return [one if isinstance(one, NodeCard) else card(one) for one in node_ids]


def plan(
    generation: int,
    members: Iterable[str | NodeCard],
    spares: Iterable[str | NodeCard] = (),
    **changes: object,
) -> GenerationPlan:
    """A generation of these nodes, led by the first; `"abc"` are three of one rank each."""
    placed, first_rank = [], 0
    for one in cards(members):
        placed.append(PlanMember(one, first_rank))
        first_rank += one.num_ranks
    found = GenerationPlan(
        generation=generation,
        leader=placed[0].node_id,
        reason="a test",
        members=placed,
        spares=cards(spares),
        restore=None,
        restore_reason="",
        store_host=placed[0].card.host,
        store_port=1,
    )
    return msgspec.structs.replace(found, **changes)


def promise(generation: int, node: str | NodeCard, **changes: object) -> Promise:
    """A promise of a node that knows of nothing and holds nothing."""
    found = Promise(
        generation=generation,
        card=cards([node])[0],
        effective=None,
        accepted=None,
        knows=-1,
        committed=None,
        holdings=Inventory([]),
        store_port=1000,
        smp_port=2000,
    )
    return msgspec.structs.replace(found, **changes)


def part(
    node_id: str,
    at: VersionPair,
    members: str,
    *,
    parity: int = 1,
    first_rank: int = 0,
    **changes: object,
) -> ProtectionPart:
    """One node's complete part in the protection of its group, whose nodes have one rank each."""
    place = members.index(node_id)
    found = ProtectionPart(
        generation=at[0],
        step=at[1],
        world_size=first_rank + len(members),
        protected_in=at[0],
        members=[GroupMember(one, [rank]) for rank, one in enumerate(members, first_rank)],
        parity=parity,
        node_id=node_id,
        mirrors=[members[place - back] for back in range(1, parity + 1)],
        is_complete=True,
        is_committed=False,
    )
    return msgspec.structs.replace(found, **changes)


def offer(rank: int, at: VersionPair, world_size: int) -> ShardOffer:
    return ShardOffer(rank, at[0], at[1], world_size, 4096)


def meet(
    peers: FailureDetector, node: str | NodeCard, *, now_s: float = 0.0, linked: bool = True
) -> PeerState:
    """A connected agent that receives this leader, as far as is known."""
    return peers.put(cards([node])[0], now_s=now_s, linked=linked, has_answered=True)


def fields(entry: JournalEntry) -> dict[str, Any]:
    """The fields of a journal entry, as in the journal."""
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(entry.record))
    return found
