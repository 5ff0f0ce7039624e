"""The leader probes if it has a reason, plans by the results, and leaves a failed rail."""

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
from ftrun.network.failover import path_map as path_map
from ftrun.network.failover import path_monitor as path_monitor
from ftrun.network.failover.pair_check import PairCheck
from ftrun.network.plan.planner import PlanningInputs, survey_of
from ftrun.records.membership import PathFinding
from ftrun.recovery.commands import Command, JournalEntry, Send
from ftrun.recovery.health import HealthMonitor
from ftrun.recovery.snapshot_coordination import MemberReports
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
    RailUnresponsive,
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

    def persistent(self, for_s: float, *, now_s: float) -> list[Verdict]:
        del for_s, now_s
        return self.said


class World:
    """A leader with its nodes, which answer at once."""

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
        self.watching = HealthMonitor(settings(), "a", PairCheck(), MemberReports())
        self.slow = self.watching.slow = Slow()
        membership = settings(network=NetworkConfig(plan=mode, rails=list(rails)), **more)
        self.paths = path_monitor.PathMonitor("a", membership, self.peers)
        self.now_s = 1.0
        self.rate: Rate = lambda path: 1e9
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
            path = NetworkPath(command.node_id, order.destination, order.rail)
            rate = self.rate(path)
            found = PathMeasurement(
                path.source,
                path.destination,
                path.rail,
                1e-4 if rate else 0.0,
                0.0 if order.is_short else rate,
                "" if rate else "no answer",
            )
            waiting += self.paths.reported(
                path.source, ProbePathResult(order.survey, found), self.watching, now_s=self.now_s
            )

    def ballot(self, previous: GenerationPlan | None = None) -> RankAssignment:
        """Runs up to the plan."""
        held = self.paths.postpone(self.cards, previous, now_s=self.now_s)
        while held is not None:
            assert held
            self.answer(held)
            held = self.paths.postpone(self.cards, previous, now_s=self.now_s)
        places = RankAssignment(tuple(self.cards), ())
        return places.along(self.paths.decide(places.members, places.spares, previous))

    def begin(self) -> GenerationPlan:
        """A running generation."""
        places = self.ballot()
        self.paths.begin()
        self.notes += self.paths.drain_journal_entries()
        self.asked.clear()
        return plan(0, places.members, paths=places.paths)

    def stops_responding(self, node_id: str, rail: str) -> None:
        """Packets from and to this node over this rail are lost, and b reports it."""
        self.rate = lambda path: (
            0.0 if path.rail == rail and node_id in (path.source, path.destination) else 1e9
        )
        self.paths.reported(
            "b", RailUnresponsive(node_id, rail, 1.0), self.watching, now_s=self.now_s
        )

    def pass_by(self, running: GenerationPlan, for_s: float = 1.0) -> None:
        end_s = self.now_s + for_s
        while self.now_s < end_s:
            self.now_s += 0.05
            for peer in self.peers:
                peer.received_s = self.now_s
            self.answer(self.paths.poll(running, self.slow, now_s=self.now_s))
        self.notes += self.paths.drain_journal_entries()

    def kinds(self) -> list[str]:
        return [one.record.kind for one in self.notes]


def test_before_the_first_generation_every_path_is_probed_and_the_plan_is_applied() -> None:
    world = World()
    places = world.ballot()
    assert len(world.asked) == 12
    assert places.paths is not None
    assert sorted(places.paths.order) == ["a", "b", "c"]
    assert [one.node_id for one in places.members] == places.paths.order
    assert {"paths_probed", "network_plan"} <= {
        one.record.kind for one in world.paths.drain_journal_entries()
    }


