"""From the first sign of a failure to the line that closes the incident; the life cycle."""

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from unit.recovery.test_suspicions import hang

from ftrun.config.profile import HangConfig
from ftrun.events import ExitKind, Progress, WorkerExit
from ftrun.ids import Rank, Step
from ftrun.monitor.hang_detector import find_hang
from ftrun.monitor.numerics import LossContinuity
from ftrun.monitor.verdicts import Verdict
from ftrun.records.incidents import Downtime, LifecycleChangeRejected
from ftrun.recovery.incidents import MAX_UNVERIFIED_STEPS, IncidentLog, verdict_of
from ftrun.recovery.lifecycle import TABLE, LifecycleState
from ftrun.recovery.suspicions import HangFinding
from ftrun.wire.cluster.membership import Heartbeat, RankReport, RestartTimes
from tests.unit.recovery.made import fields, plan

KILLED = WorkerExit(
    Rank(0), ExitKind.SIGNAL, -9, "rank 0 was killed", detail="a\n  b", fingerprint="k"
)


def lines(made: IncidentLog, kind: str) -> list[dict[str, Any]]:
    """Entries of this kind since the last call; all others are dropped."""
    return [fields(note) for note in made.drain_journal_entries() if note.record.kind == kind]


def progress(step: int, *, attached: bool = True) -> Progress:
    return Progress(Step(step), step, attached)


def heartbeats(step: int, loss: float | None = None, age_s: float = 0.1) -> list[Heartbeat]:
    return [Heartbeat(generation=1, ranks=(RankReport(0, 1, "running", step, age_s, "", loss),))]


TIMES = RestartTimes(stepped_age_s=0.1, total_s=0.4, restore_s=0.05, first_step_s=0.02)


def running(step: int = 10) -> IncidentLog:
    made = IncidentLog()
    made.generation_begins(plan(0, "ab"))
    made.progress(heartbeats(step), progress(step), now_s=1.0)
    assert made.life is LifecycleState.RUN
    return made


def verdict() -> Verdict:
    found = find_hang(hang(12.0), {1: "a"}, HangConfig(), limit_s=8.0)
    assert found is not None
    return found


def test_a_rank_that_is_killed() -> None:
    made = running()
    made.failed(KILLED, ["a"], progress(20), now_s=5.0)
    made.acted("kill", "rank 0 was killed")
    made.acted("respawn", "rank 0 was killed")
    made.generation_begins(plan(1, "ab", restore=(0, 18)))
    made.progress(heartbeats(0, age_s=-1.0), progress(18), now_s=5.2)  # no step yet
    for node_id in "ab":
        made.stepped(node_id, TIMES, now_s=5.6)
    made.progress(heartbeats(19), progress(19), now_s=5.7)
    assert made.life is LifecycleState.VERIFY
    made.progress(heartbeats(21, loss=0.5), progress(22), now_s=5.9)
    assert made.open is None
    ((closed_s, shown),) = made.closed
    assert (closed_s, shown.generations, shown.text) == (5.9, (1,), KILLED.text)
    notes = made.drain_journal_entries()
    verdicts = [note for note in notes if note.record.kind == "verdict"]
    closed = next(fields(note) for note in notes if note.record.kind == "incident_closed")
    assert [note.announce for note in verdicts] == [True]
    assert closed["verdict_kind"] == "crash"
    assert closed["culprits"] == [0]
    assert (closed["steps_lost"], closed["restored"]) == (2, 18)
    assert (closed["detected_s"], closed["recovered_s"]) == (0.0, 0.5)
    assert closed["verified"] == {"progress": True, "loss": "not reported"}
    assert closed["actions"] == ["kill", "respawn"]
    states = [fields(note)["new"] for note in notes if note.record.kind == "lifecycle_changed"]
    assert states == ["check", "run", "diagnose", "recover", "verify", "run"]
    assert not [note for note in notes if note.record.kind == "lifecycle_change_rejected"]


