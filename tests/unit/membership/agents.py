"""Several agents in one test, with a network and executors that execute commands at once."""

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec
from made_settings import changed

from ftrun.config.cluster import MembershipSettings
from ftrun.membership.discovery import MemberRole
from ftrun.membership.events import (
    ClockTick,
    ConnectFailed,
    ConnectionClosed,
    ConnectionOpened,
    GenerationInstalled,
    Happening,
    MessageReceived,
    NodeReported,
    PlanPersisted,
    Quiesced,
    WitnessAnswered,
    WitnessRegister,
)
from ftrun.membership.member import Member
from ftrun.membership.witness import rule
from ftrun.network.failover.pair_check import PairCheck
from ftrun.recovery.commands import (
    Command,
    Connect,
    Disconnect,
    InstallGeneration,
    PersistPlan,
    QueryWitness,
    Quiesce,
    Send,
    StartRanks,
)
from ftrun.recovery.generation_monitor import GenerationMonitor
from ftrun.wire.cluster.generation import GenerationPlan, NodeCard
from ftrun.wire.cluster.membership import Heartbeat, ParkedRank
from ftrun.wire.messages.smp import Inventory
from tests.unit.recovery.made import card

STEP_S = 0.25
"""Shorter than two heartbeats: an agent with a longer tick interval counts as paused."""

Found = TypeVar("Found")


@dataclass
class Agent:
    """One agent with its node."""

    member: Member
    settings: MembershipSettings
    heartbeat: Heartbeat = field(default_factory=lambda: Heartbeat(generation=-1))
    holdings: Inventory = field(default_factory=lambda: Inventory([]))
    kept: GenerationPlan | None = None
    is_chosen: bool = False
    done: list[Command] = field(default_factory=list)
    """All its commands, except those for the network."""
    sent: list[Send | Connect] = field(default_factory=list)
    parked: tuple[ParkedRank, ...] = ()
    """Ranks that park if a ballot asks for it."""
    ran: int = -1
    """The last generation whose ranks have run here."""
    is_frozen: bool = False
    """The process is paused; incoming messages wait in its kernel."""
    missed: list[Happening] = field(default_factory=list)

    @property
    def card(self) -> NodeCard:
        return self.member.me

    def reported(self, kind: type[Found]) -> list[Found]:
        return [one for one in self.done if isinstance(one, kind)]

    @property
    def runs(self) -> int:
        """The generation whose ranks run here."""
        return self.heartbeat.generation


class Outside:
    """The outside witness, which answers each node that reaches it at once."""

    LEASE_S = 3.0

    def __init__(self) -> None:
        self.register: WitnessRegister | None = None
        self.leader: NodeCard | None = None
        self.ends_s = 0.0
        self.unreachable: set[str] = set()
        """Nodes that do not reach it."""
        self.lives = 70

    def ask(self, me: NodeCard, asked: QueryWitness, now_s: float) -> WitnessAnswered:
        if me.node_id in self.unreachable:
            return WitnessAnswered(asked, is_reached=False, reason="etcd is out of reach")
        if now_s >= self.ends_s:
            self.leader = None
        self.lives += 1
        ruling = rule(asked, me, self.register, self.leader, new_life=self.lives)
        if ruling.granted:
            self.register, self.leader = ruling.register, ruling.leader
            self.ends_s = now_s + self.LEASE_S if ruling.leader == me else self.ends_s
        return WitnessAnswered(asked, True, ruling.granted, self.register, self.leader)


