"""When a missing heartbeat is suspected, named, and acted on, and when it is ignored."""

from collections.abc import Mapping

import msgspec
from unit.monitor.ranks import view
from unit.monitor.test_hang_detector import behind, waiting

from ftrun.config.profile import HangConfig
from ftrun.monitor.verdicts import Confidence, RankView, VerdictKind
from ftrun.recovery.suspicions import HangFinding, HangSuspicions
from ftrun.wire.cluster.membership import Heartbeat
from tests.unit.recovery.made import card, plan

PLAN = plan(1, [card("a", num_ranks=2), card("b", num_ranks=2)])


def watch(**changes: object) -> HangSuspicions:
    made = HangSuspicions(HangConfig(**changes))  # type: ignore[arg-type]
    made.begin()
    return made


def heartbeats(
    views: Mapping[int, RankView], *, p99_s: float = 0.1, generation: int = 1
) -> dict[str, Heartbeat]:
    return {
        node.node_id: Heartbeat(
            generation=generation,
            p99_s=p99_s,
            views=tuple(views[rank] for rank in node.ranks if rank in views),
        )
        for node in PLAN.members
    }


def hang(unresponsive_s: float, **changes: object) -> dict[int, RankView]:
    """Rank 1 makes no progress, and the others wait for it."""
    views = {r: behind(r, **changes) if r == 1 else waiting(r) for r in range(4)}
    return {
        rank: msgspec.structs.replace(one, unresponsive_s=unresponsive_s)
        for rank, one in views.items()
    }


def poll(
    made: HangSuspicions, views: Mapping[int, RankView], **changes: object
) -> HangFinding | None:
    return made.poll(heartbeats(views, **changes), PLAN)  # type: ignore[arg-type]


def test_steps_are_made() -> None:
    made = watch()
    assert poll(made, {}) is None
    assert not made.is_suspicious


def test_named_before_the_deadline_and_acted_on_at_it() -> None:
    made = watch()
    assert poll(made, hang(8.0)) is None
    found = poll(made, hang(8.6))
    assert found is not None
    assert found.verdict is not None
    assert (found.verdict.culprits, found.acts) == ((1,), False)
    assert len(found.views) == 4
    assert made.is_suspicious
    assert poll(made, hang(9.0)) is None  # nothing new
    acts = poll(made, hang(10.1))
    assert acts is not None
    assert acts.acts
    assert poll(made, hang(11.0)) is None  # it is done


def test_one_look_is_not_enough_to_act() -> None:
    made = watch()
    first = poll(made, hang(12.0))
    assert first is not None
    assert not first.acts
    assert poll(made, hang(12.0)) is None  # the same observation again
    second = poll(made, hang(12.5))
    assert second is not None
    assert second.acts


def test_a_rank_that_computes_at_one_place_gets_more_time() -> None:
    made = watch()
    busy = {"still_s": 0.0, "cpu": 1.0, "unmoved_s": 60.0}
    for unresponsive_s in (9.0, 20.0, 60.0, 119.0):
        found = poll(made, hang(unresponsive_s, **busy))
        assert found is None or not found.acts
    last = poll(made, hang(120.5, **busy))
    assert last is not None
    assert last.acts


def test_a_rank_that_computes_at_changing_places_gets_the_time_of_a_phase() -> None:
    made = watch()
    busy = {"still_s": 0.0, "cpu": 1.0, "unmoved_s": 2.0}
    for unresponsive_s in (9.0, 120.5, 1799.0):
        found = poll(made, hang(unresponsive_s, **busy))
        assert found is None or not found.acts
    last = poll(made, hang(1800.5, **busy))
    assert last is not None
    assert last.acts


