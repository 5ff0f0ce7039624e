"""The version that a run over several nodes resumes from, and the sources of its shards.

Runs in:  the agent that leads. Pure.
Takes in: what every reachable node holds: sealed slots, and parts of protections.
Gives:    a `RestoreChoice`: the newest version from which every rank can be restored; or what is
          missing.
Survives: the loss of up to m nodes of each protection group, by the definition of m.

Rule 1: the version is chosen from what the nodes hold, not from a record that could be lost or
        wrong.
Rule 2: a version that a later generation did not start from is never restored. A version of an
        older generation counts only if the newest generation descends from it.
Rule 3: parts of a protection fit together only if version, generation of the protection, members
        and parity are equal. Parity of another step is useless.
Rule 4: an uncommitted version that has lost a rank counts only if it is protected as well as the
        last committed one. A version with less protection is not relied on: nodes retain the
        protection of the last commit until the version they resume from is committed itself.
Rule 5: of several protections, the one that tolerates the most losses is relied on. Nodes retain
        that one and overwrite the others. Of equals, a committed one is relied on: missing nodes
        hold their parts of it too, and may return. What they hold of an uncommitted one is unknown.
Rule 6: a leader may have committed a version before it was cut off. Such a version counts as
        committed while nodes that may hold it are missing, because the next leader cannot rule
        out the commit.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ftrun.ids import Version, version
from ftrun.wire.cluster.generation import GenerationPlan, RestoreSource, VersionPair
from ftrun.wire.messages.smp import Inventory, ProtectionPart


@dataclass(frozen=True, slots=True)
class RestoreChoice:
    """The version to resume from; no version means that there is none."""

    version: Version | None
    reason: str
    world_size: int = 0
    """World size of the version; for another world size it is resharded."""
    sources: tuple[RestoreSource, ...] = ()
    survives: int = 0
    """Nodes of each source group that may still be lost."""
    wanted: Version | None = None
    """The newest version that was committed, or may have been, if it cannot be restored."""
    committed: Version | None = None
    """The newest version known to be committed; after a loss, the one that counts as such."""
    holders: frozenset[str] = frozenset()
    """Missing nodes that may hold the lost state."""


Slots = dict[int, set[str]]
"""Nodes that hold a sealed slot, by rank."""


@dataclass
class _Group:
    """One protection, with its reachable parts."""

    name: ProtectionPart
    parts: dict[str, ProtectionPart] = field(default_factory=dict)

    def missing(self, slots: Slots) -> list[str]:
        """Members whose state, or whose part of the protection, is missing."""
        return [
            member.node_id
            for member in self.name.members
            if not (
                member.node_id in self.parts
                and self.parts[member.node_id].is_complete
                and all(member.node_id in slots.get(rank, ()) for rank in member.ranks)
            )
        ]

    def margin(self, slots: Slots) -> int:
        """Nodes that may still be lost; negative if its state cannot be rebuilt.

        In a ring, the state of two neighbours is lost with both.
        """
        missing = self.missing(slots)
        if not self.name.is_ring:
            return self.name.parity - len(missing)
        names = [member.node_id for member in self.name.members]
        after = {one: names[(at + 1) % len(names)] for at, one in enumerate(names)}
        if any(after[one] in missing for one in missing):
            return -1
        return 0 if missing else 1

    @property
    def is_committed(self) -> bool:
        """Whether all of its nodes held their parts, including nodes that are missing now."""
        return any(part.is_committed for part in self.parts.values())

    def has_mirror_of(self, rank: int) -> bool:
        owner = next((m.node_id for m in self.name.members if rank in m.ranks), None)
        return any(owner in part.mirrors for part in self.parts.values())

    def has_mirrors_of_lost(self, slots: Slots) -> bool:
        """Whether it has the small state of all its ranks that have no slot."""
        return all(slots.get(rank) or self.has_mirror_of(rank) for rank in self.ranks)

    @property
    def ranks(self) -> list[int]:
        return [rank for member in self.name.members for rank in member.ranks]

    @property
    def source(self) -> RestoreSource:
        members = self.name.members
        return RestoreSource(
            [member.node_id for member in members],
            [list(member.ranks) for member in members],
            self.name.parity,
            self.name.protected_in,
            self.name.is_ring,
        )


@dataclass
class _Held:
    """All that the reachable nodes hold of one version."""

    version: Version
    world_size: int
    slots: Slots = field(default_factory=dict)
    groups: dict[str, _Group] = field(default_factory=dict)
    is_committed: bool = False

    def add_part(self, node_id: str, part: ProtectionPart) -> None:
        members = ";".join(f"{member.node_id}:{member.ranks}" for member in part.members)
        name = f"{part.protected_in}/{part.parity}/{part.is_ring}/{members}"
        parts = self.groups.setdefault(name, _Group(part)).parts
        # A node that rebuilds its part holds it twice: the complete one counts.
        parts[node_id] = max(
            (parts.get(node_id, part), part),
            key=lambda one: (one.is_complete, one.is_committed, len(one.mirrors)),
        )
        self.is_committed |= part.is_committed

    @property
    def may_be_committed(self) -> bool:
        """Whether no node contradicts a commit: all present parts of a protection are complete."""
        complete: dict[int, bool] = {}
        for group in self.groups.values():
            at = group.name.protected_in
            has_all = all(part.is_complete for part in group.parts.values())
            complete[at] = complete.get(at, True) and has_all
        return any(complete.values())

    def holders(self) -> set[str]:
        return {member.node_id for group in self.groups.values() for member in group.name.members}

    def sources(self, committed: "_Held | None") -> list[RestoreSource] | str:
        """The sources of the shards; or why not all ranks can be restored, in words."""
        groups = self._covering()
        lost = [rank for rank in range(self.world_size) if not self.slots.get(rank)]
        is_protected = self.margin >= 0 and (
            committed is None or self.is_committed or self.margin >= committed.margin
        )
        if is_protected and all(any(one.has_mirror_of(rank) for one in groups) for rank in lost):
            return [group.source for group in groups]
        return self._what_is_missing(lost, groups) if lost else self._bare_sources()

    @property
    def margin(self) -> int:
        """Nodes of any group that may still be lost; negative if not all ranks are protected."""
        groups = self._covering()
        if len({rank for group in groups for rank in group.ranks}) < self.world_size:
            return -1
        return min(group.margin(self.slots) for group in groups)

    def rating(self) -> tuple[Version, int, bool, int]:
        """Highest for the version to try first; of equals the last committed protection.

        The leader has promised the losses that this protection tolerates. An older one may have
        been corrupted since without a report, because it is not checked.
        """
        groups = self._covering()
        last = max((group.name.protected_in for group in groups), default=-1)
        is_committed = all(group.is_committed for group in groups)
        return (self.version, self.margin, is_committed, last)

    def _covering(self) -> list[_Group]:
        """The protections that tolerate the most losses, until each rank is in one."""
        covered: set[int] = set()
        chosen = []
        for group in sorted(self.groups.values(), key=self._sort_key):
            if not covered.issuperset(group.ranks):
                chosen.append(group)
                covered.update(group.ranks)
        return chosen

    def _bare_sources(self) -> list[RestoreSource]:
        """The nodes that hold the slots; their protection is not relied on."""
        held: dict[str, list[int]] = {}
        for rank in range(self.world_size):
            held.setdefault(min(self.slots[rank]), []).append(rank)
        return [RestoreSource([node_id], [some], 0, -1) for node_id, some in held.items()]

    def _sort_key(self, group: _Group) -> tuple[bool, int, bool, int]:
        """Lowest for the protection that tolerates most; of equals the newest committed one.

        One that lacks a mirror of a lost rank rebuilds nothing, and comes last.
        """
        margin = group.margin(self.slots)
        lacks_mirror = not group.has_mirrors_of_lost(self.slots)
        return (lacks_mirror, -margin, not group.is_committed, -group.name.protected_in)

    def _what_is_missing(self, lost: Sequence[int], groups: Sequence[_Group]) -> str:
        names = ", ".join(str(one) for one in lost)
        ranks, are = ("rank", "is") if len(lost) == 1 else ("ranks", "are")
        group = next((one for one in groups if lost[0] in one.ranks), None)
        if group is None:
            return f"no present node holds {ranks} {names}, which {are} not protected"
        gone = group.missing(self.slots)
        if group.margin(self.slots) >= 0:
            return f"{ranks} {names} cannot be rebuilt: not all nodes have protected this version"
        members = ", ".join(member.node_id for member in group.name.members)
        limit = f"at most {group.name.parity} may be missing"
        if group.name.is_ring:
            limit = "each has a copy of the state before it, so no two neighbours may be missing"
        return (
            f"{ranks} {names} cannot be rebuilt: missing of the group {members}: "
            f"{', '.join(gone)}; {limit}"
        )


def choose(
    holdings: Mapping[str, Inventory],
    newest_plan: GenerationPlan | None,
    *,
    committed: Iterable[VersionPair] = (),
    bad_version: VersionPair | None = None,
) -> RestoreChoice:
    """The newest version that can be restored completely.

    Args:
        newest_plan: the newest generation that was chosen, or may have been.
        committed: versions that a node reports as committed.
        bad_version: this version and later ones are not restored.
    """
    bad = version(*bad_version) if bad_version is not None else None

    def counts(one: Version) -> bool:
        return is_valid(one, newest_plan) and (bad is None or one < bad)

    held = {at: one for at, one in _collect(holdings).items() if counts(at[1])}
    reported = {version(*pair) for pair in committed}
    if newest_plan is not None and newest_plan.committed is not None:
        reported.add(version(*newest_plan.committed))
    known = {one for one in reported if counts(one)}
    known |= {one.version for one in held.values() if one.is_committed}
    wanted = max(known, default=None)
    holders = {node_id for one in held.values() for node_id in one.holders()}
    if newest_plan is not None:
        holders |= {node.node_id for node in newest_plan.members}
        # Nodes outside the generation may still hold what it was restored from.
        holders |= {node_id for source in newest_plan.sources for node_id in source.node_ids}
    away = frozenset(holders - holdings.keys())
    of_wanted = [one for one in held.values() if one.version == wanted]
    newest_committed = max(of_wanted, key=lambda one: one.margin, default=None)
    problems: list[str] = []
    missed = None
    # After a change of the world size, shards of one version may exist for two worlds.
    for one in sorted(held.values(), key=_Held.rating, reverse=True):
        name, size = one.version, one.world_size
        found = one.sources(newest_committed)
        if isinstance(found, str):
            problems.append(f"{name}: {found}")
            if missed is None and away and one.may_be_committed:
                missed = name
            continue
        reason = f"{name}: every rank can be restored"
        is_older = wanted is not None and name < wanted
        lost = wanted if is_older else missed
        survives = max(0, one.margin) if all(source.parity for source in found) else 0
        if lost is None:
            return RestoreChoice(name, reason, size, tuple(found), survives, committed=wanted)
        was = "was" if is_older else "may have been"
        reason += f"; {lost} {was} committed and is lost: {'; '.join(problems[:2])}"
        newest = name if is_older else wanted
        return RestoreChoice(name, reason, size, tuple(found), survives, lost, newest, away)
    reason = "; ".join(problems[:2]) or "no node holds a snapshot"
    newest = missed if wanted is None or (missed is not None and missed > wanted) else wanted
    return RestoreChoice(None, reason, wanted=newest, committed=wanted, holders=away)


def is_valid(held: Version, newest_plan: GenerationPlan | None) -> bool:
    """Whether the newest generation descends from this version, or has made it."""
    if newest_plan is None or held.generation >= newest_plan.generation:
        return True
    last_step = dict(newest_plan.ancestry).get(held.generation, -1)
    return held.step <= last_step


def ancestry(restored: Version | None, previous: GenerationPlan | None) -> list[VersionPair]:
    """The ancestors of a generation, and of each the last step that counts."""
    if restored is None:
        return []
    before = [] if previous is None else previous.ancestry
    older = [(at, step) for at, step in before if at < restored.generation]
    return [*older[-_MAX_ANCESTORS:], (int(restored.generation), int(restored.step))]


_MAX_ANCESTORS = 15
"""Slots hold two versions, so older ancestors are never needed."""


def _collect(holdings: Mapping[str, Inventory]) -> dict[tuple[int, Version], _Held]:
    found: dict[tuple[int, Version], _Held] = {}
    for node_id, inventory in sorted(holdings.items()):
        for offer in inventory.offers:
            at = (offer.world_size, version(offer.generation, offer.step))
            held = found.setdefault(at, _Held(at[1], at[0]))
            held.slots.setdefault(offer.rank, set()).add(node_id)
        for part in inventory.protected:
            at = (part.world_size, version(part.generation, part.step))
            found.setdefault(at, _Held(at[1], at[0])).add_part(node_id, part)
    return found
