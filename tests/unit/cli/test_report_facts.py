"""A report agrees with the journal: recorded ones, torn ones, long ones."""

import itertools
import json
import random
import re
from pathlib import Path

import pytest
from made_journals import MadeJournal, long_run

from ftrun.errors import FtrunError
from ftrun.monitor.verdicts import VerdictKind
from ftrun.records.run import ProgressRecord
from ftrun.tools.report import journal as report_lines
from ftrun.tools.report.facts import RunFacts
from ftrun.tools.report.incident import incident as report_incident
from ftrun.tools.report.render.page import incident_page, run_page
from ftrun.tools.report.run import incident_by, run_facts
from ftrun.wire.fault_catalog import FAULTS

JOURNALS = Path(__file__).parent / "journals"


def recorded(name: str) -> list[bytes]:
    return (JOURNALS / f"{name}.jsonl").read_bytes().splitlines(keepends=True)


def accounted_s(facts: RunFacts) -> float:
    assert facts.useful_s is not None
    return facts.useful_s + sum(one.seconds for one in facts.losses)


def test_two_kills_on_one_node_without_numbered_incidents() -> None:
    facts = run_facts(recorded("one-node-two-kills"))
    assert (facts.state, facts.exit_code, facts.step, facts.world_size) == ("finished", 0, 700, 2)
    assert facts.left_out == 1  # an earlier run with this id also started from step 0
    assert [one.number for one in facts.incidents] == [1, 2]
    first, second = facts.incidents
    assert first.sentence == (
        "rank 1 was killed by SIGKILL at step 339; all 2 ranks started again and training 65 ms "
        "after the fault; 3 steps done again, nothing lost."
    )
    assert "SIGSEGV" in second.sentence
    assert (first.culprits, first.confidence, first.kind) == ((1,), "certain", "crash")
    assert first.recovered_s == pytest.approx(0.0645, abs=1e-4)
    assert first.drill == "ftrun inject-fault rank-kill --rank 1 --at-step 339"
    assert second.drill == "ftrun inject-fault segv --rank 1 --at-step 583"
    assert accounted_s(facts) == pytest.approx(facts.wall_s)


def test_ranks_that_have_stayed_did_not_start_again() -> None:
    lines = recorded("one-node-two-kills")
    at = next(i for i, line in enumerate(lines) if b'"generation_started"' in line and i > 20)
    stayed = json.loads(lines[at])
    stayed |= {"kind": "ranks_stayed", "text": "x", "generation": 1, "staying": [0], "started": [1]}
    lines.insert(at, json.dumps(stayed).encode() + b"\n")
    sentences = [one.sentence for one in run_facts(lines).incidents]
    assert sum("1 of 2 ranks started again and training" in one for one in sentences) == 1


def test_the_phases_of_a_restart_follow_one_another() -> None:
    bars = run_facts(recorded("one-node-two-kills")).incidents[0].bars
    assert [bar.name for bar in bars] == [
        "detect",
        "stop the ranks",
        "agree, choose what to restore",
        "start the processes",
        "meet (process group)",
        "the script's own set-up",
        "restore",
        "first step",
    ]
    for one, following in itertools.pairwise(bars):
        assert following.begin_s == pytest.approx(one.end_s, abs=1e-6)


def test_the_phases_of_a_device_have_their_place_in_the_record() -> None:
    waited = b'"device_memory":0.002,"fork":'
    lines = [
        line.replace(b'"fork":', waited).replace(b'"build":', b'"device":0.001,"build":')
        for line in (one.replace(b'": ', b'":') for one in recorded("one-node-two-kills"))
    ]
    bars = run_facts(lines).incidents[0].bars
    assert [bar.name for bar in bars][3:7] == [
        "wait for device memory",
        "start the processes",
        "meet (process group)",
        "imports and device",
    ]
    for one, following in itertools.pairwise(bars):
        assert following.begin_s == pytest.approx(one.end_s, abs=1e-6)


