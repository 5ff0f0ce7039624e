"""Describes the versions that the memory of this node, or of all nodes, holds.

`held_versions` runs in the main thread, `run_versions` in the thread of the control loop.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from ftrun import clock
from ftrun.agent.snapshots.retained_memory import RetainedMemory
from ftrun.errors import LayoutUnknown
from ftrun.wire.cluster.generation import GenerationPlan, VersionPair
from ftrun.wire.cluster.membership import Heartbeat, HeldVersion
from ftrun.wire.messages.status import VersionState, VersionStatus
from ftrun.wire.shared_memory.arena import SlotHeader, SlotState, read_slot_headers

_NS = 1e9


def held_versions(memory: RetainedMemory, generation: int) -> tuple[HeldVersion, ...]:
    """Versions in the arenas of this node, the newest first; `generation` is the running one."""
    found: dict[VersionPair, dict[int, SlotHeader]] = {}
    for rank, fd in memory.held:
        with suppress(LayoutUnknown):
            for header in read_slot_headers(fd):
                if header.state is not SlotState.EMPTY:
                    found.setdefault((header.generation, header.step), {})[rank] = header
    num_ranks = len(memory.arenas)
    return tuple(
        _held(at, [*slots.values()], num_ranks, is_of_now=at[0] == generation)
        for at, slots in sorted(found.items(), reverse=True)
    )


def _held(
    at: VersionPair, slots: Sequence[SlotHeader], num_ranks: int, *, is_of_now: bool
) -> HeldVersion:
    sealed = [one for one in slots if one.state is SlotState.SEALED]
    state = VersionState.VOID
    if len(sealed) == num_ranks:
        state = VersionState.SEALED
    elif is_of_now and all(one.state is not SlotState.VOID for one in slots):
        state = VersionState.CAPTURING
    last_ns = max((one.sealed_ns for one in sealed), default=0)
    age_s = max(0.0, clock.now_s() - last_ns / _NS) if last_ns else None
    return HeldVersion(*at, state.value, age_s, sum(one.image_bytes for one in slots))


def run_versions(
    by_node: Mapping[str, Sequence[HeldVersion]],
    *,
    committed: VersionPair | None,
    protected: Collection[VersionPair] = (),
    persisted: Collection[VersionPair] = (),
) -> tuple[VersionStatus, ...]:
    """The versions of the run, the newest first.

    Args:
        by_node: of each node, in any order; a node that holds none of a version is not named.
        committed: the version that a restart would restore.
    """
    nodes: dict[VersionPair, dict[str, HeldVersion]] = {}
    for node_id, versions in by_node.items():
        for one in versions:
            nodes.setdefault((one.generation, one.step), {})[node_id] = one
    return tuple(
        VersionStatus(
            generation=at[0],
            step=at[1],
            states=_states(at, [*held.values()], committed, protected, persisted),
            age_s=min((one.age_s for one in held.values() if one.age_s is not None), default=None),
            num_bytes=sum(one.num_bytes for one in held.values()),
            nodes=_different(held),
        )
        for at, held in sorted(nodes.items(), reverse=True)
    )


def _states(
    at: VersionPair,
    held: Sequence[HeldVersion],
    committed: VersionPair | None,
    protected: Collection[VersionPair],
    persisted: Collection[VersionPair],
) -> tuple[VersionState, ...]:
    states = {one.state for one in held}
    first = VersionState.CAPTURING
    if VersionState.SEALED not in states and VersionState.VOID in states:
        first = VersionState.VOID
    elif at == committed:
        first = VersionState.COMMITTED
    elif committed is not None and at < committed:
        first = VersionState.OBSOLETE
    elif states == {VersionState.SEALED}:
        first = VersionState.SEALED
    more = ((VersionState.PROTECTED, protected), (VersionState.PERSISTED, persisted))
    return (first, *(state for state, versions in more if at in versions))


def _different(held: Mapping[str, HeldVersion]) -> dict[str, VersionState]:
    """The state on each node, if the nodes differ."""
    states = {node_id: VersionState(one.state) for node_id, one in sorted(held.items())}
    return states if len(set(states.values())) > 1 else {}


def earlier_protection(
    plan: GenerationPlan, heartbeats: Mapping[str, Heartbeat], *, committed: VersionPair | None
) -> int | None:
    """Generation that protected the restored version, until all members protect one here.

    None if this generation has committed another version.
    """
    if plan.restore is None or committed not in (None, plan.restore):
        return None
    beats = [heartbeats.get(node.node_id) for node in plan.members]
    are_ready = all(
        one is not None and one.generation == plan.generation and one.ready is not None
        for one in beats
    )
    return None if are_ready else max((one.generation for one in plan.sources), default=-1)


def left_of_earlier(plan: GenerationPlan, lost: Collection[str]) -> int:
    """Nodes of each group of the restored version that may be lost, after the loss of these."""
    gone = {*lost} & {card.node_id for card in plan.voters}
    since = max((len(gone & set(one.node_ids)) for one in plan.sources), default=0)
    return max(0, plan.restore_survives - since)
