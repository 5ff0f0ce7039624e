"""What a run says of its network: asked of its agent, or kept from before its end.

Runs in:  cli.
Takes in: the part `network` of a status document; `network.json` below the folder of its logs.
Gives:    a `NetworkReport`.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ftrun.cli.commands.status import document_of
from ftrun.cli.runs import FoundRun, RunLiveness, choose
from ftrun.errors import FtrunError, ProtocolError, UsageError
from ftrun.journal import NETWORK_NAME
from ftrun.tools.report.report_logs import folder_of
from ftrun.wire.cluster.generation import NetworkPlan, PathMeasurement, Rail


class NetworkFindingText(msgspec.Struct, frozen=True):
    """What a survey says is wrong, in words."""

    kind: str = ""
    culprit: str = ""
    sentence: str = ""


class NetworkStatus(msgspec.Struct, frozen=True):
    """The part `network` of a status document; docs/network.md describes it."""

    mode: str = "report"
    probed_s: float = 0.0
    """How long the survey took."""
    at_s_ago: float | None = None
    """When it was over; None: it is not."""
    coverage: float = 0.0
    """Of all roads, the part that was probed."""
    rails: dict[str, list[Rail]] = {}
    """Of each node, by node id."""
    roads: list[PathMeasurement] = []
    """The worst first, of very many only those."""
    num_roads: int = 0
    """All that are known, those that are left out too; 0: none is."""
    findings: list[NetworkFindingText] = []
    plan: NetworkPlan | None = None
    in_effect: bool = False

    @property
    def chosen(self) -> NetworkPlan:
        """The plan; one that says nothing where there is none."""
        return self.plan or NetworkPlan()


@dataclass(frozen=True, slots=True)
class NetworkReport:
    """What is known, and whose word it is."""

    run_id: str
    part: NetworkStatus
    document: dict[str, Any]
    """The same as it came."""
    is_live: bool
    source: str
    """For people: the run, or the file."""


def told_by(name: str | None, *, below: Path) -> NetworkReport:
    """Ask the run, or read what it has kept.

    Args:
        name: a run id, or the folder of its logs; None: the run that is alive, else the one whose
            journal was written to last.
        below: where `ftrun-logs` is looked for.

    Raises:
        UsageError: several runs are alive and none is named.
        FtrunError: there is no such run, or it knows nothing of a network.
        PeerError: the agent does not answer.
    """
    run, why = _alive(name)
    if run is not None and run.life is RunLiveness.RUNNING:
        document = document_of(run)
        found = (document.get("cluster") or {}).get("network")
        if not isinstance(found, dict):
            raise FtrunError(f"run {run.name} {_without(document)}")
        return _told(run.run_id, found, is_live=True, source=f"run {run.name}")
    try:
        folder = folder_of(name, below=below)
    except UsageError as error:
        raise FtrunError(f"{why or error}. Nothing is kept of it here either: {error}") from error
    return _kept(folder)


def _alive(name: str | None) -> tuple[FoundRun | None, str]:
    """The run, or why there is none."""
    try:
        return choose(name, command="network"), ""
    except UsageError:
        if name is None or "/" not in name:
            raise
        return None, ""  # a folder
    except FtrunError as error:
        return None, str(error)


def _without(document: dict[str, Any]) -> str:
    if document.get("cluster") is None:
        return "runs on one node: there are no roads between nodes"
    return (
        "has not surveyed its network yet; that is done before the first generation, unless "
        "--network-plan off was given"
    )


def _kept(folder: Path) -> NetworkReport:
    """The newest of all nodes that have led."""
    paths = [folder / NETWORK_NAME, *folder.glob(f"*/{NETWORK_NAME}")]
    there = [path for path in paths if path.is_file()]
    if not there:
        raise FtrunError(
            f"{folder} has no {NETWORK_NAME}: the run was on one node, had --network-plan off, or "
            "its lead wrote to a disk of its own; ask on that node"
        )
    path = max(there, key=lambda one: one.stat().st_mtime)
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise FtrunError(f"{path} cannot be read: {error}") from error
    return _told(folder.name, document, is_live=False, source=str(path))


def _told(run_id: str, document: Any, *, is_live: bool, source: str) -> NetworkReport:
    try:
        part = msgspec.convert(document, NetworkStatus)
    except msgspec.ValidationError as error:
        raise ProtocolError(
            f"what {source} says of its network has another form: {error}. Ask with the ftrun "
            "that has started it"
        ) from error
    return NetworkReport(run_id, part, document, is_live, source)
