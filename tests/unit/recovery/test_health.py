"""What is looked at while a generation runs, and what follows from it: told, or acted on."""

import math
from typing import Any

import msgspec
from unit.monitor.ranks import view
from unit.monitor.test_hang_detector import behind, group, waiting
from unit.recovery.test_suspicions import hang

from ftrun.config.profile import NumericsConfig
from ftrun.events import ExitKind, WorkerExit
from ftrun.ids import Rank
from ftrun.monitor.slow.delay_matrix import LinkSample
from ftrun.monitor.slow.samples import ClockOffset, NodeSample, RankSample
from ftrun.network.failover.pair_check import PairCheck
from ftrun.recovery.commands import EndRun, Send, StartGeneration, SupervisorCommand
from ftrun.recovery.generation_monitor import GenerationMonitor
from ftrun.recovery.suspicions import SlowSuspicions
from ftrun.wire.cluster.membership import Heartbeat, RankReport
from ftrun.wire.cluster.messages import ProbeLinkRequest, ProbeLinkResult
from tests.unit.recovery.made import card, fields, plan, settings

PLAN = plan(1, [card("a", num_ranks=2), card("b", num_ranks=2)], spares="s")
SETTINGS = settings(heartbeat_s=0.5)


def oversight(policy: str = "report") -> GenerationMonitor:
    wishes = settings(heartbeat_s=0.5, numbers=NumericsConfig(policy=policy))
    made = GenerationMonitor(wishes, "a", pairs=PairCheck())
    made.begin(PLAN, now_s=0.0)
    return made


def beat(node: str, step: int, **changes: object) -> Heartbeat:
    first = 0 if node == "a" else 2
    loss = changes.pop("loss", None)
    bad_step = changes.pop("bad_step", 0)
    ranks = tuple(
        RankReport(rank, 1, "running", step, 0.1, "", loss, bad_step)  # type: ignore[arg-type]
        for rank in (first, first + 1)
    )
    known = Heartbeat(generation=1, attached=True, step=step, steps_here=step, ranks=ranks)
    return msgspec.structs.replace(known, **changes)


def told(made: GenerationMonitor, kind: str) -> list[dict[str, Any]]:
    return [fields(note) for note in made.incidents.take_notes() if note.record.kind == kind]


def whys(commands: list[SupervisorCommand]) -> list[str]:
    return [one.reason for one in commands if isinstance(one, StartGeneration)]


# --- numbers ----------------------------------------------------------------------------------


def bad(
    made: GenerationMonitor, now_s: float = 10.0, *, attached: bool = True
) -> list[SupervisorCommand]:
    first = beat("a", 40, loss=math.nan, bad_step=38, attached=attached)
    second = beat("b", 40, loss=math.nan, bad_step=39, attached=attached)
    found = made.beat("a", first, now_s=now_s) + made.beat("b", second, now_s=now_s)
    for later_s in (0.1, 0.5, 1.0):
        found += made.passing(now_s=now_s + later_s)
    return found


def test_numerical_anomalies_are_reported() -> None:
    made = oversight()
    assert bad(made) == []
    notes = made.incidents.take_notes()
    closed = [fields(note) for note in notes if note.record.kind == "incident_closed"]
    assert [one["actions"] for one in closed] == [["report"]]
    assert made.history(now_s=11.0).spoiled is None
    (text,) = (note.record.text for note in notes if note.record.kind == "verdict")
    assert "numbers.policy=rollback would resume from a version before it" in text


def test_numerical_anomalies_of_a_script_without_snapshots_name_the_policy_that_ends_it() -> None:
    made = oversight()
    assert bad(made, attached=False) == []
    notes = made.incidents.take_notes()
    (text,) = (note.record.text for note in notes if note.record.kind == "verdict")
    assert "numbers.policy=stop would end the run" in text
    assert "rollback" not in text


def test_numerical_anomalies_are_rolled_back_behind_what_they_have_spoiled() -> None:
    made = oversight("rollback")
    assert len(whys(bad(made))) == 1
    assert made.history(now_s=12.0).spoiled == (1, 37)
    made.begin(plan(2, "ab"), now_s=13.0)
    assert made.history(now_s=13.0).spoiled is None


