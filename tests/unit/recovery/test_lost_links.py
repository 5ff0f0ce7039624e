"""A hang over a link that both of its ends report as lost: the link is named, one end replaced."""

from collections.abc import Mapping

import msgspec
import pytest
from unit.monitor.test_connections import connection
from unit.monitor.test_hang_detector import behind, waiting
from unit.recovery.test_health import heartbeat

from ftrun.config.cluster import ClusterSize
from ftrun.config.profile import HangConfig
from ftrun.monitor.verdicts import RankConnection, RankView, VerdictKind
from ftrun.network.failover.pair_check import PairCheck
from ftrun.recovery.commands import StartGeneration
from ftrun.recovery.generation_monitor import GenerationMonitor
from ftrun.recovery.lost_links import _node_out, lost_links, with_lost_links
from ftrun.wire.cluster.generation import FailureHistory
from ftrun.wire.cluster.membership import Heartbeat
from tests.unit.recovery.made import card, fields, plan, settings

MEMBERS = [card("a"), card("b"), card("c"), card("d")]
PLAN = plan(1, MEMBERS, spares="s")
SETTINGS = settings(cluster_size=ClusterSize(4, 4, 1), heartbeat_interval_s=0.5)


def heartbeats(unreachable: Mapping[str, str], generation: int = 1) -> dict[str, Heartbeat]:
    return {
        one: Heartbeat(generation=generation, unreachable=tuple(unreachable.get(one, "")))
        for one in "abcd"
    }


@pytest.mark.parametrize(
    ("unreachable", "pairs", "out"),
    [
        ({"b": "c", "c": "b"}, [("b", "c")], "c"),
        ({"a": "d", "d": "a"}, [("a", "d")], "d"),
        ({"b": "ac", "a": "b", "c": "b"}, [("a", "b"), ("b", "c")], "b"),
        ({"b": "c"}, None, ""),
        ({"b": "s"}, None, ""),
        ({}, None, ""),
    ],
    ids=["pair", "of the leader", "several of one node", "one side", "no member", "none"],
)
def test_a_link_is_lost_where_both_ends_report_it(
    unreachable: dict[str, str], pairs: list[tuple[str, str]] | None, out: str
) -> None:
    found = lost_links(heartbeats(unreachable), PLAN)
    assert (None if found is None else list(found.pairs)) == pairs
    assert found is None or _node_out(found.pairs, "a", {}) == out


def test_each_lost_link_is_named() -> None:
    found = lost_links(heartbeats({"b": "ac", "a": "b", "c": "b"}), PLAN)
    assert found is not None
    assert found.words == "the links between nodes a and b, b and c carry no data"


def test_reports_of_another_generation_do_not_count() -> None:
    assert lost_links(heartbeats({"b": "c", "c": "b"}, generation=0), PLAN) is None


def test_a_rank_with_a_cause_of_its_own_stays_the_culprit() -> None:
    lost = lost_links(heartbeats({"b": "c", "c": "b"}), PLAN)
    assert lost is not None
    made = with_lost_links(None, lost, [0, 1])
    assert "the link between nodes b and c carries no data" in made.text
    frozen = msgspec.structs.replace(made, kind=VerdictKind.FROZEN)
    assert with_lost_links(frozen, lost, [0, 1]) is frozen
    elsewhere = msgspec.structs.replace(
        made, kind=VerdictKind.HANG_IN_COMPUTATION, nodes=("a",), culprits=(0,)
    )
    assert with_lost_links(elsewhere, lost, [0, 1]) is elsewhere
    computes = msgspec.structs.replace(
        elsewhere, nodes=("b",), counter_evidence=("rank 1 computes",)
    )
    assert with_lost_links(computes, lost, [0, 1]) is computes


