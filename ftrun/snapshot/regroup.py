"""Assigns random states and data positions of a previous world to the ranks of a new world.

Derived random states are not computed here, because that needs torch. A placeholder names the
states and the number that they are derived from, and `ftrun.worker.state.determinism` computes
them.

Rule 1: the batches that the ranks of the previous world used in a pass are added up. Each new rank
        continues after this sum divided by the new number of ranks, rounded up. So no sample is
        used twice if a sampler deals one order to the ranks in turn, as DistributedSampler does; a
        few may be skipped.
Rule 2: a random stream that is equal on all old ranks stays equal, because scripts use it to make
        the same decision on all ranks. Any other stream continues in the rank of the same number. A
        rank without a counterpart gets a stream derived from its number and an old rank's stream.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from ftrun.snapshot.plain_values import encode

DERIVED = "derived_from"
"""Key of a mapping that replaces random states which are derived from those under this key."""

Plain = dict[str, Any]


@dataclass(frozen=True, slots=True)
class WorldResize:
    """One rank of the new world, and the sizes of the previous and the new world."""

    rank: int
    old_size: int
    size: int

    @property
    def old_rank(self) -> int:
        """The old rank whose state this rank takes over."""
        return self.rank % self.old_size

    @property
    def is_new(self) -> bool:
        return self.rank >= self.old_size


def streams(taken: Sequence[Plain], resize: WorldResize) -> Plain:
    """The random states of one new rank, as `determinism.put_back` takes them.

    `taken` has the states of each old rank, from `determinism.take_all`.
    """
    own = taken[resize.old_rank]
    if not resize.is_new:
        return own
    kept = [] if DERIVED in own else [name for name in own if _is_common(name, taken)]
    return {DERIVED: own, "number": resize.rank, "kept": kept}


def generators(saved: Sequence[Mapping[str, bytes]], resize: WorldResize) -> dict[str, bytes | int]:
    """State of each named generator of one rank; an int is the seed of a derived one."""
    own = saved[resize.old_rank]
    return {
        name: state
        if not resize.is_new or _is_common(name, saved)
        else derived_seed([name, state], resize.rank)
        for name, state in own.items()
    }


def _is_common(name: str, saved: Sequence[Mapping[str, Any]]) -> bool:
    first, *others = saved
    return bool(others) and all(other.get(name) == first.get(name) for other in others)


def loader(states: Sequence[Plain], resize: WorldResize) -> Plain:
    """The state of one loader in one new rank, as `DataPosition.load_state` takes it.

    `states` are those of each old rank, from `DataPosition.state`.
    """
    own = states[resize.old_rank]
    began = [state["started_with"] for state in states]
    started_with = own["started_with"]
    if started_with is not None and all(one is not None for one in began):
        started_with = {
            "rng": streams([one["rng"] for one in began], resize),
            "generators": generators([one["generators"] for one in began], resize),
        }
    return {
        **own,
        "handed_out": batches_used(states, resize),
        "started_with": started_with,
        # The loader's own position is valid only for the old number of ranks, so batches are
        # counted.
        "own": None,
        "resized": True,
    }


def derived_seed(state: object, number: int) -> int:
    """A seed of 63 bits that a plain value and a number determine."""
    return xxhash.xxh3_64_intdigest(encode([state, number])) >> 1


def batches_used(states: Sequence[Plain], resize: WorldResize) -> int:
    """Batches of the pass that count as used in each rank of the new world."""
    used: int = sum(state["handed_out"] for state in states)
    return -(-used // resize.size)


def ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def loader_note(name: str, states: Sequence[Plain], resize: WorldResize) -> str | None:
    """Describes the new position of a loader for the log; None between two passes."""
    used = sum(state["handed_out"] for state in states)
    if not used:
        return None
    skipped = batches_used(states, resize)
    rest = skipped * resize.size - used
    text = (
        f"{name}: {ranks(resize.old_size)} have used {used} batches of this pass, so it goes on "
        f"after {skipped} in each of {ranks(resize.size)}"
    )
    if rest:
        text += f", so {rest} {'batch is' if rest == 1 else 'batches are'} left out"
    if any(state["own"] is not None for state in states):
        text += "; they are loaded and dropped, and a shuffle of its own is begun anew"
    return text
