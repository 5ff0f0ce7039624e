"""Calls the Linux functions that Python does not wrap; measures free memory and cgroup limits.

Linux only: a module calls this one only in processes that need Linux.
"""

import contextlib
import ctypes
import errno
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ftrun import clock
from ftrun.errors import MemoryTooSmall

Result = TypeVar("Result")

_NICER = 10  # threads at low priority
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PTRACER = 0x59616D61
OOM_SCORE = 500  # of workers, so that the kernel kills a worker before any process of ftrun
_OTHER_FILES = 64  # open files of a process in addition to the ones that it asks for
DEVICE_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/render", "/dev/accel", "/dev/infiniband/")
"""How the paths of accelerators and RDMA cards begin."""


def name_process(name: str) -> None:
    """Sets the name that `ps -o comm` shows, at most 15 characters."""
    _prctl(_PR_SET_NAME, name.encode()[:15] + b"\0")


def die_with_parent(parent_pid: int, *, deadline_s: float = 10.0) -> None:
    """Has the kernel kill this process when `parent_pid` dies; exits if it is dead already.

    Waits until `parent_pid` is the parent, because a process that was forked twice is a child of
    the intermediate process for a moment.
    """
    give_up_s = clock.now_s() + deadline_s
    while os.getppid() != parent_pid:
        if clock.now_s() > give_up_s or not Path(f"/proc/{parent_pid}").exists():
            os._exit(1)
        os.sched_yield()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died between the check and prctl(); then the kernel sends no signal.
    if os.getppid() != parent_pid:
        os._exit(1)


def end_with_parent() -> None:
    """SIGTERM at the parent's death, in any pid namespace; survives exec(), not for children."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def fork_orphan() -> bool:
    """Forks a child of the nearest subreaper above; True in that process. Raises OSError."""
    middle = os.fork()
    if middle == 0:
        try:
            child = os.fork()
        except OSError:
            os._exit(1)
        if child != 0:
            os._exit(0)
        return True
    if os.waitpid(middle, 0)[1] != 0:
        raise OSError(errno.EAGAIN, "a second fork has failed")
    return False


def unfit_to_fork() -> str:
    """The reason why a fork of this process could hang or fail; empty if a fork is safe."""
    return _threads_in_the_way() or _device_in_use()


def lower_thread_priority() -> None:
    """Lower the scheduling priority of this thread and of the threads that it starts."""
    with contextlib.suppress(OSError):
        me = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, me, os.getpriority(os.PRIO_PROCESS, me) + _NICER)
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def at_low_priority(work: Callable[[], Result]) -> Result:
    """Run `work` in a low-priority thread, or in this one if none can be started; wait for it.

    Without CAP_SYS_NICE a thread cannot raise its priority again after it was lowered, so the work
    gets a thread of its own.
    """
    done: Future[Result] = Future()

    def run() -> None:
        lower_thread_priority()
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - the waiting thread's to handle
            done.set_exception(error)

    try:
        threading.Thread(target=run, name="ftrun-calm", daemon=True).start()
    except RuntimeError:  # the limit of threads is reached
        return work()
    return done.result()


def num_threads() -> int:
    """Threads of this process."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("Threads:"))


def _threads_in_the_way() -> str:
    threads = num_threads()
    # OpenBLAS starts its own threads if OMP_NUM_THREADS is not set, up to one per CPU; they are
    # harmless.
    allowed = 1 if "OMP_NUM_THREADS" in os.environ else os.cpu_count() or 1
    if threads <= allowed:
        return ""
    return f"the process has {threads} threads, and only {allowed} can be forked safely"


def _device_in_use() -> str:
    """Asks only torch that is loaded, and does not initialise a device."""
    torch = sys.modules.get("torch")
    if torch is not None:
        accelerator = torch.accelerator.current_accelerator()
        custom = torch._C._get_privateuse1_backend_name()
        for name in {"cuda", custom, accelerator.type if accelerator else "cuda"}:
            module = getattr(torch, name, None)
            for check in ("is_initialized", "_is_in_bad_fork"):
                if getattr(module, check, bool)():
                    return f"torch.{name}.{check}() is true: a device does not work after a fork"
    files = open_device_files()
    return f"{', '.join(files)} is open, and does not work after a fork" if files else ""


def open_device_files(pid: int | str = "self") -> list[str]:
    """The files in `DEVICE_FILES` that a process has open; empty if it has ended."""
    found: set[str] = set()
    with contextlib.suppress(OSError):  # ended, or of another user
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return sorted(file for file in found if file.startswith(DEVICE_FILES))


def become_subreaper() -> None:
    """Makes this process the parent of descendants that lose their parent; raises OSError."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def hide_memory() -> None:
    """Forbids core dumps and tracing by other users, because the memory holds weights."""
    _prctl(_PR_SET_DUMPABLE, 0)


def let_parent_trace() -> None:
    """Lets the agent's py-spy read this process if kernel.yama.ptrace_scope is 1."""
    with contextlib.suppress(OSError):  # a kernel without Yama
        _prctl(_PR_SET_PTRACER, os.getppid())


def raise_file_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def offer_to_oom_killer() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE), encoding="ascii")


