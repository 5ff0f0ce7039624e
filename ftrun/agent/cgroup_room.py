"""What the cgroups of this process still let it take: memory, processes.

Runs in:  agent and its preflight child.
Takes in: /proc/self/cgroup, and the files of the controller in our cgroup and all above (v1, v2).
Gives:    the least that any of them leaves; None where none sets a limit.

Page cache that the kernel gives back on demand counts as used in a cgroup's figures; the inactive
part of it counts as free here.
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
    """How much may still be taken.

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
            folder = mount  # in a container the path is the host's, and the mount is ours
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