def test_ranks_that_compute_while_none_waits_are_named_after_the_limit_of_computation() -> None:
    made = watch()

    def evaluation(unresponsive_s: float, **changes: object) -> dict[int, RankView]:
        busy = {"still_s": 0.0, "cpu": 1.0, "unmoved_s": 2.0, **changes}
        ranks = {rank: view(rank, **busy) for rank in range(4)}
        return {
            rank: msgspec.structs.replace(one, unresponsive_s=unresponsive_s)
            for rank, one in ranks.items()
        }

    for unresponsive_s in (9.0, 60.0, 119.0):
        assert poll(made, evaluation(unresponsive_s)) is None
        assert not made.is_suspicious
    named = poll(made, evaluation(120.5))
    assert named is not None
    assert named.verdict is not None
    assert "are still computing; no other rank waits" in named.verdict.text
    assert not named.acts
    assert poll(watch(), evaluation(9.0, cpu=0.0, still_s=5.0)) is not None


def test_a_declared_phase_opens_no_incident_before_its_limit() -> None:
    made = watch()
    evaluates = {"still_s": 0.0, "cpu": 1.0, "phase": "eval"}
    for unresponsive_s in (9.0, 20.0, 1799.0):
        assert poll(made, hang(unresponsive_s, **evaluates)) is None
        assert not made.is_suspicious
    last = poll(made, hang(1800.5, **evaluates))
    assert last is not None
    assert last.acts


def test_a_hang_of_ranks_in_a_declared_phase_is_named() -> None:
    made = watch()
    ranks = {rank: waiting(rank) for rank in range(4)}
    late = {
        rank: msgspec.structs.replace(one, unresponsive_s=9.0, phase="eval")
        for rank, one in ranks.items()
    }
    found = poll(made, late)
    assert found is not None
    assert found.verdict is not None
    assert found.verdict.kind is VerdictKind.HANG_IN_COMMUNICATION


def test_a_rank_that_is_stopped_in_a_declared_phase_is_named() -> None:
    made = watch()
    found = poll(made, hang(9.0, phase="eval", process="T"))
    assert found is not None
    assert found.verdict is not None
    assert found.verdict.kind is VerdictKind.FROZEN


def test_a_verdict_that_changes_is_reported() -> None:
    made = watch()
    busy = poll(made, hang(9.0, still_s=0.0))
    still = poll(made, hang(9.5))
    assert busy is not None
    assert still is not None
    assert still.verdict is not None
    assert still.verdict.act_immediately


def test_deadlines_follow_the_slowest_node() -> None:
    made = watch()
    assert poll(made, hang(40.0), p99_s=20.0) is None
    found = poll(made, hang(52.0), p99_s=20.0)
    assert found is not None
    assert found.deadline_s == 60.0


def test_only_reported_where_that_is_requested() -> None:
    made = watch(action="report")
    for unresponsive_s in (9.0, 11.0, 11.5, 200.0):
        found = poll(made, hang(unresponsive_s))
        assert found is None or not found.acts


def test_it_ends_by_itself() -> None:
    made = watch()
    assert poll(made, hang(9.0)) is not None
    assert poll(made, hang(0.5)) is None
    assert not made.is_suspicious


def test_a_node_that_has_not_reported_is_waited_for_but_not_for_ever() -> None:
    made = watch()
    seen = {rank: waiting(rank, unresponsive_s=20.0) for rank in (0, 1)}
    first = poll(made, seen)
    assert first is not None
    assert first.verdict is None
    late = {rank: waiting(rank, unresponsive_s=121.0) for rank in (0, 1)}
    last = poll(made, late)
    assert last is not None
    assert last.verdict is not None
    assert (last.verdict.confidence, last.acts) == (Confidence.POSSIBLE, True)
    assert last.verdict.kind is VerdictKind.HANG_IN_COMPUTATION
    assert last.verdict.victims == (0, 1)


def test_views_of_another_generation_do_not_count() -> None:
    made = watch()
    assert poll(made, hang(60.0), generation=0) is None


def test_before_a_generation_runs_nothing_is_checked() -> None:
    assert HangSuspicions(HangConfig()).poll(heartbeats(hang(60.0)), PLAN) is None


def test_ranks_that_have_not_stepped_are_not_late() -> None:
    views = {rank: view(rank, has_stepped=False, unresponsive_s=500.0) for rank in range(4)}
    assert poll(watch(), views) is None
