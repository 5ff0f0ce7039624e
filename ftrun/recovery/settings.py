"""The settings of membership, as plain numbers; ftrun/config.py describes them.

Runs in:  every agent. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ftrun.monitor.wait_graph import HangSettings


@dataclass(frozen=True, slots=True)
class ClusterSize:
    """The requested number of nodes of a run."""

    min_nodes: int
    max_nodes: int
    spares: int

    def __str__(self) -> str:
        return f"{self.min_nodes}:{self.max_nodes}+{self.spares}"

    def refusal(self, other: str) -> str:
        """Why a node that was started with other numbers is rejected; empty if it is not."""
        if other == str(self):
            return ""
        return (
            f"it was started with --nnodes/--spares {other}, and this run with {self}. "
            "Give the same to every node"
        )


@dataclass(frozen=True, slots=True)
class SlowSettings:
    """The reaction to a node that slows the others down."""

    action: str = "report"
    evict_after_s: float = 30.0


@dataclass(frozen=True, slots=True)
class NetworkSettings:
    """The use of the paths between nodes."""

    plan: str = "off"
    """`off`, `report` or `on`."""
    rails: tuple[str, ...] = ()
    """Interfaces that the user has named; empty: all that were found."""
    topology: object = None
    """A topology file, as its parser returns it."""
    slurm_topology: str = ""
    """The text of Slurm's topology.conf."""
    user_env: Mapping[str, str] = field(default_factory=dict)
    """The variables set by the user, of those that a network plan may set."""


@dataclass(frozen=True, slots=True)
class MembershipSettings:
    """Times in seconds. A run on one node has one voter and needs none of them."""

    wishes: ClusterSize
    endpoint: tuple[str, int] = ("", 0)
    """Where the first leader is expected; port 0: there is none."""
    more_endpoints: tuple[tuple[str, int], ...] = ()
    """Further endpoints at which a node looks for the run."""
    heartbeat_s: float = 0.5
    deadline_s: float = 3.0
    cut_off_s: float = 2.0
    pause_limit_s: float = 900.0
    join_wait_s: float = 900.0
    settle_s: float = 5.0
    blank_wait_s: float = 2.0
    """Time that a new agent at the endpoint waits for a leader that looks for it."""
    redial_s: float = 0.5
    answer_s: float = 30.0
    """Time that one connected node that does not answer may delay all others."""
    failures_per_hour: int = 3
    erasure_data: int | None = None
    erasure_parity: int = 0
    """m; 0: chosen by the number of nodes."""
    erasure: bool = True
    has_checkpoints: bool = False
    """A checkpoint directory exists, so lost state may be restored from it."""
    checkpoint_every_s: float = 0.0
    """Time between two checkpoints of a run over several nodes; 0: the leader orders none."""
    hang: HangSettings = field(default_factory=HangSettings)
    slow: SlowSettings = SlowSettings()
    network: NetworkSettings = field(default_factory=NetworkSettings)
    warn_below: float = 0.5
    """A node whose check rate is below this fraction of the other nodes' median is reported."""
    leave_s: float = 15.0
    """After this time the run continues without a last snapshot of a draining node. Such a node is
    killed after twice this time."""
    witness: bool = False
    """The run has a witness: nodes find each other there, and it breaks ties."""
    same_boundary_s: float = 1.0
    """How far ahead a common boundary is named: longer than a heartbeat period and its delivery."""

    @property
    def endpoints(self) -> list[tuple[str, int]]:
        return [one for one in (self.endpoint, *self.more_endpoints) if one[1]]

    @property
    def let_go_s(self) -> float:
        """A draining node ends after this time at the latest.

        It is longer than `leave_s`, because the generation that begins then fetches what that node
        holds.
        """
        return self.leave_s * 5 / 3
