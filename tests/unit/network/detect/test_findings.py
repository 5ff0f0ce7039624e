"""Findings: each fault is assigned to its place; a narrow uplink is no fault of a node."""

import re
from itertools import cycle

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrun.network.detect.findings import (
    NetworkFinding,
    NetworkFindingKind,
    NetworkFindings,
    judge,
    rate_text,
    round_trip_text,
)
from ftrun.network.detect.leaf_switches import leaves_from_probes
from ftrun.network.detect.localization import slowest_medians
from ftrun.network.detect.probe_schedule import NetworkPath
from ftrun.wire.cluster.generation import PathMeasurement
from tests.unit.network.simulated_paths import SimulatedPaths, leaf_map

NOISE = 0.3
seeds = st.integers(0, 1 << 20)


def found_in(made: SimulatedPaths, *, by_probes: bool = False) -> NetworkFindings:
    paths = made.survey()
    leaves = leaves_from_probes(made.nodes, paths).of if by_probes else made.leaves
    return judge(made.cards(), paths, leaves)


def places(findings: NetworkFindings) -> set[tuple[str, str, tuple[str, ...], str]]:
    return {(one.kind.value, one.rail, one.nodes, one.direction) for one in findings.found}


def only(findings: NetworkFindings) -> NetworkFinding:
    assert len(findings.found) == 1, findings.found
    return findings.found[0]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.floats(0.1, 4), seeds)
@settings(max_examples=60, deadline=None)
def test_a_whole_network_has_no_culprit_however_narrow_its_uplinks(
    sizes: list[int], uplink: float, seed: int
) -> None:
    made = SimulatedPaths(leaf_map(*sizes, shuffled=seed), uplink=uplink, noise=NOISE, seed=seed)
    findings = found_in(made)
    assert not any(one.nodes for one in findings.found if len(one.nodes) == 1)
    assert not any(one.kind is NetworkFindingKind.DEAD for one in findings.found)


def test_an_uplink_that_two_nodes_share_is_not_the_fault_of_a_node_that_has_its_own() -> None:
    """9 of these seeds named a node when half of the usual rate was the limit."""
    for seed in range(200):
        leaves = leaf_map(1, 2, 1, shuffled=seed)
        findings = found_in(SimulatedPaths(leaves, uplink=0.1, noise=NOISE, seed=seed))
        assert not [one for one in findings.found if len(one.nodes) == 1]


