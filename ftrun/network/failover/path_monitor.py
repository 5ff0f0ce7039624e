"""Monitors the paths between nodes: when they are probed, what is planned, when a new plan is due.

Runs in:  the agent that leads. Pure.
Takes in: the nodes' cards, answers to probes, reports of unresponsive rails, verdicts. path_map.py
          keeps the measurements.
Gives:    probe requests; a `NetworkPlan` for a generation; the reason to begin another generation;
          `JournalEntry`s; a part of the status document.
Survives: nothing. The next leader uses the plan of the running generation, and probes when it has
          a reason to.

Rule 1: with `--network-plan on`, every path is probed before the first generation, within the time
        limit. If the plan is only reported, nothing waits for it: paths are probed while the ranks
        of the first generation start. Later nothing ever waits, so restarts are not slower.
Rule 2: while a generation runs, only paths of nodes that have joined or are suspected are probed,
        one round at a time.
Rule 3: a plan is used only with `--network-plan on`; otherwise it is only reported.
Rule 4: a bug in this module costs the plan, never the run: an exception is reported once, and this
        leader monitors no path any more, as with `--network-plan off`.
Rule 5: without a measured rate no new plan is made: only the dead rails of the current plan are
        dropped.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import msgspec

from ftrun.config.cluster import MembershipSettings
from ftrun.monitor.verdicts import VerdictKind
from ftrun.network.detect.findings import NetworkFindingKind
from ftrun.network.detect.localization import slowest_medians
from ftrun.network.detect.probe_schedule import NetworkPath, pack, schedule, schedule_for
from ftrun.network.detect.rails import env_for, rails_of_node
from ftrun.network.failover.path_map import PathMap
from ftrun.network.failover.survey import ProbeSurvey, Round, most_rounds, paths_to
from ftrun.network.plan.planner import plan_network
from ftrun.network.plan.rail_choice import choices_of, keep_rails
from ftrun.records.membership import NetworkPlanDisabled, NetworkPlanRecord
from ftrun.recovery.commands import Command, JournalEntry
from ftrun.recovery.health import HealthMonitor
from ftrun.recovery.suspicions import SlowSuspicions
from ftrun.wire.cluster.generation import GenerationPlan, Identity, NetworkPlan, NodeCard
from ftrun.wire.cluster.messages import (
    PathReport,
    ProbeLinkResult,
    ProbePathResult,
    RailUnresponsive,
)
from ftrun.wire.messages.status import NetworkStatus, plan_status

LIMIT_S = 3.0
"""Time limit of the survey before the first generation."""
MOST_ROUNDS = 40
"""Rounds of that survey: 8 nodes with 2 rails take 28, of 10 to 40 ms each. With many nodes there
are fewer."""
BACKGROUND_LIMIT_S, BACKGROUND_PAUSE_S = 30.0, 0.25
"""Time limit of a survey while a generation runs, and the pause between its rounds."""
BACKGROUND_MAX_ROUNDS = 24
UNRESPONSIVE_AGAIN_S = 5.0
"""Seconds for which a node's rail that was found alive is not suspected again."""
DEAD_AGAIN_S, DEAD_LONGEST_S = 30.0, 600.0
"""Seconds between two probes of dead interfaces: the first pause and the longest one; each is twice
the last."""
SLOW_FOR_S = 2.0
"""Seconds that a verdict of slow communication must persist before rails are compared."""
SLOW_AGAIN_S = 15.0
"""Seconds after which they are compared again for the same verdict."""
BETTER = 3.0
"""Another rail must be more than this factor faster than a rail that the monitor finds slow, to
replace it."""
_STAYS = "ranks keep their nodes during a run"
_NUMBERED = "the user has numbered the nodes"


class NodesHere(Protocol):
    """The nodes that the leader is connected to."""

    @property
    def here(self) -> list[NodeCard]: ...

    def is_responding(self, node_id: str, *, now_s: float) -> bool: ...


P = ParamSpec("P")
T = TypeVar("T")
Method = Callable[Concatenate["PathMonitor", P], T]


def _guarded(otherwise: Callable[[], Any] = lambda: None) -> Callable[[Method[P, T]], Method[P, T]]:
    """Gives what `otherwise` returns after an exception in this or an earlier call; see Rule 4."""

    def guard(method: Method[P, T]) -> Method[P, T]:
        @wraps(method)
        def work(monitor: "PathMonitor", /, *words: P.args, **named: P.kwargs) -> T:
            if not monitor.has_failed:
                try:
                    return method(monitor, *words, **named)
                except Exception as error:  # noqa: BLE001 - a bug costs the plan, never the run
                    monitor.fail(error)
            result: T = otherwise()
            return result

        return work

    return guard


