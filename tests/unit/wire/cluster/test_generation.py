"""A plan of a large run fits one frame."""

import msgspec

from ftrun.agent.cluster.interfaces import MAX_RAILS
from ftrun.wire.cluster.generation import (
    GenerationPlan,
    NetworkPlan,
    NodeCard,
    PlanMember,
    Rail,
    RestoreSource,
    VoterSet,
)
from ftrun.wire.transport.framing import MAX_FRAME_BYTES

NODES = 1_024
PER_NODE = 8


def card(number: int) -> NodeCard:
    high, low = divmod(number, 250)
    rails = [
        Rail(
            name=f"enp{at}s0f0np0",
            host=f"10.{100 + at}.{100 + high}.{low}",
            prefix_bits=16,
            port=45_000 + at,
            speed_mbit=400_000,
            duplex="full",
            hca=f"mlx5_{at}",
        )
        for at in range(MAX_RAILS)
    ]
    return NodeCard(
        node_id=f"gpu-node-{number:04d}",
        incarnation=1 << 61,
        host=rails[0].host,
        port=rails[0].port,
        num_ranks=PER_NODE,
        domain=f"rack-{number // 16}",
        switch=f"leaf-{number // 32}",
        rails=rails,
    )


def test_a_plan_of_many_nodes_with_many_rails_fits_a_frame() -> None:
    cards = [card(number) for number in range(NODES)]
    names = [one.node_id for one in cards]
    groups = [names[at : at + 8] for at in range(0, NODES, 8)]
    ranks = [[*range(PER_NODE * at, PER_NODE * at + PER_NODE)] for at in range(NODES)]
    plan = GenerationPlan(
        generation=3,
        leader=names[0],
        reason="node gpu-node-0077 was lost",
        members=[PlanMember(one, PER_NODE * at) for at, one in enumerate(cards)],
        spares=[],
        restore=(2, 100_000),
        restore_reason="",
        store_host=cards[0].host,
        store_port=45_000,
        groups=groups,
        parity=1,
        sources=[
            RestoreSource(group, ranks[8 * at : 8 * at + 8], 1, 2)
            for at, group in enumerate(groups)
        ],
        smp_ports=dict.fromkeys(names, 45_000),
        decided_by=[VoterSet(2, [(name, 1 << 61) for name in names])],
        paths=NetworkPlan(
            order=names,
            rails=[rail.name for rail in cards[0].rails],
            leaves={one.node_id: one.switch for one in cards},
        ),
    )
    assert len(msgspec.msgpack.encode(plan)) < MAX_FRAME_BYTES - 4_096
