"""The recorded state of a virtual cluster: its place and its lock.

Takes in: names. Gives: the state of a cluster in its folder, to any process.

Rule 1: a change is made under the lock, and the file is replaced as a whole; a reader needs no
        lock.
Rule 2: no process is identified by its pid alone (see virtual_node).
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
from typing import Any

from virtual_node import ClusterError, Process

_FORMAT = 2
"""Of the file. Checkouts that write another version do not see each other's clusters."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")


@dataclass
class Network:
    """The network between the nodes of a cluster."""

    rails: int = 1
    """Interfaces of each node; each has a network of its own."""
    leaves: int = 1
    """Switches of each rail to which nodes are connected."""
    uplink: str = ""
    """Rate from a leaf to the others, in each direction, such as 400mbit; empty: no limit."""
    rail_rate: str = ""
    """Rate of a node's cable, in each direction; empty: no limit."""
    leaf_of: list[int] = field(default_factory=list)
    """The leaf of each node; empty: in turns, node0 to leaf0, node1 to leaf1 ..."""

    def leaf(self, index: int) -> int:
        return self.leaf_of[index] if self.leaf_of else index % self.leaves


@dataclass
class Cable:
    """The state of one cable of a node, from its interface to its leaf."""

    address: str
    is_cut: bool = False
    cut_from: list[str] = field(default_factory=list)
    """Names of the nodes with which no packet passes over this rail, in either direction."""
    rate: str = ""
    """A rate below the first one; empty: it has its first rate."""
    delay_ms: float = 0.0
    loss_percent: float = 0.0
    delayer: Process | None = None

    @property
    def troubles(self) -> list[str]:
        return [
            *(["cut"] if self.is_cut else []),
            *[f"cut from {peer}" for peer in self.cut_from],
            *([f"slow {self.rate}"] if self.rate else []),
            *([f"{self.delay_ms:g} ms"] if self.delay_ms else []),
            *([f"{self.loss_percent:g} % lost"] if self.loss_percent else []),
        ]


@dataclass
class Node:
    """The state of one node."""

    name: str
    index: int
    cables: list[Cable]
    """One for each rail: the first is that of eth0."""
    leaf: int = 0
    init: Process | None = None
    """Its first process; None: it is dead."""
    frozen_by: str = ""
    """The cgroup that freezes it, or `signals`; empty: it is not frozen."""

    @property
    def address(self) -> str:
        """The address of its name."""
        return self.cables[0].address

    @property
    def is_alive(self) -> bool:
        return self.init is not None and self.init.is_alive

    @property
    def state(self) -> str:
        """In words; the common state of all its cables is printed once."""
        if not self.is_alive:
            return "dead"
        found = ["frozen" if self.frozen_by else "up"]
        troubles = [cable.troubles for cable in self.cables]
        common = [one for one in troubles[0] if all(one in rest for rest in troubles)]
        for rail, of_rail in enumerate(troubles):
            found += [f"eth{rail} {one}" for one in of_rail if one not in common]
        return ", ".join([found[0], *common, *found[1:]])


@dataclass
class State:
    """The content of a cluster's file."""

    name: str
    shm: str
    owner: Process | None
    """The process it must not outlive; None: it stays until `down`."""
    network: Network = field(default_factory=Network)
    switch: Process | None = None
    nodes: list[Node] = field(default_factory=list)

    @property
    def is_left_over(self) -> bool:
        """Its owner has ended, or all its processes have (the machine was restarted)."""
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
        nodes = found.pop("nodes")
        for node in nodes:
            cables = [Cable(**_with_process(cable, "delayer")) for cable in node["cables"]]
            node["cables"] = cables
        for name in ("owner", "switch"):
            _with_process(found, name)
        found["network"] = Network(**found["network"])
        return State(**found, nodes=[Node(**_with_process(node, "init")) for node in nodes])


def _with_process(about: dict[str, Any], name: str) -> dict[str, Any]:
    about[name] = about[name] and Process(**about[name])
    return about


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
        return Path(f"/run/ftrun-vcluster-v{_FORMAT}")
    return Path(tempfile.gettempdir()) / f"ftrun-vcluster-v{_FORMAT}-{os.getuid()}"


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """One change at a time, of all clusters. The folder is removed with the last cluster."""
    folder = root()
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        fcntl.flock(handle, fcntl.LOCK_EX)
        # The previous owner of the lock may have removed the folder.
        if folder.exists() and os.fstat(handle).st_ino == folder.stat().st_ino:
            break
        os.close(handle)
    try:
        if os.fstat(handle).st_uid != os.geteuid():
            raise ClusterError(f"{folder} is another user's")
        yield
    finally:
        with contextlib.suppress(OSError):  # other clusters exist
            folder.rmdir()
        os.close(handle)


def clusters() -> list[str]:
    """Names of all clusters of this user, including those that were left over."""
    folder = root()
    return (
        sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.exists() else []
    )
