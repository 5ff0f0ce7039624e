"""From promises to a plan: who runs what, from which version, protected by whom.

Runs in:  the agent that leads. Pure.
Takes in: the promises of a ballot, the places of its nodes, the last plan.
Gives:    a `Plan`; or the end of the run, where there was a state and it cannot be had.
"""

from ftrun.erasure.groups import Group as ErasureGroup
from ftrun.erasure.groups import default_parity, next_groups
from ftrun.errors import ExitCode
from ftrun.recovery.ballots import Ballot
from ftrun.recovery.commands import EndRun
from ftrun.recovery.places import Assignment
from ftrun.recovery.restore_choice import Choice, choose
from ftrun.recovery.settings import ClusterSettings
from ftrun.wire.cluster import History, Plan, PlanNode


def make_plan(
    ballot: Ballot,
    places: Assignment,
    previous: Plan | None,
    settings: ClusterSettings,
    *,
    lead: str,
    history: History,
) -> Plan | EndRun:
    """The generation that this ballot is to bring about."""
    members = [
        PlanNode(card, first)
        for card, first in zip(places.members, places.first_ranks, strict=True)
    ]
    world_size = sum(card.num_ranks for card in places.members)
    holdings = {node_id: promise.holdings for node_id, promise in ballot.promises.items()}
    # A version of another number of ranks will do: it is put together anew, by name and offset.
    choice = choose(holdings, world_size, previous, elastic=True)
    if choice.version is None and choice.is_lost and not settings.has_checkpoints:
        return _lost(choice)
    first = places.members[0]
    groups = _groups(places, previous, settings)
    return Plan(
        generation=ballot.generation,
        lead=lead,
        why=ballot.why,
        members=members,
        spares=list(places.spares),
        restore=_pair(choice),
        restore_why=choice.why,
        store_host=first.host,
        store_port=ballot.promises[first.node_id].store_port,
        groups=[list(group.nodes) for group in groups],
        parity=max((group.parity for group in groups), default=0),
        restore_world_size=choice.world_size,
        sources=list(choice.sources),
        protected_in=choice.protected_in,
        smp_ports={node_id: has.smp_port for node_id, has in ballot.promises.items()},
        history=history,
        decided_after=ballot.base_generation,
        decided_by=sorted(ballot.base),
    )


def _pair(choice: Choice) -> tuple[int, int] | None:
    if choice.version is None:
        return None
    return (choice.version.generation, choice.version.step)


def _groups(
    places: Assignment, previous: Plan | None, settings: ClusterSettings
) -> list[ErasureGroup]:
    """Protection groups; a replacement takes the place of the node whose ranks it runs."""
    node_ids = [card.node_id for card in places.members]
    if len(node_ids) < 2:
        return []
    domains = {card.node_id: card.domain for card in places.members if card.domain}
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


def _lost(choice: Choice) -> EndRun:
    advice = (
        "More nodes are gone than the protection bears, and there is no checkpoint to go on from. "
        "Bring the missing nodes back and start again with the same --run-id, or start anew with "
        "another one; --checkpoint-dir guards against this."
    )
    return EndRun(ExitCode.STATE_LOST, f"the state of the run is lost: {choice.why}", advice=advice)
