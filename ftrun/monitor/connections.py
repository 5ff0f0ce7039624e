"""Finds the connections between ranks that carry no data, from the counters of both ends.

Source:   C4's rule for a hang in communication (arXiv 2406.04594): the culprit is the connection
          whose transfers make no progress.

Rule 1: a direction is lost if its sender has bytes to send and gets no acknowledgement. The other
        end shows which direction it is: if it has received bytes that are not acknowledged, the
        acknowledgements are lost, else the data.
Rule 2: if only one end is known, its data or the answers are lost, which is no proof. Such stalls
        count if no other has two known ends, and at a port that a rank owns.
Rule 3: a rank that waits in a collective or message for such a connection is a victim.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ftrun.monitor.verdicts import (
    Confidence,
    RankConnection,
    RankView,
    Verdict,
    VerdictKind,
    ranks_text,
)
from ftrun.monitor.wait_graph import WaitGraph

_MANY = 3
"""Maximum number of connections that are described individually."""

_BETWEEN_POLLS_S = 1.0
"""An acknowledgement and a stall that one poll has seen may have come in any order."""

_OTHERS = "other connections between the same addresses carry data"

_SYN = 1
"""The end that opened a connection counts its SYN as an acknowledged byte."""

_Direction = tuple[str, str]
"""Sending and receiving node."""


@dataclass(frozen=True, slots=True)
class StalledConnection:
    """A connection whose data is not acknowledged, seen from its sending end."""

    rank: int
    node: str
    peer_rank: int | None
    """None: the other end was not observed."""
    peer_node: str
    counters: RankConnection
    has_arrived: bool
    """The other end has received bytes that are not acknowledged."""

    @property
    def lost(self) -> _Direction:
        """The direction that carries nothing."""
        ends = (self.node, self.peer_node)
        return ends[::-1] if self.has_arrived else ends

    @property
    def text(self) -> str:
        one = self.counters
        subject = f"rank {self.rank} on {self.node}"
        peer = self.peer_node if self.peer_rank is None else f"rank {self.peer_rank}"
        if not one.retransmits:
            return (
                f"{subject} could send nothing to {peer} for {one.stalled_s:.1f} s ({_ends(one)})"
            )
        times = "once" if one.retransmits == 1 else f"{one.retransmits} times"
        known = "" if self.peer_rank is None else ", which has not received them"
        if self.has_arrived:
            known = ", which has received them"
        return (
            f"{subject} has sent segments to {peer}{known} ({_ends(one)}), and got no "
            f"acknowledgement for {one.stalled_s:.1f} s; segments were sent again {times}"
        )


def stalled_connections(
    views: Mapping[int, RankView], node_of: Mapping[int, str], *, limit_s: float
) -> list[StalledConnection]:
    """Connections between nodes of the run that have stalled for `limit_s`, the longest first.

    If both ends of some are known, only these.
    """
    ends = {
        (one.local, one.remote): (rank, one)
        for rank, view in views.items()
        for one in view.connections
    }
    nodes = {one.local[0]: node_of[rank] for rank, one in ends.values() if rank in node_of}
    # Connections that a rank has accepted have the port of its listener in common.
    ports = {local for local, _ in ends}
    accepting = {local for local, remote in ends if (remote, local) in ends}
    found = []
    for rank, one in ends.values():
        peer_rank, other = ends.get((one.remote, one.local), (None, None))
        peer_node = nodes.get(one.remote[0], "")
        node = node_of.get(rank, "")
        is_of_ranks = one.remote in ports or one.local in accepting
        if one.stalled_s < limit_s or not node or peer_node in ("", node) or not is_of_ranks:
            continue
        has_arrived = other is not None and other.received_bytes > one.acked_bytes + _SYN
        found.append(StalledConnection(rank, node, peer_rank, peer_node, one, has_arrived))
    found = [one for one in found if one.peer_rank is not None] or found
    return sorted(found, key=lambda one: (-one.counters.stalled_s, one.rank, one.counters.remote))


def with_stalled(
    verdict: Verdict, stalled: Sequence[StalledConnection], views: Mapping[int, RankView]
) -> Verdict:
    """The verdict on a hang, with these connections as its cause if they explain it."""
    if not stalled or not _is_explained(verdict, stalled, views):
        return verdict
    # A member that was not read may have a cause of its own.
    groups = {group.name: group for view in views.values() for group in view.waiting}
    unread = any(WaitGraph(views).unread(group) for group in groups.values())
    is_proven = stalled[0].peer_rank is not None and not unread
    others = [_OTHERS] if others_carry_data(stalled, views) else []
    nodes = _nodes(stalled)
    victims = tuple(sorted({*verdict.victims, *verdict.culprits}))
    verb = "waits" if len(victims) == 1 else "wait"
    kind = VerdictKind.HANG_IN_COMMUNICATION
    return msgspec.structs.replace(
        verdict,
        kind=kind,
        culprits=(),
        nodes=nodes,
        victims=victims,
        text=f"{_sentence(stalled)}, and {ranks_text(victims)} {verb} for it",
        evidence=(*(one.text for one in stalled[:_MANY]), *others, *verdict.evidence),
        confidence=Confidence.CERTAIN if is_proven else Confidence.LIKELY,
        may_take_long=False,
        act_immediately=is_proven,
        fingerprint=f"{kind.value} {' '.join(nodes)}",
    )


def others_carry_data(stalled: Sequence[StalledConnection], views: Mapping[int, RankView]) -> bool:
    """Whether a byte was acknowledged between each two addresses of these since one stalled."""
    stalled_s = {_hosts(one.counters): one.counters.stalled_s for one in reversed(stalled)}
    carry = {
        frozenset(_hosts(one))
        for view in views.values()
        for one in view.connections
        if 0 <= one.acked_s < stalled_s.get(_hosts(one), 0.0) - _BETWEEN_POLLS_S
    }
    return bool(stalled) and {frozenset(hosts) for hosts in stalled_s} <= carry


def _hosts(one: RankConnection) -> tuple[str, str]:
    return one.local[0], one.remote[0]


def _is_explained(
    verdict: Verdict, stalled: Sequence[StalledConnection], views: Mapping[int, RankView]
) -> bool:
    if verdict.kind is VerdictKind.HANG_IN_COMMUNICATION:
        return True
    waiting = {rank for one in stalled for rank in (one.rank, one.peer_rank)}
    return verdict.kind is VerdictKind.HANG_IN_COMPUTATION and all(
        rank in waiting and views[rank].activity == "collective" for rank in verdict.culprits
    )


def _nodes(stalled: Iterable[StalledConnection]) -> tuple[str, ...]:
    """The one node of all lost directions if there are several peers, else all nodes."""
    pairs = {frozenset(one.lost) for one in stalled}
    counts = Counter(node for pair in pairs for node in pair)
    if len(pairs) > 1 and (common := [one for one in counts if counts[one] == len(pairs)]):
        return (common[0],)
    return tuple(sorted(counts))


def _sentence(stalled: Sequence[StalledConnection]) -> str:
    lost = {one.lost for one in stalled}
    ends = {frozenset((one.rank, one.peer_rank)) for one in stalled}
    if len(ends) == 1 and None not in next(iter(ends)):
        return _between(stalled[0], is_one_way=len(lost) == 1)
    senders, receivers = sorted({one for one, _ in lost}), sorted({one for _, one in lost})
    if len(senders) == 1:
        return f"nothing that node {senders[0]} sends to {_nodes_text(receivers)} arrives"
    if len(receivers) == 1:
        return f"nothing that {_nodes_text(senders)} send to node {receivers[0]} arrives"
    pairs = sorted({tuple(sorted(one)) for one in lost})
    more = f" and {len(pairs) - _MANY} more" if len(pairs) > _MANY else ""
    shown = ", ".join(" and ".join(pair) for pair in pairs[:_MANY])
    return f"the connections between nodes {shown}{more} carry no data"


def _between(one: StalledConnection, *, is_one_way: bool) -> str:
    ends = [f"rank {one.rank} on {one.node}", f"rank {one.peer_rank} on {one.peer_node}"]
    first, second = reversed(ends) if one.has_arrived else ends
    if is_one_way:
        return f"nothing that {first} sends to {second} arrives"
    return f"the connection between {first} and {second} carries no data"


def _nodes_text(nodes: Sequence[str]) -> str:
    return f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {', '.join(nodes)}"


def _ends(one: RankConnection) -> str:
    return f"{_address(one.local)} to {_address(one.remote)}"


def _address(end: tuple[str, int]) -> str:
    host, port = end
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
