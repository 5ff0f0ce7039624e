"""Traces of incidents from records, and their export by OTLP to a real HTTP server."""

import sys
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ftrun import clock
from ftrun.agent.publish.metrics import families
from ftrun.agent.publish.observers import DurationHistogram, RunCounters
from ftrun.agent.publish.telemetry import (
    MAX_WAITING,
    MISSING,
    IncidentTrace,
    IncidentTracer,
    Telemetry,
    interval_s,
    is_wanted,
)
from ftrun.config.profile import OtelConfig
from ftrun.events import Record
from ftrun.journal import Journal
from ftrun.monitor.verdicts import Verdict, VerdictKind
from ftrun.records.decode import decode
from ftrun.records.incidents import (
    ActionTaken,
    AdditionalFinding,
    IncidentClosed,
    IncidentVerification,
    LifecycleChanged,
    SuspicionRaised,
    VerdictRecord,
)
from ftrun.records.membership import BallotStarted
from ftrun.records.recovery import DowntimeRecord
from ftrun.records.run import HookFailed, ProgressRecord
from ftrun.wire.messages.status import StatusView
from tests.otlp_collector import Collector, collector

VERDICT = VerdictRecord("rank 1 is dead", 3, Verdict(VerdictKind.CRASH, (1,), "rank 1 is dead"))
CLOSED = IncidentClosed(
    "rank 1 is dead", 3, "crash", (1,), ("n0",), IncidentVerification(progress=True, loss="none"),
    "respawn", ("kill", "respawn"), 9.0, recovered_s=6.0, steps_lost=1, generations=(1,),
)  # fmt: skip
STATUS = StatusView("r", "running", "running at step 5", script="train.py")
FACTS = {"ftrun.run_id": "r", "ftrun.node": "n0"}


def recover(number: int | None = 3) -> Record:
    return LifecycleChanged("", number, "diagnose", "recover")


def verify() -> Record:
    return LifecycleChanged("", 3, "recover", "verify")


def downtime(*, fault_s: float, stepped_s: float, restore_s: float, first_s: float) -> Record:
    return DowntimeRecord("", 3, 1.0, 0.5, 0.1, restore_s, first_s, fault_s, stepped_s)


def trace_of(*records: tuple[float, Record]) -> IncidentTrace:
    tracer = IncidentTracer()
    found = [tracer.take(record, now_s=now_s) for now_s, record in records]
    assert not any(found[:-1])
    assert found[-1] is not None
    return found[-1]


def phases(trace: IncidentTrace) -> list[tuple[str, float, float]]:
    return [
        (one.name, round(one.start_s, 6), round(one.end_s, 6)) for one in trace.phases
    ]  # fmt: skip


def test_phases_of_a_hang() -> None:
    trace = trace_of(
        (10.0, SuspicionRaised("", 3, (0, 1), 1.0, 1.0)),
        (10.5, LifecycleChanged("", 3, "suspect", "diagnose")),
        (10.6, VERDICT),
        (10.7, ActionTaken("", 3, "respawn")),
        (10.8, recover()),
        (10.9, recover(None)),
        (11.0, verify()),
        (11.5, ProgressRecord(1, 1)),
        (14.1, downtime(fault_s=9.0, stepped_s=14.0, restore_s=0.5, first_s=1.0)),
        (18.0, CLOSED),
    )
    assert phases(trace) == [
        ("detect", 9.0, 10.0), ("diagnose", 10.0, 10.8), ("stop", 10.8, 11.0),
        ("respawn", 11.0, 12.5), ("restore", 12.5, 13.0), ("first step", 13.0, 14.0),
    ]  # fmt: skip
    assert (trace.incident.name, trace.incident.start_s, trace.incident.end_s) == (
        *("incident crash", 9.0), 18.0,
    )  # fmt: skip
    assert trace.attributes["ftrun.incident"] == 3
    assert trace.attributes["ftrun.culprits"] == (1,)


def test_a_second_fault_has_its_own_phases_and_parts() -> None:
    """The parts of the second record are sums; a finding in between begins nothing."""
    trace = trace_of(
        (10.0, VERDICT),
        (10.0, recover()),
        (10.5, verify()),
        (12.0, downtime(fault_s=10.0, stepped_s=12.0, restore_s=0.5, first_s=0.5)),
        (12.5, AdditionalFinding("the loss has jumped", 3)),
        (13.2, recover()),
        (13.5, verify()),
        (15.0, downtime(fault_s=13.0, stepped_s=15.0, restore_s=0.75, first_s=1.0)),
        (19.0, CLOSED),
    )
    assert phases(trace)[6:] == [
        ("detect", 13.0, 13.2), ("stop", 13.2, 13.5), ("respawn", 13.5, 14.25),
        ("restore", 14.25, 14.5), ("first step", 14.5, 15.0),
    ]  # fmt: skip