@pytest.mark.parametrize("uplink", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("sizes", [(4, 4), (6, 2), (3, 3, 2), (8, 8)])
def test_narrow_uplinks_of_leaves_that_probes_must_find_are_no_node_s_fault(
    sizes: tuple[int, ...], uplink: float
) -> None:
    for seed in range(4):
        made = SimulatedPaths(
            leaf_map(*sizes, shuffled=seed), uplink=uplink, noise=NOISE, seed=seed
        )
        findings = found_in(made, by_probes=True)
        assert not [one for one in findings.found if len(one.nodes) == 1]


@given(
    st.sampled_from([(3,), (8,), (4, 4), (5, 3), (3, 3, 3)]),
    st.sampled_from([0.0, 0.05, 0.1, 0.2]),
    st.sampled_from([("out", "in"), ("out",), ("in",)]),
    seeds,
)
@settings(max_examples=60, deadline=None)
def test_one_node_s_interface_is_blamed_for_all_its_paths(
    sizes: tuple[int, ...], share: float, ways: tuple[str, ...], seed: int
) -> None:
    made = SimulatedPaths(leaf_map(*sizes), uplink=1.0, noise=NOISE, seed=seed)
    node = made.nodes[seed % len(made.nodes)]
    made.slow_node(node, "eth1", share, ways)
    one = only(found_in(made))
    assert one.kind is (NetworkFindingKind.SLOW if share else NetworkFindingKind.DEAD)
    assert (one.rail, one.nodes) == ("eth1", (node,))
    assert one.direction == ("" if len(ways) == 2 else ways[0])
    assert one.sentence.startswith(node)


def test_two_nodes_with_faults_are_both_blamed_and_no_other() -> None:
    made = SimulatedPaths(leaf_map(4, 4), uplink=0.5, noise=NOISE)
    made.slow_node("n1", "eth0", 0.0)
    made.slow_node("n6", "eth0", 0.1)
    made.slow_node("n3", "eth1", 0.0, ["in"])
    assert places(found_in(made)) == {
        ("dead", "eth0", ("n1",), ""),
        ("slow", "eth0", ("n6",), ""),
        ("dead", "eth1", ("n3",), "in"),
    }


def test_most_nodes_dead_do_not_make_the_others_culprits() -> None:
    made = SimulatedPaths(leaf_map(8), rails=["eth0"])
    for node in made.nodes[:6]:
        made.slow_node(node, "eth0", 0.0)
    assert {one.nodes for one in found_in(made).found} == {(node,) for node in made.nodes[:6]}


def test_one_path_is_named_alone() -> None:
    made = SimulatedPaths(leaf_map(4, 4), uplink=0.5, noise=NOISE)
    made.paths[NetworkPath("n3", "n4", "eth0")] = 0.0
    made.paths[NetworkPath("n1", "n2", "eth1")] = 0.1
    findings = found_in(made)
    assert places(findings) == {
        ("dead", "eth0", ("n3", "n4"), ""),
        ("slow", "eth1", ("n1", "n2"), ""),
    }
    dead, slow = findings.found
    assert dead.sentence == "n3 does not reach n4 over eth0: no answer in 0.1 s."
    assert findings.dead.keys() == {NetworkPath("n3", "n4", "eth0")}
    assert slow.sentence.startswith("The path from n1 to n2 over eth1 has ")
    assert slow.sentence.endswith("is usual within a leaf switch.")


def test_a_whole_rail_is_dead_or_slow() -> None:
    made = SimulatedPaths(leaf_map(2, 2), rails=["eth0", "eth1", "eth2"], uplink=0.5, noise=NOISE)
    for node in made.nodes:
        made.slow_node(node, "eth1", 0.0)
        made.slow_node(node, "eth2", 0.1)
    findings = found_in(made)
    assert places(findings) == {("dead", "eth1", (), ""), ("slow", "eth2", (), "")}
    assert findings.found[0].sentence == "Rail eth1 is dead: all 12 paths are dead."
    assert findings.of_rail("eth2")[0].culprit == "rail eth2"
    assert findings.of_rail("eth2")[0].sentence.startswith("Rail eth2 is slow: ")


@pytest.mark.parametrize(("share", "is_slow"), [(0.3, True), (0.36, False)])
def test_a_rail_is_slow_as_a_whole_below_a_third_of_another(share: float, is_slow: bool) -> None:
    made = SimulatedPaths(leaf_map(4))
    for node in made.nodes:
        made.slow_node(node, "eth1", share)
    assert bool(found_in(made).found) is is_slow


def test_a_rail_that_is_slow_on_few_paths_is_not_slow_as_a_whole() -> None:
    # Of two nodes, one path of eth1 has a fifth of the rate, as has the other path of eth0.
    found = [
        PathMeasurement("n0", "n1", "eth0", 0.0002, 100e6),
        PathMeasurement("n1", "n0", "eth0", 0.0002, 20e6),
        PathMeasurement("n0", "n1", "eth1", 0.0002, 20e6),
        PathMeasurement("n1", "n0", "eth1", 0.0002, 20e6),
    ]
    findings = judge(SimulatedPaths(leaf_map(2)).cards(), found)
    assert not [one for one in findings.found if not one.nodes]


def test_of_two_nodes_a_slow_rail_is_named_as_it_is_unknown_whose_end_it_is() -> None:
    made = SimulatedPaths(leaf_map(2), noise=NOISE)
    made.slow_node("n1", "eth1", 0.1)
    assert places(found_in(made)) == {("slow", "eth1", (), "")}


def test_a_node_that_some_still_reach_is_informed() -> None:
    made = SimulatedPaths(leaf_map(7), rails=["eth0"])
    for node in made.nodes[1:6]:
        made.paths[NetworkPath("n0", node, "eth0")] = 0.0
    one = only(found_in(made))
    assert one.sentence == "n0 cannot reach most other nodes over eth0: 5 of 6 paths are dead."
    for node in made.nodes[1:6]:
        made.paths[NetworkPath(node, "n0", "eth0")] = 0.0
    one = only(found_in(made))
    assert one.sentence == (
        "n0 cannot reach or be reached by most other nodes over eth0: 10 of 12 paths are dead."
    )


def test_without_leaves_a_slow_node_is_reported_with_low_confidence() -> None:
    made = SimulatedPaths(leaf_map(8))
    made.slow_node("n2", "eth0", 0.1)
    one = only(judge(made.cards(), made.survey()))
    assert one.sentence == (
        "n2 sends and receives 118 MB/s over eth0 in the median, where 1,180 MB/s is usual: as a "
        "link of 1,000 Mbit/s would; no leaf switch is known, so the cause may be outside its "
        "interface."
    )
    assert one.pace == pytest.approx(0.1)


def test_many_slow_paths_without_a_culprit_are_reported_as_one() -> None:
    made = SimulatedPaths(leaf_map(6, 2), rails=["eth0"], uplink=0.5)
    one = only(judge(made.cards(), made.survey()))
    assert one.kind is NetworkFindingKind.UPLINK
    assert one.nodes == ()
    assert "no interface explains them" in one.sentence


def test_two_slow_nodes_of_a_leaf_of_three_do_not_drag_in_the_third() -> None:
    made = SimulatedPaths(leaf_map(3, 5), rails=["eth0"], uplink=8.0)
    made.slow_node("n0", "eth0", 0.1)
    made.slow_node("n1", "eth0", 0.1)
    assert {one.nodes for one in found_in(made).found} == {("n0",), ("n1",)}


# --- other evidence than rates -------------------------------------------------------------------


def one_by_one(
    made: SimulatedPaths, change: dict[NetworkPath, dict[str, object]]
) -> NetworkFindings:
    paths = [
        msgspec.structs.replace(one, **change.get(NetworkPath.of(one), {})) for one in made.survey()
    ]
    return judge(made.cards(), paths, made.leaves)


def test_an_answer_without_a_rate_is_a_slow_path_not_a_dead_one() -> None:
    made = SimulatedPaths(leaf_map(5), rails=["eth0"])
    path = NetworkPath("n0", "n1", "eth0")
    findings = one_by_one(made, {path: {"bytes_per_s": 0.0, "problem": "cut off after 0.1 s"}})
    assert only(findings).sentence == (
        "The path from n0 to n1 over eth0 completed no transfer, where 1,180 MB/s is usual within "
        "a leaf switch."
    )
    assert findings.paces[path] == 0


def test_a_long_round_trip_is_reported_as_that_and_lowers_no_pace() -> None:
    made = SimulatedPaths(leaf_map(5), rails=["eth0"])
    path = NetworkPath("n0", "n1", "eth0")
    findings = one_by_one(made, {path: {"rtt_s": 0.05}})
    one = only(findings)
    assert re.fullmatch(
        r"A round trip from n0 to n1 over eth0 takes 50 ms, where 0\.\d+ ms is usual within a "
        r"leaf switch\.",
        one.sentence,
    )
    assert (one.kind, one.nodes, one.is_late) == (NetworkFindingKind.SLOW, ("n0", "n1"), True)
    assert findings.late == {path}
    assert findings.paces[path] == 1


@pytest.mark.parametrize("rtt_s", [0.005, 0.015, 0.023])
def test_a_round_trip_that_the_scheduler_makes_is_no_finding(rtt_s: float) -> None:
    made = SimulatedPaths(leaf_map(5), rails=["eth0"])
    late = {NetworkPath("n0", node, "eth0"): {"rtt_s": rtt_s} for node in made.nodes[1:]}
    assert one_by_one(made, late).found == ()


@pytest.mark.parametrize(
    ("ways", "words"), [(("out", "in"), "between n2 and others"), (("in",), "to n2")]
)
def test_a_node_s_long_round_trips_are_reported_once(ways: tuple[str, ...], words: str) -> None:
    made = SimulatedPaths(leaf_map(5), rails=["eth0"])
    late = {path: {"rtt_s": 0.05} for path in of_node(made, "n2", ways)}
    one = only(one_by_one(made, late))
    assert one.sentence.startswith(
        f"A round trip {words} over eth0 takes 50 ms in the median, where 0."
    )
    assert (one.nodes, one.direction) == (("n2",), "" if len(ways) == 2 else "in")


def test_many_long_round_trips_without_a_culprit_are_reported_as_one() -> None:
    made = SimulatedPaths(leaf_map(6), rails=["eth0"])
    ring = {NetworkPath(f"n{at}", f"n{(at + 1) % 6}", "eth0"): {"rtt_s": 0.05} for at in range(6)}
    one = only(one_by_one(made, ring))
    assert (one.kind, one.nodes, one.is_late) == (NetworkFindingKind.UPLINK, (), True)
    assert one.sentence.startswith(
        "6 of 30 paths over eth0 have long round trips, and no interface explains them: one takes "
        "50 ms in the median, where 0."
    )


def test_what_is_slow_by_its_rate_is_not_reported_again_for_its_round_trips() -> None:
    made = SimulatedPaths(leaf_map(5), rails=["eth0"])
    made.slow_node("n2", "eth0", 0.1)
    made.paths[NetworkPath("n0", "n1", "eth0")] = 0.1
    slow = [*of_node(made, "n2", ("out", "in")), NetworkPath("n0", "n1", "eth0")]
    findings = one_by_one(made, {path: {"rtt_s": 0.05} for path in slow})
    assert [one.nodes for one in findings.found] == [("n2",), ("n0", "n1")]
    assert not any(one.is_late for one in findings.found)


def of_node(made: SimulatedPaths, node: str, ways: tuple[str, ...]) -> list[NetworkPath]:
    others = [one for one in made.nodes if one != node]
    sent = [NetworkPath(node, one, "eth0") for one in others] if "out" in ways else []
    return sent + ([NetworkPath(one, node, "eth0") for one in others] if "in" in ways else [])


any_survey = st.tuples(
    st.sampled_from([(2,), (3,), (4,), (2, 2), (3, 2), (1, 1, 1)]),
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.1, 1.0, 5.0, 10.4, 52.0, 52.4, 99.0, 1180.0]),
            st.sampled_from([0.0, 0.0002, 0.003, 0.015, 0.024, 0.06, 0.5]),
        ),
        min_size=24,
        max_size=24,
    ),
)
"""Sizes of leaves, and MB/s and round trips that the paths take in turn."""