def test_a_hang_from_suspicion_to_the_end() -> None:
    made = running()
    for step, loss in enumerate([2.0, 1.9, 1.8, 1.7, 1.6], start=10):
        made.progress(heartbeats(step, loss), progress(step), now_s=step)
    views = tuple(hang(12.0).values())
    made.suspected(HangFinding(9.0, 10.0, None, views), progress(20), now_s=109.0)
    made.named(verdict(), views, now_s=110.0)
    made.named(verdict(), views, now_s=111.0)  # reported once
    hung = WorkerExit(Rank(1), ExitKind.HUNG, 75, "hang in computation: rank 1", fingerprint="x")
    made.failed(hung, ["a"], progress(20), now_s=112.0)
    made.acted("respawn", "x")
    made.generation_begins(plan(1, "ab", restore=(0, 20)))
    for node_id in "ab":
        made.stepped(node_id, TIMES, now_s=112.6)
    made.progress(heartbeats(21, loss=1.65), progress(21), now_s=113.0)
    notes = made.drain_journal_entries()
    kinds = [note.record.kind for note in notes if note.record.kind != "lifecycle_changed"]
    assert kinds == ["suspicion_raised", "verdict", "action_taken", "downtime", "incident_closed"]
    named = next(fields(note) for note in notes if note.record.kind == "verdict")
    stacks = {one["rank"]: len(one["stack"]) for one in named["ranks"]}
    assert stacks == {0: 2, 1: 2, 2: 1, 3: 1}  # the culprit's, one victim's, of others the top
    closed = fields(notes[-1])
    assert closed["detected_s"] == 10.0
    assert closed["verified"] == {"progress": True, "loss": "continuous"}
    assert closed["steps_lost"] == 0


@pytest.mark.parametrize(
    ("losses", "closed_at", "says"),
    [
        ([9.0, 9.1, 1.6], 23, "continuous"),
        ([9.0] * 30, 21 + MAX_UNVERIFIED_STEPS, "jumped"),
        ([math.inf] * 30, 21 + MAX_UNVERIFIED_STEPS, "jumped"),
    ],
)
def test_a_loss_that_has_jumped_keeps_the_incident_open(
    losses: list[float], closed_at: int, says: str
) -> None:
    made = running()
    for step, loss in enumerate([2.0, 1.9, 1.8, 1.7, 1.6], start=10):
        made.progress(heartbeats(step, loss), progress(step), now_s=step)
    made.failed(KILLED, ["a"], progress(20), now_s=30.0)
    made.acted("respawn", "x")
    made.generation_begins(plan(1, "ab", restore=(0, 20)))
    for node_id in "ab":
        made.stepped(node_id, TIMES, now_s=31.0)
    made.drain_journal_entries()
    for step, loss in enumerate(losses, start=21):
        assert (made.open is not None) is (step <= closed_at)
        assert made.has_stepped is (step <= closed_at)
        assert made.has_jumped is (21 < step <= closed_at)
        made.progress(heartbeats(step, loss), progress(step), now_s=float(step + 20))
    assert made.life is LifecycleState.RUN
    assert made.closed[-1][1].verified.loss == says
    kinds = [note.record.kind for note in made.drain_journal_entries()]
    assert kinds == ["additional_finding", "lifecycle_changed", "incident_closed"]


def test_a_verdict_that_changes_is_reported_again() -> None:
    made = running()
    views = tuple(hang(9.0).values())
    made.suspected(HangFinding(9.0, 10.0, None, views), progress(20), now_s=109.0)
    for one in (replace(verdict(), act_immediately=False), verdict(), replace(verdict(), text="x")):
        made.named(one, views, now_s=110.0)
    notes = [note for note in made.drain_journal_entries() if note.record.kind == "verdict"]
    assert [note.announce for note in notes] == [True, False], "the text was reported already"


def test_what_fails_before_it_is_verified_belongs_to_it() -> None:
    made = running()
    made.failed(KILLED, ["a"], progress(20), now_s=5.0)
    made.acted("respawn", "x")
    made.generation_begins(plan(1, "ab", restore=(0, 20)))
    lost = WorkerExit(Rank(1), ExitKind.NODE_LOST, 76, "node b is lost", fingerprint="node b")
    made.failed(lost, ["b"], progress(20), now_s=6.0)
    assert [one["incident"] for one in lines(made, "additional_finding")] == [1]
    assert made.count == 1


