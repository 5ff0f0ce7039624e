"""The invariants, checked after every event.

one leader       no rank obeys two leaders in one generation
one timeline     after a newer generation has made a step, an older one makes none; a suspended or
                 dead rank makes none; each generation has the plan of the previous one
one version      all ranks start from one version, with the sealed bytes, and never from one that a
                 later generation did not start from
nothing lost     a committed version can be restored if at most m nodes of each group have lost
                 their memory since it was protected
never back       a generation starts from nothing older than that, unless its plan states it
departures       a draining node ends when the run no longer needs its state
fences           a message of an older generation changes nothing
fit              a node that fails its check gets no ranks
survivors        a parked rank makes no step and no seal; a generation that names survivors starts
                 with just these processes, which have made the last step; the next one names none
                 if it fails before its first step
budget           restarts are counted across leaders, and stay within their limit
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ftrun.errors import ExitCode
from ftrun.ids import Version
from ftrun.membership.events import Happening, MessageReceived
from ftrun.records.incidents import LifecycleChangeRejected
from ftrun.records.membership import GenerationChosen, VotersChanged
from ftrun.recovery import commands as do
from ftrun.wire.cluster.generation import ConfigurationId, GenerationPlan
from ftrun.wire.cluster.membership import Accept, LeaderHeartbeat, Prepare, Promise
from simulation.memory import Memory, can_have
from simulation.snapshots import as_version
from simulation.training import BEGINNING, Group, Ranks
from simulation.world import Violation

if TYPE_CHECKING:
    from simulation.node import Agent, Node
    from simulation.run import Simulation

_ORDERS = (
    do.StartRanks, do.CommitSnapshot, do.AbandonStep, do.SetFirstSnapshotStep,
    do.SetSnapshotInterval, do.RequestFinalSnapshot,
    do.SignalWorkers, do.UpdatePeerPorts, do.KillWorkers,
)  # fmt: skip
_ACTS = (do.Quiesce, do.InstallGeneration, *_ORDERS)
_SAID = ("is lost", "cannot be", "no present node has the memory")
"""The text by which a plan states that it resumes from an older version, or from the beginning."""
_STABLE_S = 6.0


@dataclass
class Record:
    """A committed version, and the nodes that have lost memory since it was protected."""

    version: Version
    protected_in: int
    groups: list[tuple[frozenset[str], int]]
    committed_s: float
    lost: set[str] = field(default_factory=set)

    @property
    def is_safe(self) -> bool:
        return all(len(self.lost & nodes) <= parity for nodes, parity in self.groups)


class Invariants:
    """The state of a run as an observer of all nodes sees it."""

    def __init__(self, simulation: "Simulation") -> None:
        self.simulation = simulation
        self.world = simulation.world
        self.chosen: dict[int, GenerationPlan] = {}
        self.newest: GenerationPlan | None = None
        self.accepted: dict[ConfigurationId, GenerationPlan] = {}
        """Plans that some agent has accepted, whether chosen or not."""
        self.states: dict[Version, int] = {}
        self.records: dict[Version, Record] = {}
        self.step_generation = -1
        self.steps = 0
        self.is_second_run = False
        """A second run has started although a first one exists; nothing is checked from then on."""
        self.is_new_run = False
        """No node has memory of the first run."""
        self.voter_revisions = 0
        self.went_back = 0
        self.commits = 0
        self.restores = 0
        self.stable_since_s = 0.0
        self.committed_s = -1.0
        """Time of the last commit on any node."""
        self.exits: list[tuple[str, do.EndRun]] = []
        self._stepped: dict[int, dict[int, int]] = {}
        """By generation with a step: the numbers of its processes, by rank."""
        self._processes: set[int] = set()
        self._leads: dict[int, str] = {}
        self._resolved: dict[int, int] = {}
        self._started: dict[int, Version | None] = {}
        self._decided: set[ConfigurationId] = set()
        """Voter sets that chosen plans have needed."""
        self._removed: set[Version] = set()
        self._adopted_s: dict[int, float] = {}
        self._sealed_s: dict[Version, float] = {}
        self._lost_s: dict[str, float] = {}

    def fail(self, reason: str) -> None:
        self.world.trace("!", reason)
        raise Violation(f"at {self.world.now_s:.3f} s: {reason}")

    # --- decisions ----------------------------------------------------------------------------

    def decided(
        self, agent: "Agent", event: Happening, before: int, found: list[do.Command]
    ) -> None:
        """Checks an agent's decision; `before` is the generation that it knew before the event."""
        node = agent.node
        if isinstance(event, MessageReceived):
            self._check_message(agent, event, before, found)
        for command in found:
            if isinstance(command, do.Send):
                if isinstance(command.message, Promise):
                    self._promises(node)
                elif isinstance(command.message, Accept):
                    self._announces(command.message.plan)
            elif isinstance(command, do.InstallGeneration):
                self.accepted.setdefault(command.plan.configuration_id, command.plan)
                self._adopted_s.setdefault(command.plan.generation, self.world.now_s)
            elif isinstance(command, do.PersistPlan):
                self.accepted.setdefault(command.plan.configuration_id, command.plan)
            elif isinstance(command, do.JournalEntry):
                self._notes(agent, command)

    def _notes(self, agent: "Agent", command: do.JournalEntry) -> None:
        record = command.record
        if isinstance(record, LifecycleChangeRejected):
            self.fail(f"the life of a run goes from state to state only: {record}")
        if not isinstance(record, GenerationChosen | VotersChanged):
            return
        assert agent.member.leader is not None
        assert agent.member.leader.plan is not None
        if isinstance(record, GenerationChosen):
            self._becomes_chosen(agent.member.leader.plan, agent.node)
        else:
            self._other_voters(agent.member.leader.plan)

    def _check_message(
        self, agent: "Agent", event: MessageReceived, before: int, found: list[do.Command]
    ) -> None:
        body, sender = event.message, event.node_id
        acts = [command for command in found if isinstance(command, _ACTS)]
        if isinstance(body, LeaderHeartbeat | Prepare) and body.generation < before and acts:
            self.fail(f"{agent.node.node_id} does {acts} on the word of an older generation")
        if isinstance(body, Accept) and body.plan.generation < before and acts:
            self.fail(f"{agent.node.node_id} does {acts} on a plan of an older generation")
        if isinstance(body, LeaderHeartbeat) and any(isinstance(one, _ORDERS) for one in found):
            first = self._leads.setdefault(body.generation, sender)
            if first != sender:
                self.fail(f"{first} and {sender} are both obeyed in generation {body.generation}")

    def _promises(self, node: "Node") -> None:
        ranks = node.ranks
        if ranks is not None and ranks.are_alive and not ranks.is_parked:
            self.fail(f"{node.node_id} promises while its ranks live")

    def _announces(self, plan: GenerationPlan) -> None:
        for member in plan.members:
            agent = self.simulation.network.nodes[member.node_id].agent
            if agent is None or agent.card.incarnation != member.card.incarnation:
                continue
            fitness = agent.member.follower.fitness
            if fitness is not None and not fitness.is_fit:
                self.fail(f"generation {plan.generation} gives ranks to {member.node_id}, unfit")
        wanted = as_version(plan.restore)
        if wanted is not None and not self._is_on_timeline(wanted, self._newest_known(plan)):
            self.fail(f"generation {plan.generation} wants {wanted}, which was left behind")

    def _newest_known(self, plan: GenerationPlan) -> GenerationPlan | None:
        older = [one for at, one in self.chosen.items() if at < plan.generation]
        return max(older, key=lambda one: one.generation, default=None)

    def _becomes_chosen(self, plan: GenerationPlan, node: "Node") -> None:
        previous = self.newest
        if previous is not None and plan.generation < previous.generation:
            self._was_chosen_before(plan)
            return
        if previous is not None:
            # Another run may have reached the same number.
            same = {card.identity for card in previous.voters}
            known = [
                one for one in plan.decided_by if one.configuration_id != previous.configuration_id
            ]
            known += [one for one in plan.decided_by if same & set(one.identities)]
            if (
                max((one.configuration_id for one in known), default=(-1, 0))
                < previous.configuration_id
            ):
                self._unknown_to(plan, previous, node)
                if self.is_second_run:
                    return
            if plan.staying and self.step_generation != previous.generation:
                self.fail(f"generation {plan.generation} has survivors of one without a step")
            self._check_restore(plan, previous)
            self._continues_without(plan, previous)
            self._check_budget(plan, previous)
        elif plan.restore is not None:
            self.fail(f"the first generation starts from {plan.restore}")
        elif other := self._concurrent_plan(plan):
            self._unknown_to(plan, other, node)
        self._note_chosen(plan)

    def _note_chosen(self, plan: GenerationPlan) -> None:
        self.chosen[plan.generation] = self.newest = plan
        self._decided.update(voters.configuration_id for voters in plan.decided_by)

    def _was_chosen_before(self, plan: GenerationPlan) -> None:
        """The proposer received the acceptance late: the next proposer must have known the plan."""
        later = [one for at, one in self.chosen.items() if at > plan.generation]
        # A voter revision of a later plan names that plan, and no longer the one before it.
        is_known = plan.configuration_id in self._decided
        if not is_known or self.accepted.get(plan.configuration_id) != plan:
            self._unknown_to(plan, later[0], self.simulation.network.nodes[plan.leader])

    def _other_voters(self, plan: GenerationPlan) -> None:
        """New voters of a running generation: the plan of its successor must know them."""
        self.voter_revisions += 1
        newest = self.newest
        assert newest is not None
        later = newest if newest.generation > plan.generation else plan
        wanted = plan.configuration_id if later is newest else newest.configuration_id
        if all(voters.configuration_id != wanted for voters in later.decided_by):
            self.fail(f"{later.configuration_id} does not know that {wanted} was chosen")
        if later is plan:
            self._note_chosen(plan)

    def _unknown_to(self, plan: GenerationPlan, previous: GenerationPlan, node: "Node") -> None:
        """A node that cannot know of a run may start another run; a node that can know must not."""
        is_first = self._is_first(plan)
        knowing = [
            other.node_id
            for other in self.simulation.nodes
            if other.agent is not None
            and not other.agent.is_paused
            and other.agent.member.follower.newest_plan not in (None, plan)
            and not self._is_blank(other)
        ]
        connects = self.simulation.network.connects
        reached = [one for one in knowing if connects(one, node.node_id)]
        is_stable = self.world.now_s - self.stable_since_s >= self._stable_s(reached)
        # A run that has ended may be followed by another one.
        is_stable &= not self.simulation.is_ending
        if not is_first or (reached and is_stable):
            self.fail(
                f"generation {plan.generation} of {plan.leader} does not know of generation "
                f"{previous.generation} of {previous.leader} ({reached} could have reported it)"
            )
        self.is_second_run = True
        # If no node has memory of the first run, the first run no longer exists.
        self.is_new_run = all(
            self._is_blank(one) or one.memory.kept[0].life == plan.life
            for one in self.simulation.nodes
        )
        self.world.is_over = True

    def _is_first(self, plan: GenerationPlan) -> bool:
        """No voter of the plan has been a voter of a run, according to their own memory."""
        if all(voters.generation < 0 for voters in plan.decided_by):
            return True
        before = {card.identity for one in self.chosen.values() for card in one.voters}
        return not any(before & set(voters.identities) for voters in plan.decided_by)

    def _concurrent_plan(self, plan: GenerationPlan) -> GenerationPlan | None:
        """Some agent has accepted a plan that the first chosen plan does not know."""
        known = {plan.configuration_id} | {voters.configuration_id for voters in plan.decided_by}
        agents = [node.agent for node in self.simulation.nodes]
        plans = [agent.member.follower.newest_plan for agent in agents if agent is not None]
        return next(
            (one for one in plans if one is not None and one.configuration_id not in known), None
        )

    def _stable_s(self, reached: list[str]) -> float:
        """A settled leader connects to the endpoint to find new nodes, which takes this time."""
        scenario = self.simulation.scenario
        agents = [self.simulation.network.nodes[node_id].agent for node_id in reached]
        leads = [agent.member.leader for agent in agents if agent is not None]
        samples = any(leader is not None and leader.is_settled for leader in leads)
        is_orderly = not (scenario.unruly or self.simulation.network.slow)
        return scenario.settings.blank_wait_s if samples and is_orderly else _STABLE_S

    @staticmethod
    def _is_blank(node: "Node") -> bool:
        return node.memory.kept is None

    def _check_restore(self, plan: GenerationPlan, previous: GenerationPlan) -> None:
        wanted = as_version(plan.restore)
        if wanted is not None and not self._is_on_timeline(wanted, previous):
            self.fail(f"generation {plan.generation} starts from {wanted}, which was left behind")
        newest = self._newest_committed(previous)
        if newest is None or (wanted is not None and wanted.step >= newest.version.step):
            return
        self.went_back += 1
        is_said = any(words in plan.restore_reason for words in _SAID)
        is_known = any(node.memory.kept is not None for node in self.simulation.nodes)
        # If an older version is available, the wait for nodes that hold newer ones ends.
        if (newest.is_safe and not (is_said and self._has_older(plan))) or (
            not is_said and is_known and self._was_received(newest, plan)
        ):
            self.fail(
                f"generation {plan.generation} starts from {wanted}, and {newest.version} was "
                f"committed; lost memory since: {sorted(newest.lost)}; said: "
                f"{plan.restore_reason!r}"
            )

    def _continues_without(self, plan: GenerationPlan, previous: GenerationPlan) -> None:
        """Nodes that are not in the new generation keep no older version for it.

        If the plan goes back to an older version, these nodes have dropped it for newer ones.
        """
        here = {card.node_id for card in plan.voters}
        start, newest = as_version(plan.restore), self._newest_committed(previous)
        if start is None:
            return
        goes_back = newest is not None and start.step < newest.version.step
        for record in self.records.values():
            if record.version < start or (goes_back and record.version == start):
                record.lost |= {one for nodes, _ in record.groups for one in nodes} - here

    def _was_received(self, record: Record, plan: GenerationPlan) -> bool:
        """Some node of the new generation received this commit."""
        for card in plan.voters:
            agent = self.simulation.network.nodes[card.node_id].agent
            reported = as_version(agent.member.follower.committed) if agent is not None else None
            if reported == record.version:
                return True
        return False

    def _check_budget(self, plan: GenerationPlan, previous: GenerationPlan) -> None:
        limit = self.simulation.scenario.settings.profile.restart.budget
        if len(plan.history.spent_ages_s) > limit:
            self.fail(f"{len(plan.history.spent_ages_s)} restarts, and {limit} are allowed")
        if plan.history.restarts < previous.history.restarts:
            self.fail(f"generation {plan.generation} has forgotten restarts")

    # --- versions -----------------------------------------------------------------------------

    def _is_on_timeline(self, wanted: Version, newest: GenerationPlan | None) -> bool:
        """Whether the newest generation made this version or descends from it."""
        while newest is not None:
            if wanted.generation == newest.generation:
                return True
            start = self._started.get(newest.generation, as_version(newest.restore))
            if start is None or wanted.generation > start.generation:
                return False
            if wanted.generation == start.generation:
                return wanted.step <= start.step
            newest = self.chosen.get(start.generation)
        return False

    def _newest_committed(self, plan: GenerationPlan | None) -> Record | None:
        found = [
            one
            for one in self.records.values()
            if one.version.generation >= 0 and self._is_on_timeline(one.version, plan)
        ]
        return max(found, key=lambda one: one.version.step, default=None)

    def sealed(self, taken: Version, state: int) -> None:
        self._sealed_s.setdefault(taken, self.world.now_s)
        if self.states.setdefault(taken, state) != state:
            self.fail(f"ranks seal different states of {taken}")

    def has_sealed(self, generation: int) -> bool:
        return any(taken.generation == generation for taken in self._sealed_s)

    def restored(
        self, node: "Node", plan: GenerationPlan, version: Version | None, state: int
    ) -> None:
        """A node's ranks have read the version that they start from."""
        self.restores += version is not None
        first = self._started.setdefault(plan.generation, version)
        if first != version:
            self.fail(f"in generation {plan.generation} ranks start from {first} and {version}")
        should_be = BEGINNING if version is None else self.states.get(version)
        if state != should_be:
            self.fail(f"{node.node_id} has read {version}, and it is not what was sealed")

    def started(self, ranks: Ranks) -> None:
        """A node starts its ranks, in new processes or in parked ones."""
        plan, processes, node_id = ranks.plan, ranks.processes, ranks.node.node_id
        is_known = processes.number in self._processes
        self._processes.add(processes.number)
        # A node that was paused may start a generation after later ones.
        last = max((at for at in self._stepped if at < plan.generation), default=-1)
        for rank in ranks.locals:
            stays = rank in plan.staying
            if stays != is_known:
                self.fail(
                    f"rank {rank} stays: {stays}; its process on {node_id} is new: {not is_known}"
                )
            if stays and self._stepped.get(last, {}).get(rank) != processes.number:
                self.fail(f"rank {rank} stays in a process that has not made the last step")
        limit = self.simulation.scenario.settings.profile.restart.max_renewals
        restored = plan.restore[1] if plan.restore is not None else -1
        if is_known and not (processes.renewals <= limit and restored >= processes.first_step):
            self.fail(f"{node_id} starts {plan.restore} with {processes}")

    def step_made(self, group: Group, members: list[Ranks]) -> None:
        generation = group.plan.generation
        self.steps += 1
        for ranks in members:
            if not ranks.can_move or ranks.is_parked:
                self.fail(f"a rank of {ranks.node.node_id} that cannot move has made a step")
            for rank in ranks.locals:
                self._stepped.setdefault(generation, {})[rank] = ranks.processes.number
        if generation < self.step_generation:
            self.fail(
                f"generation {generation} makes a step after generation {self.step_generation}"
            )
        self.step_generation = max(self.step_generation, generation)

    def committed(self, node: "Node", version: Version) -> None:
        """A node's SMP treats this version as committed."""
        if node.smp is None or node.smp.generation < 0:
            self.fail(f"{node.node_id} commits {version} before it received any generation")
            return
        plan = node.agent.executor.plan if node.agent is not None else None
        if plan is None:
            return  # an earlier agent began the generation; the next one receives its commit
        self.committed_s = self.world.now_s
        before = self.records.get(version)
        if before is not None and before.protected_in >= plan.generation:
            return
        if plan.generation not in self.chosen:
            return
        if before is not None and plan.is_resized and version == as_version(plan.restore):
            return  # its previous protection remains in use
        if version.generation >= 0 and version not in self.states:
            self.fail(f"{version} is committed, and no rank has sealed it")
        self.commits += 1
        groups = [(frozenset(group), plan.parity) for group in plan.groups]
        if not groups:
            groups = [(frozenset(one.node_id for one in plan.members), 0)]
        groups = [
            (nodes, parity if len(nodes) > parity and not self._is_bare(nodes, version) else 0)
            for nodes, parity in groups
        ]
        record = Record(version, plan.generation, groups, self.world.now_s)
        since_s = max(self._adopted_s[plan.generation], self._sealed_s.get(version, 0.0))
        record.lost |= {one for one, at_s in self._lost_s.items() if at_s >= since_s}
        record.lost |= {
            one.node_id
            for one in self.simulation.nodes
            if any(not slot.is_whole for slot in one.memory.slots if slot.version == version)
            or any(part.given != part.digests for part in one.memory.parts)
        }
        self.records[version] = record
        if version.generation >= 0 and self._is_on_timeline(version, self.newest):
            self._check_protection(record)

    def _is_bare(self, nodes: frozenset[str], version: Version) -> bool:
        """A node of the group cannot store its part; training continues unprotected."""
        agents = [self.simulation.network.nodes[one].agent for one in nodes]
        links = [agent.executor.smp for agent in agents if agent is not None]
        return any(link.unprotected and link.ready == version for link in links)

    def _check_protection(self, record: Record) -> None:
        """Removes each choice of m nodes of each group: the version must still be restorable."""
        if record.lost:
            return
        turn = self.commits
        memories = self._memories()
        for nodes, parity in record.groups:
            ordered = sorted(nodes)
            for position in range(parity):
                memories.pop(ordered[(turn + position) % len(ordered)], None)
        if not can_have(record.version, memories):
            self.fail(f"{record.version} is committed and does not tolerate the loss of m nodes")

    def memory_lost(self, node: "Node") -> None:
        """Or damaged, which is as bad."""
        self._lost_s[node.node_id] = self.world.now_s
        for record in self.records.values():
            record.lost.add(node.node_id)
            self._removed.add(record.version)

    def removed(self, version: Version) -> None:
        """A slot or a protected part of this version no longer exists."""
        self._removed.add(version)

    def after_event(self, agent: "Agent") -> None:
        if self.is_second_run:
            return
        leader = agent.member.leader
        if leader is not None and leader.is_settled and leader.plan is not None:
            at = leader.plan.generation
            first = self._resolved.setdefault(at, agent.card.incarnation)
            if first != agent.card.incarnation:
                self.fail(f"two agents lead generation {at}")
        if self._removed:
            self._check_nothing_lost()

    def _check_nothing_lost(self) -> None:
        removed, self._removed = self._removed, set()
        newest = self._newest_committed(self.newest)
        if newest is None or not newest.is_safe or newest.version not in removed:
            return
        memories = self._memories()
        if can_have(newest.version, memories) or self.may_go_back():
            return
        later = [
            one
            for one in self.states
            if one.step > newest.version.step and self._is_on_timeline(one, self.newest)
        ]
        if not any(can_have(one, memories) for one in later):
            self.fail(
                f"{newest.version} was committed (in generation {newest.protected_in}) and is "
                f"lost; nodes that lost memory since: {sorted(newest.lost)}"
            )

    def may_go_back(self) -> bool:
        """Some agent has accepted a plan that resumes from a version older than a lost commit.

        A node that held the commit may meet that plan later, and must take it as chosen.
        """
        return any(
            plan.configuration_id > self.newest.configuration_id
            and self._has_older(plan)
            and any(words in plan.restore_reason for words in _SAID)
            for plan in self.accepted.values()
            if self.newest is not None
        )

    def _has_older(self, plan: GenerationPlan) -> bool:
        """The run can resume from another version than the lost commit."""
        is_unknown = "may have been committed" in plan.restore_reason
        return self.simulation.scenario.has_checkpoints or plan.restore is not None or is_unknown

    def is_lost_at_commit(self) -> bool:
        """Too many nodes were lost so shortly before the newest commit that no heartbeat was late.

        The commit frees the version before it, which may have survived their loss.
        """
        newest = self._newest_committed(self.newest)
        if newest is None or newest.is_safe:
            return False
        scenario = self.simulation.scenario
        interval_s = scenario.settings.times.heartbeat_interval_s
        since_s = newest.committed_s - 3 * interval_s - scenario.tick_s
        return min(self._lost_s.get(one, -1.0) for one in newest.lost) >= since_s

    def _memories(self) -> dict[str, Memory]:
        return {node.node_id: node.memory for node in self.simulation.nodes if node.is_on}

    # --- the end ------------------------------------------------------------------------------

    def ended(self, node: "Node", command: do.EndRun) -> None:
        """An agent ends by itself."""
        self.exits.append((node.node_id, command))
        if command.exit_code in (ExitCode.USAGE, ExitCode.BUG):
            self.fail(f"{node.node_id} ends with {command.exit_code}: {command.reason}")
        if command.exit_code == ExitCode.STATE_LOST:
            self._check_refusal(node, command)
        if command.run_continues:
            self._check_departure(node)
        self.simulation.agent_ended(node, command)

    def _check_departure(self, node: "Node") -> None:
        agent, newest = node.agent, self._newest_committed(self.newest)
        if agent is None or agent.leaves_since_s is None:
            self.fail(f"{node.node_id} leaves, and was not asked to")
            return
        # The leader measures this time with its own clock.
        limit_s = self.simulation.scenario.settings.let_go_s * node.slowest_rate
        if newest is None or self.world.now_s - agent.leaves_since_s >= limit_s:
            return
        if any(node.node_id in nodes for nodes, _ in newest.groups) and not self._is_ready(newest):
            self.fail(f"{node.node_id} leaves, and a part in protecting {newest.version} with it")
        memories = self._memories()
        if newest.is_safe and can_have(newest.version, memories):
            memories.pop(node.node_id, None)
            if not can_have(newest.version, memories):
                self.fail(f"{node.node_id} leaves with the only copy of {newest.version}")

    def _is_ready(self, record: Record) -> bool:
        """All members of the running generation protect it; some may not know of the commit."""
        plan = self.newest
        if plan is None:
            return False
        memories = [self.simulation.network.nodes[one.node_id].memory for one in plan.members]
        return all(
            any(
                part.is_complete
                and part.version == record.version
                and part.record is not None
                and part.record.protected_in == plan.generation
                for part in memory.parts
            )
            for memory in memories
        )

    def _check_refusal(self, node: "Node", command: do.EndRun) -> None:
        """A run that reports its state as lost must not be able to restore it."""
        if self.world.now_s - self.stable_since_s < _STABLE_S:
            return
        newest = self._newest_committed(self.newest)
        connects = self.simulation.network.connects
        reached = {
            other.node_id: other.memory
            for other in self.simulation.nodes
            if other.agent is not None
            and not other.agent.is_paused
            and (other is node or connects(node.node_id, other.node_id))
        }
        here = [other.node_id for other in self.simulation.nodes if other.is_on]
        if name := self.simulation.loads_on(here):
            self.fail(f"{node.node_id} says {command.reason!r}, and {name} loads on all nodes")
        if newest is not None and can_have(newest.version, reached):
            self.fail(f"{node.node_id} says {command.reason!r}, and {newest.version} is there")