class Agents:
    """Agents by node id. `a` is at the endpoint. Linked agents receive messages at once."""

    def __init__(self, node_ids: str, cluster_size: MembershipSettings) -> None:
        self.now_s = 1000.0
        self.settings = cluster_size
        self.all: dict[str, Agent] = {}
        self.links: set[frozenset[str]] = set()
        self.cuts: set[frozenset[str]] = set()
        self.resets: set[frozenset[str]] = set()
        self.reads: dict[str, tuple[Any, ...] | None] = {}
        """The start of a node in place of the plan's, or the reason of a failure; None: no answer.
        """
        self.disks: dict[str, dict[int, str]] = {}
        """The steps of the checkpoints that a node sees; each has the reason that it is unusable,
        or "".
        """
        self.stalls: dict[str, str] = {}
        """The reason that a node fails to read the directory once."""
        self.outside = Outside()
        self._queue: deque[tuple[str, Happening]] = deque()
        for one in node_ids:
            self.start(one)

    def __getitem__(self, node_id: str) -> Agent:
        return self.all[node_id]

    # --- start and end of agents --------------------------------------------------------------

    def start(
        self, node_id: str, incarnation: int = 1, *, port: int = 29400, **changes: object
    ) -> Agent:
        """Starts an agent without any memory."""
        cluster_size = changed(self.settings, **changes)
        is_endpoint = node_id == "a" and not cluster_size.has_witness
        me = card(node_id, incarnation, endpoint=is_endpoint, port=port)
        if (me.host, port) in cluster_size.endpoints[1:]:
            number = cluster_size.endpoints.index((me.host, port))
            me = msgspec.structs.replace(me, further_endpoint=number)
        self.all[node_id] = Agent(_member(me, cluster_size, self.now_s), cluster_size)
        return self.all[node_id]

    def start_again(self, node_id: str) -> Agent:
        """Starts another process with the memory of the first one."""
        old = self.all[node_id]
        self.kill(node_id)
        me = card(node_id, old.card.incarnation + 1, endpoint=old.card.endpoint)
        member = _member(me, old.settings, self.now_s, kept=old.kept, is_chosen=old.is_chosen)
        again = Agent(member, old.settings, holdings=old.holdings, kept=old.kept)
        again.is_chosen = old.is_chosen
        self.all[node_id] = again
        return again

    def kill(self, *node_ids: str) -> None:
        """Ends these processes at once; the kernels close their connections."""
        for node_id in node_ids:
            self.all.pop(node_id, None)
        for pair in [pair for pair in self.links if pair & {*node_ids}]:
            self._unlink(pair)
        self._resolve()

    def breaks(self, node_id: str, other: str) -> None:
        """Closes their connection."""
        self._unlink(frozenset((node_id, other)))
        self._resolve()

    def cut(self, node_id: str, *others: str) -> None:
        """Drops all packets to these nodes, or to all nodes if none is named."""
        for other in others or [one for one in self.all if one != node_id]:
            self.cuts.add(frozenset((node_id, other)))

    def refuse(self, node_id: str) -> None:
        """A firewall resets the connections between this node and all others."""
        self.resets.update(frozenset((node_id, other)) for other in self.all if other != node_id)
        for pair in self.resets & self.links:
            self._unlink(pair)
        self._resolve()

    def heal(self) -> None:
        self.cuts.clear()
        self.resets.clear()

    def thaw(self, node_id: str) -> None:
        """It continues, and receives the messages of the pause at once."""
        agent = self.all[node_id]
        agent.is_frozen = False
        missed, agent.missed = agent.missed, []
        for event in [ClockTick(), *missed]:
            self.happens(node_id, event)

    # --- time ---------------------------------------------------------------------------------

    def passes(self, seconds: float, step_s: float = STEP_S) -> None:
        """This time passes for all agents that are not stopped, in steps of `step_s`."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += step_s
            for node_id in list(self.all):
                self.happens(node_id, ClockTick())

    def happens(self, node_id: str, event: Happening) -> None:
        """Handles one event, and all that follows from it at this moment."""
        self._queue.append((node_id, event))
        self._resolve()

    def _resolve(self) -> None:
        while self._queue:
            at, what = self._queue.popleft()
            agent = self.all.get(at)
            if agent is not None and agent.is_frozen:
                agent.missed += [] if isinstance(what, ClockTick) else [what]
            elif agent is not None:
                for command in agent.member.handle(what, now_s=self.now_s):
                    self._carry_out(agent, command)

    def here_is(self, node_id: str, found: Heartbeat) -> None:
        """The node's ranks report something."""
        self.all[node_id].heartbeat = found
        self.happens(node_id, NodeReported(found))

    # --- commands -----------------------------------------------------------------------------

    def _carry_out(self, agent: Agent, command: Command) -> None:
        me = agent.card.node_id
        match command:
            case Send():
                agent.sent.append(command)
                pair = frozenset((me, command.node_id))
                if pair in self.links and pair not in self.cuts:
                    self._queue.append((command.node_id, MessageReceived(me, command.message)))
            case Connect():
                agent.sent.append(command)
                self._dial(agent, command)
            case Disconnect():
                self._unlink(frozenset((me, command.node_id)))
            case QueryWitness():
                answered = self.outside.ask(agent.card, command, self.now_s)
                self._queue.append((me, answered))
            case _:
                agent.done.append(command)
                self._queue.extend((me, event) for event in self._apply_heartbeat(agent, command))

    def _apply_heartbeat(self, agent: Agent, command: Command) -> list[Happening]:
        """Executes a command on the node, and reports the result."""
        match command:
            case Quiesce():
                agent.heartbeat = Heartbeat(generation=-1)
                held = Quiesced(command.generation, agent.holdings, 1000, 2000)
                if command.stay:
                    parked = tuple(one for one in agent.parked if one.rank not in command.failed)
                    held = replace(held, parked=parked, parked_in=agent.ran)
                return [NodeReported(agent.heartbeat), held]
            case InstallGeneration():
                agent.kept, agent.is_chosen = command.plan, False
                if agent.card.node_id in self.disks and command.plan.restore is None:
                    return [self.read_disk(agent.card.node_id, command.plan)]
                read = self.reads.get(agent.card.node_id, (command.plan.restore, ""))
                return [] if read is None else [GenerationInstalled(command.plan.generation, *read)]
            case PersistPlan():
                agent.kept, agent.is_chosen = command.plan, command.is_chosen
                return [] if command.is_chosen else [PlanPersisted(command.plan.configuration_id)]
            case StartRanks():
                agent.kept, agent.is_chosen = command.plan, True
                agent.ran = command.plan.generation
                agent.heartbeat = Heartbeat(generation=command.plan.generation, state="running")
                return [NodeReported(agent.heartbeat)]
            case _:
                return []

    def read_disk(self, node_id: str, plan: GenerationPlan) -> GenerationInstalled:
        """Loads the newest checkpoint that no node rejected, as `GenerationRunner.adopt` does."""
        if (stall := self.stalls.pop(node_id, None)) is not None:
            return GenerationInstalled(
                plan.generation, None, stall, "", {stall.partition(":")[0]: stall}
            )
        rejected: dict[str, str] = {}
        for step, problem in sorted(self.disks[node_id].items(), reverse=True):
            name = f"step-{step}"
            if name in plan.history.bad_checkpoints:
                continue
            if not problem:
                return GenerationInstalled(plan.generation, (-1, step), "", name, rejected)
            rejected[name] = problem
        return GenerationInstalled(plan.generation, None, "no checkpoint can be used", "", rejected)

    def _dial(self, agent: Agent, command: Connect) -> None:
        me = agent.card.node_id
        node_id = command.host.removesuffix(".local")
        pair = frozenset((me, node_id))
        other = self.all.get(node_id)
        if node_id == me or pair in self.cuts or (other is not None and other.is_frozen):
            return
        if other is None or command.port != other.card.port or pair in self.resets:
            failed = ConnectFailed(command.host, command.port, command.node_id, True, "refused")
            self._queue.append((me, failed))
            return
        self.links.add(pair)
        self._queue.append((me, ConnectionOpened(node_id, other.card.incarnation)))
        self._queue.append((node_id, ConnectionOpened(me, agent.card.incarnation)))

    def _unlink(self, pair: frozenset[str]) -> None:
        self.links.discard(pair)
        for node_id in pair:
            for other in pair - {node_id}:
                self._queue.append((node_id, ConnectionClosed(other)))

    def answers(self, node_id: str, event: Happening) -> list[Send | Connect]:
        """The messages that one agent sends because of the event."""
        before = len(self.all[node_id].sent)
        self.happens(node_id, event)
        return self.all[node_id].sent[before:]

    # --- outcome ------------------------------------------------------------------------------

    def leader(self) -> str:
        """The leader that all running agents follow; empty if they disagree."""
        leads = {
            agent.member.leader_card.node_id if agent.member.leader_card is not None else ""
            for agent in self.all.values()
            if agent.member.role is not MemberRole.ENDED
        }
        return leads.pop() if len(leads) == 1 else ""

    def running(self) -> dict[str, int]:
        """The running generation, by node."""
        return {one: agent.runs for one, agent in self.all.items() if agent.runs >= 0}

    def role(self, node_id: str) -> MemberRole:
        return self.all[node_id].member.role

    def plan(self, node_id: str) -> GenerationPlan:
        found = self.all[node_id].member.follower.plan
        assert found is not None
        return found


def _member(
    me: NodeCard,
    cluster_size: MembershipSettings,
    now_s: float,
    *,
    kept: GenerationPlan | None = None,
    is_chosen: bool = False,
) -> Member:
    return Member(
        me,
        cluster_size,
        lambda: GenerationMonitor(cluster_size, pairs=PairCheck()),
        now_s=now_s,
        kept=kept,
        is_chosen=is_chosen,
    )
