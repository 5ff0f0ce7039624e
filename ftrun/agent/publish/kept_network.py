"""Writes the state of the network paths next to the journal, for `ftrun network` after the run.

Runs in:  agent, main thread.
Takes in: lines of this node's journal; on the leader, the published status of the control loop.
Gives:    `network.json`, written atomically, with the `network` part of the status.
Survives: the run. A full disk costs the file, never the run.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from ftrun.agent.cluster.brain_status import BrainStatus
from ftrun.agent.publish.published import Published
from ftrun.errors import PeerError
from ftrun.journal import NETWORK_NAME

_log = logging.getLogger(__name__)
_WHEN = ("RoadsProbed", "RoadsPlan", "Generation")


class NetworkFile:
    """Writer of `network.json` of one agent."""

    def __init__(self, brain: Published[BrainStatus] | None, folder: Path) -> None:
        self._brain = brain
        self._path = folder / NETWORK_NAME

    def take(self, kind: str, fields: Mapping[str, object]) -> None:
        if kind in _WHEN:
            self.keep()

    def keep(self) -> None:
        """Write the present state; do nothing if this node is not the leader."""
        if self._brain is None:
            return
        try:
            brain = self._brain.read().value
        except PeerError:
            return
        document = json.loads(brain.cluster).get("network") if brain.leads else None
        if document is None:
            return
        draft = self._path.with_suffix(".tmp")
        try:
            draft.write_text(json.dumps(document))
            draft.replace(self._path)
        except OSError as error:
            _log.debug("%s is not kept: %s", self._path, error)
