"""Runs with a node whose ranks fail at every start, with failures that follow a rank, and drains.

A run with a spare never ends because of the hardware of one node. A failure that follows a rank, or
the program, excludes at most one node, and ends the run. Without a free spare, a reported fault
ends the run after one restart in place, and the reason says so.
"""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from made_settings import changed

from ftrun.config.cluster import ClusterSize
from ftrun.errors import ExitCode
from ftrun.events import ExitKind
from ftrun.recovery import repeated_causes
from simulation.run import Outcome, Simulation, run_seed
from simulation.scenario import Scenario, draw
from simulation.sweep import story
from simulation.training import Group, Ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SEEDS = range(12)
LASTS_S = 40.0
XID = "GPU 0 has reported XID 79"
KINDS = (ExitKind.EXCEPTION, ExitKind.EXIT_CODE)
Kinds = tuple[ExitKind, ...]
Failing = Callable[[Group], Ranks | None]


Prepare = Callable[["Case"], Failing | None]


class Case:
    """One world, and its simulation for the checks after its end."""

    def __init__(self, seed: int, sizes: tuple[ClusterSize, ...]) -> None:
        self.random = Random(f"{seed}/faulty")
        self.seed, self.size = seed, self.random.choice(sizes)
        self.first_s = self.random.uniform(4.0, 8.0)
        self.prepare: Prepare
        self.simulation: Simulation

    def run(self, prepare: Prepare) -> Outcome:
        self.prepare = prepare
        outcome = run_seed(self.seed, "safety", scenario=self._scenario(), prepare=self._begin)
        assert not outcome.problem, story(outcome)
        return outcome

    def node_ids(self, count: int) -> list[str]:
        return self.random.sample([node.node_id for node in self.simulation.nodes], count)

    def report_fault(self, node_id: str) -> None:
        """The node reports a fault a second before its ranks begin to fail."""
        node = self.simulation.network.nodes[node_id]
        self.simulation.world.after(self.first_s - 1.0, setattr, node, "fault", XID)

    @property
    def now_s(self) -> float:
        return self.simulation.world.now_s

    @property
    def exit_codes(self) -> set[int]:
        return {int(command.exit_code) for _, command in self.simulation.invariants.exits}

    @property
    def end_reasons(self) -> set[str]:
        return {command.reason for _, command in self.simulation.invariants.exits}

    @property
    def excluded(self) -> set[str]:
        """Nodes that any leader has excluded."""
        plans = self.simulation.invariants.chosen.values()
        return {node_id for plan in plans for node_id in plan.history.barred}

    @property
    def last_members(self) -> set[str]:
        newest = self.simulation.invariants.newest
        assert newest is not None
        return {node.node_id for node in newest.members}

    def _begin(self, simulation: Simulation) -> None:
        self.simulation = simulation
        simulation.faults.has_random = False
        simulation.failing = self.prepare(self)

    def _scenario(self) -> Scenario:
        drawn = draw(self.seed, "safety")
        size = self.size
        return replace(
            drawn,
            settings=changed(
                drawn.settings,
                cluster_size=size,
                budget=1000,
                same_cause_limit=3,
                max_failures_per_hour=1000,
                erasure_parity=1,
                erasure_data=None,
            ),
            num_nodes=size.max_nodes + size.spares,
            late_nodes=0,
            unruly=0.0,
            num_faults=0,
            num_left_off=0,
            plot="",
            faults_end_s=LASTS_S,
        )


WITH_SPARES = (
    ClusterSize(2, 2, 1),
    ClusterSize(3, 3, 1),
    ClusterSize(3, 3, 2),
    ClusterSize(2, 4, 0),
)
ALONE = (ClusterSize(2, 2, 0), ClusterSize(3, 3, 0))


def of_nodes(case: Case, node_ids: list[str]) -> Failing:
    """From a time on, the ranks on these nodes fail at their first step."""

    def failing(group: Group) -> Ranks | None:
        is_due = case.now_s >= case.first_s
        return next((group.ranks[one] for one in node_ids if is_due and one in group.ranks), None)

    return failing


def of_step(case: Case, chosen: Callable[[Group], Ranks]) -> Failing:
    """From a time on, the chosen ranks fail at one step, in every generation."""
    at: list[int] = []

    def failing(group: Group) -> Ranks | None:
        if case.now_s < case.first_s:
            return None
        at.append(group.step + 1)
        return chosen(group) if group.step + 1 >= at[0] else None

    return failing


def of_rank(case: Case) -> Failing:
    """One rank fails, on any node."""
    return of_step(case, lambda group: next(one for one in group.ranks.values() if 0 in one.locals))


def of_program(case: Case) -> Failing:
    """Another rank fails in each generation."""

    def chosen(group: Group) -> Ranks:
        found = [group.ranks[one] for one in sorted(group.ranks)]
        return found[group.plan.generation % len(found)]

    return of_step(case, chosen)


WITH_TWO_SPARES = (ClusterSize(2, 2, 2), ClusterSize(3, 3, 2), ClusterSize(2, 5, 0))


