"""Deliberately broken variants: one decision each, of the real code or of the model of the SMP.

A simulation that finds nothing proves nothing, unless it finds these.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from ftrun.ids import Version, version
from ftrun.recovery import ballots, draining, election, follower, lead, planning, restore_choice
from ftrun.recovery.attendance import Peers
from ftrun.recovery.commands import Command
from ftrun.recovery.reports import Reports
from ftrun.recovery.restore_choice import Choice
from ftrun.recovery.waiting import Waiting
from ftrun.wire.heartbeats import Beat, LeadBeat
from ftrun.wire.plan import Plan, Source, VersionPair
from ftrun.wire.smp_messages import Inventory
from simulation.memory import Memory, Part, Slot
from simulation.snapshots import Smp

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Variant:
    """What is broken, and what it leads to."""

    name: str
    break_it: Callable[[Patch], None]
    found_as: tuple[str, ...]
    """Words of the violations that may be found."""
    plot: str = ""
    """Only such worlds are looked at, where chance alone takes too long."""


def _older_slot_overwritten_before_commit(patch: Patch) -> None:
    def may_capture(self: Smp) -> bool:
        return self.has_restored and (self.restored is None or self.committed is not None)

    def slot_to_overwrite(self: Smp, mine: list[Slot]) -> Slot:
        return min(mine, key=lambda slot: slot.version)

    patch.setattr(Smp, "may_capture", may_capture)
    patch.setattr(Smp, "slot_to_overwrite", slot_to_overwrite)


def _capture_before_the_restored_version_is_protected(patch: Patch) -> None:
    def may_capture(self: Smp) -> bool:
        return self.capturing is None and self.has_restored

    def slot_to_overwrite(self: Smp, mine: list[Slot]) -> Slot:
        return min(mine, key=lambda slot: slot.version)

    patch.setattr(Smp, "may_capture", may_capture)
    patch.setattr(Smp, "slot_to_overwrite", slot_to_overwrite)


def _abandoned_timeline_comes_back(patch: Patch) -> None:
    def void_after(self: Memory, newest: Version | None) -> list[Version]:
        return []

    patch.setattr(Memory, "void_after", void_after)
    patch.setattr(restore_choice, "is_valid", lambda held, newest_plan: True)


def _generation_not_checked(patch: Patch) -> None:
    def obey(self: follower.Follower, sender: str, body: LeadBeat, **_: Any) -> list[Command]:
        found = self._learn_of_effect(sender, body)
        return found + (self._new_orders(body) if self.plan is not None else [])

    def took_effect(self: follower.Follower, plan: Plan) -> list[Command]:
        self._effective(plan)
        return [follower.RunGeneration(plan)] if self.is_member else []

    def learn(self: follower.Follower, sender: str, body: LeadBeat) -> list[Command]:
        accepted = self.vote.accepted
        if accepted is None or accepted.generation <= self.generation:
            return []
        return took_effect(self, accepted)

    patch.setattr(follower.Follower, "obey", obey)
    patch.setattr(follower.Follower, "_learn_of_effect", learn)


def _no_majority_needed(patch: Patch) -> None:
    patch.setattr(ballots, "carries", lambda voters, agreed, **_: bool(agreed))


def _restarted_agent_votes_at_once(patch: Patch) -> None:
    real = ballots.carries

    def carries(
        voters: ballots.Electorate, agreed: Collection[tuple[str, int]], **also: Any
    ) -> bool:
        nodes = {node_id for node_id, _ in agreed}
        return real(voters, {who for who in voters if who[0] in nodes}, **also)

    patch.setattr(ballots, "carries", carries)


def _digest_not_checked(patch: Patch) -> None:
    patch.setattr(Smp, "is_good", staticmethod(lambda state, digest: True))


def _parity_of_another_step_accepted(patch: Patch) -> None:
    real = restore_choice._collect

    def collect(holdings: Mapping[str, Inventory]) -> Any:
        found = real(holdings)
        for held in found.values():
            for node_id, inventory in sorted(holdings.items()):
                for part in inventory.protected:
                    if part.world_size == held.world_size:
                        held.add_part(node_id, part)
        return found

    def good_part(self: Smp, wanted: Version, source: Source) -> Part | None:
        fits = [part for part in self.memory.parts if part.protected_in == source.generation]
        return min(fits, key=lambda part: part.version != wanted, default=None)

    patch.setattr(restore_choice, "_collect", collect)
    patch.setattr(Smp, "good_part", good_part)


def _restore_point_from_one_record(patch: Patch) -> None:
    real = restore_choice.choose

    def choose(
        holdings: Mapping[str, Inventory],
        newest_plan: Plan | None,
        *,
        committed: Collection[VersionPair] = (),
        **also: Any,
    ) -> Choice:
        told = [version(*pair) for pair in committed]
        own = next(iter(sorted(holdings)))
        told += [version(one.generation, one.step) for one in holdings[own].offers]
        found = real(holdings, newest_plan, committed=committed, **also)
        return replace(found, version=max(told)) if told else found

    patch.setattr(planning, "choose", choose)


def _promise_before_ranks_are_dead(patch: Patch) -> None:
    real = follower.Follower.prepare

    def prepare(self: follower.Follower, *args: Any, **also: Any) -> list[Command]:
        found = real(self, *args, **also)
        if found and isinstance(found[0], follower.Quiesce):
            self._quiesced = follower.Quiesced(found[0].generation, Inventory([]), 0, 0)
            found += self._promise()
        return found

    patch.setattr(follower.Follower, "prepare", prepare)


def _ranks_go_on_without_a_lead(patch: Patch) -> None:
    patch.setattr(Waiting, "why", lambda self, now_s: "")
    patch.setattr(Peers, "may_decide_without_me", lambda self, plan, now_s: False)


def _commit_when_one_node_is_ready(patch: Patch) -> None:
    def ready_with(self: Reports, beat: Beat) -> VersionPair | None:
        return beat.ready

    patch.setattr(Reports, "ready_with", ready_with)


def _endpoint_is_not_told_of_the_run(patch: Patch) -> None:
    patch.setattr(Peers, "endpoints_without_agent", lambda self: [])

    def opened(self: lead.Lead, node_id: str, incarnation: int, *, now_s: float) -> list[Command]:
        peer = self.known.get(node_id)
        if peer is None:
            return []
        self.known.opened(peer, now_s=now_s)
        return self._election.ask(peer, now_s=now_s)

    patch.setattr(lead.Lead, "opened", opened)


def _lost_memory_counts_as_memory(patch: Patch) -> None:
    real = ballots.carries

    def carries(
        voters: ballots.Electorate,
        agreed: Collection[tuple[str, int]],
        *,
        dead: Collection[tuple[str, int]] = (),
        gone: Collection[tuple[str, int]] = (),
    ) -> bool:
        return real(voters, agreed, dead={*dead, *gone})

    patch.setattr(ballots, "carries", carries)


def _newest_protection_is_relied_on(patch: Patch) -> None:
    def badness(self: Any, group: Any) -> tuple[int, int]:
        return (-group.name.protected_in, 0)

    patch.setattr(restore_choice._Held, "_badness", badness)
    patch.setattr(restore_choice._Held, "margin", 0)


def _newest_of_equal_protections_is_relied_on(patch: Patch) -> None:
    patch.setattr(restore_choice._Group, "is_committed", False)
    patch.setattr(Smp, "_relied_on", _named_or_committed)


def _named_or_committed(self: Smp) -> list[Part]:
    """Only one protection is kept while the next one is made."""
    named = self._named()
    committed = [part for part in self.memory.parts if part.is_committed]
    newest = max(committed, key=lambda part: part.key, default=None)
    return [part for part in (named or newest,) if part is not None]


def _whoever_leaves_is_let_go_at_once(patch: Patch) -> None:
    def let_go(
        self: draining.Draining, plan: Plan | None, now_s: float, *, is_settled: bool
    ) -> None:
        members = {node.node_id for node in plan.members} if plan is not None else set()
        self._freed = frozenset(who for who in self._leaving if who[0] not in members)

    patch.setattr(draining.Draining, "_let_go", let_go)


def _stale_lead_stays(patch: Patch) -> None:
    patch.setattr(election.Election, "again_s", None)


VARIANTS = [
    Variant(
        "older slot overwritten before commit",
        _older_slot_overwritten_before_commit,
        ("is lost", "does not bear", "starts from", "no run after"),
    ),
    Variant(
        "capture before the restored version is protected again",
        _capture_before_the_restored_version_is_protected,
        ("is lost", "does not bear", "starts from", "no run after"),
    ),
    Variant("abandoned timeline comes back", _abandoned_timeline_comes_back, ("left behind",)),
    Variant(
        "generation not checked",
        _generation_not_checked,
        ("of an older generation", "makes a step", "before it was told", "are both obeyed"),
    ),
    Variant("no majority needed", _no_majority_needed, ("does not know", "two agents lead")),
    Variant(
        "restarted agent votes at once",
        _restarted_agent_votes_at_once,
        ("does not know",),
        plot="forgotten",
    ),
    Variant("digest not checked", _digest_not_checked, ("not what was sealed",)),
    Variant(
        "parity of another step accepted",
        _parity_of_another_step_accepted,
        ("not what was sealed",),
    ),
    Variant(
        "restore point from one record",
        _restore_point_from_one_record,
        ("starts from", "left behind", "is lost", "no run after"),
    ),
    Variant(
        "promise before ranks are dead",
        _promise_before_ranks_are_dead,
        ("promises while its ranks live",),
    ),
    Variant(
        "ranks go on without a lead",
        _ranks_go_on_without_a_lead,
        ("makes a step",),
        plot="outvoted",
    ),
    Variant("commit when one node is ready", _commit_when_one_node_is_ready, ("does not bear",)),
    Variant(
        "endpoint is not told of the run",
        _endpoint_is_not_told_of_the_run,
        ("could have told",),
        plot="unexpected",
    ),
    Variant(
        "lost memory counts as memory",
        _lost_memory_counts_as_memory,
        ("does not know",),
        plot="forgotten",
    ),
    Variant(
        "newest protection is relied on",
        _newest_protection_is_relied_on,
        ("is lost", "is there", "no run after"),
    ),
    Variant(
        "newest of equal protections is relied on",
        _newest_of_equal_protections_is_relied_on,
        ("is lost", "is there", "starts from", "no run after"),
        plot="unfinished",
    ),
    Variant(
        "whoever leaves is let go at once",
        _whoever_leaves_is_let_go_at_once,
        ("leaves, and a part",),
    ),
]
