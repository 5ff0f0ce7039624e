"""Lost nodes: the order of codes and placements, small cases by hand, and a simulation."""

import math
import random
from collections import Counter

import pytest
from failing_run import SURE, Fleet, interval_of, time_without_enough
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from ftrun.erasure.groups import make_groups
from ftrun.tools.estimate.survival import (
    GroupPlacement,
    NodeLossModel,
    at_least,
    best_spares,
    loss_per_s,
    lost_within,
    side_by_side,
    spread,
    too_few,
)

rates = st.floats(1e-12, 1e-4)
sizes = st.integers(2, 200)
parities = st.integers(1, 4)


def losses(
    node_per_s: float = 1e-6, *, domains_per_s: float = 0.0, window_s: float = 300.0
) -> NodeLossModel:
    return NodeLossModel(node_per_s, domains_per_s, window_s)


def sizes_of(placed: GroupPlacement) -> dict[int, int]:
    """The number of groups of each size."""
    found: Counter[int] = Counter()
    for (_, borne, fatal), count in placed.groups.items():
        found[sum(borne) + sum(fatal)] += count
    return found


# --- by hand ----------------------------------------------------------------------------------


def test_two_nodes_with_one_parity_are_lost_when_the_second_follows_in_time() -> None:
    placed = spread(2, data=1, parity=1, domain_nodes=1)
    p = 1 - math.exp(-1e-6 * 300.0)
    assert loss_per_s(placed, losses()) == pytest.approx(2 * 1e-6 * p)


def test_without_parity_each_lost_node_costs_the_state() -> None:
    placed = spread(8, data=1, parity=0, domain_nodes=1)
    assert loss_per_s(placed, losses(1e-6)) == pytest.approx(8e-6)


def test_the_share_of_failures_is_that_of_the_reliability_literature() -> None:
    """A group of 8, Llama 3's rate, 300 s: 9e-5 of the losses with one parity, 4e-9 with two."""
    rate = 3.79e-3 / 86_400
    for parity, expected in ((1, 9.2e-5), (2, 3.6e-9)):
        placed = spread(8, data=8 - parity, parity=parity, domain_nodes=1)
        share = loss_per_s(placed, losses(rate)) / (8 * rate)
        assert share == pytest.approx(expected, rel=0.02)


def test_a_domain_takes_what_the_code_bears_or_it_does_not() -> None:
    together = losses(0.0, domains_per_s=1e-6)
    borne = spread(64, data=6, parity=2, domain_nodes=8)
    assert (borne.worst, borne.pairs) == (1, 0)
    assert loss_per_s(borne, together) == 0.0
    too_many = spread(32, data=6, parity=2, domain_nodes=16)
    assert (too_many.worst, too_many.pairs) == (4, 0)
    assert loss_per_s(too_many, together) == pytest.approx(1e-6)


def test_two_domains_within_a_window_may_be_too_many() -> None:
    placed = spread(64, data=6, parity=2, domain_nodes=16)
    assert (placed.worst, placed.num_domains, placed.pairs) == (2, 4, 6)
    # For each of the four nodes, one of the three others is lost.
    expected = 1e-6 * 3 * (1e-6 / 4 * 300)
    found = loss_per_s(placed, losses(0.0, domains_per_s=1e-6))
    assert found == pytest.approx(expected, rel=1e-3)


def test_a_node_after_a_domain_is_as_bad_as_before_it() -> None:
    placed = spread(64, data=6, parity=2, domain_nodes=16)
    rate = losses(1e-9, domains_per_s=1e-6)
    pairs = loss_per_s(placed, losses(0.0, domains_per_s=1e-6))
    # The domain has two nodes of each of 8 groups, and one of the 6 others is enough.
    expected = 2 * 1e-6 * 8 * 6 * (1e-9 * 300)
    assert loss_per_s(placed, rate) - pairs == pytest.approx(expected, rel=0.01)


