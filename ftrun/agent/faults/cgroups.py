"""Creates cgroups for one fault, to limit CPU, memory or the number of processes.

Runs in:  agent, main thread.
Takes in: a controller, and a process that will move into the cgroup.
Gives:    a new cgroup for this controller, and the cgroup from which its processes come.

The reverter of the fault removes the cgroup, even if the agent has ended.
"""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from ftrun.errors import FaultRefused
from ftrun.wire.fault_orders import FAULT_PREFIX

ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class FaultCgroup:
    """The cgroup of one fault; `parent` is the cgroup to which its processes return."""

    path: Path
    parent: Path
    is_v2: bool

    @property
    def undo(self) -> list[object]:
        """Step for the reverter that empties and removes the cgroup."""
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
    """Check that no fault holds this process in a cgroup.

    If two faults overlapped, a reverter would move the process into a cgroup that the other
    reverter has removed.

    Raises:
        FaultRefused: a fault holds the process.
    """
    if any(FAULT_PREFIX in line for line in _lines(pid)):
        raise FaultRefused(
            f"process {pid} is in the cgroup of an earlier fault: ask when it is over"
        )


def make_group(controller: str, name: str, pid: int) -> FaultCgroup:
    """Create a cgroup of this controller below (v1) or next to (v2) the cgroup of a process.

    Raises:
        FaultRefused: no cgroup can be created; the text has the reasons.
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
