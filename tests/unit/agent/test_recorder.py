"""Requests to the recorders of a rank: only safe ones, each with a deadline."""

import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from typing import Any

import pytest

from ftrun.agent.observe.recorder import RecorderReader
from ftrun.monitor.page_values import Backends, encode_backends
from ftrun.wire.shared_memory.pages import HeartbeatField, SharedPage, create_page

NCCL = "dump_nccl_trace_json"
OPEN = {
    "pg_id": 3, "process_group": ["0", "default_pg"], "collective_seq_id": 8, "is_p2p": False,
    "profiling_name": "nccl:all_reduce", "time_created_ns": 1, "retired": False,
    "state": "scheduled", "input_sizes": [[4]],
}  # fmt: skip
STATUS = {
    "3": {
        "last_enqueued_collective": "9",
        "last_started_collective": "-1",
        "last_completed_collective": "6",
    }
}
GLOO = {"entries": [{**OPEN, "pg_id": 0, "profiling_name": "gloo:barrier"}]}


class TorchServer(ThreadingUnixStreamServer):
    """The server of a rank, with the handlers of a torch for CUDA."""

    daemon_threads = True

    def __init__(self, path: Path) -> None:
        self.asked: list[str] = []
        self.seen_reading: list[bool] = []
        self.page = SharedPage(create_page("test"))
        self.hangs = threading.Event()
        self.names = ["ping", "fr_trace_json", NCCL, "dump_nccl_trace_pickle"]
        super().__init__(str(path), _Handler)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, request: str) -> bytes:
        self.asked.append(request)
        self.seen_reading.append(bool(self.page.get(HeartbeatField.READING_NS)))
        name, _, parameters = request.partition("?")
        if not name:
            return json.dumps(self.names).encode()
        if name == "ping":
            return b"pong"
        if self.hangs.is_set():
            threading.Event().wait(5.0)
        found: dict[str, Any] = {"pg_status": STATUS, "entries": [OPEN]}
        if name == "fr_trace_json" and not parameters:
            found = GLOO
        elif "includecollectives=false" in parameters:
            del found["entries"]
        return json.dumps(found).encode()


class _Handler(BaseHTTPRequestHandler):
    server: TorchServer

    def do_POST(self) -> None:
        answer = self.server.answer(self.path.removeprefix("/handler/"))
        with suppress(OSError):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer)

    do_GET = do_POST  # noqa: N815 - the name that the server calls

    def address_string(self) -> str:
        return "the agent"

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank.sock"


@pytest.fixture
def torch_server(path: Path) -> Iterator[TorchServer]:
    server = TorchServer(path)
    page = server.page
    page.set(HeartbeatField.HAS_SERVER, 1)
    page.groups = "0=0,1"
    use(server, {"cuda": "nccl"})
    page.note_capture(is_in_progress=False)
    yield server
    server.shutdown()
    server.server_close()


def use(server: TorchServer, by_device: dict[str, str]) -> None:
    server.page.backends = encode_backends(Backends(by_device, (3,)), 800)


def test_open_entries_are_read_while_no_graph_is_captured(
    torch_server: TorchServer, path: Path
) -> None:
    reader = RecorderReader(str(path))
    found = reader.read(torch_server.page)
    reader.read(torch_server.page)
    assert torch_server.asked == ["", f"{NCCL}?onlyactive=true", f"{NCCL}?onlyactive=true"]
    assert torch_server.seen_reading == [False, True, True]
    assert torch_server.page.get(HeartbeatField.READING_NS) == 0
    (group,) = found.groups
    assert (group.waits_seq, group.entered, group.ranks) == (8, 9, (0, 1))
    assert (group.is_on_device, found.is_complete, found.notes) == (True, True, ())


@pytest.mark.parametrize("is_observed", [True, False])
def test_only_counts_are_read_while_a_graph_may_be_captured(
    torch_server: TorchServer, path: Path, is_observed: bool
) -> None:
    if is_observed:
        torch_server.page.note_capture(is_in_progress=True)
    else:
        torch_server.page.set(HeartbeatField.CAPTURES, 0)
    found = RecorderReader(str(path)).read(torch_server.page)
    assert torch_server.asked == ["", f"{NCCL}?includecollectives=false"]
    (group,) = found.groups
    assert (group.waits_seq, group.entered, group.calls) == (7, 9, ())
    assert not found.is_complete
    assert found.notes == (
        "only counts of its collectives were read, because a graph may be captured",
    )


def test_after_a_dump_without_an_answer_only_ping_is_sent(
    torch_server: TorchServer, path: Path
) -> None:
    torch_server.hangs.set()
    reader = RecorderReader(str(path))
    note = "its flight recorder does not answer: the driver of its device may hang"
    assert reader.read(torch_server.page, deadline_s=0.3).notes == (note,)
    assert torch_server.page.get(HeartbeatField.READING_NS) == 0
    torch_server.asked.clear()
    assert reader.read(torch_server.page, deadline_s=0.3).notes == (note,)
    assert torch_server.asked == ["ping"]
    torch_server.shutdown()
    torch_server.server_close()
    path.unlink()
    assert reader.read(torch_server.page, deadline_s=0.3).notes == (
        "its flight recorder and its server do not answer",
    )


def test_other_backends_are_asked_by_name(torch_server: TorchServer, path: Path) -> None:
    use(torch_server, {"cuda": "nccl*"})
    torch_server.page.note_capture(is_in_progress=True)
    found = RecorderReader(str(path)).read(torch_server.page)
    assert torch_server.asked == ["fr_trace_json?backend=nccl"]
    assert [group.waits_seq for group in found.groups] == [8]
    assert found.is_complete


def test_both_recorders_of_a_mixed_group_are_read(torch_server: TorchServer, path: Path) -> None:
    use(torch_server, {"cpu": "gloo", "cuda": "nccl"})
    found = RecorderReader(str(path)).read(torch_server.page)
    assert [(one.name, one.is_on_device) for one in found.groups] == [
        ("0", True),
        ("0 gloo", False),
    ]


def test_a_torch_without_the_handler(torch_server: TorchServer, path: Path) -> None:
    torch_server.names = ["ping"]
    found = RecorderReader(str(path)).read(torch_server.page)
    assert found.groups == ()
    assert found.notes == ("this version of torch has no handler for its flight recorder",)


def test_graphs_hide_their_collectives(torch_server: TorchServer, path: Path) -> None:
    torch_server.page.set(HeartbeatField.REPLAYS, 5)
    torch_server.page.note_capture(is_in_progress=True)
    found = RecorderReader(str(path)).read(torch_server.page)
    assert "collectives captured in a graph are not recorded" in found.notes


def test_a_rank_without_a_server_or_that_has_ended(tmp_path: Path) -> None:
    page = SharedPage(create_page("test"))
    reader = RecorderReader(str(tmp_path / "none"))
    assert reader.read(page).groups == ()
    page.set(HeartbeatField.HAS_SERVER, 1)
    assert reader.read(page).groups == ()
    page.backends = "cuda:nccl*"
    assert reader.read(page).notes == ()
    page.backends = "cuda:nccl"
    assert reader.read(page).notes == ("its server does not answer",)
