"""The witness, a voter whose whole memory is one register: its answers, and a view of it.

Survives: every node: the register is stored outside the run. Training does not need the witness.

The witness itself implements none of these rules: it only compares and swaps. An agent reads the
register, computes its own answer here, and writes it if nothing has changed since; otherwise it
reads again.

Rule 1: as for every voter, each number is promised to one proposer, and never a lower number after
        a higher one. A plan is accepted by the promise it was given (ballots.py, rules 1 and 2).
        The counter of generations therefore only increases, and each step belongs to one proposer.
Rule 2: no promise is given while the lease of another agent is valid, as a node gives none while it
        receives from its leader. The lease affects timing only: it may end unnoticed. The number
        alone decides which proposer has the promise.
Rule 3: a recreated register has another incarnation (`life`). It is then another voter, as a
        restarted agent is.
Rule 4: a confirmation of the witness counts from the time of the request, not of the answer.
Rule 5: it counts as unreachable from the first request that it does not answer.
"""

from dataclasses import dataclass

import msgspec

from ftrun.membership.events import WitnessAnswered, WitnessRegister
from ftrun.records.membership import WitnessReachable, WitnessUnreachable
from ftrun.recovery.commands import Command, JournalEntry, QueryWitness, WitnessOperation
from ftrun.wire.cluster.generation import GenerationPlan, Identity, NodeCard


@dataclass(frozen=True, slots=True)
class WitnessDecision:
    """An answer, and what must be written for it."""

    granted: bool
    register: WitnessRegister | None
    leader: NodeCard | None
    """The holder of the lease; the requesting agent renews its own. A request that is not granted
    changes nothing."""


def rule(
    asked: QueryWitness,
    me: NodeCard,
    register: WitnessRegister | None,
    leader: NodeCard | None,
    *,
    new_life: int,
) -> WitnessDecision:
    """The answer to `me`; `leader` holds the valid lease, a new register gets `new_life`."""
    identity = me.identity
    if leader is not None and leader.identity != identity:
        if asked.operation is not WitnessOperation.ACCEPT:
            return WitnessDecision(False, register, leader)
        accepted = _accept(register, asked, identity)
        return WitnessDecision(accepted is not None, accepted or register, leader)
    match asked.operation:
        case WitnessOperation.CLAIM:
            return WitnessDecision(True, register, me)
        case WitnessOperation.RENEW:
            granted = register is None or _may_go_on(register, asked.generation, identity)
            return WitnessDecision(granted, register, me if granted else leader)
        case WitnessOperation.PROMISE:
            new = _promise(register, asked, identity, new_life)
            return WitnessDecision(new is not None, new or register, me if new else leader)
        case WitnessOperation.ACCEPT:
            new = _accept(register, asked, identity)
            return WitnessDecision(new is not None, new or register, me if new else leader)
        case WitnessOperation.RECORD:
            return _reported(register, asked, me, leader, new_life)
        case WitnessOperation.CLEAR:
            is_suspended = leader is not None
            return WitnessDecision(is_suspended, None if is_suspended else register, None)
        case _:
            return WitnessDecision(False, register, leader)


def _may_go_on(register: WitnessRegister, generation: int, identity: Identity) -> bool:
    return register.promised <= generation or register.proposer == identity


def _promise(
    register: WitnessRegister | None, asked: QueryWitness, identity: Identity, new_life: int
) -> WitnessRegister | None:
    generation = asked.generation
    if register is None or (asked.begins and register.proposer != identity):
        # In a new run all nodes that had a vote in the last run are present, without a plan.
        return WitnessRegister(new_life, generation, identity)
    if generation == register.promised:
        return register if register.proposer == identity else None
    if generation < register.promised:
        return None
    return msgspec.structs.replace(register, promised=generation, proposer=identity)


def _accept(
    register: WitnessRegister | None, asked: QueryWitness, identity: Identity
) -> WitnessRegister | None:
    """None unless this number is promised to this proposer, and no later number to any."""
    bound = (asked.generation, identity)
    if register is None or (register.promised, register.proposer) != bound or asked.plan is None:
        return None
    return msgspec.structs.replace(register, plan=asked.plan)