def test_a_missing_heartbeat_that_ends_by_itself_is_closed_as_reported() -> None:
    made = running()
    views = tuple(hang(9.0).values())
    made.suspected(HangFinding(9.0, 10.0, None, views), progress(20), now_s=100.0)
    assert made.is_suspected
    made.cleared(progress(21), now_s=101.0)
    closed = lines(made, "incident_closed")[0]
    assert (closed["verdict_kind"], closed["action"]) == ("suspicion", "report")
    assert closed["steps_lost"] is None
    made.cleared(progress(22), now_s=102.0)  # nothing is open
    assert lines(made, "incident_closed") == []


def test_nothing_is_named_without_an_incident() -> None:
    made = running()
    made.drain_journal_entries()
    made.named(verdict(), (), now_s=1.0)
    made.acted("kill", "stopped")
    assert made.drain_journal_entries() == []


@pytest.mark.parametrize(
    ("is_done", "actions"), [(True, ["respawn"]), (False, ["respawn", "stop"])]
)
def test_the_end_of_the_run_closes_what_is_open(is_done: bool, actions: list[str]) -> None:
    made = running()
    made.failed(KILLED, ["a"], progress(20), now_s=5.0)
    made.acted("respawn", "x")
    made.generation_begins(plan(1, "ab"))
    made.ended("over", progress(20), is_done=is_done, now_s=6.0)
    assert lines(made, "incident_closed")[0]["actions"] == actions
    made.acted("respawn", "late")
    assert len(lines(made, "lifecycle_change_rejected")) == 1


def test_without_attach_running_again_is_all_that_can_be_verified() -> None:
    made = running()
    made.progress(heartbeats(3), progress(3, attached=False), now_s=1.0)
    alone = IncidentLog()
    alone.generation_begins(plan(0, "a"))
    alone.progress(heartbeats(30), progress(30, attached=False), now_s=1.0)
    alone.failed(KILLED, ["a"], progress(30, attached=False), now_s=2.0)
    alone.acted("respawn", "x")
    alone.generation_begins(plan(1, "a"))
    alone.stepped("a", TIMES, now_s=3.0)
    alone.progress(heartbeats(1), progress(1, attached=False), now_s=3.0)
    assert alone.open is None


def test_joined_nodes_are_no_incident() -> None:
    made = running()
    made.generation_begins(plan(1, "abc"))
    assert made.life is LifecycleState.CHECK
    assert made.count == 0


def test_a_restart_that_takes_nodes_in_has_a_downtime_and_no_incident() -> None:
    made = running()
    reported = restarted(made, 1, at_s=6.0)
    assert reported["total_s"] == TIMES.total_s
    assert made.count == 0


def test_a_successor_continues_counting() -> None:
    made = IncidentLog()
    made.succeed(4)
    made.failed(KILLED, ["a"], progress(20), now_s=5.0)
    assert made.open is not None
    assert made.open.number == 5


@pytest.mark.parametrize(
    ("kind", "name", "culprits"),
    [
        (ExitKind.NODE_LOST, "node lost", ()),
        (ExitKind.OUT_OF_MEMORY, "out of memory", (0,)),
        (ExitKind.STOPPED, "frozen", (0,)),
        (ExitKind.EXCEPTION, "crash", (0,)),
    ],
)
def test_an_end_is_a_verdict(kind: ExitKind, name: str, culprits: tuple[int, ...]) -> None:
    found = verdict_of(WorkerExit(Rank(0), kind, 1, "x"), ["a"])
    assert (found.kind.value, found.culprits) == (name, culprits)


@given(st.lists(st.sampled_from(LifecycleState), max_size=20))
def test_only_what_the_table_has_is_ever_done(cluster_size: list[LifecycleState]) -> None:
    made = IncidentLog()
    seen = [made.life]
    for wish in cluster_size:
        made._go(wish, "x")
        for note in made.drain_journal_entries():
            if isinstance(note.record, LifecycleChangeRejected):
                assert made.life is seen[-1] is not wish
            else:
                assert made.life is wish
                seen.append(made.life)
    for old, new in itertools.pairwise(seen):
        assert new in TABLE[old]


