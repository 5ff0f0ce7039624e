"""What the outside witness answers: a voter whose whole memory is one register.

Runs in:  every agent, in the thread that speaks with the witness; the simulation too. Pure.
Takes in: who asks for what, what the register holds, whose lease lives.
Gives:    the answer, and what the register and the lease are to be then.
Survives: every node: the register lies outside of the run.

The witness itself knows none of these rules: it compares and swaps. Whoever asks reads, finds its
own answer here, and writes it where nothing has changed since; else it reads again.

Rule 1: as of every voter: each number is promised to one proposer, and never a lower one after a
        higher; a plan is accepted by the promise it was given (ballots.py, rules 1 and 2). So
        the counter of generations only goes up, and each step up is one proposer's.
Rule 2: nobody is promised anything while another one's lease lives, as a node promises nobody
        while it hears its lead. The lease is for the timing only: it may end unseen, and who is
        in the right is told by the number alone.
Rule 3: a register that is begun anew has another life. It is another voter then, as an agent
        that was started again is.
"""

from dataclasses import dataclass

import msgspec

from ftrun.recovery.commands import QueryWitness, WitnessOperation
from ftrun.wire.cluster.generation import GenerationPlan, Identity, NodeCard


class WitnessRegister(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is remembered of a run."""

    life: int
    """Drawn when the register is begun."""
    promised: int
    """The counter of generations."""
    proposer: Identity
    """Who took that number."""
    plan: GenerationPlan | None = None
    """The newest that was accepted, or told to be in effect."""


@dataclass(frozen=True, slots=True)
class WitnessDecision:
    """An answer, and what is to be written for it."""

    granted: bool
    register: WitnessRegister | None
    lead: NodeCard | None
    """Whose the lease is to be; where it is the one who asks, it is renewed. What is not granted
    changes nothing."""


def rule(
    asked: QueryWitness,
    me: NodeCard,
    register: WitnessRegister | None,
    lead: NodeCard | None,
    *,
    new_life: int,
) -> WitnessDecision:
    """The answer to one question.

    Args:
        asked: the question.
        me: who asks.
        register: as it is.
        lead: whose lease lives.
        new_life: for a register that is begun now.
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
    """The register with this promise; none where it may not be given."""
    generation = asked.generation
    if register is None or (asked.begins and register.proposer != who):
        # Of a run that begins anew all who had a vote in the last one are here, and know nothing.
        return WitnessRegister(new_life, generation, who)
    if generation == register.promised:
        return register if register.proposer == who else None
    if generation < register.promised:
        return None
    return msgspec.structs.replace(register, promised=generation, proposer=who)


def _is_bound(register: WitnessRegister | None, asked: QueryWitness, who: Identity) -> bool:
    """This number was promised to this proposer, and no other since."""
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
    """What is in effect is remembered, unless a later generation was promised."""
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
