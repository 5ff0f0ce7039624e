"""A scraper gets metrics that its own parser reads; a bad client gets nothing."""

import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ftrun.agent.publish.metrics import (
    MAX_CONNECTIONS,
    MetricsServer,
    read_token,
    text_of,
)
from ftrun.agent.publish.observers import DurationHistogram, RunCounters
from ftrun.wire.messages.status import StatusView

STATUS: dict[str, Any] = {
    "run_id": 'a"b\n\\', "script": "/home/me/train.py", "state": "running", "summary": "",
    "generation": 2, "uptime_s": 12.5, "lifecycle": "run", "incidents": [], "checkpoint": None,
    "ranks": [
        {"rank": 0, "state": "running", "step": 41, "heartbeat_age_s": 0.1, "loss": 2.5,
         "step_p50_s": 0.1, "step_p99_s": 0.2, "lateness_s": None},
        {"rank": 1, "state": "ended", "step": None, "heartbeat_age_s": None, "loss": None,
         "step_p50_s": None, "step_p99_s": None, "lateness_s": 0.004},
    ],
    "snapshots": {"protected": True, "step": 40, "age_s": 1.5, "memory_bytes": 4096, "taken": 3,
                  "skipped": 1, "discarded": 0, "blocked_s": 0.25},
}  # fmt: skip


def samples(status: dict[str, Any], figures: RunCounters) -> dict[str, float]:
    view = msgspec.convert(status, StatusView)
    text = text_of("n0", view, figures).decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        assert family.name.startswith("ftrun_")
        assert family.type != "unknown"
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            key = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert key not in found
            found[key] = sample.value
    return found


def test_figures_are_read_by_prometheus_own_parser() -> None:
    spread = DurationHistogram()
    for took_s in (0.07, 0.3, 1000.0):
        spread.add(took_s)
    figures = RunCounters(
        restarts=2, incidents={"crash": 1, "GIL stuck": 1}, recovery={"total": spread},
        seconds={"productive": 90.0, "paused": 10.0}, goodput=0.9,
    )  # fmt: skip
    found = samples(STATUS, figures)
    assert found["ftrun_step"] == 41
    assert found["ftrun_snapshot_age_steps"] == 1
    assert found["ftrun_snapshot_age_seconds"] == 1.5
    assert found["ftrun_protected"] == 1
    assert found["ftrun_goodput_ratio"] == 0.9
    assert found["ftrun_restarts_total"] == 2
    assert found["ftrun_incidents_total{kind=GIL stuck}"] == 1
    assert found["ftrun_time_seconds_total{class=paused}"] == 10
    assert found["ftrun_rank_up{node=n0,rank=0}"] == 1
    assert found["ftrun_rank_up{node=n0,rank=1}"] == 0
    assert found["ftrun_rank_step{node=n0,rank=0}"] == 41
    assert "ftrun_rank_step{node=n0,rank=1}" not in found
    assert found["ftrun_rank_lateness_seconds{node=n0,rank=1}"] == 0.004
    assert found["ftrun_step_seconds{quantile=0.99}"] == 0.2
    assert found["ftrun_recovery_seconds_bucket{le=0.1,phase=total}"] == 1
    assert found["ftrun_recovery_seconds_bucket{le=+Inf,phase=total}"] == 3
    assert found["ftrun_recovery_seconds_count{phase=total}"] == 3
    assert found["ftrun_recovery_seconds_sum{phase=total}"] == pytest.approx(1000.37)
    assert found["ftrun_lifecycle_state{state=run}"] == 1
    assert found["ftrun_lifecycle_state{state=suspect}"] == 0


def test_what_is_not_known_is_left_out() -> None:
    nothing = {**STATUS["snapshots"], "step": None, "age_s": None, "protected": False}
    status = {**STATUS, "ranks": [], "lifecycle": None, "snapshots": nothing}
    found = samples(status, RunCounters())
    for name in ("step", "snapshot_age_steps", "snapshot_age_seconds", "goodput_ratio", "loss"):
        assert f"ftrun_{name}" not in found
    assert found["ftrun_protected"] == 0


