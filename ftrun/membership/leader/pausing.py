"""The pause of a run that waits for nodes, and its end, which nodes must acknowledge first."""

from collections.abc import Collection

from msgspec.structs import replace

from ftrun.errors import ExitCode
from ftrun.membership.leader.failure_detector import FailureDetector
from ftrun.records.membership import RunPaused
from ftrun.recovery.commands import Command, EndRun, JournalEntry, WitnessOperation

PUT_OFF_S = 10.0
"""Seconds that a node has after it joined to let the run continue."""

_MOST_PUT_OFF_S = 60.0
"""Seconds by which nodes that join repeatedly can extend a pause beyond its limit."""

GONE_S = 60.0
"""Seconds within which a scheduler that restarts all nodes at once has done so."""

_GONE = (
    "no other node of this run is left: the machines of all others refuse the connection. The run "
    "ended while this node was unreachable"
)
_GONE_ADVICE = (
    "If the other nodes have finished, do nothing. Otherwise restart all nodes with the --run-id "
    "of this run: this node retains its snapshots for smp.orphan_timeout_s."
)


class NodeWait:
    """The wait of one leader for nodes."""

    def __init__(self, limit_s: float) -> None:
        self.reason = ""
        """What is missing, in words."""
        self._limit_s = limit_s
        self._since_s: float | None = None
        self._end = EndRun(ExitCode.NOT_ENOUGH_NODES, "")
        self._not_before_s = 0.0

    @property
    def is_on(self) -> bool:
        return self._since_s is not None

    def begin(self, reason: str, *, now_s: float, end: EndRun | None = None) -> list[Command]:
        """Pauses the run, or updates the reason; without `end`, the run ends for too few nodes."""
        self._end = end or EndRun(ExitCode.NOT_ENOUGH_NODES, "")
        if self._since_s is None:
            self._since_s = now_s
        if reason == self.reason:
            return []
        self.reason = reason
        text = f"PAUSED: {reason}; gives up after {self._limit_s:.0f} s"
        return [JournalEntry(RunPaused(text), announce=True)]

    def put_off(self, *, now_s: float) -> None:
        if self._since_s is not None:
            latest_s = self._since_s + self._limit_s + _MOST_PUT_OFF_S
            self._not_before_s = min(now_s + PUT_OFF_S, latest_s)

    def waited_s(self, *, now_s: float) -> float:
        return 0.0 if self._since_s is None else now_s - self._since_s

    def over(self) -> None:
        self._since_s, self.reason = None, ""

    def given_up(self, *, now_s: float, are_gone: bool = False) -> EndRun | None:
        """The end of the run, if it has paused for too long, or if all other nodes have ended."""
        if self._since_s is None:
            return None
        if are_gone and now_s - self._since_s >= min(GONE_S, self._limit_s):
            return EndRun(ExitCode.TRY_AGAIN, _GONE, advice=_GONE_ADVICE)
        if now_s - self._since_s < self._limit_s or now_s < self._not_before_s:
            return None
        return replace(self._end, reason=f"{self.reason}, for {now_s - self._since_s:.0f} s")


class RunShutdown:
    """The end of the run, as one leader carries it out."""

    def __init__(self, peers: FailureDetector) -> None:
        self.ending: EndRun | None = None
        """How the run ends; None while it continues."""
        self.is_for_all = False
        """The leader led an active generation when it began the end: no other part of the run
        continues."""
        self.recipients: frozenset[str] | None = None
        """Nodes that must end; None: all. A leader that gives up ends only its own followers."""
        self._peers = peers
        self._since_s = 0.0
        self._ended: set[str] = set()

    def begin(
        self, command: EndRun, is_for_all: bool, recipients: Collection[str] | None, *, now_s: float
    ) -> None:
        self.ending, self.is_for_all, self._since_s = command, is_for_all, now_s
        self.recipients = None if recipients is None else frozenset(recipients)

    @property
    def ends_the_run(self) -> bool:
        return self.ending is not None and self.recipients is None

    def must_be_notified(self, node_id: str) -> bool:
        """Whether the leader sends heartbeats to this node; after `begin`, only to recipients."""
        return self.ending is None or self.recipients is None or node_id in self.recipients

    def has_ended(self, node_id: str) -> None:
        self._ended.add(node_id)

    def poll(self, *, now_s: float) -> list[Command]:
        """Ends this agent too, after all nodes have acknowledged the end or had the time to."""
        if self.ending is None:
            return []
        since_s, is_done = self._since_s, self.ending.exit_code == ExitCode.DONE
        others = self._peers.to_receive_the_end(since_s, is_done=is_done, now_s=now_s)
        others -= {self._peers.me.node_id, *self._ended}
        if any(self.must_be_notified(node_id) for node_id in others):
            return []
        # Not earlier: a restarting agent finds this leader at the witness, and learns of the end.
        if not self.is_for_all:
            return [self.ending]
        return [*self._peers.witness.ask(WitnessOperation.CLEAR, now_s=now_s), self.ending]
