"""Sources of notices against servers that speak their documented protocols, and the watcher."""

import http.server
import json
import signal
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ftrun.agent.loop import SAME_SIGNAL_S, RunSignals
from ftrun.agent.notices.clouds import AwsNotices, AzureNotices, GoogleNotices
from ftrun.agent.notices.cluster import KubernetesNotices, SlurmNotices, leaving
from ftrun.agent.notices.local import CommandNotices, FileNotices
from ftrun.agent.notices.source import MAX_BYTES, Notice, SourceFailed, fetch
from ftrun.agent.notices.watcher import NoticeWatcher, source_of
from ftrun.config.cluster import NodesSpec
from ftrun.config.profile import NoticesConfig
from ftrun.config.run_spec import RunSpec
from ftrun.errors import UsageError
from ftrun.events import Progress
from ftrun.ids import Step
from ftrun.journal import Journal

Answer = tuple[int, Mapping[str, str], str]
Handle = Callable[[str, str, Mapping[str, str]], Answer]
"""Method, path and headers (names in lower case) to status, headers and text."""


@contextmanager
def served(handle: Handle, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """A server on loopback; gives `host:port`."""

    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            given = {name.lower(): value for name, value in self.headers.items()}
            status, headers, text = handle(self.command, self.path, given)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode())

        do_PUT = do_GET  # noqa: N815 - the name that the server looks up

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5.0)


