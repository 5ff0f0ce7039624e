"""The leader's map of the paths between nodes: rails, measurements, findings.

Survives: nothing. The next leader probes when it has a reason to (path_monitor.py).

Rule 1: the newest probe of a path counts, but a probe without a rate keeps the measured rate.
Rule 2: if an interface answers no probe any more, all earlier measurements of it are discarded.
"""

from collections.abc import Sequence

from ftrun.config.cluster import MembershipSettings
from ftrun.errors import UsageError
from ftrun.network.detect.findings import NetworkFindingKind, NetworkFindings
from ftrun.network.detect.leaf_switches import (
    LeafSwitches,
    leaves_from_file,
    leaves_from_labels,
    leaves_from_slurm,
)
from ftrun.network.detect.probe_schedule import NetworkPath
from ftrun.network.detect.rails import RunRails, match_rails
from ftrun.network.failover.survey import End, ProbeSurvey, most_kept, newer, worst
from ftrun.network.plan.planner import PlanningInputs, survey_of
from ftrun.records.membership import PathFinding, PathsProbed
from ftrun.recovery.commands import JournalEntry
from ftrun.wire.cluster.generation import NetworkPlan, NodeCard, PathMeasurement, Rail
from ftrun.wire.messages.status import NetworkFindingText, NetworkStatus

MAX_REPORTED = 1000
"""Paths in the status document: the worst ones."""