def surveyed(sizes: tuple[int, ...], figures: list[tuple[float, float]]) -> list[PathMeasurement]:
    made = SimulatedPaths(leaf_map(*sizes))
    return [
        msgspec.structs.replace(
            one,
            bytes_per_s=1e6 * mb,
            rtt_s=rtt_s,
            problem="" if mb else "the transfer made no progress",
        )
        for one, (mb, rtt_s) in zip(made.survey(), cycle(figures), strict=False)
    ]


@given(any_survey)
@settings(max_examples=300, deadline=None)
def test_no_sentence_has_the_same_figure_twice(
    drawn: tuple[tuple[int, ...], list[tuple[float, float]]],
) -> None:
    made = SimulatedPaths(leaf_map(*drawn[0]))
    found = surveyed(*drawn)
    for leaves in (made.leaves, {}):
        for one in judge(made.cards(), found, leaves).found:
            figures = re.findall(r"[\d.,]+ (?:MB/s|ms)", one.sentence)
            if " is usual" in one.sentence:
                assert len(figures) == len({*figures}), one.sentence
                assert " 0 MB/s" not in one.sentence


@given(any_survey)
@settings(max_examples=100, deadline=None)
def test_round_trips_change_no_rate_and_no_pace(
    drawn: tuple[tuple[int, ...], list[tuple[float, float]]],
) -> None:
    made = SimulatedPaths(leaf_map(*drawn[0]))
    found = [one for one in surveyed(*drawn) if one.rtt_s]
    even = [msgspec.structs.replace(one, rtt_s=0.0002) for one in found]
    one, other = (judge(made.cards(), paths, made.leaves) for paths in (found, even))
    for name in ("rates", "paces", "usual", "usual_between", "dead"):
        assert getattr(one, name) == getattr(other, name)
    by_rate = [finding for finding in one.found if not finding.is_late]
    assert by_rate == list(other.found)


