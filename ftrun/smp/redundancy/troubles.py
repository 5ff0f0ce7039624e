"""What the agent's journal is told when protection does not go as it should.

Runs in:  the SMP, in the server's thread.
Takes in: what `Protector` has met.
Gives:    a SmpNotice for each thing that has changed, once.
"""

import logging
from collections.abc import Callable, Collection, Sequence

from ftrun.ids import Version
from ftrun.smp.redundancy.group import LocalGroup
from ftrun.wire.messages import smp as smp_messages

MAX_REASONS = 3
"""Why a node's link is lost; more of them are not told in one generation."""

TellAgent = Callable[..., None]
_log = logging.getLogger(__name__)


class GroupNotices:
    """Of one group."""

    def __init__(self, tell_agent: TellAgent) -> None:
        self._tell_agent = tell_agent
        self._lost: dict[str, set[str]] = {}
        """What was told of each node."""
        self._unprotected = ""

    def clear(self) -> None:
        """Another group, or other places."""
        self._lost.clear()

    def replicas_differ(
        self, at: Version, group: LocalGroup, holders: Collection[tuple[int, int]]
    ) -> None:
        """What was equal on several nodes is not any more; whose, as (place, rank)."""
        nodes = [group.nodes[place].node_id for place in sorted({place for place, _ in holders})]
        self._tell(
            "replicas_differ",
            f"{at}: what was equal on several nodes is not any more; different on "
            f"{', '.join(nodes)}. It is encoded from now on",
            nodes,
            sorted(rank for _, rank in holders),
        )

    def damaged(self, why: str, node_id: str) -> None:
        """What has come from a node is not what it was to be."""
        self._tell("source_set_aside", why, [node_id])

    def lost(self, node_id: str, why: str) -> None:
        """There is no link to a node, or none from it; each reason once, and not many.

        A peer in a newer generation takes each call and hangs up, and an agent that imports torch
        does not read for many seconds. But what comes first, a closed connection, may not be the
        reason that the operator needs.
        """
        told = self._lost.setdefault(node_id, set())
        if why not in told and len(told) < MAX_REASONS:
            told.add(why)
            self._tell("peer_lost", f"node {node_id}: {why}", [node_id])

    def stalled(self, at: Version, group: LocalGroup, stored: Collection[int]) -> None:
        """All have sealed a version, and nothing moves."""
        late = [node.node_id for place, node in enumerate(group.nodes) if place not in stored]
        why = f"{at}: nothing has come for {group.patience_s:.0f} s; not done: {', '.join(late)}"
        self._tell("stalled", why, late)

    def unprotected(self, at: Version, why: str) -> None:
        """Versions are protected against the loss of no node from now on."""
        if why != self._unprotected:
            self._unprotected = why
            _log.warning("%s is not protected: %s", at, why)
            self._tell("unprotected", f"{at}: {why}", [])

    def protected(self) -> None:
        """They are again."""
        self._unprotected = ""

    def _tell(self, kind: str, why: str, nodes: list[str], ranks: Sequence[int] = ()) -> None:
        self._tell_agent(smp_messages.SmpNotice(kind, why, nodes, list(ranks)))