def test_report_reports_the_plan_and_changes_nothing() -> None:
    world = World(mode="report")
    places = world.ballot()
    assert places == RankAssignment(tuple(world.cards), ())
    world.paths.begin()
    assert world.asked == [], "no start waits for it"
    world.pass_by(plan(0, world.cards))
    assert len(world.asked) == 12
    assert world.kinds() == ["paths_probed", "network_plan"]
    assert world.paths.plan is not None
    status = world.paths.status(plan(0, "abc"), now_s=world.now_s)
    assert status is not None
    assert status.is_applied is False
    assert len(status.paths) == 12
    assert status.chosen.order


@pytest.mark.parametrize(("mode", "nodes"), [("off", "abc"), ("on", "a")])
def test_nothing_is_probed_with_off_or_on_one_node(mode: str, nodes: str) -> None:
    world = World(nodes, mode=mode)
    places = world.ballot()
    assert (world.asked, places.paths) == ([], None)
    assert world.paths.poll(plan(0, nodes), world.slow, now_s=2.0) == []
    assert world.paths.status(None, now_s=2.0) is None


def test_a_node_without_rails_ends_the_planning() -> None:
    world = World()
    world.cards[1] = card("b")
    assert world.ballot().paths is None


def test_a_later_generation_waits_for_no_probe_and_keeps_its_ranks() -> None:
    world = World()
    running = world.begin()
    places = world.ballot(running)
    assert world.asked == []
    assert places.paths is not None
    assert places.members == tuple(world.cards)


def test_a_new_leader_continues_with_the_plan_that_there_is() -> None:
    first = World()
    running = first.begin()
    second = World()
    second.paths.know(running.voters)
    places = second.ballot(running)
    assert places.paths is not None
    assert running.paths is not None
    assert places.paths.rails == running.paths.rails
    second.paths.begin()
    second.pass_by(running)
    assert second.asked == []


def test_a_ballot_ends_a_survey_during_the_generation_before() -> None:
    world = World()
    running = world.begin()
    world.cards.append(railed("d"))
    meet(world.peers, world.cards[-1], now_s=world.now_s)
    assert world.paths.poll(running, world.slow, now_s=world.now_s)
    assert world.paths.postpone(world.cards, running, now_s=world.now_s) is None


def test_a_second_first_ballot_probes_only_nodes_that_are_new() -> None:
    world = World("ab")
    world.ballot()
    world.asked.clear()
    world.cards.append(railed("c"))
    meet(world.peers, world.cards[-1], now_s=world.now_s)
    world.ballot()
    assert len(world.asked) == 8
    assert all("c" in (one.destination, "c") for one in world.asked)


def test_a_node_that_joins_is_probed_during_the_generation_a_round_at_a_time() -> None:
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


def test_answers_without_a_survey_change_nothing_and_link_probes_go_to_the_requester() -> None:
    world = World()
    late = ProbePathResult(1, PathMeasurement("a", "b", "eth0", 1e-4, 1e9))
    assert world.paths.reported("a", late, world.watching, now_s=1.0) == []
    assert world.paths.reported("a", ProbeLinkResult(1, "b"), world.watching, now_s=1.0) == []
    pair = ProbePathResult(-1, PathMeasurement("a", "b", "agents"))
    assert world.paths.reported("a", pair, world.watching, now_s=1.0) == []


def test_an_unresponsive_rail_is_tried_and_left_at_once() -> None:
    world = World("abcd")
    running = world.begin()
    assert running.paths is not None
    rail = running.paths.rails[0]
    world.rate = lambda path: (
        0.0 if path.rail == rail and "c" in (path.source, path.destination) else 1e9
    )
    world.paths.reported("b", RailUnresponsive("c", rail, 1.0), world.watching, now_s=world.now_s)
    world.pass_by(running, 0.3)
    assert all(one.is_short and one.rail == rail for one in world.asked)
    reason = world.paths.take_urgent_reason()
    assert rail in reason
    assert world.paths.take_urgent_reason() == ""
    assert "path_finding" in world.kinds()
    places = world.ballot(running)
    assert places.paths is not None
    assert rail not in places.paths.rails