def test_the_data_that_led_to_numerical_anomalies_are_left_out_where_that_is_wished() -> None:
    made = oversight("skip-data")
    assert len(whys(bad(made))) == 1
    assert made.history(now_s=12.0).spoiled == (1, 37)
    assert made.history(now_s=12.0).skip_to == 38
    made.begin(plan(2, "ab"), now_s=13.0)
    assert made.history(now_s=13.0).skip_to == -1


def test_numerical_anomalies_end_the_run_where_that_is_wished() -> None:
    ends = [one for one in bad(oversight("stop")) if isinstance(one, EndRun)]
    assert [one.exit_code for one in ends] == [93]


# --- what is slow -----------------------------------------------------------------------------


def sample(node: str, number: int, late_s: float, *, calls: int = 0) -> NodeSample:
    """Two ranks that enter ten collectives a second; rank 2 comes so much later."""
    at_s, ranks = 100.0 + number, []
    for rank in (0, 1) if node == "a" else (2, 3):
        late = late_s if rank == 2 else 0.0
        entered = tuple(("0", 10 * number + n, at_s - 1 + n / 10 + late) for n in range(10))
        missing = calls if rank == 2 else 0
        step = 8 * number
        ranks.append(RankSample(rank, step, entered, "0=0-3", calls=((step, step - missing),)))
    link = LinkSample("b.local" if node == "a" else "a.local", 1 << 20, 0.01, 0.001, 0, 0, 0.0)
    return NodeSample(number, at_s, 1.0, tuple(ranks), (link,), 1 << 40)


def looks(made: SlowSuspicions, first: int, last: int, late_s: float, calls: int = 0) -> list[Any]:
    found = []
    for number in range(first, last):
        beats = {
            node: beat(node, number, sample=sample(node, number, late_s, calls=calls))
            for node in "ab"
        }
        found += made.look(beats, PLAN, "a", now_s=float(number))
        found += made.look(beats, PLAN, "a", now_s=float(number) + 0.1)
    return found


def slow_watch() -> SlowSuspicions:
    made = SlowSuspicions()
    clock = ClockOffset()
    clock.add(10**9, 10**9, 10**9, 10**9)
    made.clocks = {"b": clock}
    return made


def test_a_rank_that_becomes_late_is_told_once_with_its_node() -> None:
    made = slow_watch()
    assert looks(made, 1, 30, 0.0) == []
    found = looks(made, 30, 80, 0.08)
    assert [one.kind.value for one in found] == ["slow computation"]
    assert (found[0].culprits, found[0].nodes) == ((2,), ("b",))
    assert made.lateness_s[2] > 0.05
    made.begin()
    assert made.lateness_s == {}


def test_a_node_whose_clock_is_not_known_is_not_compared() -> None:
    made = SlowSuspicions()
    assert looks(made, 1, 60, 0.5) == []


def test_calls_that_were_left_out_are_told() -> None:
    made = slow_watch()
    looks(made, 1, 10, 0.0)
    told = [one.fingerprint for one in looks(made, 10, 14, 0.0, calls=1)]
    assert told == ["skipped without a hang"]


def test_ranks_that_evaluate_are_left_out_and_old_samples_too() -> None:
    made = slow_watch()
    one = sample("a", 1, 0.0)
    ranks = tuple(msgspec.structs.replace(rank, is_training=False) for rank in one.ranks)
    beats = {"a": beat("a", 1, sample=msgspec.structs.replace(one, ranks=ranks))}
    assert made.look(beats, PLAN, "a", now_s=1.0) == []
    assert made.look(beats, PLAN, "a", now_s=2.0) == [], "nothing new"
    assert made.look({}, PLAN, "a", now_s=3.0) == []


def slow_link(number: int, *, is_slow: bool) -> NodeSample:
    busy_s = 0.9 if is_slow else 0.01
    link = LinkSample("b.local", 1 << 20, busy_s, 0.001, 0, 0, 0.0)
    return msgspec.structs.replace(sample("a", number, 0.0), links=(link,))


