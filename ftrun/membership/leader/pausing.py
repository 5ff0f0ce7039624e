"""The pause of a run: too few nodes to run ranks, or too few voters to decide.

Runs in:  the agent that leads, or that proposes itself. Pure.
Takes in: what is missing, and how the run ends if it stays missing.
Gives:    a line for the operator when the reason changes; the end of the run after the limit.
"""

from dataclasses import replace

from ftrun.errors import ExitCode
from ftrun.recovery.commands import Command, EndRun, JournalEntry

PUT_OFF_S = 10.0
"""Seconds that a node has after it joined to let the run continue."""

_MOST_PUT_OFF_S = 60.0
"""Seconds by which nodes that join repeatedly can extend a pause beyond its limit."""

GONE_S = 60.0
"""Seconds within which a scheduler that restarts all nodes at once has done so."""

_GONE = (
    "nobody of this run is left: the machines of all its other nodes refuse the connection. It "
    "has ended while this node was away"
)
_GONE_ADVICE = (
    "If the other nodes have ended well, nothing. Else start all of them again, with this run's "
    "--run-id; what this node holds is kept for a while."
)


class NodeWait:
    """The wait of one leader for nodes."""

    def __init__(self, limit_s: float) -> None:
        self.why = ""
        """What is missing, in words."""
        self._limit_s = limit_s
        self._since_s: float | None = None
        self._end = EndRun(ExitCode.NOT_ENOUGH_NODES, "")
        self._not_before_s = 0.0

    @property
    def is_on(self) -> bool:
        return self._since_s is not None

    def begin(self, why: str, *, now_s: float, end: EndRun | None = None) -> list[Command]:
        """Pauses the run, or updates the reason of the pause.

        Args:
            why: in words.
            now_s: the time.
            end: how the run ends if the wait fails; None: too few nodes.
        """
        self._end = end or EndRun(ExitCode.NOT_ENOUGH_NODES, "")
        if self._since_s is None:
            self._since_s = now_s
        if why == self.why:
            return []
        self.why = why
        text = f"PAUSED: {why}; gives up after {self._limit_s:.0f} s"
        return [JournalEntry("Paused", text, {}, say=True)]

    def put_off(self, *, now_s: float) -> None:
        if self._since_s is not None:
            latest_s = self._since_s + self._limit_s + _MOST_PUT_OFF_S
            self._not_before_s = min(now_s + PUT_OFF_S, latest_s)

    def waited_s(self, *, now_s: float) -> float:
        return 0.0 if self._since_s is None else now_s - self._since_s

    def over(self) -> None:
        self._since_s, self.why = None, ""

    def given_up(self, *, now_s: float, are_gone: bool = False) -> EndRun | None:
        """The end of the run, if it has paused for too long.

        Args:
            now_s: the time.
            are_gone: no other node of the run is left, as far as this agent can tell.
        """
        if self._since_s is None:
            return None
        if are_gone and now_s - self._since_s >= min(GONE_S, self._limit_s):
            return EndRun(ExitCode.TRY_AGAIN, _GONE, advice=_GONE_ADVICE)
        if now_s - self._since_s < self._limit_s or now_s < self._not_before_s:
            return None
        return replace(self._end, why=f"{self.why}, for {now_s - self._since_s:.0f} s")
