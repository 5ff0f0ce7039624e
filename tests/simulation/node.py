"""A machine, its stub, its SMP, and an agent: a real `Member` with an executor that takes time."""

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec

from ftrun.agent.snapshots.smp_client import NOTHING, UnconfirmedCommands
from ftrun.agent.snapshots.topology import begin_generation
from ftrun.events import ExitKind, WorkerExit
from ftrun.ids import Version
from ftrun.membership.events import (
    ClockTick,
    ConnectionClosed,
    GenerationInstalled,
    Happening,
    MessageReceived,
    NodeChecked,
    NodeReported,
    PlanPersisted,
    Quiesced,
)
from ftrun.membership.member import Member
from ftrun.monitor.node_fitness import CheckOutcome, NodeFitness, NodeMeasurements
from ftrun.monitor.slow.collective_check import (
    CollectiveResult,
    HopResult,
    WrongSum,
    lane_value,
    sum_factor,
)
from ftrun.network.failover.pair_check import PairCheck
from ftrun.recovery import commands as do
from ftrun.recovery.generation_monitor import GenerationMonitor
from ftrun.wire.cluster.generation import GenerationPlan, NodeCard
from ftrun.wire.cluster.membership import CollectiveRing, Heartbeat, RankReport
from ftrun.wire.messages import smp as smp_messages
from ftrun.wire.shared_memory.pages import CommandField
from simulation.memory import Memory
from simulation.network import End
from simulation.smp_link import SmpLink
from simulation.snapshots import FETCH_FOR_S, RETRY_S, Page, Smp, as_version
from simulation.training import BEGINNING, Ranks, exit_of

_SPEC = SimpleNamespace(
    profile=SimpleNamespace(
        erasure=SimpleNamespace(mirror_max_bytes=0), snapshot=SimpleNamespace(limit_bytes=0)
    ),
    checkpoint_directory=None,
)
"""Settings that SMPs receive; with these settings all state is erasure-coded."""

_MATTERS = (
    smp_messages.VersionReady
    | smp_messages.VersionCommitted
    | smp_messages.AbandonVersion
    | smp_messages.RestoreFailed
    | smp_messages.PeersUnreachable
)
"""The part of an SMP's inventory that is in the heartbeats of its node."""

if TYPE_CHECKING:
    from simulation.network import Network
    from simulation.run import Simulation
    from simulation.world import World


