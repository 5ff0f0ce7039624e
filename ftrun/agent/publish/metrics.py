"""Metrics of a run in the Prometheus text format, and the HTTP server for /metrics.

Runs in:  agent, threads of its own. Imported only if metrics are enabled.
Takes in: HTTP requests from any client; the published status; `RunCounters`.
Gives:    the whole run on the leader, this node on any other node; 401 if a token is required and
          missing or wrong.
Survives: anything a client does.

Each name begins with ftrun_. docs/operations.md lists the metrics, and docs/grafana-dashboard.json
shows them.

Rule 1: an unknown value is left out, never shown as 0.
Rule 2: a connection lasts at most CUT_OFF_S, even if the client is slow, and at most
        MAX_CONNECTIONS are open.
Rule 3: the text is built at most once in FRESH_S, for any number of requests.
"""

import hmac
import http.server
import logging
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ftrun import __version__, clock
from ftrun.agent.publish.observers import RunCounters, cumulated
from ftrun.recovery.lifecycle import LifecycleState
from ftrun.wire.messages.status import RankStatus, StatusView

CUT_OFF_S = 5.0
MAX_CONNECTIONS = 8
FRESH_S = 1.0
MAX_TOKEN_BYTES = 4096
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_log = logging.getLogger("ftrun")

Text = Callable[[], bytes]
RankRows = Sequence[tuple[str, RankStatus]]
"""Node id and status of each rank."""


class _Families(Collector):
    """Drops families without samples, because some parsers reject HELP without samples."""

    def __init__(self, found: Iterable[Metric]) -> None:
        self._found = [family for family in found if family.samples]

    def collect(self) -> Iterable[Metric]:
        return self._found


def text_of(node_id: str, status: StatusView, counters: RunCounters) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families(node_id, status, counters)))
    return generate_latest(registry)


def families(node_id: str, status: StatusView, counters: RunCounters) -> Iterator[Metric]:
    nodes = status.cluster.nodes if status.cluster is not None else ()
    ranks = [(node.node_id, rank) for node in nodes for rank in node.ranks]
    if status.cluster is None:
        ranks = [(node_id, rank) for rank in status.ranks]
    yield _info(status, node_id)
    yield from _progress(status, ranks)
    yield from _per_rank(ranks)
    yield from _snapshots(status, max((rank.step or 0 for _, rank in ranks), default=0))
    yield from _failures(status, counters)
    yield from _nodes(status)


def _info(status: StatusView, node_id: str) -> Metric:
    found = InfoMetricFamily("ftrun_run", "The run, and the node that serves this page.")
    labels = {
        "run_id": status.run_id,
        "script": status.script,
        "node": node_id,
        "version": __version__,
    }
    found.add_metric((), labels)
    return found


def _progress(status: StatusView, ranks: RankRows) -> Iterator[Metric]:
    steps = [rank.step for _, rank in ranks if rank.step is not None]
    yield from _gauge("ftrun_step", "Highest step of any rank.", max(steps, default=None))
    yield from _gauge("ftrun_generation", "Number of restarts of the ranks.", status.generation)
    yield from _gauge("ftrun_ranks", "Number of ranks that this page covers.", len(ranks))
    loss = next((rank.loss for _, rank in ranks if rank.loss is not None), None)
    yield from _gauge("ftrun_loss", "Newest loss that the script reported.", loss)
    quantiles = {
        "0.5": [rank.step_p50_s for _, rank in ranks if rank.step_p50_s],
        "0.99": [rank.step_p99_s for _, rank in ranks if rank.step_p99_s],
    }
    times = GaugeMetricFamily(
        "ftrun_step_seconds",
        "Upper bound of this step-time quantile on the slowest rank; at most 25 % too high.",
        labels=("quantile",),
    )
    yield _with(times, {quantile: max(known) for quantile, known in quantiles.items() if known})
    yield from _gauge("ftrun_uptime_seconds", "Time since this agent started.", status.uptime_s)