def test_the_node_that_leads_shows_all_nodes() -> None:
    nodes = [
        {"node_id": f"n{number}", "role": "member", "ranks": [
            {"rank": number, "state": "running", "step": 50 + number, "heartbeat_age_s": 0.2,
             "loss": None, "step_p50_s": 0.1 + number, "step_p99_s": 0.2, "lateness_s": None}]}
        for number in range(3)
    ]  # fmt: skip
    lost = {"node_id": "n3", "role": "lost", "failure_reason": "no heartbeat"}
    status = {
        **STATUS,
        "cluster": {
            "state": "running",
            "summary": "",
            "nodes": [*nodes, lost],
            "tolerated_losses": 1,
        },
    }
    found = samples(status, RunCounters())
    assert found["ftrun_step"] == 52
    assert found["ftrun_rank_step{node=n2,rank=2}"] == 52
    assert found["ftrun_nodes{role=lost}"] == 1
    assert found["ftrun_nodes{role=member}"] == 3
    assert found["ftrun_tolerated_node_losses"] == 1
    assert found["ftrun_step_seconds{quantile=0.5}"] == pytest.approx(2.1)


Serve = Callable[..., MetricsServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[MetricsServer] = []

    def begin(**settings: Any) -> MetricsServer:
        wanted = {"text": lambda: b"ftrun_step 1\n", "token": None, **settings}
        servers.append(MetricsServer("127.0.0.1", 0, **wanted))
        servers[-1].start()
        return servers[-1]

    yield begin
    for server in servers:
        server.close()


def get(server: MetricsServer, path: str = "/metrics", **headers: str) -> tuple[int, bytes]:
    request = urllib.request.Request(f"http://{server.address}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def until(condition: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up_s
        time.sleep(0.005)


def test_scrape(serve: Serve) -> None:
    server = serve()
    assert get(server) == (200, b"ftrun_step 1\n")
    assert get(server, "/metrics?x=1")[0] == 200
    assert get(server, "/")[0] == 404


def test_token(serve: Serve) -> None:
    server = serve(token="s3cret")
    assert get(server)[0] == 401
    assert get(server, Authorization="Bearer wrong")[0] == 401
    assert get(server, "/other")[0] == 401
    assert get(server, Authorization="Bearer s3cret") == (200, b"ftrun_step 1\n")


def test_figures_are_made_once_for_many_scrapes(serve: Serve) -> None:
    made: list[int] = []

    def text() -> bytes:
        made.append(1)
        return b"x 1\n"

    server = serve(text=text)
    for _ in range(20):
        assert get(server)[0] == 200
    assert len(made) < 20


def test_a_scraper_that_never_ends_its_request_is_cut_off(serve: Serve) -> None:
    server = serve(cut_off_s=0.2)
    with closing(socket.create_connection(server.server_address[:2])) as slow:
        slow.settimeout(60)
        slow.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        assert slow.recv(1) == b""
    until(lambda: is_answered(server))


def is_answered(server: MetricsServer) -> bool:
    """Whether a scrape succeeds: on a busy machine it may be too slow itself."""
    with suppress(OSError):
        return get(server)[0] == 200
    return False


def test_a_scraper_that_does_not_read_is_cut_off(serve: Serve) -> None:
    size = 64 << 20
    asked = threading.Event()

    def text() -> bytes:
        asked.set()
        return b"x" * size

    server = serve(cut_off_s=0.2, text=text)
    with closing(socket.create_connection(server.server_address[:2])) as slow:
        slow.settimeout(60)
        slow.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert asked.wait(60)
        until(lambda: len(server._open) == 0)
        # The data that the kernel had received before the cut can still be read, and no more.
        received = 0
        with suppress(ConnectionError):
            while data := slow.recv(1 << 20):
                received += len(data)
        assert received < size


def test_more_connections_than_there_is_room_for_are_closed(serve: Serve) -> None:
    server = serve()
    idle = [socket.create_connection(server.server_address[:2]) for _ in range(MAX_CONNECTIONS)]
    try:
        until(lambda: len(server._open) == MAX_CONNECTIONS)
        with closing(socket.create_connection(server.server_address[:2])) as late:
            late.settimeout(60)
            assert late.recv(1) == b""
    finally:
        for one in idle:
            one.close()


def test_a_port_that_is_taken_is_an_error_of_its_own_kind(serve: Serve) -> None:
    taken = serve().server_address[1]
    with pytest.raises(OSError, match="in use"):
        MetricsServer("127.0.0.1", taken, text=bytes, token=None)


def test_token_files(tmp_path: Any) -> None:
    path = tmp_path / "token"
    path.write_text("abc\n")
    assert read_token(str(path)) == "abc"
    path.write_text("\n")
    with pytest.raises(ValueError, match="empty"):
        read_token(str(path))
    with pytest.raises(OSError, match="No such"):
        read_token(str(tmp_path / "none"))
