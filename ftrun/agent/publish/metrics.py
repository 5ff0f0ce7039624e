"""Metrics of a run in the Prometheus text format.

Runs in:  agent, threads of the metrics server. Imported only if metrics are enabled.
Takes in: the status of this node; on the leader, the status of all nodes; `RunCounters`.
Gives:    the text of one scrape: the whole run on the leader, this node on any other node.

Each name begins with ftrun_. docs/operations.md lists the metrics, and docs/grafana-dashboard.json
shows them.

Rule 1: an unknown value is left out, never shown as 0.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

from ftrun import __version__
from ftrun.agent.publish.run_figures import RunCounters, cumulated
from ftrun.recovery.lifecycle import LifecycleState

Status = Mapping[str, Any]


class RunCollector(Collector):
    """Reads the status of the run at each scrape."""

    def __init__(self, status: Callable[[], Status], figures: Callable[[], RunCounters]) -> None:
        self._status = status
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        yield from families(self._status(), self._figures())


def text_of(collector: Collector) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Described(collector))
    return generate_latest(registry)


def families(status: Status, figures: RunCounters) -> Iterator[Metric]:
    """Yield all metric families.

    Args:
        status: from `StatusDesk.of_node`, and `node`; with `cluster` on a leader of several nodes.
        figures: counters of this agent.
    """
    node = str(status.get("node", ""))
    ranks = _ranks(status, node)
    yield _info(status, node)
    yield from _progress(status, ranks)
    yield from _per_rank(ranks)
    yield from _snapshots(status, max((rank["step"] or 0 for _, rank in ranks), default=0))
    yield from _trouble(status, figures)
    yield from _nodes(status)


def _ranks(status: Status, node: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Node and status of each rank, of all nodes if they are known, otherwise of this node."""
    nodes = (status.get("cluster") or {}).get("nodes")
    if nodes is None:
        return [(node, rank) for rank in status["ranks"]]
    return [(one["node"], rank) for one in nodes for rank in one["ranks"]]


def _info(status: Status, node: str) -> Metric:
    found = InfoMetricFamily("ftrun_run", "Which run this is, and which node says so.")
    labels = {
        "run_id": str(status["run_id"]),
        "script": str(status["script"]),
        "node": node,
        "version": __version__,
    }
    found.add_metric((), labels)
    return found