def test_of_a_path_that_was_probed_twice_the_last_one_counts() -> None:
    made = SimulatedPaths(leaf_map(5), rails=["eth0"])
    again = PathMeasurement("n0", "n1", "eth0", problem="no answer")
    assert only(judge(made.cards(), [*made.survey(), again], made.leaves)).nodes == ("n0", "n1")
    findings = judge(made.cards(), [again, *made.survey()], made.leaves)
    assert findings.found == ()
    assert findings.rtts.keys() == findings.rates.keys()


def test_a_path_of_which_nothing_is_known_is_no_finding() -> None:
    made = SimulatedPaths(leaf_map(5), rails=["eth0"])
    findings = one_by_one(
        made, {NetworkPath("n0", "n1", "eth0"): {"bytes_per_s": 0.0, "rtt_s": 0.0}}
    )
    assert findings.found == ()


def test_without_probes_there_are_no_findings() -> None:
    assert judge(SimulatedPaths(leaf_map(3)).cards(), []).found == ()
    assert judge({}, []).found == ()


# --- reports of the drivers -----------------------------------------------------------------------


def by_word(made: SimulatedPaths, node: str, **said: object) -> NetworkFindings:
    cards = made.cards()
    cards[node][0] = msgspec.structs.replace(cards[node][0], **said)
    return judge(cards, made.survey(), made.leaves)


