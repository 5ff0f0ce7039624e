"""A run without faults on many nodes: the cost of its control messages and of its leader's work.

The real code encodes, seals, checks and decodes every message, each for its own connection. A clock
from outside, the only one in a simulation, measures the leader's computing time. Messages are not
encoded while the run starts: a plan with all nodes, once for each node, would take most of the time
and is not measured here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from made_settings import made_settings

from ftrun.config.cluster import ClusterSize
from ftrun.wire.cluster.messages import AnyClusterMessage, ClusterEnvelope
from ftrun.wire.transport.framing import (
    PREFIX_BYTES,
    body_length,
    check_body,
    decode_body,
    encode_body,
    seal_header,
)
from simulation.network import Network
from simulation.run import Simulation
from simulation.scenario import Scenario
from simulation.world import Violation

if TYPE_CHECKING:
    from simulation.node import Agent
    from simulation.world import World

RANKS_PER_NODE = 8
HEARTBEAT_S = 0.5
STEP_S = 1.0
SNAPSHOT_EVERY = 10
"""In steps."""
WINDOW_S = SNAPSHOT_EVERY * STEP_S
"""Time in which one version is taken, protected and committed."""
_TICK_S = 0.25
_BEGINS_WITHIN_S = 120.0
_FIRST_STEPS = 2
_EVENTS_PER_NODE = 5_000
_KEY = bytes(range(32))
_decoder = msgspec.msgpack.Decoder(ClusterEnvelope)


@dataclass(frozen=True)
class Traffic:
    """The cost over the window of a run without faults with this number of nodes."""

    nodes: int
    bytes_per_node_s: float
    messages_per_node_s: float
    leader_cpu: float
    """Seconds of the leader's computing per second: deciding, encoding, sealing and decoding."""
    leader_decides: float
    """The part of it that is spent on decisions."""
    leader_us_per_message: float
    """Microseconds per message that the leader sends or receives."""
    plan_bytes: int
    """Bytes of one announcement of a generation, which goes to each node."""


class Meter:
    """The leader whose time is measured, and the measured time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.leader: Agent | None = None
        """None while the run starts."""
        self.decides_s = 0.0
        self.codes_s = 0.0
        self.num_messages = 0

    def watch(self, leader: "Agent") -> None:
        self.leader = leader
        handle = leader.member.handle

        def timed(*args: Any, **also: Any) -> Any:
            started_s = self.clock()
            found = handle(*args, **also)
            self.decides_s += self.clock() - started_s
            return found

        leader.member.handle = timed  # type: ignore[method-assign]

    def coded(self, agent: "Agent", started_s: float) -> None:
        if agent is self.leader:
            self.codes_s += self.clock() - started_s
            self.num_messages += 1


class _Unencoded:
    """A message while the run starts."""

    def __init__(self, body: AnyClusterMessage) -> None:
        self.body = body

    def __len__(self) -> int:
        return 0


class MeteredNetwork(Network):
    """Messages in sealed frames, after the start."""

    def __init__(self, world: "World", *, unruly: float) -> None:
        super().__init__(world, unruly=unruly)
        self.meter: Meter | None = None

    def _encode(self, agent: "Agent", body: AnyClusterMessage) -> Any:
        meter = self.meter
        if meter is None or meter.leader is None:
            return _Unencoded(body)
        started_s = meter.clock()
        generation = max(0, agent.member.follower.generation)
        reported = encode_body(ClusterEnvelope("run", generation, agent.card.incarnation, body))
        data = seal_header(_KEY, 1, reported)
        meter.coded(agent, started_s)
        return data

    def _decode(self, agent: "Agent", data: Any) -> AnyClusterMessage:
        if isinstance(data, _Unencoded):
            return data.body
        assert self.meter is not None
        started_s = self.meter.clock()
        prefix, reported = data[:PREFIX_BYTES], data[PREFIX_BYTES:]
        body_length(prefix, 1)
        check_body(_KEY, prefix, reported)
        body = decode_body(_decoder, reported).body
        self.meter.coded(agent, started_s)
        return body


def measure(num_nodes: int, clock: Callable[[], float], window_s: float = WINDOW_S) -> Traffic:
    """Starts this number of nodes, trains, and measures.

    Args:
        num_nodes: all of them members.
        clock: seconds of this thread's computing.
        window_s: in the run's own time; at least the time between two commits.

    Raises:
        Violation: the run does not start, or an invariant is violated.
    """
    simulation = Simulation(0, "safety", scenario=quiet(num_nodes), network=MeteredNetwork)
    world, network, seen = simulation.world, simulation.network, simulation.invariants
    assert isinstance(network, MeteredNetwork)
    world.max_events = _EVENTS_PER_NODE * num_nodes
    network.meter = meter = Meter(clock)
    simulation.begin()
    while seen.steps < _FIRST_STEPS and world.now_s < _BEGINS_WITHIN_S:
        world.run_until(world.now_s + 0.5)
    if not seen.steps or seen.newest is None:
        raise Violation(f"{num_nodes} nodes have not begun within {_BEGINS_WITHIN_S:.0f} s")
    leader = network.nodes[seen.newest.leader].agent
    assert leader is not None
    meter.watch(leader)
    network.num_messages = network.num_bytes = 0
    world.run_until(world.now_s + window_s)
    if len(seen.chosen) != 1 or not seen.commits:
        raise Violation(
            f"a quiet run has had {len(seen.chosen)} generations and {seen.commits} commits"
        )
    per_node_s = num_nodes * window_s
    leader_s = meter.decides_s + meter.codes_s
    return Traffic(
        nodes=num_nodes,
        bytes_per_node_s=network.num_bytes / per_node_s,
        messages_per_node_s=network.num_messages / per_node_s,
        leader_cpu=leader_s / window_s,
        leader_decides=meter.decides_s / window_s,
        leader_us_per_message=1e6 * leader_s / max(1, meter.num_messages),
        plan_bytes=len(msgspec.msgpack.encode(seen.newest)),
    )


def quiet(num_nodes: int) -> Scenario:
    return Scenario(
        mode="safety",
        num_nodes=num_nodes,
        late_nodes=0,
        num_ranks=RANKS_PER_NODE,
        settings=made_settings(
            ClusterSize(num_nodes, num_nodes, 0),
            "n0",
            heartbeat_interval_s=HEARTBEAT_S,
            budget=3,
            backoff_initial_s=0.5,
            final_snapshot_timeout_s=2.0,
        ),
        every=SNAPSHOT_EVERY,
        transfer_s=0.15,
        step_s=STEP_S,
        tick_s=_TICK_S,
        unruly=0.0,
        has_checkpoints=False,
        load_s=0.0,
        num_faults=0,
        faults_end_s=1e9,
        num_left_off=0,
        has_reports=True,
    )
