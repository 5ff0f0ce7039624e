"""Reads torch's flight recorder out of the memory of a stopped rank, which answers no request.

Runs in the thread of the rank observer, once for each stop of a rank. It reads /proc/PID/mem, which
needs the rights that py-spy needs too. A collective costs nothing in addition to its record, which
takes 0.8 us. The first read takes 20 ms of CPU, for the symbol table of the library, each further
one 1.5 ms for 128 calls (2026-11-29, 2 cores, torch 2.13).

Source:   FlightRecorder.hpp of torch 2.13, libstdc++ and glibc on x86-64; the address is in the
          symbol table of libtorch_cpu.so, which torch's wheels have.

Rule 1: the layout is of one version of torch. Ids, times and sizes of all entries are checked, so
        another layout, another build or a torn entry gives no trace, and no wrong one.
Rule 2: what is read is evidence. The rank is the culprit because it is stopped.
"""

import functools
import mmap
import os
import platform
import struct
from collections.abc import Iterator
from pathlib import Path

from ftrun import clock
from ftrun.monitor.flight_recorder import RecordedCollective, Trace

LIBRARY = "/libtorch_cpu.so"
_SYMBOL = b"_ZZN4c10d14FlightRecorderIN3c105EventEE3getEvE8instance"
"""The pointer to the recorder of all backends except NCCL's."""
_SYMTAB, _STRTAB = 2, 3
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
_INPUT_DIMS_AT, _SIZES_AT = 240, 384
_RETIRED_AT = 504
_STRING = struct.Struct("<QQ16x")
_SMALL_VECTOR = struct.Struct("<QII")
_MAX_TEXT = 1 << 10
_MAX_ITEMS = 1 << 10
_MAX_ENTRIES = 1 << 15
_DAY_NS = 86_400 * 10**9


def read_stopped(pid: int) -> Trace | None:
    """The trace of a stopped process; None if its memory or the layout cannot be read."""
    if platform.machine() != "x86_64":
        return None
    try:
        path, base = _mapped(pid)
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            return _trace(_Memory(memory.fileno()), base + _offset(path))
    except (OSError, ValueError, struct.error):
        return None


class _Memory:
    """The memory of a process. Each method raises OSError or ValueError if it does not fit."""

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

    def numbers(self, entry: bytes, entry_at: int, at: int) -> list[int]:
        """A c10::SmallVector of int64."""
        begin, size, capacity = _SMALL_VECTOR.unpack_from(entry, at)
        if not size <= capacity <= _MAX_ITEMS:
            raise ValueError(f"{size} numbers in room for {capacity}")
        is_inside = begin == entry_at + at + 16
        data = entry[at + 16 : at + 16 + 8 * size] if is_inside else self.read(begin, 8 * size)
        return list(struct.unpack(f"<{size}q", data))


def _trace(memory: _Memory, at: int) -> Trace:
    (recorder_at,) = struct.unpack("<Q", memory.read(at, 8))
    is_enabled, begin, end, _, most, _, next_id = _RECORDER.unpack(
        memory.read(recorder_at, _RECORDER.size)
    )
    count = min(next_id, most)
    if not is_enabled or count > _MAX_ENTRIES or end - begin != count * _ENTRY_BYTES:
        raise ValueError(f"{end - begin} bytes of {count} entries")
    data = memory.read(begin, count * _ENTRY_BYTES)
    entries = [
        _entry(memory, data[index * _ENTRY_BYTES :][:_ENTRY_BYTES], begin + index * _ENTRY_BYTES)
        for index in range(count)
    ]
    if sorted(one for one, _ in entries) != list(range(next_id - count, next_id)):
        raise ValueError("the ids of the entries do not follow each other")
    return Trace(tuple(entry for _, entry in sorted(entries, key=lambda one: one[0])))


def _entry(memory: _Memory, data: bytes, at: int) -> tuple[int, RecordedCollective]:
    number, group, seq, p2p_seq, operation, called_ns, is_p2p, over_ns, is_over = (
        _NUMBERS.unpack_from(data)
    )
    now_ns = int(clock.wall_s() * 1e9)
    if not now_ns - 365 * _DAY_NS < called_ns < now_ns + _DAY_NS:
        raise ValueError(f"a call at {called_ns}")
    dims = memory.numbers(data, at, _INPUT_DIMS_AT)
    sizes = iter(memory.numbers(data, at, _SIZES_AT))
    return number, RecordedCollective(
        process_group=(memory.text(data, at, _NAME_AT), memory.text(data, at, _DESC_AT)),
        collective_seq_id=seq,
        profiling_name=memory.text(data, at, _OPERATION_AT),
        time_created_ns=called_ns,
        retired=bool(data[_RETIRED_AT]),
        is_p2p=is_p2p,
        input_sizes=[[next(sizes, 0) for _ in range(count)] for count in dims],
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


@functools.lru_cache(maxsize=4)
def _offset(path: str) -> int:
    """Of the symbol from the first address of the library; it is read without its pages."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as elf:
        for kind, at, size, strings_at, strings_size in _symbol_tables(elf):
            end = strings_at + strings_size
            name = elf.find(b"\0" + _SYMBOL + b"\0", strings_at, end) + 1
            if kind == _SYMTAB and name > strings_at:
                found = _symbol(elf, at, size, name - strings_at)
                if found is not None:
                    return found
    raise ValueError(f"{path} has no symbol table")


def _symbol_tables(elf: mmap.mmap) -> Iterator[tuple[int, int, int, int, int]]:
    """Kind, place and size of each section, with place and size of its strings."""
    *_, sections_at, _, _, _, _, entry_size, count, _ = _HEADER.unpack_from(elf)
    sections = [_SECTION.unpack_from(elf, sections_at + n * entry_size) for n in range(count)]
    for _, kind, _, _, at, size, link, *_ in sections:
        if kind == _SYMTAB and link < len(sections) and sections[link][1] == _STRTAB:
            yield kind, at, size, sections[link][4], sections[link][5]


def _symbol(elf: mmap.mmap, at: int, size: int, name: int) -> int | None:
    wanted, found = struct.pack("<I", name), at - 1
    while (found := elf.find(wanted, found + 1, at + size)) >= 0:
        if (found - at) % _ELF_SYMBOL.size == 0:
            return int(_ELF_SYMBOL.unpack_from(elf, found)[4])
    return None
