"""The plain values of each rank of a new world, made of those of the old one.

Runs in:  the process that converts checkpoints. Pure.
Takes in: the plain values of all old ranks, both worlds.
Gives:    those of a new rank, as if it had taken the snapshot itself.

Rule 1: what is a rank's own it takes over from its counterpart: the old rank of the same
        coordinates, counted round where there were fewer.
Rule 2: positions in the data and random numbers go by the axes along which batches differ. Ranks
        that see the same data go on with the same random numbers; those that see data which
        nobody had before get numbers that follow from an old rank's.
Rule 3: parameter groups and state name the parameters that the new rank has, in the order of the
        old ranks, one after the other.
"""

from collections.abc import Sequence
from typing import Any

from ftrun.layouts.mesh import Mesh
from ftrun.layouts.rule_file import carried
from ftrun.layouts.world_layout import WorldLayout
from ftrun.snapshot import plain, regroup
from ftrun.snapshot.regroup import Resize

Plain = dict[str, Any]


class RankValues:
    """Makes the plain values of new ranks.

    Args:
        parts: of each old rank: each part's bytes, by name.
        source: the old world.
        target: the new one.
    """

    def __init__(
        self, parts: Sequence[dict[str, bytes]], source: WorldLayout, target: WorldLayout
    ) -> None:
        self._parts = parts
        self._source = source.mesh
        self._known = source.wholes.keys()
        self._target = target
        self._groups = [plain.decode(one["groups"]) for one in parts]
        self._states = [plain.decode(one["optimizer_state"]) for one in parts]
        self._frozen = list(dict.fromkeys(n for one in parts for n in plain.decode(one["frozen"])))
        self._named = _named(self._groups)

    def of(self, rank: int) -> bytes:
        """The plain values of a new rank."""
        old = self._source.counterpart(self._target.mesh, rank)
        made = dict(self._parts[old])
        resize, streams = self._resize(rank, old)
        names = self._target.entries[rank]
        made["groups"] = plain.encode(self._groups_of(old, rank))
        made["optimizer_state"] = plain.encode(self._states_of(rank))
        made["frozen"] = plain.encode([name for name in self._frozen if name in names])
        made["rng"] = plain.encode(regroup.streams(self._all(streams, "rng"), resize))
        made["generators"] = plain.encode(
            regroup.generators(self._all(streams, "generators"), resize)
        )
        made["layout"] = plain.encode(carried(self._target.rules))
        made["loaders"] = plain.encode(self._loaders(streams, resize))
        return plain.encode(made)

    def notes(self) -> list[str]:
        """What happens to positions in the data, in words."""
        if not self._moves:
            return []
        resize, streams = self._resize(0, 0)
        states = self._all(streams, "loaders")
        notes = (
            regroup.loader_note(name, [one.get(name, own) for one in states], resize)
            for name, own in states[0].items()
        )
        return [note for note in notes if note is not None]

    # --- inside ------------------------------------------------------------------------------

    @property
    def _moves(self) -> bool:
        """Whether the data are shared by another number of ranks than before."""
        return self._source.num_batches != self._target.mesh.num_batches

    def _resize(self, rank: int, old: int) -> tuple[Resize, list[int]]:
        """A new rank among those that see different data, and the old ranks beside its own."""
        mesh: Mesh = self._target.mesh
        index, size = mesh.batch_index(rank), mesh.num_batches
        where = self._source.coordinates(old)
        beside: dict[int, int] = {}
        for other in range(self._source.size):
            there = self._source.coordinates(other)
            if all(at == where[a] or a in self._source.batch_axes for a, at in there.items()):
                beside[self._source.batch_index(other)] = other
        old_size = self._source.num_batches
        return Resize(index, old_size, size), [beside[at] for at in range(old_size)]

    def _all(self, ranks: Sequence[int], name: str) -> list[Any]:
        return [plain.decode(self._parts[rank][name]) for rank in ranks]

    def _loaders(self, streams: Sequence[int], resize: Resize) -> Plain:
        states = self._all(streams, "loaders")
        own = states[resize.old_rank]
        if not self._moves:
            return dict(own)
        return {
            name: regroup.loader([one.get(name, own[name]) for one in states], resize)
            for name in own
        }

    def _groups_of(self, old: int, rank: int) -> Plain:
        names = self._target.entries[rank]
        return {
            name: [
                {**group, "params": [one for one in self._named[name][at] if one in names]}
                for at, group in enumerate(groups)
            ]
            for name, groups in self._groups[old].items()
        }

    def _states_of(self, rank: int) -> Plain:
        names = self._target.entries[rank]
        made: Plain = {}
        for saved in self._states:
            for name, optimizer in saved.items():
                state = made.setdefault(name, {"state": {}})["state"]
                for key, values in optimizer["state"].items():
                    # A key that is no parameter belongs to the optimizer as a whole.
                    if key in names or key not in self._known:
                        state.setdefault(key, values)
        return made


def _named(saved: Sequence[Plain]) -> dict[str, list[list[str]]]:
    """The parameters of each group of each optimizer, of all ranks."""
    found: dict[str, list[dict[str, None]]] = {}
    for one in saved:
        for name, groups in one.items():
            known = found.setdefault(name, [])
            for at, group in enumerate(groups):
                if at == len(known):
                    known.append({})
                known[at].update(dict.fromkeys(group["params"]))
    return {name: [list(group) for group in groups] for name, groups in found.items()}
