"""Makes the plain values of each rank of a new world from those of all ranks of the previous one.

Runs in:  the process that converts checkpoints. Pure.
Takes in: the plain values of all old ranks, both worlds.
Gives:    the plain values of a new rank, as if it had taken the snapshot itself.

Rule 1: a new rank takes its own values from its counterpart. This is the old rank at the same
        coordinates, modulo the size of each old axis.
Rule 2: data positions and random states are assigned along the batch axes. Ranks that read the same
        data continue with the same random states. Ranks with a new share of the data get states
        that are derived from an old rank's.
Rule 3: parameter groups and optimizer state name the parameters of the new rank, by its own names,
        in the order of the old ranks.
Rule 4: extra state of modules is on the ranks that have the modules.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

from ftrun.sharding.renaming import groups_renamed, modules_renamed, states_renamed
from ftrun.sharding.rule_parser import carried
from ftrun.sharding.rules import Mesh
from ftrun.sharding.world_layout import WorldLayout
from ftrun.snapshot import plain_values as plain
from ftrun.snapshot import regroup
from ftrun.snapshot.regroup import WorldResize

Plain = dict[str, Any]

_NAMING = ("groups", "optimizer_state", "extra_state", "frozen")
"""Parts that contain names of tensors or modules."""


class RankValues:
    """Makes the plain values of new ranks.

    Args:
        parts: of each old rank: the bytes of each part, by name.
        source: the previous world.
        target: the new world.
    """

    def __init__(
        self, parts: Sequence[dict[str, bytes]], source: WorldLayout, target: WorldLayout
    ) -> None:
        self._parts = parts
        self._source = source.mesh
        self._homes = source.rules.homes
        self._known = source.wholes.keys()
        self._target = target
        # By the names in a pipeline of one stage; `of` converts them to the names of each rank.
        whole = [names.whole for names in source.names]
        decoded = {name: [plain.decode(one[name]) for one in parts] for name in _NAMING}
        self._groups = list(map(groups_renamed, decoded["groups"], whole))
        self._states = list(map(states_renamed, decoded["optimizer_state"], whole))
        self._modules = list(map(modules_renamed, decoded["extra_state"], whole))
        every = (map(one, held) for one, held in zip(whole, decoded["frozen"], strict=True))
        self._frozen = list(dict.fromkeys(chain.from_iterable(every)))
        self._named = _named(self._groups)

    def of(self, rank: int) -> bytes:
        old = self._source.counterpart(self._target.mesh, rank)
        made = dict(self._parts[old])
        resize, streams = self._resize(rank, old)
        names = self._target.entries[rank]
        own = self._target.names[rank].own
        made["groups"] = plain.encode(groups_renamed(self._groups_of(old, rank), own))
        made["optimizer_state"] = plain.encode(states_renamed(self._states_of(rank), own))
        made["extra_state"] = plain.encode(modules_renamed(self._modules_of(old, rank), own))
        made["frozen"] = plain.encode([own(name) for name in self._frozen if name in names])
        made["rng"] = plain.encode(regroup.streams(self._all(streams, "rng"), resize))
        made["generators"] = plain.encode(
            regroup.generators(self._all(streams, "generators"), resize)
        )
        made["layout"] = plain.encode(carried(self._target.rules))
        made["loaders"] = plain.encode(self._loaders(streams, resize))
        return plain.encode(made)

    def notes(self) -> list[str]:
        """Describes the changes of data positions."""
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
        """Whether the number of shares of the data changes."""
        return self._source.num_batches != self._target.mesh.num_batches

    def _resize(self, rank: int, old: int) -> tuple[WorldResize, list[int]]:
        """The resize among batch indices for a new rank, and the old ranks along its batch axes."""
        mesh: Mesh = self._target.mesh
        size = self._source.num_batches
        resize = WorldResize(mesh.batch_index(rank), size, mesh.num_batches)
        return resize, self._source.beside(old)

    def _all(self, ranks: Sequence[int], name: str) -> list[Any]:
        return [plain.decode(self._parts[rank][name]) for rank in ranks]

    def _loaders(self, streams: Sequence[int], resize: WorldResize) -> Plain:
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

    def _modules_of(self, old: int, rank: int) -> Plain:
        """Extra state of the counterpart first, then of old ranks at other stages only."""
        mesh, where = self._source, self._source.coordinates(old)
        same = where.keys() - {home.axis for home in self._homes}
        beside = [
            r for r in range(mesh.size) if all(mesh.coordinates(r)[a] == where[a] for a in same)
        ]
        found: Plain = {}
        for other in (old, *beside):
            for path, values in self._modules[other].items():
                if self._target.has_module(rank, path):
                    found.setdefault(path, values)
        return found

    def _states_of(self, rank: int) -> Plain:
        names = self._target.entries[rank]
        made: Plain = {}
        for saved in self._states:
            for name, optimizer in saved.items():
                state = made.setdefault(name, {"state": {}})["state"]
                for key, values in optimizer["state"].items():
                    # A key that is not a parameter belongs to the optimizer as a whole.
                    if key in names or key not in self._known:
                        state.setdefault(key, values)
        return made


def _named(saved: Sequence[Plain]) -> dict[str, list[list[str]]]:
    """The parameters of each group of each optimizer, over all ranks."""
    found: dict[str, list[dict[str, None]]] = {}
    for one in saved:
        for name, groups in one.items():
            known = found.setdefault(name, [])
            for at, group in enumerate(groups):
                if at == len(known):
                    known.append({})
                known[at].update(dict.fromkeys(group["params"]))
    return {name: [list(group) for group in groups] for name, groups in found.items()}
