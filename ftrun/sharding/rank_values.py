"""Makes the plain values of each rank of a new world from those of all ranks of the previous one.

Runs in:  the process that converts checkpoints; worker, inside `attach`, when a version is restored
          into another world. Pure.
Takes in: the plain values of all old ranks, both worlds.
Gives:    the plain values of a new rank, as if it had taken the snapshot itself, and lines for the
          log.

Derived random states are not computed here, because that needs torch. A placeholder names the
states and the number that they are derived from, and `ftrun.worker.state.determinism` computes
them.

Rule 1: a new rank takes its own values from its counterpart. This is the old rank at the same
        coordinates, modulo the size of each old axis.
Rule 2: data positions and random states are assigned along the batch axes. Ranks that read the same
        data continue with the same random states. Ranks with a new share of the data get states
        that are derived from an old rank's.
Rule 3: the batches that the ranks of the previous world used in a pass are added up. Each new rank
        continues after this sum divided by the new number of ranks, rounded up. So no sample is
        used twice if a sampler deals one order to the ranks in turn, as DistributedSampler does; a
        few may be skipped.
Rule 4: a random stream that is equal on all old ranks stays equal, because scripts use it to make
        the same decision on all ranks. Any other stream continues in the rank of the same number. A
        rank without a counterpart gets a stream derived from its number and an old rank's stream.
Rule 5: parameter groups and optimizer state name the parameters of the new rank, by its own names,
        in the order of the old ranks. Groups of the same number are one group, and must have equal
        settings; a later stage may have further ones.
Rule 6: extra state, own keys and flags of modules are on the ranks that have the modules.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, Protocol

import xxhash

from ftrun.errors import RulesMismatch
from ftrun.sharding.module_values import ModuleValues
from ftrun.sharding.replica_check import difference
from ftrun.sharding.rule_parser import carried
from ftrun.sharding.rules import Mesh
from ftrun.sharding.world_layout import WorldLayout
from ftrun.snapshot import plain_values as plain
from ftrun.snapshot.plain_values import TensorRef

DERIVED = "derived_from"
"""Key of a mapping that replaces random states which are derived from those under this key."""

Plain = dict[str, Any]


@dataclass(frozen=True, slots=True)
class WorldResize:
    """One rank of the new world, and the sizes of the previous and the new world."""

    rank: int
    previous_size: int
    size: int

    @property
    def previous_rank(self) -> int:
        return self.rank % self.previous_size

    @property
    def is_new(self) -> bool:
        return self.rank >= self.previous_size


def streams(taken: Sequence[Plain], resize: WorldResize) -> Plain:
    """The random states of one rank, from `determinism.take_all` for `determinism.put_back`."""
    own = taken[resize.previous_rank]
    if not resize.is_new:
        return own
    kept = [] if DERIVED in own else [name for name in own if _is_common(name, taken)]
    return {DERIVED: own, "number": resize.rank, "kept": kept}


def generators(saved: Sequence[Mapping[str, bytes]], resize: WorldResize) -> dict[str, bytes | int]:
    """State of each named generator of one rank; an int is the seed of a derived one."""
    own = saved[resize.previous_rank]
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
    """The state of one loader in one rank, from `DataPosition.state` for its `load_state`."""
    own = states[resize.previous_rank]
    began = [state["started_with"] for state in states]
    started_with = own["started_with"]
    if started_with is not None and all(one is not None for one in began):
        started_with = {
            "rng": streams([one["rng"] for one in began], resize),
            "generators": generators([one["generators"] for one in began], resize),
        }
    now = {}
    if all("generators" in state for state in states):
        now = {"generators": generators([state["generators"] for state in states], resize)}
    return {
        **own,
        **now,
        "handed_out": batches_used(states, resize),
        "started_with": started_with,
        # The loader's own position is valid only for the old number of ranks, so batches are
        # counted.
        "own": None,
        "resized": True,
    }


def derived_seed(state: object, number: int) -> int:
    """A seed of 63 bits that a plain value and a number determine."""
    return xxhash.xxh3_64_intdigest(plain.encode([state, number])) >> 1


def batches_used(states: Sequence[Plain], resize: WorldResize) -> int:
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
        f"{name}: {ranks(resize.previous_size)} have used {used} batches of this pass, so it "
        f"continues after {skipped} in each of {ranks(resize.size)}"
    )
    if rest:
        text += f", so {rest} {'batch is' if rest == 1 else 'batches are'} skipped"
    if any(state["own"] is not None for state in states):
        text += "; they are loaded and dropped, and its own shuffle starts again"
    return text


class DataShares:
    """Data positions and random states of one new rank.

    `part`, given an old rank and a name, decodes that part of its plain values.
    """

    def __init__(self, before: Mesh, now: Mesh, rank: int, part: Callable[[int, str], Any]) -> None:
        self._resize = WorldResize(now.batch_index(rank), before.num_batches, now.num_batches)
        self._previous_ranks = before.beside(before.counterpart(now, rank))
        self._part = part

    def random_states(self) -> Plain:
        return streams(self._all("rng"), self._resize)

    def generators(self) -> dict[str, bytes | int]:
        return generators(self._all("generators"), self._resize)

    def loaders(self) -> Plain:
        loaders, rank = self._loaders.items(), self._resize.previous_rank
        if self._resize.size == self._resize.previous_size:
            return {name: states[rank] for name, states in loaders}
        return {name: loader(states, self._resize) for name, states in loaders}

    def notes(self) -> list[str]:
        if self._resize.size == self._resize.previous_size:
            return []
        loaders = self._loaders.items()
        notes = (loader_note(name, states, self._resize) for name, states in loaders)
        return [note for note in notes if note is not None]

    @cached_property
    def _loaders(self) -> dict[str, list[Plain]]:
        """The states of each loader on the old ranks, by batch index."""
        saved = self._all("loaders")
        own = saved[self._resize.previous_rank]
        return {name: [states.get(name, own[name]) for states in saved] for name in own}

    def _all(self, name: str) -> list[Any]:
        return [self._part(rank, name) for rank in self._previous_ranks]


class RenameParameter(Protocol):
    """`RankNames.whole` or `RankNames.own`."""

    def __call__(self, name: str, *, of: str | None = None) -> str: ...


def groups_renamed(
    groups: Mapping[str, Sequence[Plain]], rename: RenameParameter
) -> dict[str, list[Plain]]:
    return {
        name: [{**group, "params": [rename(one) for one in group["params"]]} for group in some]
        for name, some in groups.items()
    }


def states_renamed(states: Plain, rename: RenameParameter) -> Plain:
    """Renames state of optimizers; a key that is not a string belongs to the whole optimizer."""
    found: Plain = {}
    for name, optimizer in states.items():
        state = found.setdefault(name, {"state": {}})["state"]
        for key, values in optimizer["state"].items():
            if isinstance(key, str):
                state[rename(key)] = _renamed(values, partial(rename, of=key))
            else:
                state[key] = _renamed(values, rename)
    return found


def modules_renamed(modules: Plain, rename: RenameParameter) -> Plain:
    return {
        rename(f"{path}.").removesuffix("."): _renamed(values, rename)
        for path, values in modules.items()
    }


def _renamed(values: Any, rename: RenameParameter) -> Any:
    return refs_changed(values, lambda ref: replace(ref, name=rename(ref.name)))


def refs_changed(values: Any, change: Callable[[TensorRef], TensorRef]) -> Any:
    if isinstance(values, TensorRef):
        return change(values)
    if isinstance(values, dict):
        return {key: refs_changed(value, change) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(refs_changed(value, change) for value in values)
    return values


_NAMING = ("groups", "optimizer_state", "extra_state", "frozen")
"""Parts that contain names of tensors or modules."""


class RankValues:
    """Makes the plain values of new ranks from the encoded parts of each old rank, by name."""

    def __init__(
        self, parts: Sequence[dict[str, bytes]], source: WorldLayout, target: WorldLayout
    ) -> None:
        self._parts = parts
        self._source = source.mesh
        self._placements = source.rules.placements
        self._known = source.wholes.keys()
        self._target = target
        # By the names in a pipeline of one stage; `of` converts them to the names of each rank.
        whole = [names.whole for names in source.names]
        decoded = {name: [plain.decode(one[name]) for one in parts] for name in _NAMING}
        self._groups = list(map(groups_renamed, decoded["groups"], whole))
        self._states = list(map(states_renamed, decoded["optimizer_state"], whole))
        self._extra_state = list(map(modules_renamed, decoded["extra_state"], whole))
        own_keys = [plain.decode(one["own_keys"]) if "own_keys" in one else {} for one in parts]
        self._own_keys = list(map(modules_renamed, own_keys, whole))
        every = (map(one, held) for one, held in zip(whole, decoded["frozen"], strict=True))
        self._frozen = list(dict.fromkeys(chain.from_iterable(every)))
        _check_settings(self._groups, source.rules.source)
        self._named = _named(self._groups)
        self._modules = ModuleValues(
            parts, source, target, groups=self._groups, frozen=self._frozen
        )

    def of(self, rank: int) -> bytes:
        old = self._source.counterpart(self._target.mesh, rank)
        made = dict(self._parts[old])
        shares, stages = self._shares(rank), self._stages(old)
        names = self._target.entries[rank]
        own = self._target.names[rank].own
        made["groups"] = plain.encode(groups_renamed(self._groups_of(rank), own))
        made["optimizer_state"] = plain.encode(states_renamed(self._states_of(rank), own))
        for name, saved in (("extra_state", self._extra_state), ("own_keys", self._own_keys)):
            of_modules = self._of_modules(saved, stages, rank)
            if of_modules or name in made:
                made[name] = plain.encode(modules_renamed(of_modules, own))
        made |= self._modules.of(rank, stages)
        made["frozen"] = plain.encode([own(name) for name in self._frozen if name in names])
        made["rng"] = plain.encode(shares.random_states())
        made["generators"] = plain.encode(shares.generators())
        made["layout"] = plain.encode(carried(self._target.rules))
        made["loaders"] = plain.encode(shares.loaders())
        return plain.encode(made)

    def notes(self) -> list[str]:
        return self._shares(0).notes()

    # --- inside ------------------------------------------------------------------------------

    def _shares(self, rank: int) -> DataShares:
        return DataShares(self._source, self._target.mesh, rank, self._decoded)

    def _decoded(self, rank: int, name: str) -> Any:
        return plain.decode(self._parts[rank][name])

    def _groups_of(self, rank: int) -> Plain:
        names = self._target.entries[rank]
        made = {}
        for name, named in self._named.items():
            longest = max((one.get(name, ()) for one in self._groups), key=len)
            made[name] = [
                {**group, "params": [one for one in params if one in names]}
                for group, params in zip(longest, named, strict=True)
            ]
        return made

    def _stages(self, old: int) -> list[int]:
        """An old rank, and then the old ranks that differ from it by their stage only."""
        mesh, where = self._source, self._source.coordinates(old)
        same = where.keys() - {placement.axis for placement in self._placements}
        at = map(mesh.coordinates, range(mesh.size))
        beside = [r for r, there in enumerate(at) if all(there[a] == where[a] for a in same)]
        return list(dict.fromkeys([old, *beside]))

    def _of_modules(self, saved: Sequence[Plain], stages: Sequence[int], rank: int) -> Plain:
        found: Plain = {}
        for old in stages:
            for path, values in saved[old].items():
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


def _check_settings(saved: Sequence[Plain], source: str) -> None:
    """Raises RulesMismatch if groups of the same number have other settings on another rank."""
    first: dict[tuple[str, int], tuple[int, Plain]] = {}
    for rank, one in enumerate(saved):
        for name, groups in one.items():
            for at, group in enumerate(groups):
                settings = {**group, "params": None}
                known_on, known = first.setdefault((name, at), (rank, settings))
                found = difference(known, settings, f"{name}.param_groups[{at}]")
                if found is not None:
                    problem = (
                        f"{found.path} is {found.one} on rank {known_on} and {found.other} on rank "
                        f"{rank}: groups of the same number become one group, so give all stages "
                        "the same groups, empty ones too"
                    )
                    raise RulesMismatch(source=source, problems=[problem])


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
