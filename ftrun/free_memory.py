"""Measures how much memory this node still has.

Runs in:  the SMP, before it promises or creates an arena.
Takes in: /proc/meminfo, and the memory cgroup of this process with all cgroups above it (v1, v2).
Gives:    an `AvailableMemory`: bytes, and the name of the limit that leaves the least.

The usage of a cgroup includes page cache that the kernel reclaims on demand; its inactive part
counts as free. A cgroup charges the pages of an arena to the process that touches them first.
Without this check an arena beyond the limit would therefore cause an OOM kill instead of an error.
"""

from dataclasses import dataclass
from pathlib import Path

MARGIN = 0.05
"""Fraction of the free memory that is never promised: page tables, sockets, growth of workers."""

_UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True, slots=True)
class AvailableMemory:
    """Free memory less the margin, and the limit that leaves the least."""

    num_bytes: int
    limit: str


@dataclass(frozen=True, slots=True)
class _Controller:
    """File names of one cgroup version."""

    limit: str
    usage: str
    reclaimable: str


_V2 = _Controller("memory.max", "memory.current", "inactive_file")
_V1 = _Controller("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available_memory(root: Path = Path("/")) -> AvailableMemory:
    """The free memory under the tightest limit on this process.

    Args:
        root: folder that contains proc and sys; for tests.
    """
    found = [_meminfo(root), *_cgroups(root)]
    nearest = min(found, key=lambda limit: limit.num_bytes)
    return AvailableMemory(int(nearest.num_bytes * (1 - MARGIN)), nearest.limit)


def _meminfo(root: Path) -> AvailableMemory:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return AvailableMemory(int(line.split()[1]) * 1024, "MemAvailable of this machine")
    return AvailableMemory(_UNLIMITED_BYTES, "no MemAvailable in /proc/meminfo")


def _cgroups(root: Path) -> list[AvailableMemory]:
    found: list[AvailableMemory] = []
    for controller, mount, path in _memberships(root):
        folder = mount / path.lstrip("/")
        if not folder.is_dir():
            # In a container the path is the host's, and the mount is already the cgroup of the
            # container.
            folder = mount
        while True:
            limit = _limit_of(folder, controller)
            if limit is not None:
                found.append(limit)
            if folder == mount or mount not in folder.parents:
                break
            folder = folder.parent
    return found


def _memberships(root: Path) -> list[tuple[_Controller, Path, str]]:
    """Each memory cgroup of this process: its file names, mount point and path."""
    found = []
    try:
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in mounts:
        before, _, after = line.partition(" - ")
        kind, _, options = after.partition(" ")
        mount = root / before.split()[4].lstrip("/")
        for group in groups:
            _, names, path = group.split(":", 2)
            if kind == "cgroup2" and not names:
                found.append((_V2, mount, path))
            elif (
                kind == "cgroup"
                and "memory" in names.split(",")
                and "memory" in options.split()[-1].split(",")
            ):
                found.append((_V1, mount, path))
    return found


def _limit_of(folder: Path, controller: _Controller) -> AvailableMemory | None:
    try:
        text = (folder / controller.limit).read_text().strip()
        used = int((folder / controller.usage).read_text())
        stat = (folder / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return None
    if text == "max" or int(text) >= _UNLIMITED_BYTES:
        return None
    reclaimable = sum(
        int(line.split()[1]) for line in stat if line.split()[0] == controller.reclaimable
    )
    free = int(text) - used + reclaimable
    return AvailableMemory(max(0, free), f"{controller.limit} of cgroup {folder}")
