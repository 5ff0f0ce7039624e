"""A run that cannot go on for now: too few nodes, or too few that may decide.

Runs in:  the agent that leads, or that tries to. Pure.
Takes in: what is missing, and how the run ends if that does not come.
Gives:    a line for the operator where the reason is news; the end, once the limit has passed.
"""

from dataclasses import replace

from ftrun.errors import ExitCode
from ftrun.recovery.commands import Command, EndRun, JournalEntry

PUT_OFF_S = 10.0
"""A node that has come gets this long to make the run go on."""

_MOST_PUT_OFF_S = 60.0
"""Nodes that come again and again keep a run no longer than this beyond its limit."""

GONE_S = 60.0
"""A scheduler that starts all nodes again at once has done so within this."""

_GONE = (
    "nobody of this run is left: the machines of all its other nodes refuse the connection. It "
    "has ended while this node was away"
)
_GONE_ADVICE = (
    "If the other nodes have ended well, nothing. Else start all of them again, with this run's "
    "--run-id; what this node holds is kept for a while."
)


class NodeWait:
    """One lead's wait for nodes."""

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
        """The run waits; again where something else is missing by now.

        Args:
            why: in words.
            now_s: the time.
            end: what becomes of the run where the wait is in vain; else it lacks nodes.
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
        """A node has come: the wait may be about to end."""
        if self._since_s is not None:
            latest_s = self._since_s + self._limit_s + _MOST_PUT_OFF_S
            self._not_before_s = min(now_s + PUT_OFF_S, latest_s)

    def waited_s(self, *, now_s: float) -> float:
        return 0.0 if self._since_s is None else now_s - self._since_s

    def over(self) -> None:
        """The run goes on."""
        self._since_s, self.why = None, ""

    def given_up(self, *, now_s: float, are_gone: bool = False) -> EndRun | None:
        """The end of the run, where it has waited for too long.

        Args:
            now_s: the time.
            are_gone: nobody of the run is left, as far as this agent can see.
        """
        if self._since_s is None:
            return None
        if are_gone and now_s - self._since_s >= min(GONE_S, self._limit_s):
            return EndRun(ExitCode.TRY_AGAIN, _GONE, advice=_GONE_ADVICE)
        if now_s - self._since_s < self._limit_s or now_s < self._not_before_s:
            return None
        return replace(self._end, why=f"{self.why}, for {now_s - self._since_s:.0f} s")