def test_an_unresponsive_rail_that_is_found_alive_is_not_suspected_again_at_once() -> None:
    world = World("abcd")
    running = world.begin()
    said = RailUnresponsive("c", "eth0", 1.0)
    world.paths.reported("b", said, world.watching, now_s=world.now_s)
    world.pass_by(running, 0.3)
    asked = len(world.asked)
    assert asked
    assert world.paths.take_urgent_reason() == ""
    world.paths.reported("b", said, world.watching, now_s=world.now_s)
    world.pass_by(running, 0.3)
    assert len(world.asked) == asked


def test_a_node_that_does_not_respond_at_all_is_no_rail_that_is_dead() -> None:
    world = World("ab")
    running = world.begin()
    world.paths.reported("a", RailUnresponsive("b", "eth0", 1.0), world.watching, now_s=world.now_s)
    peer = world.peers.get("b")
    assert peer is not None
    peer.received_s = world.now_s - 5
    assert world.paths.poll(running, world.slow, now_s=world.now_s) == []
    world.paths.lost("b")
    peer.received_s = world.now_s
    assert world.paths.poll(running, world.slow, now_s=world.now_s) == []


def test_two_nodes_try_the_unresponsive_rail_both_ways() -> None:
    world = World("ab")
    running = world.begin()
    world.rate = lambda path: 0.0 if path.rail == "eth0" else 1e9
    world.paths.reported("a", RailUnresponsive("b", "eth0", 1.0), world.watching, now_s=world.now_s)
    world.pass_by(running, 0.3)
    assert len(world.asked) == 2
    assert "eth0" in world.paths.take_urgent_reason()


def test_words_of_a_rail_that_no_process_knows_or_that_are_old_are_dropped() -> None:
    world = World("ab")
    running = world.begin()
    world.paths.reported("a", RailUnresponsive("b", "eth9", 1.0), world.watching, now_s=world.now_s)
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
    assert running.paths is not None
    rail = running.paths.rails[0]
    world.rate = lambda path: (
        1e8 if path.rail == rail and "b" in (path.source, path.destination) else 1e9
    )
    world.slow.said = [verdict()]
    return rail


def test_a_slow_rail_is_left_at_the_next_boundary_where_probes_agree() -> None:
    world = World("abcd")
    running = world.begin()
    rail = slow_rail(world, running)
    world.pass_by(running, 2.0)
    assert rail in world.paths.requested
    assert world.paths.take_urgent_reason() == ""
    asked = len(world.asked)
    world.pass_by(running, 1.0)
    assert len(world.asked) == asked
    places = world.ballot(running)
    assert places.paths is not None
    assert rail not in places.paths.rails
    world.paths.begin()
    assert world.paths.requested == ""


def test_a_slow_rail_stays_where_probes_find_it_as_quick_as_the_others() -> None:
    world = World("abcd")
    running = world.begin()
    world.slow.said = [verdict()]
    world.pass_by(running, 2.0)
    assert world.asked
    assert world.paths.requested == ""


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
    assert world.paths.requested == ""


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
    assert places.paths is not None
    assert places.paths.leaves_from == source


def test_a_topology_that_cannot_be_used_costs_only_itself() -> None:
    world = World(topology=["no", "mapping"])
    places = world.ballot()
    assert places.paths is not None
    assert places.paths.leaves_from != "file"


def test_a_bug_in_the_plan_costs_the_plan_and_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(_: object) -> NetworkPlan:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(path_monitor, "plan_network", breaks)
    monkeypatch.setattr(path_map, "survey_of", breaks)
    world = World()
    places = world.ballot()
    assert places == RankAssignment(tuple(world.cards), ())
    assert "network_plan_disabled" in {
        one.record.kind for one in world.paths.drain_journal_entries()
    }


