"""Cgroups made for one fault: part of a core, a bound on memory, a bound on processes.

Runs in:  agent, main thread.
Takes in: a controller, the processes it is to hold.
Gives:    the folder of a new cgroup with its limit set, and the one that its processes came from.

The folder is removed by the fault's healer, whatever becomes of the agent.
"""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from ftrun.errors import FaultRefused
from ftrun.wire.fault_orders import FAULT_PREFIX

ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class FaultCgroup:
    """One cgroup of a fault."""

    path: Path
    parent: Path
    is_v2: bool

    @property
    def undo(self) -> list[object]:
        """The healer's step that empties and removes it."""
        return ["empty", str(self.path), str(self.parent)]

    def set(self, name: str, value: object) -> None:
        (self.path / name).write_text(str(value), encoding="ascii")

    def get(self, name: str) -> str:
        return (self.path / name).read_text(encoding="ascii").strip()

    def has(self, name: str) -> bool:
        return (self.path / name).exists()

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self.path.rmdir()


def check_free(pid: int) -> None:
    """No fault holds this process: its healer would take it back into a group that is gone by then.

    Raises:
        FaultRefused: one does.
    """
    if any(FAULT_PREFIX in line for line in _lines(pid)):
        raise FaultRefused(
            f"process {pid} is in the cgroup of an earlier fault: ask when it is over"
        )


def make_group(controller: str, name: str, pid: int) -> FaultCgroup:
    """A cgroup of this controller, beneath or beside the one that a process is in.

    Raises:
        FaultRefused: none can be made, and why.
    """
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
    why = "; ".join(problems) or f"no {controller} cgroup is mounted at {ROOT}"
    raise FaultRefused(f"it needs a {controller} cgroup of its own, and none can be made: {why}")


def _lines(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8").splitlines()


def _parents(controller: str, pid: int) -> list[tuple[Path, bool, Path]]:
    """Where one could be made: folder, whether it is of version 2, where the process is now."""
    found: list[tuple[Path, bool, Path]] = []
    for line in _lines(pid):
        _, controllers, inside = line.split(":", 2)
        if controllers and controller in controllers.split(","):
            here = ROOT / controllers / inside.lstrip("/")
            if not here.exists():
                here = ROOT / controller / inside.lstrip("/")
            found.append((here, False, here))
        elif not controllers:
            # Processes live in leaves only, so it is beside ours, or further up.
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
