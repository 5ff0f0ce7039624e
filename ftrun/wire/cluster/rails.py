"""Structs about the paths between nodes: rails, measurements, and the network plan.

Runs in:  every agent; node cards, plans and messages contain these structs. Pure.
"""

import msgspec


class Rail(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One interface of a node over which other nodes can reach it."""

    name: str
    """Name of the interface, such as eth0 or ib0: a value for GLOO_SOCKET_IFNAME."""
    host: str
    """Address of the interface."""
    prefix_bits: int = 0
    """Prefix length of its network; 0: not known."""
    port: int = 0
    """Port on which this node's agent listens at that address."""
    speed_mbit: int = 0
    """As reported by the driver; 0: not reported."""
    duplex: str = ""
    """`full`, `half`, or empty if the driver does not report it."""
    hca: str = ""
    """RDMA device of the interface, such as mlx5_0: a value for NCCL_IB_HCA."""


class PathMeasurement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of one short transfer from one node to another over one rail.

    A value of 0 is not known.
    """

    source: str
    """Node id."""
    destination: str
    rail: str
    """Name of the rail in this run: the name of the source's interface."""
    rtt_s: float = 0.0
    """Shortest of several round trips."""
    bytes_per_s: float = 0.0
    """From source to destination."""
    problem: str = ""
    """Why no result, or no rate, was found. A path with a problem and no round trip is dead."""
    is_unreached: bool = False
    """No connection was established, and no kernel refused one."""


class NetworkPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rails, node order and snapshot rail chosen for one generation, with reasons."""

    order: list[str] = []
    """Node ids in the order of their ranks."""
    rails: list[str] = []
    """Rails that training uses; no other rail is used."""
    dropped: dict[str, str] = {}
    """Rails that training does not use, each with the reason."""
    snapshot_rail: str = ""
    """Rail between the SMPs; empty: the rail between the agents."""
    snapshot_bytes_per_s: int = 0
    """Limit of each node's snapshot traffic if it shares a training rail; 0: no limit."""
    leaves: dict[str, str] = {}
    """Leaf switch of each node, if known, by node id."""
    leaves_from: str = ""
    """Source of the leaf switches: `labels`, `file`, `slurm`, `probes`; empty: not known."""
    words: list[str] = []
    """Decisions and their reasons, one sentence each, for people."""