def test_the_end_is_reached_from_everywhere_and_left_for_nowhere() -> None:
    assert set(TABLE) == set(LifecycleState)
    assert all(
        LifecycleState.ENDED in after
        for life, after in TABLE.items()
        if life is not LifecycleState.ENDED
    )
    assert not TABLE[LifecycleState.ENDED]


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ([2.0, 1.9, 1.8, 1.7], 1.75, "continuous"),
        ([2.0, 2.0, 2.0, 2.0], 2.1, "continuous"),
        ([2.0, 1.9, 1.8, 1.7], 90.0, "jumped"),
        ([2.0, 1.9, 1.8, 1.7], math.nan, "jumped"),
        ([2.0, 1.9, math.inf], 1.9, "not reported"),
        ([2.0, 1.9, 1.8, 1.7], None, "not reported"),
    ],
)
def test_losses(before: list[float], after: float | None, says: str) -> None:
    made = LossContinuity()
    for step, loss in enumerate(before):
        made.add(step, loss)
        made.add(step, loss)
    assert made.judge(after) == says


def restarted(
    made: IncidentLog, generation: int, *, at_s: float, **changes: float
) -> dict[str, Any]:
    """The line on the downtime, after both nodes have reported the first step of their ranks."""
    made.generation_begins(plan(generation, "ab", restore=(0, 18)))
    made.stepped("a", TIMES, now_s=at_s - 0.3)
    assert lines(made, "downtime") == []
    made.stepped("b", replace(TIMES, **changes), now_s=at_s + TIMES.stepped_age_s)
    (reported,) = lines(made, "downtime")
    made.stepped("a", TIMES, now_s=at_s + 9.0)
    assert lines(made, "downtime") == []
    return reported


def parts_of(reported: dict[str, Any]) -> tuple[float, ...]:
    names = ("total_s", "detection_s", "restart_s", "restore_s", "first_step_s")
    return tuple(reported[name] for name in names)


def test_the_downtime_is_from_the_fault_to_the_next_step_of_the_last_node() -> None:
    made = running()
    made.sign(4.8)
    made.sign(4.9)  # a second rank that ended because of the first
    made.failed(KILLED, ["a"], progress(20), now_s=5.0)
    reported = restarted(made, 1, at_s=6.0, restore_s=0.3, first_step_s=0.1)
    assert parts_of(reported) == pytest.approx((1.2, 0.2, 0.6, 0.3, 0.1))
    assert (reported["fault_s"], reported["stepped_s"]) == (4.8, pytest.approx(6.0))
    assert made.open is not None
    made.progress(heartbeats(21), progress(21), now_s=7.0)
    (closed,) = lines(made, "incident_closed")
    assert closed["recovered_s"] == reported["total_s"]
    assert closed["downtime"] == {name: reported[name] for name in closed["downtime"]}


def test_a_second_fault_in_an_incident_adds_its_own_downtime() -> None:
    made = running()
    made.failed(KILLED, ["a"], progress(20), now_s=5.0)
    assert parts_of(restarted(made, 1, at_s=6.0))[0] == pytest.approx(1.0)
    made.sign(7.9)
    made.failed(KILLED, ["a"], progress(20), now_s=8.0)  # two seconds were trained in between
    reported = restarted(made, 2, at_s=8.5)
    assert parts_of(reported) == pytest.approx((1.6, 0.1, 1.36, 0.1, 0.04))
    assert reported["incident"] == 1


def test_an_agent_that_took_over_after_a_killed_one_counts_from_its_end() -> None:
    made = IncidentLog()
    made.succeed(2)
    made.agent_lost("a", 10.0, now_s=10.8)
    reported = restarted(made, 1, at_s=12.0)
    assert parts_of(reported)[:2] == pytest.approx((2.0, 0.8))
    made.progress(heartbeats(19), progress(19), now_s=13.0)
    (closed,) = lines(made, "incident_closed")
    assert (closed["incident"], closed["verdict_kind"], closed["steps_lost"]) == (
        3, "agent lost", None)  # fmt: skip


def test_the_log_shows_the_downtime_that_the_journal_has() -> None:
    """0.1749 s is 0.175 in the journal, which is 0.17 or 0.18 in a sentence, but the same one."""
    for total_s in (0.1749, 0.17451, 2.0049, 0.0005):
        downtime = Downtime(total_s, 0.0, 0.0, 0.0, total_s)
        assert downtime.text == downtime.rounded().text
