"""Reads torch's flight recorder out of the memory of a stopped rank, which answers no request.

Runs in the thread of the rank observer, once for each stop of a rank. It reads /proc/PID/mem, which
needs the rights that py-spy needs too. A collective costs nothing in addition to its record, which
takes 0.8 us. The symbol table of the library is read once, in a thread of its own, because a file
system may be slow or dead. That takes 20 ms of CPU (2026-11-29, 2 cores, torch 2.13).

Source:   FlightRecorder.hpp of torch 2.13, libstdc++ and glibc on x86-64; the address is in the
          symbol table of libtorch_cpu.so, which torch's wheels have.

Rule 1: the layout is of one version of torch. The version of the library, and id, time and
        texts of the newest entry are checked, so another layout, another build or a torn entry
        gives no collective, and no wrong one.
Rule 2: what is read is evidence. The rank is the culprit because it is stopped.
"""

import os
import platform
import re
import struct
from pathlib import Path

from ftrun import clock
from ftrun.agent.observe.evidence import BoundedReads
from ftrun.monitor.flight_recorder import RecordedCollective

LIBRARY = "/lib/libtorch_cpu.so"
"""Below the folder of torch."""
READ_S = 1.0
"""Deadline for the symbol table; later the newest sample is used."""
_VERSION = re.compile(r"^__version__ = ['\"]2\.13\.", re.MULTILINE)
_SYMBOL = b"_ZZN4c10d14FlightRecorderIN3c105EventEE3getEvE8instance"
"""The pointer to the recorder of all backends except NCCL's."""
_SYMTAB, _STRTAB = 2, 3
_BLOCK_BYTES = 1 << 20
_HEADER = struct.Struct("<16xHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_ELF_SYMBOL = struct.Struct("<IBBHQQ")

_RECORDER = struct.Struct("<?47xQQQQQQ")
"""Enabled, the vector of entries (begin, end, capacity), most entries, next index, next id."""
_ENTRY_BYTES = 512
_NUMBERS = struct.Struct("<Q8xQ64xQQQ32x16x16xq8x?31xq?")
"""Of an entry: id, group's number, seq of collectives, seq of messages, number of the operation,
time of the call (wall clock, ns), whether it is a message, time and knowledge of its completion."""
_DESC_AT, _NAME_AT, _OPERATION_AT = 24, 56, 112
_RETIRED_AT = 504
_STRING = struct.Struct("<QQ16x")
_MAX_TEXT = 1 << 10
_MAX_ENTRIES = 1 << 15
_DAY_NS = 86_400 * 10**9

_reads = BoundedReads()
_offsets: dict[tuple[str, int, int], int] = {}
"""Of the symbol, by path, inode and time of change of the library."""


def newest_call(pid: int) -> RecordedCollective | None:
    """The newest call of a stopped process; None if there is none, or it cannot be read."""
    if platform.machine() != "x86_64":
        return None
    try:
        path, base = _mapped(pid)
        offset = _reads.result(lambda: _offset(path), READ_S)
        if offset is None:
            return None
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            return _newest(_Memory(memory.fileno()), base + offset)
    except (OSError, OverflowError, ValueError, struct.error):
        return None


class _Memory:
    """The memory of a process. Each method raises an error if it does not fit."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read(self, at: int, size: int) -> bytes:
        data = os.pread(self._fd, size, at)
        if len(data) != size:
            raise ValueError(f"{size} bytes at {at:#x} are not there")
        return data

    def text(self, entry: bytes, entry_at: int, at: int) -> str:
        """A std::string: in itself if it is short."""
        begin, size = _STRING.unpack_from(entry, at)
        if size > _MAX_TEXT:
            raise ValueError(f"a text of {size} bytes")
        if begin == entry_at + at + 16:
            return entry[at + 16 : at + 16 + size].decode()
        return self.read(begin, size).decode()


def _newest(memory: _Memory, at: int) -> RecordedCollective | None:
    (recorder_at,) = struct.unpack("<Q", memory.read(at, 8))
    is_enabled, begin, end, _, most, next_index, next_id = _RECORDER.unpack(
        memory.read(recorder_at, _RECORDER.size)
    )
    count = min(next_id, most)
    is_size_known = count <= _MAX_ENTRIES and end - begin == count * _ENTRY_BYTES
    if not is_enabled or not is_size_known or next_index > count:
        raise ValueError(f"{end - begin} bytes of {count} entries, and {next_index} is next")
    if not count:
        return None
    # The index is 0 until the ring is full, and then that of the oldest entry.
    entry_at = begin + (next_index - 1) % count * _ENTRY_BYTES
    return _entry(memory, entry_at, next_id - 1)


def _entry(memory: _Memory, at: int, expected: int) -> RecordedCollective:
    data = memory.read(at, _ENTRY_BYTES)
    number, group, seq, p2p_seq, operation, called_ns, is_p2p, over_ns, is_over = (
        _NUMBERS.unpack_from(data)
    )
    now_ns = int(clock.wall_s() * 1e9)
    if number != expected or not now_ns - 365 * _DAY_NS < called_ns < now_ns + _DAY_NS:
        raise ValueError(f"entry {number} in place of {expected}, a call at {called_ns}")
    return RecordedCollective(
        process_group=(memory.text(data, at, _NAME_AT), memory.text(data, at, _DESC_AT)),
        collective_seq_id=seq,
        profiling_name=memory.text(data, at, _OPERATION_AT),
        time_created_ns=called_ns,
        retired=bool(data[_RETIRED_AT]),
        is_p2p=is_p2p,
        state="completed" if is_over else "scheduled",
        pg_id=group,
        p2p_seq_id=p2p_seq,
        op_id=operation,
        time_discovered_completed_ns=over_ns if is_over else 0,
    )


def _mapped(pid: int) -> tuple[str, int]:
    """The file of the library in a process, and its first address."""
    for line in Path(f"/proc/{pid}/maps").read_text("utf-8", "replace").splitlines():
        words = line.split(maxsplit=5)
        if words[-1].endswith(LIBRARY) and int(words[2], 16) == 0:
            return words[-1], int(words[0].partition("-")[0], 16)
    raise ValueError(f"no {LIBRARY} in process {pid}")


def _offset(path: str) -> int:
    """Of the symbol from the first address of the library. A mapped file could end the process."""
    version = Path(path).parents[1] / "version.py"
    if not _VERSION.search(version.read_text("utf-8")):
        raise ValueError(f"{version} is not of torch 2.13, whose layout is known")
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        about = os.fstat(fd)
        key = (path, about.st_ino, about.st_mtime_ns)
        if key not in _offsets:
            _offsets[key] = _symbol(fd)
        return _offsets[key]
    finally:
        os.close(fd)


def _symbol(fd: int) -> int:
    *_, sections_at, _, _, _, _, entry_size, count, _ = _HEADER.unpack(
        os.pread(fd, _HEADER.size, 0)
    )
    table = os.pread(fd, count * entry_size, sections_at)
    sections = [_SECTION.unpack_from(table, n * entry_size) for n in range(count)]
    for _, kind, _, _, at, size, link, *_ in sections:
        if kind != _SYMTAB or link >= count or sections[link][1] != _STRTAB:
            continue
        strings_at, strings_size = sections[link][4:6]
        name = _find(fd, b"\0" + _SYMBOL + b"\0", strings_at, strings_size, 1)
        if name is None:
            continue
        wanted = struct.pack("<I", name + 1 - strings_at)
        found = _find(fd, wanted, at, size, _ELF_SYMBOL.size)
        if found is not None:
            return int(_ELF_SYMBOL.unpack(os.pread(fd, _ELF_SYMBOL.size, found))[4])
    raise ValueError("the library has no symbol table")


def _find(fd: int, wanted: bytes, at: int, size: int, step: int) -> int | None:
    """Where a part of a file has these bytes, at a multiple of `step` from its start."""
    end = at + size
    for start in range(at, end, _BLOCK_BYTES):
        data = os.pread(fd, min(_BLOCK_BYTES + len(wanted) - 1, end - start), start)
        found = data.find(wanted)
        while found >= 0:
            if (start + found - at) % step == 0:
                return start + found
            found = data.find(wanted, found + 1)
    return None
