"""A hot cell is a link, a hot row a sender, a hot column a receiver; one outlier is no finding."""

import random
from collections.abc import Callable
from copy import deepcopy
from functools import lru_cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ftrun.monitor.slow.delay_matrix import DelayMatrix, LinkSample, NodeTraffic, Pair
from ftrun.monitor.slow.links import (
    GOOD_SAMPLES,
    MAX_RATIOS,
    PROBE_EVERY_S,
    PROBE_LASTS_S,
    SAMPLES_TO_NAME,
    LinkProbeReading,
    SlowLinkDetector,
    place_of,
)
from ftrun.monitor.verdicts import Confidence, Verdict, VerdictKind

LEARNING = 14
"""Number of observations until each cell has a history."""


class Network:
    """Nodes that all send to all, or round a ring; `slow` and `far` are set by pair."""

    def __init__(self, nodes: int, *, seed: int = 1, is_ring: bool = False) -> None:
        self.nodes = [f"n{index}" for index in range(nodes)]
        self.hosts = {f"10.0.0.{index}": node for index, node in enumerate(self.nodes)}
        self.addresses = {node: host for host, node in self.hosts.items()}
        self.slow: dict[Pair, float] = {}
        self.far_s: dict[Pair, float] = {}
        self.mb = 50.0
        self.now_s = 0.0
        self.links = SlowLinkDetector()
        self._chance = random.Random(seed)
        self._is_ring = is_ring

    @property
    def pairs(self) -> list[Pair]:
        count = len(self.nodes)
        return [
            (one, other)
            for index, one in enumerate(self.nodes)
            for other in self.nodes
            if other != one and (not self._is_ring or other == self.nodes[(index + 1) % count])
        ]

    def poll(self) -> Verdict | None:
        self.now_s += 1.0
        samples = [
            NodeTraffic(
                node,
                1.0,
                [self._sample(pair) for pair in self.pairs if pair[0] == node]
                + [LinkSample("127.0.0.1", 10**9, 1.0, 0.1, 0, 0)],
            )
            for node in self.nodes
        ]
        return self.links.poll(samples, self.hosts, now_s=self.now_s)

    def samples(self, count: int) -> list[Verdict | None]:
        return [self.poll() for _ in range(count)]

    def verdict(self, count: int = 8) -> Verdict:
        """The verdict after this number of samples."""
        found = self.samples(count)[-1]
        assert found is not None
        return found

    def _sample(self, pair: Pair) -> LinkSample:
        slow = self.slow.get(pair, 1.0) * self._chance.uniform(0.7, 1.5)
        sent = self.mb / max(1.0, slow / 10)
        rtt_s = (0.0005 + self.far_s.get(pair, 0.0)) * self._chance.uniform(0.7, 1.5)
        busy_s = sent * 0.002 * slow + rtt_s * 20
        address = self.addresses[pair[1]]
        return LinkSample(address, round(sent * 1e6), busy_s, rtt_s, round(slow), 0)


@lru_cache(50)
def _learnt(nodes: int, *, seed: int, is_ring: bool) -> Network:
    network = Network(nodes, seed=seed, is_ring=is_ring)
    assert network.samples(LEARNING) == [None] * LEARNING
    return network


def learnt(nodes: int, *, seed: int = 1, is_ring: bool = False) -> Network:
    return deepcopy(_learnt(nodes, seed=seed, is_ring=is_ring))


def row(network: Network, node: str) -> list[Pair]:
    return [pair for pair in network.pairs if pair[0] == node]


def column(network: Network, node: str) -> list[Pair]:
    return [pair for pair in network.pairs if pair[1] == node]


def both(network: Network, node: str) -> list[Pair]:
    return row(network, node) + column(network, node)


PLACES: dict[str, tuple[Callable[[Network, str], list[Pair]], str]] = {
    "cell": (lambda network, node: row(network, node)[:1], "the link from node {} to node"),
    "row": (row, "what node {} sends"),
    "column": (column, "what node {} receives"),
    "node": (both, "the link of node {}"),
}


@pytest.mark.parametrize("nodes", [3, 4, 6])
@pytest.mark.parametrize("place", PLACES)
def test_the_place_is_reported_by_its_cells(place: str, nodes: int) -> None:
    cells_of, words = PLACES[place]
    for node in range(nodes):
        network = learnt(nodes, seed=node)
        name = network.nodes[node]
        network.slow = dict.fromkeys(cells_of(network, name), 40.0)
        found = [one for one in network.samples(10) if one is not None]
        assert {one.kind for one in found} == {VerdictKind.SLOW_COMMUNICATION}
        assert all(one.text.startswith(words.format(name)) for one in found), found[0].text
        assert name in found[-1].nodes
        assert found[-1].confidence is Confidence.LIKELY
        assert len(found) >= 10 - MAX_RATIOS - 1
        hot = {(cell.sender, cell.receiver) for cell in network.links.table() if cell.is_hot}
        assert hot == set(network.slow)


