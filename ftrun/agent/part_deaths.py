"""Handles the deaths of this node's components, zygote and SMP.

Runs in:  agent, main thread.
Takes in: exit statuses, closed connections.
Gives:    a new process, or a run that continues without it; journal lines.
Survives: both of them.
"""

import logging
from typing import TYPE_CHECKING

from ftrun import clock, events
from ftrun.agent.journal_words import fields_of
from ftrun.agent.launch.process import ChildProcess
from ftrun.errors import PeerError
from ftrun.monitor.worker_exits import end_in_words
from ftrun.recovery import commands
from ftrun.recovery.supervisor import ComponentRestarts

if TYPE_CHECKING:
    from ftrun.agent.loop import RunLoop

_log = logging.getLogger(__name__)


class ChildExits:
    """The components of one node."""

    def __init__(self, run: "RunLoop") -> None:
        self._run = run
        self._parts = ComponentRestarts()

    @property
    def children(self) -> list[ChildProcess]:
        found = [child for child in (self._run.smp.child, self._zygote()) if child is not None]
        return [child for child in found if child.status is None]

    def look(self) -> None:
        for death in self._deaths():
            self._run.journal.write(death.journal_kind, **fields_of(death))
            self._do_without(self._parts.handle(death, now_s=clock.now_s()))

    def _do_without(self, command: commands.PartCommand) -> None:
        run = self._run
        run.journal.write(command.journal_kind, **fields_of(command))
        match command:
            case commands.RespawnSmp():
                run.smp.start()
                run.caretaker.smp_is_starting = True
            case commands.RespawnZygote():
                if run.zygote is not None:
                    run.zygote.start()
            case commands.DisableComponent(part="zygote"):
                run.workers.starter.zygote = None
                run.zygote = None
            case commands.DisableComponent():
                run.caretaker.smp_given_up = command.why
                _log.warning("no more snapshots: %s", command.why)

    def _deaths(self) -> list[events.PartEvent]:
        smp, found = self._run.smp, list[events.PartEvent]()
        zygote = self._zygote()
        if zygote is not None and zygote.status is None and zygote.reap():
            found.append(events.ZygoteExited(f"the zygote {end_in_words(zygote.ended_with)}"))
        try:
            smp.collect()
        except PeerError:
            smp.lost()
        # The exit status of an adopted SMP is unknown here, so its closed connection counts as the
        # exit. The connection may be lost before the loop starts, while this agent imports torch.
        is_lost = smp.child is None and smp.channel is None
        if is_lost and not self._run.caretaker.smp_given_up:
            found.append(events.SmpExited("the SMP has closed its connection"))
        child = smp.child
        if child is not None and child.status is None and child.reap():
            smp.lost()
            found.append(events.SmpExited(f"the SMP {end_in_words(child.ended_with)}"))
        return found

    def _zygote(self) -> ChildProcess | None:
        return self._run.zygote.child if self._run.zygote is not None else None
