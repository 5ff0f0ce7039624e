"""Injects faults of the machine: full file systems, limits, busy CPUs, clock jumps.

Runs in:  agent, main thread.
Takes in: an order for this node.
Gives:    a prepared `FaultAction`; FaultRefused if the fault would harm other users of the machine.
"""

import os
import resource
from collections.abc import Sequence
from pathlib import Path

from ftrun.agent.faults.cgroups import check_free, make_group
from ftrun.agent.faults.reverter import FaultAction, RunningFault
from ftrun.agent.faults.reverter_process import named
from ftrun.errors import FaultRefused
from ftrun.wire.fault_orders import FAULT_PREFIX
from ftrun.wire.messages.faults import FaultOrder

MAX_FILL_BYTES = 4 << 30


def fill(order: FaultOrder, folder: Path, what: str) -> FaultAction:
    """Fill a file system if it is small and separate from that of /.

    Raises:
        FaultRefused: filling it could harm others.
    """
    limit_bytes = MAX_FILL_BYTES
    if order.kind == "shm-full":
        limit_bytes = min(limit_bytes, _available_bytes() // 4)
    check_may_be_filled(folder, what, limit_bytes)
    path = folder / f"{FAULT_PREFIX}{order.id}"

    def do() -> RunningFault:
        check_may_be_filled(folder, what, limit_bytes)  # --at-step: the mount may have changed
        return RunningFault(
            [["fill", str(path)]], [["unlink", str(path)]], for_s=order.for_s or 10.0
        )

    return FaultAction(f"all that is free taken by {path}", do)


def fd_limit(order: FaultOrder) -> FaultAction:
    """Prevent this agent from opening more file descriptors."""
    (me,) = named(os.getpid())
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)

    def do() -> RunningFault:
        undo = [["limit", me, resource.RLIMIT_NOFILE, soft]]
        return RunningFault([["cap files", me]], undo, for_s=order.for_s)

    return FaultAction("RLIMIT_NOFILE of the agent at what it has open", do)


def pid_limit(order: FaultOrder, pids: Sequence[int]) -> FaultAction:
    """Move this agent and these processes into a pids cgroup that is full.

    Raises:
        FaultRefused: no such cgroup can be created.
    """
    check_free(os.getpid())
    make_group("pids", f"{FAULT_PREFIX}{order.id}", os.getpid()).remove()

    def do() -> RunningFault:
        group = make_group("pids", f"{FAULT_PREFIX}{order.id}", os.getpid())
        moved = [os.getpid(), *pids]
        steps = [["write", f"{group.path}/cgroup.procs", str(pid)] for pid in moved]
        capped = [*steps, ["cap processes", str(group.path)]]
        try:
            return RunningFault(capped, [group.undo], for_s=order.for_s, targets=named(*moved))
        except FaultRefused:
            group.remove()
            raise

    return FaultAction("a pids cgroup that is full", do)


def cpu_starve(order: FaultOrder) -> FaultAction:
    """Start `amount` busy processes per core.

    Raises:
        FaultRefused: the amount is out of range.
    """
    cores = len(os.sched_getaffinity(0))
    if not 1 <= order.amount * cores <= 4096:
        raise FaultRefused(f"--amount is 1 to {4096 // cores} processes per core")
    count = int(order.amount * cores)

    def do() -> RunningFault:
        return RunningFault([["burn", count]], [], for_s=order.for_s)

    return FaultAction(f"{count} busy processes on {cores} cores", do)


def clock_jump(order: FaultOrder) -> FaultAction:
    """Make the wall clock of this run jump, by libfaketime.

    Raises:
        FaultRefused: the run does not use libfaketime with the required settings.
    """
    path = os.environ.get("FAKETIME_TIMESTAMP_FILE", "")
    is_there = "faketime" in os.environ.get("LD_PRELOAD", "") and path
    if not is_there or os.environ.get("FAKETIME_NO_CACHE") != "1":
        raise FaultRefused(
            "the machine's clock is never touched, and this run is not under libfaketime: "
            "start ftrun with LD_PRELOAD=libfaketime.so.1, FAKETIME_TIMESTAMP_FILE=FILE (which "
            "holds +0), FAKETIME_NO_CACHE=1 and FAKETIME_DONT_FAKE_MONOTONIC=1"
        )
    if os.environ.get("FAKETIME_DONT_FAKE_MONOTONIC") != "1":
        raise FaultRefused(
            "FAKETIME_DONT_FAKE_MONOTONIC=1 is not set: no machine's monotonic clock jumps"
        )

    def do() -> RunningFault:
        steps = [["write", path, f"{order.amount:+.0f}\n"]]
        return RunningFault(steps, [["write", path, "+0\n"]], for_s=order.for_s)

    return FaultAction(f"{order.amount:+.0f} s by libfaketime", do)


def check_may_be_filled(folder: Path, what: str, limit_bytes: int) -> None:
    """Check that a file system is small and is not that of /.

    The check uses the total size, not the free space, because filling the rest of a large file
    system that is nearly full does the most harm.

    Raises:
        FaultRefused: filling it could harm others.
    """
    found = os.statvfs(folder)
    size_bytes = found.f_blocks * found.f_frsize
    advice = "Give it one of its own: mount -t tmpfs -o size=256m tmpfs DIR"
    if folder.stat().st_dev == os.stat("/").st_dev:
        raise FaultRefused(
            f"{what}, {folder}, are on the file system of /, which others need. {advice}"
        )
    if size_bytes > limit_bytes:
        raise FaultRefused(
            f"the file system of {what} has {size_bytes >> 20} MiB, and filling one of more than "
            f"{limit_bytes >> 20} MiB could harm others on this machine. {advice}"
        )


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0
