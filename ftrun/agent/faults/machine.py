"""Injects faults of the machine: full file systems, limits, busy CPUs, clock jumps.

Runs in the main thread. FaultRefused: the fault is not possible, or would harm other users.
"""

import contextlib
import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ftrun.agent.faults.reverter import FaultAction, RunningFault
from ftrun.agent.faults.reverter_process import named
from ftrun.agent.observe.preflight import free_memory
from ftrun.errors import FaultRefused
from ftrun.wire.fault_orders import FAULT_PREFIX
from ftrun.wire.messages.faults import FaultOrder

ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class FaultCgroup:
    """The cgroup of one fault; `parent` is the cgroup to which its processes return."""

    path: Path
    parent: Path
    is_v2: bool

    def set(self, name: str, value: object) -> None:
        (self.path / name).write_text(str(value), encoding="ascii")

    def get(self, name: str) -> str:
        return (self.path / name).read_text(encoding="ascii").strip()

    def has(self, name: str) -> bool:
        return (self.path / name).exists()

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def take(
        self,
        pids: Sequence[int],
        *,
        targets: Sequence[int],
        for_s: float,
        then: Sequence[Sequence[object]] = (),
    ) -> RunningFault:
        """Move processes into the cgroup.

        The reverter moves them back after `for_s`, or when all targets have ended.
        """
        steps = [["write", f"{self.path}/cgroup.procs", str(pid)] for pid in pids]
        undo = [["empty", str(self.path), str(self.parent)]]
        try:
            return RunningFault([*steps, *then], undo, for_s=for_s, targets=named(*targets))
        except FaultRefused:
            self.remove()
            raise


def check_free(pid: int) -> None:
    """Check that no fault holds this process in a cgroup.

    Another reverter would move it into a cgroup that is removed by then.
    """
    if any(FAULT_PREFIX in line for line in _lines(pid)):
        raise FaultRefused(
            f"process {pid} is in the cgroup of an earlier fault: ask when it is over"
        )


def make_group(controller: str, name: str, pid: int) -> FaultCgroup:
    """Create a cgroup of this controller below (v1) or next to (v2) the cgroup of a process."""
    problems: list[str] = []
    for parent, is_v2, home in _parents(controller, pid):
        path = parent / name
        try:
            path.mkdir()
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")
            continue
        group = FaultCgroup(path, home, is_v2)
        if is_v2 and controller not in group.get("cgroup.controllers").split():
            problems.append(f"{path}: no {controller} controller there")
            group.remove()
            continue
        return group
    reason = "; ".join(problems) or f"no {controller} cgroup is mounted at {ROOT}"
    raise FaultRefused(f"it needs a {controller} cgroup of its own, and none can be made: {reason}")


def _lines(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8").splitlines()


def _parents(controller: str, pid: int) -> list[tuple[Path, bool, Path]]:
    """Candidate parents: (folder, is it cgroup v2, present cgroup of the process)."""
    found: list[tuple[Path, bool, Path]] = []
    for line in _lines(pid):
        _, controllers, inside = line.split(":", 2)
        if controllers and controller in controllers.split(","):
            here = ROOT / controllers / inside.lstrip("/")
            if not here.exists():
                here = ROOT / controller / inside.lstrip("/")
            found.append((here, False, here))
        elif not controllers:
            # In v2 only leaf cgroups hold processes, so the new one is next to ours or further up.
            here = ROOT / inside.lstrip("/")
            above = [here.parent, *here.parent.parents] if here != ROOT else [ROOT]
            tops = [folder for folder in above if folder == ROOT or ROOT in folder.parents]
            found += [(folder, True, here) for folder in tops if _offers(folder, controller)]
    return found


def _offers(folder: Path, controller: str) -> bool:
    try:
        words = (folder / "cgroup.subtree_control").read_text(encoding="ascii").split()
    except OSError:
        return False
    return controller in words


MAX_FILL_BYTES = 4 << 30


def fill(order: FaultOrder, folder: Path, what: str) -> FaultAction:
    """Fill a file system if it is small and separate from that of /."""
    limit_bytes = MAX_FILL_BYTES
    if order.kind == "shm-full":
        limit_bytes = min(limit_bytes, max(0, free_memory()) // 4)
    check_may_be_filled(folder, what, limit_bytes)
    path = folder / f"{FAULT_PREFIX}{order.id}"

    def do() -> RunningFault:
        check_may_be_filled(folder, what, limit_bytes)  # --at-step: the mount may have changed
        return RunningFault(
            [["fill", str(path)]], [["unlink", str(path)]], for_s=order.for_s or 10.0
        )

    return FaultAction(f"all that is free taken by {path}", do)


def fd_limit(order: FaultOrder) -> FaultAction:
    (me,) = named(os.getpid())
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)

    undo = [["limit", me, resource.RLIMIT_NOFILE, soft]]
    do = partial(RunningFault, [["cap files", me]], undo, for_s=order.for_s)
    return FaultAction("RLIMIT_NOFILE of the agent at what it has open", do)


def pid_limit(order: FaultOrder, pids: Sequence[int]) -> FaultAction:
    """Move this agent and these processes into a pids cgroup that is full."""
    check_free(os.getpid())
    make_group("pids", f"{FAULT_PREFIX}{order.id}", os.getpid()).remove()

    def do() -> RunningFault:
        group = make_group("pids", f"{FAULT_PREFIX}{order.id}", os.getpid())
        moved, cap = [os.getpid(), *pids], ["cap processes", str(group.path)]
        return group.take(moved, targets=moved, for_s=order.for_s, then=[cap])

    return FaultAction("a pids cgroup that is full", do)


def cpu_starve(order: FaultOrder) -> FaultAction:
    cores = len(os.sched_getaffinity(0))
    if not 1 <= order.amount * cores <= 4096:
        raise FaultRefused(f"--amount is 1 to {4096 // cores} processes per core")
    count = int(order.amount * cores)

    do = partial(RunningFault, [["burn", count]], [], for_s=order.for_s)
    return FaultAction(f"{count} busy processes on {cores} cores", do)


def clock_jump(order: FaultOrder) -> FaultAction:
    """Make the wall clock of this run jump, by libfaketime."""
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

    steps = ([["write", path, f"{order.amount:+.0f}\n"]], [["write", path, "+0\n"]])
    do = partial(RunningFault, *steps, for_s=order.for_s)
    return FaultAction(f"{order.amount:+.0f} s by libfaketime", do)


def check_may_be_filled(folder: Path, what: str, limit_bytes: int) -> None:
    """Check that a file system is small and is not that of /.

    The check uses the total size, because filling the rest of a large one does the most harm.
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
