"""The checks of a running generation, and their consequences: a report or an action."""

import math
from typing import Any

import msgspec
from unit.monitor.ranks import view
from unit.monitor.test_hang_detector import behind, group, waiting
from unit.recovery.test_suspicions import hang

from ftrun.config.profile import NumericsConfig
from ftrun.events import ErrorLine, ExitKind, WorkerExit
from ftrun.ids import Rank
from ftrun.monitor.slow.delay_matrix import LinkSample
from ftrun.monitor.slow.host_pressure import HostPressure
from ftrun.monitor.slow.samples import ClockOffset, NodeSample, RankSample
from ftrun.network.failover.pair_check import PairCheck
from ftrun.recovery.commands import EndRun, Send, StartGeneration, SupervisorCommand
from ftrun.recovery.generation_monitor import GenerationMonitor
from ftrun.recovery.suspicions import SlowSuspicions
from ftrun.wire.cluster.membership import Heartbeat, RankReport
from ftrun.wire.cluster.messages import ProbeLinkRequest, ProbeLinkResult
from tests.unit.recovery.made import card, fields, plan, settings

PLAN = plan(1, [card("a", num_ranks=2), card("b", num_ranks=2)], spares="s")
SETTINGS = settings(heartbeat_interval_s=0.5)


def monitor(policy: str = "report") -> GenerationMonitor:
    cluster_size = settings(heartbeat_interval_s=0.5, numerics=NumericsConfig(policy=policy))
    made = GenerationMonitor(cluster_size, "a", pairs=PairCheck())
    made.begin(PLAN, now_s=0.0)
    return made


def heartbeat(node: str, step: int, **changes: object) -> Heartbeat:
    first = 0 if node == "a" else 2
    loss = changes.pop("loss", None)
    bad_step = changes.pop("bad_step", 0)
    ranks = tuple(
        RankReport(rank, 1, "running", step, 0.1, "", loss, step, bad_step)  # type: ignore[arg-type]
        for rank in (first, first + 1)
    )
    known = Heartbeat(generation=1, attached=True, step=step, steps_here=step, ranks=ranks)
    return msgspec.structs.replace(known, **changes)


def reported(made: GenerationMonitor, kind: str) -> list[dict[str, Any]]:
    return [
        fields(note) for note in made.incidents.drain_journal_entries() if note.record.kind == kind
    ]


def reasons(commands: list[SupervisorCommand]) -> list[str]:
    return [one.reason for one in commands if isinstance(one, StartGeneration)]


# --- numbers ----------------------------------------------------------------------------------


def bad(
    made: GenerationMonitor, now_s: float = 10.0, *, attached: bool = True
) -> list[SupervisorCommand]:
    first = heartbeat("a", 40, loss=math.nan, bad_step=38, attached=attached)
    second = heartbeat("b", 40, loss=math.nan, bad_step=39, attached=attached)
    found = made.heartbeat_received("a", first, now_s=now_s) + made.heartbeat_received(
        "b", second, now_s=now_s
    )
    for later_s in (0.1, 0.5, 1.0):
        found += made.tick(now_s=now_s + later_s)
    return found


def test_numerical_anomalies_are_reported() -> None:
    made = monitor()
    assert bad(made) == []
    notes = made.incidents.drain_journal_entries()
    closed = [fields(note) for note in notes if note.record.kind == "incident_closed"]
    assert [one["actions"] for one in closed] == [["report"]]
    assert made.history(now_s=11.0).bad_version is None
    (text,) = (note.record.text for note in notes if note.record.kind == "verdict")
    assert "numerics.policy=rollback would resume from a version before it" in text


def test_numerical_anomalies_of_a_script_without_snapshots_name_the_policy_that_ends_it() -> None:
    made = monitor()
    assert bad(made, attached=False) == []
    notes = made.incidents.drain_journal_entries()
    (text,) = (note.record.text for note in notes if note.record.kind == "verdict")
    assert "numerics.policy=stop would end the run" in text
    assert "rollback" not in text


def test_numerical_anomalies_are_rolled_back_behind_what_they_have_spoiled() -> None:
    made = monitor("rollback")
    assert len(reasons(bad(made))) == 1
    assert made.history(now_s=12.0).bad_version == (1, 37)
    made.begin(plan(2, "ab"), now_s=13.0)
    assert made.history(now_s=13.0).bad_version is None


