"""The lead probes where it has a reason to, plans by what it finds, and leaves what fails."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest

from ftrun.config.profile import NetworkConfig
from ftrun.membership.leader.failure_detector import FailureDetector
from ftrun.membership.leader.rank_assignment import RankAssignment
from ftrun.monitor.verdicts import Confidence, Verdict, VerdictKind
from ftrun.network.detect.findings import NetworkFindings
from ftrun.network.detect.leaf_switches import LeafSwitches
from ftrun.network.detect.probe_schedule import NetworkPath
from ftrun.network.failover import path_map as road_map
from ftrun.network.failover import path_monitor as road_watch
from ftrun.network.failover.pair_check import PairCheck
from ftrun.network.plan.planner import PlanningInputs, survey_of
from ftrun.records.membership import PathFinding
from ftrun.recovery.commands import Command, JournalEntry, Send
from ftrun.recovery.health import HealthMonitor
from ftrun.recovery.suspicions import SlowSuspicions
from ftrun.wire.cluster.generation import (
    GenerationPlan,
    NetworkPlan,
    NodeCard,
    PathMeasurement,
    Rail,
)
from ftrun.wire.cluster.messages import (
    ProbeLinkResult,
    ProbePathRequest,
    ProbePathResult,
    RailSilent,
)
from tests.unit.recovery.made import card, meet, plan, settings

Rate = Callable[[NetworkPath], float]


def railed(node_id: str, count: int = 2, **changes: object) -> NodeCard:
    at = ord(node_id[0]) - ord("a") + 1
    rails = [Rail(f"eth{i}", f"10.{i}.0.{at}", 24, 7000 + i) for i in range(count)]
    return card(node_id, rails=rails, **changes)


class Slow(SlowSuspicions):
    """Reports the given verdicts."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[Verdict] = []

    def lasting(self, for_s: float, *, now_s: float) -> list[Verdict]:
        del for_s, now_s
        return self.said


class World:
    """A lead with its nodes, which answer at once."""

    def __init__(
        self,
        nodes: str = "abc",
        mode: Literal["off", "report", "on"] = "on",
        count: int = 2,
        rails: Sequence[str] = (),
        **more: Any,
    ) -> None:
        self.cards = [railed(one, count) for one in nodes]
        self.peers = FailureDetector(self.cards[0], settings())
        for one in self.cards:
            meet(self.peers, one, now_s=1.0)
        self.watching = HealthMonitor(settings(), "a", PairCheck())
        self.slow = self.watching.slow = Slow()
        wishes = settings(network=NetworkConfig(plan=mode, rails=list(rails)), **more)
        self.roads = road_watch.PathMonitor("a", wishes, self.peers)
        self.now_s = 1.0
        self.rate: Rate = lambda road: 1e9
        self.asked: list[ProbePathRequest] = []
        self.notes: list[JournalEntry] = []

    def answer(self, commands: list[Command]) -> None:
        waiting = list(commands)
        while waiting:
            command = waiting.pop(0)
            assert isinstance(command, Send)
            order = command.message
            assert isinstance(order, ProbePathRequest)
            self.asked.append(order)
            self.now_s += 0.01
            road = NetworkPath(command.node_id, order.destination, order.rail)
            rate = self.rate(road)
            found = PathMeasurement(
                road.source,
                road.destination,
                road.rail,
                1e-4 if rate else 0.0,
                0.0 if order.is_short else rate,
                "" if rate else "no answer",
            )
            waiting += self.roads.told(
                road.source, ProbePathResult(order.survey, found), self.watching, now_s=self.now_s
            )

    def ballot(self, previous: GenerationPlan | None = None) -> RankAssignment:
        """Up to the plan."""
        held = self.roads.hold_up(self.cards, previous, now_s=self.now_s)
        while held is not None:
            assert held
            self.answer(held)
            held = self.roads.hold_up(self.cards, previous, now_s=self.now_s)
        places = RankAssignment(tuple(self.cards), ())
        return places.along(self.roads.decide(places.members, places.spares, previous))

    def begin(self) -> GenerationPlan:
        """A generation that runs."""
        places = self.ballot()
        self.roads.begin()
        self.notes += self.roads.take_notes()
        self.asked.clear()
        return plan(0, places.members, roads=places.roads)

    def falls_silent(self, node_id: str, rail: str) -> None:
        """What comes from and to this node over this rail is lost, and b says so."""
        self.rate = lambda road: (
            0.0 if road.rail == rail and node_id in (road.source, road.destination) else 1e9
        )
        self.roads.told("b", RailSilent(node_id, rail, 1.0), self.watching, now_s=self.now_s)

    def pass_by(self, running: GenerationPlan, for_s: float = 1.0) -> None:
        end_s = self.now_s + for_s
        while self.now_s < end_s:
            self.now_s += 0.05
            for peer in self.peers:
                peer.heard_s = self.now_s
            self.answer(self.roads.look(running, self.slow, now_s=self.now_s))
        self.notes += self.roads.take_notes()

    def kinds(self) -> list[str]:
        return [one.record.kind for one in self.notes]