class PathMonitor:
    """The path monitor of one leader."""

    def __init__(self, me: str, settings: MembershipSettings, peers: NodesHere) -> None:
        self.plan: NetworkPlan | None = None
        """The newest plan, whether it is used or only reported."""
        self._me = me
        self._user_env = settings.user_env
        self._mode = settings.profile.network.plan
        self.is_on = self._mode == "on"
        self._peers = peers
        self._map = PathMap(settings)
        self._previous: NetworkPlan | None = None
        """The network plan of the generation before."""
        self._survey: ProbeSurvey | None = None
        self._number = 0
        self._known: set[Identity] = set()
        """Agents whose paths were probed, or need not be."""
        self._notes: list[JournalEntry] = []
        self._unresponsive: dict[tuple[str, str], tuple[float, str]] = {}
        """When a node's rail was last reported unresponsive, and by which node."""
        self._dead_s, self._dead_pause_s = 0.0, DEAD_AGAIN_S
        self._polled_s: dict[tuple[str, str], float] = {}
        self._slow_seen: dict[str, float] = {}
        """When rails were compared for a verdict, by its fingerprint."""
        self._suspects: dict[str, str] = {}
        self._urgent_reason = ""
        self.requested = ""
        """Why another generation must begin at the next boundary; empty: it need not."""
        self.has_failed = False
        """A bug was found, see Rule 4."""

    def fail(self, error: Exception) -> None:
        self.has_failed, self._urgent_reason, self.requested = True, "", ""
        text = f"no network plan, by a bug in ftrun: {type(error).__name__}: {error}"
        self._notes.append(JournalEntry(NetworkPlanDisabled(text), announce=True))

    def _is_off(self, cards: Sequence[NodeCard]) -> bool:
        return self._mode == "off" or len(cards) < 2 or not all(c.rails for c in cards)

    # --- in a ballot --------------------------------------------------------------------------

    @_guarded()
    def postpone(
        self, cards: Sequence[NodeCard], previous: GenerationPlan | None, *, now_s: float
    ) -> list[Command] | None:
        """Probe requests that must be answered before a plan is made; None: nothing is awaited."""
        if previous is not None:
            self._survey = None  # it belongs to a generation that is over
        if previous is not None or not self.is_on or self._is_off(cards):
            return None
        self._map.meet(cards)
        if self._survey is None:
            self._survey = self._begin_first(now_s)
        found = self._survey.poll(now_s=now_s) if self._survey is not None else []
        return None if self._is_done(now_s) else [*found]

    @_guarded()
    def decide(
        self,
        members: Sequence[NodeCard],
        spares: Sequence[NodeCard],
        previous: GenerationPlan | None,
    ) -> NetworkPlan | None:
        if not self.is_on or self._is_off(members):
            return None
        self._map.meet((*members, *spares))
        keep = _STAYS if previous is not None else ""
        if any(card.node_rank >= 0 for card in members):
            keep = keep or _NUMBERED
        ids = [card.node_id for card in members]
        self._previous = previous.paths if previous is not None else None
        made = self._make(ids, keep, self._previous)
        assert sorted(made.order) == sorted(ids)
        self._keep(made)
        return made

    def _keep(self, made: NetworkPlan) -> None:
        before, self.plan = self.plan, made
        if before is None or choices_of(before) != choices_of(made):
            text = " ".join(made.words) or f"rails {', '.join(made.rails)}"
            note = NetworkPlanRecord(text, self.is_on, tuple(made.order), tuple(made.rails))
            self._notes.append(JournalEntry(note))

    @_guarded()
    def begin(self) -> None:
        self._urgent_reason = self.requested = ""
        self._unresponsive.clear()
        self._slow_seen.clear()

    # --- answers ------------------------------------------------------------------------------

    def reported(
        self, sender: str, body: PathReport, watching: HealthMonitor, *, now_s: float
    ) -> list[Command]:
        if isinstance(body, ProbeLinkResult):  # the health monitor probes without a plan too
            watching.slow.probed(body, now_s=now_s)
            return []
        if isinstance(body, ProbePathResult) and body.survey < 0:
            return [*watching.pairs.tried(sender, body, now_s=now_s)]
        return self._reported(sender, body, now_s)

    @_guarded(list)
    def _reported(
        self, sender: str, body: ProbePathResult | RailUnresponsive, now_s: float
    ) -> list[Command]:
        if isinstance(body, RailUnresponsive):
            self._unresponsive[(body.source, body.rail)] = (now_s, sender)
            return []
        survey = self._survey
        return [*survey.tried(sender, body, now_s=now_s)] if survey is not None else []

    @_guarded()
    def lost(self, node_id: str) -> None:
        if self._survey is not None:
            self._survey.lost(node_id)
        self._unresponsive = {at: one for at, one in self._unresponsive.items() if at[0] != node_id}
        self._map.lost(node_id)

    # --- while a generation runs --------------------------------------------------------------

    @_guarded(list)
    def poll(self, plan: GenerationPlan, slow: SlowSuspicions, *, now_s: float) -> list[Command]:
        cards = self._peers.here
        if self._is_off(cards):
            return []
        if self._survey is not None:
            found = self._survey.poll(now_s=now_s)
            if self._is_done(now_s):
                self._follow(plan)
            return [*found]
        self._map.meet(cards)
        self._survey = (
            self._begin_unresponsive(now_s)
            or self._begin_slow(plan, slow, now_s)
            or (self._begin_new(now_s) if self._known else self._begin_first(now_s))
            or self._begin_dead(now_s)
            # Nodes that answer again: no plan can use them without a rate.
            or self._probe_in_background(self._map.drain_recovered(), now_s)
        )
        return [*self._survey.poll(now_s=now_s)] if self._survey is not None else []

    def take_urgent_reason(self) -> str:
        """Why another generation must begin at once; empty: it need not."""
        reason, self._urgent_reason = self._urgent_reason, ""
        return reason

    def drain_journal_entries(self) -> list[JournalEntry]:
        notes, self._notes = self._notes, []
        return notes

    @_guarded()
    def know(self, cards: Sequence[NodeCard]) -> None:
        """Marks agents that were present before this leader: they are not probed as new."""
        self._known.update(card.identity for card in cards)

    # --- surveys ------------------------------------------------------------------------------

    def _new(self) -> list[str]:
        return [one for one, card in self._map.cards.items() if card.identity not in self._known]

    def _begin_first(self, now_s: float) -> ProbeSurvey | None:
        """Surveys all paths; if the first ballot was repeated, those of new nodes."""
        new = self._new()
        if not new:
            return None
        self._known.update(card.identity for card in self._map.cards.values())
        matched = self._map.matched
        names = list(self._map.rails)
        if len(new) == len(names):
            most = most_rounds(len(names), len(matched), MOST_ROUNDS)
            rounds = schedule(names, matched, most_rounds=most)
        else:
            most = most_rounds(2 * len(new), len(matched), MOST_ROUNDS)
            rounds = schedule_for(new, names, matched, most_rounds=most)
        self._map.coverage = rounds.coverage
        return self._new_survey(rounds.rounds, now_s, limit_s=LIMIT_S)

    def _begin_new(self, now_s: float) -> ProbeSurvey | None:
        new = self._new()
        self._known.update(self._map.cards[one].identity for one in new)
        return self._probe_in_background(new, now_s)

    def _begin_dead(self, now_s: float) -> ProbeSurvey | None:
        """Probes dead interfaces from time to time; the next generation may use them again."""
        if now_s - self._dead_s < self._dead_pause_s:
            return None
        rounds = tuple(pack(paths_to(self._map.dead, self._map.matched)))
        if not rounds:
            return None
        self._dead_s, self._dead_pause_s = now_s, min(2 * self._dead_pause_s, DEAD_LONGEST_S)
        limits = {"limit_s": BACKGROUND_LIMIT_S, "pause_s": BACKGROUND_PAUSE_S}
        return self._new_survey(rounds, now_s, is_short=True, **limits)

    def _begin_slow(
        self, plan: GenerationPlan, slow: SlowSuspicions, now_s: float
    ) -> ProbeSurvey | None:
        if not self.is_on or plan.paths is None or len(self._map.matched) < 2:
            return None
        for verdict in slow.persistent(SLOW_FOR_S, now_s=now_s):
            is_link = verdict.kind is VerdictKind.SLOW_COMMUNICATION
            if is_link and now_s - self._slow_seen.get(verdict.fingerprint, -1e9) >= SLOW_AGAIN_S:
                self._slow_seen[verdict.fingerprint] = now_s
                self._suspects = dict.fromkeys(plan.paths.rails[:1], verdict.text)
                nodes = [*verdict.nodes] or list(self._map.rails)
                return self._probe_in_background(nodes, now_s, pause_s=0.0)
        return None

    def _begin_unresponsive(self, now_s: float) -> ProbeSurvey | None:
        """Finds the end at fault for an unresponsive rail, while its node sends messages."""
        for (node_id, rail), (said_s, by) in list(self._unresponsive.items()):
            polled_s = self._polled_s.get((node_id, rail), -1e9)
            if now_s - said_s > 1.0 or now_s - polled_s < UNRESPONSIVE_AGAIN_S:
                del self._unresponsive[(node_id, rail)]
                continue
            there = self._map.matched.get(rail, {})
            if {(node_id, rail), (by, rail)} & self._map.dead or not {node_id, by} <= there.keys():
                continue
            if not self._peers.is_responding(node_id, now_s=now_s):
                continue
            self._polled_s[(node_id, rail)] = now_s
            del self._unresponsive[(node_id, rail)]
            third = [one for one in there if one not in (node_id, by)][:1]
            ends = [(node_id, by), *((one, node_id) for one in third)]
            ends += [(by, one) for one in third or [node_id]]
            rounds = [(NetworkPath(*pair, rail),) for pair in ends]
            return self._new_survey(rounds, now_s, limit_s=LIMIT_S, is_short=True)
        return None

    def _probe_in_background(
        self, some: Sequence[str], now_s: float, *, pause_s: float = BACKGROUND_PAUSE_S
    ) -> ProbeSurvey | None:
        if not some:
            return None
        matched = self._map.matched
        most = most_rounds(2 * len(some), len(matched), BACKGROUND_MAX_ROUNDS)
        rounds = schedule_for(some, list(self._map.rails), matched, most_rounds=most).rounds
        return self._new_survey(rounds, now_s, limit_s=BACKGROUND_LIMIT_S, pause_s=pause_s)

    def _new_survey(self, rounds: Sequence[Round], now_s: float, **more: Any) -> ProbeSurvey:
        self._number += 1
        return ProbeSurvey(self._number, rounds, self._map.matched, now_s=now_s, **more)

    def _is_done(self, now_s: float) -> bool:
        survey = self._survey
        if survey is None or survey.ended_s is None:
            return survey is None
        self._survey, dead = None, self._map.dead
        self._notes += self._map.keep(survey, self._previous, now_s=now_s)
        if self._map.dead != dead:
            self._dead_s, self._dead_pause_s = now_s, DEAD_AGAIN_S
        return True

    # --- plans --------------------------------------------------------------------------------

    def _make(self, ids: Sequence[str], keep_order: str, before: NetworkPlan | None) -> NetworkPlan:
        situation = self._map.situation(
            ids, suspects=self._suspects, keep_order=keep_order, previous=self._previous
        )
        judged = self._map.judge(situation)
        if before is None or judged[0].rates:
            return plan_network(situation, judged)
        dead = [one for one in judged[0].found if one.kind is NetworkFindingKind.DEAD]
        return keep_rails(before, ids, judged[0].rails, {one.rail: one.sentence for one in dead})

    def _follow(self, plan: GenerationPlan) -> None:
        members = [node.node_id for node in plan.members]
        if not all(one in self._map.rails for one in members):
            return
        if plan.paths is not None:
            self._reconsider(plan.paths, members)
        elif not self.is_on:
            self._keep(self._make(members, "", None))

    def _reconsider(self, before: NetworkPlan, members: Sequence[str]) -> None:
        self._keep_suspects(members)
        made = self._make(members, _STAYS, before)
        if not made.rails or set(before.rails) <= set(made.rails):
            return
        mine = rails_of_node(self._map.matched, self._me)
        variables = [env_for(one, mine, self._user_env) for one in (before, made)]
        if variables[0] == variables[1]:
            return
        left = [one for one in before.rails if one not in made.rails]
        dead = {path.rail for path in self._map.findings.dead}
        over = ", ".join(made.rails)
        reason = "; ".join(made.dropped.get(one, "it is slow") for one in left)
        text = f"the run drops rail {', '.join(left)} and continues over {over}: {reason}"
        if dead.intersection(left):
            self._urgent_reason = text
        else:
            self.requested = text

    def _keep_suspects(self, members: Sequence[str]) -> None:
        slowest = slowest_medians(self._map.findings.rates, members)
        best = max(slowest.values(), default=0.0)
        self._suspects = {
            rail: reason
            for rail, reason in self._suspects.items()
            if slowest.get(rail, best) * BETTER < best
        }

    @_guarded()
    def status(self, plan: GenerationPlan | None, *, now_s: float) -> NetworkStatus | None:
        if self._mode == "off" or len(self._map.rails) < 2:
            return None
        return msgspec.structs.replace(
            self._map.status(now_s=now_s),
            mode=self._mode,
            plan=plan_status(self.plan) if self.plan is not None else None,
            is_applied=plan is not None and plan.paths is not None,
        )