def test_a_checkpoint_restart_is_reckoned_from_this_run_alone() -> None:
    cost = run_facts(recorded("one-node-two-kills")).incidents[0].cost
    assert cost is not None
    assert cost.total_s is not None
    assert cost.checkpoint_s is not None
    assert cost.checkpoint_s > 10 * cost.total_s
    reported = " ".join(cost.checkpoint_how)
    assert "1.14 s to start again" in reported
    assert "339 steps since step 0" in reported


def test_a_node_without_power_and_the_spare_that_took_its_rank() -> None:
    facts = run_facts(recorded("node-without-power"))
    (it,) = facts.incidents
    assert it.sentence == (
        "node node1 is lost at step 31: no heartbeat for 3.2 s; all 2 ranks started again and "
        "training "
        "3.35 s after the fault; 1 step done again, nothing lost."
    )
    assert (it.kind, it.nodes, it.confidence) == ("node lost", ("node1",), "likely")
    assert it.noticed_s == pytest.approx(3.2, abs=1e-3)
    assert [row.label for row in it.rows] == ["rank 1 on node1, then node2", "rank 0 on node0"]
    assert it.culprits == (1,)
    fetch = next(bar for bar in it.bars if bar.name == "fetch on node2")
    assert fetch.note == "5.3 MB, 142.0 MB/s"
    assert it.evidence == (
        "node node1 is lost: no heartbeat for 3.2 s",
    )  # not the kill by ftrun itself
    assert it.drill == "ftrun inject-fault node-loss --node node1"


def test_a_lost_node_that_the_leader_has_named() -> None:
    facts = run_facts(recorded("node-lost-named"))
    (it,) = facts.incidents
    assert it.sentence == (
        "node node1 is lost at step 31: no heartbeat for 3.1 s; all 2 ranks started again and "
        "training "
        "3.51 s after the fault; 1 step done again, nothing lost."
    )
    assert (it.number, it.nodes, it.culprits) == (1, ("node1",), (1,))
    assert it.noticed_s == pytest.approx(3.1, abs=0.01)
    assert [row.label for row in it.rows] == ["rank 1 on node1, then node2", "rank 0 on node0"]
    assert it.rows[0].bars[1].name == "no sign of life"
    assert [(one.name, one.blamed) for one in facts.nodes] == [
        ("node0", 0),
        ("node1", 1),
        ("node2", 0),
    ]
    assert accounted_s(facts) == pytest.approx(facts.wall_s)


def test_a_killed_launcher_is_time_lost_and_what_the_leader_numbers_keeps_its_number() -> None:
    facts = run_facts(recorded("launcher-killed"))
    away, crash = facts.incidents
    assert (away.number, away.kind) == (1001, "agent lost")
    assert crash.number == 1
    assert crash.verified[0] == "progress was made after it"
    assert crash.action == "kill, then respawn"
    assert "launcher away" in [one.name for one in facts.losses]
    assert facts.launches == 1


def test_a_hang_that_was_ordered_and_found() -> None:
    facts = run_facts(recorded("hang-found"))
    assert facts.state == "stopped"
    (it,) = facts.incidents
    assert it.sentence == (
        "rank 2 on vm has stopped making progress at train_gpt.py:107 in main, and ranks 0, 1 and "
        "3 wait in all_reduce #75 of the default group (step 69); seen after 8.74 s, all 4 ranks "
        "started again and training 11.4 s after the fault; 1 step done again, nothing lost."
    )
    assert it.injected == "hang on rank 2 at step 69"
    assert (it.culprits, it.victims, it.confidence) == ((2,), (0, 1, 3), "certain")
    assert [(row.label, row.role) for row in it.rows] == [
        ("rank 2", "culprit"),
        ("ranks 0, 1, 3 (3)", "victim"),
    ]
    assert it.stacks[0].own == "/home/me/train_gpt.py:107 in main"
    assert it.protected_s == pytest.approx(14.8, abs=0.1)
    assert len(it.evidence) == 5
    assert facts.snapshots is not None
    assert facts.snapshots.taken == 69 + 122
    assert accounted_s(facts) == pytest.approx(facts.wall_s)