def _progress(status: Status, ranks: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[Metric]:
    steps = [rank["step"] for _, rank in ranks if rank["step"] is not None]
    yield from _gauge("ftrun_step", "Step of the furthest rank.", max(steps, default=None))
    yield from _gauge("ftrun_generation", "How often ranks were started again.",
                      status["generation"])  # fmt: skip
    yield from _gauge("ftrun_ranks", "Ranks that this figure is about.", len(ranks))
    losses = [rank.get("loss") for _, rank in ranks]
    loss = next((one for one in losses if one is not None), None)
    yield from _gauge("ftrun_loss", "Loss, as the script has reported it last.", loss)
    times = GaugeMetricFamily(
        "ftrun_step_seconds",
        "So long at most took this part of the steps, of the slowest rank; a quarter too much "
        "at most.",
        labels=("quantile",),
    )
    for quantile, name in (("0.5", "step_p50_s"), ("0.99", "step_p99_s")):
        known = [rank[name] for _, rank in ranks if rank.get(name)]
        if known:
            times.add_metric((quantile,), max(known))
    yield times
    yield from _gauge("ftrun_uptime_seconds", "Since this agent was started.", status["uptime_s"])


def _per_rank(ranks: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[Metric]:
    labels = ("rank", "node")
    up = GaugeMetricFamily("ftrun_rank_up", "1: the rank's process is alive.", labels=labels)
    step = GaugeMetricFamily("ftrun_rank_step", "Steps that a rank has made.", labels=labels)
    late = GaugeMetricFamily(
        "ftrun_rank_lateness_seconds",
        "How much later than the others a rank is at the collectives of a step.",
        labels=labels,
    )
    silent = GaugeMetricFamily(
        "ftrun_rank_silence_seconds", "Since a rank's last step.", labels=labels
    )
    for node, rank in ranks:
        key = (str(rank["rank"]), node)
        up.add_metric(key, float(rank["state"] in ("running", "stopped", "finished")))
        if rank["step"] is not None:
            step.add_metric(key, rank["step"])
        if rank.get("lateness_s") is not None:
            late.add_metric(key, rank["lateness_s"])
        age_s = rank.get("beat_age_s", rank.get("age_s"))
        if age_s is not None and age_s >= 0:
            silent.add_metric(key, age_s)
    yield from (up, step, late, silent)


def _snapshots(status: Status, step: int) -> Iterator[Metric]:
    has = status["snapshots"]
    newest = has["step"]
    yield from _gauge("ftrun_protected", "1: a committed snapshot is there to go back to.",
                      float(has["protected"]))  # fmt: skip
    yield from _gauge("ftrun_snapshot_age_steps", "Steps that a failure now would cost.",
                      None if newest is None else max(0, step - newest))  # fmt: skip
    yield from _gauge("ftrun_snapshot_age_seconds", "Since the committed snapshot was taken.",
                      has["age_s"])  # fmt: skip
    yield from _gauge("ftrun_snapshot_memory_bytes", "Memory of this node for snapshots.",
                      has["memory_bytes"])  # fmt: skip
    counts = CounterMetricFamily(
        "ftrun_snapshots", "Snapshots of this generation, by what became of them.",
        labels=("result",),
    )  # fmt: skip
    for result in ("taken", "skipped", "discarded"):
        counts.add_metric((result,), has[result])
    yield counts
    yield CounterMetricFamily(
        "ftrun_snapshot_blocked_seconds",
        "For which the ranks of this generation have stood still for snapshots.",
        value=has["blocked_s"],
    )
    written = status.get("checkpoint") or {}
    yield from _gauge("ftrun_checkpoint_age_seconds", "Since the last checkpoint was written.",
                      written.get("age_s"))  # fmt: skip


def _trouble(status: Status, figures: RunCounters) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "ftrun_restarts", "Ranks were started again, by this agent.", value=figures.restarts
    )
    closed = CounterMetricFamily(
        "ftrun_incidents", "Incidents that are over, by kind of the verdict.", labels=("kind",)
    )
    for kind, count in sorted(figures.incidents.items()):
        closed.add_metric((kind,), count)
    yield closed
    is_open = any(one["state"] != "closed" for one in status.get("incidents") or ())
    if status.get("life") is not None:
        yield from _gauge("ftrun_incident_open", "1: there is an incident now.", float(is_open))
        life = GaugeMetricFamily("ftrun_life", "1: the state that the run is in.",
                                 labels=("state",))  # fmt: skip
        for state in LifecycleState:
            life.add_metric((state.value,), float(state.value == status["life"]))
        yield life
    recovery = HistogramMetricFamily(
        "ftrun_recovery_seconds",
        "From a fault to the next step of every rank (phase total), and the parts of it.",
        labels=("phase",),
    )  # fmt: skip
    for phase, spread in sorted(figures.recovery.items()):
        recovery.add_metric((phase,), cumulated(spread.counts), spread.sum_s)
    yield recovery
    yield from _gauge("ftrun_goodput_ratio", "Productive time over all time.", figures.goodput)
    seconds = CounterMetricFamily(
        "ftrun_time_seconds", "Time of the run, by what it went to.", labels=("class",)
    )
    for name, spent_s in figures.seconds.items():
        seconds.add_metric((name,), spent_s)
    yield seconds
    yield CounterMetricFamily(
        "ftrun_hooks_failed", "Hooks that have failed.", value=figures.hooks_failed
    )


def _nodes(status: Status) -> Iterator[Metric]:
    cluster = status.get("cluster")
    if not cluster or "nodes" not in cluster:
        return
    places = [str(node["place"]) for node in cluster["nodes"]]
    nodes = GaugeMetricFamily("ftrun_nodes", "Nodes of the run, by their place in it.",
                              labels=("place",))  # fmt: skip
    for place in ("rank", "spare", "new", "lost", "left"):
        nodes.add_metric((place,), places.count(place))
    yield nodes
    yield from _gauge("ftrun_survivable_node_losses", "So many nodes of each group may go.",
                      cluster.get("survives"))  # fmt: skip


def _gauge(name: str, about: str, value: float | None) -> Iterable[Metric]:
    if value is not None:
        yield GaugeMetricFamily(name, about, value=value)


class _Described(Collector):
    """Drops families without samples, because some parsers reject HELP without samples."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def collect(self) -> Iterable[Metric]:
        return [family for family in self._collector.collect() if family.samples]