class Run:
    """Four nodes of one rank; the link between b and c is cut after step 40."""

    def __init__(self, *, spares: int = 1, action: str = "restart") -> None:
        self.monitor = GenerationMonitor(
            settings(cluster_size=ClusterSize(4, 4, 1), hang=HangConfig(action=action)),
            "a",
            pairs=PairCheck(),
        )
        self.monitor.begin(PLAN, now_s=0.0)
        self.monitor.num_spares = spares
        self.number, self.generation = 0, 1
        self.acked_s = -1.0
        """Since a byte was acknowledged on another connection from b to c."""
        self.reasons: list[str] = []

    def at(
        self,
        now_s: float,
        step: int,
        unresponsive_s: float,
        *,
        is_cut: bool = True,
        knows: str = "",
        phase: str = "",
        lost: tuple[tuple[int, int], ...] = (),
    ) -> None:
        """All nodes report.

        Args:
            now_s: time of the report.
            step: of all ranks.
            unresponsive_s: for all ranks.
            is_cut: b and c report that they do not reach each other.
            knows: ranks that have not entered the collective.
            phase: of all ranks.
            lost: sender and receiver whose connection carries no data that way.
        """
        for rank, one in enumerate("abcd"):
            made = heartbeat("a", step)
            poll = self._view(rank, unresponsive_s, str(rank) in knows)
            ends = [connection(rank, peer, frozenset(lost)) for peer in range(4) if peer != rank]
            if one == "b":
                other = RankConnection(("10.0.0.1", 8), ("10.0.0.2", 9), acked_s=self.acked_s)
                ends.append(other)
            poll = msgspec.structs.replace(poll, connections=tuple(ends))
            body = msgspec.structs.replace(
                made,
                generation=self.generation,
                p99_s=0.1,
                ranks=(msgspec.structs.replace(made.ranks[0], rank=rank, phase=phase),),
                views=(poll,) if unresponsive_s else (),
                unreachable=({"b": ("c",), "c": ("b",)}.get(one, ())) if is_cut else (),
            )
            self.monitor.heartbeat_received(one, body, now_s=now_s)
        found = self.monitor.tick(now_s=now_s)
        found += self.monitor.tick(now_s=now_s + 0.7)
        self.reasons += [one.reason for one in found if isinstance(one, StartGeneration)]

    @staticmethod
    def _view(rank: int, unresponsive_s: float, has_not_entered: bool) -> RankView:
        made = behind(rank) if has_not_entered else waiting(rank)
        return msgspec.structs.replace(made, unresponsive_s=unresponsive_s, step=40)

    def begin(self) -> None:
        self.generation += 1
        members = [one for one in MEMBERS if one.node_id not in self.excluded()] + [card("s")]
        self.monitor.begin(plan(self.generation, members[:4]), now_s=100.0)

    def excluded(self) -> set[str]:
        return self.monitor.excluded(now_s=101.0)


def test_the_link_is_named_and_one_end_replaced_at_the_deadline() -> None:
    run = Run()
    run.at(50.0, 40, 9.0)
    verdict = next(
        fields(note)["verdict"]
        for note in run.monitor.incidents.drain_journal_entries()
        if note.record.kind == "verdict"
    )
    assert list(verdict["nodes"]) == ["b", "c"]
    assert not run.reasons
    run.at(52.0, 40, 11.0)
    assert run.excluded() == {"c"}
    assert len(run.reasons) == 1
    assert "the link between nodes b and c carries no data" in run.reasons[0]


def test_a_connection_without_data_is_named_and_one_end_replaced() -> None:
    """Agents and SMPs reach each other: only the counters of the ranks' connections show it."""
    run = Run()
    for at_s in (50.0, 52.0):
        run.at(at_s, 40, at_s - 41.0, is_cut=False, lost=((1, 2),))
    assert run.excluded() == {"c"}
    assert len(run.reasons) == 1
    assert "nothing that rank 1 on b sends to rank 2 on c arrives" in run.reasons[0]


