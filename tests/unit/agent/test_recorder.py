"""Requests to the recorders of a rank: only safe ones, each with a deadline."""

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from launch_requests import launch_request
from msgspec.structs import replace
from unit.monitor.nccl_world import Fault, groups_of, play, traces
from unit.monitor.ranks import view

from ftrun import clock
from ftrun.agent.launch.process import ChildProcess
from ftrun.agent.launch.warm_start import LaunchSlot, WorkerHandle
from ftrun.agent.observe import recorder
from ftrun.agent.observe.recorder import RecorderReader, may_query_device
from ftrun.agent.observe.recorder_dumps import PIPE, write_dumps
from ftrun.config.profile import HangConfig
from ftrun.ids import Rank
from ftrun.monitor.hang_detector import find_hang
from ftrun.monitor.page_values import Backends, encode_backends, encode_groups
from ftrun.monitor.verdicts import VerdictKind
from ftrun.wire.shared_memory.pages import HeartbeatField, SharedPage, create_page

SERVER = Path(__file__).parents[2] / "recorder_server.py"
NCCL = "dump_nccl_trace_json"
PICKLE = "dump_nccl_trace_pickle?includestacktraces=false"
OPEN: dict[str, Any] = {
    "pg_id": 3, "process_group": ["0", "default_pg"], "collective_seq_id": 8, "is_p2p": False,
    "profiling_name": "nccl:all_reduce", "time_created_ns": 1, "retired": False,
    "state": "scheduled", "input_sizes": [[4]], "time_discovered_started_ns": 0,
}  # fmt: skip
TRACE = {
    "version": "2.10",
    "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
    "pg_status": {
        "3": {
            "last_enqueued_collective": "9",
            "last_started_collective": "-1",
            "last_completed_collective": "6",
        }
    },
    "entries": [{**OPEN, "collective_seq_id": 7, "state": "completed", "retired": True}, OPEN],
}
HANGS = "its flight recorder does not answer: the driver of its device may hang"


