"""Decides which ranks keep their processes in the next generation.

Rule 1: all parked ranks stay, or none. A reason against one of them is a reason against all,
        because a full restart always works.
Rule 2: one attempt. Nodes park no rank of a generation in which one of their ranks has made no
        step, so a generation that begins with survivors and fails early is followed by a full
        restart.
Rule 3: ranks that have run any generation but the previous one do not stay: the run may have
        continued without them.
"""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from ftrun.records.membership import RanksStayed
from ftrun.recovery.commands import JournalEntry
from ftrun.wire.cluster.generation import GenerationPlan
from ftrun.wire.cluster.membership import ParkedRank, Promise


def with_survivors(
    plan: GenerationPlan,
    previous: GenerationPlan | None,
    promises: Mapping[str, Promise],
    *,
    max_renewals: int,
) -> GenerationPlan:
    """The plan with the ranks that stay, or with the reason why none does.

    Args:
        previous: the plan of the generation that has failed, or may have been chosen since.
        max_renewals: generations that a process may join after its first one.
    """
    if previous is None:
        return plan
    if problem := next(_problems(plan, previous, promises, max_renewals), ""):
        return msgspec.structs.replace(plan, not_staying=problem)
    ranks = [one.rank for node in plan.members for one in promises[node.node_id].parked]
    return msgspec.structs.replace(plan, staying=sorted(ranks))


def notes_of_survivors(plan: GenerationPlan) -> list[JournalEntry]:
    """What to report about a chosen plan; nothing if its ballot did not ask ranks to stay."""
    if not plan.staying and not plan.not_staying:
        return []
    text = f"generation {plan.generation}: no rank stays, because {plan.not_staying}"
    if plan.staying:
        text = f"generation {plan.generation}: {len(plan.staying)} of {plan.world_size} ranks stay"
    started = [rank for node in plan.members for rank in node.ranks if rank not in plan.staying]
    record = RanksStayed(text, plan.generation, tuple(plan.staying), tuple(started))
    return [JournalEntry(record, announce=not plan.staying)]


def _problems(
    plan: GenerationPlan,
    previous: GenerationPlan,
    promises: Mapping[str, Promise],
    max_renewals: int,
) -> Iterator[str]:
    if plan.restore is None:
        yield "memory holds no version to resume from"
    if plan.world_size != previous.world_size or plan.is_resized:
        yield f"the run has {plan.world_size} ranks now, and had another number"
    if plan.history.bad_version is not None or plan.skip_batches:
        yield "the run goes back to a version before a numerical anomaly"
    for promise in promises.values():
        if promise.stay_problem:
            yield f"on node {promise.card.node_id} {promise.stay_problem}"
    for node in plan.members:
        before, promise = previous.member(node.node_id), promises[node.node_id]
        if before is not None and before.ranks != node.ranks:
            yield f"node {node.node_id} gets other ranks"
        if promise.parked and promise.parked_in != previous.generation:
            yield f"the ranks of node {node.node_id} have run generation {promise.parked_in}"
    parked = [one for node in plan.members for one in promises[node.node_id].parked]
    step = plan.restore[1] if plan.restore is not None else 0
    yield from _problems_of_ranks(parked, step, max_renewals)


def _problems_of_ranks(parked: Sequence[ParkedRank], step: int, max_renewals: int) -> Iterator[str]:
    for one in parked:
        if not one.first_step <= step <= one.last_step:
            yield (
                f"rank {one.rank} can go to steps {one.first_step} to {one.last_step}, and step "
                f"{step} is restored"
            )
        if one.renewals >= max_renewals:
            yield f"rank {one.rank} has stayed {one.renewals} times (restart.max_renewals)"
    if not parked:
        yield "no rank is parked"
