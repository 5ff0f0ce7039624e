"""Runs with an outside witness, which dies, loses its memory, is cut off, and breaks ties.

The worlds, faults and invariants are the same as without it. Most worlds have two or four nodes,
where its vote decides.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
from made_settings import changed

from ftrun.config.cluster import ClusterSize
from ftrun.membership import ballots
from ftrun.membership import witness as witness_rules
from ftrun.membership.leader import failure_detector as attendance
from ftrun.recovery.commands import QueryWitness
from simulation.run import Outcome, Simulation, run_seed
from simulation.scenario import MODES, Scenario
from simulation.sweep import checked, first_violation
from simulation.test_mishaps import BEGINS_S, quiet
from simulation.witness import WitnessModel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

CHUNK = 100
AGAIN_EVERY = 19
"""One in this number of runs is run twice; odd, so that both modes are."""
RUNS_TO_FIND = 1500
HALVED_S = 30.0
"""Worlds that are split in halves run for this time before their faults end."""
_TWO = ((1, 2, 0), (1, 2, 0), (1, 1, 1), (1, 1, 1), (2, 2, 0))
_MORE = ((1, 2, 1), (2, 2, 1), (2, 4, 0), (2, 2, 2), (3, 3, 1))
OPERATIONS = [ClusterSize(*numbers) for numbers in (*_TWO, *_MORE)]


def with_witness(simulation: Simulation) -> None:
    """The nodes of this world find each other at a witness, which fails, too."""
    random = Random(f"{simulation.world.seed}/witness/{simulation.scenario.mode}")
    simulation.witness = model = WitnessModel(simulation, random)
    simulation.scenario = scenario = _changed(simulation.scenario, random)
    for node in simulation.nodes[scenario.num_nodes :]:
        del simulation.network.nodes[node.node_id]
    del simulation.nodes[scenario.num_nodes :]
    end_s = simulation.scenario.faults_end_s
    names = [node.node_id for node in simulation.nodes]
    for _ in range(random.choice((0, 1, 2, 4))):
        at_s = random.uniform(0.0, end_s)
        until_s = min(end_s, at_s + random.choice((0.5, 3.0, 9.0)))
        if random.random() < 0.4:
            simulation.world.after(at_s, setattr, model, "is_up", False)
            simulation.world.after(until_s, setattr, model, "is_up", True)
        else:
            away = random.sample(names, random.randint(1, len(names)))
            simulation.world.after(at_s, model.cut.update, away)
            simulation.world.after(until_s, model.cut.difference_update, away)
    if random.random() < 0.1:
        simulation.world.after(random.uniform(2.0, end_s), model.forget)
    if scenario.faults_end_s == HALVED_S:
        simulation.world.after(random.uniform(4.0, 8.0), _halve, simulation, model, random)


def _halve(simulation: Simulation, model: WitnessModel, random: Random) -> None:
    """Half of the nodes are cut off from the others, and perhaps also from the witness."""
    nodes = list(simulation.nodes)
    if random.random() < 0.5:
        random.shuffle(nodes)
    half, rest = nodes[: len(nodes) // 2], nodes[len(nodes) // 2 :]
    simulation.faults.cut("split in halves", half[0], half, rest, for_s=20.0)
    after = simulation.world.after
    if random.random() < 0.5:
        model.cut.update(node.node_id for node in half)
        after(20.0, model.cut.clear)
    else:  # both halves notice it at the same time, and no valid lease exists
        model.is_up = False
        after(random.uniform(4.0, 6.0), setattr, model, "is_up", True)


def _changed(scenario: Scenario, random: Random) -> Scenario:
    fits = [one for one in OPERATIONS if one.max_nodes + one.spares <= scenario.num_nodes]
    cluster_size = (
        random.choice(fits) if fits and not scenario.plot else scenario.settings.cluster_size
    )
    num_nodes = cluster_size.max_nodes + cluster_size.spares
    is_halved = num_nodes % 2 == 0 and not scenario.plot and random.random() < 0.4
    has_checkpoints = scenario.has_checkpoints or is_halved
    settings = changed(
        scenario.settings,
        cluster_size=cluster_size,
        etcd=["etcd:2379"],
        has_checkpoints=has_checkpoints,
    )
    late_nodes = min(scenario.late_nodes, num_nodes - 1)
    return replace(
        scenario,
        settings=settings,
        num_nodes=num_nodes,
        late_nodes=late_nodes,
        has_checkpoints=has_checkpoints,
        num_faults=random.choice((0, 0, 1)) if is_halved else scenario.num_faults,
        faults_end_s=HALVED_S if is_halved else scenario.faults_end_s,
    )


def run(seed: int, mode: str) -> Outcome:
    return run_seed(seed, mode, prepare=with_witness)


@pytest.mark.parametrize("first", [0, CHUNK, pytest.param(2 * CHUNK, marks=pytest.mark.full)])
def test_a_witness_that_fails_causes_no_violation(first: int) -> None:
    found = [*checked(range(first, first + CHUNK), with_witness)]
    for outcome in found[::AGAIN_EVERY]:
        assert run(outcome.seed, outcome.mode) == outcome, "two runs of one seed differ"


def ties() -> Iterator[tuple[int, str]]:
    yield from ((seed, mode) for seed in range(RUNS_TO_FIND // 2) for mode in MODES)


def test_the_witness_breaks_ties() -> None:
    """Generations are chosen that no majority of nodes could have chosen."""
    broken: Counter[int] = Counter()

    def poll(simulation: Simulation) -> None:
        with_witness(simulation)
        seen = simulation.invariants
        real = seen._becomes_chosen

        def becomes_chosen(plan: ballots.GenerationPlan, node: object) -> None:
            agreed = ballots.electorate(plan.voters)
            for voters in plan.decided_by:
                nodes = [one for one in voters.identities if one[0] != ballots.WITNESS]
                is_tie = len(nodes) > 1 and 2 * len(agreed & set(nodes)) == len(nodes)
                broken[len(nodes)] += is_tie and len(nodes) < len(voters.identities)
            real(plan, node)  # type: ignore[arg-type]

        seen._becomes_chosen = becomes_chosen  # type: ignore[method-assign]

    verdicts: Counter[str] = Counter()
    for seed in range(100):
        verdicts[run_seed(seed, "liveness", prepare=poll).verdict] += 1
    assert broken[2] > 10, broken
    assert broken[4] > 0, broken
    assert verdicts["finished"] > 30, verdicts


# --- each rule is needed ----------------------------------------------------------------------


def _swaps_anyway(patch: pytest.MonkeyPatch) -> None:
    real = WitnessModel.__init__

    def begin(self: WitnessModel, simulation: Simulation, random: Random) -> None:
        real(self, simulation, random)
        self.swaps_anyway = True

    patch.setattr(WitnessModel, "__init__", begin)


def _promises_anybody(patch: pytest.MonkeyPatch) -> None:
    def rule(
        asked: QueryWitness,
        me: ballots.NodeCard,
        register: witness_rules.WitnessRegister | None,
        leader: ballots.NodeCard | None,
        *,
        new_life: int,
    ) -> witness_rules.WitnessDecision:
        life = register.life if register is not None else new_life
        known = register.plan if register is not None else None
        proposer = me.identity
        kept = witness_rules.WitnessRegister(life, asked.generation, proposer, asked.plan or known)
        return witness_rules.WitnessDecision(True, kept, leader or me)

    patch.setattr("simulation.witness.rule", rule)


def test_a_leader_that_is_cut_off_from_the_witness_too_is_not_sure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has half of the votes; the other half and the witness continue without it."""

    def cut_off(simulation: Simulation) -> None:
        random = Random(f"{simulation.world.seed}/witness")
        simulation.witness = model = WitnessModel(simulation, random)

        def cut() -> None:
            newest = simulation.invariants.newest
            assert newest is not None
            leader = simulation.network.nodes[newest.leader]
            rest = [node for node in simulation.nodes if node is not leader]
            simulation.faults.cut("cut off", leader, [leader], rest, for_s=12.0)
            model.cut.add(leader.node_id)

        simulation.world.after(BEGINS_S, cut)

    def problems() -> list[str]:
        found = []
        for seed in range(8):
            scenario = quiet(seed, ClusterSize(1, 1, 1))
            settings = changed(scenario.settings, etcd=["etcd:2379"], has_checkpoints=True)
            scenario = replace(scenario, settings=settings, has_checkpoints=True)
            found.append(run_seed(seed, "safety", prepare=cut_off, scenario=scenario).problem)
        return found

    assert problems() == [""] * 8
    with monkeypatch.context() as patch:
        patch.setattr(attendance.WitnessView, "holds", lambda self, life, limit_s, now_s: True)
        assert any("makes a step" in problem for problem in problems())


@pytest.mark.parametrize("break_it", [_swaps_anyway, _promises_anybody])
def test_a_rule_that_is_left_out_is_missed(
    break_it: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("does not know", "two agents lead", "both obeyed", "makes a step", "left behind")
    with monkeypatch.context() as patch:
        break_it(patch)  # type: ignore[operator]
        found = first_violation(ties(), words, with_witness)
    assert found is not None, f"{RUNS_TO_FIND} runs without the rule have no violation"
    assert not run(found.seed, found.mode).problem
