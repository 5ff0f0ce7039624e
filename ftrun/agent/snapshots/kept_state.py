"""The state that one agent of this node persists for the next.

Runs in:  agent, which writes it, and the next one, which reads it.
Takes in: the plan that was accepted.
Gives:    bytes for the SMP and for the stub, which retain them and do not decode them.
"""

import msgspec

from ftrun.wire.cluster.generation import GenerationPlan


class PersistedAgentState(msgspec.Struct, frozen=True):
    """The newest state of one agent."""

    plan: GenerationPlan | None = None
    took_effect: bool = False
    """The plan is known to be chosen; else it may be."""

    def encode(self) -> bytes:
        return msgspec.json.encode(self)


def newer(one: PersistedAgentState, other: PersistedAgentState) -> PersistedAgentState:
    """The newer state of the SMP's and the stub's; one of them may have missed the last update."""
    plan_of = (one.plan, other.plan)
    ages = [(plan.edition if plan is not None else (-1, 0)) for plan in plan_of]
    is_first = (ages[0], one.took_effect) >= (ages[1], other.took_effect)
    return one if is_first else other


def decode_state(data: bytes) -> PersistedAgentState:
    """Decode the state; empty if there is none, or if another version of ftrun wrote it."""
    if not data:
        return PersistedAgentState()
    try:
        return msgspec.json.decode(data, type=PersistedAgentState)
    except msgspec.MsgspecError:
        return PersistedAgentState()
