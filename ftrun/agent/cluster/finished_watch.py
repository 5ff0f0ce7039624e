"""Looks for the record of a finished run while this node finds no other node.

Runs in:  agent: `look` in the main thread; a thread of its own reads the record, because a file
          system may hang.
Takes in: the record that the run has left with its checkpoints.
Gives:    `RunFinished` for the control loop.
Survives: a directory that cannot be read: the node continues to look for the others.
"""

import logging
import threading

from ftrun.agent.cluster.control_loop import ControlLoop
from ftrun.config.run_spec import RunSpec
from ftrun.membership.discovery import MemberRole
from ftrun.membership.events import RunFinished
from ftrun.urls import is_url
from ftrun.wire.finished_run import has_finished, read_owner

LOOK_EVERY_S = 2.0

_log = logging.getLogger("ftrun")


class FinishedWatch:
    """The watch of one agent. It does not poll checkpoints behind a URL."""

    def __init__(self, spec: RunSpec, brain: ControlLoop) -> None:
        self._spec = spec
        self._brain = brain
        directory = spec.checkpoint_directory
        is_used = spec.nodes is not None and directory is not None and not is_url(directory)
        self._directory = directory if is_used else None
        self._due_s: float | None = None
        self._is_told = False
        self.thread: threading.Thread | None = None

    def look(self, *, now_s: float) -> None:
        if self._directory is None or not self._is_apart():
            self._due_s = None
            return
        if self._due_s is None:
            self._due_s = now_s + LOOK_EVERY_S
        if now_s < self._due_s or (self.thread is not None and self.thread.is_alive()):
            return
        self._due_s = now_s + LOOK_EVERY_S
        self.thread = threading.Thread(target=self._read, name="ftrun-finished", daemon=True)
        self.thread.start()

    def _is_apart(self) -> bool:
        """Whether this node has found no leader, or leads a paused run."""
        lead = self._brain.member.lead
        if lead is not None:
            return lead.pause.is_on
        return self._brain.member.role in (MemberRole.JOINING, MemberRole.SEEKING)

    def _read(self) -> None:
        assert self._directory is not None
        plan = self._brain.plan
        record = read_owner(self._directory)
        if why := has_finished(self._spec, record, life=plan.life if plan is not None else ""):
            if not self._is_told:
                self._is_told = True
                _log.warning("%s", why)
            self._brain.tell(RunFinished(why))
