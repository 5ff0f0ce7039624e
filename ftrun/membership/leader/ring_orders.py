"""Orders the collective checks of new nodes, and acts on their results.

Runs in:  the agent that leads. Pure.
Takes in: the nodes' newest checks, which hold the results; the chosen plan; time.
Gives:    the order in the leader's heartbeat; nodes with wrong sums, as hardware faults; journal
          entries.
Survives: nothing. The next leader reads the results in the heartbeats, with the wrong sums of
          earlier checks, and orders no check of nodes that have a result. Plans keep exclusions.

Rule 1: a node is checked once for each agent that has started on a new machine. An agent that was
        restarted in place has made no whole check of its node, and is not checked.
Rule 2: nothing waits for a check. It runs while the ranks of the first generation start, or after a
        node has joined.
Rule 3: a check that is not complete, for example because a node was lost, is repeated once. So is
        one whose evidence is not enough: a neighbour may have been lost with its result.
Rule 4: a bug in this module costs the checks, never the run: the exception is reported once, and
        this leader orders no check any more.
Rule 5: one check at a time, of at most MAX_NODES nodes. Fewer than MIN_NODES new ones are checked
        together with others, spares first. A node with wrong sums takes part in none.
Rule 6: the sums of a check are judged when it has ended, because a second named node makes them no
        verdict. A node that was found stays found while its agent runs and this leader leads.
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
    WrongHop,
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
"""In a smaller ring, only one node can find a wrong sum of another, and rates are not compared."""
MAX_TRIES = 2

Results = Mapping[Identity, CollectiveResult]


class RingOrders:
    """One leader's collective checks."""

    def __init__(
        self, settings: MembershipSettings, peers: FailureDetector, reports: MemberReports
    ) -> None:
        self.order: CollectiveRing | None = None
        """The check that is under way."""
        self._num_bytes = settings.profile.preflight.collective_mb * 1_000_000
        self._peers = peers
        self._reports = reports
        self._plan: GenerationPlan | None = None
        self._last = 0
        """The highest number of a check that was ordered."""
        self._until_s = 0.0
        self._tries = Counter[Identity]()
        self._results: Results = {}
        self._wrong: dict[Identity, str] = {}
        """Nodes that were found, with the reasons."""
        self._suspects: set[Identity] = set()
        """Nodes with evidence that is not enough."""
        self._reported: set[WrongHop] = set()
        self._has_failed = False

    def begin(self, plan: GenerationPlan) -> None:
        self._plan = plan

    def poll(self, barred: Collection[str], *, now_s: float) -> list[JournalEntry]:
        """Reads the results, and orders the next check; `barred` nodes take part in none."""
        if self._has_failed or not self._num_bytes:
            return []
        try:
            return self._poll(barred, now_s)
        except Exception as error:  # noqa: BLE001 - Rule 4
            self._has_failed, self.order = True, None
            text = f"no collective check, by a bug in ftrun: {type(error).__name__}: {error}"
            note = CollectiveFinished(text, (), is_complete=False, is_wrong=False)
            return [JournalEntry(note, announce=True)]

    def _poll(self, barred: Collection[str], now_s: float) -> list[JournalEntry]:
        results = {
            peer.card.identity: peer.fitness.figures.collective
            for peer in self._peers
            if peer.fitness is not None and peer.fitness.figures.collective is not None
        }
        found, before = [], self.order
        if before is not None:
            found = self._finish(before, results, now_s)
        if before is not self.order or results != self._results:
            found += self._judge(results)
            self._results = results
        if self.order is None:
            self._next(results, barred, now_s)
        return found

    # --- results ------------------------------------------------------------------------------

    def _judge(self, results: Results) -> list[JournalEntry]:
        open_check = self.order.check if self.order is not None else ""
        hops = [hop for hop in wrong_hops(results) if hop.check != open_check]
        here = {peer.card.identity for peer in self._peers}
        new = {
            one: text
            for one, text in wrong_nodes(hops).items()
            if one not in self._wrong and one in here
        }
        self._wrong = {one: text for one, text in self._wrong.items() if one in here} | new
        self._reports.wrong_sums = {one[0]: text for one, text in self._wrong.items()}
        found = [
            JournalEntry(WrongSumFound(f"node {one[0]}: {text}", one[0]), announce=True)
            for one, text in sorted(new.items())
        ]
        named = {hop.nodes[0] for hop in hops if len(hop.nodes) == 1}
        self._suspects = named - self._wrong.keys()
        for hop in hops:
            if hop not in self._reported and not self._wrong.keys() & hop.nodes:
                self._reported.add(hop)
                node = f"node {hop.nodes[0][0]}: " if len(hop.nodes) == 1 else ""
                text = f"collective check: {node}{hop.text}; no node is excluded for it"
                found.append(JournalEntry(WrongSumFound(text, hop.nodes[0][0]), announce=True))
        return found

    def _finish(self, ring: CollectiveRing, known: Results, now_s: float) -> list[JournalEntry]:
        """Ends the check once every node that is left has a result, or its time is over."""
        nodes = [card.identity for card in ring.nodes]
        results = {
            one: known[one] for one in nodes if one in known and known[one].check == ring.check
        }
        left = [one for one in nodes if one not in results and self._is_here(one)]
        if left and now_s < self._until_s:
            return []
        self.order = None
        problems = [f"{one[0]}: {has.problem}" for one, has in results.items() if has.problem]
        problems += [f"{one[0]} has sent no result" for one in nodes if one not in results]
        slow = slow_nodes(results) if len(results) == len(nodes) else {}
        is_wrong = any(hop.wrong is not None for has in results.values() for hop in has.hops)
        text = f"collective check of {', '.join(one[0] for one in nodes)}: "
        text += f"not completed ({'; '.join(problems)})" if problems else _summary(results)
        text += "; sums were wrong" if is_wrong else ""
        names = tuple(one[0] for one in nodes)
        note = CollectiveFinished(text, names, is_complete=not problems, is_wrong=is_wrong)
        warnings = [
            JournalEntry(NodeBelowMedian(f"node {one} is slow: {text}", one), announce=True)
            for (one, _), text in sorted(slow.items())
        ]
        return [JournalEntry(note), *warnings]

    def _is_here(self, identity: Identity) -> bool:
        peer = self._peers.get(identity[0])
        return peer is not None and peer.card.identity == identity and not peer.lost

    # --- the next check -----------------------------------------------------------------------

    def _next(self, results: Results, barred: Collection[str], now_s: float) -> None:
        plan = self._plan
        if plan is None:
            return
        out = {*barred, *self._reports.wrong_sums}
        able = [peer for peer in self._peers if peer.card.node_id not in out and _can_check(peer)]
        new = [peer.card for peer in able if self._is_due(peer, results)]
        if not new:
            return
        others = [peer.card for peer in able if peer.card not in new]
        others.sort(key=lambda card: (plan.member(card.node_id) is not None, card.node_id))
        new = sorted(new, key=lambda card: card.node_id)[:MAX_NODES]
        nodes = new + others[: max(0, MIN_NODES - len(new))]
        if len(nodes) < 2:
            return
        self._tries.update(card.identity for card in nodes)
        self._last += 1
        leader, generation = self._peers.me.identity, plan.generation
        self.order = CollectiveRing(self._last, nodes, self._num_bytes, leader, generation)
        self._until_s = now_s + LIMIT_S

    def _is_due(self, peer: PeerState, results: Results) -> bool:
        result = results.get(peer.card.identity)
        is_open = result is None or result.problem or peer.card.identity in self._suspects
        return bool(is_open) and self._tries[peer.card.identity] < MAX_TRIES


def _can_check(peer: PeerState) -> bool:
    fitness = peer.fitness
    is_here = peer.linked and not peer.lost and not peer.is_leaving and not peer.is_unresponsive
    return is_here and fitness is not None and fitness.is_fit and fitness.is_whole


def _summary(results: Results) -> str:
    num_bytes = min(sum(hop.num_bytes for hop in one.hops) for one in results.values())
    rate = slowest_rate(results)
    speed = "more than " * (rate >= MOST_BYTES_PER_S) + rate_per_s_text(rate)
    return f"{num_bytes / 1e6:.0f} MB received by each, the slowest link carries {speed}"
