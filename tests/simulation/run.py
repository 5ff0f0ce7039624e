"""One seed from beginning to end, and its outcome."""

import gc
import logging
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from ftrun.errors import ExitCode
from ftrun.events import ExitKind
from ftrun.ids import Version, version
from ftrun.membership.ballots import carries, electorate
from ftrun.membership.discovery import MemberRole
from ftrun.membership.leader.failure_detector import AWAIT_UNRESPONSIVE_S
from ftrun.recovery import commands as do
from ftrun.wire.cluster.generation import GenerationPlan
from simulation.faults import Faults
from simulation.invariants import Invariants
from simulation.memory import Arena, can_have
from simulation.network import Network
from simulation.node import Agent, Node
from simulation.probes import PathProbes
from simulation.scenario import Scenario, draw
from simulation.snapshots import as_version
from simulation.survivors import Parking
from simulation.training import Group, Ranks
from simulation.witness import WitnessModel
from simulation.world import Violation, World

AFTER_FAULTS_S = 45.0
_ENDING_S = 8.0
_BOOTED_S = 4.0
_MEETS_WITHIN_S = 10.0
_STEPS_WANTED = 3
_INCARNATION = 1000
_TERMINATED = 143


@dataclass(frozen=True)
class Outcome:
    """The outcome of a seed."""

    seed: int
    mode: str
    problem: str
    """The violation; empty if there is none."""
    verdict: str
    """`converged`, `finished`, `paused`, `ended 76` and similar."""
    digest: int
    num_events: int
    virtual_s: float
    steps: int
    generations: int
    commits: int
    restores: int
    messages: int
    new_leaders: int
    """Number of generations under another leader than the generation before."""
    growths: int
    """Number of generations with more nodes than the generation before."""
    shrinkings: int
    faults: dict[str, int]
    log: tuple[str, ...] = ()

    @property
    def happened(self) -> dict[str, int]:
        names = ("steps", "generations", "commits", "restores", "new_leaders", "growths")
        return {name: getattr(self, name) for name in (*names, "shrinkings", "messages")}


