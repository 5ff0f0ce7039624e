"""The flight recorder of a stopped process, read from its memory, equals torch's own dump."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ftrun.agent.launch.process import ChildProcess
from ftrun.agent.launch.warm_start import LaunchSlot, WorkerHandle
from ftrun.agent.observe import recorder_memory
from ftrun.agent.observe.ranks import Sampler
from ftrun.agent.observe.recorder_memory import read_stopped
from ftrun.ids import Generation, Rank
from ftrun.monitor.flight_recorder import last_call_text, parse_trace
from ftrun.wire.messages.worker import LaunchRequest
from ftrun.wire.shared_memory.pages import SharedPage, create_page

CALLS = """
import os, sys, torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace_json
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
other = dist.new_group([0], group_desc="a group whose description is longer than fifteen bytes")
while True:
    dist.all_reduce(torch.ones(2, 3))
    dist.all_gather_into_tensor(torch.ones(2, 2, 2, 2, 2), torch.ones(2, 2, 2, 2, 2), group=other)
    dist.broadcast(torch.tensor(1.0), 0)
    trace = _dump_fr_trace_json(includeCollectives=True, onlyActive=False)
    print(trace if isinstance(trace, str) else trace.decode(), flush=True)
    os.kill(os.getpid(), 19)
"""
HAS_LAYOUT = torch.__version__.startswith("2.13")
SIZE, ROUNDS = 8, 5


def test_it_equals_the_dump_of_torch_before_and_after_the_ring_is_full(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", CALLS, tmp_path],
        stdout=subprocess.PIPE,
        env={**os.environ, "TORCH_FR_BUFFER_SIZE": str(SIZE), "OMP_NUM_THREADS": "1"},
    )
    try:
        for number in range(1, ROUNDS + 1):
            check_equal(process, number)
            process.send_signal(signal.SIGCONT)
    finally:
        process.kill()
        process.communicate()


def check_equal(process: "subprocess.Popen[bytes]", number: int) -> None:
    """Waits until the process has stopped after this number of rounds."""
    assert process.stdout is not None
    expected = parse_trace(process.stdout.readline())
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    found = read_stopped(process.pid)
    assert expected is not None
    assert len(expected.entries) == min(SIZE, 3 * number)
    if found is None:
        assert not HAS_LAYOUT
        return
    assert [one.op_id for one in found.entries] == [one.op_id for one in expected.entries]
    assert found.entries == expected.entries
    now_ns = found.entries[-1].time_created_ns + 2e9
    assert last_call_text(found, now_ns=now_ns) == (
        f"broadcast #{2 * number} of the default group, which it entered 2.0 s ago and has left"
    )


def test_a_process_without_torch_and_one_that_has_ended_give_none() -> None:
    process = subprocess.Popen(["sleep", "100"])
    try:
        assert read_stopped(process.pid) is None
    finally:
        process.kill()
        process.wait()
    assert read_stopped(process.pid) is None


def test_without_its_memory_a_stopped_rank_has_the_collective_of_its_last_sample() -> None:
    process = subprocess.Popen(["sleep", "100"])
    try:
        child = ChildProcess(process.pid, "rank 1")
        request = LaunchRequest(Generation(0), Rank(1), 2, os.getpid(), "")
        slot = LaunchSlot(request, SharedPage(create_page("rank-1")))
        handle = WorkerHandle(0, child, slot, "warm")
        sampler = Sampler()
        assert sampler.last_call(handle) == ""
        sampler._reported = {(slot.rank, "0"): 1057, (slot.rank + 1, "0"): 2000}
        assert sampler.last_call(handle) == "its last sample has collective #1,057 of group 0"
    finally:
        process.kill()
        process.wait()


def test_a_library_without_a_symbol_table_gives_an_error(tmp_path: Path) -> None:
    path = tmp_path / "stripped.so"
    path.write_bytes(Path(sys.executable).resolve().read_bytes())
    with pytest.raises(ValueError, match="has no symbol table"):
        recorder_memory._offset(str(path))
