"""The version that a run over several nodes resumes from, and where its shards come from.

Runs in:  the agent that leads. Pure.
Takes in: what every reachable node holds: sealed slots, and parts of protections.
Gives:    a `Choice`: the newest version from which every rank can be had; or what is missing.
Survives: the loss of up to m nodes of each protection group, as that is what m means.

Rule 1: it is chosen from what is there, not from a record that could be lost or wrong.
Rule 2: a version that a later generation has left behind never comes back: one of an older
        generation counts only up to the point that the later generation has started from.
Rule 3: parts of a protection fit together only where version, generation of the protection,
        members and parity are equal. Parity of another step is no parity.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ftrun.ids import Rank, Version, version
from ftrun.wire.cluster import Plan, Source
from ftrun.wire.messages import Inventory
from ftrun.wire.protected import Protected


@dataclass(frozen=True, slots=True)
class Choice:
    """What to resume from; no version means that there is none."""

    version: Version | None
    why: str
    world_size: int = 0
    """Of the version; ranks of another world size are put together anew."""
    sources: tuple[Source, ...] = ()
    protected_in: int = -1
    is_lost: bool = False
    """There was something to go on from, and it cannot be had."""


@dataclass
class _Group:
    """One protection, with the parts of it that are reachable."""

    name: Protected
    parts: dict[str, Protected] = field(default_factory=dict)

    def missing(self, slots: Mapping[int, set[str]]) -> list[str]:
        """Members whose state, or whose part in the protection, is not here."""
        return [
            member.node_id
            for member in self.name.members
            if not (
                member.node_id in self.parts
                and self.parts[member.node_id].is_complete
                and all(member.node_id in slots.get(rank, ()) for rank in member.ranks)
            )
        ]

    def can_rebuild(self, rank: int, slots: Mapping[int, set[str]]) -> bool:
        gone = self.missing(slots)
        owner = next((m.node_id for m in self.name.members if rank in m.ranks), None)
        has_mirror = any(owner in part.mirrors for part in self.parts.values())
        return owner is not None and len(gone) <= self.name.parity and has_mirror

    @property
    def source(self) -> Source:
        members = self.name.members
        return Source(
            [member.node_id for member in members],
            [list(member.ranks) for member in members],
            self.name.parity,
            self.name.protected_in,
        )


def choose(
    holdings: Mapping[str, Inventory], world_size: int, newest_plan: Plan | None, *, elastic: bool
) -> Choice:
    """The newest version that can be had whole.

    Args:
        holdings: by node id.
        world_size: of the generation to come.
        newest_plan: the newest generation that has taken effect, or may have.
        elastic: a version of another world size will do.
    """
    slots: dict[tuple[int, Version], dict[int, set[str]]] = {}
    groups: dict[tuple[int, Version], dict[str, _Group]] = {}
    for node_id, held in sorted(holdings.items()):
        for offer in held.offers:
            at = (offer.world_size, version(offer.generation, offer.step))
            slots.setdefault(at, {}).setdefault(offer.rank, set()).add(node_id)
        for part in held.protected:
            at = (part.world_size, version(part.generation, part.step))
            name = _name(part)
            group = groups.setdefault(at, {}).setdefault(name, _Group(part))
            group.parts[node_id] = part
    valid = [at for at in {*slots, *groups} if not is_abandoned(at[1], newest_plan)]
    fitting = [at for at in valid if at[0] == world_size or elastic]
    problems: list[str] = []
    for at in sorted(fitting, key=lambda at: at[1], reverse=True):
        found = _sources(at, slots.get(at, {}), groups.get(at, {}))
        if isinstance(found, str):
            problems.append(f"{at[1]}: {found}")
            continue
        why = f"{at[1]}: every rank can be had"
        protected_in = max((source.generation for source in found), default=-1)
        return Choice(at[1], why, at[0], tuple(found), protected_in)
    strangers = sorted({at[0] for at in valid} - {world_size})
    if strangers and not elastic:
        sizes = ", ".join(str(size) for size in strangers)
        problems.append(f"what there is comes from a world of {sizes}, this run has {world_size}")
    return Choice(None, "; ".join(problems[:2]) or "nothing is offered", is_lost=bool(problems))


def is_abandoned(held: Version, newest_plan: Plan | None) -> bool:
    """Whether a later generation has started from an older point than this one."""
    if newest_plan is None or held.generation >= newest_plan.generation:
        return False
    restored = newest_plan.restore
    return restored is None or held > version(*restored)


def _name(part: Protected) -> str:
    members = ";".join(f"{member.node_id}:{member.ranks}" for member in part.members)
    return f"{part.protected_in}/{part.parity}/{members}"


def _sources(
    at: tuple[int, Version], slots: Mapping[int, set[str]], groups: Mapping[str, _Group]
) -> list[Source] | str:
    """The protections that lost ranks are rebuilt from; or why one cannot be, in words."""
    world_size, _ = at
    lost = [rank for rank in range(world_size) if not slots.get(rank)]
    newest_first = sorted(groups.values(), key=lambda group: -group.name.protected_in)
    chosen: list[Source] = []
    for rank in lost:
        group = next((one for one in newest_first if one.can_rebuild(rank, slots)), None)
        if group is None:
            return _what_is_missing(Rank(rank), lost, newest_first, slots)
        if group.source not in chosen:
            chosen.append(group.source)
    # A rank that moves to another node is fetched from its slot, by way of its group.
    for group in newest_first:
        ranks = {rank for member in group.name.members for rank in member.ranks}
        if all(not ranks & {r for some in source.ranks for r in some} for source in chosen):
            chosen.append(group.source)
    return chosen


def _what_is_missing(
    rank: Rank, lost: Iterable[int], groups: Iterable[_Group], slots: Mapping[int, set[str]]
) -> str:
    names = ", ".join(str(one) for one in lost)
    for group in groups:
        members = group.name.members
        owner = next((m.node_id for m in members if rank in m.ranks), None)
        if owner is None:
            continue
        gone = group.missing(slots)
        return (
            f"rank {names} cannot be rebuilt: of the group {', '.join(m.node_id for m in members)}"
            f", {', '.join(gone)} are missing, and only {group.name.parity} may be"
        )
    return f"rank {names} is held by no node that is here, and nothing protects it"