class Ranks:
    """Ranks with torch's server, in a process of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pages: list[SharedPage] = []
        self.fds: list[int] = []
        self._about: list[dict[str, Any]] = []
        self.set_mode("")

    def add(
        self,
        trace: Mapping[str, Any],
        *,
        torch: str = "2.13",
        backends: Mapping[str, str],
        groups: Mapping[str, Sequence[int]],
        ids: tuple[int, ...],
    ) -> None:
        fd = create_page("test")
        page = SharedPage(fd)
        page.set(HeartbeatField.HAS_SERVER, 1)
        page.groups = encode_groups(groups, 4094)
        page.backends = encode_backends(Backends(backends, ids), 800)
        page.note_capture(is_in_progress=False)
        backend = next((one for one in backends.values() if one != "gloo"), "gloo")
        path = str(self.folder / f"{len(self.pages)}.sock")
        self._about.append({
            "socket": path, "page": fd, "torch": torch, "backend": backend.removesuffix("*"),
            "trace": trace,
        })  # fmt: skip
        self.fds.append(fd)
        self.pages.append(page)

    def set_mode(self, mode: str) -> None:
        new = self.folder / "mode.new"
        new.write_text(mode)
        new.rename(self.folder / "mode")

    @contextmanager
    def running(self) -> Iterator["Ranks"]:
        (self.folder / "ranks.json").write_text(json.dumps(self._about))
        with subprocess.Popen(
            [sys.executable, str(SERVER), str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=self.fds,
        ) as self.process:
            assert self.process.stdout is not None
            assert self.process.stdout.readline() == b"ready\n"
            try:
                yield self
            finally:
                self.process.kill()

    def reader(self, rank: int = 0) -> RecorderReader:
        return RecorderReader(self._about[rank]["socket"])

    def asked(self) -> list[str]:
        """Requests so far; removes them."""
        path = self.folder / "asked"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("")
        for request, is_reading, may_capture in lines:
            queries = request.startswith("dump_nccl") and "includecollectives" not in request
            assert is_reading or not queries
            assert not (queries and may_capture), "this request breaks a capture"
        return [request for request, _, _ in lines]


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return Ranks(tmp_path)


def one_rank(
    ranks: Ranks,
    backends: Mapping[str, str] = {"cuda": "nccl"},
    trace: Mapping[str, Any] = TRACE,
    **changes: Any,
) -> SharedPage:
    ranks.add(trace, backends=backends, groups={"0": (0, 1)}, ids=(3,), **changes)
    return ranks.pages[0]


def test_open_entries_are_read_while_no_graph_is_captured(ranks: Ranks) -> None:
    page = one_rank(ranks)
    with ranks.running():
        reader = ranks.reader()
        found = reader.read(page)
        reader.read(page)
        assert ranks.asked() == ["", NCCL, NCCL]
        assert page.get(HeartbeatField.READING_NS) == 0
        (group,) = found.groups
        assert (group.waits_seq, group.entered, group.ranks) == (8, 9, (0, 1))
        assert (group.is_on_device, found.is_complete, found.notes) == (True, True, ())


@pytest.mark.parametrize("is_observed", [True, False])
def test_only_counts_are_read_while_a_graph_may_be_captured(
    ranks: Ranks, is_observed: bool
) -> None:
    page = one_rank(ranks)
    if is_observed:
        page.note_capture(is_in_progress=True)
    else:
        page.set(HeartbeatField.CAPTURES, 0)
    with ranks.running():
        found = ranks.reader().read(page)
        assert ranks.asked() == ["", f"{NCCL}?includecollectives=false"]
        assert ranks.reader().dump(page) is None
        assert ranks.asked() == []
    (group,) = found.groups
    assert (group.waits_seq, group.entered, group.calls) == (7, 9, ())
    assert not found.is_complete
    assert found.notes == (
        "only counts of its collectives were read, because a graph may be captured",
    )


def test_after_a_dump_without_an_answer_only_ping_is_sent(ranks: Ranks) -> None:
    page = one_rank(ranks)
    with ranks.running():
        ranks.set_mode("hang")
        reader = ranks.reader()
        assert reader.read(page, deadline_s=5.0).notes == (HANGS,)
        assert page.get(HeartbeatField.READING_NS) > 0, "the dump may still query events"
        ranks.asked()
        page.set(HeartbeatField.READING_NS, 0)
        assert reader.read(page, deadline_s=30.0).notes == (HANGS,)
        assert reader.dump(page) is None
        assert ranks.asked() == ["ping"]
        ranks.process.kill()
        ranks.process.wait()
        assert reader.read(page).notes == ("its server does not answer",)


def test_a_rank_that_does_not_answer_at_all_is_asked_again(ranks: Ranks) -> None:
    """It was suspended, or starved: that says nothing about its driver."""
    page = one_rank(ranks)
    with ranks.running():
        reader = ranks.reader()
        assert reader.read(page, deadline_s=30.0).groups
        ranks.set_mode("silent")
        assert reader.read(page, deadline_s=0.2).notes == ("its server does not answer",)
        ranks.set_mode("")
        found = reader.read(page, deadline_s=30.0)
        assert (len(found.groups), found.notes) == (1, ())


@pytest.mark.parametrize("mode", ["torn", "odd", "error", "slow"])
def test_an_answer_that_is_not_whole_is_not_used(ranks: Ranks, mode: str) -> None:
    page = one_rank(ranks)
    with ranks.running():
        ranks.set_mode(mode)
        reader, began_s = ranks.reader(), clock.now_s()
        found = reader.read(page, deadline_s=2.0)
        assert found.groups == ()
        dump = reader.dump(page)
        assert dump is None or mode == "odd"
        assert clock.now_s() - began_s < 60.0
        assert mode == "slow" or page.get(HeartbeatField.READING_NS) == 0
    assert found.is_complete == (mode in ("torn", "slow")), "a rank that ends has entered nothing"


def test_a_dump_is_whole_or_has_active_entries_only(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "RECORDER_S", 60.0)
    page = one_rank(ranks)
    with ranks.running():
        whole = ranks.reader().dump(page)
        assert whole is not None
        assert len(pickle.loads(whole)["entries"]) == 2
        assert ranks.asked() == [PICKLE]
        ranks.set_mode("large")
        active = ranks.reader().dump(page)
        assert active is not None
        assert [one["collective_seq_id"] for one in pickle.loads(active)["entries"]] == [8]
        assert ranks.asked() == [PICKLE, f"{PICKLE}&onlyactive=true"]
        assert page.get(HeartbeatField.READING_NS) == 0


def handle_of(ranks: Ranks) -> WorkerHandle:
    request = launch_request(rank=Rank(0), rank_socket=str(ranks.folder / "0.sock"))
    child = ChildProcess(ranks.process.pid, "rank 0")
    return WorkerHandle(0, child, LaunchSlot(request, ranks.pages[0]), "fresh")


def test_a_stopped_rank_is_not_asked_for_a_dump(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it continues, its recorder is read as before."""
    monkeypatch.setattr(recorder, "RECORDER_S", 60.0)
    one_rank(ranks)
    with ranks.running():
        asked = [(handle_of(ranks), ranks.reader())]
        ranks.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, ranks.process.pid, os.WSTOPPED)
        assert write_dumps(tmp_path / "fr", asked) == 0
        ranks.process.send_signal(signal.SIGCONT)
        assert write_dumps(tmp_path / "fr", asked) == 1
        assert ranks.asked() == [PICKLE]
    assert [path.name for path in (tmp_path / "fr").iterdir()] == ["rank_0"]


def test_a_rank_without_a_server_dumps_by_its_pipe_while_no_graph_is_captured(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PIPE, raising=False)
    page = one_rank(ranks)
    page.set(HeartbeatField.HAS_SERVER, 0)
    os.mkfifo(tmp_path / "recorder_0.pipe")
    pipe = os.open(tmp_path / "recorder_0.pipe", os.O_RDONLY | os.O_NONBLOCK)
    with ranks.running():
        asked = [(handle_of(ranks), ranks.reader())]
        page.note_capture(is_in_progress=True)
        assert write_dumps(tmp_path / "fr", asked) == 0
        assert os.read(pipe, 8) == b""
        page.note_capture(is_in_progress=False)
        assert write_dumps(tmp_path / "fr", asked) == 0
        assert os.read(pipe, 8) == b"1"
        assert page.get(HeartbeatField.READING_NS) > clock.now_ns()
    os.close(pipe)


