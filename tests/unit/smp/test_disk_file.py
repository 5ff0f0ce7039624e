"""What is written through aligned buffers is what any other way of writing would have written."""

import errno
import fcntl
import mmap
import os
import random
from pathlib import Path

import pytest

from ftrun.smp.checkpoint.storage import direct_file as disk_file
from ftrun.smp.checkpoint.storage.direct_file import BLOCK_BYTES, BUFFER_BYTES, DirectFile

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
def test_what_lies_in_memory_already_is_written_from_there(
    tmp_path: Path, size: int, switch: int
) -> None:
    """From a `switch` on, as when a slot is copied while it is written; only that part is true."""
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
        monkeypatch.setattr(disk_file.os, "open", refuse_open)
    else:
        monkeypatch.setattr(disk_file.os, "pwrite", refuse_write)
    file = written(tmp_path / "file", data, 1 << 20)
    assert not file.is_direct
    assert (tmp_path / "file").read_bytes() == data


def test_a_full_disk_in_the_middle_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, view: memoryview, at: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk_file.os, "pwrite", full)
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
    # The fourth may be on its way when the third is found to be given up; none follows.
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