def test_before_the_first_generation_every_road_is_probed_and_the_plan_takes_effect() -> None:
    world = World()
    places = world.ballot()
    assert len(world.asked) == 12
    assert places.roads is not None
    assert sorted(places.roads.order) == ["a", "b", "c"]
    assert [one.node_id for one in places.members] == places.roads.order
    assert {"paths_probed", "network_plan"} <= {one.record.kind for one in world.roads.take_notes()}


def test_report_tells_the_plan_and_changes_nothing() -> None:
    world = World(mode="report")
    places = world.ballot()
    assert places == RankAssignment(tuple(world.cards), ())
    world.roads.begin()
    assert world.asked == [], "no start waits for it"
    world.pass_by(plan(0, world.cards))
    assert len(world.asked) == 12
    assert world.kinds() == ["paths_probed", "network_plan"]
    assert world.roads.plan is not None
    status = world.roads.status(plan(0, "abc"), now_s=world.now_s)
    assert status is not None
    assert status.is_applied is False
    assert len(status.paths) == 12
    assert status.chosen.order


@pytest.mark.parametrize(("mode", "nodes"), [("off", "abc"), ("on", "a")])
def test_nothing_is_probed_with_off_or_on_one_node(mode: str, nodes: str) -> None:
    world = World(nodes, mode=mode)
    places = world.ballot()
    assert (world.asked, places.roads) == ([], None)
    assert world.roads.look(plan(0, nodes), world.slow, now_s=2.0) == []
    assert world.roads.status(None, now_s=2.0) is None


def test_a_node_without_rails_ends_the_planning() -> None:
    world = World()
    world.cards[1] = card("b")
    assert world.ballot().roads is None


def test_a_later_generation_waits_for_no_probe_and_keeps_its_ranks() -> None:
    world = World()
    running = world.begin()
    places = world.ballot(running)
    assert world.asked == []
    assert places.roads is not None
    assert places.members == tuple(world.cards)


def test_a_new_lead_goes_on_with_the_plan_that_there_is() -> None:
    first = World()
    running = first.begin()
    second = World()
    second.roads.know(running.voters)
    places = second.ballot(running)
    assert places.roads is not None
    assert running.roads is not None
    assert places.roads.rails == running.roads.rails
    second.roads.begin()
    second.pass_by(running)
    assert second.asked == []


def test_a_ballot_ends_a_survey_beside_the_generation_before() -> None:
    world = World()
    running = world.begin()
    world.cards.append(railed("d"))
    meet(world.peers, world.cards[-1], now_s=world.now_s)
    assert world.roads.look(running, world.slow, now_s=world.now_s)
    assert world.roads.hold_up(world.cards, running, now_s=world.now_s) is None


def test_a_second_first_ballot_probes_only_who_is_new() -> None:
    world = World("ab")
    world.ballot()
    world.asked.clear()
    world.cards.append(railed("c"))
    meet(world.peers, world.cards[-1], now_s=world.now_s)
    world.ballot()
    assert len(world.asked) == 8
    assert all("c" in (one.destination, "c") for one in world.asked)


