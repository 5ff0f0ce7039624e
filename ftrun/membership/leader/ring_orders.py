"""Orders the collective checks of new nodes, and acts on their results.

Runs in:  the agent that leads. Pure.
Takes in: the nodes' newest checks, which hold the results; the chosen plan; time.
Gives:    the order in the leader's heartbeat; nodes with wrong sums, as hardware faults; slow nodes
          that a spare can replace; journal entries.
Survives: nothing. The next leader reads the results in the heartbeats, and orders no check of nodes
          that have a result.

Rule 1: a node is checked once for each agent that has started on a new machine. An agent that was
        restarted in place has made no whole check of its node, and is not checked.
Rule 2: nothing waits for a check. It runs while the ranks of the first generation start, or after a
        node has joined.
Rule 3: a check that is not complete, for example because a node was lost, is repeated once.
Rule 4: a bug in this module costs the checks, never the run: the exception is reported once, and
        this leader orders no check any more.
Rule 5: one check at a time, of at most MAX_NODES nodes. A single new node is checked together with
        others, spares first.
"""

from collections import Counter
from collections.abc import Collection, Mapping

from ftrun.config.cluster import MembershipSettings
from ftrun.membership.leader.failure_detector import FailureDetector, PeerState
from ftrun.monitor.node_fitness import rate_per_s_text
from ftrun.monitor.slow.collective_check import (
    MAX_NODES,
    MOST_BYTES_PER_S,
    CollectiveResult,
    slow_nodes,
    slowest_rate,
    wrong_hops,
    wrong_nodes,
)
from ftrun.records.membership import CollectiveFinished, NodeBelowMedian, WrongSumFound
from ftrun.recovery.commands import JournalEntry
from ftrun.recovery.snapshot_coordination import MemberReports
from ftrun.wire.cluster.generation import GenerationPlan, Identity
from ftrun.wire.cluster.membership import CollectiveRing

LIMIT_S = 40.0
"""Longest time for all results: the order reaches the nodes, they connect, and reduce for 15 s."""
MIN_NODES = 3
"""A ring with a single new node is filled up to this size, so that rates can be compared."""
MAX_TRIES = 2

Results = Mapping[Identity, CollectiveResult]