class Simulation:
    """All parts of one run."""

    def __init__(
        self,
        seed: int,
        mode: str,
        *,
        scenario: Scenario | None = None,
        network: type[Network] = Network,
    ) -> None:
        self.scenario: Scenario = draw(seed, mode) if scenario is None else scenario
        self.world = World(seed)
        self.num_requested = self.num_missed = 0
        """Snapshots of nodes that a checkpoint has requested, taken and received too late."""
        self.network = network(self.world, unruly=self.scenario.unruly)
        self.invariants = Invariants(self)
        self.faults = Faults(self)
        self.stops: dict[str, int] = {}
        self.last_step = -1
        self.checkpoints: list[tuple[int, int]] = []
        """Step and state of each snapshot, the newest last."""
        self.bad_loads = 0.0
        """Probability that a node cannot use a checkpoint."""
        self.is_ending = False
        self.failing: Callable[[Group], Ranks | None] | None = None
        """The ranks that fail in place of the next step, by a fault of their node or of the
        program; None: there is no such fault."""
        self.failing_kinds: tuple[ExitKind, ...] = (ExitKind.EXCEPTION,)
        """How they fail, in turn in the generations."""
        self.unfit_s: dict[str, float] | None = None
        """Time for which each agent of a node fails its checks; None: no node makes checks."""
        self.wrong_sums: set[str] = set()
        """Nodes that compute wrong sums in a collective check."""
        self.probes: PathProbes | None = None
        """Path probes; None: nodes have one address, and no node probes."""
        self.parking: Parking = Parking(self)
        self.witness: WitnessModel | None = None
        """The witness; None: the run has none."""
        self.nodes: list[Node] = []
        self._incarnation = _INCARNATION
        self._groups: dict[int, Group] = {}
        for index in range(self.scenario.num_nodes):
            node = Node(self, f"n{index}", endpoint=index == 0)
            self.nodes.append(node)
            self.network.nodes[node.node_id] = node

    # --- queries of the other parts -----------------------------------------------------------

    def next_incarnation(self) -> int:
        self._incarnation += 1
        return self._incarnation

    def probe_path(self, agent: Agent, command: do.ProbePath) -> None:
        """Without paths, the answer never arrives."""
        if self.probes is not None:
            self.probes.take(agent, command)

    def group_of(self, plan: GenerationPlan) -> Group:
        return self._groups.setdefault(plan.generation, Group(self, plan))

    def agent_ended(self, node: Node, command: do.EndRun) -> None:
        """If the leader has ended the run, what follows is another run."""
        leader = node.agent.member.leader if node.agent is not None else None
        if leader is None or command.run_continues or self.is_ending:
            return
        # A leader that has waited for long enough ends only the nodes that it reaches. The same
        # applies to a leader that receives SIGTERM while it waits.
        gives_up = command.exit_code == ExitCode.NOT_ENOUGH_NODES
        if not gives_up and (leader.is_settled or command.exit_code != _TERMINATED):
            self.is_ending = True
            self.world.after(_ENDING_S, self._stop)

    def load_checkpoint(
        self, node: Node, plan: GenerationPlan
    ) -> tuple[Version | None, str, dict[str, str]]:
        """Fills the arenas from the newest checkpoint that no node has rejected.

        Returns the version, the name of the checkpoint, and the checkpoints that this node has
        rejected.
        """
        member, rejected = plan.member(node.node_id), dict[str, str]()
        for step, state in reversed(self.checkpoints):
            name = _checkpoint_name(step)
            if name in plan.history.bad_checkpoints:
                continue
            if not self._loads(node.node_id, name):
                rejected[name] = "a file is damaged"
                continue
            taken = version(-1, step)
            self.invariants.states.setdefault(taken, state)
            if member is not None:
                made = [Arena(rank, plan.world_size, node.removed) for rank in member.ranks]
                for arena in made:
                    arena.seal(taken, state)
                assert node.smp is not None
                node.smp.load(made)
            return taken, name, rejected
        return None, "", rejected

    def _loads(self, node_id: str, name: str) -> bool:
        random = Random(f"{self.world.seed}/load/{node_id}/{name}")
        return random.random() >= self.bad_loads

    def loads_on(self, node_ids: Collection[str]) -> str:
        """A checkpoint that each of these nodes can use; empty if there is none."""
        if not self.bad_loads:
            return ""
        names = [_checkpoint_name(step) for step, _ in self.checkpoints]
        return next((name for name in names if all(self._loads(one, name) for one in node_ids)), "")

    def _stop(self) -> None:
        self.world.is_over = True

    # --- the run --------------------------------------------------------------------------------

    def run(self) -> str:
        """Runs to the end and names the outcome; raises a `Violation` if the outcome is wrong."""
        self.begin()
        end_s = self.scenario.faults_end_s
        if self.scenario.mode == "safety":
            self.world.run_until(end_s + 6.0)
            return self._word()
        self.world.run_until(end_s)
        steps_before = self.invariants.steps
        must = False
        while self.world.now_s < end_s + AFTER_FAULTS_S and not self.world.is_over:
            self.world.run_until(self.world.now_s + 1.0)
            if self._has_converged(steps_before):
                return self._finish()
            must = must or self._must_converge()
            if self._all_ended():
                break
        if self.world.is_over or self._all_ended():
            self._check_end()
        seen = self.invariants
        must = must and not (seen.is_second_run or seen.is_lost_at_commit())
        if must and not self._was_stopped():
            waited_s = self.world.now_s - end_s
            raise Violation(f"no run after {waited_s:.0f} s without faults: {self._state()}")
        return self._word()

    def begin(self) -> None:
        random = self.world.stream("start")
        late = self.nodes[len(self.nodes) - self.scenario.late_nodes :]
        for node in self.nodes:
            delay_s = 0.2 * random.random() + (8.0 * random.random() if node in late else 0.0)
            self.world.after(delay_s, node.boot, 0.1 + 0.5 * random.random())
        self.faults.begin()
        if self.scenario.has_checkpoints:
            self.world.after(4.0, self._write_checkpoint)

    def _write_checkpoint(self) -> None:
        newest = max(self.invariants.records, default=None)
        if newest is not None and newest in self.invariants.states:
            made = (int(newest.step), self.invariants.states[newest])
            if made not in self.checkpoints:
                self.checkpoints = [*self.checkpoints[-2:], made]
        self.world.after(4.0, self._write_checkpoint)

    # --- the expected outcome -----------------------------------------------------------------

    def _has_converged(self, steps_before: int) -> bool:
        """One leader exists, all ranks make steps, and their snapshots are protected."""
        newest = self.invariants.newest
        if newest is None or self.invariants.steps < steps_before + _STEPS_WANTED:
            return False
        leads = [
            node.node_id
            for node in self.nodes
            if node.agent is not None and node.agent.member.leader is not None
        ]
        agents = [node.agent for node in self.nodes if node.agent is not None]
        num_here = len({agent.card.identity for agent in agents} & electorate(newest.voters))
        if 2 * num_here <= len(newest.voters):
            return False  # it still makes steps and is about to pause
        if leads != [newest.leader] or self.invariants.step_generation != newest.generation:
            return False
        group = self._groups.get(newest.generation)
        if group is None or group.is_broken:
            return False
        members = [self.network.nodes[one.node_id] for one in newest.members]
        if any(node.smp is None or node.smp.committed is None for node in members):
            return False
        if self.invariants.committed_s < self.scenario.faults_end_s:
            return False  # snapshots continue, too
        cluster_size = self.scenario.settings.cluster_size
        endpoint = self.nodes[0].agent
        barred = self._barred_by(newest.leader)
        here = sum(
            node.agent is not None
            and node.node_id not in barred
            and (
                endpoint is not None
                or node.agent.member.role in (MemberRole.FOLLOWING, MemberRole.LEADING)
            )
            for node in self.nodes
        )
        return len(newest.members) == min(here, cluster_size.max_nodes)

    def _barred_by(self, leader_id: str) -> set[str]:
        """Nodes that run no ranks for an hour because they could load no checkpoint."""
        agent = self.network.nodes[leader_id].agent
        if not self.bad_loads or agent is None or agent.member.leader is None:
            return set()
        return agent.member.leader.monitor.excluded(now_s=agent.now_s)

    def _finish(self) -> str:
        """Runs until the run ends: every agent must exit with 0."""
        newest = self.invariants.newest
        assert newest is not None
        self.last_step = self._groups[newest.generation].step + 2
        agent = self.network.nodes[newest.leader].agent
        assert agent is not None
        assert agent.member.leader is not None
        peers = agent.member.leader.known.by_id
        expected = {
            node_id
            for node_id, peer in peers.items()
            if peer.linked
            and not peer.lost
            and (there := self.network.nodes[node_id].agent) is not None
            and there.leaves_since_s is None
        }
        end_s = self.world.now_s + 25.0 + AWAIT_UNRESPONSIVE_S
        while self.world.now_s < end_s and not self.world.is_over and not self._all_ended():
            self.world.run_until(self.world.now_s + 1.0)
        if self._was_stopped():
            return self._word()
        codes = {
            node_id: int(command.exit_code)
            for node_id, command in self.invariants.exits
            if node_id in expected
        }
        if codes != dict.fromkeys(sorted(expected), 0):
            raise Violation(f"the run is over, and not all nodes end with 0: {codes}")
        return "finished"

    def _all_ended(self) -> bool:
        is_late = self.world.now_s > self.scenario.faults_end_s + _BOOTED_S
        return is_late and all(node.agent is None for node in self.nodes)

    def _check_end(self) -> None:
        """The run has ended: checks that no other outcome was possible."""
        ends = [command for _, command in self.invariants.exits if not command.run_continues]
        codes = {int(command.exit_code) for command in ends}
        allowed = {
            int(code)
            for code in (ExitCode.NOT_ENOUGH_NODES, ExitCode.STATE_LOST, ExitCode.TRY_AGAIN)
        }
        if self.invariants.is_second_run or self._was_stopped():
            return
        if not codes <= allowed:
            raise Violation(f"it ends with {sorted(codes)}")

    def _was_stopped(self) -> bool:
        """Enough nodes received SIGTERM for this to count as the stop of the run."""
        return self.faults.counts.get("drain", 0) > 0 and any(
            command.exit_code == _TERMINATED and not command.run_continues
            for _, command in self.invariants.exits
        )

    def _must_converge(self) -> bool:
        """Whether the present nodes are certainly enough."""
        newest = self.invariants.newest
        here = [
            node
            for node in self.nodes
            if node.agent is not None
            and node.agent.leaves_since_s is None
            and (self.nodes[0].agent is not None or node.memory.kept is not None)
        ]
        settings = self.scenario.settings
        if any(node.exit is not None or self._gives_up_soon(node) for node in self.nodes):
            return False
        if newest is None:
            is_full = len(here) == len(self.nodes) and not self.invariants.accepted
            return is_full and len(here) >= settings.cluster_size.min_nodes
        if len(here) < settings.cluster_size.min_nodes:
            return False
        memories = {node.node_id: node.memory for node in here}
        record = self.invariants._newest_committed(newest)
        if record is not None and not (record.is_safe and can_have(record.version, memories)):
            return False
        ran = {member.node_id for member in newest.members}
        have_kept = {node.node_id for node in here if node.memory.kept is not None}
        if not ran & have_kept and not self.scenario.has_checkpoints:
            return False  # their commits are lost, and no node knows whether there were any
        if (
            record is None
            and not ran <= have_kept
            and (newest.restore is not None or self.invariants.has_sealed(newest.generation))
        ):
            return False  # it may still be committed, and be lost then
        restore = as_version(newest.restore)
        if record is None and restore is not None and not can_have(restore, memories):
            return False  # the same, of a version that a previous world has made
        names = [node.node_id for node in here]
        if self.bad_loads and self.invariants.may_go_back() and not self.loads_on(names):
            return False  # a plan from disk was accepted, and no checkpoint loads on all nodes
        # A generation that lost nodes have chosen needs the voters of the generation before.
        known = [
            plan.configuration_id
            for node in here
            if node.agent is not None and (plan := node.agent.member.follower.plan) is not None
        ]
        first = min(newest.configuration_id, max(known, default=newest.configuration_id))
        later = [at for at in self.invariants.accepted if at >= first]
        return all(self._can_decide(self.invariants.accepted[at], here) for at in later)

    def _gives_up_soon(self, node: Node) -> bool:
        """Its pause may end the node before it has connected to the others again."""
        agent = node.agent
        leader = agent.member.leader if agent is not None else None
        if agent is None or leader is None:
            return False
        if leader.ending is not None:
            return True
        return leader.pause.given_up(now_s=agent.now_s + _MEETS_WITHIN_S) is not None

    @staticmethod
    def _can_decide(plan: GenerationPlan, here: list[Node]) -> bool:
        voters = electorate(plan.voters)
        cards = [node.agent.card for node in here if node.agent is not None]
        agreed = {card.identity for card in cards}
        return carries(voters, agreed & voters)

    def _word(self) -> str:
        if self.invariants.is_second_run:
            return "new run" if self.invariants.is_new_run else "second run"
        codes = sorted({int(command.exit_code) for _, command in self.invariants.exits})
        if self._all_ended() or self.is_ending:
            return f"ended {' '.join(map(str, codes))}"
        leads = [node.agent.member.leader for node in self.nodes if node.agent is not None]
        if any(leader is not None and leader.pause.is_on for leader in leads):
            return "paused"
        return "running"

    def _state(self) -> str:
        found = []
        for node in self.nodes:
            agent = node.agent
            if agent is None:
                found.append(f"{node.node_id} off" if not node.is_on else f"{node.node_id} ended")
                continue
            member = agent.member
            leader = member.leader_card.node_id if member.leader_card is not None else "nobody"
            found.append(
                f"{node.node_id} {member.role.value} {leader} generation "
                f"{member.follower.generation}, promised {member.follower.vote.promised}"
            )
        return "; ".join(found)