def allow_files(count: int) -> None:
    """Raises the soft limit of open files for `count` files and some others, as far as it may."""
    wanted = count + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _prctl(option: int, value: int | bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    argument = ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_ulong(value)
    if libc.prctl(ctypes.c_int(option), argument, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")


def ignore_user_signals() -> None:
    """Ignores SIGUSR1 and SIGUSR2 until the script installs handlers.

    Slurm sends them to every process of a job step. The agent and the stub treat them as stop
    requests, and a rank that died of one could not reach the step boundary first.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


MARGIN = 0.05  # part of the free memory that is never promised: page tables, sockets, growth
_UNLIMITED = 1 << 60
_FILES = {
    ("memory", True): ("memory.max", "memory.current", "inactive_file"),
    ("memory", False): ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ("pids", True): ("pids.max", "pids.current", ""),
    ("pids", False): ("pids.max", "pids.current", ""),
}
"""By controller and whether it is cgroup v2: files of the limit and the usage, and the line of
memory.stat that can be reclaimed."""


@dataclass(frozen=True, slots=True)
class AvailableMemory:
    """Free memory in bytes, less `MARGIN`, and the limit that leaves the least."""

    num_bytes: int
    limit: str

    def check(self, needed_bytes: int, *, state_bytes: int = 0, num_ranks: int = 0) -> None:
        """Raises MemoryTooSmall, with these values, if this number of bytes does not fit."""
        if needed_bytes > self.num_bytes:
            raise MemoryTooSmall(
                needed_bytes=needed_bytes,
                available_bytes=self.num_bytes,
                limit=self.limit,
                state_bytes=state_bytes,
                num_ranks=num_ranks,
            )


def available_memory(root: Path = Path("/")) -> AvailableMemory:
    """The free memory under the tightest limit on this process. `root` is for tests.

    A cgroup charges the pages of an arena to the process that touches them first. Without this
    check an arena beyond the limit would therefore cause an OOM kill instead of an error.
    """
    found = [(_UNLIMITED, "no MemAvailable in /proc/meminfo")]
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            found = [(int(line.split()[1]) * 1024, "MemAvailable of this machine")]
    num_bytes, limit = min([*found, *_cgroup_limits("memory", root)])
    return AvailableMemory(int(num_bytes * (1 - MARGIN)), limit)


def cgroup_limit_left(controller: str) -> int | None:
    """Left of the limits (`memory` in bytes, `pids`) of this cgroup and above; None: no limit."""
    return min((left for left, _ in _cgroup_limits(controller, Path("/"))), default=None)


def pressure_files(kind: str, root: Path = Path("/")) -> list[Path]:
    """Pressure stall information of `cpu`, `memory` or `io`: of this cgroup, then of the machine.

    Each may be missing or unreadable.
    """
    found = []
    for mount, inside, is_v2 in _cgroups(kind, root):
        folder = mount / inside.lstrip("/")
        if is_v2:
            found.append((folder if folder.is_dir() else mount) / f"{kind}.pressure")
    return [*found, root / "proc/pressure" / kind]


def rdma_devices(interface: str, system: Path = Path("/sys")) -> list[Path]:
    """Folders of the RDMA devices of an interface; of a bond or VLAN, of its first lower device.

    Empty: it has none, or /sys is that of another network namespace.
    """
    device = system / "class" / "net" / interface
    with contextlib.suppress(OSError, ValueError):
        if int((device / "ifindex").read_text()) == socket.if_nametoindex(interface):
            for one in (device, *sorted(device.glob("lower_*"))):
                if found := sorted(one.glob("device/infiniband/*")):
                    return found
    return []


def _cgroup_limits(controller: str, root: Path) -> Iterator[tuple[int, str]]:
    """What the limits of this cgroup and all above it leave, with their names (v1, v2).

    The kernel counts page cache that it reclaims on demand as used. The inactive part of that
    cache counts as free here.
    """
    for mount, inside, is_v2 in _cgroups(controller, root):
        limit_name, used_name, reclaimable = _FILES[controller, is_v2]
        # In a container the path is the host's, and the mount is already the container's cgroup.
        folder = mount / inside.lstrip("/")
        folder = folder if folder.is_dir() else mount
        for one in (folder, *folder.parents):
            try:
                text = (one / limit_name).read_text(encoding="ascii").strip()
                limit = _UNLIMITED if text == "max" else int(text)
                left = limit - int((one / used_name).read_text(encoding="ascii"))
                if reclaimable:
                    stat = (one / "memory.stat").read_text(encoding="ascii")
                    rows = (line.split() for line in stat.splitlines())
                    left += sum(int(row[1]) for row in rows if row[0] == reclaimable)
            except (OSError, ValueError):
                limit = left = _UNLIMITED
            if limit < _UNLIMITED:
                yield max(0, left), f"{limit_name} of cgroup {one}"
            if one == mount:
                break


def _cgroups(controller: str, root: Path) -> Iterator[tuple[Path, str, bool]]:
    """Each cgroup of this process for a controller: mount point, path in it, whether it is v2."""
    try:
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in mounts:
        before, _, after = line.partition(" - ")
        kind, _, options = after.partition(" ")
        mount = root / before.split()[4].lstrip("/")
        for group in groups:
            _, names, inside = group.split(":", 2)
            is_v2 = kind == "cgroup2" and not names
            has_both = all(controller in one.split(",") for one in (names, options.split()[-1]))
            if is_v2 or (kind == "cgroup" and has_both):
                yield mount, inside, is_v2
