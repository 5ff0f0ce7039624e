"""The end of a run: which nodes must acknowledge it before the leader ends.

Runs in:  the agent that leads. Pure.
Takes in: the end, acknowledgements of the nodes.
Gives:    the leader's own end, when it is due; the witness forgets the run at that time.
"""

from collections.abc import Collection

from ftrun.errors import ExitCode
from ftrun.membership.leader.failure_detector import FailureDetector
from ftrun.recovery.commands import Command, EndRun, WitnessOperation


class RunShutdown:
    """The end of the run, as one leader carries it out."""

    def __init__(self, peers: FailureDetector) -> None:
        self.ending: EndRun | None = None
        """How the run ends; None while it continues."""
        self.is_for_all = False
        """The leader led an active generation when it began the end: no other part of the run
        continues."""
        self.audience: frozenset[str] | None = None
        """Nodes that must end; None: all. A leader that gives up ends only its own followers."""
        self._peers = peers
        self._since_s = 0.0
        self._ended: set[str] = set()

    def begin(
        self,
        command: EndRun,
        is_for_all: bool,
        audience: Collection[str] | None,
        *,
        now_s: float,
    ) -> None:
        self.ending, self.is_for_all, self._since_s = command, is_for_all, now_s
        self.audience = None if audience is None else frozenset(audience)

    @property
    def ends_the_run(self) -> bool:
        """Whether no other part of the run continues."""
        return self.ending is not None and self.audience is None

    def is_told(self, node_id: str) -> bool:
        """Whether this node receives heartbeats: always, until only the audience does."""
        return self.ending is None or self.audience is None or node_id in self.audience

    def has_ended(self, node_id: str) -> None:
        self._ended.add(node_id)

    def look(self, *, now_s: float) -> list[Command]:
        """Ends this agent too, after all nodes have acknowledged the end or had the time to."""
        if self.ending is None:
            return []
        since_s, is_done = self._since_s, self.ending.exit_code == ExitCode.DONE
        others = self._peers.to_hear_the_end(since_s, is_done=is_done, now_s=now_s)
        others -= {self._peers.me.node_id, *self._ended}
        if any(self.is_told(node_id) for node_id in others):
            return []
        # Not earlier: a restarting agent finds this leader at the witness, and learns of the end.
        forget = (
            self._peers.witness.ask(WitnessOperation.FORGET, now_s=now_s) if self.is_for_all else []
        )
        return [*forget, self.ending]