def test_a_last_domain_that_is_smaller_counts_as_one() -> None:
    placed = side_by_side(20, data=4, parity=1, domain_nodes=16)
    # Groups of 5; the domain of 16 has one node of the last group.
    assert placed.num_domains == 2
    assert placed.groups == {(1, (), (5,)): 3, (1, (), (1, 4)): 1}
    assert (1, {(5, 1, 4): 1}) in placed.domains
    assert loss_per_s(placed, losses(0.0, domains_per_s=1e-6)) == pytest.approx(1e-6)


@settings(deadline=None)
@given(st.integers(0, 30), st.integers(1, 30), st.floats(0.0, 1.0))
def test_the_tail_of_a_binomial_and_its_rest_are_all(least: int, of: int, p: float) -> None:
    rest = sum(math.comb(of, n) * p**n * (1 - p) ** (of - n) for n in range(min(least, of + 1)))
    assert at_least(least, of=of, p=p) == pytest.approx(1 - rest, abs=1e-9)


def test_what_never_happens_is_survived() -> None:
    assert lost_within(0.0, over_s=1e9) == 0.0
    assert lost_within(1e-3, over_s=1e3) == pytest.approx(1 - math.exp(-1))
    assert lost_within(1e-20, over_s=1.0) == pytest.approx(1e-20)


# --- order ------------------------------------------------------------------------------------


@settings(deadline=None)
@given(sizes, parities, st.integers(1, 32), rates, st.floats(1.01, 100.0))
def test_the_more_losses_the_sooner_the_state_is_lost(
    nodes: int, parity: int, domain_nodes: int, rate: float, times: float
) -> None:
    assume(nodes > parity)
    placed = spread(nodes, data=8 - parity, parity=parity, domain_nodes=domain_nodes)

    def found(more: float = 1.0, longer: float = 1.0, together: float = 1.0) -> float:
        return loss_per_s(placed, losses(rate * more, domains_per_s=rate * together,
                                         window_s=300.0 * longer))  # fmt: skip

    least = found() * (1 - 1e-9)
    assert found(more=times) >= least
    assert found(longer=times) >= least
    assert found(together=times) >= least


@settings(deadline=None)
@given(sizes, parities, st.integers(1, 32), st.floats(1e-9, 0.3))
# Each of the two domains is too large for one group; a third group tolerates either of them.
@example(20, 2, 10, 0.3)
def test_more_parity_in_groups_of_the_same_sizes_is_never_worse(
    nodes: int, parity: int, domain_nodes: int, gone: float
) -> None:
    """Holds if nodes are alive most of the time; otherwise the formula is too pessimistic."""
    assume(nodes > parity + 1)
    less, more = (
        spread(nodes, data=8 - m, parity=m, domain_nodes=domain_nodes) for m in (parity, parity + 1)
    )
    assume(sizes_of(less) == sizes_of(more))
    rate = gone / (nodes * 300.0)
    both = losses(rate, domains_per_s=rate)
    assert loss_per_s(more, both) <= loss_per_s(less, both) * (1 + 1e-9)


@settings(deadline=None)
@given(sizes, parities, st.integers(1, 64))
def test_no_domain_has_more_of_a_group_when_domains_are_spread(
    nodes: int, parity: int, domain_nodes: int
) -> None:
    assume(nodes > parity)
    apart = spread(nodes, data=8 - parity, parity=parity, domain_nodes=domain_nodes)
    adjacent = side_by_side(nodes, data=8 - parity, parity=parity, domain_nodes=domain_nodes)
    assert apart.worst <= adjacent.worst
    assert sizes_of(apart) == sizes_of(adjacent)


# --- a simulation -----------------------------------------------------------------------------

