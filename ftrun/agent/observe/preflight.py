"""Measures this machine: memory, loopback, free resources, clock, GPUs. Imports no torch.

Runs in:  a process of its own, `python -m ftrun.agent.observe.preflight FOLDER`, during the import
          of torch; in a run on one node only `room`, in the agent.
Takes in: the folder of the logs.
Gives:    `NodeMeasurements`, as JSON on stdout. ftrun.monitor.node_fitness judges them.

It is a process of its own for two reasons. An import of torch holds the GIL for parts of a second,
which would be measured. A driver that hangs must not hang an agent.
"""

import ctypes
import itertools
import mmap
import os
import resource
import shutil
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path

import msgspec

from ftrun import clock
from ftrun.agent.observe.devices import device_health
from ftrun.linux import cgroup_limit_left
from ftrun.monitor.node_fitness import NodeMeasurements

BLOCK_BYTES = 32 << 20
"""Larger than most caches. Two blocks are used; together they take at most a quarter of the free
memory."""
PIECE_BYTES = 2 << 20
"""Each piece is timed separately, and the best counts, because other processes use the processor in
between."""
COPIES = 8
MIN_PIECES = 16
MEMORY_S = 0.5
"""After this, MIN_PIECES pieces are enough, because other processes use most of the processor."""
LOOPBACK_S = 0.3
PINGS = 50
LOOPBACK_BYTES = 16 << 20
CHUNK_BYTES = 256 << 10
MIN_CHUNKS = 8
"""The best of fewer chunks measures other work of the processor, not the loopback."""
CHUNKS_S = 0.8
"""After this, fewer chunks are enough."""
ANSWER_S = 2.0
NAP_S = 0.02


def measure(folder: Path) -> NodeMeasurements:
    started_s = clock.now_s()
    found = room(folder)
    not_done = ""
    started_s, used_s = clock.now_s(), _used_s()
    memory = copy_rate(found.free_memory_bytes)
    share = (_used_s() - used_s) / max(clock.now_s() - started_s, 1e-9)
    rtt_s = rate = 0.0
    try:
        rtt_s, rate = loopback()
    except OSError as error:
        not_done = f"the loopback was not measured: {error}"
    gpus, faults, remarks = device_health()
    return msgspec.structs.replace(
        found,
        processes=free_processes(),
        memory_bytes_per_s=memory,
        processor_share=round(min(1.0, share), 3),
        loopback_rtt_s=rtt_s,
        loopback_bytes_per_s=rate,
        clock=clock_fault(),
        gpus=gpus,
        gpu_faults=faults,
        gpu_remarks=remarks,
        not_done=not_done,
        took_s=clock.now_s() - started_s,
    )


def _used_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def room(folder: Path) -> NodeMeasurements:
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    disk = -1
    with suppress(OSError):
        disk = shutil.disk_usage(_existing(folder)).free
    return NodeMeasurements(
        free_memory_bytes=free_memory(),
        free_disk_bytes=disk,
        open_files=open_files if open_files != resource.RLIM_INFINITY else -1,
    )


def _existing(folder: Path) -> Path:
    return next(one for one in (folder, *folder.parents, Path("/")) if one.is_dir())


def free_memory() -> int:
    """Bytes that processes here may still use: the smaller of the machine's and the cgroup's."""
    found = [room for room in (cgroup_limit_left("memory"),) if room is not None]
    with suppress(OSError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found += [int(one.split()[1]) << 10 for one in lines if one.startswith("MemAvailable:")]
    return min(found, default=-1)


def free_processes() -> int:
    """Number that the limits still allow, -1: no limit. The cgroup counts other users too."""
    found = [room for room in (cgroup_limit_left("pids"),) if room is not None]
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if limit != resource.RLIM_INFINITY and os.geteuid() != 0:  # RLIMIT_NPROC does not apply to root
        found.append(max(0, limit - _own_threads()))
    return min(found, default=-1)


def _own_threads() -> int:
    """Threads of this user, which is what RLIMIT_NPROC counts."""
    me, count = os.getuid(), 0
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if folder.name.isdigit() and folder.stat().st_uid == me:
                count += len(os.listdir(folder / "task"))
    return count


def copy_rate(free_bytes: int) -> float:
    """Bytes per second that one thread copies; 0: too little memory is free (-1: it is unknown)."""
    size = BLOCK_BYTES
    if 0 <= free_bytes < 8 * size:
        size = free_bytes // 8 // PIECE_BYTES * PIECE_BYTES
    if size == 0:
        return 0.0
    took_s: list[float] = []
    with mmap.mmap(-1, size) as source, mmap.mmap(-1, size) as target:
        views = [(ctypes.c_char * size).from_buffer(one) for one in (source, target)]
        first, second = (ctypes.addressof(view) for view in views)
        ctypes.memset(first, 1, size)
        ctypes.memmove(second, first, size)  # touches the pages
        enough_s = clock.now_s() + MEMORY_S
        for number in range(COPIES * size // PIECE_BYTES):
            at = number * PIECE_BYTES % size
            started_s = clock.now_s()
            ctypes.memmove(second + at, first + at, PIECE_BYTES)
            took_s.append(clock.now_s() - started_s)
            if started_s > enough_s and len(took_s) >= MIN_PIECES:
                break
        del views
    return PIECE_BYTES / max(min(took_s), 1e-9)


def loopback() -> tuple[float, float]:
    """The shortest round trip in seconds, and bytes per second, over TCP within this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        listener.settimeout(ANSWER_S)
        work = threading.Thread(target=_echo, args=(listener,), daemon=True)
        work.start()
        with socket.create_connection(listener.getsockname(), timeout=ANSWER_S) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            rounds_s = [_exchange(sock, 1) for _ in range(PINGS)]
            started_s = clock.now_s()
            chunks_s: list[float] = []
            while not enough_chunks(len(chunks_s), clock.now_s() - started_s):
                chunks_s.append(_exchange(sock, CHUNK_BYTES))
        work.join(ANSWER_S)
    return min(rounds_s), CHUNK_BYTES / max(min(chunks_s), 1e-9)


def enough_chunks(count: int, passed_s: float) -> bool:
    """Whether the best of `count` chunks, sent in `passed_s`, measures the loopback."""
    if count < MIN_CHUNKS:
        return count > 0 and passed_s > CHUNKS_S
    return passed_s > LOOPBACK_S or count * CHUNK_BYTES >= LOOPBACK_BYTES


def _exchange(sock: socket.socket, count: int) -> float:
    started_s = clock.now_s()
    sock.sendall(count.to_bytes(4, "little") + bytes(count))
    if not sock.recv(1):
        raise ConnectionResetError("the loopback has closed the connection")
    return clock.now_s() - started_s


def _echo(listener: socket.socket) -> None:
    with suppress(OSError), listener.accept()[0] as sock:
        sock.settimeout(ANSWER_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        buffer = memoryview(bytearray(CHUNK_BYTES))
        while head := sock.recv(4, socket.MSG_WAITALL):
            left = int.from_bytes(head, "little")
            while left:
                left -= sock.recv_into(buffer[:left])
            sock.sendall(b"\0")


def clock_fault() -> str:
    seen = [clock.now_ns() for _ in range(1000)]
    if any(later < earlier for earlier, later in itertools.pairwise(seen)):
        return "the monotonic clock goes backwards"
    before_s = clock.now_s()
    clock.sleep(NAP_S)
    passed_s = clock.now_s() - before_s
    if passed_s < NAP_S / 2:
        return f"the monotonic clock has moved by {passed_s:.4f} s in a sleep of {NAP_S} s"
    return ""


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(measure(Path(sys.argv[1]))).decode())
