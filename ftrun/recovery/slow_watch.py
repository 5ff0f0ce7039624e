"""Detects what is slow or wrong while steps are made: ranks, links, skipped collectives, memory.

Runs in:  the agent that leads. Pure.
Takes in: the samples in the heartbeats, and the times of the heartbeats themselves.
Gives:    `Verdict`s, each reported once until it is over; lateness and delay matrix for status.

Rule 1: links are judged first, because a slow link makes ranks late that are not its cause.
Rule 2: this module triggers no action: a slow rank costs time, a wrong verdict costs a restart.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from ftrun.monitor.page_values import decode_groups
from ftrun.monitor.slow.delay_matrix import NodeTraffic
from ftrun.monitor.slow.links import LinkProbeReading, SlowLinkDetector
from ftrun.monitor.slow.memory_trend import MemoryTrend
from ftrun.monitor.slow.samples import ClockOffset, NodeSample
from ftrun.monitor.slow.skipped_collectives import CollectiveCounts
from ftrun.monitor.slow.stragglers import RankObservation, StragglerDetector
from ftrun.monitor.verdicts import Verdict, VerdictKind
from ftrun.recovery.commands import Send
from ftrun.wire.cluster.generation import GenerationPlan
from ftrun.wire.cluster.heartbeats import Heartbeat
from ftrun.wire.cluster.messages import ProbeLinkRequest, ProbeLinkResult

LOOK_EVERY_S = 0.5


class SlowSuspicions:
    """The slowness of one generation."""

    def __init__(self) -> None:
        self.lateness_s: dict[int, float] = {}
        """Lateness of each rank, in seconds per step; for status."""
        self.clocks: Mapping[str, ClockOffset] = {}
        """Clock offsets of the nodes that answer this leader's heartbeats, by node id."""
        self._due_s = 0.0
        self._probes = 0
        self._asked: dict[int, tuple[str, str]] = {}
        self._forget()

    def _forget(self) -> None:
        self._links, self._stragglers = SlowLinkDetector(), StragglerDetector()
        self._counts, self._memory = CollectiveCounts(), MemoryTrend()
        self._seen: dict[str, int] = {}
        self._told: dict[str, Verdict] = {}
        self._since_s: dict[str, float] = {}
        """When each verdict of `_told` was first reported."""
        self._groups: dict[str, tuple[int, ...]] = {}
        self.lateness_s = {}

    def begin(self) -> None:
        """Starts again for a new generation; keeps the clock offsets."""
        self._forget()
        self._due_s = 0.0

    def _offset(self, node_id: str, me: str, now_s: float) -> tuple[float, float] | None:
        if node_id == me:
            return 0.0, 0.0
        clock = self.clocks.get(node_id)
        return clock.at(now_s) if clock is not None and clock.is_known else None

    # --- verdicts -----------------------------------------------------------------------------

    def look(
        self, beats: Mapping[str, Heartbeat], plan: GenerationPlan, me: str, *, now_s: float
    ) -> list[Verdict]:
        """Judges new samples; returns verdicts that were not reported yet."""
        if now_s < self._due_s:
            return []
        self._due_s = now_s + LOOK_EVERY_S
        members = {node.node_id: node for node in plan.members}
        samples = {
            node_id: beat.sample
            for node_id, beat in beats.items()
            if node_id in members and beat.generation == plan.generation and beat.sample is not None
        }
        new = {
            node_id: sample
            for node_id, sample in samples.items()
            if self._seen.get(node_id) != sample.number
        }
        if not new:
            return []
        self._seen |= {node_id: sample.number for node_id, sample in new.items()}
        node_of = {rank: node.node_id for node in plan.members for rank in node.ranks}
        return self._judge(new, plan, node_of, me, now_s)

    def _judge(
        self,
        new: Mapping[str, NodeSample],
        plan: GenerationPlan,
        node_of: Mapping[int, str],
        me: str,
        now_s: float,
    ) -> list[Verdict]:
        for sample in new.values():
            for rank in sample.ranks:
                self._groups |= decode_groups(rank.groups)
        looks = [
            NodeTraffic(node, one.span_s, one.links) for node, one in new.items() if one.span_s
        ]
        hosts = {node.card.host: node.node_id for node in plan.members}
        hosts |= {rail.host: node.node_id for node in plan.members for rail in node.card.rails}
        link = self._links.look(looks, hosts, now_s=now_s) if len(plan.members) > 1 else None
        ranks: list[RankObservation] = []
        for node, one in new.items():
            ranks += self._rank_looks(node, one, me, now_s)
        slow = self._stragglers.look(ranks, self._groups, is_link_slow=link is not None)
        self.lateness_s = {
            rank: round(one.now_s, 4) for rank, one in self._stragglers.lateness().items()
        }
        told = [(rank.rank, rank.calls) for one in new.values() for rank in one.ranks]
        skipped = self._counts.look(told, plan.world_size, node_of)
        memory = self._memory.look(new.items())
        found = [_with_nodes(one, node_of) for one in (link, slow) if one is not None]
        news = [one for one in found if one.fingerprint not in self._told]
        self._told = {one.fingerprint: one for one in found}
        self._since_s = {one: self._since_s.get(one, now_s) for one in self._told}
        return [*news, *(one for one in (skipped, memory) if one is not None)]

    def _rank_looks(
        self, node: str, sample: NodeSample, me: str, now_s: float
    ) -> list[RankObservation]:
        clock = self._offset(node, me, now_s)
        if clock is None:
            return []
        offset_s, error_s = clock
        return [
            RankObservation(
                rank=one.rank,
                node=node,
                at_s=sample.at_s - offset_s,
                step=one.step,
                entered=[(group, seq, at_s - offset_s) for group, seq, at_s in one.entered],
                clock_error_s=error_s,
            )
            for one in sample.ranks
            if one.is_training
        ]

    def lasting(self, for_s: float, *, now_s: float) -> list[Verdict]:
        return [one for key, one in self._told.items() if now_s - self._since_s[key] >= for_s]

    def slow_links(self, for_s: float, *, now_s: float) -> list[Verdict]:
        """Lasting verdicts about the network, of any confidence.

        The caller compares rails before it acts on one.
        """
        lasting = self.lasting(for_s, now_s=now_s)
        return [one for one in lasting if one.kind is VerdictKind.SLOW_COMMUNICATION]

    def matrix(self) -> list[dict[str, Any]]:
        return [msgspec.to_builtins(cell) for cell in self._links.table()]

    # --- probes -------------------------------------------------------------------------------

    def probes(self, plan: GenerationPlan, me: str, *, now_s: float) -> list[Send]:
        """Probe requests for suspect links; never to the leader's own node."""
        cards = {node.node_id: node.card for node in plan.members}
        found = []
        for pair in self._links.suspect_pairs(now_s=now_s):
            asked, other = pair if pair[0] != me else (pair[1], pair[0])
            self._probes += 1
            self._asked[self._probes] = (asked, other)
            card = cards[other]
            found.append(Send(asked, ProbeLinkRequest(self._probes, other, card.host, card.port)))
        return found

    def probed(self, body: ProbeLinkResult, *, now_s: float) -> None:
        pair = self._asked.pop(body.number, None)
        if pair is None or body.problem:
            return
        asked, other = pair
        self._links.probed(LinkProbeReading(asked, other, now_s, body.rtt_s, body.to_bytes_per_s))
        self._links.probed(LinkProbeReading(other, asked, now_s, body.rtt_s, body.from_bytes_per_s))


def _with_nodes(verdict: Verdict, node_of: Mapping[int, str]) -> Verdict:
    if verdict.nodes:
        return verdict
    nodes = tuple(dict.fromkeys(node_of[rank] for rank in verdict.culprits if rank in node_of))
    return msgspec.structs.replace(verdict, nodes=nodes)
