"""Restarts a node's own components when they die: the SMP and the zygote.

Runs in:  every agent, for its own node. Pure.
Takes in: their deaths.
Gives:    a restart, or the command to continue without the component.
Source:   restart intensity, as in budget.py.
"""

from ftrun.events import PartEvent, SmpExited
from ftrun.recovery.budget import RestartBudget
from ftrun.recovery.commands import DisableComponent, PartCommand, RespawnSmp, RespawnZygote

OWN_DEATHS, OWN_DEATHS_WINDOW_S = 5, 600.0


class ComponentRestarts:
    """The restart budget of each component."""

    def __init__(self) -> None:
        self._smp = RestartBudget(OWN_DEATHS, OWN_DEATHS_WINDOW_S)
        self._zygote = RestartBudget(OWN_DEATHS, OWN_DEATHS_WINDOW_S)

    def handle(self, event: PartEvent, *, now_s: float) -> PartCommand:
        is_smp = isinstance(event, SmpExited)
        budget = self._smp if is_smp else self._zygote
        if budget.is_spent(now_s=now_s):
            part = "smp" if is_smp else "zygote"
            return DisableComponent(part, f"{event.text}; it has died too often ({budget})")
        budget.spend(now_s=now_s)
        return RespawnSmp(event.text) if is_smp else RespawnZygote(event.text)