class Node:
    """One machine."""

    def __init__(self, simulation: "Simulation", node_id: str, *, endpoint: bool) -> None:
        self.simulation = simulation
        self.world: World = simulation.world
        self.network: Network = simulation.network
        self.random = simulation.world.stream(node_id)
        self.node_id = node_id
        self.is_endpoint = endpoint
        self.is_on = False
        self.is_frozen = False
        self.is_running = False
        """Switched on and not frozen."""
        self.memory = Memory(self.removed)
        self.smp: Smp | None = None
        self.page: Page | None = None
        """The command page of the last adopted generation."""
        self.agent: Agent | None = None
        self.ranks: Ranks | None = None
        self.restored_in: dict[int, Version | None] = {}
        """The version from which each generation has started, on this node."""
        self.fault = ""
        """The hardware fault that its agent reports, in words; empty: none."""
        self.exit: do.EndRun | None = None
        """The exit of the agent, if it has ended by itself."""
        self.clock_s = self.random.random() * 1e5
        self.clock_rate = 1.0
        self.stuck_until_s = -1.0
        """Until this time no rank of this node ends or steps."""
        self.keeps_ranks_s = 0.0
        """Time for which the ranks of the next killed agent outlive it."""
        self._boots = 0
        self._deferred: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._num_ports = 0

    @property
    def monotonic_s(self) -> float:
        """The clock of the node. Its origin and rate differ from those of other nodes."""
        return self.world.now_s * self.clock_rate + self.clock_s

    @property
    def slowest_rate(self) -> float:
        return min(node.clock_rate for node in self.simulation.nodes)

    @property
    def is_stuck(self) -> bool:
        return self.world.now_s < self.stuck_until_s

    # --- power --------------------------------------------------------------------------------

    def boot(self, delay_s: float) -> None:
        """Switches the node on with empty memory; the stub starts a little later."""
        self._boots += 1
        self.is_on, self.is_frozen, self.is_running = True, False, True
        self.memory = Memory(self.removed)
        self.restored_in = {}
        self.exit = None
        self.clock_s = self.random.random() * 1e5
        self.later(delay_s, self._start_agent)

    def power_off(self) -> None:
        """Ends all processes at once, without a message."""
        self.is_on = self.is_running = False
        self._lose_everything()

    def wipe(self) -> None:
        """Kills stub, agent and SMP; the kernel stays alive."""
        self._boots += 1
        self._lose_everything()

    def _lose_everything(self) -> None:
        self._boots += 1
        self._deferred.clear()
        self.kill_agent(restart_s=None)
        if self.smp is not None:
            self.smp.die()
            self.smp = None
        self.memory, self.page = Memory(self.removed), None
        self.restored_in = {}
        self.simulation.invariants.memory_lost(self)

    def freeze(self) -> None:
        self.is_frozen, self.is_running = True, False

    def thaw(self) -> None:
        if not self.is_on:
            return
        self.is_frozen, self.is_running = False, True
        deferred, self._deferred = self._deferred, []
        for what, args in deferred:
            self.later(0.0, what, *args)
        if self.agent is not None:
            self.agent.catch_up()

    def later(self, delay_s: float, what: Callable[..., None], *args: Any) -> None:
        """Schedules an action on this machine, unless the machine is switched off before."""
        self.world.after(delay_s, self._fire, self._boots, what, args)

    def _fire(self, boots: int, what: Callable[..., None], args: tuple[Any, ...]) -> None:
        if boots != self._boots:
            return
        if self.is_frozen:
            self._deferred.append((what, args))
        else:
            what(*args)

    # --- processes ----------------------------------------------------------------------------

    def _start_agent(self) -> None:
        if not self.is_on or self.agent is not None or self.exit is not None:
            return
        self.start_smp()
        self.memory.hand_over()
        self.end_ranks()
        self.simulation.invariants.stable_since_s = self.world.now_s
        self.agent = Agent(self)
        kept = self.memory.kept
        about = f", knows generation {kept[0].generation}" if kept is not None else ""
        self.world.trace(self.node_id, f"agent {self.agent.card.incarnation} starts{about}")
        self.agent.begin()

    def kill_agent(self, *, restart_s: float | None) -> None:
        """Its ranks die with it; the stub starts another agent."""
        agent = self.agent
        if agent is None:
            return
        self.agent = None
        agent.die()
        self.memory.agent_died()
        if self.smp is not None and not self.smp.is_alive:
            self.simulation.invariants.memory_lost(self)  # the stub retains no protected parts
        if restart_s is None or self.keeps_ranks_s == 0.0:
            self.end_ranks()
        else:
            keeps_s, self.keeps_ranks_s = self.keeps_ranks_s, 0.0
            self.later(keeps_s, self._end_leftovers, self.ranks)
        if restart_s is not None:
            self.later(restart_s, self._start_agent)

    def start_smp(self) -> None:
        if self.smp is not None and self.smp.is_alive:
            return
        self._num_ports += 1
        self.smp = Smp(self, 1000 + self._num_ports)
        if self.agent is not None:
            self.agent.executor.configure_new_smp()
            self.send(is_urgent=True)

    def kill_smp(self) -> None:
        """The agent or the stub keeps the SMP's memory and starts another SMP."""
        if self.smp is not None and self.smp.is_alive:
            self.smp.die()
            if self.agent is None:
                self.simulation.invariants.memory_lost(self)
            else:
                self.later(0.05 + 0.5 * self.random.random(), self.start_smp)

    def _end_leftovers(self, ranks: Ranks | None) -> None:
        if self.ranks is ranks:
            self.end_ranks()

    def end_ranks(self) -> None:
        if self.ranks is not None:
            self.ranks.kill()
            self.ranks = None

    # --- reports of the components to the agent ------------------------------------------------

    def send(self, *, is_urgent: bool) -> None:
        if self.agent is not None:
            self.agent.executor.send(is_urgent=is_urgent)

    def reported_by_smp(self, body: Any) -> None:
        if self.agent is not None:
            self.agent.call(self.agent.executor.reported_by_smp, body)

    def ranks_ended(self, ranks: Ranks, kind: ExitKind) -> None:
        if self.agent is not None and self.ranks is ranks:
            delay_s = 0.005 + 0.05 * self.random.random()
            self.later(delay_s, self.agent.executor.saw_exits, ranks, kind)

    def removed(self, version: Version) -> None:
        self.simulation.invariants.removed(version)

    def has_committed(self, wanted: Version) -> None:
        self.simulation.invariants.committed(self, wanted)