def test_a_collective_that_has_timed_out_is_not_over(ranks: Ranks) -> None:
    """NCCL's watchdog counts it as completed, and retires it."""
    out = {**OPEN, "collective_seq_id": 7, "retired": True}
    page = one_rank(ranks, trace={**TRACE, "entries": [out, OPEN]})
    with ranks.running():
        (group,) = ranks.reader().read(page).groups
    assert group.waits_seq == 7


def test_other_backends_are_asked_by_name(ranks: Ranks) -> None:
    page = one_rank(ranks, {"cuda": "nccl*"}, torch="2.15")
    page.note_capture(is_in_progress=True)
    with ranks.running():
        found = ranks.reader().read(page)
        assert ranks.asked() == ["fr_trace_json?backend=nccl"]
    assert [group.waits_seq for group in found.groups] == [8]
    assert found.is_complete


def test_both_recorders_of_a_mixed_group_are_read(ranks: Ranks) -> None:
    page = one_rank(ranks, {"cpu": "gloo", "cuda": "nccl*"}, torch="2.15")
    with ranks.running():
        found = ranks.reader().read(page)
        assert ranks.asked() == ["fr_trace_json?backend=nccl", "", "fr_trace_json"]
    assert [(one.name, one.is_on_device) for one in found.groups] == [("0", True)]


def test_a_torch_without_the_handler(ranks: Ranks) -> None:
    page = one_rank(ranks, {"cpu": "gloo"}, torch="2.9")
    page.backends = "cuda:nccl"
    with ranks.running():
        found = ranks.reader().read(page)
        assert found.groups == ()
        assert found.notes == ("this version of torch has no handler for its flight recorder",)
        page.backends = "cpu:gloo"
        assert ranks.reader().read(page).groups == ()


def test_graphs_hide_their_collectives(ranks: Ranks) -> None:
    page = one_rank(ranks, trace={**TRACE, "entries": TRACE["entries"][:1]})  # type: ignore[index]
    with ranks.running():
        assert ranks.reader().read(page).notes == ()
        page.set(HeartbeatField.REPLAYS, 5)
        notes = ranks.reader().read(page).notes
    assert notes == ("collectives captured in a graph are not recorded",)


def test_a_capture_that_begins_after_the_check_waits_for_the_answer(ranks: Ranks) -> None:
    page = one_rank(ranks)
    assert may_query_device(page, 1.0)
    assert page.get(HeartbeatField.READING_NS) > clock.now_ns()
    page.note_capture(is_in_progress=True)
    assert not may_query_device(page, 1.0)


def test_a_rank_without_a_server_or_that_has_ended(tmp_path: Path) -> None:
    page = SharedPage(create_page("test"))
    reader = RecorderReader(str(tmp_path / "none"))
    assert reader.read(page).groups == ()
    assert reader.dump(page) is None
    page.set(HeartbeatField.HAS_SERVER, 1)
    assert reader.read(page).groups == ()
    page.backends = "cuda:nccl*"
    assert reader.read(page).notes == ()
    page.backends = "cuda:nccl"
    assert reader.read(page).notes == ()
    assert reader.dump(page) is None


@pytest.mark.parametrize(
    ("torch", "backend"),
    [("2.8", "nccl"), ("2.13", "nccl"), ("2.15", "nccl"), ("2.15", "nccl*")],
)
@pytest.mark.parametrize("is_of_device", [True, False])
def test_culprits_of_sixteen_ranks_are_named_from_their_servers(
    ranks: Ranks, torch: str, backend: str, is_of_device: bool
) -> None:
    faults = dict.fromkeys((9, 14), Fault(40 if is_of_device else 32, is_of_device=is_of_device))
    for rank, trace in traces(play(6, faults), faults).items():
        groups = {name: members for name, (_, members) in groups_of(rank).items()}
        ids = tuple(int(one) for one in trace["pg_status"])
        own = trace if backend == "nccl" else {**trace, "pg_status": {}}
        ranks.add(own, torch=torch, backends={"cuda": backend}, groups=groups, ids=ids)
    with ranks.running():
        views = {}
        for rank, page in enumerate(ranks.pages):
            found = ranks.reader(rank).read(page, deadline_s=60.0)
            assert (found.is_complete, found.notes) == (True, ())
            still = tuple(replace(one, still_s=6.0) for one in found.groups)
            views[rank] = view(rank, groups=still)
        ranks.asked()
    verdict = find_hang(views, dict.fromkeys(views, "node0"), HangConfig(), limit_s=8.5)
    assert verdict is not None
    kind = VerdictKind.DEVICE_STUCK if is_of_device else VerdictKind.HANG_IN_COMPUTATION
    assert (verdict.kind, verdict.culprits) == (kind, (9, 14))
