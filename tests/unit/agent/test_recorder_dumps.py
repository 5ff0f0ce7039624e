"""Dumps that torch's own analyzer reads."""

import importlib.util
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ftrun.agent.launch.process import ChildProcess
from ftrun.agent.launch.warm_start import LaunchSlot, WorkerHandle
from ftrun.agent.observe import recorder_dumps
from ftrun.agent.observe.evidence import BoundedReads
from ftrun.agent.observe.recorder import RecorderReader
from ftrun.agent.observe.recorder_dumps import (
    DumpWriter,
    RankAnswer,
    as_pickle,
    ask_by_pipe,
    has_nccl_devices,
    recorder_variables,
)
from ftrun.ids import Generation, Rank
from ftrun.wire.shared_memory.pages import SharedPage, create_page
from tests.launch_requests import launch_request

ENTRY = {
    "record_id": 0, "pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": 1,
    "p2p_seq_id": 0, "op_id": 1, "profiling_name": "gloo:all_reduce", "time_created_ns": 5,
    "input_sizes": [[4]], "input_dtypes": ["Float"], "output_sizes": [[4]],
    "output_dtypes": ["Float"], "state": "scheduled", "retired": False, "timeout_ms": 1800000,
    "is_p2p": False, "time_discovered_started_ns": 0, "time_discovered_completed_ns": 0,
}  # fmt: skip
ANALYZER = "from torch.distributed.flight_recorder.fr_trace import main; main()"


def dumped(**changes: Any) -> bytes:
    config = {"": {"name": "", "desc": "", "ranks": "[]"}}  # as torch gives it for gloo
    return json.dumps({"version": "2.10", "pg_config": config, "pg_status": {}} | changes).encode()


