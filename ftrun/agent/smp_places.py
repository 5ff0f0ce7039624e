"""From a plan to what this node's SMP is told of it.

Runs in:  agent. Pure.
Takes in: a plan, this node's id.
Gives:    a `BeginGeneration`: the protection group with the places of its SMPs, and where the
          shards of the restored version are.
"""

from ftrun.config import RunSpec
from ftrun.ids import Version
from ftrun.wire.plan import NodeCard, Plan
from ftrun.wire.protected import NodePlace, OldGroup
from ftrun.wire.smp_messages import BeginGeneration


def begin_generation(
    plan: Plan,
    node_id: str,
    spec: RunSpec,
    restored: Version | None,
    *,
    old_world_size: int,
) -> BeginGeneration:
    """What the SMP of this node is to know of a generation.

    Args:
        plan: the generation.
        node_id: this node.
        spec: of the run.
        restored: what it starts from, or the newest commit in the middle of it.
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
        restore_from=_sources(plan, ranks, restored),
    )


def _sources(plan: Plan, ranks: list[int], restored: Version | None) -> list[OldGroup]:
    """The groups that held the restored version: any rank may need a part of any other."""
    if restored is None or not ranks:
        return []
    if restored.generation < 0:
        # From disk: each node has loaded the shards of its own ranks, and nothing protects them.
        nodes = [_place(plan, node.node_id) for node in plan.members]
        return [OldGroup(nodes, 0, restored.generation)] if len(nodes) > 1 else []
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