CASES = {
    "one parity, nodes alone": (16, 7, 1, 1, 1e-5, 0.0, 400.0, 6e8),
    "two parities, nodes alone": (16, 6, 2, 1, 1e-4, 0.0, 300.0, 1.2e8),
    "domains of four, one parity of two": (12, 4, 2, 4, 3e-5, 2e-5, 400.0, 2e8),
    "domains that one parity does not tolerate": (8, 3, 1, 4, 2e-6, 1e-5, 300.0, 2e8),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_simulation_loses_the_state_as_often(case: tuple[float, ...]) -> None:
    nodes, data, parity, domain_nodes = (int(one) for one in case[:4])
    node_per_s, domains_per_s, window_s, over_s = case[4:]
    names = [str(number) for number in range(nodes)]
    domains = {name: f"domain {int(name) // domain_nodes}" for name in names}
    groups = make_groups(names, data=data, parity=parity, domains=domains)
    fleet = Fleet(
        [group.nodes for group in groups], domains, parity, node_per_s, domains_per_s, window_s
    )
    found = fleet.losses(random.Random(1), over_s)
    placed = spread(nodes, data=data, parity=parity, domain_nodes=domain_nodes)
    per_s = loss_per_s(placed, NodeLossModel(node_per_s, domains_per_s, window_s))
    assert found > 200, "too few for a comparison"
    assert abs(found - per_s * over_s) <= SURE * math.sqrt(found)


# --- spares -----------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.floats(1e-6, 500.0), st.integers(0, 600))
def test_each_spare_helps_and_none_harms(mean: float, spares: int) -> None:
    assert 0.0 <= too_few(mean, spares + 1) <= too_few(mean, spares) + 1e-12 <= 1.0 + 1e-12


@settings(deadline=None)
@given(st.integers(1, 100_000), st.floats(0.0, 200.0))
def test_one_spare_more_or_less_trains_no_more(nodes: int, mean: float) -> None:
    def used(spares: int) -> float:
        return nodes / (nodes + spares) * (1 - too_few(mean, spares))

    best = best_spares(nodes, mean)
    assert used(best) >= used(best + 1) - 1e-9
    assert best == 0 or used(best) >= used(best - 1) - 1e-9


def test_where_no_node_is_lost_none_is_standby() -> None:
    assert too_few(0.0, 0) == 0.0
    assert best_spares(16, 0.0) == 0


def test_of_a_few_nodes_a_spare_costs_more_than_it_saves() -> None:
    assert best_spares(4, 0.001) == 0
    assert best_spares(4000, 0.001) == 1


@pytest.mark.parametrize(("mean", "spares"), [(0.5, 0), (0.5, 1), (4.0, 5)])
def test_repairs_by_chance_take_as_many_nodes(mean: float, spares: int) -> None:
    """Lognormal as LANL's: median 54 min, mean 355 min."""
    sigma = math.sqrt(2 * math.log(355 / 54))

    def sample(dice: random.Random) -> float:
        return time_without_enough(
            dice,
            lost_per_s=mean / (355 * 60.0),
            repair_s=lambda dice: 60.0 * dice.lognormvariate(math.log(54), sigma),
            spares=spares,
            over_s=3e7,
        )

    found, off = interval_of(sample, runs=30, seed=2)
    assert off < 0.2 * found, "too few runs for a comparison"
    assert abs(found - too_few(mean, spares)) <= off


# --- a mirror ---------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [2, 3, 8])
def test_a_mirror_loses_the_state_when_a_neighbour_follows(nodes: int) -> None:
    placed = spread(nodes, data=None, parity=1, domain_nodes=1, is_ring=True)
    p = 1 - math.exp(-1e-6 * 300.0)
    neighbours = min(2, nodes - 1)
    expected = nodes * 1e-6 * neighbours * p
    assert loss_per_s(placed, losses()) == pytest.approx(expected, rel=1e-3)


def test_neighbours_of_a_mirror_in_one_domain_are_lost_with_it() -> None:
    together = losses(0.0, domains_per_s=1e-6)
    apart = spread(4, data=None, parity=1, domain_nodes=2, is_ring=True)
    assert apart.worst == 1
    assert loss_per_s(apart, losses(0.0, domains_per_s=1e-6)) < 1e-8
    beside = side_by_side(4, data=None, parity=1, domain_nodes=2, is_ring=True)
    assert beside.worst == 2
    assert loss_per_s(beside, together) == pytest.approx(1e-6)
