"""A node's ranks are stopped where they stand, and let go again.

Runs in:  every agent. Pure.
Takes in: what this agent knows of its generation, the reasons to wait.
Gives:    `HoldRanks` and `ReleaseRanks`, each once.

Rule 1: only ranks of a generation that is in effect here are held; a ballot ends them anyway.
"""

from ftrun.recovery.commands import Command, HoldRanks, Note, ReleaseRanks
from ftrun.recovery.follower import Follower
from ftrun.recovery.lead import Lead
from ftrun.recovery.waiting import Waiting


class Holding:
    """Whether one node's ranks are held."""

    def __init__(self, follower: Follower) -> None:
        self.is_on = False
        self._follower = follower

    def look(self, lead: Lead | None, waiting: Waiting, *, now_s: float) -> list[Command]:
        """Stop this node's ranks while the run may go on without them.

        Args:
            lead: this agent's own leadership, if it leads.
            waiting: its reasons to wait, where it follows.
            now_s: the time.
        """
        follower, plan = self._follower, self._follower.plan
        if not follower.is_member or plan is None or follower.is_in_ballot:
            return []
        why = "" if plan.is_alone else _why(lead, waiting, now_s)
        if why and not self.is_on:
            self.is_on = True
            return [HoldRanks(why), Note("Held", f"the ranks of this node wait: {why}", say=True)]
        if self.is_on and not why:
            self.is_on = False
            return [ReleaseRanks("the lead is heard again")]
        return []


def _why(lead: Lead | None, waiting: Waiting, now_s: float) -> str:
    if lead is not None:
        return "too few of the other nodes are heard" if lead.is_doubtful else ""
    return waiting.why(now_s=now_s)
