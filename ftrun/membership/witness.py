"""The answers of the witness: a voter whose whole memory is one register.

Runs in:  every agent, in the thread that talks to the witness; the simulation too. Pure.
Takes in: the request, the content of the register, the holder of the lease.
Gives:    the answer, and the new content of register and lease.
Survives: every node: the register is stored outside the run.

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
"""

from dataclasses import dataclass

import msgspec

from ftrun.recovery.commands import QueryWitness, WitnessOperation
from ftrun.wire.cluster.generation import GenerationPlan, Identity, NodeCard


class WitnessRegister(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the witness remembers of a run."""

    life: int
    """Incarnation: a random number drawn when the register is created."""
    promised: int
    """The counter of generations."""
    proposer: Identity
    """The proposer that has the promise of that number."""
    plan: GenerationPlan | None = None
    """The newest plan that was accepted, or reported as chosen."""


@dataclass(frozen=True, slots=True)
class WitnessDecision:
    """An answer, and what must be written for it."""

    granted: bool
    register: WitnessRegister | None
    lead: NodeCard | None
    """The holder of the lease; the requesting agent renews its own. A request that is not granted
    changes nothing."""


def rule(
    asked: QueryWitness,
    me: NodeCard,
    register: WitnessRegister | None,
    lead: NodeCard | None,
    *,
    new_life: int,
) -> WitnessDecision:
    """The answer to one request.

    Args:
        asked: the request.
        me: the requesting agent.
        register: its current content.
        lead: the agent whose lease is valid.
        new_life: incarnation of a register that is created now.
    """
    who = me.identity
    if lead is not None and lead.identity != who:
        granted = asked.wish is WitnessOperation.ACCEPT and _is_bound(register, asked, who)
        kept = _with_plan(register, asked.plan) if granted else register
        return WitnessDecision(granted, kept, lead)
    match asked.wish:
        case WitnessOperation.CLAIM:
            return WitnessDecision(True, register, me)
        case WitnessOperation.KEEP:
            granted = register is None or _may_go_on(register, asked.generation, who)
            return WitnessDecision(granted, register, me if granted else lead)
        case WitnessOperation.PROMISE:
            promised = _promise(register, asked, who, new_life)
            return WitnessDecision(
                promised is not None, promised or register, me if promised else lead
            )
        case WitnessOperation.ACCEPT:
            granted = _is_bound(register, asked, who)
            kept = _with_plan(register, asked.plan) if granted else register
            return WitnessDecision(granted, kept, me if granted else lead)
        case WitnessOperation.TELL:
            return _told(register, asked, me, lead, new_life)
        case WitnessOperation.FORGET:
            return (
                WitnessDecision(True, None, None)
                if lead is not None
                else WitnessDecision(False, register, None)
            )
        case _:
            return WitnessDecision(False, register, lead)


def _may_go_on(register: WitnessRegister, generation: int, who: Identity) -> bool:
    return register.promised <= generation or register.proposer == who


def _promise(
    register: WitnessRegister | None, asked: QueryWitness, who: Identity, new_life: int
) -> WitnessRegister | None:
    generation = asked.generation
    if register is None or (asked.begins and register.proposer != who):
        # In a new run all nodes that had a vote in the last run are present, without a plan.
        return WitnessRegister(new_life, generation, who)
    if generation == register.promised:
        return register if register.proposer == who else None
    if generation < register.promised:
        return None
    return msgspec.structs.replace(register, promised=generation, proposer=who)


def _is_bound(register: WitnessRegister | None, asked: QueryWitness, who: Identity) -> bool:
    """Whether this number is promised to this proposer, and no later number to any."""
    is_its = register is not None and (register.promised, register.proposer) == (
        asked.generation,
        who,
    )
    return is_its and asked.plan is not None


def _with_plan(
    register: WitnessRegister | None, plan: GenerationPlan | None
) -> WitnessRegister | None:
    return msgspec.structs.replace(register, plan=plan) if register is not None else None


def _told(
    register: WitnessRegister | None,
    asked: QueryWitness,
    me: NodeCard,
    lead: NodeCard | None,
    new_life: int,
) -> WitnessDecision:
    """Stores a plan reported as chosen, unless a later generation was promised."""
    plan, who = asked.plan, me.identity
    if register is None:
        return WitnessDecision(True, WitnessRegister(new_life, asked.generation, who, plan), me)
    if not _may_go_on(register, asked.generation, who):
        return WitnessDecision(False, register, lead)
    if register.promised > asked.generation:
        return WitnessDecision(True, register, me)
    known = register.plan.edition if register.plan is not None else (-1, 0)
    if plan is None or plan.edition <= known:
        return WitnessDecision(True, register, me)
    return WitnessDecision(True, WitnessRegister(register.life, asked.generation, who, plan), me)
