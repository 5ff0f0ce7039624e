"""From promises to a plan: which node runs which ranks, from which version, in which groups."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ftrun.config.cluster import MembershipSettings
from ftrun.erasure.groups import ProtectionGroup as ErasureGroup
from ftrun.erasure.groups import default_parity, next_groups
from ftrun.errors import ExitCode
from ftrun.ids import Version, version
from ftrun.membership.ballots import Ballot
from ftrun.membership.leader.rank_assignment import RankAssignment
from ftrun.membership.leader.survivors import notes_of_survivors, with_survivors
from ftrun.network.detect.leaf_switches import group_domains
from ftrun.network.detect.rails import match_rails, rails_of_node
from ftrun.records.membership import GenerationChosen, TwoVotersWarning
from ftrun.recovery.commands import EndRun, JournalEntry
from ftrun.recovery.restore_point import RestoreChoice, ancestry, choose
from ftrun.wire.cluster.generation import FailureHistory, GenerationPlan, PlanMember
from ftrun.wire.cluster.membership import Promise


@dataclass(frozen=True, slots=True)
class RestoreStateMissing:
    """A version to restore exists, and nodes that may hold it are missing."""

    reason: str
    end: EndRun
    """How the run ends if they do not return."""


def make_plan(
    ballot: Ballot,
    assignment: RankAssignment,
    previous: GenerationPlan | None,
    settings: MembershipSettings,
    *,
    leader: str,
    history: FailureHistory,
    waited_s: float,
) -> GenerationPlan | RestoreStateMissing | EndRun:
    promises = ballot.promises
    choice = _choose(promises, assignment, previous, history)
    if choice.version is None and history.bad_version is not None:
        return _nothing_clean(version(*history.bad_version))
    problem = _what_is_lost(choice, ballot, previous)
    if problem:
        obstacle = _cannot_begin(choice, problem, settings, waited_s)
        if obstacle is not None:
            return obstacle
    groups = _groups(assignment, previous, settings)
    num_voters = len(assignment.members) + len(assignment.spares)
    plan = GenerationPlan(
        generation=ballot.generation,
        leader=leader,
        reason=ballot.reason,
        members=[*map(PlanMember, assignment.members, assignment.first_ranks)],
        spares=list(assignment.spares),
        restore=_pair(choice.version),
        restore_reason=_reason(choice, problem, previous),
        store_host=_store_host(assignment),
        store_port=promises[assignment.members[0].node_id].store_port,
        groups=[list(group.nodes) for group in groups],
        parity=max((group.parity for group in groups), default=0),
        is_ring=any(group.is_ring for group in groups),
        skip_batches=_skipped_batches(choice, previous, history),
        restore_world_size=choice.world_size,
        sources=list(choice.sources),
        restore_survives=choice.survives,
        smp_ports={node_id: has.smp_port for node_id, has in promises.items()},
        history=history,
        decided_by=ballot.decided_by(),
        committed=_pair(choice.committed if choice.version is not None else None),
        ancestry=ancestry(choice.version, previous),
        witness=0 if num_voters % 2 else ballot.witness,
        paths=assignment.paths,
        life=previous.life if previous is not None else f"{assignment.members[0].incarnation:x}",
    )
    if not ballot.stay:
        return plan
    max_renewals = settings.profile.restart.max_renewals
    return with_survivors(plan, previous, promises, max_renewals=max_renewals)


def _choose(
    promises: Mapping[str, Promise],
    assignment: RankAssignment,
    previous: GenerationPlan | None,
    history: FailureHistory,
) -> RestoreChoice:
    """The version to resume from, which the nodes with new ranks can get too."""

    def of(nodes: Collection[str]) -> RestoreChoice:
        return choose(
            {node_id: promises[node_id].holdings for node_id in nodes},
            previous,
            committed=[has.committed for has in promises.values() if has.committed is not None],
            bad_version=history.bad_version,
        )

    first = of(promises)
    ranks = {
        card.node_id: range(at, at + card.num_ranks)
        for card, at in zip(assignment.members, assignment.first_ranks, strict=True)
    }
    world_size = sum(card.num_ranks for card in assignment.members)
    is_fetched = first.world_size == world_size and any(
        source.parity == 0 and rank not in ranks.get(node_id, ())
        for source in first.sources
        for node_id, some in zip(source.node_ids, source.ranks, strict=True)
        for rank in some
    )
    if not is_fetched:
        return first
    # An unprotected slot has no mirror to be fetched by: only its own node can use it.
    second = of([card.node_id for card in assignment.members if card.node_id in promises])
    return second if second.version is not None else first


def _skipped_batches(
    choice: RestoreChoice, previous: GenerationPlan | None, history: FailureHistory
) -> int:
    """Batches to skip after the version, because they led to numerical anomalies.

    If the version is that of the last generation, they are skipped in addition to its skipped
    batches.
    """
    if choice.version is None:
        return 0
    is_same = previous is not None and _pair(choice.version) == previous.restore
    before = previous.skip_batches if previous is not None and is_same else 0
    return before + max(0, history.skip_to - choice.version.step)


def _cannot_begin(
    choice: RestoreChoice, problem: str, settings: MembershipSettings, waited_s: float
) -> RestoreStateMissing | EndRun | None:
    """Waits for lost state, or ends the run; None if an older version serves.

    With checkpoints, the wait is for nodes that are only restarting. Without them, an older version
    in memory, or the start if no commit is known, is used shortly before the pause would end the
    run.
    """
    end = _lost(problem)
    limit_s = 2 * settings.times.failure_timeout_s + settings.times.last_call_timeout_s
    is_first = choice.wanted is not None and choice.committed is None
    has_older = choice.version is not None or is_first
    else_from = ""
    if not settings.has_checkpoints:
        limit_s = max(limit_s, settings.times.pause_timeout_s - limit_s) if has_older else math.inf
        older = "the beginning" if choice.version is None else str(choice.version)
        else_from = f"; without them the run resumes from {older}" if has_older else ""
    if choice.holders and waited_s < limit_s:
        away = ", ".join(sorted(choice.holders))
        return RestoreStateMissing(
            f"{problem}. {away} may hold it and cannot be reached{else_from}", end
        )
    return None if has_older or settings.has_checkpoints else end


def _reason(choice: RestoreChoice, problem: str, previous: GenerationPlan | None) -> str:
    if not problem and previous is not None and previous.restore == _pair(choice.version):
        # It starts where the last generation started, for the same reason.
        return previous.restore_reason
    return problem or choice.reason


def _what_is_lost(choice: RestoreChoice, ballot: Ballot, previous: GenerationPlan | None) -> str:
    """The lost version in words; empty if there is none."""
    if choice.wanted is not None:
        if choice.version is not None:
            return choice.reason
        was = "was" if choice.wanted == choice.committed else "may have been"
        return f"{choice.wanted} {was} committed and is lost: {choice.reason}"
    found = choice.version
    if previous is None or (found is not None and found.generation == previous.generation):
        return ""
    # No newer commit is known here. A node that ran ranks holds what was committed.
    ran = {node.node_id for node in previous.members}
    if any(has.card.node_id in ran and has.knows >= 0 for has in ballot.promises.values()):
        return ""
    text = f"no present node has the memory of generation {previous.generation}"
    if choice.version is None:
        return text
    # A node that has left that generation may have kept the version it began with.
    return f"{choice.reason}; {text}, and its steps are lost"


def _nothing_clean(bad: Version) -> EndRun:
    advice = (
        "Memory holds two versions, both from after the numerical anomaly. Restart from "
        "an older checkpoint; a lower learning rate, gradient clipping or other data may help."
    )
    return EndRun(ExitCode.DO_NOT_RESTART, f"no version before {bad} is left", advice=advice)


def _pair(version: Version | None) -> tuple[int, int] | None:
    return None if version is None else (version.generation, version.step)


def _store_host(assignment: RankAssignment) -> str:
    first, paths = assignment.members[0], assignment.paths
    if paths is None or not paths.rails:
        return first.host
    try:
        matched = match_rails({card.node_id: card.rails for card in assignment.members})
        rail = rails_of_node(matched, first.node_id).get(paths.rails[0])
    except Exception:  # noqa: BLE001 - a bug costs the network plan, never the run
        return first.host
    return rail.host if rail is not None else first.host


def _groups(
    assignment: RankAssignment, previous: GenerationPlan | None, settings: MembershipSettings
) -> list[ErasureGroup]:
    """Protection groups; a replacement gets the position of the node whose ranks it runs."""
    node_ids, node = [card.node_id for card in assignment.members], settings.node
    if len(node_ids) < 2 or node is None:
        return []
    labels = {card.node_id: card.domain for card in assignment.members}
    leaves = assignment.paths.leaves if assignment.paths is not None else {}
    domains = group_domains(node_ids, labels, leaves)
    parity = node.erasure_parity
    if parity is None:
        parity = default_parity(len(node_ids))
    before = [node.node_id for node in previous.members] if previous is not None else []
    replaced: dict[str, str] = {}
    if len(before) == len(node_ids):
        pairs = zip(before, node_ids, strict=True)
        replaced = {old: new for old, new in pairs if old != new}
    previous_groups: list[ErasureGroup] = []
    if previous is not None:
        parity_before, is_ring = previous.parity, previous.is_ring
        previous_groups = [
            ErasureGroup(tuple(nodes), parity_before, is_ring) for nodes in previous.groups
        ]
    return next_groups(
        previous_groups,
        node_ids,
        replaced=replaced,
        data=node.erasure_data,
        parity=min(parity, len(node_ids) - 1),
        domains=domains,
        is_ring=node.erasure_ring,
    )


def _lost(problem: str) -> EndRun:
    advice = (
        "More nodes are lost than the protection tolerates, and there is no checkpoint. Restart "
        "the missing nodes with the same --run-id, or start a new run with another one. With "
        "--checkpoint-dir a run resumes from disk."
    )
    return EndRun(ExitCode.STATE_LOST, f"the state of the run is lost: {problem}", advice=advice)


def notes_of(plan: GenerationPlan) -> list[JournalEntry]:
    text = f"generation {plan.generation}: {len(plan.members)} nodes, {plan.world_size} ranks"
    chosen = GenerationChosen(
        text,
        reason=plan.reason,
        generation=plan.generation,
        world_size=plan.world_size,
        restored=plan.restore,
        restore_reason=plan.restore_reason,
        skip_batches=plan.skip_batches,
    )
    notes = [JournalEntry(chosen), *notes_of_survivors(plan)]
    if plan.generation > 0 or len(plan.voters) != 2 or plan.witness:
        return notes
    text = (
        "two nodes and no spare: if one is unreachable, the other cannot determine whether it is "
        "dead or cut off, and pauses. A spare (--spares 1) or an etcd breaks the tie"
    )
    return [*notes, JournalEntry(TwoVotersWarning(text), announce=True)]
