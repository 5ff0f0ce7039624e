"""While ranks make no steps, the members try to connect to each other; two failures name a pair."""

import msgspec
import pytest

from ftrun.config.cluster import ClusterSize
from ftrun.config.profile import HangConfig
from ftrun.network.failover.pair_check import AGAIN_S, ALL_AGAIN_S, Pair, PairCheck
from ftrun.recovery.commands import Send
from ftrun.recovery.generation_monitor import GenerationMonitor
from ftrun.wire.cluster.generation import PathMeasurement
from ftrun.wire.cluster.messages import ProbePathRequest, ProbePathResult
from tests.unit.recovery.made import card, plan, settings
from tests.unit.recovery.test_lost_links import Run

PLAN = plan(1, "abcd")


def answer(
    asked: list[Send], cut: set[Pair], problem: str = "no answer"
) -> list[tuple[str, ProbePathResult]]:
    """The results of the members if these pairs are cut."""
    found = []
    for one in asked:
        order = one.message
        assert isinstance(order, ProbePathRequest)
        ends = (one.node_id, order.destination)
        is_cut = bool(cut & {ends, ends[::-1]})
        path = PathMeasurement(*ends, order.rail, 0.0 if is_cut else 0.001, 0.0)
        if is_cut:
            is_unreached = problem != "refused"
            path = msgspec.structs.replace(path, problem=problem, is_unreached=is_unreached)
        found.append((one.node_id, ProbePathResult(order.survey, path)))
    return found


def survey(check: PairCheck, cut: set[Pair], now_s: float, problem: str = "no answer") -> int:
    """One survey, if one is due; the number of probes."""
    asked, count = check.poll(PLAN, now_s=now_s), 0
    while asked:
        count += len(asked)
        answers, asked = answer(asked, cut, problem), []
        for sender, body in answers:
            asked += check.tried(sender, body, now_s=now_s)
    check.poll(PLAN, now_s=now_s)
    return count


def test_a_pair_is_cut_where_neither_end_reaches_the_other_twice() -> None:
    check = PairCheck()
    assert survey(check, {("b", "d")}, 1.0) == 12
    assert not check.cut
    survey(check, {("b", "d")}, 1.0)
    assert check.cut == {("b", "d")}
    assert survey(check, {("b", "d")}, 1.0 + AGAIN_S / 2) == 0
    assert survey(check, {("b", "d")}, 1.0 + 2 * AGAIN_S) == 2


def test_a_link_that_comes_back_is_not_cut() -> None:
    check = PairCheck()
    for now_s in (1.0, 1.1):
        survey(check, {("b", "d")}, now_s)
    survey(check, set(), 10.0)
    assert not check.cut
    assert survey(check, set(), 10.0 + ALL_AGAIN_S / 2) == 0
    assert survey(check, set(), 11.0 + ALL_AGAIN_S) == 12


def test_a_refused_connection_is_no_cut_link() -> None:
    check = PairCheck()
    for now_s in (1.0, 1.1, 5.0):
        survey(check, {("b", "d")}, now_s, problem="refused")
    assert not check.cut


def test_a_member_that_does_not_answer_names_none() -> None:
    check = PairCheck()
    now_s = 0.0
    while now_s < 60.0:
        check.poll(PLAN, now_s=now_s)
        now_s += 0.5
    assert not check.cut


def test_an_answer_without_a_survey_changes_nothing() -> None:
    found = PathMeasurement("a", "b", "agents")
    assert PairCheck().tried("a", ProbePathResult(-1, found), now_s=1.0) == []


@pytest.mark.parametrize("steps", [40, 0], ids=["in a collective", "before the first step"])
def test_a_cut_pair_outside_of_a_group_is_named_and_one_end_replaced(steps: int) -> None:
    """No SMP watches the link: without erasure coding, or between two groups."""
    run = Run()
    run.at(1.0, 0, 0.0, is_cut=False)
    if steps:
        run.at(40.0, steps, 0.0, is_cut=False)
    pairs = run.monitor.watching.pairs
    for now_s in (46.0, 48.0, 50.0, 52.0, 54.0, 56.0, 60.0, 75.0):
        run.at(now_s, steps, now_s - 40.0 if steps else 0.0, is_cut=False)
        asked = run.monitor.probes(now_s=now_s)
        while asked:
            answers, asked = answer(asked, {("b", "c")}), []
            for sender, body in answers:
                asked += pairs.tried(sender, body, now_s=now_s)
    assert len(run.reasons) == 1
    assert "the link between nodes b and c carries no data" in run.reasons[0]
    assert run.excluded() == {"c"}


def test_while_steps_are_made_no_pair_is_tried() -> None:
    run = Run()
    for now_s in (1.0, 20.0, 40.0):
        run.at(now_s, int(now_s), 0.0, is_cut=False)
        assert run.monitor.probes(now_s=now_s) == []


def test_a_pair_is_forgotten_when_steps_are_made_again() -> None:
    run = Run(spares=0)
    run.at(1.0, 1, 0.0, is_cut=False)
    run.at(40.0, 40, 0.0, is_cut=False)
    run.at(46.0, 40, 6.0, is_cut=False)
    assert run.monitor.probes(now_s=46.0)
    run.at(50.0, 41, 0.0, is_cut=False)
    assert run.monitor.probes(now_s=50.0) == []
    assert (
        run.monitor.watching.pairs.tried(
            "a", ProbePathResult(-1, PathMeasurement("a", "b", "agents")), now_s=50.0
        )
        == []
    )


def test_the_next_leader_knows_of_the_hang_and_of_the_longest_start() -> None:
    """Its own generation has never made a step, and its time is not unlimited."""
    before = Run()
    before.at(1.0, 0, 0.0, is_cut=False)
    before.at(61.0, 40, 0.0, is_cut=False)
    for now_s in (190.0, 240.0):
        before.at(now_s, 40, now_s - 61.0, is_cut=False)
    assert len(before.reasons) == 1
    history = before.monitor.history(now_s=241.0)
    assert history.hung_nodes
    assert history.longest_start_s == pytest.approx(60.0)
    after = GenerationMonitor(
        settings(cluster_size=ClusterSize(4, 4, 1), hang=HangConfig()), "b", pairs=PairCheck()
    )
    after.succeed(history, now_s=300.0, known_s=300.0)
    members = [card(one) for one in "bacd"]
    after.begin(plan(2, members, spares="s"), now_s=300.0)
    after.num_spares = 1
    for now_s in (301.0, 470.0):
        after.tick(now_s=now_s)
        after.tick(now_s=now_s + 0.7)
    assert not after.excluded(now_s=471.0)
    after.tick(now_s=490.0)
    after.tick(now_s=490.7)
    assert len(after.excluded(now_s=491.0)) == 1