def test_if_other_connections_between_two_nodes_carry_data_they_are_restarted_first() -> None:
    run = Run()
    run.at(1.0, 0, 0.0, is_cut=False)
    run.at(5.0, 40, 0.0, is_cut=False)
    run.acked_s = 0.5
    for at_s in (50.0, 52.0):
        run.at(at_s, 40, at_s - 41.0, is_cut=False, lost=((1, 2),))
    assert len(run.reasons) == 1
    assert run.excluded() == set()
    run.generation += 1
    run.monitor.begin(plan(run.generation, MEMBERS, spares="s"), now_s=60.0)
    for at_s in (61.0, 200.0, 202.0):  # no step follows
        run.at(at_s, 0, 0.0, is_cut=False)
    assert len(run.reasons) == 2
    assert run.excluded() == {"c"}


@pytest.mark.parametrize(
    ("first", "second", "out"),
    [((3, 1), (1, 2), "b"), ((0, 3), (0, 2), "a"), ((0, 3), (1, 2), ""), ((1, 2), (1, 2), "c")],
    ids=["common", "the leader is common", "none is common", "both are common"],
)
def test_the_node_that_was_in_an_earlier_hang_is_replaced(
    first: tuple[int, int], second: tuple[int, int], out: str
) -> None:
    """In the first hang, the run restarts without a replacement; the next leader knows of it."""
    run = Run(spares=0)
    for at_s in (50.0, 165.0):
        run.at(at_s, 40, at_s - 41.0, is_cut=False, lost=(first,))
    assert len(run.reasons) == 1
    assert run.excluded() == set()
    history = run.monitor.history(now_s=170.0)
    after = Run()
    after.acked_s = 0.5  # not considered, if a node was in an earlier hang
    after.monitor.succeed(history, now_s=200.0, known_s=200.0)
    for at_s in (205.0, 250.0, 252.0):
        lost = (second,) if at_s > 205.0 else ()
        after.at(at_s, 40, 0.0 if at_s == 205.0 else at_s - 241.0, is_cut=False, lost=lost)
    assert len(after.reasons) == 1
    assert after.excluded() == ({out} if out else set())


def test_of_links_that_both_ends_report_the_node_of_an_earlier_hang_is_replaced() -> None:
    run = Run()
    run.monitor.succeed(FailureHistory(hung_pairs=[["b", "d"]]), now_s=0.0, known_s=0.0)
    for at_s in (50.0, 52.0):
        run.at(at_s, 40, at_s - 41.0)
    assert run.excluded() == {"b"}


def test_the_leader_is_replaced_if_nothing_that_it_sends_arrives() -> None:
    run = Run()
    for at_s in (50.0, 52.0):
        run.at(at_s, 40, at_s - 41.0, is_cut=False, lost=((0, 1), (0, 2), (0, 3)))
    assert run.excluded() == {"a"}
    assert "nothing that node a sends to nodes b, c, d arrives" in run.reasons[0]


def test_a_connection_without_data_is_given_time_if_no_node_can_replace_an_end() -> None:
    run = Run(spares=0)
    for at_s in (50.0, 52.0, 80.0):
        run.at(at_s, 40, at_s - 41.0, is_cut=False, lost=((1, 2),))
    assert not run.reasons
    run.at(165.0, 40, 124.0, is_cut=False, lost=((1, 2),))
    assert len(run.reasons) == 1
    assert run.excluded() == set()


def test_a_link_that_both_nodes_report_has_the_connection_as_evidence() -> None:
    run = Run()
    run.at(50.0, 40, 9.0, lost=((1, 2),))
    (verdict,) = [
        fields(note)["verdict"]
        for note in run.monitor.incidents.drain_journal_entries()
        if note.record.kind == "verdict"
    ]
    assert verdict["text"].startswith("the link between nodes b and c carries no data")
    assert any(
        "nothing that rank 1 on b sends to rank 2 on c" in one for one in verdict["evidence"]
    )