def test_the_data_that_led_to_numerical_anomalies_are_left_out_where_that_is_requested() -> None:
    made = monitor("skip-data")
    assert len(reasons(bad(made))) == 1
    assert made.history(now_s=12.0).bad_version == (1, 37)
    assert made.history(now_s=12.0).skip_to == 38
    made.begin(plan(2, "ab"), now_s=13.0)
    assert made.history(now_s=13.0).skip_to == -1


def test_numerical_anomalies_end_the_run_where_that_is_requested() -> None:
    ends = [one for one in bad(monitor("stop")) if isinstance(one, EndRun)]
    assert [one.exit_code for one in ends] == [93]


# --- what is slow -----------------------------------------------------------------------------


def sample(node: str, number: int, late_s: float, *, calls: int = 0) -> NodeSample:
    """Two ranks that enter ten collectives per second; rank 2 is late by this time."""
    at_s, ranks = 100.0 + number, []
    for rank in (0, 1) if node == "a" else (2, 3):
        late = late_s if rank == 2 else 0.0
        entered = tuple(("0", 10 * number + n, at_s - 1 + n / 10 + late) for n in range(10))
        missing = calls if rank == 2 else 0
        step = 8 * number
        ranks.append(RankSample(rank, step, entered, "0=0-3", calls=((step, step - missing),)))
    link = LinkSample("b.local" if node == "a" else "a.local", 1 << 20, 0.01, 0.001, 0, 0)
    return NodeSample(number, at_s, 1.0, tuple(ranks), (link,), 1 << 40)


def samples(
    made: SlowSuspicions, first: int, last: int, late_s: float, calls: int = 0
) -> list[Any]:
    found = []
    for number in range(first, last):
        heartbeats = {
            node: heartbeat(node, number, sample=sample(node, number, late_s, calls=calls))
            for node in "ab"
        }
        found += made.poll(heartbeats, PLAN, "a", now_s=float(number))
        found += made.poll(heartbeats, PLAN, "a", now_s=float(number) + 0.1)
    return found


def slow_watch() -> SlowSuspicions:
    made = SlowSuspicions()
    clock = ClockOffset()
    clock.add(10**9, 10**9, 10**9, 10**9)
    made.clocks = {"b": clock}
    return made


def test_a_rank_that_becomes_late_is_reported_once_with_its_node() -> None:
    made = slow_watch()
    assert samples(made, 1, 30, 0.0) == []
    found = samples(made, 30, 80, 0.08)
    assert [one.kind.value for one in found] == ["slow computation"]
    assert (found[0].culprits, found[0].nodes) == ((2,), ("b",))
    assert made.lateness_s[2] > 0.05
    made.begin()
    assert made.lateness_s == {}


def test_a_node_whose_clock_is_not_known_is_not_compared() -> None:
    made = SlowSuspicions()
    assert samples(made, 1, 60, 0.5) == []


def test_calls_that_were_left_out_are_reported() -> None:
    made = slow_watch()
    samples(made, 1, 10, 0.0)
    reported = [one.fingerprint for one in samples(made, 10, 14, 0.0, calls=1)]
    assert reported == ["skipped without a hang"]


def test_ranks_that_evaluate_are_left_out_and_old_samples_too() -> None:
    made = slow_watch()
    one = sample("a", 1, 0.0)
    ranks = tuple(msgspec.structs.replace(rank, is_training=False) for rank in one.ranks)
    heartbeats = {"a": heartbeat("a", 1, sample=msgspec.structs.replace(one, ranks=ranks))}
    assert made.poll(heartbeats, PLAN, "a", now_s=1.0) == []
    assert made.poll(heartbeats, PLAN, "a", now_s=2.0) == [], "nothing new"
    assert made.poll({}, PLAN, "a", now_s=3.0) == []


def slow_link(number: int, *, is_slow: bool) -> NodeSample:
    busy_s = 0.9 if is_slow else 0.01
    link = LinkSample("b.local", 1 << 20, busy_s, 0.001, 0, 0)
    return msgspec.structs.replace(sample("a", number, 0.0), links=(link,))


