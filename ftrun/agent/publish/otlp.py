"""Exports traces and metrics by OTLP over HTTP with opentelemetry's library.

Imported only if an endpoint is set, in the thread of `ftrun.agent.publish.telemetry`.

Source: OpenTelemetry's specification 1.x; metrics keep the names of /metrics, without `_total` of
        counters, which a collector adds for Prometheus.
"""

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from opentelemetry import trace as api
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Metric as OtelMetric
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client.core import Metric
from prometheus_client.samples import Sample

from ftrun import __version__, clock
from ftrun.agent.publish.telemetry import IncidentTrace

_CUMULATIVE = AggregationTemporality.CUMULATIVE
_SCOPE = InstrumentationScope("ftrun", __version__)


class OtlpExporter:
    """Sends to `endpoint`, or to that of the variables OTEL_EXPORTER_OTLP_*.

    Headers, certificates, timeouts (10 s) and further attributes are those of OpenTelemetry's
    variables.
    """

    def __init__(self, endpoint: str | None, facts: Mapping[str, str]) -> None:
        base = None if endpoint is None else endpoint.rstrip("/")
        self._resource = resource_of(facts)
        self._start_ns = _wall_ns(clock.wall_s())
        self._reasons = _LastMessages()
        logger = logging.getLogger("opentelemetry")
        logger.addHandler(self._reasons)
        logger.propagate = False
        self._finished = InMemorySpanExporter()
        provider = TracerProvider(resource=self._resource, shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._finished))
        self._tracer = provider.get_tracer("ftrun", __version__)
        self._spans = OTLPSpanExporter(base and f"{base}/v1/traces")
        self._metrics = OTLPMetricExporter(base and f"{base}/v1/metrics")

    def send_trace(self, trace: IncidentTrace, *, wall_minus_s: float) -> str:
        """`wall_minus_s`: wall time minus monotonic time; returns the reason of a failure."""
        whole = trace.incident
        known = {name: value for name, value in trace.attributes.items() if value is not None}
        root = self._tracer.start_span(
            whole.name,
            start_time=_wall_ns(whole.start_s + wall_minus_s),
            attributes=known,
        )
        context = api.set_span_in_context(root)
        for phase in trace.phases:
            start_ns = _wall_ns(phase.start_s + wall_minus_s)
            span = self._tracer.start_span(phase.name, context=context, start_time=start_ns)
            span.end(_wall_ns(phase.end_s + wall_minus_s))
        root.end(_wall_ns(whole.end_s + wall_minus_s))
        spans = self._finished.get_finished_spans()
        self._finished.clear()
        is_sent = not spans or self._spans.export(spans) is SpanExportResult.SUCCESS
        return "" if is_sent else self._reasons.take()

    def send_metrics(self, families: Iterable[Metric]) -> str:
        """Returns the reason of a failure."""
        now_ns = _wall_ns(clock.wall_s())
        metrics = [
            found
            for family in families
            if family.samples
            for found in metrics_of(family, start_ns=self._start_ns, now_ns=now_ns)
        ]
        scope = ScopeMetrics(_SCOPE, metrics, "")
        data = MetricsData([ResourceMetrics(self._resource, [scope], "")])
        is_sent = self._metrics.export(data) is MetricExportResult.SUCCESS
        return "" if is_sent else self._reasons.take()


def resource_of(facts: Mapping[str, str]) -> Resource:
    """`facts`, and what OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say."""
    found = Resource.create(dict(facts))
    if str(found.attributes[SERVICE_NAME]).startswith("unknown_service"):
        found = found.merge(Resource({SERVICE_NAME: "ftrun"}))
    return found


def metrics_of(family: Metric, *, start_ns: int, now_ns: int) -> Iterator[OtelMetric]:
    """One family of /metrics in OpenTelemetry's form. Units stay part of the names."""
    if family.type == "histogram":
        points = list(_histogram_points(family.samples, start_ns, now_ns))
        data = Histogram(points, _CUMULATIVE)
        yield OtelMetric(family.name, family.documentation, "", data)
        return
    is_counter = family.type == "counter"
    points = [
        NumberDataPoint(sample.labels, start_ns, now_ns, float(sample.value))
        for sample in family.samples
    ]
    data = Sum(points, _CUMULATIVE, is_monotonic=True) if is_counter else Gauge(points)
    name = family.name if is_counter else family.samples[0].name
    yield OtelMetric(name, family.documentation, "", data)


def _histogram_points(
    samples: Iterable[Sample], start_ns: int, now_ns: int
) -> Iterator[HistogramDataPoint]:
    """Points of each set of labels; Prometheus counts buckets from 0, OpenTelemetry each alone."""
    found: dict[tuple[tuple[str, str], ...], tuple[list[tuple[float, float]], list[float]]] = {}
    for sample in samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        buckets, sums = found.setdefault(tuple(labels.items()), ([], []))
        if "le" in sample.labels:
            buckets.append((float(sample.labels["le"]), sample.value))
        elif sample.name.endswith("_sum"):
            sums.append(sample.value)
    for key, (buckets, sums) in found.items():
        edges, totals = zip(*sorted(buckets), strict=True)
        before = (0.0, *totals)
        counts = [int(after - until) for until, after in zip(before, totals, strict=False)]
        yield HistogramDataPoint(
            dict(key), start_ns, now_ns, int(totals[-1]), sum(sums), counts, edges[:-1],
            min=None, max=None,
        )  # fmt: skip


class _LastMessages(logging.Handler):
    """Keeps the last two messages of the library, which are the reason of a failure."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._texts: deque[str] = deque(maxlen=2)

    def emit(self, record: logging.LogRecord) -> None:
        self._texts.append(record.getMessage())

    def take(self) -> str:
        text = " ".join(self._texts)
        self._texts.clear()
        return text or "the export failed"


def _wall_ns(seconds: float) -> int:
    return int(seconds * 1e9)
