"""Finds pairs of members that cannot connect to each other, while ranks are unresponsive.

Rule 1: a pair counts as cut after two consecutive surveys in which neither end got a connection.
        Only the kernels take part in a connection, so a slow agent does not count as a cut link.
Rule 2: while ranks make no steps, cut pairs are probed again. If there is none, all pairs are
        probed, and the pause doubles each time.
"""

from collections.abc import Collection
from itertools import combinations

from ftrun.network.detect.probe_schedule import NetworkPath, pack, schedule
from ftrun.network.failover.survey import ProbeSurvey, Round, most_rounds
from ftrun.recovery.commands import Send
from ftrun.recovery.lost_links import Pair
from ftrun.wire.cluster.generation import GenerationPlan, Rail
from ftrun.wire.cluster.messages import ProbePathResult

LIMIT_S = 20.0
"""Time limit of one survey."""
MOST_ROUNDS = 120
"""Up to 60 members, every pair is probed; with more members, a part of the pairs."""
AGAIN_S = 2.0
"""Seconds between two surveys of cut pairs."""
ALL_AGAIN_S, LONGEST_S = 10.0, 320.0
"""Seconds between two surveys of all pairs: the first pause and the longest one."""
_BETWEEN = "agents"
"""Name of the one rail that all agents are on, at the addresses of their cards."""


class PairCheck:
    """The cut pairs of one generation."""

    def __init__(self) -> None:
        self.cut: frozenset[Pair] = frozenset()
        """In the order of the plan's members."""
        self._suspects: frozenset[Pair] = frozenset()
        self._survey: ProbeSurvey | None = None
        self._number = 0
        self._due_s, self._pause_s = 0.0, ALL_AGAIN_S

    def begin(self) -> None:
        self._survey, self._suspects, self.cut = None, frozenset(), frozenset()
        self._due_s, self._pause_s = 0.0, ALL_AGAIN_S

    def poll(self, plan: GenerationPlan, *, now_s: float) -> list[Send]:
        if self._survey is not None:
            found = self._survey.poll(now_s=now_s)
            self._take_result(plan, now_s)
            return found
        if now_s < self._due_s:
            return []
        if self._suspects:
            rounds = tuple(pack(_both_ways(self._suspects)))
        else:
            members = [node.node_id for node in plan.members]
            most = most_rounds(len(members), 1, MOST_ROUNDS)
            rounds = schedule(members, {_BETWEEN: members}, most_rounds=most).rounds
        return self._begin_survey(plan, rounds, now_s)

    def tried(self, sender: str, body: ProbePathResult, *, now_s: float) -> list[Send]:
        return self._survey.tried(sender, body, now_s=now_s) if self._survey is not None else []

    def _begin_survey(
        self, plan: GenerationPlan, rounds: Collection[Round], now_s: float
    ) -> list[Send]:
        cards = [node.card for node in plan.members]
        rails = {_BETWEEN: {card.node_id: Rail("", card.host, port=card.port) for card in cards}}
        self._number -= 1  # surveys of the path monitor count upwards
        self._survey = ProbeSurvey(
            self._number, [*rounds], rails, limit_s=LIMIT_S, now_s=now_s, is_short=True
        )
        return self._survey.poll(now_s=now_s)

    def _take_result(self, plan: GenerationPlan, now_s: float) -> None:
        survey = self._survey
        if survey is None or not survey.is_over:
            return
        self._survey = None
        cut = {path for path, one in survey.found.items() if one.is_unreached}
        pairs = combinations([node.node_id for node in plan.members], 2)
        failed = frozenset(pair for pair in pairs if cut.issuperset(_both_ways([pair])))
        self.cut, self._suspects = failed & self._suspects, failed
        if failed:
            self._due_s = now_s + (AGAIN_S if failed == self.cut else 0.0)
        else:
            self._due_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_S)


def _both_ways(pairs: Collection[Pair]) -> list[NetworkPath]:
    return [
        NetworkPath(source, destination, _BETWEEN)
        for one, other in sorted(pairs)
        for source, destination in ((one, other), (other, one))
    ]