def _reported(
    register: WitnessRegister | None,
    asked: QueryWitness,
    me: NodeCard,
    leader: NodeCard | None,
    new_life: int,
) -> WitnessDecision:
    """Stores a plan reported as chosen, unless a later generation was promised."""
    plan, identity = asked.plan, me.identity
    if register is None:
        new = WitnessRegister(new_life, asked.generation, identity, plan)
        return WitnessDecision(True, new, me)
    if not _may_go_on(register, asked.generation, identity):
        return WitnessDecision(False, register, leader)
    if register.promised > asked.generation:
        return WitnessDecision(True, register, me)
    known = register.plan.configuration_id if register.plan is not None else (-1, 0)
    if plan is None or plan.configuration_id <= known:
        return WitnessDecision(True, register, me)
    new = WitnessRegister(register.life, asked.generation, identity, plan)
    return WitnessDecision(True, new, me)


_LONG_AGO_S = -1e9


class WitnessView:
    """One agent's view of the witness; never reachable in a run without a witness."""

    def __init__(self, *, is_used: bool = False) -> None:
        self.is_used = is_used
        self.leader: NodeCard | None = None
        """The agent whose lease is valid, by the newest answer."""
        self.register: WitnessRegister | None = None
        """The register, by the newest answer."""
        self.reason = ""
        """Why it is unreachable; empty if it is reachable or no answer is known yet."""
        self.since_s = 0.0
        """Time since which it has been reachable, or unreachable."""
        self.is_reached = False
        self._asked_s = self._held_s = _LONG_AGO_S

    @property
    def life(self) -> int:
        """Incarnation of its register; 0: unknown."""
        return self.register.life if self.register is not None else 0

    def ask(
        self,
        operation: WitnessOperation,
        *,
        generation: int = -1,
        plan: GenerationPlan | None = None,
        begins: bool = False,
        now_s: float,
    ) -> list[Command]:
        return [QueryWitness(operation, now_s, generation, plan, begins)] if self.is_used else []

    def record_leader(self, plan: GenerationPlan, *, now_s: float) -> list[Command]:
        """Reports the chosen plan of this leader, or renews its lease."""
        known = self.register
        reported = known.plan if known is not None else None
        if reported is not None and reported.configuration_id >= plan.configuration_id:
            return self.ask(WitnessOperation.RENEW, generation=plan.generation, now_s=now_s)
        return self.ask(WitnessOperation.RECORD, generation=plan.generation, plan=plan, now_s=now_s)

    def answered(self, event: WitnessAnswered, *, now_s: float) -> list[Command]:
        """Records an answer; returns a line when reachability changes."""
        if event.asked.asked_s < self._asked_s:
            return []  # a later request was answered before
        self._asked_s = event.asked.asked_s
        if not event.is_reached:
            is_news = self.is_reached or not self.reason
            self.is_reached, self.reason = False, event.reason
            if not is_news:
                return []
            self.since_s = now_s
            text = (
                f"{event.reason}; training continues, but no tie can be broken until etcd answers"
            )
            return [JournalEntry(WitnessUnreachable(text), announce=True)]
        self.register, self.leader = event.register, event.leader
        if event.granted and event.asked.operation in (
            WitnessOperation.RENEW,
            WitnessOperation.PROMISE,
            WitnessOperation.RECORD,
        ):
            self._held_s = max(self._held_s, event.asked.asked_s)
        if self.is_reached:
            return []
        was_away, away_s = self.reason, now_s - self.since_s
        self.is_reached, self.reason, self.since_s = True, "", now_s
        if not was_away:
            return []
        text = f"the witness is reachable again after {away_s:.1f} s"
        return [JournalEntry(WitnessReachable(text), announce=True)]

    def holds(self, life: int, limit_s: float, *, now_s: float) -> bool:
        """Whether it promises no other proposer anything for at least `limit_s` after a request."""
        return life == self.life and now_s - self._held_s < limit_s

    def has_been_there(self, for_s: float, *, now_s: float) -> bool:
        return self.is_reached and now_s - self.since_s >= for_s

    def has_been_away(self, for_s: float, *, now_s: float) -> bool:
        return bool(self.reason) and now_s - self.since_s >= for_s