@pytest.mark.parametrize("place", ["cell", "row", "column"])
def test_late_acknowledgements_of_the_other_direction_are_no_place(place: str) -> None:
    cells_of, words = PLACES[place]
    network = learnt(4)
    cells = cells_of(network, "n1")
    network.slow = {pair[::-1]: 15.0 for pair in cells} | dict.fromkeys(cells, 60.0)
    found = network.verdict()
    assert found.text.startswith(words.format("n1")), found.text
    assert len(found.evidence) == 2 * len(cells), "all slow cells are evidence"


def test_a_node_whose_cells_become_slow_one_by_one_has_one_name() -> None:
    network = learnt(4)
    found = []
    for pair in column(network, "n1"):
        network.slow[pair] = 40.0
        found += network.samples(2)
    found += network.samples(4)
    texts = {one.fingerprint for one in found if one is not None}
    assert texts == {"slow communication what node n1 receives"}


def test_from_the_first_slow_sample_on_a_link_is_suspicious_for_a_while() -> None:
    network = learnt(4)
    assert not network.links.is_suspicious
    network.slow = {("n1", "n2"): 40.0}
    seen = []
    while network.poll() is None:
        seen.append(network.links.is_suspicious)
    assert seen
    assert all(seen)
    network.samples(SAMPLES_TO_NAME)
    assert not network.links.is_suspicious
    network.slow.clear()
    network.samples(3)
    network.far_s = {("n1", "n2"): 1.0}
    network.mb = 0.001
    network.samples(3)
    assert not network.links.is_suspicious, "samples are too small"


def test_on_a_ring_a_node_shows_in_the_two_cells_it_has() -> None:
    network = learnt(4, is_ring=True)
    network.slow = dict.fromkeys(both(network, "n2"), 40.0)
    verdict = network.verdict()
    assert verdict.nodes == ("n2",)


def test_two_nodes_are_compared_with_their_past() -> None:
    network = learnt(2)
    network.slow = {("n0", "n1"): 30.0}
    verdict = network.verdict()
    assert verdict.nodes == ("n0", "n1")
    assert "from node n0 to node n1" in verdict.text
    network.slow[("n1", "n0")] = 30.0
    verdict = network.verdict()
    assert "between nodes n0 and n1" in verdict.text


def test_a_long_path_is_detected_if_little_is_sent() -> None:
    network = Network(4)
    network.mb = 0.01
    network.samples(LEARNING)
    network.far_s = dict.fromkeys(both(network, "n3"), 0.05)
    verdict = network.verdict()
    assert verdict.nodes == ("n3",)
    assert "megabyte" not in verdict.text
    assert "round trip" in verdict.text


def test_scattered_cells_are_reported_as_the_network_between_their_nodes() -> None:
    network = learnt(6)
    network.slow = {("n0", "n1"): 40.0, ("n2", "n3"): 40.0, ("n4", "n0"): 40.0}
    verdict = network.verdict()
    assert verdict.nodes == ("n0", "n1", "n2", "n3", "n4")


def test_everything_slower_is_the_network() -> None:
    network = learnt(3)
    network.slow = dict.fromkeys(network.pairs, 40.0)
    verdict = network.verdict(9)
    assert verdict.confidence is Confidence.POSSIBLE
    assert verdict.nodes == ("n0", "n1", "n2")
    network.mb = 0.01
    network.slow.clear()
    assert network.samples(8)[-1] is None


def test_everything_further_away_is_the_network_too() -> None:
    network = Network(3)
    network.mb = 0.01
    network.samples(LEARNING)
    network.far_s = dict.fromkeys(network.pairs, 0.1)
    verdict = network.verdict(9)
    assert "between all nodes" in verdict.text


def test_a_short_trouble_is_none() -> None:
    network = learnt(4)
    network.slow = dict.fromkeys(both(network, "n1"), 40.0)
    network.poll()
    network.slow.clear()
    assert network.samples(5) == [None] * 5


def test_what_costs_nothing_is_left_alone() -> None:
    network = Network(4)
    network.mb = 0.3
    network.samples(LEARNING)
    network.slow = dict.fromkeys(row(network, "n0"), 9.0)
    assert network.samples(10) == [None] * 10