def test_a_restart_that_fails_is_followed_by_another_one() -> None:
    trace = trace_of(
        (10.0, VERDICT),
        (10.0, recover()),
        (10.5, verify()),
        (11.0, recover()),
        (11.5, verify()),
        (14.0, downtime(fault_s=9.5, stepped_s=14.0, restore_s=0.0, first_s=1.0)),
        (15.0, CLOSED),
    )
    assert [name for name, *_ in phases(trace)] == [
        "detect", "diagnose", "stop", "respawn", "stop", "respawn", "restore", "first step",
    ]  # fmt: skip
    spans = trace.phases
    assert all(one.end_s == after.start_s for one, after in pairwise(spans))


def test_the_ballot_after_the_loss_of_a_node_comes_before_its_verdict() -> None:
    """An earlier ballot, of the start or of an earlier incident, is not meant."""
    trace = trace_of(
        (1.0, BallotStarted("the run begins", 0)),
        (2.0, recover(None)),
        (2.1, BallotStarted("the run begins", 0)),
        (3.0, LifecycleChanged("", None, "recover", "check")),
        (13.2, BallotStarted("node1 is lost", 1)),
        (13.3, BallotStarted("node1 is lost", 1)),
        (13.5, VERDICT),
        (13.5, recover()),
        (13.5, verify()),
        (15.0, downtime(fault_s=10.0, stepped_s=15.0, restore_s=0.5, first_s=0.5)),
        (15.5, CLOSED),
    )
    assert phases(trace) == [
        ("detect", 10.0, 13.2), ("diagnose", 13.2, 13.2), ("stop", 13.2, 13.5),
        ("respawn", 13.5, 14.0), ("restore", 14.0, 14.5), ("first step", 14.5, 15.0),
    ]  # fmt: skip


def test_what_is_only_reported_or_ends_the_run_has_no_restart() -> None:
    reported = trace_of((10.0, VERDICT), (10.0, CLOSED))
    assert phases(reported) == [("detect", 1.0, 10.0), ("diagnose", 10.0, 10.0)]
    stopped = trace_of((10.0, VERDICT), (10.0, recover()), (11.0, CLOSED))
    assert phases(stopped)[-1] == ("stop", 10.0, 11.0)
    again = trace_of((14.0, downtime(fault_s=9.0, stepped_s=14.0, restore_s=9.0, first_s=1.0)),
                     (15.0, recover()), (16.0, CLOSED))  # fmt: skip
    assert phases(again) == [
        ("detect", 9.0, 9.0), ("restore", 9.0, 13.0), ("first step", 13.0, 14.0),
        ("detect", 15.0, 15.0), ("stop", 15.0, 16.0),
    ]  # fmt: skip
    assert trace_of((16.0, CLOSED)).phases == ()


