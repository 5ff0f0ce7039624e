"""Deliberately broken variants: one decision each, of the real code or of the model of the SMP.

A simulation that finds no violation proves nothing unless it finds these.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
from msgspec import structs

from ftrun.agent.snapshots.smp_client import NOTHING
from ftrun.ids import Version, version
from ftrun.membership import ballots
from ftrun.membership import voter as follower
from ftrun.membership.fencing import SelfFencing
from ftrun.membership.leader import draining, planning
from ftrun.membership.leader import leader as leader
from ftrun.membership.leader.failure_detector import FailureDetector
from ftrun.recovery import restore_point as restore_choice
from ftrun.recovery.commands import Command
from ftrun.recovery.restore_point import RestoreChoice
from ftrun.recovery.snapshot_coordination import MemberReports
from ftrun.smp.memory.commits import CommitCoordinator
from ftrun.smp.memory.parity_store import ParityStore
from ftrun.smp.redundancy.coordinator import RedundancyCoordinator
from ftrun.smp.redundancy.protector import Protector
from ftrun.smp.redundancy.rounds import ProtectionRound
from ftrun.snapshot.commit_tracker import CommitTracker
from ftrun.wire.cluster.generation import GenerationPlan, VersionPair
from ftrun.wire.cluster.membership import Heartbeat, LeaderHeartbeat
from ftrun.wire.cluster.transfer import RoundMessage
from ftrun.wire.messages.smp import Inventory, ProtectionPart
from ftrun.wire.shared_memory.pages import CommandField as Word
from ftrun.worker.commit_wait import CommitWait
from simulation import memory, training
from simulation.memory import Arena, FakeParityRegion
from simulation.training import Ranks

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Variant:
    """The broken rule, and the violations that it leads to."""

    name: str
    break_it: Callable[[Patch], None]
    found_as: tuple[str, ...]
    """Parts of the texts of violations that count as found."""
    plot: str = ""
    """Only worlds with this sequence are run, if random faults alone take too long."""


VARIANTS: list[Variant] = []
BreakIt = Callable[[Patch], None]


def variant(*found_as: str, plot: str = "") -> Callable[[BreakIt], BreakIt]:
    """Adds the decorated function, whose name is that of the variant, to the list."""

    def add(break_it: BreakIt) -> BreakIt:
        name = break_it.__name__.replace("_", " ").strip()
        VARIANTS.append(Variant(name, break_it, found_as, plot))
        return break_it

    return add


def _older(ranks: Ranks, arena: Arena) -> int:
    return min((0, 1), key=lambda at: slot.version if (slot := arena.slots[at]) else NOTHING)


@variant("is lost", "does not tolerate", "starts from", "no run after")
def _older_slot_overwritten_before_commit(patch: Patch) -> None:
    def is_free(ranks: Ranks) -> bool:
        restored = ranks.node.restored_in.get(ranks.plan.generation)
        return restored is None or ranks.page.get(Word.COMMITTED_IN) >= ranks.plan.generation

    patch.setattr(training, "is_free", is_free)
    patch.setattr(training, "slot_to_overwrite", _older)


@variant("is lost", "does not tolerate", "starts from", "no run after")
def _capture_before_the_restored_version_is_protected_again(patch: Patch) -> None:
    patch.setattr(CommitWait, "_awaits_recommit", False)
    patch.setattr(CommitCoordinator, "_awaits_recommit", False)
    patch.setattr(training, "slot_to_overwrite", _older)


@variant("left behind")
def _abandoned_timeline_comes_back(patch: Patch) -> None:
    patch.setattr(RedundancyCoordinator, "void_after", lambda self, newest: 0)
    patch.setattr(restore_choice, "is_valid", lambda held, newest_plan: True)


@variant("of an older generation", "makes a step", "before it received", "are both obeyed")
def _generation_not_checked(patch: Patch) -> None:
    def apply_heartbeat(
        self: follower.Voter, sender: str, body: LeaderHeartbeat, **_: Any
    ) -> list[Command]:
        found = self._learn_of_effect(sender, body)
        return found + (self._new_orders(body) if self.plan is not None else [])

    def is_chosen(self: follower.Voter, plan: GenerationPlan) -> list[Command]:
        self._set_plan(plan)
        return [follower.StartRanks(plan)] if self.is_member else []

    def learn(self: follower.Voter, sender: str, body: LeaderHeartbeat) -> list[Command]:
        accepted = self.vote.accepted
        if accepted is None or accepted.generation <= self.generation:
            return []
        return is_chosen(self, accepted)

    patch.setattr(follower.Voter, "apply_heartbeat", apply_heartbeat)
    patch.setattr(follower.Voter, "_learn_of_effect", learn)


@variant("does not know", "two agents lead")
def _no_majority_needed(patch: Patch) -> None:
    patch.setattr(ballots, "carries", lambda voters, agreed, **_: bool(agreed))


@variant("does not know", plot="forgotten")
def _restarted_agent_votes_at_once(patch: Patch) -> None:
    real = ballots.carries

    def carries(
        voters: ballots.Electorate, agreed: Collection[tuple[str, int]], **also: Any
    ) -> bool:
        nodes = {node_id for node_id, _ in agreed}
        return real(voters, {voter for voter in voters if voter[0] in nodes}, **also)

    patch.setattr(ballots, "carries", carries)


@variant("not what was sealed")
def _digest_not_checked(patch: Patch) -> None:
    patch.setattr(memory, "is_good", lambda state, digest: True)


@variant("not what was sealed")
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

    def find(self: ParityStore, wanted: Version, protected_in: int) -> FakeParityRegion | None:
        whole = [part for part in self.fds if part.is_complete]
        fits = [part for part in whole if part.record.protected_in == protected_in]
        return min(fits, key=lambda part: part.version != wanted, default=None)

    patch.setattr(restore_choice, "_collect", collect)
    patch.setattr(ParityStore, "find", find)


@variant("starts from", "left behind", "is lost", "no run after")
def _restore_point_from_one_record(patch: Patch) -> None:
    real = restore_choice.choose

    def choose(
        holdings: Mapping[str, Inventory],
        newest_plan: GenerationPlan | None,
        *,
        committed: Collection[VersionPair] = (),
        **also: Any,
    ) -> RestoreChoice:
        reported = [version(*pair) for pair in committed]
        own = next(iter(sorted(holdings)))
        reported += [version(one.generation, one.step) for one in holdings[own].offers]
        found = real(holdings, newest_plan, committed=committed, **also)
        return replace(found, version=max(reported)) if reported else found

    patch.setattr(planning, "choose", choose)


@variant("promises while its ranks live")
def _promise_before_ranks_are_dead(patch: Patch) -> None:
    real = follower.Voter.prepare

    def prepare(self: follower.Voter, *args: Any, **also: Any) -> list[Command]:
        found = real(self, *args, **also)
        if found and isinstance(found[0], follower.Quiesce):
            self._quiesced = follower.Quiesced(found[0].generation, Inventory([]), 0, 0)
            found += self._promise()
        return found

    patch.setattr(follower.Voter, "prepare", prepare)


@variant("makes a step", plot="outvoted")
def _ranks_continue_without_a_leader(patch: Patch) -> None:
    patch.setattr(SelfFencing, "reason", lambda self, now_s: "")
    patch.setattr(FailureDetector, "may_decide_without_me", lambda self, plan, now_s: False)


@variant("does not tolerate")
def _commit_when_one_node_is_ready(patch: Patch) -> None:
    def ready_with(self: MemberReports, heartbeat: Heartbeat) -> VersionPair | None:
        return heartbeat.ready

    patch.setattr(MemberReports, "ready_with", ready_with)


@variant("could have reported it", plot="unexpected")
def _endpoint_does_not_know_the_run(patch: Patch) -> None:
    patch.setattr(FailureDetector, "endpoints_without_agent", lambda self: [])

    def opened(
        self: leader.Leader, node_id: str, incarnation: int, *, now_s: float
    ) -> list[Command]:
        peer = self.known.get(node_id)
        if peer is None:
            return []
        self.known.opened(peer, now_s=now_s)
        return self._election.ask(peer, now_s=now_s)

    patch.setattr(leader.Leader, "opened", opened)


@variant("does not know", plot="forgotten")
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


@variant("is lost", "is there", "no run after")
def _newest_protection_is_relied_on(patch: Patch) -> None:
    def badness(self: Any, group: Any) -> tuple[int, int]:
        return (-group.name.protected_in, 0)

    patch.setattr(restore_choice._Held, "_sort_key", badness)
    patch.setattr(restore_choice._Held, "margin", 0)


@variant("is lost", "is there", "starts from", "no run after", plot="unfinished")
def _newest_of_equal_protections_is_relied_on(patch: Patch) -> None:
    patch.setattr(restore_choice._Group, "is_committed", False)
    patch.setattr(ParityStore, "_newest_committed", lambda self, committed: None)


# --- the SMP ----------------------------------------------------------------------------------


@variant("does not tolerate", "is lost", "starts from")
def _ready_before_all_nodes_have_stored(patch: Patch) -> None:
    def stored(self: Protector, round_: ProtectionRound, position: int) -> None:
        round_.stored.add(position)
        if not round_.is_ready:
            self._ready(round_)

    patch.setattr(Protector, "_stored", stored)


@variant("is lost", "is there", "starts from", "no run after", "does not tolerate")
def _parity_region_overwritten_before_commit(patch: Patch) -> None:
    def free_slot(self: ParityStore) -> int:
        return self._kept if self._kept is not None else 0

    patch.setattr(ParityStore, "free_slot", free_slot)


@variant("does not tolerate", "is lost", "starts from")
def _round_of_the_attempt_before_counts(patch: Patch) -> None:
    real = Protector.received

    def received(self: Protector, session: int, node_id: str, body: RoundMessage) -> None:
        at = self._rounds.find(version(body.generation, body.step))
        if at is not None and body.attempt < at.attempt:
            body = structs.replace(body, attempt=at.attempt)
        real(self, session, node_id, body)

    patch.setattr(Protector, "received", received)


@variant("is lost", "is there", "starts from", "no run after", "does not tolerate")
def _incomplete_part_is_offered_as_whole(patch: Patch) -> None:
    real = ParityStore.parts

    def parts(self: ParityStore) -> list[ProtectionPart]:
        return [structs.replace(part, is_complete=True) for part in real(self)]

    patch.setattr(ParityStore, "parts", parts)


@variant("does not tolerate", "is lost", "starts from", "no run after")
def _seal_of_one_rank_counts_for_all(patch: Patch) -> None:
    def complete(self: CommitTracker) -> Version | None:
        return max((one for one in self._pending.values() if one is not None), default=None)

    patch.setattr(CommitTracker, "complete", property(complete))


@variant("no run after")
def _no_round_restarts_when_a_link_is_back(patch: Patch) -> None:
    patch.setattr(Protector, "linked", lambda self, node_id: None)


@variant("leaves, and a part")
def _a_draining_node_ends_at_once(patch: Patch) -> None:
    def let_go(
        self: draining.NodeDraining, plan: GenerationPlan | None, now_s: float, *, is_settled: bool
    ) -> None:
        members = {node.node_id for node in plan.members} if plan is not None else set()
        self._freed = frozenset(voter for voter in self._leaving if voter[0] not in members)

    patch.setattr(draining.NodeDraining, "_let_go", let_go)
