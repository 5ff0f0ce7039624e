"""The newest call of a stopped process, read from its memory, equals that of torch's own dump."""

import functools
import os
import platform
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import torch

from ftrun.agent.launch.process import ChildProcess
from ftrun.agent.launch.warm_start import LaunchSlot, WorkerHandle
from ftrun.agent.observe import recorder_memory
from ftrun.agent.observe.ranks import Sampler
from ftrun.agent.observe.recorder_memory import newest_call
from ftrun.ids import Generation, Rank
from ftrun.monitor.flight_recorder import call_text, parse_trace
from ftrun.wire.messages.worker import LaunchRequest
from ftrun.wire.shared_memory.pages import SharedPage, create_page

CALLS = """
import os, sys, torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace_json
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
other = dist.new_group([0], group_desc="a group whose description is longer than fifteen bytes")

def stop():
    trace = _dump_fr_trace_json(includeCollectives=True, onlyActive=False)
    print(trace if isinstance(trace, str) else trace.decode(), flush=True)
    os.kill(os.getpid(), 19)

stop()
while True:
    dist.all_reduce(torch.ones(2, 3))
    stop()
    dist.all_gather_into_tensor(torch.ones(2, 2, 2, 2, 2), torch.ones(2, 2, 2, 2, 2), group=other)
    stop()
    dist.broadcast(torch.tensor(1.0), 0)
    stop()
"""
HAS_LAYOUT = torch.__version__.startswith("2.13")
SIZE, CALLS_MADE = 8, 3 * 5
needs_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="needs x86-64")


@needs_x86
def test_it_equals_the_dump_of_torch_before_and_after_the_ring_is_full(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", CALLS, tmp_path],
        stdout=subprocess.PIPE,
        env={**os.environ, "TORCH_FR_BUFFER_SIZE": str(SIZE), "OMP_NUM_THREADS": "1"},
    )
    try:
        for number in range(CALLS_MADE + 1):
            check_equal(process, number)
            process.send_signal(signal.SIGCONT)
    finally:
        process.kill()
        process.communicate()


def check_equal(process: "subprocess.Popen[bytes]", number: int) -> None:
    """Waits until the process has stopped after this number of calls."""
    assert process.stdout is not None
    expected = parse_trace(process.stdout.readline())
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    found = newest_call(process.pid)
    assert expected is not None
    assert len(expected.entries) == min(SIZE, number)
    if not HAS_LAYOUT or not number:
        assert found is None
        return
    assert found == msgspec.structs.replace(expected.entries[-1], input_sizes=[])
    if number % 3 == 0:
        assert call_text(found, now_ns=found.time_created_ns + 2e9) == (
            f"broadcast #{2 * number // 3} of the default group, which it had entered 2.0 s before "
            "it was read, and had left"
        )


def test_a_process_without_torch_and_one_that_has_ended_give_none() -> None:
    process = subprocess.Popen(["sleep", "100"])
    try:
        assert newest_call(process.pid) is None
    finally:
        process.kill()
        process.wait()
    assert newest_call(process.pid) is None


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


def library(folder: Path, version: str = "2.13.0+cpu", *, content: bytes = b"") -> str:
    """A file at the place of the library in a folder of torch."""
    (folder / "lib").mkdir()
    (folder / "version.py").write_text(f"debug = False\n__version__ = '{version}'\n")
    path = folder / "lib/libtorch_cpu.so"
    path.write_bytes(content or Path(sys.executable).resolve().read_bytes())
    return str(path)


def test_a_library_without_a_symbol_table_gives_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no symbol table"):
        recorder_memory._offset(library(tmp_path))


def test_a_library_of_another_version_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not of torch 2\.13, whose layout is known"):
        recorder_memory._offset(library(tmp_path, "2.14.0"))


def test_a_library_that_has_been_cut_gives_an_error(tmp_path: Path) -> None:
    """A mapped file would end this process with SIGBUS."""
    real = Path(torch.__file__).parent / "lib/libtorch_cpu.so"
    with real.open("rb") as file:
        path = library(tmp_path, content=file.read(1 << 20))
    with pytest.raises((ValueError, struct.error)):
        recorder_memory._offset(path)


def test_bytes_on_the_border_of_two_blocks_are_found(tmp_path: Path) -> None:
    path = tmp_path / "file"
    at = recorder_memory._BLOCK_BYTES + 90
    path.write_bytes(b"x" * at + b"needle" + b"y" * 46 + b"needle" + b"z" * 5)
    with path.open("rb") as file:
        find = functools.partial(recorder_memory._find, file.fileno(), b"needle")
        assert find(93, at, 1) == at
        assert find(94, at, 8) == at + 52
        assert find(94, at - 94, 1) is None


@needs_x86
def test_an_address_that_no_memory_has_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_memory, "_offset", lambda _: 1 << 63)
    process = subprocess.Popen([sys.executable, "-c", "import torch; input()"],
                               stdin=subprocess.PIPE)  # fmt: skip
    try:
        until_s = time.monotonic() + 60
        while recorder_memory.LIBRARY not in Path(f"/proc/{process.pid}/maps").read_text():
            assert time.monotonic() < until_s
            time.sleep(0.01)
        assert newest_call(process.pid) is None
    finally:
        process.kill()
        process.communicate()