def test_a_suspect_link_is_tried_by_the_node_that_does_not_lead() -> None:
    made = GenerationMonitor(SETTINGS, "a", pairs=PairCheck())
    made.begin(PLAN, now_s=0.0)
    asked: list[Send] = []
    for number in range(1, 60):
        one = slow_link(number, is_slow=number > 30)
        made.heartbeat_received("a", heartbeat("a", number, sample=one), now_s=float(number))
        other = sample("b", number, 0.0)
        made.heartbeat_received("b", heartbeat("b", number, sample=other), now_s=float(number))
        made.tick(now_s=float(number))
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
    reported_of = reported(made, "verdict")
    assert [one["verdict"]["kind"] for one in reported_of] == ["slow communication"]
    assert reported_of[0]["matrix"]


def test_without_a_generation_no_link_is_tried() -> None:
    assert GenerationMonitor(SETTINGS, pairs=PairCheck()).probes(now_s=1.0) == []


# --- several findings -------------------------------------------------------------------------


def test_what_cards_and_gpus_have_counted_is_shown_in_the_verdict() -> None:
    made = monitor()
    views = hang(9.0)
    for node in PLAN.members:
        own = tuple(views[rank] for rank in node.ranks)
        troubles = (f"GPU 0 of {node.node_id} has reported XID 79",)
        one = heartbeat(node.node_id, 5, views=own, troubles=troubles)
        made.heartbeat_received(node.node_id, one, now_s=10.0)
    made.tick(now_s=10.3)
    (verdict,) = [one["verdict"] for one in reported(made, "verdict")]
    assert verdict["nodes"] == ["a"]
    assert verdict["evidence"][-1] == "a: GPU 0 of a has reported XID 79"


def test_what_a_failed_rank_wrote_and_the_pressure_on_its_node_are_evidence() -> None:
    made = monitor()
    line = ErrorLine("NaN", "loss is nan", "stdout.log")
    text = "rank 0 exited with code 1"
    ended = WorkerExit(Rank(0), ExitKind.EXIT_CODE, 1, text, fingerprint="1", errors=(line,))
    one = heartbeat("a", 5, exits=(ended,), pressure=HostPressure(cpu=63.0, io=1.0))
    made.heartbeat_received("a", one, now_s=1.0)
    made.heartbeat_received("b", heartbeat("b", 5, pressure=HostPressure(cpu=90.0)), now_s=1.0)
    made.tick(now_s=2.0)
    (found,) = [one["verdict"] for one in reported(made, "verdict")]
    assert (found["kind"], found["error_class"]) == ("crash", "NaN")
    assert found["evidence"] == [
        text,
        "stdout.log (NaN): loss is nan",
        "a: tasks waited for a processor in 63 % of the last 10 s (PSI)",
    ]


def test_what_is_slow_is_reported_during_an_open_incident() -> None:
    made = monitor()
    killed = WorkerExit(Rank(0), ExitKind.SIGNAL, -9, "rank 0 was killed", fingerprint="k")
    made.heartbeat_received("a", heartbeat("a", 5, exits=(killed,)), now_s=1.0)
    made.tick(now_s=2.0)
    made.begin(plan(2, [card("a", num_ranks=2), card("b", num_ranks=2)]), now_s=3.0)
    for node in "ab":
        made.heartbeat_received(
            node, heartbeat(node, 3, generation=2, loss=math.nan, bad_step=3), now_s=4.0
        )
    made.tick(now_s=5.0)
    assert len(reported(made, "additional_finding")) == 1


def test_a_hang_is_checked_only_once_in_a_while() -> None:
    made = monitor()
    views = hang(9.0)
    for node in PLAN.members:
        own = tuple(views[rank] for rank in node.ranks)
        made.heartbeat_received(node.node_id, heartbeat(node.node_id, 5, views=own), now_s=10.0)
    made.tick(now_s=10.3)
    assert len(reported(made, "suspicion_raised")) == 1


# --- ranks that fail together -----------------------------------------------------------------


def end(rank: int, kind: ExitKind, text: str, code: int) -> WorkerExit:
    return WorkerExit(Rank(rank), kind, code, f"rank {rank} {text}")


BROKEN = "raised RuntimeError: [gloo/transport] Connection reset by peer"


