"""What messages say about places, slots and protection.

Runs in: agent and SMP. Pure: values only, part of the messages in `messages.py`.
"""

import msgspec

from ftrun.wire.cluster.rails import Rail


class NodeAddress(msgspec.Struct, frozen=True):
    """A node of a group: who it is, where its SMP listens, which ranks it runs.

    A port of 0 means that it is gone.
    """

    node_id: str
    incarnation: int
    host: str
    smp_port: int
    ranks: list[int]
    rails: list[Rail] = []
    """By which it is reached, the best first; empty: `host` is all there is."""


class PreviousGroup(msgspec.Struct, frozen=True):
    """What protects a version that is to be fetched: its nodes in the order they had then.

    Args:
        nodes: with the ranks each held then, and where its SMP is now.
        parity: m.
        generation: the one in which the version was protected, see `ProtectionPart.protected_in`.
    """

    nodes: list[NodeAddress]
    parity: int
    generation: int


class ShardOffer(msgspec.Struct, frozen=True):
    """One sealed slot."""

    rank: int
    generation: int
    step: int
    world_size: int
    image_bytes: int


class GroupMember(msgspec.Struct, frozen=True):
    """A node of a protection group and the ranks whose state it brought in."""

    node_id: str
    ranks: list[int]


class ProtectionPart(msgspec.Struct, frozen=True):
    """This node's part in the protection of one version by one group.

    Args:
        generation: of the version.
        step: of the version.
        world_size: of the version.
        protected_in: the generation in which the group has protected it. With the version and
            the members it names the protection: parts with equal names fit together.
        members: the group in its order; the position in it is the place in each stripe.
        parity: m.
        node_id: whose part this is.
        mirrors: nodes whose small state is here; without one of it a node cannot be rebuilt.
        is_complete: all mirrors and parity that belong here are here.
        is_committed: it was committed with this protection.
    """

    generation: int
    step: int
    world_size: int
    protected_in: int
    members: list[GroupMember]
    parity: int
    node_id: str
    mirrors: list[str]
    is_complete: bool
    is_committed: bool
