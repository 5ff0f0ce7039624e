"""The version a run resumes from.

Runs in:  the agent that leads. Pure.
Takes in: what the reachable SMPs offer.
Gives:    a `RestorePoint`: the newest version that every rank offers, and the reason in words.

It is chosen from what is there, not from a record that could be lost or wrong. Announcing it
voids every later version; that is the caller's part.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ftrun.ids import Rank, Version
from ftrun.snapshot.versions import newest_common


@dataclass(frozen=True, slots=True)
class Offer:
    """One sealed slot that can be restored from."""

    rank: Rank
    version: Version
    world_size: int


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """What to resume from; no version means from the beginning."""

    version: Version | None
    why: str


def restore_point(offers: Iterable[Offer], world_size: int) -> RestorePoint:
    """The newest version that every rank from 0 to `world_size` - 1 offers."""
    held: dict[Rank, set[Version]] = {Rank(rank): set() for rank in range(world_size)}
    strangers: set[Offer] = set()
    for offer in offers:
        if offer.world_size == world_size and offer.rank in held:
            held[offer.rank].add(offer.version)
        else:
            strangers.add(offer)
    version = newest_common(held, held)
    if version is not None:
        return RestorePoint(version, f"{version}: sealed by {_all_ranks(world_size)}")
    why = f"no version is sealed by {_all_ranks(world_size)}: {_what_each_has(held)}"
    return RestorePoint(None, why + _what_strangers_have(strangers, world_size))


def _all_ranks(world_size: int) -> str:
    return "the only rank" if world_size == 1 else f"all {world_size} ranks"


def _what_each_has(held: dict[Rank, set[Version]]) -> str:
    empty = [str(rank) for rank, versions in held.items() if not versions]
    if len(empty) == len(held):
        return "nothing is offered"
    if empty:
        noun, verb = ("rank", "offers") if len(empty) == 1 else ("ranks", "offer")
        return f"{noun} {', '.join(empty)} {verb} nothing"
    newest = (f"rank {rank} has {max(versions)}" for rank, versions in held.items())
    return "; ".join(newest)


def _what_strangers_have(strangers: set[Offer], world_size: int) -> str:
    found = sorted({offer.world_size for offer in strangers})
    if not found:
        return ""
    sizes = ", ".join(str(size) for size in found)
    return f"; set aside: {len(strangers)} from a world of {sizes}, this run has {world_size}"