@pytest.mark.parametrize("name", [path.stem for path in sorted(JOURNALS.glob("*.jsonl"))])
def test_a_recorded_journal_may_end_anywhere(name: str) -> None:
    lines = recorded(name)
    for end in range(1, len(lines) + 1):
        facts = run_facts([*lines[:end], lines[end - 1][: len(lines[end - 1]) // 2]])
        assert facts.wall_s >= 0
        assert all(one.sentence for one in facts.incidents)


@pytest.mark.parametrize("name", [path.stem for path in sorted(JOURNALS.glob("*.jsonl"))])
def test_fields_may_be_of_any_kind(name: str) -> None:
    chance = random.Random(name)
    strange: list[object] = [
        None, True, -1, 1e308, 10**30, "", "x\x00\x1b[31m", [], [[]], {}, [{}], [None], {"a": []},
    ]  # fmt: skip

    def corrupt(value: object, key: str = "") -> object:
        if key not in ("time", "kind") and chance.random() < 0.05:
            return chance.choice(strange)
        if isinstance(value, dict):
            return {name: corrupt(one, name) for name, one in value.items()}
        if isinstance(value, list):
            return [corrupt(one) for one in value]
        return value

    lines = [json.loads(line) for line in recorded(name)]
    for _ in range(60):
        facts = run_facts([json.dumps(corrupt(line, "kind")).encode() for line in lines])
        run_page(facts, source="journal.jsonl", made_t_s=1.8e9)
        for it in facts.incidents:
            incident_page(facts, it, source="journal.jsonl", made_t_s=1.8e9)


def test_what_is_not_a_journal_is_reported() -> None:
    with pytest.raises(FtrunError, match="no line that can be read"):
        run_facts([b"\xff\xfe\n", b"[]\n", b"{}\n", b'{"kind": "run_started"}\n', b"[" * 100_000])


def test_torn_lines_are_counted_and_unknown_kinds_skipped() -> None:
    lines = recorded("one-node-two-kills")
    extra = b'{"time": 1795292770.0, "monotonic_s": 24270.0, "kind": "tomorrow", "x": 1}\n'
    facts = run_facts([*lines, extra, b'{"time": 1795292770.0, "ki\n', b"\n"])
    assert facts.unreadable == 2
    assert len(facts.incidents) == 2


def test_journals_of_nodes_and_the_merged_one_count_once() -> None:
    lines = recorded("node-without-power")
    once, twice = run_facts(lines), run_facts([*lines, *lines])
    assert once == twice


def test_a_clock_that_is_set_does_not_change_what_was_measured() -> None:
    lines = [json.loads(line) for line in recorded("one-node-two-kills")]
    plain = run_facts([json.dumps(one).encode() for one in lines])
    for one in lines:
        if one["monotonic_s"] > 24271:
            one["time"] += 3600.0
    moved = run_facts([json.dumps(one).encode() for one in lines])
    assert moved.wall_s == pytest.approx(plain.wall_s)
    assert [one.recovered_s for one in moved.incidents] == pytest.approx(
        [one.recovered_s for one in plain.incidents]
    )


def test_a_hang_with_its_culprit_stacks_and_verification() -> None:
    facts = run_facts(long_run().raw())
    it = incident_by(facts, "1")
    assert it.sentence == (
        "rank 3 on node0 stopped answering at step 15,916 while 7 ranks waited in all_reduce "
        "#41,207; seen after 12.5 s, all 8 ranks started again and training 13.0 s after the "
        "fault; 1 step done again, nothing lost."
    )
    assert [bar.name for bar in it.bars][:3] == ["detect", "diagnose", "decide to act"]
    culprit, victim = it.stacks
    assert (culprit.title, culprit.own) == (
        "rank 3 (culprit)",
        "/home/me/model.py:214 in forward",
    )
    assert victim.about.endswith("waits in all_reduce #41,207 of group default_pg")
    assert it.verified == ("progress was made after it", "the loss continues where it was")
    assert it.drill == "ftrun inject-fault hang --rank 3 --at-step 15916"
    states = {row.role: [bar.name for bar in row.bars] for row in it.rows}
    assert states["culprit"][1] == "computing or hung"
    assert states["victim"][1] == "waits in a collective"


@pytest.mark.slow
def test_five_hundred_ranks_take_a_few_rows() -> None:
    it = incident_by(run_facts(long_run(ranks=512, nodes=64).raw()), "1")
    assert len(it.rows) <= 20
    assert sorted(rank for row in it.rows for rank in row.ranks) == list(range(512))
    assert it.rows[0].role == "culprit"


def test_goodput_and_its_classes_add_up() -> None:
    facts = run_facts(long_run().raw())
    assert accounted_s(facts) == pytest.approx(facts.wall_s)
    by_name = {one.name: one.seconds for one in facts.losses}
    assert by_name["start-up"] == pytest.approx(21.0)
    assert by_name["detection"] == pytest.approx(12.55)
    assert by_name["snapshots"] == pytest.approx(0.4 * 119)
    assert by_name["steps done again"] == pytest.approx(2 * 0.25)
    assert facts.goodput == pytest.approx(1 - sum(by_name.values()) / facts.wall_s)
    assert facts.mtbf.startswith("1 h: 2 failures in 2 h. With so few, the true mean is between")


def test_a_straggler_is_reported_and_no_failure() -> None:
    facts = run_facts(long_run(ranks=32, nodes=8).raw())
    it = incident_by(facts, "last")
    assert it.is_reported
    assert facts.failures == 2
    assert it.delays is not None
    assert it.delays.hot == ((1, 2),)
    assert it.delays.cells_s[1][2] == 0.081
    assert it.delays.cells_s[0][0] is None


def test_growth_is_a_planned_restart() -> None:
    made = MadeJournal()
    made.begin()
    made.pulse(60.0, 156)
    made.recover(70.0, "grows from 1 to 2 nodes", 180, None)
    made.end(100.0)
    facts = run_facts(made.raw())
    (it,) = facts.incidents
    assert it.is_planned
    assert facts.failures == 0
    assert facts.mtbf.startswith("no failure in 1 min 40 s.")


def test_a_failure_during_recovery_is_the_same_incident() -> None:
    made = MadeJournal()
    made.begin()
    made.crash(60.0, 150, 1)
    made.entries = [one for one in made.entries if one["kind"] != "recovered"]
    made.crash(62.0, 150, 5)
    made.end(90.0)
    (it,) = run_facts(made.raw()).incidents
    assert it.culprits == (1,)
    assert "an attempt that failed" in [bar.name for bar in it.bars]
    assert it.recovered_s == pytest.approx(2.45, abs=0.02)


def test_a_restart_before_its_first_step_does_not_draw_a_fall_to_step_0() -> None:
    made = MadeJournal()
    made.begin()
    made.pulse(60.0, 150)
    made.crash(61.0, 150, 1)
    for node in made.nodes:
        made.put(70.0, "progress", node=node, step=0, steps_here=0)
        made.put(75.0, "workers_exited", node=node, exits=[],
                 progress={"step": 0, "steps_here": 0, "attached": True})  # fmt: skip
    made.pulse(80.0, 160)
    facts = run_facts(made.raw())
    assert min(step for t_s, step in facts.progress if t_s > facts.began_t_s + 30) == 149


def test_a_run_that_gave_up() -> None:
    made = MadeJournal()
    made.begin()
    made.crash(60.0, 150, 1)
    made.entries = [one for one in made.entries if one["kind"] != "recovered"]
    made.end(62.0, exit_code=93, reason="the same failure three times")
    facts = run_facts(made.raw())
    assert (facts.state, facts.exit_code) == ("failed", 93)
    assert facts.incidents[0].outcome == "the run ended with exit code 93"
    assert facts.verdict.startswith("FAILED with exit code 93")


def test_a_run_that_was_stopped_has_not_failed() -> None:
    made = MadeJournal()
    made.begin()
    made.put(60.0, "stop_requested", signal=15, by="SIGTERM", attached=True)
    exits = [{"rank": rank, "kind": "signal", "code": -15, "text": "killed by SIGTERM"}
             for rank in range(8)]  # fmt: skip
    progress = {"step": 150, "steps_here": 150, "attached": True}
    made.put(61.0, "workers_exited", exits=exits, progress=progress)
    made.end(62.0, exit_code=143, reason="stopped by SIGTERM")
    facts = run_facts(made.raw())
    assert facts.state == "stopped"
    assert facts.incidents == ()


def test_an_incident_that_is_not_there_is_reported() -> None:
    facts = run_facts(recorded("one-node-two-kills"))
    assert incident_by(facts, "last").number == 2
    with pytest.raises(FtrunError, match="no incident 7; it has 1, 2, or `last`"):
        incident_by(facts, "7")


def test_pulses_of_weeks_are_thinned_out_and_count_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = MadeJournal()
    made.begin()
    for number in range(2000):
        made.pulse(30.0 + 10 * number, 40 * number % 7000, blocked_s=0.1 * (number % 175), taken=1)
    made.end(20_100.0)
    whole = run_facts(made.raw())
    monkeypatch.setattr(report_lines, "MAX_PROGRESS_LINES", 300)
    lines, _ = report_lines.parse(made.raw())
    assert sum(1 for line in lines if isinstance(line.record, ProgressRecord)) <= 400
    thin = run_facts(made.raw())
    assert thin.snapshots is not None
    assert whole.snapshots is not None
    assert thin.snapshots.blocked_s == pytest.approx(whole.snapshots.blocked_s)
    assert thin.step == whole.step


@pytest.mark.parametrize(
    "kind", [*report_incident.DRILLS.values(), *report_incident.SIGNALS.values()]
)
def test_a_drill_is_one_that_there_is(kind: str) -> None:
    assert FAULTS[kind].by_rank != (kind in report_incident.BY_NODE)


def test_every_kind_of_verdict_but_a_few_has_a_drill() -> None:
    without = {kind.value for kind in VerdictKind} - set(report_incident.DRILLS)
    assert without == {"crash", "deadlock", "device stuck", "memory growth", "failing node"}


def test_a_script_that_does_not_attach_has_no_step_and_its_restart_is_reported() -> None:
    made = MadeJournal()
    made.begin()
    made.crash(60.0, 150, 1)
    made.entries = [one for one in made.entries if one["kind"] != "recovered"]
    for one in made.entries:
        if one["kind"] == "workers_exited":
            one["progress"] = {"step": 0, "steps_here": 0, "attached": False}
    made.end(90.0)
    (it,) = run_facts(made.raw()).incidents
    assert it.step is None
    assert re.match(r"started again after .* m?s, and then all ended well", it.outcome), it.outcome
    assert "at step 0" not in it.sentence


def repeated(journal: MadeJournal, t: float, text: str, *, node: str) -> None:
    journal.put(t, "repeated_steps", node=node, generation=journal.generation,
                result={"outcome": "equal", "text": text})  # fmt: skip


def test_an_incident_reports_what_its_repeated_steps_were() -> None:
    made = MadeJournal()
    made.begin()
    made.hang(100.0, 400, 3)
    for node in made.nodes:
        repeated(made, 200.0, "repeated 1 step: losses bitwise equal", node=node)
    made.hang(300.0, 900, 3)
    repeated(made, 400.0, "repeated 1 step: losses bitwise equal", node="node0")
    repeated(made, 400.0, "repeated steps differ at first sight", node="node1")
    repeated(made, 401.0, "repeated steps differ from <all>", node="node1")
    made.hang(500.0, 1900, 3)
    lines = [json.dumps(line).encode() + b"\n" for line in made.entries]
    facts = run_facts(lines)
    first, second, third = facts.incidents
    assert first.repeated == ("repeated 1 step: losses bitwise equal",)
    assert second.repeated == (
        "node0: repeated 1 step: losses bitwise equal",
        "node1: repeated steps differ from <all>",
    )
    assert third.repeated == ()
    shown = incident_page(facts, second, source="here", made_t_s=0.0)
    assert "node1: repeated steps differ from &lt;all&gt;" in shown
    assert "After the restart: <bdi>" not in incident_page(
        facts, third, source="here", made_t_s=0.0
    )
