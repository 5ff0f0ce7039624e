"""Direct writes give the same files at the allowed rate; copies have memory."""

import errno
import fcntl
import mmap
import os
import random
import threading
import time
from pathlib import Path

import pytest

from ftrun import clock
from ftrun.errors import CheckpointError
from ftrun.smp.checkpoint.storage import direct_file
from ftrun.smp.checkpoint.storage.direct_file import (
    BLOCK_BYTES,
    BUFFER_BYTES,
    KEEP_S,
    CopyBuffers,
    DirectFile,
    Throttle,
)

SIZES = [
    *(0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1),
    *(BUFFER_BYTES - 1, BUFFER_BYTES, BUFFER_BYTES + 1, 3 * BUFFER_BYTES + 12_345),
]


def content(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def written(path: Path, data: bytes, cut: int) -> DirectFile:
    file = DirectFile(path)
    try:
        for at in range(0, len(data), cut):
            file.write(memoryview(data)[at : at + cut])
        file.finish()
    finally:
        file.close()
    return file


@pytest.mark.parametrize("cut", [997_001, BUFFER_BYTES * 2])
@pytest.mark.parametrize("size", SIZES)
def test_every_size_in_every_portion_is_the_same_file(tmp_path: Path, size: int, cut: int) -> None:
    data = content(size)
    written(tmp_path / "file", data, cut)
    assert (tmp_path / "file").read_bytes() == data


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("switch", [0, 1, BUFFER_BYTES // 2, BUFFER_BYTES, BUFFER_BYTES + 1])
def test_what_is_in_memory_already_is_written_from_there(
    tmp_path: Path, size: int, switch: int
) -> None:
    """After `switch` bytes the source is valid, as if a slot is copied while it is written."""
    data, cut = content(size), 997_001
    switch = min(switch, size)
    memory = mmap.mmap(-1, max(size, 1))
    memory[switch:size] = data[switch:]
    source, in_place = memoryview(memory)[:size], 0
    file, at = DirectFile(tmp_path / "file"), 0
    while at < size:
        limit = min(cut, (switch if at < switch else size) - at)
        room = file.room(source if at >= switch else None)[:limit]
        if file.is_in_place:
            in_place += len(room)
        else:
            room[:] = data[at : at + len(room)]
        file.take(len(room))
        at += len(room)
        del room
    file.finish()
    file.close()
    assert (tmp_path / "file").read_bytes() == data
    skipped = -(-switch // BUFFER_BYTES) * BUFFER_BYTES
    assert in_place == max(0, (size - skipped) // BUFFER_BYTES * BUFFER_BYTES)


@pytest.mark.parametrize("where", ["open", "write"])
def test_a_file_system_without_direct_io_gets_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    data, real_open, real_pwrite = content(BUFFER_BYTES + 5), os.open, os.pwrite

    def refuse_open(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        return real_open(path, flags, mode)

    def refuse_write(fd: int, view: memoryview, at: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        return real_pwrite(fd, view, at)

    if where == "open":
        monkeypatch.setattr(direct_file.os, "open", refuse_open)
    else:
        monkeypatch.setattr(direct_file.os, "pwrite", refuse_write)
    file = written(tmp_path / "file", data, 1 << 20)
    assert not file.is_direct
    assert (tmp_path / "file").read_bytes() == data


def test_a_full_disk_in_the_middle_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, view: memoryview, at: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(direct_file.os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        written(tmp_path / "file", content(3 * BUFFER_BYTES), 1 << 20)


def test_the_pace_is_asked_before_each_write_and_can_give_the_file_up(tmp_path: Path) -> None:
    asked: list[int] = []

    def pace(num_bytes: int) -> None:
        asked.append(num_bytes)
        if len(asked) >= 3:
            raise RuntimeError("the run is being stopped")

    file = DirectFile(tmp_path / "file", pace=pace)
    with pytest.raises(RuntimeError, match="being stopped"):
        file.write(content(5 * BUFFER_BYTES))
    file.close()
    # The fourth may be in progress when the third is found abandoned; none follows.
    assert asked in ([BUFFER_BYTES] * 3, [BUFFER_BYTES] * 4)
    assert (tmp_path / "file").stat().st_size == 2 * BUFFER_BYTES


def test_while_one_buffer_drains_the_other_is_filled(tmp_path: Path) -> None:
    """The second buffer has room before the first is written."""
    from threading import Event

    may_write = Event()
    file = DirectFile(tmp_path / "file", pace=lambda _: assert_(may_write.wait(30)))
    file.write(content(BUFFER_BYTES))
    room = file.room()
    room[:3] = b"abc"
    file.take(3)
    del room
    assert (tmp_path / "file").stat().st_size == 0
    may_write.set()
    file.finish()
    file.close()
    assert (tmp_path / "file").read_bytes() == content(BUFFER_BYTES) + b"abc"


def assert_(is_so: bool) -> None:
    assert is_so


# --- rate ---

MIB = 1 << 20


def took_s(throttle: Throttle, pieces: int) -> float:
    started_s = time.monotonic()
    for _ in range(pieces):
        throttle(MIB)
    return time.monotonic() - started_s


def test_without_a_limit_no_node_waits() -> None:
    assert took_s(Throttle(threading.Event()), 1000) < 20.0


def test_the_rate_is_kept_over_many_pieces_and_nothing_is_saved_up() -> None:
    throttle = Throttle(threading.Event())
    throttle.bytes_per_s = 20 * MIB
    assert took_s(throttle, 11) >= 0.45
    time.sleep(0.3)
    assert took_s(throttle, 11) >= 0.45


def test_in_a_hurry_a_waiting_writer_continues() -> None:
    throttle = Throttle(threading.Event())
    throttle.bytes_per_s = MIB / 600
    throttle(MIB)
    timer = threading.Timer(0.1, setattr, (throttle, "bytes_per_s", 0.0))
    timer.start()
    assert took_s(throttle, 5) < 60
    timer.join()


def test_a_waiting_writer_is_informed_that_all_is_given_up() -> None:
    stop = threading.Event()
    throttle = Throttle(stop)
    throttle.bytes_per_s = MIB / 600
    throttle(MIB)
    timer = threading.Timer(0.1, stop.set)
    timer.start()
    with pytest.raises(CheckpointError, match="is cancelled"):
        throttle(MIB)
    timer.join()


# --- memory for copies ---


def copy_buffers(free_bytes: int = 1 << 40) -> CopyBuffers:
    return CopyBuffers(lambda: free_bytes)


def fill(blocks: list[memoryview] | None, mark: bytes) -> None:
    assert blocks is not None
    for block in blocks:
        block[:1] = mark


def test_each_copy_has_its_size_and_memory_of_its_own() -> None:
    blocks = copy_buffers().lend([10, 20, 10])
    assert blocks is not None
    assert [len(block) for block in blocks] == [10, 20, 10]
    for mark, block in zip((b"a", b"b", b"c"), blocks, strict=True):
        block[:1] = mark
    assert [bytes(block[:1]) for block in blocks] == [b"a", b"b", b"c"]


def test_memory_is_reused_and_freed_if_it_no_longer_fits() -> None:
    made = copy_buffers()
    fill(made.lend([10, 20]), b"x")
    made.begin()
    again = made.lend([20, 10, 30])
    assert again is not None
    assert [bytes(block[:1]) for block in again] == [b"x", b"x", b"\0"]
    assert made.num_bytes == 60
    made.begin()
    assert [bytes(block[:1]) for block in made.lend([10]) or []] == [b"x"]
    assert made.num_bytes == 60, "the others are copied again the next time"
    made.begin()
    assert made.lend([11]) is not None
    assert made.num_bytes == 11, "of another world"


def test_what_is_lent_is_no_other_user_s_before_the_next_try() -> None:
    made = copy_buffers()
    fill(made.lend([10, 10]), b"x")
    made.begin()
    first = made.lend([10])
    fill(first, b"1")
    fill(made.lend([10, 10]), b"2")
    made.clean_up()
    fill(made.lend([10]), b"3")
    assert first is not None
    assert bytes(first[0][:1]) == b"1"
    assert made.num_bytes == 40


def test_what_is_there_already_asks_for_no_free_memory() -> None:
    free = [30]
    made = CopyBuffers(lambda: free[0])
    assert made.lend([30, 1]) is None
    assert made.num_bytes == 0
    assert made.lend([1, 2]) is not None
    made.begin()
    free[0] = 12
    made.begin()
    assert made.lend([2, 1]) is not None, "four times as much is free"
    made.begin()
    assert made.lend([2, 1, 13]) is None
    assert made.num_bytes == 0, "without room for all it gets no buffer"


def test_memory_that_the_kernel_refuses_is_not_there() -> None:
    made = copy_buffers(1 << 62)
    assert made.lend([1 << 60]) is None
    assert made.lend([10]) is not None
    made.drop()
    assert made.num_bytes == 0


@pytest.mark.parametrize(
    ("passed_s", "free_bytes", "kept"),
    [(0.0, 400, 100), (KEEP_S - 0.1, 400, 100), (KEEP_S, 400, 0), (0.0, 399, 0)],
)
def test_memory_is_returned_after_a_while_or_when_it_is_needed(
    monkeypatch: pytest.MonkeyPatch, passed_s: float, free_bytes: int, kept: int
) -> None:
    now_s = [50.0]
    monkeypatch.setattr(clock, "now_s", lambda: now_s[0])
    made = copy_buffers(free_bytes)
    made.clean_up()
    assert made.lend([60, 40]) is not None
    now_s[0] += passed_s
    made.begin()
    assert made.num_bytes == kept
