"""Runs in worlds with mishaps, see mishaps.py. Without each rule against them, a run fails."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

import pytest
from made_settings import changed

from ftrun.agent.snapshots.smp_client import UnconfirmedCommands
from ftrun.config.cluster import ClusterSize
from ftrun.errors import ExitCode
from ftrun.ids import Version
from ftrun.membership import ballots
from ftrun.membership.ballots import Electorate
from ftrun.membership.fencing import RankSuspension
from ftrun.membership.leader import leader as leader
from ftrun.membership.leader import reconfiguration as reconfiguration
from ftrun.membership.leader.checkpoint_agreement import disagreement
from ftrun.recovery.commands import EndRun
from ftrun.recovery.restore_point import _Held
from ftrun.recovery.snapshot_coordination import MemberReports
from ftrun.smp.memory.commits import CommitCoordinator
from ftrun.wire.cluster.generation import GenerationPlan
from ftrun.wire.cluster.membership import Accepted
from simulation.mishaps import has_mishaps
from simulation.run import Outcome, Simulation, run_seed
from simulation.scenario import MODES, Scenario, draw
from simulation.sweep import checked, story

SEEDS = 40
ROTATING = 10
BEGINS_S = 9.0
"""A generation runs by this time."""
KINDS = [
    "receives an interval late",
    *("agents of all members stop", "kill agent, and its ranks live on", "refuses"),
    *("ranks cannot be killed", "a thread of the agent dies"),
]

Patch = pytest.MonkeyPatch


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_worlds_with_mishaps_have_no_violation() -> None:
    faults: Counter[str] = Counter()
    for outcome in checked(range(SEEDS), has_mishaps, flags=" --mishaps"):
        faults.update(outcome.faults)
    assert {kind for kind in KINDS if not faults[kind]} == set()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_worlds_of_new_seeds_have_no_violation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = random.SystemRandom().randrange(10_000_000, 1_000_000_000)
    with capsys.disabled():
        print(f"\nsimulated worlds {first} to {first + ROTATING - 1}")
    seeds = range(first, first + ROTATING)
    for found in (checked(seeds), checked(seeds, has_mishaps, flags=" --mishaps")):
        assert len([*found]) == ROTATING * len(MODES)


# --- each rule is needed ----------------------------------------------------------------------


def quiet(seed: int, cluster_size: ClusterSize) -> Scenario:
    """A world without faults other than those that a test injects."""
    scenario = draw(seed, "safety")
    # With more spares than members the run resumes from a checkpoint without the members.
    has_checkpoints = cluster_size.spares > cluster_size.max_nodes
    settings = changed(
        scenario.settings,
        cluster_size=cluster_size,
        max_failures_per_hour=1000,
        last_call_timeout_s=1.0,
        has_checkpoints=has_checkpoints,
    )
    return replace(
        scenario,
        settings=settings,
        num_nodes=cluster_size.max_nodes + cluster_size.spares,
        late_nodes=0,
        num_ranks=1,
        unruly=0.0,
        step_s=0.3,
        plot="",
        num_faults=0,
        faults_end_s=25.0,
        has_checkpoints=has_checkpoints,
        load_s=0.1,
    )


def freeze_the_only_member(simulation: Simulation) -> None:
    """The agent is stopped, and its ranks are not; the spares continue."""

    def freeze() -> None:
        newest = simulation.invariants.newest
        assert newest is not None
        agent = simulation.network.nodes[newest.members[0].node_id].agent
        assert agent is not None
        agent.freeze()

    simulation.world.after(BEGINS_S, freeze)


def refuse_each_other(simulation: Simulation) -> None:
    """A firewall separates all nodes, and all of them are alive."""

    def refuse() -> None:
        network = simulation.network
        names = [node.node_id for node in simulation.nodes]
        network.refusing.update((a, b) for a in names for b in names if a != b)
        for node in simulation.nodes:
            for other in names:
                if node.agent is not None:
                    network.reset(node.agent, other)

    simulation.world.after(BEGINS_S, refuse)


def lose_all_with_a_bad_checkpoint(simulation: Simulation) -> None:
    """Both members are lost with their memory; another node cannot load the newest checkpoint."""
    simulation.bad_loads = 0.2

    def lose() -> None:
        newest = simulation.invariants.newest
        assert newest is not None
        for member in newest.members:
            simulation.network.nodes[member.node_id].power_off()

    simulation.world.after(BEGINS_S, lose)


def split_while_the_voters_change(simulation: Simulation) -> None:
    """Two spares start late. They and the leader are cut off from the others before they vote."""
    late = simulation.nodes[-2:]
    for node in late:
        simulation.world.after(0.25, node.power_off)
        simulation.world.after(BEGINS_S, node.boot, 0.1)

    def split() -> None:
        newest = simulation.invariants.newest
        assert newest is not None
        side = [simulation.network.nodes[newest.leader], *late]
        rest = [node for node in simulation.nodes if node not in side]
        simulation.faults.cut("split", side[0], side, rest, for_s=12.0)

    simulation.world.after(BEGINS_S + 0.5, split)


def _lease_without_end(patch: Patch) -> None:
    patch.setattr(RankSuspension, "_lease_s", lambda *_: None)


def _unanswered_is_dead(patch: Patch) -> None:
    """A refused connection counts as a dead process."""
    real = ballots.Ballot._no_more

    def no_more(
        self: ballots.Ballot, voters: Electorate, generation: int
    ) -> tuple[set[ballots.Identity], set[ballots.Identity]]:
        dead, gone = real(self, voters, generation)
        return dead | {voter for voter in voters if voter[0] not in self.promises}, gone

    patch.setattr(ballots.Ballot, "_no_more", no_more)


def _a_bad_checkpoint_ends_the_run(patch: Patch) -> None:
    def ends(plan: GenerationPlan, answers: dict[str, Accepted]) -> EndRun | dict[str, str] | None:
        found = disagreement(plan, answers)
        return EndRun(ExitCode.STATE_LOST, f"{found}") if found else None

    patch.setattr(leader, "disagreement", ends)


def _new_voters_decide_alone(patch: Patch) -> None:
    real = reconfiguration.carries

    def carries(voters: Electorate, agreed: set[ballots.Identity], **also: object) -> bool:
        return "gone" in also or real(voters, agreed)

    patch.setattr(reconfiguration, "carries", carries)


CASES = {
    "lease": ((1, 1, 2), freeze_the_only_member, _lease_without_end, "makes a step"),
    "refusals": ((1, 3, 0), refuse_each_other, _unanswered_is_dead, "does not know"),
    "checkpoints": (
        *((2, 2, 3), lose_all_with_a_bad_checkpoint),
        *(_a_bad_checkpoint_ends_the_run, "loads on all nodes"),
    ),
    "voters": (
        *((2, 2, 3), split_while_the_voters_change),
        *(_new_voters_decide_alone, "does not know"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("size", "prepare", "break_it", "words"), CASES.values(), ids=CASES)
def test_a_rule_that_is_left_out_is_missed(
    size: tuple[int, int, int],
    prepare: Callable[[Simulation], None],
    break_it: Callable[[Patch], None],
    words: str,
    monkeypatch: Patch,
) -> None:
    worlds = [quiet(seed, ClusterSize(*size)) for seed in range(8)]

    def runs() -> Iterator[Outcome]:
        for seed, world in enumerate(worlds):
            yield run_seed(seed, "safety", prepare=prepare, scenario=world)

    for outcome in runs():
        assert not outcome.problem, story(outcome)
    with monkeypatch.context() as patch:
        break_it(patch)
        assert any(words in outcome.problem for outcome in runs())


@pytest.mark.slow
def test_commits_do_not_stop_when_a_node_passes_a_step_that_others_take(
    monkeypatch: Patch,
) -> None:
    """Each node would wait for the other to seal what it holds itself."""

    def pass_one(simulation: Simulation) -> None:
        def late() -> None:
            ranks = simulation.nodes[1].ranks
            assert ranks is not None
            ranks.passes = 1

        simulation.world.after(BEGINS_S, late)

    assert [*islice(two_nodes_live(pass_one), 3)] == [""] * 3
    with monkeypatch.context() as patch:
        patch.setattr(MemberReports, "missed_step", lambda self, heartbeat: -1)
        assert any("no run after" in problem for problem in two_nodes_live(pass_one))


@pytest.mark.slow
def test_commits_do_not_stop_when_an_order_to_commit_is_lost(monkeypatch: Patch) -> None:
    """An SMP that ends loses the messages that its agent has sent it."""

    def lose_one(simulation: Simulation) -> None:
        real = CommitCoordinator.commit
        lost: list[CommitCoordinator] = []

        def commit(self: CommitCoordinator, wanted: Version) -> None:
            smp = simulation.nodes[1].smp
            is_its = smp is not None and smp.commits is self
            if is_its and not lost and simulation.world.now_s > BEGINS_S:
                lost.append(self)
            else:
                real(self, wanted)

        monkeypatch.setattr(CommitCoordinator, "commit", commit)

    assert [*islice(two_nodes_live(lose_one), 3)] == [""] * 3
    with monkeypatch.context() as patch:
        patch.setattr(UnconfirmedCommands, "due", lambda *_, **__: [])
        assert any("no run after" in problem for problem in two_nodes_live(lose_one))


@pytest.mark.slow
def test_a_commit_that_only_a_cut_off_leader_knows_is_waited_for(monkeypatch: Patch) -> None:
    """The first commit of this seed; two more nodes are lost before the leader returns."""

    def outcome() -> Outcome:
        return run_seed(71002930, "safety", prepare=has_mishaps)

    assert not outcome().problem, story(outcome(), " --mishaps")
    with monkeypatch.context() as patch:
        patch.setattr(_Held, "may_be_committed", False)
        assert "was committed (in generation 0) and is lost" in outcome().problem


def two_nodes_live(prepare: Callable[[Simulation], None]) -> Iterator[str]:
    """Violations in worlds of two nodes, one after the other; all must continue at the end."""
    for seed in range(8):
        scenario = replace(
            quiet(seed, ClusterSize(2, 2, 0)), mode="liveness", every=1, faults_end_s=14.0
        )
        yield run_seed(seed, "liveness", prepare=prepare, scenario=scenario).problem