def test_when_it_is_on() -> None:
    address = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}
    assert not is_wanted(OtelConfig(), {})
    assert is_wanted(OtelConfig(), address)
    assert is_wanted(OtelConfig(), {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://h/v1/traces"})
    assert is_wanted(OtelConfig(endpoint="http://h:4318"), {})
    assert not is_wanted(OtelConfig(endpoint="http://h:4318"), {"OTEL_SDK_DISABLED": "True"})
    assert interval_s({}) == interval_s({"OTEL_METRIC_EXPORT_INTERVAL": "often"}) == 60
    assert interval_s({"OTEL_METRIC_EXPORT_INTERVAL": "15000"}) == 15
    assert interval_s({"OTEL_METRIC_EXPORT_INTERVAL": "0"}) == 1


@pytest.mark.parametrize("address", ["ftp://h", "http://", "https://me:secret@h:4318", "h:4318"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(msgspec.ValidationError, match="endpoint"):
        msgspec.convert({"endpoint": address}, OtelConfig)


# --- export -----------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[Collector]:
    with collector() as found:
        yield found


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20abc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "10")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=blue")
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)


def failures(folder: Path) -> list[HookFailed]:
    lines = map(decode, (folder / "journal.jsonl").read_bytes().splitlines())
    records = [line.record for line in lines if line is not None]
    return [one for one in records if isinstance(one, HookFailed)]


def figures() -> list[Metric]:
    restarts = CounterMetricFamily("ftrun_restarts", "Restarts.", value=2)
    up = GaugeMetricFamily("ftrun_rank_up", "Alive.", labels=("rank",))
    up.add_metric(("0",), 1.0)
    return [restarts, up, GaugeMetricFamily("ftrun_none", "No samples.", labels=("x",))]


def telemetry(folder: Path, url: str, **options: Any) -> Telemetry:
    return Telemetry(
        OtelConfig(endpoint=url), Journal(folder), facts=FACTS, families=figures, **options
    )


def incident(found: Telemetry) -> None:
    for record in (VERDICT, recover(), verify(), CLOSED):
        found.take(record)


def test_traces_and_metrics_reach_a_collector(server: Collector, tmp_path: Path) -> None:
    found = telemetry(tmp_path, server.url + "/", every_s=0.2)
    before_ns = int((clock.wall_s() - 1) * 1e9)
    incident(found)
    found.close(clock.now_s() + 60)
    spans = server.spans()
    root = spans[-1]
    assert [span["name"] for span in spans] == ["detect", "diagnose", "stop", "respawn",
                                                "incident crash"]  # fmt: skip
    assert {span["trace"] for span in spans} == {root["trace"]}
    assert {span["parent"] for span in spans[:-1]} == {root["id"]}
    assert root["parent"] == b""
    assert root["resource"].items() >= {**FACTS, "service.name": "ftrun", "team": "blue"}.items()
    assert (root["ftrun.culprits"], root["ftrun.nodes"]) == ([1], ["n0"])
    assert (root["ftrun.steps_lost"], root["ftrun.text"]) == (1, "rank 1 is dead")
    assert "ftrun.restored" not in root
    assert before_ns < root["end_ns"] < int((clock.wall_s() + 1) * 1e9)
    assert root["end_ns"] - root["start_ns"] == pytest.approx(9e9, abs=1e9)
    metrics = server.metrics()
    assert metrics.keys() == {"ftrun_restarts", "ftrun_rank_up"}
    assert metrics["ftrun_restarts"]["sum"]["isMonotonic"]
    (point,) = metrics["ftrun_rank_up"]["gauge"]["dataPoints"]
    assert point["asDouble"] == 1
    assert all(one["authorization"] == "Bearer abc" for one in server.headers)
    assert failures(tmp_path) == []


def test_a_histogram_of_the_metrics(server: Collector, tmp_path: Path) -> None:
    """Of the real families: its buckets are counted apart, its bounds end before infinity."""
    from ftrun.agent.publish.otlp import metrics_of

    known = DurationHistogram()
    for seconds in (0.07, 0.3, 0.4, 1000.0):
        known.add(seconds)
    found = {
        one.name: one
        for one in families("n0", STATUS, RunCounters(recovery={"total": known}))
    }  # fmt: skip
    (metric,) = metrics_of(found["ftrun_recovery_seconds"], start_ns=1, now_ns=2)
    (point,) = metric.data.data_points
    assert (point.count, point.sum, point.attributes) == (4, 1000.77, {"phase": "total"})
    assert (point.bucket_counts[1], point.bucket_counts[3], point.bucket_counts[-1]) == (1, 2, 1)
    assert len(point.bucket_counts) == len(point.explicit_bounds) + 1
    (info,) = metrics_of(found["ftrun_run"], start_ns=1, now_ns=2)
    assert info.name == "ftrun_run_info"


def test_a_collector_that_refuses_is_reported(server: Collector, tmp_path: Path) -> None:
    """Each trace, and of the metrics the first failure in a row."""
    server.answer = 400
    found = telemetry(tmp_path, server.url, every_s=0.05)
    incident(found)
    limit_s = clock.now_s() + 60
    while sum(path == "/v1/metrics" for path, _ in server.requests) < 3:
        assert clock.now_s() < limit_s
        threading.Event().wait(0.02)
    found.close(clock.now_s() + 60)
    first, second = sorted(failures(tmp_path), key=lambda one: one.event, reverse=True)
    assert (first.hook, first.event, first.incident) == ("otel", "trace", 3)
    assert "400" in first.reason
    assert (second.event, second.incident) == ("metrics", None)


def test_a_collector_that_hangs_costs_traces_and_never_time(
    server: Collector, tmp_path: Path
) -> None:
    server.go.clear()
    found = telemetry(tmp_path, server.url)
    began_s = clock.now_s()
    for _ in range(MAX_WAITING + 3):
        incident(found)
    assert clock.now_s() - began_s < 5
    refused = failures(tmp_path)
    assert 2 <= len(refused) <= 3
    assert f"{MAX_WAITING} traces are waiting" in refused[0].reason
    began_s = clock.now_s()
    found.close(began_s + 0.3)
    assert clock.now_s() - began_s < 5
    server.go.set()
    found.close(clock.now_s() + 60)
    assert len(server.spans()) == 5 * (MAX_WAITING + 3 - len(refused))


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ftrun.agent.publish.otlp", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    found = telemetry(tmp_path, "http://127.0.0.1:9")
    incident(found)
    found.close(clock.now_s() + 60)
    (reported,) = failures(tmp_path)
    assert (reported.event, reported.reason) == ("start", MISSING)
