"""What the next agent of this node must know.

Runs in:  agent, which writes it, and the next one, which reads it.
Takes in: the plan that was accepted.
Gives:    bytes for the SMP and for the stub, which keep them and do not look inside.
"""

import msgspec

from ftrun.wire.cluster.generation import GenerationPlan


class PersistedAgentState(msgspec.Struct, frozen=True):
    """The end of one agent's knowledge."""

    plan: GenerationPlan | None = None
    took_effect: bool = False
    """The plan is known to have; else it may have."""

    def encode(self) -> bytes:
        return msgspec.json.encode(self)


def newer(one: PersistedAgentState, other: PersistedAgentState) -> PersistedAgentState:
    """Of what the SMP and what the stub has kept: one of them may have missed the last word."""
    plan_of = (one.plan, other.plan)
    ages = [(plan.edition if plan is not None else (-1, 0)) for plan in plan_of]
    is_first = (ages[0], one.took_effect) >= (ages[1], other.took_effect)
    return one if is_first else other


def decode_state(data: bytes) -> PersistedAgentState:
    """The state again; nothing known where there is none, or where another version wrote it."""
    if not data:
        return PersistedAgentState()
    try:
        return msgspec.json.decode(data, type=PersistedAgentState)
    except msgspec.MsgspecError:
        return PersistedAgentState()
