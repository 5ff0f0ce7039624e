"""The simulation finds no violation in the protocol, and finds one if a rule is removed."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import msgspec
import pytest
from made_settings import changed

from ftrun.config.profile import NetworkConfig
from simulation.plots import PLOTS
from simulation.probes import PathProbes
from simulation.run import Outcome, Simulation, run_seed
from simulation.scenario import MODES, draw
from simulation.sweep import checked, first_violation, story
from simulation.variants import VARIANTS, Variant

SEEDS, ALWAYS = 2000, 1000
"""Number of seeds in each mode: of a full run, and of a reduced run."""
CHUNK = 100
AGAIN_EVERY = 20
"""One in this number of runs is run twice."""
SOME = range(CHUNK // 2)
REQUEST_SEEDS = 30
RUNS_TO_FIND = 700
"""A variant must be found within this number of runs."""

HASHED = """
import sys
from simulation.run import run_seed
for seed in range(20):
    for mode in ("safety", "liveness"):
        print(run_seed(seed, mode).digest)
"""


@cache
def chunk(first: int) -> tuple[Outcome, ...]:
    return tuple(checked(range(first, first + CHUNK)))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("every", [0, 1000], ids=["drawn interval", "requests alone"])
def test_snapshots_that_checkpoints_request_break_no_rule(every: int) -> None:
    """`every`: steps between other snapshots; 0: as the seed draws it."""
    num_requested = num_missed = 0
    for seed in range(REQUEST_SEEDS):
        for mode in MODES:
            scenario = draw(seed, mode)
            often = msgspec.structs.replace(scenario.settings.profile.checkpoint, every_s=1.5)
            settings = changed(scenario.settings, checkpoint=often, orders_checkpoints=True)
            scenario = replace(scenario, settings=settings, every=every or scenario.every)
            found: list[Simulation] = []
            outcome = run_seed(seed, mode, scenario=scenario, prepare=found.append)
            assert not outcome.problem, f"seed {seed}, {mode}: {outcome.problem}"
            num_requested += found[0].num_requested
            num_missed += found[0].num_missed
    assert num_requested > REQUEST_SEEDS
    assert num_missed, "no node has received a request too late"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "first",
    [
        *range(0, ALWAYS, CHUNK),
        *(pytest.param(first, marks=pytest.mark.full) for first in range(ALWAYS, SEEDS, CHUNK)),
    ],
)
def test_no_seed_has_a_violation_and_runs_of_a_seed_are_equal(first: int) -> None:
    for outcome in chunk(first)[::AGAIN_EVERY]:
        again = run_seed(outcome.seed, outcome.mode)
        assert again == outcome, f"two runs of one seed differ: {story(outcome)}"


def has_unfit_nodes(simulation: Simulation) -> None:
    """Some nodes fail their check in the first seconds after each start of their agent."""
    random = Random(f"{simulation.world.seed}/fitness")
    names = [node.node_id for node in simulation.nodes]
    chosen = random.sample(names, random.randint(0, len(names)))
    simulation.unfit_s = {one: random.uniform(0.2, 6.0) for one in chosen}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_node_runs_ranks_that_fails_its_check() -> None:
    assert len([*checked(SOME, has_unfit_nodes)]) == len(SOME) * len(MODES)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.full) for first in (100, 200, 300))]
)
def test_a_ring_loses_no_version_that_it_protects(first: int) -> None:
    """Each node has a copy of the state of another one, as with `erasure.scheme: mirror`."""
    for seed in range(first, first + (CHUNK if first else CHUNK // 10)):
        for mode in MODES:
            drawn = draw(seed, mode)
            ring = {"erasure_ring": True, "erasure_parity": 1, "erasure_data": None}
            scenario = replace(drawn, settings=changed(drawn.settings, **ring))
            outcome = run_seed(seed, mode, scenario=scenario)
            assert not outcome.problem, story(outcome)


def has_firewalls(simulation: Simulation) -> None:
    """Half of the cuts refuse connections, as if the agents behind them were dead."""
    simulation.faults.resets = Random(f"{simulation.world.seed}/firewalls")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_refused_connection_proves_nothing() -> None:
    found = [one.faults.get("a firewall refuses", 0) for one in checked(SOME, has_firewalls)]
    assert sum(found) > CHUNK / 8


def has_rails(simulation: Simulation) -> None:
    """Two rails, a plan that is applied, and probes that fail, are late or never end."""
    random = Random(f"{simulation.world.seed}/rails")
    simulation.probes = PathProbes(random, num_rails=2, failure_rate=random.choice((0.0, 0.1, 0.5)))
    network = NetworkConfig(plan=random.choice(("report", "on", "on")))
    settings = changed(simulation.scenario.settings, network=network)
    simulation.scenario = replace(simulation.scenario, settings=settings)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_survey_in_which_nodes_die_or_answer_late_still_leads_to_generations() -> None:
    """Liveness worlds end in a generation that makes steps; any node may die at any moment."""
    probes: list[PathProbes] = []

    def prepare(simulation: Simulation) -> None:
        has_rails(simulation)
        assert simulation.probes is not None
        probes.append(simulation.probes)

    for _ in checked(SOME, prepare):
        pass
    assert sum(one.asked for one in probes) > CHUNK / 4


def test_a_seed_is_the_same_run_in_another_process() -> None:
    """If the order of a set has an influence, another process has another order."""
    digests = {_digests(hash_seed) for hash_seed in ("1", "2", "3")}
    assert len(digests) == 1


def _digests(hash_seed: str) -> str:
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root / "tests"), str(root)])
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path}
    command = [sys.executable, "-c", HASHED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout


def test_things_happen() -> None:
    """A simulation without faults or without progress proves nothing."""
    total: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    verdicts: Counter[str] = Counter()
    for first in range(0, ALWAYS, CHUNK):
        for outcome in chunk(first):
            total.update(outcome.happened)
            faults.update(outcome.faults)
            verdicts[f"{outcome.mode} {outcome.verdict}"] += 1
    assert {kind for kind in KINDS if not faults[kind]} == set()
    assert {what for what, count in total.items() if not count} == set()
    assert verdicts["liveness finished"] > ALWAYS / 3, verdicts
    assert verdicts["liveness new run"] < ALWAYS / 10, verdicts
    assert verdicts["liveness second run"] < ALWAYS / 100, verdicts


KINDS = [
    *("kill agent", "kill agent and SMP", "kill a rank", "kill SMP", "power off and on"),
    *("power off", "kill stub, agent and SMP", "freeze agent", "freeze node", "cut off"),
    *("cut from", "cut one way in", "cut one way out", "split off", "slow links", "flip bits"),
    *("only with", "SIGTERM", "drain", "has left", "power on", "stays off", "thaw agent"),
    *("thaw node", "heal", "reset a link"),
    *(f"plot {name}" for name in PLOTS),
]


# --- each rule is needed ----------------------------------------------------------------------


def candidates(variant: Variant) -> Iterator[tuple[int, str]]:
    """Worlds in which a missing rule may cause a violation."""
    left = RUNS_TO_FIND
    seed = 0
    while left:
        for mode in MODES:
            if left and variant.plot in ("", draw(seed, mode).plot):
                left -= 1
                yield seed, mode
        seed += 1


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_a_rule_that_is_left_out_is_missed(
    variant: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        variant.break_it(patch)
        found = first_violation(candidates(variant), variant.found_as)
    assert found is not None, f"{RUNS_TO_FIND} runs without the rule have no violation"
    whole = run_seed(found.seed, found.mode)
    assert not whole.problem, story(whole)