def test_a_node_that_joins_is_probed_beside_the_generation_a_round_at_a_time() -> None:
    world = World()
    running = world.begin()
    world.cards.append(railed("d"))
    meet(world.peers, world.cards[-1], now_s=world.now_s)
    world.pass_by(running, 0.2)
    assert len(world.asked) == 1
    world.pass_by(running, 10.0)
    assert len(world.asked) == 12
    world.pass_by(running, 1.0)
    assert len(world.asked) == 12
    assert world.kinds().count("paths_probed") == 2


def test_answers_without_a_survey_change_nothing_and_link_probes_go_to_who_asked() -> None:
    world = World()
    late = ProbePathResult(1, PathMeasurement("a", "b", "eth0", 1e-4, 1e9))
    assert world.roads.told("a", late, world.watching, now_s=1.0) == []
    assert world.roads.told("a", ProbeLinkResult(1, "b"), world.watching, now_s=1.0) == []
    pair = ProbePathResult(-1, PathMeasurement("a", "b", "agents"))
    assert world.roads.told("a", pair, world.watching, now_s=1.0) == []


def test_a_silent_rail_is_tried_and_left_at_once() -> None:
    world = World("abcd")
    running = world.begin()
    assert running.roads is not None
    rail = running.roads.rails[0]
    world.rate = lambda road: (
        0.0 if road.rail == rail and "c" in (road.source, road.destination) else 1e9
    )
    world.roads.told("b", RailSilent("c", rail, 1.0), world.watching, now_s=world.now_s)
    world.pass_by(running, 0.3)
    assert all(one.is_short and one.rail == rail for one in world.asked)
    why = world.roads.take_urgent()
    assert rail in why
    assert world.roads.take_urgent() == ""
    assert "path_finding" in world.kinds()
    places = world.ballot(running)
    assert places.roads is not None
    assert rail not in places.roads.rails


def test_a_silent_rail_that_is_found_alive_is_not_suspected_again_at_once() -> None:
    world = World("abcd")
    running = world.begin()
    said = RailSilent("c", "eth0", 1.0)
    world.roads.told("b", said, world.watching, now_s=world.now_s)
    world.pass_by(running, 0.3)
    asked = len(world.asked)
    assert asked
    assert world.roads.take_urgent() == ""
    world.roads.told("b", said, world.watching, now_s=world.now_s)
    world.pass_by(running, 0.3)
    assert len(world.asked) == asked


def test_a_node_that_is_not_heard_at_all_is_no_rail_that_is_dead() -> None:
    world = World("ab")
    running = world.begin()
    world.roads.told("a", RailSilent("b", "eth0", 1.0), world.watching, now_s=world.now_s)
    peer = world.peers.get("b")
    assert peer is not None
    peer.heard_s = world.now_s - 5
    assert world.roads.look(running, world.slow, now_s=world.now_s) == []
    world.roads.lost("b")
    peer.heard_s = world.now_s
    assert world.roads.look(running, world.slow, now_s=world.now_s) == []


def test_two_nodes_try_the_silent_rail_both_ways() -> None:
    world = World("ab")
    running = world.begin()
    world.rate = lambda road: 0.0 if road.rail == "eth0" else 1e9
    world.roads.told("a", RailSilent("b", "eth0", 1.0), world.watching, now_s=world.now_s)
    world.pass_by(running, 0.3)
    assert len(world.asked) == 2
    assert "eth0" in world.roads.take_urgent()


def test_words_of_a_rail_that_nobody_knows_or_that_are_old_are_dropped() -> None:
    world = World("ab")
    running = world.begin()
    world.roads.told("a", RailSilent("b", "eth9", 1.0), world.watching, now_s=world.now_s)
    world.pass_by(running, 2.0)
    assert world.asked == []


def verdict() -> Verdict:
    return Verdict(
        kind=VerdictKind.SLOW_COMMUNICATION,
        culprits=(),
        nodes=("b",),
        text="the link of node b is slow",
        confidence=Confidence.LIKELY,
        fingerprint="slow b",
    )


