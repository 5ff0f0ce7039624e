"""How a run ends: who must still hear of it before the lead goes.

Runs in:  the agent that leads. Pure.
Takes in: the end, who has said that it has ended.
Gives:    the lead's own end, once it may end too; the outside witness forgets the run then.
"""

from collections.abc import Collection

from ftrun.errors import ExitCode
from ftrun.membership.leader.failure_detector import FailureDetector
from ftrun.recovery.commands import Command, EndRun, WitnessOperation


class RunShutdown:
    """One lead's end."""

    def __init__(self, peers: FailureDetector) -> None:
        self.ending: EndRun | None = None
        """How the run ends, once that is known."""
        self.is_for_all = False
        """Who ends it led a generation in effect: no other part of the run goes on."""
        self.audience: frozenset[str] | None = None
        """Nodes that are to end; None: all. A leader that gives up ends only its own followers."""
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
        """No other part of the run goes on."""
        return self.ending is not None and self.audience is None

    def is_told(self, node_id: str) -> bool:
        """Whether this node is to hear of the end, if there is one."""
        return self.ending is None or self.audience is None or node_id in self.audience

    def has_ended(self, node_id: str) -> None:
        """This node has heard it, and is done."""
        self._ended.add(node_id)

    def look(self, *, now_s: float) -> list[Command]:
        """End here too, once all have heard that it is over, or have had the time to."""
        if self.ending is None:
            return []
        since_s, is_done = self._since_s, self.ending.exit_code == ExitCode.DONE
        others = self._peers.to_hear_the_end(since_s, is_done=is_done, now_s=now_s)
        others -= {self._peers.me.node_id, *self._ended}
        if any(self.is_told(node_id) for node_id in others):
            return []
        # Not before: an agent that is being started again finds us there, and hears of the end.
        forget = (
            self._peers.witness.ask(WitnessOperation.FORGET, now_s=now_s) if self.is_for_all else []
        )
        return [*forget, self.ending]
