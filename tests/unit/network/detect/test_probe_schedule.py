"""Rounds: no node is in two probes of a round; few nodes are covered completely, many partly."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrun.network.detect import probe_schedule as probe_rounds
from ftrun.network.detect.probe_schedule import (
    NetworkPath,
    ProbeSchedule,
    pack,
    schedule,
    schedule_for,
)


def names(count: int) -> list[str]:
    return [f"n{number}" for number in range(count)]


def rails(count: int, on: list[str]) -> dict[str, list[str]]:
    return {f"eth{number}": on for number in range(count)}


def assert_apart(plan: ProbeSchedule) -> None:
    for one in plan.rounds:
        ends = Counter(end for path in one for end in (path.source, path.destination))
        assert max(ends.values()) == 1
    paths = [path for one in plan.rounds for path in one]
    assert len(set(paths)) == len(paths)


@given(st.integers(0, 24), st.integers(1, 3))
def test_few_nodes_are_probed_whole(count: int, num_rails: int) -> None:
    plan = schedule(names(count), rails(num_rails, names(count)), most_rounds=10_000)
    assert_apart(plan)
    paths = {path for one in plan.rounds for path in one}
    assert len(paths) == count * (count - 1) * num_rails
    assert plan.coverage == 1
    pairings = count - 1 + count % 2 if count > 1 else 0
    assert len(plan.rounds) == pairings * 2 * num_rails


def test_eight_nodes_with_two_rails_have_a_tenth_of_a_second_for_each_round() -> None:
    plan = schedule(names(8), rails(2, names(8)), most_rounds=120)
    assert len(plan.rounds) == 7 * 2 * 2


@given(st.integers(2, 120), st.integers(1, 3), st.integers(1, 60))
@settings(deadline=None)
def test_a_sample_keeps_to_its_rounds_and_reports_what_it_covers(
    count: int, num_rails: int, most: int
) -> None:
    plan = schedule(names(count), rails(num_rails, names(count)), most_rounds=most)
    assert_apart(plan)
    assert len(plan.rounds) <= max(most, 2 * num_rails)
    probed = sum(map(len, plan.rounds))
    assert plan.coverage == probed / (count * (count - 1) * num_rails)


@given(st.integers(3, 80), st.integers(4, 30))
@settings(deadline=None)
def test_every_node_sends_and_receives_in_every_sample(count: int, most: int) -> None:
    plan = schedule(names(count), rails(1, names(count)), most_rounds=most)
    for end in ("source", "destination"):
        seen = Counter(getattr(path, end) for one in plan.rounds for path in one)
        assert set(seen) == set(names(count))


def test_a_sample_has_the_neighbours_in_a_ring() -> None:
    nodes = names(96)
    paths = {
        path for one in schedule(nodes, rails(1, nodes), most_rounds=40).rounds for path in one
    }
    for distance in (1, 2, 4, 8):
        pairs = [(one, nodes[(place + distance) % 96]) for place, one in enumerate(nodes)]
        assert all(NetworkPath(one, other, "eth0") in paths for one, other in pairs)


def test_a_rail_that_some_nodes_lack_has_only_their_paths() -> None:
    nodes = names(6)
    plan = schedule(nodes, {"eth0": nodes, "ib0": nodes[:3]}, most_rounds=120)
    assert_apart(plan)
    counted = Counter(path.rail for one in plan.rounds for path in one)
    assert counted == {"eth0": 30, "ib0": 6}
    assert plan.coverage == 1


def test_each_rail_pairs_nodes_in_an_order_of_its_own() -> None:
    nodes = names(8)
    plan = schedule(nodes, rails(2, nodes), most_rounds=120)
    load_group = {
        rail: [
            frozenset((path.source, path.destination) for path in one)
            for one in plan.rounds
            if one[0].rail == rail
        ]
        for rail in ("eth0", "eth1")
    }
    assert set(load_group["eth0"]) != set(load_group["eth1"])


@given(st.integers(2, 20), st.integers(1, 6), st.integers(1, 2))
def test_nodes_that_join_are_probed_with_all_others(count: int, some: int, num_rails: int) -> None:
    nodes = names(count)
    joined = nodes[-min(some, count) :]
    plan = schedule_for(joined, nodes, rails(num_rails, nodes), most_rounds=10_000)
    assert_apart(plan)
    paths = {path for one in plan.rounds for path in one}
    assert paths == {
        NetworkPath(one, other, rail)
        for one in nodes
        for other in nodes
        for rail in rails(num_rails, nodes)
        if one != other and (one in joined or other in joined)
    }
    assert plan.coverage == 1


def test_one_node_that_joins_many_is_probed_with_some() -> None:
    nodes = names(1000)
    plan = schedule_for(["n7", "stranger"], nodes, rails(2, nodes), most_rounds=40)
    assert_apart(plan)
    assert len(plan.rounds) == 40
    assert plan.coverage == pytest.approx(40 / (999 * 2 * 2))
    assert {"n7"} == set.intersection(*({one[0].source, one[0].destination} for one in plan.rounds))


paths = st.builds(
    NetworkPath, st.sampled_from("abcdef"), st.sampled_from("uvwxyz"), st.just("eth0")
)


@given(st.lists(paths, unique=True))
def test_any_paths_fit_into_rounds(some: list[NetworkPath]) -> None:
    rounds = pack(some)
    assert sorted(path for one in rounds for path in one) == sorted(some)
    degree = Counter(end for path in some for end in (path.source, path.destination))
    assert len(rounds) <= max(0, 2 * max(degree.values(), default=0) - 1)
    assert_apart(ProbeSchedule(tuple(rounds), 1.0))


def test_without_paths_nothing_is_left_to_probe() -> None:
    plan = schedule(["alone"], rails(2, ["alone"]), most_rounds=120)
    assert (plan.rounds, plan.coverage) == ((), 1.0)
    assert schedule(names(4), {}, most_rounds=120).rounds == ()


@pytest.mark.parametrize("num_some", [1, 300, 600])
def test_partners_of_very_many_nodes_are_drawn_without_looking_at_every_pair(
    monkeypatch: pytest.MonkeyPatch, num_some: int
) -> None:
    drawn = []

    def counted(seed: int, *words: str) -> int:
        drawn.append(words)
        return really(seed, *words)

    really = probe_rounds._drawn
    monkeypatch.setattr(probe_rounds, "_drawn", counted)
    nodes = names(600)
    plan = schedule_for(nodes[:num_some], nodes, rails(2, nodes), most_rounds=12)
    assert len(drawn) <= probe_rounds.MOST_PAIRS
    of_each = Counter(end for one in plan.rounds for path in one for end in path[:2])
    assert all(of_each[node] > 0 for node in nodes[:num_some])
    assert sum(map(len, plan.rounds)) <= 12 * num_some
    wanted = num_some * 599 * 2 - num_some * (num_some - 1)
    assert plan.coverage == pytest.approx(sum(map(len, plan.rounds)) / (2 * wanted))
