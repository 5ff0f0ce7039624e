"""A collector of OpenTelemetry on this machine: it decodes and keeps what OTLP over HTTP sends."""

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

REQUESTS = {"/v1/traces": ExportTraceServiceRequest, "/v1/metrics": ExportMetricsServiceRequest}


@dataclass
class Collector:
    """`answer`: the status of each reply; `go`: replies wait for it."""

    url: str = ""
    answer: int = 200
    go: threading.Event = field(default_factory=threading.Event)
    headers: list[dict[str, str]] = field(default_factory=list)
    requests: list[tuple[str, Any]] = field(default_factory=list)

    def spans(self) -> list[dict[str, Any]]:
        """All spans, each with its `resource`; attributes as plain values."""
        found = []
        for path, request in self.requests:
            for one in request.resource_spans if path == "/v1/traces" else ():
                resource = plain(MessageToDict(one.resource)["attributes"])
                for span in (span for scope in one.scope_spans for span in scope.spans):
                    attributes = plain(MessageToDict(span).get("attributes", []))
                    found.append({
                        "name": span.name, "trace": span.trace_id, "id": span.span_id,
                        "parent": span.parent_span_id, "start_ns": span.start_time_unix_nano,
                        "end_ns": span.end_time_unix_nano, "resource": resource, **attributes,
                    })  # fmt: skip
        return found

    def metrics(self) -> dict[str, dict[str, Any]]:
        """The last request's metrics by name, in protobuf's JSON form."""
        last = [request for path, request in self.requests if path == "/v1/metrics"][-1]
        (resource,) = last.resource_metrics
        (scope,) = resource.scope_metrics
        return {metric.name: MessageToDict(metric) for metric in scope.metrics}


@contextmanager
def collector() -> Iterator[Collector]:
    found = Collector()
    found.go.set()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found.go.wait(60)
            found.headers.append(dict(self.headers))
            found.requests.append((self.path, REQUESTS[self.path].FromString(body)))
            self.send_response(found.answer)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    found.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield found
    finally:
        found.go.set()
        server.shutdown()
        thread.join()
        server.server_close()


def plain(attributes: list[dict[str, Any]]) -> dict[str, Any]:
    return {one["key"]: _value(one["value"]) for one in attributes}


def _value(value: dict[str, Any]) -> Any:
    ((kind, content),) = value.items()
    if kind == "arrayValue":
        return [_value(one) for one in content.get("values", [])]
    return int(content) if kind == "intValue" else content