def slow_rail(world: World, running: GenerationPlan) -> str:
    assert running.roads is not None
    rail = running.roads.rails[0]
    world.rate = lambda road: (
        1e8 if road.rail == rail and "b" in (road.source, road.destination) else 1e9
    )
    world.slow.said = [verdict()]
    return rail


def test_a_slow_rail_is_left_at_the_next_boundary_where_probes_agree() -> None:
    world = World("abcd")
    running = world.begin()
    rail = slow_rail(world, running)
    world.pass_by(running, 2.0)
    assert rail in world.roads.wish
    assert world.roads.take_urgent() == ""
    asked = len(world.asked)
    world.pass_by(running, 1.0)
    assert len(world.asked) == asked
    places = world.ballot(running)
    assert places.roads is not None
    assert rail not in places.roads.rails
    world.roads.begin()
    assert world.roads.wish == ""


def test_a_slow_rail_stays_where_probes_find_it_as_quick_as_the_others() -> None:
    world = World("abcd")
    running = world.begin()
    world.slow.said = [verdict()]
    world.pass_by(running, 2.0)
    assert world.asked
    assert world.roads.wish == ""


def test_with_report_or_one_rail_a_slow_link_is_not_compared() -> None:
    for world in (World(mode="report"), World(count=1)):
        running = world.begin()
        world.pass_by(running, 1.0)
        world.asked.clear()
        world.slow.said = [verdict()]
        world.pass_by(running, 1.0)
        assert world.asked == []


def test_what_the_user_has_set_is_not_left() -> None:
    user = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_HCA": "mlx5_0"}
    world = World("abcd", user_env=user)
    running = world.begin()
    slow_rail(world, running)
    world.pass_by(running, 2.0)
    assert world.roads.wish == ""


def test_ranks_that_the_user_has_numbered_keep_their_order() -> None:
    world = World()
    world.cards = [railed(one, node_rank=at) for at, one in enumerate("cab")]
    places = world.ballot()
    assert [one.node_id for one in places.members] == ["c", "a", "b"]


def test_named_rails_are_the_only_ones_that_are_probed() -> None:
    world = World(rails=["eth1"])
    world.ballot()
    assert {one.rail for one in world.asked} == {"eth1"}


@pytest.mark.parametrize(
    ("more", "changes", "source"),
    [
        ({"topology": {"s1": ["a", "b"], "s2": ["c"]}}, {}, "file"),
        ({"slurm_topology": "SwitchName=s1 Nodes=a,b\nSwitchName=s2 Nodes=c"}, {}, "slurm"),
        ({}, {"switch": "s1"}, "slurm"),
        ({}, {"domain": "rack1"}, "labels"),
    ],
)
def test_leaves_are_known_by_what_there_is(
    more: dict[str, Any], changes: dict[str, str], source: str
) -> None:
    world = World(**more)
    world.cards = [railed(one, **changes) for one in "abc"]
    places = world.ballot()
    assert places.roads is not None
    assert places.roads.leaves_from == source


def test_a_topology_that_cannot_be_used_costs_only_itself() -> None:
    world = World(topology=["no", "mapping"])
    places = world.ballot()
    assert places.roads is not None
    assert places.roads.leaves_from != "file"


def test_a_bug_in_the_plan_costs_the_plan_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(_: object) -> NetworkPlan:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(road_watch, "plan_roads", breaks)
    monkeypatch.setattr(road_map, "survey_of", breaks)
    world = World()
    places = world.ballot()
    assert places == RankAssignment(tuple(world.cards), ())
    assert "network_plan_disabled" in {one.record.kind for one in world.roads.take_notes()}


def test_of_very_many_roads_the_worst_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(road_map, "MOST_TOLD", 2)
    world = World()
    world.rate = lambda road: 1e6 if road.source == "b" else 1e9
    world.ballot()
    status = world.roads.status(None, now_s=world.now_s)
    assert status is not None
    assert [one.source for one in status.paths] == ["b", "b"]
    assert status.num_paths == 12