@pytest.mark.parametrize(
    ("sizes", "num_dead", "reports", "kinds"),
    [
        pytest.param(WITH_SPARES, 1, False, KINDS[:1], id="failures only"),
        pytest.param(WITH_SPARES, 1, False, KINDS, id="causes that alternate"),
        pytest.param(WITH_SPARES, 1, True, KINDS[:1], id="reported"),
        # Both are reported: otherwise a rank that fails on two nodes looks like the cause.
        pytest.param(WITH_TWO_SPARES, 2, True, KINDS[:1], id="two"),
    ],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_dead_gpu_costs_no_run_with_a_spare(
    seed: int, sizes: tuple[ClusterSize, ...], num_dead: int, reports: bool, kinds: Kinds
) -> None:
    case = Case(seed, sizes)
    dead: list[str] = []

    def prepare(case: Case) -> Failing:
        case.simulation.failing_kinds = kinds
        dead.extend(case.node_ids(num_dead))
        for node_id in dead if reports else ():
            case.report_fault(node_id)
        return of_nodes(case, dead)

    outcome = case.run(prepare)
    assert case.exit_codes == set(), story(outcome)
    assert not case.last_members & {*dead}, story(outcome)
    assert case.excluded <= {*dead}, story(outcome)
    assert outcome.steps > 10


@pytest.mark.parametrize("kinds", [KINDS[:1], KINDS], ids=["one cause", "causes that alternate"])
@pytest.mark.parametrize("failing", [of_rank, of_program])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_failure_of_the_program_ends_the_run(
    seed: int, failing: Callable[[Case], Failing], kinds: Kinds
) -> None:
    case = Case(seed, WITH_SPARES)

    def prepare(case: Case) -> Failing:
        case.simulation.failing_kinds = kinds
        return failing(case)

    outcome = case.run(prepare)
    assert case.exit_codes == {int(ExitCode.DO_NOT_RESTART)}, story(outcome)
    assert len(case.excluded) <= len(kinds), story(outcome)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_dead_gpu_without_a_spare_ends_the_run(seed: int) -> None:
    case = Case(seed, ALONE)
    outcome = case.run(lambda case: of_nodes(case, case.node_ids(1)))
    assert case.exit_codes == {int(ExitCode.DO_NOT_RESTART)}, story(outcome)
    assert case.excluded == set()


@pytest.mark.parametrize(
    ("sizes", "num_dead"),
    [
        pytest.param(ALONE, 1, id="there is none"),
        pytest.param((ClusterSize(2, 2, 1), ClusterSize(3, 3, 1)), 2, id="the only one is in use"),
    ],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_reported_fault_without_a_free_spare_ends_the_run_after_one_restart(
    seed: int, sizes: tuple[ClusterSize, ...], num_dead: int
) -> None:
    case = Case(seed, sizes)
    dead: list[str] = []

    def prepare(case: Case) -> Failing:
        dead.extend(case.node_ids(num_dead))
        for node_id in dead:
            case.report_fault(node_id)
        return of_nodes(case, dead)

    outcome = case.run(prepare)
    assert case.exit_codes == {int(ExitCode.NOT_ENOUGH_NODES)}, story(outcome)
    assert case.end_reasons <= {
        f"node {one} has a hardware fault, and no spare is free: {XID}" for one in dead
    }, story(outcome)
    plans = case.simulation.invariants.chosen.values()
    in_place = [one for one in plans if one.reason.endswith("keeps its ranks: no spare is free")]
    assert len(in_place) == 1, story(outcome)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_reported_fault_without_a_spare_costs_nothing_while_no_rank_fails(seed: int) -> None:
    case = Case(seed, ALONE)

    def prepare(case: Case) -> None:
        case.report_fault(case.node_ids(1)[0])

    outcome = case.run(prepare)
    assert case.exit_codes == set(), story(outcome)
    assert case.excluded == set()
    assert outcome.steps > 10


@pytest.mark.parametrize("seed", SEEDS)
def test_a_node_with_wrong_sums_loses_its_ranks_to_a_spare(seed: int) -> None:
    case = Case(seed, WITH_SPARES)

    def prepare(case: Case) -> None:
        simulation = case.simulation
        simulation.unfit_s = {}
        simulation.wrong_sums = set(case.node_ids(1))
        for at_s in (case.first_s, case.first_s + 12.0):  # the next leader finds it as well
            simulation.world.after(at_s, simulation.faults.kill_agent, simulation.nodes[0])

    outcome = case.run(prepare)
    wrong = case.simulation.wrong_sums
    assert case.exit_codes == set(), story(outcome)
    assert outcome.steps > 10
    assert case.excluded <= wrong, story(outcome)
    assert not case.last_members & wrong, story(outcome)


def test_without_the_exclusion_a_dead_gpu_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated_causes, "MAX_EXCLUDED_PER_HOUR", 0)
    ended = 0
    for seed in SEEDS:
        case = Case(seed, WITH_SPARES)
        case.run(lambda case: of_nodes(case, case.node_ids(1)))
        ended += case.exit_codes == {int(ExitCode.DO_NOT_RESTART)}
    assert ended > len(SEEDS) / 3


@pytest.mark.parametrize("seed", SEEDS)
def test_a_drained_node_ends_no_run_of_which_enough_nodes_are_left(seed: int) -> None:
    """Not while the agent of another node is being restarted, either."""
    case = Case(seed, WITH_SPARES)

    def prepare(case: Case) -> None:
        world, nodes = case.simulation.world, case.simulation.network.nodes
        drained, other = (nodes[one] for one in case.node_ids(2))
        at_s = case.first_s + 5.0  # the run has begun
        world.after(at_s, case.simulation.faults.ask_to_leave, drained)
        at_s += case.random.uniform(-2.0, 2.0)
        world.after(at_s, case.simulation.faults.kill_agent, other)

    outcome = case.run(prepare)
    exits = case.simulation.invariants.exits
    assert all(command.run_continues for _, command in exits), story(outcome)