@pytest.mark.skipif(
    importlib.util.find_spec("torch.distributed.flight_recorder") is None,
    reason="needs torch 2.10",
)
def test_the_analyzer_of_torch_names_the_rank_that_is_missing(tmp_path: Path) -> None:
    for rank, entries in ((0, [ENTRY]), (1, [])):
        (tmp_path / f"rank_{rank}").write_bytes(as_pickle(dumped(entries=entries), "0=0,1"))
    done = subprocess.run(
        [sys.executable, "-c", ANALYZER, str(tmp_path), "-p", "rank_"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "missing ranks: {1}" in done.stdout + done.stderr


def test_the_groups_of_gloo_are_those_of_the_page() -> None:
    found = pickle.loads(as_pickle(dumped(entries=[ENTRY]), "0=0,1 7=1"))
    assert found["entries"] == [ENTRY]
    assert {name: one["ranks"] for name, one in found["pg_config"].items()} == {
        "0": "[0, 1]",
        "7": "[1]",
    }
    assert found["pg_config"]["0"]["desc"] == "0"


def test_a_known_group_and_a_pickle_stay_as_they_are() -> None:
    own = {"3": {"name": "3", "desc": "tp", "ranks": "[0]"}}
    assert pickle.loads(as_pickle(dumped(pg_config=own), "0=0"))["pg_config"] == own
    whole = pickle.dumps({"entries": []}, protocol=2)
    assert as_pickle(whole, "0=0") is whole
    assert pickle.loads(as_pickle(dumped(pg_config=None), "0=0"))["pg_config"].keys() == {"0"}
    for wrong in (b"[]", b"not json"):
        with pytest.raises(ValueError, match=r"no dump|Expecting value"):
            as_pickle(wrong, "")


def test_of_ended_generations_the_last_dumps_stay_and_nothing_else(tmp_path: Path) -> None:
    recorder_dumps.remove_old_dumps(tmp_path / "missing", 3)
    for number in range(60):
        folder = tmp_path / str(number)
        folder.mkdir()
        if number % 2:
            (folder / "rank_0").write_bytes(b"x")
            (folder / ".rank_1").write_bytes(b"torn")
    (tmp_path / "1" / "own").write_text("not a dump")
    (tmp_path / "notes").mkdir()
    recorder_dumps.remove_old_dumps(tmp_path, 58)
    left = sorted(int(one.name) for one in tmp_path.glob("[0-9]*"))
    assert left == [1, *range(19, 58, 2), 58, 59]
    assert os.listdir(tmp_path / "1") == ["own"], "a file of the user stays, with its folder"
    assert (tmp_path / "57" / "rank_0").exists()
    assert (tmp_path / "notes").exists()


def test_after_a_failure_the_answers_are_written_once_and_not_over_those_of_a_hang(
    tmp_path: Path,
) -> None:
    writer = DumpWriter(tmp_path, BoundedReads())
    whole = RankAnswer(0, dumped(entries=[ENTRY]), "0=0,1", 7e8)
    answers = [whole, RankAnswer(1, b"", "0=0,1", 7e8)]
    writer.keep(3, answers)
    assert not any(tmp_path.iterdir()), "the main thread does not wait for a file"
    writer.write_kept()
    assert os.listdir(tmp_path / "3") == ["rank_0"], "rank 1 has said nothing"
    assert (tmp_path / "3" / "rank_0").stat().st_mtime == 7e8, "its incident may be over by now"
    writer.keep(4, answers)
    writer.write_kept()
    assert (tmp_path / "4" / "rank_0").exists()
    writer.write([(handle(generation=5), RecorderReader(""))])
    writer.keep(5, answers)
    writer.write_kept()
    assert not (tmp_path / "5").exists(), "the dumps of the hang stay as they are"
    writer.reset()
    writer.keep(5, answers)
    writer.write_kept()
    assert (tmp_path / "5" / "rank_0").exists()


def handle(*, generation: int) -> WorkerHandle:
    """Of a rank that has ended."""
    request = launch_request(rank=Rank(0), generation=Generation(generation))
    child = ChildProcess(os.getpid(), "rank 0")
    child.status = 1
    return WorkerHandle(0, child, LaunchSlot(request, SharedPage(create_page("page"))), "fresh")


def test_one_byte_into_the_pipe(tmp_path: Path) -> None:
    prefix = str(tmp_path / "recorder_")
    assert not ask_by_pipe(prefix, 3)
    os.mkfifo(f"{prefix}3.pipe")
    assert not ask_by_pipe(prefix, 3)  # without a reader
    reader = os.open(f"{prefix}3.pipe", os.O_RDONLY | os.O_NONBLOCK)
    assert ask_by_pipe(prefix, 3)
    assert os.read(reader, 8) == b"1"
    os.close(reader)


def test_variables_that_the_user_has_set_stay(tmp_path: Path) -> None:
    def given(user: dict[str, str], *, has_devices: bool) -> dict[str, str]:
        dumps, pipes = tmp_path / "fr" / "0", Path("/run/x")
        return recorder_variables(user, dumps=dumps, pipes=pipes, has_devices=has_devices)

    assert given({}, has_devices=False) == {"TORCH_FR_BUFFER_SIZE": "128"}
    assert not (tmp_path / "fr").exists()
    assert given({"TORCH_NCCL_TRACE_BUFFER_SIZE": "9"}, has_devices=False) == {}
    assert given({"TORCH_FR_BUFFER_SIZE": "9"}, has_devices=False) == {}
    file = f"{tmp_path}/fr/0/rank_"
    assert given({}, has_devices=True) == {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": file,
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": file,
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "/run/x/recorder_",
    }
    assert (tmp_path / "fr" / "0").is_dir()
    user = {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "9",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "mine",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "mine",
    }
    assert given(user, has_devices=True) == {}


def test_devices_are_found_by_their_files(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    assert not has_nccl_devices(tmp_path)
    (tmp_path / "dev" / "nvidia0").touch()
    assert has_nccl_devices(tmp_path)