def test_of_very_many_paths_the_worst_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_map, "MAX_REPORTED", 2)
    world = World()
    world.rate = lambda path: 1e6 if path.source == "b" else 1e9
    world.ballot()
    status = world.paths.status(None, now_s=world.now_s)
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

    monkeypatch.setattr(path_map, "survey_of", counted)
    world = World("abcd", mode="report")
    world.ballot()
    world.paths.begin()
    running = plan(0, world.cards)
    world.pass_by(running)
    assert world.paths.plan is not None
    assert len(asked) == 1, "once for the report and for the plan"
    world.cards.append(railed("e"))
    meet(world.peers, world.cards[-1], now_s=world.now_s)
    world.pass_by(running, 20.0)
    assert len(asked) == 3, "with the new node, and with the members only"


def test_a_first_ballot_that_begins_again_probes_nothing_twice() -> None:
    world = World()
    world.ballot()
    world.asked.clear()
    assert world.ballot().paths is not None
    assert world.asked == []


def test_a_dead_path_is_not_used_for_every_message_and_is_checked_later() -> None:
    world = World("abcd")
    running = world.begin()
    world.stops_responding("c", "eth1")
    world.pass_by(running, 0.5)
    asked = len(world.asked)
    reported = world.kinds().count("path_finding")
    world.paths.reported("c", RailUnresponsive("a", "eth1", 1.0), world.watching, now_s=world.now_s)
    world.paths.reported("d", RailUnresponsive("c", "eth1", 1.0), world.watching, now_s=world.now_s)
    world.pass_by(running, 0.5)
    assert len(world.asked) == asked
    world.pass_by(running, 31.0)
    assert len(world.asked) > asked
    world.rate = lambda path: 1e9
    world.pass_by(running, 62.0)
    asked = len(world.asked)
    world.pass_by(running, 62.0)
    assert len(world.asked) == asked, "it is repaired"
    assert world.kinds().count("path_finding") >= reported > 0
    world.paths.lost("c")


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


def test_where_no_plan_was_made_with_on_none_is_reported_later() -> None:
    world = World()
    world.begin()
    world.cards.append(railed("d"))
    meet(world.peers, world.cards[-1], now_s=world.now_s)
    world.pass_by(plan(0, world.cards[:3]), 10.0)
    assert world.kinds().count("network_plan") == 1


def new_leader(running: GenerationPlan, nodes: str = "abcd") -> World:
    """A new leader: it has probed nothing."""
    world = World(nodes)
    world.paths.know(running.voters)
    world.ballot(running)
    world.paths.begin()
    world.notes += world.paths.drain_journal_entries()
    return world


@pytest.mark.parametrize("nodes", ["ab", "abcd"])
def test_a_new_leader_leaves_a_dead_rail_though_it_knows_no_rate(nodes: str) -> None:
    running = World(nodes).begin()
    assert running.paths is not None
    rail = running.paths.rails[0]
    world = new_leader(running, nodes)
    world.rate = lambda path: (
        0.0 if path.rail == rail and "b" in (path.source, path.destination) else 1e9
    )
    world.paths.reported("a", RailUnresponsive("b", rail, 1.0), world.watching, now_s=world.now_s)
    world.pass_by(running, 0.3)
    assert rail in world.paths.take_urgent_reason()
    places = world.ballot(running)
    assert places.paths is not None
    assert places.paths.rails == [one for one in ("eth0", "eth1") if one != rail]


def test_a_new_leader_stays_on_a_sound_rail_after_a_false_alarm() -> None:
    running = World("abcd").begin()
    assert running.paths is not None
    world = new_leader(running)
    rail = running.paths.rails[-1]
    world.paths.reported("a", RailUnresponsive("b", rail, 1.0), world.watching, now_s=world.now_s)
    world.pass_by(running, 0.3)
    assert world.asked
    assert world.paths.take_urgent_reason() == world.paths.requested == ""
    places = world.ballot(running)
    assert places.paths is not None
    assert places.paths.rails == running.paths.rails