def test_what_was_judged_is_not_judged_again_before_more_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[PlanningInputs] = []

    def counted(situation: PlanningInputs) -> tuple[NetworkFindings, LeafSwitches]:
        asked.append(situation)
        return survey_of(situation)

    monkeypatch.setattr(road_map, "survey_of", counted)
    world = World("abcd", mode="report")
    world.ballot()
    world.roads.begin()
    running = plan(0, world.cards)
    world.pass_by(running)
    assert world.roads.plan is not None
    assert len(asked) == 1, "once for what is told and for the plan"
    world.cards.append(railed("e"))
    meet(world.peers, world.cards[-1], now_s=world.now_s)
    world.pass_by(running, 20.0)
    assert len(asked) == 3, "with the new node, and of the members alone"


def test_a_first_ballot_that_begins_again_probes_nothing_twice() -> None:
    world = World()
    world.ballot()
    world.asked.clear()
    assert world.ballot().roads is not None
    assert world.asked == []


def test_what_is_dead_is_not_tried_for_every_word_and_looked_at_again_later() -> None:
    world = World("abcd")
    running = world.begin()
    world.falls_silent("c", "eth1")
    world.pass_by(running, 0.5)
    asked = len(world.asked)
    told = world.kinds().count("path_finding")
    world.roads.told("c", RailSilent("a", "eth1", 1.0), world.watching, now_s=world.now_s)
    world.roads.told("d", RailSilent("c", "eth1", 1.0), world.watching, now_s=world.now_s)
    world.pass_by(running, 0.5)
    assert len(world.asked) == asked
    world.pass_by(running, 31.0)
    assert len(world.asked) > asked
    world.rate = lambda road: 1e9
    world.pass_by(running, 62.0)
    asked = len(world.asked)
    world.pass_by(running, 62.0)
    assert len(world.asked) == asked, "it is mended"
    assert world.kinds().count("path_finding") >= told > 0
    world.roads.lost("c")


def test_a_member_that_is_not_there_just_now_ends_no_look() -> None:
    world = World()
    running = world.begin()
    world.cards.append(railed("d"))
    meet(world.peers, world.cards[-1], now_s=world.now_s)
    gone = world.peers.get("c")
    assert gone is not None
    gone.lost = "a test"
    world.pass_by(running, 10.0)
    assert world.kinds().count("paths_probed") == 2


def test_where_no_plan_was_made_with_on_none_is_told_later() -> None:
    world = World()
    world.begin()
    world.cards.append(railed("d"))
    meet(world.peers, world.cards[-1], now_s=world.now_s)
    world.pass_by(plan(0, world.cards[:3]), 10.0)
    assert world.kinds().count("network_plan") == 1


def new_lead(running: GenerationPlan, nodes: str = "abcd") -> World:
    """One that has taken over: it has probed nothing."""
    world = World(nodes)
    world.roads.know(running.voters)
    world.ballot(running)
    world.roads.begin()
    world.notes += world.roads.take_notes()
    return world


@pytest.mark.parametrize("nodes", ["ab", "abcd"])
def test_a_new_lead_leaves_a_dead_rail_though_it_knows_no_rate(nodes: str) -> None:
    running = World(nodes).begin()
    assert running.roads is not None
    rail = running.roads.rails[0]
    world = new_lead(running, nodes)
    world.rate = lambda road: (
        0.0 if road.rail == rail and "b" in (road.source, road.destination) else 1e9
    )
    world.roads.told("a", RailSilent("b", rail, 1.0), world.watching, now_s=world.now_s)
    world.pass_by(running, 0.3)
    assert rail in world.roads.take_urgent()
    places = world.ballot(running)
    assert places.roads is not None
    assert places.roads.rails == [one for one in ("eth0", "eth1") if one != rail]


def test_a_new_lead_stays_on_a_sound_rail_after_a_false_alarm() -> None:
    running = World("abcd").begin()
    assert running.roads is not None
    world = new_lead(running)
    rail = running.roads.rails[-1]
    world.roads.told("a", RailSilent("b", rail, 1.0), world.watching, now_s=world.now_s)
    world.pass_by(running, 0.3)
    assert world.asked
    assert world.roads.take_urgent() == world.roads.wish == ""
    places = world.ballot(running)
    assert places.roads is not None
    assert places.roads.rails == running.roads.rails


