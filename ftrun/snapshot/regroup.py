"""What each rank of a new world takes over of random states and positions in the data.

Runs in:  worker, inside `attach`, where a version is restored into another number of ranks; the
          process that converts checkpoints. Pure.
Takes in: what each rank of the old world has saved.
Gives:    one rank's part of it in the new world, and a line for the log.

Random states that are derived are not made here, as that takes torch: what stands for them says
from which they follow and by which number, and `ftrun.worker.state.determinism` makes them.

Rule 1: the samples that the old world has seen count, in all: the new one goes on after the first
        whole batch of every rank that leaves out none of them. So no sample is seen twice where a
        sampler deals one order out to the ranks in turn, as DistributedSampler does.
Rule 2: a stream of random numbers that several old ranks all have in common stays in common:
        scripts rely on that to decide alike. Any other goes on in the rank of the same number; a
        rank that had no counterpart gets one that follows from its number and an old rank's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from ftrun.snapshot.plain_values import encode

DERIVED = "derived_from"
"""A mapping with this key stands for random states that follow from those under it."""

Plain = dict[str, Any]


@dataclass(frozen=True, slots=True)
class WorldResize:
    """One rank of the new world, and how many ranks there were and are."""

    rank: int
    old_size: int
    size: int

    @property
    def old_rank(self) -> int:
        """The old rank whose own state this rank takes over."""
        return self.rank % self.old_size

    @property
    def is_new(self) -> bool:
        return self.rank >= self.old_size


def streams(taken: Sequence[Plain], resize: WorldResize) -> Plain:
    """The random states of one rank, as `rng.put_back` takes them.

    Args:
        taken: of each old rank, as `rng.take_all` gives them.
        resize: whose are wanted.
    """
    own = taken[resize.old_rank]
    if not resize.is_new:
        return own
    kept = [] if DERIVED in own else [name for name in own if _is_common(name, taken)]
    return {DERIVED: own, "number": resize.rank, "kept": kept}


def generators(saved: Sequence[Mapping[str, bytes]], resize: WorldResize) -> dict[str, bytes | int]:
    """State of each named generator of one rank; an int is a seed for one that is derived."""
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
    """The state of one loader in one rank, as `DataPosition.load_state` takes it.

    Args:
        states: of each old rank, as `DataPosition.state` gives them.
        resize: whose is wanted.
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
        # Where it was is told for the old number of ranks, so its batches are counted instead.
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
    """So many ranks, in words."""
    return "1 rank" if count == 1 else f"{count} ranks"


def loader_note(name: str, states: Sequence[Plain], resize: WorldResize) -> str | None:
    """What happens to the position of a loader, in words; None between two passes."""
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
