"""What nodes say of their ways to each other: rails, and what probes found on them.

Runs in:  every agent; cards, plans and messages hold these. Pure.
Takes in: nothing.
Gives:    structs without behaviour.
"""

import msgspec


class Rail(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One interface of a node that other nodes can be reached by."""

    name: str
    """Of the interface, such as eth0 or ib0: what GLOO_SOCKET_IFNAME takes."""
    host: str
    """Its address."""
    prefix_bits: int = 0
    """Of the network it lies in; 0: not known."""
    port: int = 0
    """Where this node's agent listens on that address."""
    speed_mbit: int = 0
    """As the driver tells; 0: it does not."""
    duplex: str = ""
    """`full`, `half`, or empty where the driver does not tell."""
    hca: str = ""
    """The RDMA device behind it, such as mlx5_0: what NCCL_IB_HCA takes."""


class PathMeasurement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one short transfer from one node to another over one rail has found.

    A figure that is 0 is not known.
    """

    source: str
    """Node id."""
    destination: str
    rail: str
    """As the run calls it: the name of the source's interface."""
    rtt_s: float = 0.0
    """The shortest of some."""
    bytes_per_s: float = 0.0
    """From source to destination."""
    problem: str = ""
    """Why nothing, or no rate, could be found; a road with a problem and no round trip is dead."""
    is_unreached: bool = False
    """No connection was made, and no kernel refused one."""


class NetworkPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was chosen for one generation, and why."""

    order: list[str] = []
    """Node ids in the order of their ranks."""
    rails: list[str] = []
    """Those that training uses; all others are left alone."""
    dropped: dict[str, str] = {}
    """Rails that training does not use, each with the reason."""
    snapshot_rail: str = ""
    """That the SMPs use among each other; empty: the one that agents speak over."""
    snapshot_bytes_per_s: int = 0
    """What each node's snapshot traffic is held to where it shares a training rail; 0: nothing."""
    leaves: dict[str, str] = {}
    """Leaf switch of each node, where it is known: by node id."""
    leaves_from: str = ""
    """How that is known: `labels`, `file`, `slurm`, `probes`; empty: it is not."""
    words: list[str] = []
    """What was chosen and why, one sentence each, for people."""
