"""Values in messages that describe addresses, slots and protection.

Runs in:  agent and SMP. Pure; part of the messages in `envelope.py`.
"""

import msgspec

from ftrun.wire.cluster.rails import Rail


class NodeAddress(msgspec.Struct, frozen=True):
    """A node of a group: its identity, the address of its SMP, and the ranks that it runs.

    A port of 0 means that the node is unreachable.
    """

    node_id: str
    incarnation: int
    host: str
    smp_port: int
    ranks: list[int]
    rails: list[Rail] = []
    """Rails over which the node is reachable, the best first; empty: only `host` is known."""


class PreviousGroup(msgspec.Struct, frozen=True):
    """The group that protects a version to be fetched, with its nodes in their order at that time.

    Args:
        nodes: with the ranks that each held then, and the current address of its SMP.
        parity: m.
        generation: in which the version was protected, see `ProtectionPart.protected_in`.
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
    """A node of a protection group, and the ranks whose state it contributed."""

    node_id: str
    ranks: list[int]


class ProtectionPart(msgspec.Struct, frozen=True):
    """This node's part in the protection of one version by one group.

    Args:
        generation: of the version.
        step: of the version.
        world_size: of the version.
        protected_in: generation in which the group has protected it. Together with the version and
            the members it identifies the protection: parts with equal identity belong together.
        members: the group in order; the position in it is the position in each stripe.
        parity: m.
        node_id: of the node whose part this is.
        mirrors: nodes whose small state is stored here. A node without any mirror cannot be
            rebuilt.
        is_complete: all mirrors and parity that belong here are stored.
        is_committed: the version was committed with this protection.
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