def _checkpoint_name(step: int) -> str:
    return f"step-{step}"


def run_seed(
    seed: int,
    mode: str,
    *,
    prepare: Callable[[Simulation], None] | None = None,
    scenario: Scenario | None = None,
) -> Outcome:
    """Runs one seed once.

    Args:
        seed: of the world.
        mode: one of `MODES`.
        prepare: called with the simulation before it starts.
        scenario: replaces the scenario that the seed determines.
    """
    simulation = Simulation(seed, mode, scenario=scenario)
    if prepare is not None:
        prepare(simulation)
    problem, verdict = "", ""
    # A run makes few reference cycles, and lasts some hundredths of a second.
    gc.disable()
    logged = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # suppresses the warnings of injected faults
    try:
        verdict = simulation.run()
    except Violation as error:
        problem = str(error)
    except Exception as error:  # noqa: BLE001 - the seed of any error must be reported
        at = " in ".join(f"{one.name}:{one.lineno}" for one in _frames(error))
        problem = f"at {simulation.world.now_s:.3f} s: {error!r} in {at}"
    finally:
        gc.enable()
        logging.disable(logged)
    return _outcome(simulation, problem, verdict)


def _frames(error: Exception) -> list[traceback.FrameSummary]:
    return traceback.extract_tb(error.__traceback__)[:-4:-1]


def _outcome(simulation: Simulation, problem: str, verdict: str) -> Outcome:
    world, seen = simulation.world, simulation.invariants
    plans = [seen.chosen[at] for at in sorted(seen.chosen)]
    pairs = list(pairwise(plans))
    return Outcome(
        seed=world.seed,
        mode=simulation.scenario.mode,
        problem=problem,
        verdict=verdict or "violation",
        digest=world.trace_digest(),
        num_events=world.num_events,
        virtual_s=world.now_s,
        steps=seen.steps,
        generations=len(seen.chosen),
        commits=seen.commits,
        restores=seen.restores,
        messages=simulation.network.num_messages,
        new_leaders=sum(before.leader != after.leader for before, after in pairs),
        growths=sum(len(before.members) < len(after.members) for before, after in pairs),
        shrinkings=sum(len(before.members) > len(after.members) for before, after in pairs),
        faults=dict(simulation.faults.counts),
        log=tuple(world.log) if problem else (),
    )
