"""The numbers that membership goes by; config.py has the words.

Runs in:  every agent. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ftrun.monitor.deadlines import HangSettings


@dataclass(frozen=True, slots=True)
class ClusterSize:
    """How many nodes a run is to have."""

    min_nodes: int
    max_nodes: int
    spares: int

    def __str__(self) -> str:
        return f"{self.min_nodes}:{self.max_nodes}+{self.spares}"

    def refusal(self, other: str) -> str:
        """Why a node that was started with other numbers is turned away; empty: it is not."""
        if other == str(self):
            return ""
        return (
            f"it was started with --nnodes/--spares {other}, and this run with {self}. "
            "Give the same to every node"
        )


@dataclass(frozen=True, slots=True)
class SlowSettings:
    """What is done about a node that holds the others up."""

    action: str = "report"
    evict_after_s: float = 30.0


@dataclass(frozen=True, slots=True)
class NetworkSettings:
    """What is done about the ways between nodes."""

    plan: str = "off"
    """`off`, `report` or `on`."""
    rails: tuple[str, ...] = ()
    """Interfaces that the user has named; empty: all that were found."""
    topology: object = None
    """A topology file, as its parser gives it."""
    slurm_topology: str = ""
    """The text of Slurm's topology.conf."""
    user_env: Mapping[str, str] = field(default_factory=dict)
    """Of the variables that a plan may set, those that the user has set."""


@dataclass(frozen=True, slots=True)
class MembershipSettings:
    """Times in seconds. A run on one node has one voter and needs none of them."""

    wishes: ClusterSize
    endpoint: tuple[str, int] = ("", 0)
    """Where the first leader is expected; port 0: there is none."""
    more_endpoints: tuple[tuple[str, int], ...] = ()
    """Where a node looks for the run too."""
    heartbeat_s: float = 0.5
    deadline_s: float = 3.0
    cut_off_s: float = 2.0
    pause_limit_s: float = 900.0
    join_wait_s: float = 900.0
    settle_s: float = 5.0
    blank_wait_s: float = 2.0
    """A newcomer at the endpoint waits so long for a lead that looks for it."""
    redial_s: float = 0.5
    answer_s: float = 30.0
    """How long one node that is there, but does not answer, may keep all others waiting."""
    failures_per_hour: int = 3
    erasure_data: int | None = None
    erasure_parity: int = 0
    """m; 0: chosen by the number of nodes."""
    erasure: bool = True
    has_checkpoints: bool = False
    """There is a place for checkpoints, so a state that is lost may be there."""
    checkpoint_every_s: float = 0.0
    """Between two checkpoints of a run over several nodes; 0: none, or they are not the lead's."""
    hang: HangSettings = field(default_factory=HangSettings)
    slow: SlowSettings = SlowSettings()
    network: NetworkSettings = field(default_factory=NetworkSettings)
    warn_below: float = 0.5
    """Part of the other nodes' median rate in their checks that is reported."""
    leave_s: float = 15.0
    """After this the run goes on without a last snapshot of a node that was asked to leave. Such a
    node is killed after twice this time."""
    witness: bool = False
    """There is an outside witness; nodes find one another there, and it breaks ties."""
    same_boundary_s: float = 1.0
    """How far ahead a common boundary is named: longer than a heartbeat and its way."""

    @property
    def endpoints(self) -> list[tuple[str, int]]:
        """All there are."""
        return [one for one in (self.endpoint, *self.more_endpoints) if one[1]]

    @property
    def let_go_s(self) -> float:
        """A node that was asked to leave ends after this time at the latest.

        Later than `leave_s`: the generation that begins then fetches what that node holds.
        """
        return self.leave_s * 5 / 3
