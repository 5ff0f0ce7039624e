"""Ranks that stand still until it is clear who leads.

Runs in:  every agent. Pure.
Takes in: the word of the membership.
Gives:    the orders to stop a node's ranks and to let them go on, each once.
"""

from ftrun.recovery.commands import Command, HoldRanks, Note, ReleaseRanks


class Hold:
    """Whether this node's ranks are stopped."""

    def __init__(self) -> None:
        self.is_on = False

    def put_on(self, why: str) -> list[Command]:
        if self.is_on:
            return []
        self.is_on = True
        return [HoldRanks(why), Note("Held", f"the ranks of this node wait: {why}", say=True)]

    def take_off(self) -> list[Command]:
        if not self.is_on:
            return []
        self.is_on = False
        return [ReleaseRanks("the lead is heard again")]
