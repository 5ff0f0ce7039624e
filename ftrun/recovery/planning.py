"""From promises to a plan: who runs what, from which version, protected by whom.

Runs in:  the agent that leads. Pure.
Takes in: the promises of a ballot, the places of its nodes, the last plan.
Gives:    a `Plan`; or what state is missing; or the end of the run, where it cannot be had.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ftrun.erasure.groups import Group as ErasureGroup
from ftrun.erasure.groups import default_parity, next_groups
from ftrun.errors import ExitCode
from ftrun.ids import Version, version
from ftrun.network.leaves import group_domains
from ftrun.network.rail_matching import match_rails, rails_of_node
from ftrun.recovery.ballots import Ballot
from ftrun.recovery.commands import EndRun, Note
from ftrun.recovery.places import Assignment
from ftrun.recovery.restore_choice import Choice, ancestry, choose
from ftrun.recovery.settings import ClusterSettings
from ftrun.wire.ballot_messages import Promise
from ftrun.wire.plan import History, Plan, PlanNode


@dataclass(frozen=True, slots=True)
class StateMissing:
    """There was something to go on from, and nodes that may hold it are not here."""

    why: str
    end: EndRun
    """Where they do not come."""


def make_plan(
    ballot: Ballot,
    places: Assignment,
    previous: Plan | None,
    settings: ClusterSettings,
    *,
    lead: str,
    history: History,
    waited_s: float,
) -> Plan | StateMissing | EndRun:
    """The generation that this ballot is to bring about.

    Args:
        ballot: promised.
        places: of its nodes.
        previous: the newest plan that is known.
        settings: of the run.
        lead: node id of the proposer.
        history: what the next lead is to know.
        waited_s: since the ballot began.
    """
    promises = ballot.promises
    choice = _choose(promises, places, previous, history)
    if choice.version is None and history.spoiled is not None:
        return _nothing_clean(version(*history.spoiled))
    problem = _what_is_lost(choice, ballot, previous)
    if problem:
        obstacle = _cannot_begin(choice, problem, settings, waited_s)
        if obstacle is not None:
            return obstacle
    groups = _groups(places, previous, settings)
    return Plan(
        generation=ballot.generation,
        lead=lead,
        why=ballot.why,
        members=[*map(PlanNode, places.members, places.first_ranks)],
        spares=list(places.spares),
        restore=_pair(choice.version),
        restore_why=_why(choice, problem, previous),
        store_host=_store_host(places),
        store_port=promises[places.members[0].node_id].store_port,
        groups=[list(group.nodes) for group in groups],
        parity=max((group.parity for group in groups), default=0),
        skip_batches=_skipped_batches(choice, previous, history),
        restore_world_size=choice.world_size,
        sources=list(choice.sources),
        smp_ports={node_id: has.smp_port for node_id, has in promises.items()},
        history=history,
        decided_by=ballot.decided_by(),
        committed=_pair(choice.committed if choice.version is not None else None),
        ancestry=ancestry(choice.version, previous),
        witness=ballot.witness if (len(places.members) + len(places.spares)) % 2 == 0 else 0,
        roads=places.roads,
        life=previous.life if previous is not None else f"{places.members[0].incarnation:x}",
    )


def _choose(
    promises: Mapping[str, Promise], places: Assignment, previous: Plan | None, history: History
) -> Choice:
    """The version to resume from, that also the nodes with new ranks can get."""

    def of(nodes: Collection[str]) -> Choice:
        return choose(
            {node_id: promises[node_id].holdings for node_id in nodes},
            previous,
            committed=[has.committed for has in promises.values() if has.committed is not None],
            spoiled=history.spoiled,
        )

    first = of(promises)
    ranks = {
        card.node_id: range(at, at + card.num_ranks)
        for card, at in zip(places.members, places.first_ranks, strict=True)
    }
    world_size = sum(card.num_ranks for card in places.members)
    is_fetched = first.world_size == world_size and any(
        source.parity == 0 and rank not in ranks.get(node_id, ())
        for source in first.sources
        for node_id, some in zip(source.node_ids, source.ranks, strict=True)
        for rank in some
    )
    if not is_fetched:
        return first
    # An unprotected slot has no mirror to be fetched by: only its own node can use it.
    second = of([card.node_id for card in places.members if card.node_id in promises])
    return second if second.version is not None else first


def _skipped_batches(choice: Choice, previous: Plan | None, history: History) -> int:
    """What came after the version and led to bad numbers; again where that did not get anywhere."""
    if choice.version is None:
        return 0
    is_same = previous is not None and _pair(choice.version) == previous.restore
    before = previous.skip_batches if previous is not None and is_same else 0
    return before + max(0, history.skip_to - choice.version.step)


def _cannot_begin(
    choice: Choice, problem: str, settings: ClusterSettings, waited_s: float
) -> StateMissing | EndRun | None:
    """What is lost is waited for, or is the end; nothing where something older will do.

    With checkpoints the wait is for nodes that are only started again. An older version in
    memory, or the beginning where no commit is known, is taken shortly before the pause would
    end the run.
    """
    end = _lost(problem)
    limit_s = 2 * settings.deadline_s + settings.settle_s
    is_first = choice.wanted is not None and choice.committed is None
    has_older = choice.version is not None or is_first
    else_from = ""
    if not settings.has_checkpoints:
        limit_s = max(limit_s, settings.pause_limit_s - limit_s) if has_older else math.inf
        older = "the beginning" if choice.version is None else str(choice.version)
        else_from = f"; without them the run resumes from {older}" if has_older else ""
    if choice.holders and waited_s < limit_s:
        away = ", ".join(sorted(choice.holders))
        return StateMissing(f"{problem}. {away} may hold it, and cannot be reached{else_from}", end)
    return None if has_older or settings.has_checkpoints else end


def _why(choice: Choice, problem: str, previous: Plan | None) -> str:
    if not problem and previous is not None and previous.restore == _pair(choice.version):
        # It begins where the last one began, and for the same reason.
        return previous.restore_why
    return choice.why if choice.version is not None else problem or choice.why


def _what_is_lost(choice: Choice, ballot: Ballot, previous: Plan | None) -> str:
    """What there was to go on from and cannot be had, in words; empty where there is nothing."""
    if choice.wanted is not None:
        if choice.version is not None:
            return choice.why
        was = "was" if choice.wanted == choice.committed else "may have been"
        return f"{choice.wanted}, which {was} committed, is lost: {choice.why}"
    if choice.version is not None or previous is None:
        return ""
    # Nobody here has heard of a commit. Whoever ran ranks holds what was committed.
    ran = {node.node_id for node in previous.members}
    if any(has.card.node_id in ran and has.knows >= 0 for has in ballot.promises.values()):
        return ""
    return f"no node is here that ran generation {previous.generation} and has kept its memory"


def _nothing_clean(bad: Version) -> EndRun:
    advice = (
        "Memory holds two versions, and none from before the bad numbers is left. Start again from "
        "an older checkpoint; a lower learning rate, gradient clipping or other data may help."
    )
    return EndRun(ExitCode.DO_NOT_RESTART, f"no version before {bad} is left", advice=advice)


def _pair(version: Version | None) -> tuple[int, int] | None:
    return None if version is None else (version.generation, version.step)


def _store_host(places: Assignment) -> str:
    """The address of the first node at which the ranks of all nodes meet."""
    first, roads = places.members[0], places.roads
    if roads is None or not roads.rails:
        return first.host
    try:
        matched = match_rails({card.node_id: card.rails for card in places.members})
        rail = rails_of_node(matched, first.node_id).get(roads.rails[0])
    except Exception:  # noqa: BLE001 - a bug costs the plan of roads, never the run
        return first.host
    return rail.host if rail is not None else first.host


def _groups(
    places: Assignment, previous: Plan | None, settings: ClusterSettings
) -> list[ErasureGroup]:
    """Protection groups; a replacement takes the place of the node whose ranks it runs."""
    node_ids = [card.node_id for card in places.members]
    if len(node_ids) < 2:
        return []
    labels = {card.node_id: card.domain for card in places.members}
    leaves = places.roads.leaves if places.roads is not None else {}
    domains = group_domains(node_ids, labels, leaves)
    parity = settings.erasure_parity or default_parity(len(node_ids))
    before = [node.node_id for node in previous.members] if previous is not None else []
    replaced: dict[str, str] = {}
    if len(before) == len(node_ids):
        pairs = zip(before, node_ids, strict=True)
        replaced = {old: new for old, new in pairs if old != new}
    old_groups: list[ErasureGroup] = []
    if previous is not None:
        old_groups = [ErasureGroup(tuple(nodes), previous.parity) for nodes in previous.groups]
    return next_groups(
        old_groups,
        node_ids,
        replaced=replaced,
        data=settings.erasure_data,
        parity=min(parity, len(node_ids) - 1) if settings.erasure else 0,
        domains=domains,
    )


def _lost(problem: str) -> EndRun:
    advice = (
        "More nodes are gone than the protection bears, and there is no checkpoint to go on from. "
        "Bring the missing nodes back and start again with the same --run-id, or start anew with "
        "another one; --checkpoint-dir guards against this."
    )
    return EndRun(ExitCode.STATE_LOST, f"the state of the run is lost: {problem}", advice=advice)


def notes_of(plan: Plan) -> list[Note]:
    """What the journal, and of the first generation the user, should know."""
    text = f"generation {plan.generation}: {len(plan.members)} nodes, {plan.world_size} ranks"
    why = {"why": plan.why, "restored": str(plan.restore), "restore_why": plan.restore_why}
    left_out = {"skip_batches": plan.skip_batches} if plan.skip_batches else {}
    notes = [Note("Generation", text, {**why, **left_out})]
    if plan.generation > 0 or len(plan.voters) != 2 or plan.witness:
        return notes
    text = (
        "two nodes and no spare: where one does not answer, the other cannot know whether it is "
        "dead or cut off, and pauses. A spare (--spares 1) decides it, and so does an etcd"
    )
    return [*notes, Note("TwoVoters", text, {}, say=True)]