class Aws:
    """The instance metadata service, version 2: no answer without a valid token."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.documents: dict[str, str] = {}

    def __call__(self, method: str, path: str, headers: Mapping[str, str]) -> Answer:
        if (method, path) == ("PUT", "/latest/api/token"):
            seconds = int(headers.get("x-aws-ec2-metadata-token-ttl-seconds", "0"))
            if not 1 <= seconds <= 21600:
                return 400, {}, "Bad Request"
            self.tokens.append(f"token-{len(self.tokens)}")
            return 200, {}, self.tokens[-1]
        if not self.tokens or headers.get("x-aws-ec2-metadata-token") != self.tokens[-1]:
            return 401, {}, "Unauthorized"
        found = self.documents.get(path.removeprefix("/latest/meta-data/"))
        return (404, {}, "Not Found") if found is None else (200, {}, found)


def test_aws_says_that_a_spot_instance_is_interrupted() -> None:
    aws = Aws()
    with served(aws) as place:
        source = AwsNotices(f"http://{place}")
        assert source.poll() is None
        assert source.poll() is None
        assert len(aws.tokens) == 1
        aws.tokens.append("expires the first")
        assert source.poll() is None  # 401, and another token
        aws.documents["events/recommendations/rebalance"] = '{"noticeTime": "2026-11-24T08:00:00Z"}'
        assert source.poll() is None
        aws.documents["spot/instance-action"] = (
            '{"action": "terminate", "time": "2026-11-24T08:22:00Z"}'
        )
        found = source.poll()
    assert found == Notice("aws", "spot interruption, terminate", "2026-11-24T08:22:00Z")
    assert found.text == "aws: spot interruption, terminate at 2026-11-24T08:22:00Z"


def test_aws_recommendations_count_only_if_they_are_asked_for() -> None:
    aws = Aws()
    aws.documents["events/recommendations/rebalance"] = '{"noticeTime": "2026-11-24T08:00:00Z"}'
    with served(aws) as place:
        found = AwsNotices(f"http://{place}", with_rebalance=True).poll()
    assert found == Notice("aws", "rebalance recommendation", "2026-11-24T08:00:00Z")


@pytest.mark.parametrize("document", ["<html>", "[]", '"x"'])
def test_aws_answers_that_are_no_document_are_no_notice(document: str) -> None:
    aws = Aws()
    aws.documents["spot/instance-action"] = document
    with served(aws) as place, pytest.raises(SourceFailed):
        AwsNotices(f"http://{place}").poll()


def test_a_metadata_service_of_version_1_is_reported() -> None:
    with (
        served(lambda *_: (403, {}, "disabled")) as place,
        pytest.raises(SourceFailed, match="answers 403: disabled"),
    ):
        AwsNotices(f"http://{place}").poll()


class Google:
    """The metadata server of Compute Engine: it wants its header, and sends it back."""

    def __init__(self, **values: str) -> None:
        self.values = {"preempted": "FALSE", "maintenance-event": "NONE", **values}
        self.headers = {"Metadata-Flavor": "Google"}

    def __call__(self, _method: str, path: str, headers: Mapping[str, str]) -> Answer:
        if headers.get("metadata-flavor") != "Google":
            return 403, self.headers, "Forbidden"
        return 200, self.headers, self.values[path.removeprefix("/computeMetadata/v1/instance/")]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({}, None),
        ({"maintenance-event": "MIGRATE_ON_HOST_MAINTENANCE"}, None),
        ({"preempted": "TRUE"}, "the VM is preempted"),
        ({"maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"}, "host maintenance ends the VM"),
    ],
)
def test_google_says_that_the_vm_is_preempted(values: dict[str, str], reason: str | None) -> None:
    with served(Google(**values)) as place:
        found = GoogleNotices(f"http://{place}").poll()
    assert found == (None if reason is None else Notice("google", reason))


def test_another_server_at_google_s_address_is_refused() -> None:
    other = Google(preempted="TRUE")
    other.headers = {}
    with served(other) as place, pytest.raises(SourceFailed, match="is not answered by"):
        GoogleNotices(f"http://{place}").poll()


def azure(*events: dict[str, Any]) -> Handle:
    def handle(_method: str, path: str, headers: Mapping[str, str]) -> Answer:
        if headers.get("metadata") != "true" or "api-version=" not in path:
            return 400, {}, '{"error": "Bad request. Required metadata header not specified"}'
        if path.startswith("/metadata/instance/compute/name"):
            return 200, {}, "vm-3"
        return 200, {}, json.dumps({"DocumentIncarnation": 1, "Events": events})

    return handle


def event(kind: str, *names: str) -> dict[str, Any]:
    return {
        "EventId": "f020ba2e",
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": names,
        "EventStatus": "Scheduled",
        "NotBefore": "Tue, 24 Nov 2026 18:29:47 GMT",
        "Description": "Host is due.",
        "EventSource": "Platform",
    }


def test_azure_says_which_events_end_this_vm() -> None:
    with served(azure(event("Preempt", "vm-1"), event("Freeze", "vm-3"))) as place:
        assert AzureNotices(f"http://{place}").poll() is None
    with served(azure(event("Freeze", "vm-3"), event("Preempt", "vm-1", "vm-3"))) as place:
        found = AzureNotices(f"http://{place}").poll()
    assert found == Notice(
        "azure", "Preempt of the VM, Host is due.", "Tue, 24 Nov 2026 18:29:47 GMT"
    )


def node(*taints: dict[str, str]) -> str:
    return json.dumps({"kind": "Node", "spec": {"unschedulable": True, "taints": taints}})


def test_a_taint_of_a_node_that_goes_is_a_notice_and_a_cordon_is_not() -> None:
    cordon = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
    assert leaving(node(cordon), "kubernetes") is None
    assert leaving('{"spec": {}}', "kubernetes") is None
    found = leaving(node(cordon, {"key": "ToBeDeletedByClusterAutoscaler", "value": "1"}), "k")
    assert found == Notice("k", "taint ToBeDeletedByClusterAutoscaler=1")
    for text in ("", "{}", '{"spec": {"taints": [1]}}'):
        with pytest.raises(SourceFailed, match="no node object"):
            leaving(text, "kubernetes")


def account(folder: Path, hosts: str = "IP:127.0.0.1") -> ssl.SSLContext:
    """Files of a service account; the context of a server with the certificate that they trust."""
    key, certificate = folder / "key.pem", folder / "ca.crt"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", "/CN=api", "-addext", f"subjectAltName={hosts}"),
            *("-keyout", key, "-out", certificate),
        ],
        check=True,
        capture_output=True,
    )
    (folder / "token").write_text("secret\n")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    return tls


def api(status: int = 200) -> Handle:
    def handle(_method: str, path: str, headers: Mapping[str, str]) -> Answer:
        if headers.get("authorization") != "Bearer secret":
            return 401, {}, "Unauthorized"
        assert path == "/api/v1/nodes/node-7"
        return status, {}, node({"key": "karpenter.sh/disrupted"})

    return handle


def kubernetes(place: str, folder: Path) -> KubernetesNotices:
    host, _, port = place.partition(":")
    variables = {
        "KUBERNETES_SERVICE_HOST": host,
        "KUBERNETES_SERVICE_PORT": port,
        "NODE_NAME": "node-7",
    }
    return KubernetesNotices(variables, folder)


def test_kubernetes_is_asked_for_the_own_node_with_the_account_of_the_pod(tmp_path: Path) -> None:
    tls = account(tmp_path)
    with served(api(), tls) as place:
        source = kubernetes(place, tmp_path)
        assert source.poll() == Notice("kubernetes", "taint karpenter.sh/disrupted")
        (tmp_path / "token").write_text("old")
        with pytest.raises(SourceFailed, match="needs the right to get this node"):
            source.poll()
    (tmp_path / "token").write_text("secret")
    with served(api(500), tls) as place, pytest.raises(SourceFailed, match="answers 500"):
        kubernetes(place, tmp_path).poll()


def test_a_server_with_another_certificate_gets_no_token(tmp_path: Path) -> None:
    seen: list[str] = []

    def handle(method: str, path: str, headers: Mapping[str, str]) -> Answer:
        seen.append(path)
        return api()(method, path, headers)

    with (
        served(handle, account(tmp_path, "DNS:elsewhere")) as place,
        pytest.raises(SourceFailed, match="certificate"),
    ):
        kubernetes(place, tmp_path).poll()
    assert not seen


def test_a_pod_without_what_the_source_needs_is_reported(tmp_path: Path) -> None:
    with pytest.raises(SourceFailed, match="NODE_NAME not set: the pod needs"):
        KubernetesNotices({"KUBERNETES_SERVICE_HOST": "h", "KUBERNETES_SERVICE_PORT": "1"}).poll()
    with pytest.raises(SourceFailed, match="no service account"):
        kubernetes("127.0.0.1:1", tmp_path).poll()


def scontrol(folder: Path, state: str, more: str = "") -> SlurmNotices:
    """A command that prints what `scontrol show node NAME -o` prints."""
    command = folder / "scontrol"
    line = f"NodeName=n7 Arch=x86_64 CPUTot=96 State={state} ThreadsPerCore=2 {more}"
    command.write_text(f'#!/bin/sh\n[ "$*" = "show node n7 -o" ] || exit 3\necho "{line}"\n')
    command.chmod(0o755)
    return SlurmNotices("n7", str(command))


@pytest.mark.parametrize("state", ["ALLOCATED", "MIXED", "IDLE*", "MIXED+CLOUD", "ALLOCATED$"])
def test_a_node_that_slurm_keeps_is_no_notice(state: str, tmp_path: Path) -> None:
    assert scontrol(tmp_path, state).poll() is None


@pytest.mark.parametrize("state", ["DRAINING", "ALLOCATED+DRAIN", "MIXED+DRAIN*", "FAILING"])
def test_a_node_that_slurm_drains_is_a_notice(state: str, tmp_path: Path) -> None:
    reason = "Reason=bad fan [root@2026-11-24T08:00:00]"
    assert scontrol(tmp_path, state, reason).poll() == Notice(
        "slurm", f"node n7 is {state}, bad fan"
    )


def test_slurm_that_cannot_be_asked_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    with pytest.raises(SourceFailed, match="not started by srun"):
        SlurmNotices().poll()
    with pytest.raises(SourceFailed, match="cannot be started"):
        SlurmNotices("n7", str(tmp_path / "none")).poll()
    source = scontrol(tmp_path, "IDLE")
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho down >&2\nexit 1\n")
    with pytest.raises(SourceFailed, match="it ended with 1: down"):
        source.poll()
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho nothing\n")
    with pytest.raises(SourceFailed, match="shows no state"):
        source.poll()


def test_a_file_and_a_command_are_notices(tmp_path: Path) -> None:
    path = tmp_path / "leave"
    source = FileNotices(str(path))
    assert source.poll() is None
    path.write_text("")
    assert source.poll() == Notice("file", f"{path} exists")
    path.write_text("a fan\nmore")
    assert source.poll() == Notice("file", "a fan")
    with pytest.raises(SourceFailed, match="cannot be read"):
        FileNotices(str(tmp_path)).poll()
    assert CommandNotices("true").poll() is None
    assert CommandNotices("echo a fan; echo more").poll() == Notice("command", "a fan")
    with pytest.raises(SourceFailed, match="it ended with 3"):
        CommandNotices("exit 3").poll()


def test_requests_do_not_follow_redirects_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nothing listens there
    with served(lambda *_: (302, {"Location": "http://127.0.0.1:9/"}, "")) as place:
        assert fetch(f"http://{place}/").status == 302
    with (
        served(lambda *_: (200, {}, "x" * (MAX_BYTES + 1))) as place,
        pytest.raises(SourceFailed, match="more than"),
    ):
        fetch(f"http://{place}/")
    with pytest.raises(SourceFailed, match="does not answer"):
        fetch("http://127.0.0.1:9/")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("aws", AwsNotices),
        ("aws-rebalance:http://127.0.0.1:1338", AwsNotices),
        ("google", GoogleNotices),
        ("azure", AzureNotices),
        ("kubernetes", KubernetesNotices),
        ("slurm:n7", SlurmNotices),
        ("file:/run/leave", FileNotices),
        ("command:test -e /run/leave", CommandNotices),
    ],
)
def test_each_source_has_a_name(text: str, kind: type) -> None:
    assert isinstance(source_of(text), kind)


@pytest.mark.parametrize("text", ["", "gcp", "file", "file:", "aws:", "kubernetes:x"])
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is no source"):
        source_of(text)


def watched(folder: Path, *sources: Any) -> tuple[list[str], NoticeWatcher]:
    left: list[str] = []
    settings = NoticesConfig(every_s=0.1)
    return left, NoticeWatcher(settings, Journal(folder), left.append, sources)


def until(holds: Callable[[], object]) -> None:
    give_up_s = time.monotonic() + 30.0
    while not holds():
        assert time.monotonic() < give_up_s
        time.sleep(0.01)


def journal(folder: Path) -> list[dict[str, Any]]:
    path = folder / "journal.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Failing:
    """Fails twice, answers once, and fails again."""

    name, every_s = "failing", 0.0

    def __init__(self) -> None:
        self.asked = 0

    def poll(self) -> None:
        self.asked += 1
        if self.asked in (1, 2, 4, 5):
            raise SourceFailed("no route") if self.asked < 5 else ValueError("odd")


def test_the_first_notice_has_the_node_leave_once(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    left, watcher = watched(tmp_path, FileNotices(str(one)), FileNotices(str(two)))
    watcher.start()
    for path in (one, two):
        (tmp_path / "written").write_text("a fan")
        (tmp_path / "written").rename(path)
    until(lambda: left)
    time.sleep(0.3)
    watcher.close()
    assert left == ["notice of file: a fan"]


def test_a_source_that_fails_is_reported_once_until_it_answers(tmp_path: Path) -> None:
    source = Failing()
    left, watcher = watched(tmp_path, source)
    watcher.start()
    until(lambda: source.asked > 6)
    watcher.close()
    lines = [one for one in journal(tmp_path) if one["kind"] == "notice_source_failed"]
    assert [one["reason"] for one in lines] == ["no route", "no route"]
    assert not left


def test_the_first_sigterm_after_a_notice_is_the_end_of_the_machine(tmp_path: Path) -> None:
    """The second one stops the run, as without a notice."""
    nodes = NodesSpec(
        min_nodes=2, max_nodes=2, endpoint_host="127.0.0.1", endpoint_port=29400, node_id="a"
    )
    spec = RunSpec(run_id="r", script="s", torchrun_argv=[], log_folder=".", cwd=".", nodes=nodes)
    workers = SimpleNamespace(progress=lambda: Progress(Step(0), 0, False))
    signals = RunSignals(spec, journal=Journal(tmp_path), workers=workers)
    signals.ask_leave("notice of file: a fan")
    signals.ask_leave("ftrun drain")
    signals.handle()
    assert (signals.leaves, signals.stops) == (True, 0)
    asked = [line["by"] for line in journal(tmp_path) if line["kind"] == "leave_requested"]
    assert asked == ["notice of file: a fan"]
    signals._note(signal.SIGTERM, None)
    signals.handle()
    assert signals.stops == 0
    time.sleep(SAME_SIGNAL_S)
    signals._note(signal.SIGTERM, None)
    signals.handle()
    assert signals.stops == 1
    for end in (signals._wake_read, signals._wake_write):
        end.close()