def test_ranks_that_wait_on_the_way_to_a_collective_do_not_hide_the_link() -> None:
    run = Run()
    for at_s in (50.0, 52.0):
        run.at(at_s, 40, at_s - 41.0, knows="12")
    assert run.excluded() == {"c"}


def test_without_a_node_to_replace_it_the_link_is_given_time() -> None:
    run = Run(spares=0)
    for at_s in (50.0, 52.0, 80.0):
        run.at(at_s, 40, at_s - 41.0)
    assert not run.reasons
    run.at(165.0, 40, 124.0)
    assert len(run.reasons) == 1
    assert run.excluded() == set()


def test_with_report_nothing_is_done() -> None:
    run = Run(action="report")
    for at_s in (50.0, 52.0, 200.0):
        run.at(at_s, 40, at_s - 41.0)
    assert not run.reasons
    assert run.excluded() == set()


def test_with_report_a_generation_without_a_first_step_stays() -> None:
    run = Run(action="report")
    for at_s in (1.0, 12.0, 500.0):
        run.at(at_s, 0, 0.0)
    assert not run.reasons
    assert run.excluded() == set()


def test_a_generation_without_a_first_step_over_a_lost_link_is_given_up() -> None:
    run = Run()
    run.at(1.0, 0, 0.0)
    run.at(9.0, 0, 0.0)
    assert not run.reasons
    run.at(12.0, 0, 0.0)
    assert len(run.reasons) == 1
    assert "no rank has made a step" in run.reasons[0]
    assert run.excluded() == {"c"}


def test_before_a_first_step_there_is_no_deadline_without_a_lost_link() -> None:
    run = Run()
    for at_s in (1.0, 500.0, 5000.0):
        run.at(at_s, 0, 0.0, is_cut=False)
    assert not run.reasons


def test_a_restart_that_makes_no_first_step_ends_after_the_limit_of_a_phase() -> None:
    run = Run()
    run.at(1.0, 0, 0.0, is_cut=False)
    run.at(5.0, 40, 0.0, is_cut=False)
    run.begin()
    for at_s in (10.0, 500.0, 1800.0):
        run.at(at_s, 0, 0.0, is_cut=False)
    assert not run.reasons
    run.at(1811.0, 0, 0.0, is_cut=False)
    assert len(run.reasons) == 1
    assert "no rank has made a step in 1801 s" in run.reasons[0]
    assert run.excluded() == set(), "no node is suspected"
    run.begin()
    for at_s in (1900.0, 3600.0):
        run.at(at_s, 0, 0.0, is_cut=False)
    assert len(run.reasons) == 1, "the limit is the same again"


def test_work_behind_the_last_loop_makes_no_step_and_is_left_alone() -> None:
    run = Run()
    run.at(1.0, 0, 0.0, is_cut=False)
    run.at(5.0, 40, 0.0, is_cut=False)
    run.begin()
    for at_s in (10.0, 1900.0, 9000.0):
        run.at(at_s, 0, 0.0, is_cut=False, phase="between loops")
    assert not run.reasons


def test_a_restart_that_changes_nothing_is_not_repeated_with_the_same_nodes() -> None:
    """No link is reported lost: the first restart keeps the nodes, the second does not."""
    run = Run()
    run.at(1.0, 0, 0.0, is_cut=False)
    run.at(5.0, 40, 0.0, is_cut=False)
    for at_s in (130.0, 180.0):
        run.at(at_s, 40, at_s - 41.0, is_cut=False)
    assert len(run.reasons) == 1
    assert run.excluded() == set()
    run.begin()
    run.at(201.0, 0, 0.0, is_cut=False)
    run.at(250.0, 0, 0.0, is_cut=False)
    assert len(run.reasons) == 1
    run.at(330.0, 0, 0.0, is_cut=False)
    run.at(332.0, 0, 0.0, is_cut=False)
    assert len(run.monitor.excluded(now_s=333.0)) == 1