def _per_rank(ranks: RankRows) -> Iterator[Metric]:
    labels = ("rank", "node")
    up = GaugeMetricFamily("ftrun_rank_up", "1: the process of the rank is alive.", labels=labels)
    step = GaugeMetricFamily("ftrun_rank_step", "Completed steps of a rank.", labels=labels)
    late = GaugeMetricFamily(
        "ftrun_rank_lateness_seconds",
        "Time by which a rank enters the collectives of a step after the others.",
        labels=labels,
    )
    unresponsive = GaugeMetricFamily(
        "ftrun_rank_heartbeat_age_seconds", "Time since the last step of a rank.", labels=labels
    )
    for node_id, rank in ranks:
        key = (str(rank.rank), node_id)
        up.add_metric(key, float(rank.state in ("running", "stopped", "finished")))
        if rank.step is not None:
            step.add_metric(key, rank.step)
        if rank.lateness_s is not None:
            late.add_metric(key, rank.lateness_s)
        if rank.heartbeat_age_s is not None:
            unresponsive.add_metric(key, rank.heartbeat_age_s)
    yield from (up, step, late, unresponsive)


def _snapshots(status: StatusView, step: int) -> Iterator[Metric]:
    has = status.snapshots
    if has is None:
        return
    yield from _gauge("ftrun_protected", "1: a committed snapshot can be restored.",
                      float(has.protected))  # fmt: skip
    yield from _gauge("ftrun_snapshot_age_steps", "Steps that a failure now would repeat.",
                      None if has.step is None else max(0, step - has.step))  # fmt: skip
    yield from _gauge("ftrun_snapshot_age_seconds", "Time since the committed snapshot was taken.",
                      has.age_s)  # fmt: skip
    yield from _gauge("ftrun_snapshot_memory_bytes", "Memory of this node for snapshots.",
                      has.memory_bytes)  # fmt: skip
    counts = CounterMetricFamily(
        "ftrun_snapshots", "Snapshots of this generation, by result.", labels=("result",)
    )
    results = {"taken": has.taken, "skipped": has.skipped, "discarded": has.discarded}
    yield _with(counts, results)
    yield CounterMetricFamily(
        "ftrun_snapshot_blocked_seconds",
        "Time for which snapshots blocked the ranks of this generation.",
        value=has.blocked_s,
    )
    written = status.checkpoint
    yield from _gauge("ftrun_checkpoint_age_seconds", "Time since the last checkpoint was written.",
                      written.age_s if written is not None else None)  # fmt: skip


def _failures(status: StatusView, counters: RunCounters) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "ftrun_restarts", "Restarts of the ranks under this agent.", value=counters.restarts
    )
    closed = CounterMetricFamily(
        "ftrun_incidents", "Closed incidents, by kind of the verdict.", labels=("kind",)
    )
    yield _with(closed, dict(sorted(counters.incidents.items())))
    if status.lifecycle is not None:
        is_open = any(one.is_open for one in status.incidents)
        yield from _gauge("ftrun_incident_open", "1: an incident is open.", float(is_open))
        lifecycle = GaugeMetricFamily("ftrun_lifecycle_state", "1: the present state of the run.",
                                      labels=("state",))  # fmt: skip
        states = [state.value for state in LifecycleState]
        yield _with(lifecycle, {state: float(state == status.lifecycle) for state in states})
    recovery = HistogramMetricFamily(
        "ftrun_recovery_seconds",
        "Time from a fault to the next step of every rank (phase total), and its parts.",
        labels=("phase",),
    )
    for phase, histogram in sorted(counters.recovery.items()):
        recovery.add_metric((phase,), cumulated(histogram.counts), histogram.sum_s)
    yield recovery
    yield from _gauge("ftrun_goodput_ratio", "Productive time over all time.", counters.goodput)
    seconds = CounterMetricFamily("ftrun_time_seconds", "Time of the run, by class.",
                                  labels=("class",))  # fmt: skip
    yield _with(seconds, counters.seconds)
    yield CounterMetricFamily("ftrun_hooks_failed", "Failed hooks.", value=counters.hooks_failed)