class PathMap:
    """The path map of one leader."""

    def __init__(self, settings: MembershipSettings) -> None:
        self.cards: dict[str, NodeCard] = {}
        """Cards of the nodes that have rails, by node id."""
        self.rails: dict[str, list[Rail]] = {}
        self.matched: RunRails = {}
        self.dead: set[End] = set()
        """Interfaces that answered no probe in the newest survey of them."""
        self.coverage = 1.0
        """Fraction of all paths that the newest survey before a generation has probed."""
        self.findings = NetworkFindings()
        self._settings = settings
        self._found: dict[NetworkPath, PathMeasurement] = {}
        """Sorted by age, the oldest first."""
        self._num_surveys = 0
        """Surveys that have ended."""
        self._judged: tuple[tuple[object, ...], tuple[NetworkFindings, LeafSwitches]] | None = None
        """The newest findings, with the nodes and the survey they are for."""
        self._probed_s = self._at_s = 0.0
        self._reported: set[tuple[NetworkFindingKind, str]] = set()
        self._mended: set[str] = set()
        """Nodes with a rail that answers again, and whose rate is not known yet."""

    # --- nodes --------------------------------------------------------------------------------

    def meet(self, cards: Sequence[NodeCard]) -> None:
        self.cards = {card.node_id: card for card in cards if card.rails}
        rails = {node_id: self._wanted(card) for node_id, card in self.cards.items()}
        if rails != self.rails:
            self.matched = match_rails(rails)
        self.rails = rails

    def _wanted(self, card: NodeCard) -> list[Rail]:
        named = self._settings.profile.network.rails
        return [rail for rail in card.rails if not named or rail.name in named] or card.rails[:1]

    def lost(self, node_id: str) -> None:
        """Removes a lost node; a rail with one node left on it cannot be judged."""
        left = {rail for rail, on in self.matched.items() if len(on.keys() - {node_id}) > 1}
        self.dead = {end for end in self.dead if end[0] != node_id and end[1] in left}

    # --- surveys ------------------------------------------------------------------------------

    def keep(
        self, survey: ProbeSurvey, previous: NetworkPlan | None, *, now_s: float
    ) -> list[JournalEntry]:
        """Records a survey that has ended; returns journal entries for what is new."""
        assert survey.ended_s is not None
        given_up = survey.given_up
        dead = (self.dead - survey.reached) | given_up
        if survey.is_short:
            self._mended.update(node for node, _ in self.dead - dead)
        self.dead = dead
        found = {
            path: one
            for path, one in self._found.items()
            if path not in survey.found
            and (path.source, path.rail) not in given_up
            and (path.destination, path.rail) not in given_up
        } | newer(survey.found, self._found)
        most = most_kept(len(self.rails), len(self.matched))
        self._found = dict([*found.items()][-max(most, len(survey.found)) :])
        self._num_surveys += 1
        self._probed_s, self._at_s = survey.ended_s - survey.started_s, now_s
        return self._news(len(survey.found), previous)

    def drain_recovered(self) -> list[str]:
        """Nodes with a rail that answers again but has no rate; each is returned once."""
        nodes = [one for one in self.rails if one in self._mended]
        self._mended.clear()
        return nodes

    def _news(self, count: int, previous: NetworkPlan | None) -> list[JournalEntry]:
        ids = list(self.rails)
        self.findings = found = self.judge(self.situation(ids, previous=previous))[0]
        text = f"{count} paths between {len(ids)} nodes probed in {self._probed_s:.2f} s"
        notes = [JournalEntry(PathsProbed(text, round(self.coverage, 4), len(found.found)))]
        for one in found.found:
            if (one.kind, one.culprit) not in self._reported:
                says = one.kind is not NetworkFindingKind.SLOW and not one.is_late
                finding = PathFinding(one.sentence, one.culprit, one.kind.value)
                notes.append(JournalEntry(finding, announce=says))
        self._reported = {(one.kind, one.culprit) for one in found.found}
        return notes

    # --- findings -----------------------------------------------------------------------------

    def situation(
        self,
        ids: Sequence[str],
        *,
        suspects: dict[str, str] | None = None,
        keep_order: str = "",
        previous: NetworkPlan | None = None,
    ) -> PlanningInputs:
        """The inputs of a network plan for some of the nodes.

        Args:
            suspects: the monitor's reason for each rail that it finds slow.
            keep_order: why the order stays; empty: it may change.
        """
        here = {one: self.rails[one] for one in ids}
        found = [
            one for one in self._found.values() if one.source in here and one.destination in here
        ]
        return PlanningInputs(
            nodes=ids,
            rails=here,
            found=found,
            leaves=self._leaves(ids),
            user_env=self._settings.user_env,
            suspects=suspects or {},
            keep_order=keep_order,
            previous=previous,
        )

    def judge(self, situation: PlanningInputs) -> tuple[NetworkFindings, LeafSwitches]:
        """The findings of the probes; cached until an input changes."""
        before = situation.previous
        of = (self._num_surveys, situation.rails, situation.leaves, before and before.leaves)
        if self._judged is None or self._judged[0] != of:
            self._judged = (of, survey_of(situation))
        return self._judged[1]

    def _leaves(self, ids: Sequence[str]) -> LeafSwitches:
        node = self._settings.node
        try:
            if node is not None and node.topology is not None:
                return leaves_from_file(node.topology, ids)
            if node is not None and node.slurm_topology:
                return leaves_from_slurm(node.slurm_topology, {one: one for one in ids})
        except UsageError as error:
            return LeafSwitches(words=f"The topology is invalid: {error}")
        switches = {one: self.cards[one].switch for one in ids if self.cards[one].switch}
        if len(switches) == len(ids):
            return LeafSwitches(switches, "slurm", words="Leaf switches are those of Slurm.")
        return leaves_from_labels({one: self.cards[one].domain for one in ids})

    def status(self, *, now_s: float) -> NetworkStatus:
        """What the survey found, without the plan; a copy that other threads may read."""
        return NetworkStatus(
            probed_s=round(self._probed_s, 3),
            age_s=round(now_s - self._at_s, 1) if self._at_s else None,
            coverage=round(self.coverage, 4),
            rails={node_id: tuple(rails) for node_id, rails in self.rails.items()},
            paths=tuple(worst(MAX_REPORTED, self._found.values())),
            num_paths=len(self._found),
            findings=tuple(
                NetworkFindingText(one.kind.value, one.culprit, one.sentence)
                for one in self.findings.found
            ),
        )
