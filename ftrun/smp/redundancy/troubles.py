"""The notices for the agent's journal when protection fails or is delayed.

Runs in:  the SMP, in the server thread.
Takes in: the problems that `Protector` finds.
Gives:    one SmpNotice for each change.
"""

import logging
from collections.abc import Callable, Collection, Sequence

from ftrun.ids import Version
from ftrun.smp.redundancy.group import LocalGroup
from ftrun.wire.messages import smp as smp_messages

MAX_REASONS = 3
"""Limit of the reasons reported per lost node and generation."""

TellAgent = Callable[..., None]
_log = logging.getLogger(__name__)


class GroupNotices:
    """The notices of one group."""

    def __init__(self, tell_agent: TellAgent) -> None:
        self._tell_agent = tell_agent
        self._lost: dict[str, set[str]] = {}
        """The reasons reported, by node."""
        self._unprotected = ""

    def clear(self) -> None:
        """Reset for another group, or for other positions in it."""
        self._lost.clear()

    def replicas_differ(
        self, at: Version, group: LocalGroup, holders: Collection[tuple[int, int]]
    ) -> None:
        """Report replicas that are no longer equal; `holders` are (position, rank) pairs."""
        nodes = [group.nodes[place].node_id for place in sorted({place for place, _ in holders})]
        self._tell(
            "replicas_differ",
            f"{at}: what was equal on several nodes is not any more; different on "
            f"{', '.join(nodes)}. It is encoded from now on",
            nodes,
            sorted(rank for _, rank in holders),
        )

    def damaged(self, why: str, node_id: str) -> None:
        self._tell("source_set_aside", why, [node_id])

    def lost(self, node_id: str, why: str) -> None:
        """Report that a link to or from a node is lost: each reason once, up to `MAX_REASONS`.

        A peer in a newer generation accepts each connection and closes it. An agent that imports
        torch does not read for many seconds. The first reason, a closed connection, may therefore
        not be the one that the operator needs.
        """
        told = self._lost.setdefault(node_id, set())
        if why not in told and len(told) < MAX_REASONS:
            told.add(why)
            self._tell("peer_lost", f"node {node_id}: {why}", [node_id])

    def stalled(self, at: Version, group: LocalGroup, stored: Collection[int]) -> None:
        late = [node.node_id for place, node in enumerate(group.nodes) if place not in stored]
        why = f"{at}: nothing has come for {group.patience_s:.0f} s; not done: {', '.join(late)}"
        self._tell("stalled", why, late)

    def unprotected(self, at: Version, why: str) -> None:
        if why != self._unprotected:
            self._unprotected = why
            _log.warning("%s is not protected: %s", at, why)
            self._tell("unprotected", f"{at}: {why}", [])

    def protected(self) -> None:
        """Record that versions are protected again."""
        self._unprotected = ""

    def _tell(self, kind: str, why: str, nodes: list[str], ranks: Sequence[int] = ()) -> None:
        self._tell_agent(smp_messages.SmpNotice(kind, why, nodes, list(ranks)))