def _nodes(status: StatusView) -> Iterator[Metric]:
    if status.cluster is None:
        return
    roles = [node.role for node in status.cluster.nodes]
    nodes = GaugeMetricFamily("ftrun_nodes", "Nodes of the run, by role.", labels=("role",))
    known = ("member", "spare", "joining", "lost", "left")
    yield _with(nodes, {role: roles.count(role) for role in known})
    yield from _gauge("ftrun_tolerated_node_losses",
                      "Nodes of each protection group that may be lost.",
                      status.cluster.tolerated_losses)  # fmt: skip


def _gauge(name: str, about: str, value: float | None) -> Iterable[Metric]:
    if value is not None:
        yield GaugeMetricFamily(name, about, value=value)


def _with(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float]) -> Metric:
    for label, value in values.items():
        family.add_metric((label,), value)
    return family


# --- server -----------------------------------------------------------------------------------


class MetricsServer(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """Server of one port of this node. It calls `text` in threads, and needs `token` if given."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = MAX_CONNECTIONS
    allow_reuse_address = True

    def __init__(
        self, host: str, port: int, *, text: Text, token: str | None, cut_off_s: float = CUT_OFF_S
    ) -> None:
        """OSError: the port is in use, or the address does not belong to this machine."""
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)
        self.token = token
        self._cut_off_s = cut_off_s
        self._make = text
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._made: tuple[float, bytes] | None = None
        self._open: dict[Any, float] = {}
        self._thread = threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.5}, name="ftrun-metrics",
            daemon=True,
        )  # fmt: skip

    @property
    def address(self) -> str:
        host, port = self.server_address[:2]
        text = host if isinstance(host, str) else host.decode()
        return f"[{text}]:{port}" if ":" in text else f"{text}:{port}"

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def text(self) -> bytes:
        """The text of a scrape, at most FRESH_S old."""
        with self._making:
            now_s = clock.now_s()
            if self._made is None or now_s - self._made[0] > FRESH_S:
                self._made = (now_s, self._make())
            return self._made[1]

    # --- overrides of socketserver ------------------------------------------------------------

    def server_bind(self) -> None:
        """Bind without resolving the name of this machine, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "ftrun", self.server_address[1]

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Refuse a connection beyond MAX_CONNECTIONS: rule 2."""
        del client_address
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                return False
            self._open[request] = clock.now_s() + self._cut_off_s
            return True

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Close connections older than their limit; runs between requests and twice a second."""
        now_s = clock.now_s()
        with self._lock:
            slow = [request for request, due_s in self._open.items() if now_s >= due_s]
        for request in slow:
            with suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        del request
        _log.debug("a scrape from %s was not answered", client_address, exc_info=True)


class _Handler(http.server.BaseHTTPRequestHandler):
    """Handler of one request."""

    server: MetricsServer
    server_version = f"ftrun/{__version__}"
    sys_version = ""
    timeout = CUT_OFF_S

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if not self._is_known():
            self._answer(401, b"a token is needed: Authorization: Bearer TOKEN\n", "text/plain")
        elif path != "/metrics":
            self._answer(404, b"there is only /metrics\n", "text/plain")
        else:
            self._answer(200, self.server.text(), CONTENT_TYPE)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's
        """Log nothing, because scrapes arrive every few seconds."""

    def _is_known(self) -> bool:
        token = self.server.token
        if token is None:
            return True
        shown = self.headers.get("Authorization", "")
        return hmac.compare_digest(shown.encode("utf-8", "replace"), f"Bearer {token}".encode())

    def _answer(self, code: int, body: bytes, content_type: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        if code == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(body)


def read_token(path: str) -> str:
    """OSError: the file cannot be read. ValueError: it is empty."""
    with Path(path).open("rb") as file:
        token = file.read(MAX_TOKEN_BYTES).decode("utf-8", "replace").strip()
    if not token:
        raise ValueError(f"{path} is empty")
    return token