def test_a_short_look_keeps_the_rate_that_was_measured() -> None:
    world = World("abcd")
    running = world.begin()
    world.paths.reported("b", RailUnresponsive("c", "eth0", 1.0), world.watching, now_s=world.now_s)
    world.pass_by(running, 0.3)
    assert world.asked
    status = world.paths.status(running, now_s=world.now_s)
    assert status is not None
    assert {one.bytes_per_s for one in status.paths} == {1e9}


def test_a_dead_path_is_checked_with_growing_intervals_and_reported_once() -> None:
    world = World("abcd")
    running = world.begin()
    world.stops_responding("c", "eth1")
    world.pass_by(running, 1.0)
    world.asked.clear()
    world.pass_by(running, 250.0)
    assert all(one.is_short and one.destination == "c" for one in world.asked)
    assert {one.rail for one in world.asked} == {"eth1"}
    assert len(world.asked) == 3 * 2, "after 30, 60 and 120 s, from two nodes"
    reported = [one.record.culprit for one in world.notes if isinstance(one.record, PathFinding)]
    assert reported
    assert len(reported) == len(set(reported)), "once for each place"
    world.rate = lambda path: 1e9
    world.pass_by(running, 300.0)
    assert not all(one.is_short for one in world.asked), "a repaired path is measured"


def test_of_two_nodes_a_dead_path_is_checked_again_and_used_after_repair() -> None:
    world = World("ab")
    running = world.begin()
    world.stops_responding("a", "eth1")
    world.pass_by(running, 1.0)
    assert [one.record.kind for one in world.notes].count("path_finding") > 0
    world.asked.clear()
    world.pass_by(running, 100.0)
    assert {one.rail for one in world.asked} == {"eth1"}
    assert all(one.is_short for one in world.asked)
    world.rate = lambda path: 1e9
    world.pass_by(running, 200.0)
    assert not all(one.is_short for one in world.asked), "a repaired path is measured"
    status = world.paths.status(running, now_s=world.now_s)
    assert status is not None
    assert {one.bytes_per_s for one in status.paths} == {1e9}


def test_a_plan_is_noted_only_where_it_differs() -> None:
    world = World()
    running = world.begin()
    world.ballot(running)
    world.ballot(running)
    world.notes += world.paths.drain_journal_entries()
    assert world.kinds().count("network_plan") == 1


class Broken:
    """Raises for every call."""

    def __getattr__(self, name: str) -> object:
        raise ZeroDivisionError("a bug")


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("postpone", "_map"),
        ("decide", "_map"),
        ("begin", "_unresponsive"),
        ("reported", "_unresponsive"),
        ("lost", "_map"),
        ("poll", "_peers"),
        ("know", "_known"),
        ("status", "_map"),
    ],
)
def test_a_bug_anywhere_is_reported_once_and_no_path_is_checked_again(name: str, part: str) -> None:
    world = World()
    running = world.begin()
    paths, now_s = world.paths, world.now_s
    calls: dict[str, Callable[[], object]] = {
        "postpone": lambda: paths.postpone(world.cards, None, now_s=now_s),
        "decide": lambda: paths.decide(world.cards, (), None),
        "begin": paths.begin,
        "reported": lambda: paths.reported(
            "b", RailUnresponsive("c", "eth0", 1.0), world.watching, now_s=now_s
        ),
        "lost": lambda: paths.lost("d"),
        "poll": lambda: paths.poll(running, world.slow, now_s=now_s),
        "know": lambda: paths.know(world.cards),
        "status": lambda: paths.status(running, now_s=now_s),
    }
    setattr(paths, part, Broken())
    for call in (calls[name], *calls.values()):
        assert not call()
    assert [one.record.kind for one in paths.drain_journal_entries()].count(
        "network_plan_disabled"
    ) == 1
    assert paths.take_urgent_reason() == paths.requested == ""
