"""From a plan to what this node's SMP is told of it.

Runs in:  agent. Pure, but for what the SMP link holds.
Takes in: a plan, this node's id.
Gives:    a `BeginGeneration`: the protection group with the places of its SMPs, and where the
          restored version comes from for ranks whose shard is not here.
"""

from ftrun.agent.smp_link import SmpLink
from ftrun.config import RunSpec
from ftrun.ids import Rank, Version
from ftrun.wire.plan import NodeCard, Plan
from ftrun.wire.protected import NodePlace, OldGroup
from ftrun.wire.smp_messages import BeginGeneration


def begin_generation(
    plan: Plan,
    node_id: str,
    spec: RunSpec,
    restored: Version | None,
    smp: SmpLink,
    *,
    old_world_size: int,
) -> BeginGeneration:
    """What the SMP of this node is to know of a generation.

    Args:
        plan: the generation.
        node_id: this node.
        spec: of the run.
        restored: what it starts from, or the newest commit in the middle of it.
        smp: what this node holds.
        old_world_size: so many ranks took the restored version; 0: as many as there are now.
    """
    node = plan.member(node_id)
    ranks = list(node.ranks) if node is not None else []
    group = next((ids for ids in plan.groups if node_id in ids), [])
    version = (restored.generation, restored.step) if restored is not None else None
    return BeginGeneration(
        generation=plan.generation,
        world_size=plan.world_size,
        local_ranks=ranks,
        group=[_place(plan, one) for one in group] if ranks else [],
        node_id=node_id,
        parity=plan.parity,
        small_state_bytes=spec.profile.erasure.small_state_bytes,
        restored=version,
        restored_world_size=old_world_size,
        protected_in=plan.protected_in(node_id),
        restore_from=_sources(plan, ranks, restored, smp),
        read_from=_readable(plan, ranks, restored),
    )


def _sources(
    plan: Plan, ranks: list[int], restored: Version | None, smp: SmpLink
) -> list[OldGroup]:
    """The groups that held those of our ranks whose restored version is not in our memory."""
    if restored is None or restored.generation < 0:
        return []
    missing = {rank for rank in ranks if not smp.holds(Rank(rank), restored)}
    if plan.is_resized:
        missing = set(range(plan.restore_world_size))  # any rank may need a part of any other
    return [
        group
        for group in _old_groups(plan)
        if missing & {rank for node in group.nodes for rank in node.ranks}
    ]


def _readable(plan: Plan, ranks: list[int], restored: Version | None) -> list[OldGroup]:
    """Who holds what any rank has saved of the restored version, or has it from now on.

    The nodes of this generation come first: each gets or has loaded the shards of its own ranks,
    and when the version is committed again nothing but that need be left.
    """
    if restored is None or not ranks or plan.is_resized or len(plan.members) < 2:
        return []
    members = OldGroup([_place(plan, node.node_id) for node in plan.members], 0, -1)
    return [members, *(_old_groups(plan) if restored.generation >= 0 else [])]


def _old_groups(plan: Plan) -> list[OldGroup]:
    """The groups that held the restored version."""
    return [
        OldGroup(
            nodes=[
                _place(plan, one, held)
                for one, held in zip(source.node_ids, source.ranks, strict=True)
            ],
            parity=source.parity,
            generation=source.generation,
        )
        for source in plan.sources
    ]


def _place(plan: Plan, node_id: str, ranks: list[int] | None = None) -> NodePlace:
    """Where a node's SMP is now; a port of 0 where the node is not here."""
    card = plan.card(node_id)
    if card is None:
        return NodePlace(node_id, 0, "", 0, ranks or [])
    held = ranks if ranks is not None else _ranks(plan, card)
    return NodePlace(node_id, card.incarnation, card.host, plan.smp_ports.get(node_id, 0), held)


def _ranks(plan: Plan, card: NodeCard) -> list[int]:
    node = plan.member(card.node_id)
    return list(node.ranks) if node is not None else []