def test_one_gigabit_among_ten_is_named_by_its_driver() -> None:
    one = only(by_word(SimulatedPaths(leaf_map(4)), "n2", speed_mbit=1000))
    assert (one.kind, one.nodes, one.pace) == (NetworkFindingKind.SPEED, ("n2",), 0.1)
    assert one.sentence == (
        "eth0 of n2 runs at 1,000 Mbit/s according to its driver; 3 of 4 interfaces on eth0 run at "
        "10,000 Mbit/s."
    )


def test_where_rates_agree_with_the_driver_it_is_one_finding() -> None:
    made = SimulatedPaths(leaf_map(4))
    made.slow_node("n2", "eth0", 0.1)
    one = only(by_word(made, "n2", speed_mbit=1000))
    assert one.kind is NetworkFindingKind.SPEED
    assert "according to its driver" in one.sentence
    assert "Probes agree: n2 sends and receives 118 MB/s" in one.sentence


def test_half_duplex_is_named_and_unknown_speeds_are_not() -> None:
    one = only(by_word(SimulatedPaths(leaf_map(4)), "n1", duplex="half", speed_mbit=0))
    assert (one.kind, one.nodes) == (NetworkFindingKind.DUPLEX, ("n1",))
    assert "3 of 4 interfaces on eth0 are full duplex" in one.sentence


def test_an_interface_of_another_name_is_reported_with_both() -> None:
    made = SimulatedPaths(leaf_map(4))
    one = only(by_word(made, "n1", name="ens3", speed_mbit=1000))
    assert one.sentence.startswith("ens3 of n1 (eth0 of the run) runs at 1,000 Mbit/s")


def test_the_worst_kind_comes_first() -> None:
    made = SimulatedPaths(leaf_map(8))
    made.slow_node("n3", "eth1", 0.1)
    made.slow_node("n4", "eth0", 0.0)
    kinds = [one.kind for one in by_word(made, "n2", duplex="half").found]
    assert kinds == [NetworkFindingKind.DEAD, NetworkFindingKind.SLOW, NetworkFindingKind.DUPLEX]


@pytest.mark.parametrize(
    ("rtt_s", "words"), [(0.015, "15 ms"), (0.0002, "0.2 ms"), (1.5, "1,500 ms")]
)
def test_round_trips_in_words(rtt_s: float, words: str) -> None:
    assert round_trip_text(rtt_s) == words


@given(any_survey)
@settings(max_examples=100, deadline=None)
def test_what_a_rail_carries_at_its_slowest_is_no_single_path_s(
    drawn: tuple[tuple[int, ...], list[tuple[float, float]]],
) -> None:
    made = SimulatedPaths(leaf_map(*drawn[0]))
    rates = judge(made.cards(), surveyed(*drawn), made.leaves).rates
    found = slowest_medians(rates, made.nodes)
    assert found.keys() == {path.rail for path in rates}
    for rail, rate in found.items():
        of_rail = [one for path, one in rates.items() if path.rail == rail]
        assert min(of_rail) <= rate <= max(of_rail)
    assert slowest_medians(rates, ["n0"]) == {}


def test_of_two_nodes_the_median_of_both_paths_counts() -> None:
    rates = {NetworkPath("n0", "n1", "eth0"): 10.0, NetworkPath("n1", "n0", "eth0"): 90.0}
    assert slowest_medians(rates, ["n0", "n1"]) == {"eth0": 50.0}
    rates |= {NetworkPath("n0", "n2", "eth0"): 20.0, NetworkPath("n2", "n0", "eth0"): 90.0}
    assert slowest_medians(rates, ["n0", "n1", "n2"]) == {"eth0": 15.0}


@pytest.mark.parametrize(
    ("rate", "words"), [(1.18e9, "1,180 MB/s"), (11.8e6, "12 MB/s"), (1.18e6, "1.2 MB/s")]
)
def test_rates_in_words(rate: float, words: str) -> None:
    assert rate_text(rate) == words