class Agent:
    """One agent process."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.is_alive = True
        self.is_frozen = False
        self.leaves_since_s: float | None = None
        """Time of SIGTERM."""
        self.collective: CollectiveResult | None = None
        self.ends: dict[str, End] = {}
        self.dialling: set[tuple[str, int]] = set()
        scenario = node.simulation.scenario
        number = node.simulation.next_incarnation()
        self.card = NodeCard(
            node_id=node.node_id,
            incarnation=number,
            host=node.node_id,
            # An endpoint accepts connections only after its node has returned.
            port=29400 + number if scenario.settings.has_witness else 29400,
            num_ranks=scenario.num_ranks,
            endpoint=node.is_endpoint and not scenario.settings.has_witness,
            rails=node.simulation.probes.rails_of(node) if node.simulation.probes else [],
        )
        kept = node.memory.kept
        self.member = Member(
            self.card,
            scenario.settings,
            lambda: GenerationMonitor(scenario.settings, pairs=PairCheck()),
            now_s=self.now_s,
            kept=kept[0] if kept is not None else None,
            is_chosen=kept is not None and kept[1],
        )
        self.executor = SimulatedExecutor(self)
        self._inbox: deque[tuple[End | None, Happening]] = deque()
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()

    @property
    def now_s(self) -> float:
        """The monotonic clock of the process; no other node has the same origin."""
        return self.node.monotonic_s

    @property
    def is_paused(self) -> bool:
        return self.is_frozen or self.node.is_frozen

    def begin(self) -> None:
        unfit_s = self.node.simulation.unfit_s
        if unfit_s is not None:
            self._check(CheckOutcome.FAIL if self.node.node_id in unfit_s else CheckOutcome.PASS, 1)
            self.node.later(
                unfit_s.get(self.node.node_id, 0.0), self.call, self._check, CheckOutcome.PASS, 2
            )
        self._tick()

    def _check(self, outcome: CheckOutcome, number: int) -> None:
        if outcome is CheckOutcome.PASS or self.member.follower.fitness is None:
            figures = NodeMeasurements(collective=self.collective)
            found = NodeFitness(outcome, figures, problems=("a test",), number=number)
            self.happens(NodeChecked(found))

    def _check_later(self, command: do.CheckCommand) -> None:
        if isinstance(command, do.RepeatNodeCheck):
            self.node.later(0.5, self.call, self._check, CheckOutcome.PASS, command.number)
        else:
            delay_s = 0.7 + 0.3 * command.ring.nodes.index(self.card)
            self.node.later(delay_s, self.call, self._compare, command.ring)

    def _compare(self, ring: CollectiveRing) -> None:
        """Takes part in a collective check; a neighbour that has ended makes it incomplete."""
        at, count = ring.nodes.index(self.card), len(ring.nodes)
        around = [ring.nodes[at - 1], ring.nodes[(at + 1) % count]]
        agents = [self.node.network.nodes[card.node_id].agent for card in around]
        cards = [one.card for one in agents if one is not None]
        right = lane_value(0) * sum_factor(count, 1, 0, 1)
        wrong = WrongSum(1, 0, 1, 0, right + 1, right, is_as_sent=True)
        all_wrong = self.node.simulation.wrong_sums
        hops = [
            HopResult(card.identity, 9, 1e9, wrong if card.node_id in all_wrong else None)
            for card in around
        ]
        problem = "" if cards == around else "a neighbour has ended the check"
        found = () if problem else tuple(hops)
        self.collective = CollectiveResult(ring.check, count, found, problem=problem)
        known = self.member.follower.fitness
        self._check(CheckOutcome.PASS, known.number if known is not None else 1)

    def die(self) -> None:
        self.is_alive = False
        self.node.network.process_died(self)

    def freeze(self) -> None:
        self.is_frozen = True

    def thaw(self) -> None:
        self.is_frozen = False
        self.catch_up()

    def catch_up(self) -> None:
        """Messages that arrived in the pause, in order."""
        while self._inbox and self.is_alive and not self.is_paused:
            self._take(*self._inbox.popleft())
        while self._calls and self.is_alive and not self.is_paused:
            what, args = self._calls.popleft()
            what(*args)

    def happens(self, event: Happening) -> None:
        self.happens_to(None, event)

    def happens_to(self, end: End | None, event: Happening) -> None:
        if self.is_paused:
            self._inbox.append((end, event))
        elif self.is_alive:
            self._take(end, event)

    def call(self, what: Callable[..., None], *args: Any) -> None:
        """Schedules an action of its executor, which is paused with the process."""
        if not self.is_alive:
            return
        if self.is_paused:
            self._calls.append((what, args))
        else:
            what(*args)

    def _take(self, end: End | None, event: Happening) -> None:
        if end is not None and isinstance(event, MessageReceived | ConnectionClosed):
            # An older connection was closed without a message.
            if self.ends.get(event.node_id) is not end:
                return
            if isinstance(event, ConnectionClosed):
                del self.ends[event.node_id]
        self.think(event)

    def _tick(self) -> None:
        if not self.is_alive:
            return
        self.node.later(self.node.simulation.scenario.tick_s, self.call, self._tick)
        self.think(ClockTick())
        self.executor.repeat()
        self.executor.send(is_urgent=False)

    def think(self, event: Happening) -> None:
        if not self.is_alive:
            return
        simulation = self.node.simulation
        before = self.member.follower.generation
        found = self.member.handle(event, now_s=self.now_s)
        if found:
            simulation.invariants.decided(self, event, before, found)
        network = self.node.network
        for command in found:
            if isinstance(command, do.Send):
                network.send(self, command.node_id, command.message)
            elif isinstance(command, do.Connect):
                network.dial(self, command.host, command.port, command.node_id)
            elif isinstance(command, do.Disconnect):
                network.hang_up(self, command.node_id)
            elif isinstance(command, do.QueryWitness):
                assert simulation.witness is not None
                simulation.witness.ask(self, command)
            elif isinstance(command, do.ProbePath):
                simulation.probe_path(self, command)
            elif isinstance(command, do.RepeatNodeCheck | do.RunCollectiveCheck):
                self._check_later(command)
            else:
                self.executor.take(command)
        self.executor.renew_lease()
        simulation.invariants.after_event(self)


class SimulatedExecutor:
    """The sequential work of an agent's main thread."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.node = agent.node
        self.random = agent.node.random
        self.exits: list[WorkerExit] = []
        self.smp = SmpLink()
        self.plan: GenerationPlan | None = None
        """The generation whose ranks run or start here."""
        self.is_over = True
        """The ranks of the plan are dead, and another generation follows."""
        self.wants_ranks = False
        self._queue: deque[do.NodeCommand] = deque()
        self._is_busy = False
        self._awaits_boundary = self._is_parking = False
        self._stay_problem = ""
        self._reported: tuple[object, ...] = ()
        self._step_reported = -1
        self._unconfirmed = UnconfirmedCommands()

    def renew_lease(self) -> None:
        """The agent extends the lease of its ranks."""
        if self.node.ranks is not None:
            self.node.ranks.lease_s = self.agent.member.suspension.lease_s

    def take(self, command: do.NodeCommand) -> None:
        trace = self.node.world.trace
        match command:
            case do.JournalEntry():
                trace(self.node.node_id, f"note {command.record.kind}: {command.record.text}")
                return
            case do.SuspendRanks() | do.ResumeRanks():
                trace(self.node.node_id, type(command).__name__)
                ranks = self.node.ranks
                if ranks is not None:
                    ranks.are_suspended = isinstance(command, do.SuspendRanks)
                return
        self._queue.append(command)
        if not self._is_busy:
            self._next()

    def _next(self) -> None:
        if not self._queue:
            self._is_busy = False
            return
        self._is_busy = True
        command = self._queue.popleft()
        self.node.world.trace(self.node.node_id, _as_text(command))
        self.node.simulation.faults.on_command(self.node, command)
        if not self.agent.is_alive:
            return
        delay_s = 0.001
        match command:
            case do.Quiesce():
                parks_s = self._revoke(command)
                self._is_parking = parks_s is not None
                self._stay_problem = self.node.simulation.parking.problem(self.node.ranks)
                if parks_s is None and not self.node.is_stuck:
                    self.node.end_ranks()
                delay_s = (parks_s or 0.02) + 0.3 * self.random.random()
                delay_s += max(0.0, self.node.stuck_until_s - self.node.world.now_s)
            case do.InstallGeneration(plan) if plan.restore is None and self._reads_checkpoint(
                plan
            ):
                delay_s = 0.01 + self.node.simulation.scenario.load_s * self.random.random()
            case do.InstallGeneration() | do.StartRanks():
                delay_s = 0.01 + 0.1 * self.random.random()
        self.node.later(delay_s, self.agent.call, self._do, command)

    def _revoke(self, command: do.Quiesce) -> float | None:
        """Seconds until the ranks have parked; None: they end, or there are none."""
        ranks = self.node.ranks
        if not command.stay or ranks is None or not ranks.are_alive or self.plan is not ranks.plan:
            return None
        if any(rank in command.failed for rank in ranks.locals):
            return None
        if ranks.is_parked:
            return 0.0
        parks_s = self.node.simulation.parking.park_s(ranks)
        if parks_s is not None:
            ranks.are_suspended = False
            ranks.revoke()
        return parks_s

    def _quiesced(self, command: do.Quiesce, smp: Smp) -> None:
        node, parking = self.node, self.node.simulation.parking
        ranks, more = node.ranks, dict[str, Any]()
        if self._is_parking and ranks is not None and not ranks.is_parked:
            parking.park(ranks)
        if not self._is_parking:
            node.end_ranks()
        if command.stay:
            more = {**parking.answer(node.ranks), "stay_problem": self._stay_problem}
        self.wants_ranks, self.is_over = False, True
        self.agent.think(Quiesced(command.generation, smp.inventory(), 29500, smp.port, **more))

    def _reads_checkpoint(self, plan: GenerationPlan) -> bool:
        simulation = self.node.simulation
        is_there = simulation.scenario.has_checkpoints and bool(simulation.checkpoints)
        return is_there and plan.member(self.node.node_id) is not None

    def _do(self, command: do.NodeCommand) -> None:  # noqa: C901, PLR0912 - one dispatch
        smp = self.node.smp
        if smp is None or not smp.is_alive:
            # The SMP is being restarted, and everything waits for it.
            self.node.later(0.05, self.agent.call, self._do, command)
            return
        match command:
            case do.Quiesce():
                self._quiesced(command, smp)
            case do.InstallGeneration():
                self._adopt(command.plan, smp)
            case do.PersistPlan():
                self.node.memory.kept = (command.plan, command.is_chosen)
                self.agent.think(PlanPersisted(command.plan.configuration_id))
            case do.StartRanks():
                self._run(command.plan)
            case do.CommitSnapshot():
                if self.plan is not None and len(self.plan.members) > 1:
                    self._report_order(command, smp)
            case do.AbandonStep():
                if self.plan is not None:
                    self._report_order(command, smp)
            case do.SetFirstSnapshotStep():
                page = self.node.page
                if page is not None and self.plan is not None and len(self.plan.members) > 1:
                    page.set(
                        CommandField.TAKE_FROM, max(command.step, page.get(CommandField.TAKE_FROM))
                    )
            case do.WriteCapture():
                self._request_capture(command.from_step)
            case do.UpdatePeerPorts():
                if self.plan is not None:
                    ports = {**self.plan.smp_ports, **command.ports}
                    self.plan = msgspec.structs.replace(self.plan, smp_ports=ports)
                    self._send_to_smp()
            case do.RequestFinalSnapshot():
                if self.node.ranks is not None:
                    # Ranks that have passed that boundary stop at the next one.
                    after = self.node.ranks.step + 1
                    self.node.ranks.stop_after = max(command.after_step, after)
                self._awaits_boundary = True
            case do.KillWorkers():
                self.node.end_ranks()
                self.wants_ranks = False
            case do.SignalWorkers():
                ranks = self.node.ranks
                if ranks is not None and ranks.are_alive:
                    ranks.kill()
                    self.saw_exits(ranks, ExitKind.SIGNAL)
            case do.EndRun():
                self._end(command)
        if self.agent.is_alive:
            self._next()

    def _request_capture(self, from_step: int) -> None:
        page, ranks = self.node.page, self.node.ranks
        if page is not None and ranks is not None and self.plan is not None:
            is_alone = len(self.plan.members) == 1
            page.set(CommandField.CAPTURE_FROM, ranks.step + 1 if is_alone else from_step)

    def repeat(self) -> None:
        """As `CommandExecutor.repeat`."""
        page, plan, smp = self.node.page, self.plan, self.node.smp
        if page is None or plan is None or self.is_over or smp is None or not smp.is_alive:
            return
        for order in self._unconfirmed.due(page, plan.generation, now_s=self.node.world.now_s):
            self._report_order(order, smp)

    def _report_order(self, order: do.CommitSnapshot | do.AbandonStep, smp: Smp) -> None:
        assert self.plan is not None
        generation = self.plan.generation
        self._unconfirmed.add(order, generation, now_s=self.node.world.now_s)
        if isinstance(order, do.CommitSnapshot):
            smp.commit(order.version)
        else:
            smp.abandon(generation, order.step)

    def _adopt(self, plan: GenerationPlan, smp: Smp) -> None:
        node = self.node
        self.exits.clear()
        self._awaits_boundary = self.is_over = False
        restored = as_version(plan.restore)
        name, rejected, problem = "", dict[str, str](), ""
        if restored is None and self._reads_checkpoint(plan):
            restored, name, rejected = node.simulation.load_checkpoint(node, plan)
            problem = "" if restored is not None else "no checkpoint can be used"
        self._end_unnamed(plan)
        smp.void_after(restored if restored is not None else NOTHING)
        node.restored_in[plan.generation] = restored
        self.plan, node.page = plan, Page(restored, as_version(plan.committed))
        self.smp.committed = restored if plan.restore is not None else None
        self._send_to_smp()
        node.memory.kept = (plan, False)
        pair = (int(restored.generation), int(restored.step)) if restored is not None else None
        self.agent.think(GenerationInstalled(plan.generation, pair, problem, name, rejected))

    def _end_unnamed(self, plan: GenerationPlan) -> None:
        ranks = self.node.ranks
        if ranks is not None and not set(ranks.locals) <= {*plan.staying}:
            self.node.end_ranks()

    def _run(self, plan: GenerationPlan) -> None:
        node = self.node
        node.memory.kept = (plan, True)
        self.wants_ranks = True
        group = node.simulation.group_of(plan)
        before, parking = node.ranks, node.simulation.parking
        processes = parking.stays(node, before) if before is not None else parking.new_processes()
        node.ranks = Ranks(node, plan, group, processes)
        node.simulation.invariants.started(node.ranks)
        if before is not None and not before.are_alive:
            node.ranks.kill()  # a parked process has ended
            node.ranks_ended(node.ranks, ExitKind.SIGNAL)
        node.ranks.are_suspended = self.agent.member.suspension.is_on
        self.renew_lease()
        self._restore()
        self.send(is_urgent=True)

    # --- the SMP ------------------------------------------------------------------------------

    def configure_new_smp(self) -> None:
        """A new SMP has started and has received the memory of the previous one."""
        if self.plan is None or self.is_over:
            return
        self._send_to_smp()
        smp, ranks = self.node.smp, self.node.ranks
        if smp is not None and ranks is not None and ranks.are_alive:
            smp.resend_sealed(ranks.locals)

    def _send_to_smp(self) -> None:
        """As `GenerationRunner.send_to_smp` does it."""
        plan, smp, node = self.plan, self.node.smp, self.node
        assert plan is not None
        if smp is None or not smp.is_alive:
            return
        restored = node.restored_in.get(plan.generation)
        newest = max((v for v in (restored, self.smp.committed) if v is not None), default=None)
        previous_world_size = (
            plan.restore_world_size if plan.is_resized and newest == restored else 0
        )
        body = begin_generation(
            plan, node.node_id, _SPEC, newest, node, previous_world_size=previous_world_size
        )
        self.smp.begin(plan.generation)
        smp.begin_generation(body)

    def reported_by_smp(self, body: Any) -> None:
        self.smp.take(body)
        if isinstance(body, smp_messages.RestoreReady):
            self._restore()
        if isinstance(body, _MATTERS):
            self.send(is_urgent=True)

    def _restore(self) -> None:
        """Ranks read the version from which this generation starts, if the SMP has it."""
        smp, ranks, plan = self.node.smp, self.node.ranks, self.plan
        if smp is None or not smp.is_alive or ranks is None or plan is None:
            return
        if not self.wants_ranks or ranks.are_ready or not ranks.are_alive:
            return
        restored = self.node.restored_in.get(plan.generation)
        if restored is None:
            self._restored(ranks, None, BEGINNING)
        elif plan.is_resized:
            self._read_previous(ranks, restored, self.node.world.now_s)
        elif self.smp.is_restored:
            states = {smp.good_state(restored, rank) for rank in ranks.locals}
            if None in states:
                self.smp.restore_failed = f"{restored} does not match its digest"
                self.send(is_urgent=True)
                return
            self._restored(ranks, restored, max(state for state in states if state is not None))

    def _read_previous(self, ranks: Ranks, restored: Version, since_s: float) -> None:
        smp, plan = self.node.smp, self.plan
        if self.node.ranks is not ranks or not ranks.are_alive or plan is None:
            return
        if ranks.are_ready:
            return  # another attempt has read it, after the SMP of a node was restarted
        state = None
        if smp is not None and smp.is_alive and smp.body is not None:
            state = smp.read_previous(restored, smp.body.restore_from)
        if state is not None:
            self._restored(ranks, restored, state)
        elif self.node.world.now_s - since_s < FETCH_FOR_S:
            again = (self._read_previous, ranks, restored, since_s)
            self.node.later(RETRY_S, self.agent.call, *again)
        else:
            self.smp.restore_failed = f"{restored} cannot be read"
            self.send(is_urgent=True)

    def _restored(self, ranks: Ranks, restored: Version | None, state: int) -> None:
        plan = ranks.plan
        ranks.state = state
        if restored is not None:
            ranks.step = ranks.first_step = restored.step
        self.node.simulation.invariants.restored(self.node, plan, restored, ranks.state)
        ranks.group.joined(ranks)

    def saw_exits(self, ranks: Ranks, kind: ExitKind) -> None:
        self.agent.call(self._saw_exits, ranks, kind)

    def _saw_exits(self, ranks: Ranks, kind: ExitKind) -> None:
        if self.node.ranks is not ranks or self.exits:
            return
        node = ranks.plan.member(self.node.node_id)
        assert node is not None
        self.exits += [exit_of(ranks, rank, kind) for rank in node.ranks]
        self.send(is_urgent=True)

    def send(self, *, is_urgent: bool) -> None:
        self.agent.call(self._send, is_urgent)

    def _send(self, is_urgent: bool) -> None:
        ranks, smp, plan = self.node.ranks, self.node.smp, self.plan
        runs = ranks is not None and plan is not None and self.wants_ranks
        says = self.smp
        matches = plan is not None and says.generation == plan.generation
        ready = says.ready if matches else None
        if plan is not None and len(plan.members) == 1:
            ready = says.committed
        step = ranks.step if ranks is not None else 0
        exits, leaves = tuple(self.exits), self.agent.leaves_since_s is not None
        generation = plan.generation if runs and plan is not None else -1
        ready_pair = (int(ready.generation), int(ready.step)) if ready is not None else None
        skipped = says.abandoned_step if matches else -1
        at_boundary = self._awaits_boundary and ranks is not None and ranks.is_at_boundary
        stops = self.node.simulation.stops.get(self.node.node_id, 0)
        smp_port = smp.port if smp is not None and smp.is_alive else 0
        problem = says.restore_failed if matches else ""
        matters = (
            generation, exits, ready_pair, skipped, at_boundary, stops, leaves, smp_port, problem,
            says.unreachable,
        )  # fmt: skip
        is_urgent |= matters != self._reported
        self._reported = matters
        if not is_urgent and step == self._step_reported:
            return
        self._step_reported = step
        heartbeat = Heartbeat(
            generation=generation,
            state="running" if runs else "idle",
            step=step,
            steps_here=step - ranks.first_step if ranks is not None else 0,
            attached=ranks is not None and ranks.are_ready,
            exits=exits,
            ready=ready_pair,
            abandoned_step=skipped,
            sealed=ranks.sealed if ranks is not None else None,
            committed=self.node.page.committed if self.node.page is not None else None,
            at_boundary=at_boundary,
            stops=stops,
            stop_signal=15,
            leaves=leaves,
            smp_port=smp_port,
            survives=says.survives if matches and plan and len(plan.members) > 1 else 0,
            problem=problem,
            problem_is_link=bool(problem) and says.lost_links,
            unreachable=says.unreachable,
            unprotected=says.unprotected,
            fault=self.node.fault,
            ranks=self._reports(ranks, ranks.locals) if ranks is not None and matches else (),
        )
        self.agent.think(NodeReported(heartbeat, is_urgent))

    def _reports(self, ranks: Ranks, own: tuple[int, ...]) -> tuple[RankReport, ...]:
        if not self.node.simulation.scenario.has_reports:
            return ()
        return tuple(RankReport(one, 10_000 + one, "stepping", ranks.step, 0.25) for one in own)

    def _end(self, command: do.EndRun) -> None:
        node = self.node
        node.exit = command
        node.world.trace(node.node_id, f"ends with {int(command.exit_code)}: {command.reason}")
        node.simulation.invariants.ended(node, command)
        node.kill_agent(restart_s=None)
        if node.smp is not None:
            node.smp.die()
        node.memory = Memory(node.removed)
        node.simulation.invariants.memory_lost(node)
        if command.run_continues:
            node.simulation.faults.has_left(node)


def _as_text(command: do.NodeCommand) -> str:
    match command:
        case do.InstallGeneration():
            return f"Adopt {_plan(command.plan)}"
        case do.PersistPlan():
            voters = " ".join(card.node_id for card in command.plan.voters)
            effect = "chosen" if command.is_chosen else "asked for"
            return f"KeepPlan {command.plan.configuration_id} {effect}: voters {voters}"
        case do.StartRanks():
            return f"RunGeneration {command.plan.generation}"
        case do.Quiesce():
            return f"Quiesce {command.generation}: {command.reason}"
        case _:
            return str(command)[:160]


def _plan(plan: GenerationPlan) -> str:
    members = " ".join(f"{one.node_id}@{one.first_rank}" for one in plan.members)
    spares = " ".join(card.node_id for card in plan.spares)
    return (
        f"{plan.generation} by {plan.leader}: {members} | {spares} | from {plan.restore} "
        f"{plan.restore_reason} groups {plan.groups} m {plan.parity}"
    )