def test_it_ends_when_the_link_is_well_again() -> None:
    network = learnt(4)
    network.slow = dict.fromkeys(both(network, "n1"), 40.0)
    assert network.samples(8)[-1] is not None
    network.slow.clear()
    network.samples(MAX_RATIOS + 2)
    assert network.samples(10) == [None] * 10


def test_addresses_of_no_node_and_of_the_own_node_are_left_out() -> None:
    matrix = DelayMatrix()
    samples = [LinkSample(host, 10**6, 0.1, 0.001, 0, 0) for host in ("here", "8.8.8.8")]
    for _ in range(MAX_RATIOS):
        matrix.poll([NodeTraffic("n0", 1.0, samples)], {"here": "n0"})
    assert matrix.cells() == []


# --- probes -----------------------------------------------------------------------------------


def probe(
    pair: Pair, at_s: float, *, rtt_s: float = 0.0005, mb_per_s: float = 100.0
) -> LinkProbeReading:
    return LinkProbeReading(*pair, at_s, rtt_s, mb_per_s * 1e6)


def suspected() -> tuple[Network, Pair, Pair]:
    """A link that is slightly slower; the pairs that are to be probed."""
    network = learnt(4)
    network.slow = {("n1", "n2"): 5.0}
    assert network.samples(8) == [None] * 8
    wanted = network.links.suspect_pairs(now_s=network.now_s)
    assert wanted[0] == ("n1", "n2")
    assert len(wanted) == 2
    assert not set(wanted[0]) & set(wanted[1])
    return network, wanted[0], wanted[1]


@pytest.mark.parametrize(
    "found", [{"mb_per_s": 10.0}, {"rtt_s": 0.05}, {"mb_per_s": 0.0, "rtt_s": 0.001}]
)
def test_a_suspicion_that_a_probe_confirms_is_certain(found: dict[str, float]) -> None:
    network, suspect, other = suspected()
    network.links.probed(probe(suspect, network.now_s, **found))
    assert network.samples(2) == [None, None]  # nothing to compare it with
    network.links.probed(probe(other, network.now_s))
    verdict = network.verdict(2)
    assert verdict.confidence is Confidence.CERTAIN
    assert verdict.nodes == ("n1", "n2")
    assert any("a probe" in text for text in verdict.evidence)


def test_a_suspicion_that_no_probe_confirms_stays_one() -> None:
    network, suspect, other = suspected()
    for pair in (suspect, other):
        network.links.probed(probe(pair, network.now_s))
    assert network.samples(8) == [None] * 8


def test_a_probe_may_speak_against_a_verdict() -> None:
    network = learnt(4)
    network.slow = {("n1", "n2"): 40.0}
    assert network.samples(8)[-1] is not None
    for pair in network.links.suspect_pairs(now_s=network.now_s):
        network.links.probed(probe(pair, network.now_s))
    verdict = network.verdict(2)
    assert verdict.confidence is Confidence.POSSIBLE
    assert verdict.counter_evidence


def test_a_pair_is_probed_once_in_ten_seconds() -> None:
    network, _, _ = suspected()
    assert network.links.suspect_pairs(now_s=network.now_s + 1) == []
    assert network.links.suspect_pairs(now_s=network.now_s + PROBE_EVERY_S) != []


def test_probes_are_forgotten() -> None:
    network, suspect, other = suspected()
    network.links.probed(probe(suspect, network.now_s, mb_per_s=1.0))
    network.links.probed(probe(other, network.now_s))
    assert network.samples(2)[-1] is not None
    assert network.samples(round(PROBE_LASTS_S) + 3)[-1] is None


def test_a_failed_probe_yields_nothing() -> None:
    network, suspect, other = suspected()
    network.links.probed(probe(suspect, network.now_s, rtt_s=0.0, mb_per_s=0.0))
    network.links.probed(probe(other, network.now_s))
    assert network.samples(3) == [None] * 3


def test_two_nodes_have_no_other_to_probe() -> None:
    network = learnt(2)
    network.slow = dict.fromkeys(network.pairs, 5.0)
    network.samples(8)
    assert len(network.links.suspect_pairs(now_s=network.now_s)) == 1