def test_a_short_look_keeps_the_rate_that_was_measured() -> None:
    world = World("abcd")
    running = world.begin()
    world.roads.told("b", RailSilent("c", "eth0", 1.0), world.watching, now_s=world.now_s)
    world.pass_by(running, 0.3)
    assert world.asked
    status = world.roads.status(running, now_s=world.now_s)
    assert status is not None
    assert {one.bytes_per_s for one in status.paths} == {1e9}


def test_what_is_dead_is_looked_at_shortly_and_ever_more_seldom_and_told_once() -> None:
    world = World("abcd")
    running = world.begin()
    world.falls_silent("c", "eth1")
    world.pass_by(running, 1.0)
    world.asked.clear()
    world.pass_by(running, 250.0)
    assert all(one.is_short and one.destination == "c" for one in world.asked)
    assert {one.rail for one in world.asked} == {"eth1"}
    assert len(world.asked) == 3 * 2, "after 30, 60 and 120 s, from two nodes"
    told = [one.record.culprit for one in world.notes if isinstance(one.record, PathFinding)]
    assert told
    assert len(told) == len(set(told)), "once for each place"
    world.rate = lambda road: 1e9
    world.pass_by(running, 300.0)
    assert not all(one.is_short for one in world.asked), "what is mended is measured"


def test_of_two_nodes_what_is_dead_is_looked_at_again_and_used_when_it_is_mended() -> None:
    world = World("ab")
    running = world.begin()
    world.falls_silent("a", "eth1")
    world.pass_by(running, 1.0)
    assert [one.record.kind for one in world.notes].count("path_finding") > 0
    world.asked.clear()
    world.pass_by(running, 100.0)
    assert {one.rail for one in world.asked} == {"eth1"}
    assert all(one.is_short for one in world.asked)
    world.rate = lambda road: 1e9
    world.pass_by(running, 200.0)
    assert not all(one.is_short for one in world.asked), "what is mended is measured"
    status = world.roads.status(running, now_s=world.now_s)
    assert status is not None
    assert {one.bytes_per_s for one in status.paths} == {1e9}


def test_a_plan_is_noted_only_where_it_differs() -> None:
    world = World()
    running = world.begin()
    world.ballot(running)
    world.ballot(running)
    world.notes += world.roads.take_notes()
    assert world.kinds().count("network_plan") == 1


class Broken:
    """Raises for everything."""

    def __getattr__(self, name: str) -> object:
        raise ZeroDivisionError("a bug")


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("hold_up", "_map"),
        ("decide", "_map"),
        ("begin", "_silent"),
        ("told", "_silent"),
        ("lost", "_map"),
        ("look", "_peers"),
        ("know", "_known"),
        ("status", "_map"),
    ],
)
def test_a_bug_anywhere_is_told_once_and_no_road_is_looked_at_again(name: str, part: str) -> None:
    world = World()
    running = world.begin()
    roads, now_s = world.roads, world.now_s
    calls: dict[str, Callable[[], object]] = {
        "hold_up": lambda: roads.hold_up(world.cards, None, now_s=now_s),
        "decide": lambda: roads.decide(world.cards, (), None),
        "begin": roads.begin,
        "told": lambda: roads.told("b", RailSilent("c", "eth0", 1.0), world.watching, now_s=now_s),
        "lost": lambda: roads.lost("d"),
        "look": lambda: roads.look(running, world.slow, now_s=now_s),
        "know": lambda: roads.know(world.cards),
        "status": lambda: roads.status(running, now_s=now_s),
    }
    setattr(roads, part, Broken())
    for call in (calls[name], *calls.values()):
        assert not call()
    assert [one.record.kind for one in roads.take_notes()].count("network_plan_disabled") == 1
    assert roads.take_urgent() == roads.wish == ""
