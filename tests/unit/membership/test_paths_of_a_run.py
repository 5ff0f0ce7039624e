"""Agents with two rails: the rails are surveyed before the run begins, and a dead one is left."""

import msgspec
import pytest

from ftrun.config.cluster import ClusterSize
from ftrun.config.profile import NetworkConfig
from ftrun.membership.events import MessageReceived
from ftrun.membership.member import Member
from ftrun.network.failover.pair_check import PairCheck
from ftrun.recovery.commands import Command, JournalEntry, ProbePath, StartRanks
from ftrun.recovery.generation_monitor import GenerationMonitor
from ftrun.wire.cluster.generation import GenerationPlan, PathMeasurement, Rail
from ftrun.wire.cluster.membership import Heartbeat
from ftrun.wire.cluster.messages import ProbePathResult, RailUnresponsive
from tests.unit.membership.agents import Agent, Agents
from tests.unit.recovery.made import card, settings


class Railed(Agents):
    """Nodes with two rails; a probe of a path is answered at once, or never."""

    def __init__(self, node_ids: str, mode: str) -> None:
        self.unresponsive: set[str] = set()
        """Nodes that probe no path."""
        self.dead: set[tuple[str, str]] = set()
        self.tried: list[tuple[str, str, str]] = []
        count = len(node_ids)
        network = NetworkConfig(plan=mode)
        super().__init__(node_ids, settings(cluster_size=ClusterSize(2, count, 0), network=network))

    def start(self, node_id: str, incarnation: int = 1, **changes: object) -> Agent:
        assert not changes
        at = ord(node_id) - ord("a") + 1
        rails = [Rail(f"eth{i}", f"10.{i}.0.{at}", 24, 7000) for i in range(2)]
        me = card(node_id, incarnation, endpoint=node_id == "a", rails=rails)
        cluster_size = self.settings
        member = Member(
            me,
            cluster_size,
            lambda: GenerationMonitor(cluster_size, node_id, pairs=PairCheck()),
            now_s=self.now_s,
        )
        self.all[node_id] = Agent(member, cluster_size)
        return self.all[node_id]

    def _carry_out(self, agent: Agent, command: Command) -> None:
        if not isinstance(command, ProbePath):
            super()._carry_out(agent, command)
            return
        me, order = agent.card.node_id, command.order
        self.tried.append((me, order.destination, order.rail))
        if me in self.unresponsive:
            return
        is_dead = bool({(me, order.rail), (order.destination, order.rail)} & self.dead)
        figures = (0.0, 0.0, "no answer") if is_dead else (1e-4, 1e9, "")
        found = PathMeasurement(me, order.destination, order.rail, *figures)
        answer = MessageReceived(me, ProbePathResult(order.survey, found))
        if command.asks == me or frozenset((me, command.asks)) in self.links:
            self._queue.append((command.asks, answer))

    def plan(self) -> GenerationPlan:
        """Of the newest running generation."""
        return self["a"].reported(StartRanks)[-1].plan

    def works(self, step: int) -> None:
        for one in self.all:
            self.here_is(
                one,
                Heartbeat(
                    generation=self[one].runs,
                    state="running",
                    attached=True,
                    step=step,
                    steps_here=step,
                ),
            )


@pytest.mark.parametrize("mode", ["on", "report", "off"])
def test_a_run_begins_with_a_survey_and_what_it_found(mode: str) -> None:
    made = Railed("abcd", mode)
    made.passes(10.0)
    assert len(made.tried) == (0 if mode == "off" else 24)
    paths = made.plan().paths
    assert (paths is not None) == (mode == "on")
    if paths is not None:
        rail = made.plan().members[0].card.rails[int(paths.rails[0][-1])]
        assert made.plan().store_host == rail.host
    else:
        assert made.plan().store_host == "a.local"


@pytest.mark.parametrize("unresponsive", ["a", "c", "abcd"])
def test_nodes_that_try_nothing_delay_the_start_by_no_more_than_the_limit(
    unresponsive: str,
) -> None:
    made = Railed("abcd", "on")
    made.unresponsive = set(unresponsive)
    made.passes(3.0)
    started_s = made.now_s
    while not made["a"].reported(StartRanks) and made.now_s < started_s + 20:
        made.passes(0.25)
    assert made["a"].reported(StartRanks)
    assert made.now_s - started_s < 6.0


def test_a_node_that_dies_in_the_survey_is_done_without() -> None:
    made = Railed("abcd", "on")
    made.settings = made.settings
    made.unresponsive = {"d"}
    made.passes(2.5)
    assert made.tried
    made.kill("d")
    made.passes(20.0)
    assert [one.node_id for one in made.plan().members] != []
    assert "d" not in {one.node_id for one in made.plan().members}


def test_a_rail_that_stops_responding_is_left_within_one_generation() -> None:
    made = Railed("abcd", "on")
    made.passes(10.0)
    before = made.plan()
    assert before.paths is not None
    rail = before.paths.rails[0]
    made.works(7)
    made.dead.add(("c", rail))
    made.happens("a", MessageReceived("b", RailUnresponsive("c", rail, 1.0)))
    made.passes(1.0)
    after = made.plan()
    assert after.generation == 1
    assert after.paths is not None
    assert rail not in after.paths.rails
    assert [one.node_id for one in after.members] == [one.node_id for one in before.members]
    host = after.members[0].card.rails[int(after.paths.rails[0][-1])].host
    assert after.store_host == host
    findings = [
        one for one in made["a"].reported(JournalEntry) if one.record.kind == "path_finding"
    ]
    assert any(one.announce and rail in one.record.text for one in findings)


def test_with_report_a_dead_rail_is_named_and_nothing_else_happens() -> None:
    made = Railed("abc", "report")
    made.passes(10.0)
    made.works(7)
    made.dead.add(("c", "eth1"))
    made.happens("a", MessageReceived("b", RailUnresponsive("c", "eth1", 1.0)))
    made.passes(2.0)
    assert made.plan().generation == 0
    findings = [
        one.record.text
        for one in made["a"].reported(JournalEntry)
        if one.record.kind == "path_finding"
    ]
    assert any("eth1" in text for text in findings)


def test_a_plan_whose_rail_the_first_node_lacks_meets_at_its_address() -> None:
    made = Railed("ab", "on")
    made.passes(10.0)
    plan = made.plan()
    assert plan.paths is not None
    assert msgspec.json.decode(msgspec.json.encode(plan), type=GenerationPlan) == plan
