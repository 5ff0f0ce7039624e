"""Records of the nodes: members, leader, what a node waits for, connections."""

from ftrun.monitor.node_fitness import NodeFitness
from ftrun.records.note import Note, Seconds, Whole


class NodeNote(Note, frozen=True):
    """A record of one node."""

    node_id: str


class BallotStarted(Note, frozen=True, tag="ballot_started"):
    """A generation is proposed."""

    generation: Whole


class GenerationChosen(Note, frozen=True, tag="generation_chosen"):
    """A generation is chosen."""

    reason: str
    generation: Whole
    world_size: Whole
    restored: tuple[int, int] | None  # generation and step; None: nothing in memory
    restore_reason: str
    skip_batches: int = 0  # batches that its ranks leave out


class RanksStayed(Note, frozen=True, tag="ranks_stayed"):
    """After a failure, these ranks keep their processes; without any, the text has the reason."""

    generation: Whole
    staying: tuple[Whole, ...]
    started: tuple[Whole, ...]  # ranks in new processes


class VotersChanged(Note, frozen=True, tag="voters_changed"):
    """Other nodes decide about the next generation."""

    voter_revision: int


class TwoVotersWarning(Note, frozen=True, tag="two_voters_warning"):
    """Two nodes without a spare cannot distinguish a dead node from a lost link."""


class NodeJoined(NodeNote, frozen=True, tag="node_joined"):
    """A node is connected to the leader."""

    host: str


class NodeLost(NodeNote, frozen=True, tag="node_lost"):
    """A node was declared lost."""

    was_member: bool  # it ran ranks


class NodeLeft(NodeNote, frozen=True, tag="node_left"):
    """A node has drained and ended."""


class NodesDraining(Note, frozen=True, tag="nodes_draining"):
    """Nodes got SIGTERM, and the run continues without them."""


class LeaderLost(Note, frozen=True, tag="leader_lost"):
    """This node has no leader any more."""


class SteppedDown(Note, frozen=True, tag="stepped_down"):
    """This node led, and another one leads now."""


class WaitingForNodes(Note, frozen=True, tag="waiting_for_nodes"):
    """A node waits for others."""


class RunPaused(Note, frozen=True, tag="run_paused"):
    """The run waits for nodes: too few to run, to decide, or to restore."""


class ConnectionFailedOver(Note, frozen=True, tag="connection_failed_over"):
    """A node is reached over another rail than that of its card."""

    to: str
    host: str
    instead_of: str


class WitnessUnreachable(Note, frozen=True, tag="witness_unreachable"):
    """The etcd does not answer."""


class WitnessReachable(Note, frozen=True, tag="witness_reachable"):
    """The etcd answers again."""


class PreflightFinished(Note, frozen=True, tag="preflight_finished"):
    """This node has checked itself."""

    fitness: NodeFitness


class NodeUnfit(NodeNote, frozen=True, tag="node_unfit"):
    """A node may not run ranks."""


class NodeFit(NodeNote, frozen=True, tag="node_fit"):
    """A node may run ranks again."""


class NodeReadmitted(NodeNote, frozen=True, tag="node_readmitted"):
    """The exclusion of a node ended before its time."""


class NodeBelowMedian(NodeNote, frozen=True, tag="node_below_median"):
    """The rates of a node are far below those of the others."""


class CollectiveFinished(Note, frozen=True, tag="collective_finished"):
    """An all-reduce among new nodes has ended."""

    nodes: tuple[str, ...]
    is_complete: bool
    is_wrong: bool


class WrongSumFound(NodeNote, frozen=True, tag="wrong_sum_found"):
    """A node has computed a wrong sum, or a link from it has changed bytes."""


class PathsProbed(Note, frozen=True, tag="paths_probed"):
    """The paths between the nodes were probed."""

    coverage: Seconds  # share of the paths that have a result
    findings: int


class PathFinding(Note, frozen=True, tag="path_finding"):
    """A path, a rail or a leaf switch is dead, slow or mismatched."""

    culprit: str
    finding: str


class NetworkPlanRecord(Note, frozen=True, tag="network_plan"):
    """What was planned for a generation."""

    is_applied: bool
    order: tuple[str, ...]
    rails: tuple[str, ...]


class NetworkPlanDisabled(Note, frozen=True, tag="network_plan_disabled"):
    """A bug of ftrun has cost the network plan."""
