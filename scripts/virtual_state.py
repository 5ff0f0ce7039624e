"""What is written down of a virtual cluster, where, and under which lock.

Takes in: names. Gives: the state of a cluster as it stands in its folder, to whichever process.

Rule 1: a change is made under the lock, and the file is replaced as a whole; who only reads needs
        no lock.
Rule 2: no process is known by its pid alone (see virtual_node).
"""

import contextlib
import fcntl
import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from virtual_node import ClusterError, Process

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")


@dataclass
class Node:
    """What is known of one node."""

    name: str
    index: int
    address: str
    init: Process | None = None
    """Its first process; None: it is dead."""
    is_cut: bool = False
    cut_from: list[str] = field(default_factory=list)
    """Names of the nodes to which its packets do not come, nor theirs to it."""
    frozen_by: str = ""
    """The cgroup that holds it, or `signals`; empty: it is not frozen."""
    rate: str = ""
    delay_ms: float = 0.0
    loss_percent: float = 0.0
    delayer: Process | None = None

    @property
    def is_alive(self) -> bool:
        return self.init is not None and self.init.is_alive

    @property
    def state(self) -> str:
        if not self.is_alive:
            return "dead"
        return ", ".join(
            [
                "frozen" if self.frozen_by else "up",
                *(["cut"] if self.is_cut else []),
                *[f"cut from {peer}" for peer in self.cut_from],
                *([f"slow {self.rate}"] if self.rate else []),
                *([f"{self.delay_ms:g} ms"] if self.delay_ms else []),
                *([f"{self.loss_percent:g} % lost"] if self.loss_percent else []),
            ]
        )


@dataclass
class State:
    """What the folder of a cluster says."""

    name: str
    shm: str
    owner: Process | None
    """The process it must not outlive; None: it stays until `down`."""
    switch: Process | None = None
    nodes: list[Node] = field(default_factory=list)

    @property
    def is_left_over(self) -> bool:
        """Its owner is gone, or all of itself (the machine was started anew)."""
        if self.owner is not None:
            return not self.owner.is_alive
        return self.switch is None or not self.switch.is_alive

    def dump(self, folder: Path) -> None:
        (folder / "new").write_text(json.dumps(asdict(self), indent=1))
        (folder / "new").rename(folder / "state.json")

    @staticmethod
    def load(folder: Path) -> "State | None":
        try:
            found = json.loads((folder / "state.json").read_text())
        except FileNotFoundError:
            return None
        for about in (found, *found["nodes"]):
            for key in {"owner", "switch", "init", "delayer"} & about.keys():
                about[key] = about[key] and Process(**about[key])
        return State(**{**found, "nodes": [Node(**node) for node in found["nodes"]]})


def find(state: State, node: int | str) -> Node:
    for known in state.nodes:
        if str(node) in (known.name, str(known.index)):
            return known
    names = f"{state.nodes[0].name} to {state.nodes[-1].name}"
    raise ClusterError(f"there is no node {node!r} in cluster {state.name!r}: it has {names}")


def alive(node: Node) -> Process:
    if node.init is None or not node.init.is_alive:
        raise ClusterError(f"{node.name} is dead: revive it first")
    return node.init


# --- folders and the lock ------------------------------------------------------------------------


def checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ClusterError(f"the name {name!r} is not 1 to 40 of letters, digits, '.', '_', '-'")
    return name


def root() -> Path:
    if os.access("/run", os.W_OK):
        return Path("/run/ftrun-vcluster")
    return Path(tempfile.gettempdir()) / f"ftrun-vcluster-{os.getuid()}"


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """One change at a time, of all clusters. The folder goes when the last cluster has gone."""
    folder = root()
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        fcntl.flock(handle, fcntl.LOCK_EX)
        # Whoever had the lock before may have removed the folder.
        if folder.exists() and os.fstat(handle).st_ino == folder.stat().st_ino:
            break
        os.close(handle)
    try:
        if os.fstat(handle).st_uid != os.geteuid():
            raise ClusterError(f"{folder} is another user's")
        yield
    finally:
        with contextlib.suppress(OSError):  # there are clusters left
            folder.rmdir()
        os.close(handle)


def clusters() -> list[str]:
    """Names of all clusters of this user, those that were left over included."""
    folder = root()
    return (
        sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.exists() else []
    )