def test_a_suspect_link_is_tried_by_the_node_that_does_not_lead() -> None:
    made = GenerationMonitor(SETTINGS, "a", pairs=PairCheck())
    made.begin(PLAN, now_s=0.0)
    asked: list[Send] = []
    for number in range(1, 60):
        one = slow_link(number, is_slow=number > 30)
        made.beat("a", beat("a", number, sample=one), now_s=float(number))
        other = sample("b", number, 0.0)
        made.beat("b", beat("b", number, sample=other), now_s=float(number))
        made.passing(now_s=float(number))
        asked += made.probes(now_s=float(number))
    assert asked
    assert {one.node_id for one in asked} == {"b"}
    body = asked[0].message
    assert isinstance(body, ProbeLinkRequest)
    assert (body.receiver, body.host) == ("a", "a.local")
    slow = made.watching.slow
    slow.probed(ProbeLinkResult(body.number, "a", 0.001, 1e6, 1e9), now_s=60.0)
    slow.probed(ProbeLinkResult(body.number, "a", 0.001, 1e6, 1e9), now_s=60.0)  # it came twice
    slow.probed(ProbeLinkResult(99, "a", problem="x"), now_s=60.0)
    assert {cell.sender for cell in slow.matrix()} == {"a", "b"}
    told_of = told(made, "verdict")
    assert [one["verdict"]["kind"] for one in told_of] == ["slow communication"]
    assert told_of[0]["matrix"]


def test_without_a_generation_no_link_is_tried() -> None:
    assert GenerationMonitor(SETTINGS, pairs=PairCheck()).probes(now_s=1.0) == []


# --- together ---------------------------------------------------------------------------------


def test_what_cards_and_gpus_have_counted_stands_in_the_verdict() -> None:
    made = oversight()
    views = hang(9.0)
    for node in PLAN.members:
        own = tuple(views[rank] for rank in node.ranks)
        troubles = (f"GPU 0 of {node.node_id} has reported XID 79",)
        one = beat(node.node_id, 5, views=own, troubles=troubles)
        made.beat(node.node_id, one, now_s=10.0)
    made.passing(now_s=10.3)
    (verdict,) = [one["verdict"] for one in told(made, "verdict")]
    assert verdict["nodes"] == ["a"]
    assert verdict["evidence"][-1] == "a: GPU 0 of a has reported XID 79"


def test_what_is_slow_is_told_beside_an_open_incident() -> None:
    made = oversight()
    killed = WorkerExit(Rank(0), ExitKind.SIGNAL, -9, "rank 0 was killed", fingerprint="k")
    made.beat("a", beat("a", 5, exits=(killed,)), now_s=1.0)
    made.passing(now_s=2.0)
    made.begin(plan(2, [card("a", num_ranks=2), card("b", num_ranks=2)]), now_s=3.0)
    for node in "ab":
        made.beat(node, beat(node, 3, generation=2, loss=math.nan, bad_step=3), now_s=4.0)
    made.passing(now_s=5.0)
    assert len(told(made, "additional_finding")) == 1


def test_a_hang_is_looked_at_only_once_in_a_while() -> None:
    made = oversight()
    views = hang(9.0)
    for node in PLAN.members:
        own = tuple(views[rank] for rank in node.ranks)
        made.beat(node.node_id, beat(node.node_id, 5, views=own), now_s=10.0)
    made.passing(now_s=10.3)
    assert len(told(made, "suspicion_raised")) == 1


# --- ranks that fall together -----------------------------------------------------------------


def end(rank: int, kind: ExitKind, text: str, code: int) -> WorkerExit:
    return WorkerExit(Rank(rank), kind, code, f"rank {rank} {text}")


BROKEN = "raised RuntimeError: [gloo/transport] Connection reset by peer"


