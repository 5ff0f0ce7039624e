"""Memory and processes that the cgroups of this process still allow.

Runs in:  agent and its preflight child.
Takes in: /proc/self/cgroup, and the files of the controller in this cgroup and all above (v1, v2).
Gives:    the smallest remainder of all of them; None if none sets a limit.

The figures of a cgroup count page cache that the kernel reclaims on demand as used. Here the
inactive part of that cache counts as free.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60
_FILES = {
    ("memory", True): ("memory.max", "memory.current"),
    ("memory", False): ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ("pids", True): ("pids.max", "pids.current"),
    ("pids", False): ("pids.max", "pids.current"),
}
_RECLAIMABLE = ("inactive_file", "total_inactive_file")


def cgroup_room(controller: str) -> int | None:
    """The smallest remainder of all cgroups; None without a limit.

    Args:
        controller: `memory` (bytes) or `pids` (processes and threads).
    """
    found: list[int] = []
    for folder, is_v2 in _folders(controller):
        limit_name, used_name = _FILES[controller, is_v2]
        with suppress(OSError, ValueError):
            text = (folder / limit_name).read_text(encoding="ascii").strip()
            if text == "max" or int(text) >= _UNLIMITED:
                continue
            used = int((folder / used_name).read_text(encoding="ascii"))
            found.append(max(0, int(text) - used + _reclaimable(folder, controller)))
    return min(found, default=None)


def _folders(controller: str) -> Iterator[tuple[Path, bool]]:
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, names, inside = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        mount = ROOT / controller if names else ROOT
        folder = mount / inside.lstrip("/")
        if not folder.is_dir():
            # in a container the path is the host's, but the mount is the container's
            folder = mount
        while True:
            yield folder, not names
            if folder == mount or mount not in folder.parents:
                break
            folder = folder.parent


def _reclaimable(folder: Path, controller: str) -> int:
    total = 0
    if controller == "memory":
        for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines():
            name, _, count = line.partition(" ")
            total = max(total, int(count)) if name in _RECLAIMABLE else total
    return total