def test_all_nodes_are_asked_what_was_called_before_an_abort_is_judged() -> None:
    made = monitor()
    aborted = end(1, ExitKind.SIGNAL, "was killed by SIGABRT", -6)
    made.heartbeat_received("a", heartbeat("a", 5, exits=(aborted,)), now_s=1.0)
    assert made.orders.examine
    assert reasons(made.tick(now_s=1.1)) == []
    views = {rank: waiting(rank) for rank in (0, 3)}
    views[1] = view(1, process="")
    views[2] = view(2, groups=(group(2, entered=5, waits=True, sizes="[99]"),))
    made.heartbeat_received(
        "a", heartbeat("a", 5, exits=(aborted,), views=(views[0], views[1])), now_s=1.2
    )
    assert reasons(made.tick(now_s=1.2)) == [], "b has not answered"
    found = made.heartbeat_received("b", heartbeat("b", 5, views=(views[2], views[3])), now_s=1.3)
    found += made.tick(now_s=1.3)
    assert [reason[:45] for reason in reasons(found)] == [
        "skipped collective: rank 2 calls another coll"
    ]
    assert [list(one["verdict"]["culprits"]) for one in reported(made, "verdict")] == [[2]]


def test_a_rank_that_left_early_is_blamed_for_broken_connections() -> None:
    made = monitor()
    made.heartbeat_received(
        "b", heartbeat("b", 5, exits=(end(2, ExitKind.FINISHED, "x", 0),)), now_s=1.0
    )
    made.heartbeat_received(
        "a", heartbeat("a", 5, exits=(end(0, ExitKind.EXCEPTION, BROKEN, 1),)), now_s=1.1
    )
    found = reasons(made.tick(now_s=2.0))
    assert found == ["rank 2 on b exited early (code 0) while rank 0 was still in a collective"]


def test_replicas_that_differ_are_reported_once_with_the_ranks_of_the_node() -> None:
    three = plan(1, "abc")
    made = GenerationMonitor(SETTINGS, "a", pairs=PairCheck())
    made.begin(three, now_s=0.0)
    for now_s in (1.0, 2.0):
        for node in "abc":
            one = Heartbeat(generation=1, step=5, steps_here=5, differs="x", differing_ranks=(1,))
            made.heartbeat_received(node, one, now_s=now_s)
        made.tick(now_s=now_s + 0.5)
    verdicts = [one["verdict"] for one in reported(made, "verdict")]
    assert [(one["kind"], list(one["culprits"])) for one in verdicts] == [("replicas differ", [1])]


def test_of_two_replicas_that_differ_none_is_named() -> None:
    made = monitor()
    made.heartbeat_received("a", heartbeat("a", 5, differs="x", differing_ranks=(0, 2)), now_s=1.0)
    made.heartbeat_received("b", heartbeat("b", 5), now_s=1.0)
    made.tick(now_s=1.5)
    (verdict,) = [one["verdict"] for one in reported(made, "verdict")]
    assert (verdict["culprits"], verdict["victims"]) == ([], [0, 2])
    assert "is unknown" in verdict["text"]


def test_a_bug_in_what_looks_costs_the_looks_and_not_the_run() -> None:
    made = monitor()
    made.reports.heartbeats["a"] = None  # type: ignore[assignment]
    made.reports._current.add("a")
    assert made.tick(now_s=1.0) == []
    assert made.tick(now_s=2.0) == []
    assert (
        len(
            [
                note
                for note in made.incidents.drain_journal_entries()
                if note.record.kind == "internal_error"
            ]
        )
        == 1
    )
    killed = end(0, ExitKind.SIGNAL, "was killed", -9)
    made._take_exits([killed], 3.0)
    assert len(reasons(made.tick(now_s=4.0))) == 1


def test_a_rank_that_has_finished_is_no_rank_to_act_on() -> None:
    made = monitor()
    done = end(1, ExitKind.FINISHED, "x", 0)
    found: list[SupervisorCommand] = []
    for unresponsive_s in (9.0, 11.0, 11.5):
        views = {**hang(unresponsive_s), 1: behind(1, is_finished=True, process="")}
        for node in PLAN.members:
            own = tuple(views[rank] for rank in node.ranks)
            exits = (done,) if node.node_id == "a" else ()
            one = heartbeat(node.node_id, 5, views=own, exits=exits)
            made.heartbeat_received(node.node_id, one, now_s=100 + unresponsive_s)
        found += made.tick(now_s=100 + unresponsive_s)
    assert len(reasons(found)) == 1
    assert "rank 1 on a has finished" in reasons(found)[0]