class RingOrders:
    """One leader's collective checks."""

    def __init__(
        self, settings: MembershipSettings, peers: FailureDetector, reports: MemberReports
    ) -> None:
        self.order: CollectiveRing | None = None
        """The check that is under way."""
        self.slow: dict[str, str] = {}
        """Nodes whose ranks a spare should run, with the reasons."""
        self._num_bytes = settings.profile.preflight.collective_mb * 1_000_000
        self._peers = peers
        self._reports = reports
        self._plan: GenerationPlan | None = None
        self._last = 0
        """The highest number of a check that was ordered."""
        self._until_s = 0.0
        self._tries = Counter[Identity]()
        self._has_moved: set[str] = set()
        self._wrong: dict[Identity, str] = {}
        self._links: set[str] = set()
        self._has_failed = False

    def begin(self, plan: GenerationPlan) -> None:
        """A generation is chosen. A move that was requested for it is not requested again."""
        if self.requested:
            self._has_moved |= self.slow.keys()
        self._plan = plan

    @property
    def requested(self) -> str:
        """Why ranks must move to a spare; empty: they need not, or no spare is free."""
        plan = self._plan
        slow = self.slow.keys() - self._has_moved
        away = [one for one in sorted(slow) if plan is not None and plan.member(one) is not None]
        if plan is None or not 0 < len(away) <= self._num_free(plan):
            return ""
        return "; ".join(f"a spare runs the ranks of node {one}: {self.slow[one]}" for one in away)

    def poll(self, barred: Collection[str], *, now_s: float) -> list[JournalEntry]:
        """Reads the results, and orders the next check; `barred` nodes take part in none."""
        if self._has_failed:
            return []
        try:
            return self._poll(barred, now_s)
        except Exception as error:  # noqa: BLE001 - Rule 4
            self._has_failed, self.order, self.slow = True, None, {}
            text = f"no collective check, by a bug in ftrun: {type(error).__name__}: {error}"
            note = CollectiveFinished(text, (), is_complete=False, is_wrong=False)
            return [JournalEntry(note, announce=True)]

    def _poll(self, barred: Collection[str], now_s: float) -> list[JournalEntry]:
        results = {
            peer.card.identity: peer.fitness.figures.collective
            for peer in self._peers
            if peer.fitness is not None and peer.fitness.figures.collective is not None
        }
        found = self._judge(results)
        if self.order is not None:
            found += self._finish(self.order, results, now_s)
        if self.order is None:
            self._next(results, barred, now_s)
        return found

    # --- results ------------------------------------------------------------------------------

    def _judge(self, results: Results) -> list[JournalEntry]:
        hops = wrong_hops(results)
        known = wrong_nodes(hops)
        here = {peer.card.identity for peer in self._peers}
        self._reports.wrong_sums = {one[0]: text for one, text in known.items() if one in here}
        new = {one: text for one, text in known.items() if one not in self._wrong and one in here}
        self._wrong.update(new)
        found = [
            JournalEntry(WrongSumFound(f"node {one[0]}: {text}", one[0]), announce=True)
            for one, text in sorted(new.items())
        ]
        for hop in hops:
            if len(hop.nodes) > 1 and hop.text not in self._links:
                self._links.add(hop.text)
                note = WrongSumFound(f"collective check: {hop.text}", hop.nodes[0][0])
                found.append(JournalEntry(note, announce=True))
        return found

    def _finish(self, ring: CollectiveRing, known: Results, now_s: float) -> list[JournalEntry]:
        """Ends the check once every node that is left has a result, or its time is over."""
        nodes = [card.identity for card in ring.nodes]
        results = {
            one: known[one] for one in nodes if one in known and known[one].number == ring.number
        }
        left = [one for one in nodes if one not in results and self._is_here(one)]
        if left and now_s < self._until_s:
            return []
        self.order = None
        problems = [f"{one[0]}: {has.problem}" for one, has in results.items() if has.problem]
        problems += [f"{one[0]} has sent no result" for one in nodes if one not in results]
        slow = slow_nodes(results) if len(results) == len(nodes) else {}
        for node_id in [] if problems else [one[0] for one in nodes]:
            self.slow.pop(node_id, None)
        self.slow.update({one[0]: text for one, text in slow.items()})
        is_wrong = any(hop.wrong is not None for has in results.values() for hop in has.hops)
        text = f"collective check of {', '.join(one[0] for one in nodes)}: "
        text += f"not completed ({'; '.join(problems)})" if problems else _summary(results)
        text += "; sums were wrong" if is_wrong else ""
        names = tuple(one[0] for one in nodes)
        note = CollectiveFinished(text, names, is_complete=not problems, is_wrong=is_wrong)
        return [JournalEntry(note), *self._slow_entries(slow)]

    def _slow_entries(self, slow: Mapping[Identity, str]) -> list[JournalEntry]:
        remedy = "" if self.requested else "; no spare is free, and the run continues with it"
        return [
            JournalEntry(NodeBelowMedian(f"node {one} is slow: {text}{remedy}", one), announce=True)
            for (one, _), text in sorted(slow.items())
        ]

    def _is_here(self, identity: Identity) -> bool:
        peer = self._peers.get(identity[0])
        return peer is not None and peer.card.identity == identity and not peer.lost

    # --- the next check -----------------------------------------------------------------------

    def _next(self, results: Results, barred: Collection[str], now_s: float) -> None:
        plan = self._plan
        if plan is None or not self._num_bytes:
            return
        here = [peer for peer in self._peers if peer.card.node_id not in barred]
        able = [peer for peer in here if _can_check(peer)]
        new = [peer.card for peer in able if self._is_due(peer, results)]
        if not new:
            return
        others = [peer.card for peer in able if peer.card not in new]
        others.sort(key=lambda card: (plan.member(card.node_id) is not None, card.node_id))
        new = sorted(new, key=lambda card: card.node_id)[:MAX_NODES]
        nodes = new + others[: max(0, MIN_NODES - len(new))] if len(new) == 1 else new
        if len(nodes) < 2:
            return
        self._tries.update(card.identity for card in nodes)
        self._last = 1 + max([self._last, *(has.number for has in results.values())])
        self.order = CollectiveRing(self._last, nodes, self._num_bytes)
        self._until_s = now_s + LIMIT_S

    def _is_due(self, peer: PeerState, results: Results) -> bool:
        result = results.get(peer.card.identity)
        is_open = result is None or bool(result.problem)
        return is_open and self._tries[peer.card.identity] < MAX_TRIES

    def _num_free(self, plan: GenerationPlan) -> int:
        """Spares that can run ranks."""
        return sum(
            _can_check(peer)
            and plan.member(peer.card.node_id) is None
            and peer.card.node_id not in self.slow
            and peer.card.node_id not in self._reports.wrong_sums
            for peer in self._peers
        )


def _can_check(peer: PeerState) -> bool:
    fitness = peer.fitness
    is_here = peer.linked and not peer.lost and not peer.is_leaving and not peer.is_unresponsive
    return is_here and fitness is not None and fitness.is_fit and fitness.is_whole


def _summary(results: Results) -> str:
    num_bytes = min(sum(hop.num_bytes for hop in one.hops) for one in results.values())
    rate = slowest_rate(results)
    speed = "more than " * (rate >= MOST_BYTES_PER_S) + rate_per_s_text(rate)
    return f"{num_bytes / 1e6:.0f} MB received by each, the slowest link carries {speed}"
