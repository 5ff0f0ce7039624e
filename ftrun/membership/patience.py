"""Progress lines and the time limit while an agent waits for a run to begin.

Runs in:  every agent. Pure.
Takes in: the time waited, and the nodes reached.
Gives:    a line every `SAY_EVERY_S`; the end of the wait, with what to check.
"""

from ftrun.config.cluster import MembershipSettings
from ftrun.errors import ExitCode
from ftrun.recovery.commands import Command, EndRun, JournalEntry

SAY_EVERY_S = 15.0
"""Seconds between two lines about what a start is waiting for."""


class JoinTimeout:
    """The wait of one agent for its run."""

    def __init__(self, settings: MembershipSettings, *, now_s: float) -> None:
        self._settings = settings
        self._say_due_s = now_s + SAY_EVERY_S

    def wait(self, waited_s: float, reach: str, *, gathers: bool, now_s: float) -> list[Command]:
        """Reports what is waited for, or ends the run after `join_wait_s`.

        Args:
            waited_s: so far.
            reach: the nodes present, or why there are none.
            gathers: this agent is the endpoint that the other nodes join.
            now_s: the time.
        """
        if waited_s >= self._settings.times.join_wait_s:
            code = ExitCode.NOT_ENOUGH_NODES if gathers else ExitCode.TRY_AGAIN
            why = self._nobody_comes if gathers else self._nobody_takes_us
            return [EndRun(code, why(waited_s, reach))]
        if now_s < self._say_due_s or waited_s < SAY_EVERY_S:
            return []
        self._say_due_s = now_s + SAY_EVERY_S
        return [JournalEntry("Waiting", f"waiting for {waited_s:.0f} s: {reach}", say=True)]

    def _nobody_comes(self, waited_s: float, reach: str) -> str:
        port = next((port for _, port in self._settings.endpoints), 0)
        if self._settings.has_witness:
            return _not_met(f"the run has not begun within {waited_s:.0f} s", reach)
        return (
            f"the run has not begun within {waited_s:.0f} s: {reach}. Check that ftrun runs on the "
            f"others, with the same --rdzv-endpoint and --rdzv-id, and that port {port} of this "
            "node is open to them"
        )

    def _nobody_takes_us(self, waited_s: float, reach: str) -> str:
        endpoints = self._settings.endpoints
        host = " or ".join(host for host, _ in endpoints)
        port = " or ".join(dict.fromkeys(str(port) for _, port in endpoints))
        if self._settings.has_witness:
            return _not_met(f"no run has taken this node in within {waited_s:.0f} s", reach)
        return (
            f"no run has taken this node in within {waited_s:.0f} s: {reach}. Check that ftrun "
            f"runs on {host}, that it was given the same --rdzv-endpoint, and that port {port} is "
            "open between the nodes"
        )


def _not_met(what: str, reach: str) -> str:
    return (
        f"{what}: {reach}. Check that ftrun runs on the others, with the same etcd in "
        "--rdzv-endpoint and the same --rdzv-id, and that the nodes reach one another"
    )