# --- chance -----------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**9), nodes=st.integers(2, 6), is_ring=st.booleans())
def test_a_healthy_network_has_no_slow_link(seed: int, nodes: int, is_ring: bool) -> None:
    network = Network(nodes, seed=seed, is_ring=is_ring)
    assert network.samples(60) == [None] * 60


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**9),
    nodes=st.integers(3, 6),
    is_ring=st.booleans(),
    slow=st.floats(20.0, 500.0),
)
def test_a_slow_node_is_named_whatever_it_is(
    seed: int, nodes: int, is_ring: bool, slow: float
) -> None:
    network = learnt(nodes, seed=seed, is_ring=is_ring)
    culprit = network.nodes[seed % nodes]
    network.slow = dict.fromkeys(both(network, culprit), slow)
    found = [one for one in network.samples(12) if one is not None]
    assert found
    assert all(culprit in one.nodes for one in found)
    assert found[-1].nodes == (culprit,)


def test_one_cell_names_both_ends() -> None:
    pairs = {("a", "b"), ("b", "a"), ("a", "c"), ("c", "a")}
    assert place_of({("a", "b")}, pairs) == ("the link from node a to node b", ("a", "b"))


def test_samples_of_one_address_are_added() -> None:
    one = LinkSample("h", 0, 0.1, 0.001, 1, 10)
    other = LinkSample("h", 0, 0.2, 0.003, 2, 20)
    both_of_them = LinkSample.together([one, other])
    assert both_of_them == LinkSample("h", 0, pytest.approx(0.3), pytest.approx(0.002), 3, 30)


def test_of_two_readings_the_one_with_fewer_cells_counts() -> None:
    hot = {("a", "b"), ("a", "c")}
    assert place_of(hot, hot) == ("what node a sends", ("a",))
    assert place_of(hot | {("b", "a")}, hot | {("b", "a"), ("b", "c")})[1] == ("a",)


@pytest.mark.parametrize(("nodes", "far_s"), [(3, 0.1), (4, 0.1), (4, 0.0)])
def test_a_node_whose_link_was_slow_from_the_beginning_is_named_with_low_confidence(
    nodes: int, far_s: float
) -> None:
    """Of three nodes it affects four of six cells: every peer of the node waits."""
    network = Network(nodes)
    for pair in network.pairs:
        if "n1" in pair:
            network.far_s[pair], network.slow[pair] = far_s, 40.0
    found = [one for one in network.samples(LEARNING + 10) if one is not None]
    assert found
    assert {one.nodes for one in found} == {("n1",)}
    assert {one.confidence for one in found} == {Confidence.POSSIBLE}
    assert "and as at first" not in found[0].text
    assert "since the first steps" in found[0].counter_evidence[0]


def test_networks_that_are_built_unevenly_are_left_alone() -> None:
    """Two racks: transfers between them take four times as long, from the beginning."""
    network = Network(6)
    for one, other in network.pairs:
        if (int(one[1]) < 3) != (int(other[1]) < 3):
            network.slow[one, other] = 4.0
    assert network.samples(40) == [None] * 40


@settings(max_examples=40, deadline=None)
@given(
    nodes=st.integers(3, 4),
    well_at=st.lists(st.integers(0, GOOD_SAMPLES - MAX_RATIOS - 2), min_size=6, max_size=6),
    seed=st.integers(0, 99),
)
@example(nodes=3, well_at=[1, 0, 0, 0, 0, 0], seed=1)
@example(nodes=3, well_at=[0, 1, 0, 0, 0, 0], seed=1)
@example(nodes=3, well_at=[0, 0, 1, 0, 0, 0], seed=1)
@example(nodes=3, well_at=[0, 0, 0, 1, 0, 0], seed=1)
def test_a_link_that_gets_well_cell_by_cell_has_one_name(
    nodes: int, well_at: list[int], seed: int
) -> None:
    network = learnt(nodes, seed=seed)
    network.slow = dict.fromkeys(both(network, "n1"), 300.0)
    (place,) = {one.fingerprint for one in network.samples(8) if one is not None}
    waits = dict(zip(sorted(network.slow), well_at, strict=False))
    said = []
    for poll in range(GOOD_SAMPLES + MAX_RATIOS):
        network.slow = {pair: 300.0 for pair, wait in waits.items() if poll < wait}
        said.append(network.poll())
    assert {one.fingerprint for one in said if one is not None} <= {place}
    assert said[-1] is None


def test_what_stays_slow_of_a_named_place_gets_its_own_name() -> None:
    network = learnt(4)
    network.slow = dict.fromkeys(both(network, "n1"), 300.0)
    network.samples(8)
    network.slow = {("n1", "n2"): 300.0}
    assert network.samples(GOOD_SAMPLES)[-1] is not None
    assert network.verdict(MAX_RATIOS + 2).nodes == ("n1", "n2")