def test_all_nodes_are_asked_what_was_called_before_an_abort_is_judged() -> None:
    made = oversight()
    aborted = end(1, ExitKind.SIGNAL, "was killed by SIGABRT", -6)
    made.beat("a", beat("a", 5, exits=(aborted,)), now_s=1.0)
    assert made.orders.examine
    assert whys(made.passing(now_s=1.1)) == []
    views = {rank: waiting(rank) for rank in (0, 3)}
    views[1] = view(1, process="")
    views[2] = view(2, groups=(group(2, entered=5, waits=True, sizes="[99]"),))
    made.beat("a", beat("a", 5, exits=(aborted,), views=(views[0], views[1])), now_s=1.2)
    assert whys(made.passing(now_s=1.2)) == [], "b has not answered"
    found = made.beat("b", beat("b", 5, views=(views[2], views[3])), now_s=1.3)
    found += made.passing(now_s=1.3)
    assert [why[:45] for why in whys(found)] == ["skipped collective: rank 2 calls another coll"]
    assert [list(one["verdict"]["culprits"]) for one in told(made, "verdict")] == [[2]]


def test_a_rank_that_left_early_is_blamed_for_broken_connections() -> None:
    made = oversight()
    made.beat("b", beat("b", 5, exits=(end(2, ExitKind.FINISHED, "x", 0),)), now_s=1.0)
    made.beat("a", beat("a", 5, exits=(end(0, ExitKind.EXCEPTION, BROKEN, 1),)), now_s=1.1)
    found = whys(made.passing(now_s=2.0))
    assert found == ["rank 2 on b exited early (code 0) while rank 0 was still in a collective"]


def test_replicas_that_differ_are_told_once_with_the_ranks_of_the_node() -> None:
    three = plan(1, "abc")
    made = GenerationMonitor(SETTINGS, "a", pairs=PairCheck())
    made.begin(three, now_s=0.0)
    for now_s in (1.0, 2.0):
        for node in "abc":
            one = Heartbeat(generation=1, step=5, steps_here=5, differs="x", differing_ranks=(1,))
            made.beat(node, one, now_s=now_s)
        made.passing(now_s=now_s + 0.5)
    verdicts = [one["verdict"] for one in told(made, "verdict")]
    assert [(one["kind"], list(one["culprits"])) for one in verdicts] == [("replicas differ", [1])]


def test_of_two_replicas_that_differ_none_is_named() -> None:
    made = oversight()
    made.beat("a", beat("a", 5, differs="x", differing_ranks=(0, 2)), now_s=1.0)
    made.beat("b", beat("b", 5), now_s=1.0)
    made.passing(now_s=1.5)
    (verdict,) = [one["verdict"] for one in told(made, "verdict")]
    assert (verdict["culprits"], verdict["victims"]) == ([], [0, 2])
    assert "is unknown" in verdict["text"]


def test_a_bug_in_what_looks_costs_the_looks_and_not_the_run() -> None:
    made = oversight()
    made.reports.beats["a"] = None  # type: ignore[assignment]
    made.reports._current.add("a")
    assert made.passing(now_s=1.0) == []
    assert made.passing(now_s=2.0) == []
    assert (
        len([note for note in made.incidents.take_notes() if note.record.kind == "internal_error"])
        == 1
    )
    killed = end(0, ExitKind.SIGNAL, "was killed", -9)
    made._take_exits([killed], 3.0)
    assert len(whys(made.passing(now_s=4.0))) == 1


def test_a_rank_that_has_finished_is_no_rank_to_act_on() -> None:
    made = oversight()
    done = end(1, ExitKind.FINISHED, "x", 0)
    found: list[SupervisorCommand] = []
    for silent_s in (9.0, 11.0, 11.5):
        views = {**hang(silent_s), 1: behind(1, is_finished=True, process="")}
        for node in PLAN.members:
            own = tuple(views[rank] for rank in node.ranks)
            exits = (done,) if node.node_id == "a" else ()
            one = beat(node.node_id, 5, views=own, exits=exits)
            made.beat(node.node_id, one, now_s=100 + silent_s)
        found += made.passing(now_s=100 + silent_s)
    assert len(whys(found)) == 1
    assert "rank 1 on a has finished" in whys(found)[0]
