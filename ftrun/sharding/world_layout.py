"""Describes what each rank of a world stores, in terms of whole tensors.

From rules and from the names, dtypes and shapes of the stored entries it makes a `WorldLayout`: the
whole tensors, and the regions of them in each entry. From other rules it makes the layout of the
same tensors in another world. All mismatches are collected and raised together.

An entry has the same name in both worlds and on all ranks. If stages number their layers from 0, it
is the name in a pipeline of one stage (`pipeline_stages`). A tensor in a flat buffer is named
`row/tensor`, a rank's own tensor `name@rank`, so every whole tensor has one name.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ftrun.errors import RulesMismatch
from ftrun.sharding.partition import (
    SplitImpossible,
    StoredRegion,
    StoredView,
    flat_part,
    padded_shape,
    padded_view,
    padding_of,
    patches_of,
    view_of,
)
from ftrun.sharding.pipeline_stages import RankNames, absent, names_of_ranks
from ftrun.sharding.rule_matching import (
    MatchedRule,
    OwningParameter,
    StateOwnership,
    lives_at,
    match,
)
from ftrun.sharding.rules import DimensionSplit, FlatBuffer, Mesh, ShardingRules, SharingKind
from ftrun.sharding.source_index import OURS, RegionIndex
from ftrun.snapshot import plain_values as plain
from ftrun.snapshot.boxes import Shape
from ftrun.snapshot.layout import LayoutEntry
from ftrun.snapshot.plain_values import refs_in
from ftrun.snapshot.shard_header import ShardHeader

FLOATS = ("F64", "F32", "F16", "BF16")
"""Safetensors names of the dtypes that have a mean."""


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """One entry of a rank's shard; `of` is the parameter that it is state of."""

    name: str
    dtype: str
    shape: Shape
    of: str | None = None


@dataclass(frozen=True, slots=True)
class PlacedEntry:
    """A stored entry, and the regions in it; `padding` is outside of the whole tensor."""

    name: str
    dtype: str
    shape: Shape
    patches: tuple[StoredRegion, ...]
    padding: tuple[StoredRegion, ...] = ()

    @property
    def num_items(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class GlobalTensor:
    """The common properties of all entries of one name.

    Args:
        shape: of the whole tensor; of a flat buffer, without padding.
        owner: the parameter that it is state of.
        own_shapes: shape by rank, if each rank has its own tensor.
    """

    name: str
    dtype: str
    shape: Shape
    owner: OwningParameter | None
    own_shapes: Mapping[int, Shape] = field(default_factory=dict)


@dataclass(frozen=True)
class WorldLayout:
    """All entries of a world, as its rules describe it.

    Args:
        wholes: the whole tensors by name, in the order of the ranks' shards.
        names: each rank's names of its entries.
        entries: of each rank, by name.
    """

    rules: ShardingRules
    wholes: dict[str, GlobalTensor]
    sharing: dict[str, MatchedRule]
    names: Sequence[RankNames]
    entries: tuple[dict[str, PlacedEntry], ...] = field(default=())

    @property
    def mesh(self) -> Mesh:
        return self.rules.mesh

    def own_name(self, rank: int, name: str) -> str:
        owner = self.wholes[name].owner
        return self.names[rank].own(name, of=None if owner is None else owner.parameter)

    def has_module(self, rank: int, path: str) -> bool:
        return lives_at(self.rules, self.mesh.coordinates(rank), f"{path}.")

    def padded_shape(self, name: str) -> Shape:
        return padded_shape(self.wholes[name].shape, self.sharing[name].rule.cuts, self.mesh)

    def index(self, entry: Callable[[int, str], LayoutEntry]) -> RegionIndex:
        """All stored regions as sources of copies; `entry` finds an entry by a rank's own name."""
        index = RegionIndex()
        for rank, entries in enumerate(self.entries):
            for one in entries.values():
                index.add(
                    rank, entry(rank, self.own_name(rank, one.name)), (*one.patches, *one.padding)
                )
        return index


def read_world(rules: ShardingRules, ranks: Sequence[Sequence[StoredEntry]]) -> WorldLayout:
    """The layout of the stored entries of each rank, from rank 0, as rules describe it.

    Raises RulesMismatch with all problems if the rules describe another world.
    """
    if len(ranks) != rules.mesh.size:
        raise RulesMismatch(
            source=rules.source,
            problems=[
                f"the mesh has {rules.mesh.size} ranks ({rules.mesh}), but {len(ranks)} ranks took "
                "the checkpoint"
            ],
        )
    notes = _Problems(rules)
    rank_names = notes.names()
    by_rank = [
        {one.name: one for one in notes.renamed(stored, own)}
        for stored, own in zip(ranks, rank_names, strict=True)
    ]
    notes.check()
    names = list(dict.fromkeys(name for stored in by_rank for name in stored))
    owner = {name: _owner(name, by_rank) for name in names}
    sharing = match(rules, owner.items())
    for problem in absent(rules, names):
        notes.add(problem)
    wholes: dict[str, GlobalTensor] = {}
    for name in names:
        held = {rank: stored[name] for rank, stored in enumerate(by_rank) if name in stored}
        try:
            wholes[name] = _whole(rules, sharing[name], name, held, owner[name])
        except SplitImpossible as error:
            notes.add(f"{name}: {error}")
    notes.check()
    world = _laid_out(rules, wholes, sharing, rank_names)
    for rank, (stored, placed) in enumerate(zip(by_rank, world.entries, strict=True)):
        for name, one in stored.items():
            if one.shape != placed[name].shape:
                notes.add(
                    f"{name} has {list(one.shape)} on rank {rank}, and should have "
                    f"{list(placed[name].shape)} of {list(wholes[name].shape)} "
                    f"by {sharing[name].rule}"
                )
    notes.check()
    return world


def lay_out(rules: ShardingRules, source: WorldLayout) -> WorldLayout:
    """The layout of the same tensors in the world of other rules.

    Padding of the same size is kept; it is in `patches`. Raises RulesMismatch with all problems if
    the tensors cannot be shared by these rules.
    """
    owner = [(whole.name, whole.owner) for whole in source.wholes.values()]
    sharing = match(rules, owner)
    notes = _Problems(rules)
    for name, one in sharing.items():
        before = source.sharing[name].rule
        rows = [rule.flat.tensors if rule.flat else None for rule in (before, one.rule)]
        if rows[0] != rows[1]:
            notes.add(f"{name} is a flat buffer of other tensors by {before} than by {one.rule}")
        if (before.kind is SharingKind.OWN) != (one.rule.kind is SharingKind.OWN):
            notes.add(f"{name} is each rank's own by only one of {before} and {one.rule}")
    rank_names = notes.names()
    notes.check()
    return _laid_out(rules, source.wholes, sharing, rank_names, source)


class _Problems:
    """Collects mismatches."""

    def __init__(self, rules: ShardingRules) -> None:
        self._rules = rules
        self._found: list[str] = []

    def add(self, problem: str) -> None:
        if problem not in self._found:  # many ranks have the same one
            self._found.append(problem)

    def names(self) -> Sequence[RankNames]:
        try:
            return names_of_ranks(self._rules)
        except SplitImpossible as error:
            self.add(str(error))
            return [RankNames()] * self._rules.mesh.size

    def renamed(self, stored: Sequence[StoredEntry], own: RankNames) -> Iterator[StoredEntry]:
        """The entries of a rank, by their names in a pipeline of one stage."""
        there = {one.name for one in stored}
        for one in stored:
            of = one.of if one.of in there else None
            try:
                parameter = one.of if of is None else own.whole(of)
                yield replace(one, name=own.whole(one.name, of=of), of=parameter)
            except SplitImpossible as error:
                if of is None:  # a parameter reports for its state
                    self.add(f"{one.name}: {error}")

    def check(self) -> None:
        if self._found:
            raise RulesMismatch(source=self._rules.source, problems=self._found)


def stored_entries(
    headers: Sequence[ShardHeader], parts: Sequence[Mapping[str, bytes]], *, source: str
) -> list[list[StoredEntry]]:
    """The entries of each rank, from headers and plain values in order of rank.

    Raises RulesMismatch for parts of tensors, which rules do not describe, or if no session saved
    them.
    """
    check_is_of_session(parts, source=source)
    found, sharded = [], []
    for head, plain_parts in zip(headers, parts, strict=True):
        owners = parameters_by_state(plain_parts)
        entries = [one for one in head.layout.entries if not one.name.startswith(OURS)]
        sharded += [one.name for one in entries if one.part is not None]
        found.append([StoredEntry(e.name, e.dtype, e.shape, owners.get(e.name)) for e in entries])
    if sharded:
        raise RulesMismatch(
            source=source,
            problems=[
                f"{name} is a DTensor, or ranks share its replicas (snapshot.share_replicas): a "
                "run of any layout resumes from it directly, without rules and without conversion"
                for name in dict.fromkeys(sharded)
            ],
        )
    return found


# --- the previous world -------------------------------------------------------------------------


def check_is_of_session(parts: Sequence[Mapping[str, bytes]], *, source: str) -> None:
    """Raises RulesMismatch if no session saved these plain values."""
    if not all("optimizer_state" in one for one in parts):
        problem = (
            "it was saved by ftrun.dcp, not by a session of ftrun.attach: dcp.load loads it into "
            "any layout, without rules and without conversion"
        )
        raise RulesMismatch(source=source, problems=[problem])


def parameters_by_state(parts: Mapping[str, bytes]) -> dict[str, str]:
    found: dict[str, str] = {}
    for saved in plain.decode(parts["optimizer_state"]).values():
        for parameter, values in saved["state"].items():
            if isinstance(parameter, str):
                found.update(dict.fromkeys((ref.name for ref in refs_in(values)), parameter))
    return found


def _owner(name: str, by_rank: Sequence[Mapping[str, StoredEntry]]) -> OwningParameter | None:
    """The parameter of a state tensor and how it follows it, over all ranks that have it."""
    held = [(stored[name], stored) for stored in by_rank if name in stored]
    parameter = held[0][0].of
    if parameter is None or any(parameter not in stored for _, stored in held):
        return None
    if all(one.shape == stored[parameter].shape for one, stored in held):
        return OwningParameter(parameter, StateOwnership.LIKE)
    is_number = all(math.prod(one.shape) == 1 for one, _ in held)
    return OwningParameter(parameter, StateOwnership.NUMBER if is_number else None)


def _whole(
    rules: ShardingRules,
    sharing: MatchedRule,
    name: str,
    held: Mapping[int, StoredEntry],
    owner: OwningParameter | None,
) -> GlobalTensor:
    """Raises SplitImpossible with the reason if no tensor has these parts."""
    dtypes = {one.dtype for one in held.values()}
    if len(dtypes) > 1:
        raise SplitImpossible(f"ranks have it as {' and as '.join(sorted(dtypes))}")
    expected = frozenset(_ranks_of(rules.mesh, sharing))
    if expected != held.keys():
        missing, extra = sorted(expected - held.keys()), sorted(held.keys() - expected)
        reported = f"not on ranks {missing[:10]}" if missing else f"also on ranks {extra[:10]}"
        raise SplitImpossible(
            f"it is {reported}; rules under unique define where a tensor is, and whether each "
            "stage numbers its layers from 0 (the key numbered)"
        )
    first = next(iter(held.values()))
    rule = sharing.rule
    if rule.kind is SharingKind.AVERAGE and first.dtype not in FLOATS:
        raise SplitImpossible(f"it is {first.dtype}, but only {', '.join(FLOATS)} have a mean")
    if rule.flat is not None:
        shape: Shape = (sum(math.prod(one) for _, one in rule.flat.tensors),)
    elif rule.kind in (SharingKind.SHARD, SharingKind.FRAGMENT):
        shapes = {rank: one.shape for rank, one in held.items()}
        shape = _whole_shape(rules.mesh, rule.cuts, shapes)
    else:
        shape = first.shape
    own = {rank: one.shape for rank, one in held.items()} if rule.kind is SharingKind.OWN else {}
    return GlobalTensor(name, first.dtype, shape, owner, own)


def _whole_shape(mesh: Mesh, cuts: Sequence[DimensionSplit], held: Mapping[int, Shape]) -> Shape:
    """The shape of the whole tensor; a split dimension is the sum over the ranks."""
    ranks = iter(held.items())
    first, shape = next(ranks)
    if any(len(other) != len(shape) for other in held.values()):
        raise SplitImpossible("ranks have it with different numbers of dimensions")
    whole = list(shape)
    for cut in cuts:
        _check_dim(cut, shape)
    for dim in range(len(shape)):
        of_dim = [cut for cut in cuts if cut.dim % len(shape) == dim]
        if not of_dim:
            continue
        if of_dim[0].size is not None:
            whole[dim] = of_dim[0].size
            continue
        if any(cut.pad_to or any(part.is_shared for part in cut.parts) for cut in of_dim):
            raise SplitImpossible(
                f"dimension {dim} is padded or shared, so that its size does not follow from the "
                "parts: set size:"
            )
        axes = {cut.axis for cut in of_dim}
        here = mesh.coordinates(first)
        alike = [
            rank
            for rank in held
            if all(at == here[axis] or axis in axes for axis, at in mesh.coordinates(rank).items())
        ]
        whole[dim] = sum(held[rank][dim] for rank in alike)
    return tuple(whole)


def _check_dim(cut: DimensionSplit, shape: Shape) -> None:
    if not -len(shape) <= cut.dim < len(shape):
        raise SplitImpossible(f"it has {len(shape)} dimensions, but dimension {cut.dim} is split")


# --- any world ----------------------------------------------------------------------------------


def _ranks_of(mesh: Mesh, sharing: MatchedRule) -> Iterable[int]:
    if not sharing.places:
        return range(mesh.size)
    places = {one.axis: one.coordinates(mesh.size_of(one.axis)) for one in sharing.places}
    at = map(mesh.coordinates, range(mesh.size))
    return [
        rank for rank, where in enumerate(at) if all(where[a] in some for a, some in places.items())
    ]


def _laid_out(
    rules: ShardingRules,
    wholes: dict[str, GlobalTensor],
    sharing: dict[str, MatchedRule],
    names: Sequence[RankNames],
    source: WorldLayout | None = None,
) -> WorldLayout:
    """Entries for all ranks, as they are stored, or to be filled from a source."""
    notes = _Problems(rules)
    entries: tuple[dict[str, PlacedEntry], ...] = tuple({} for _ in range(rules.mesh.size))
    for name, whole in wholes.items():
        # Ranks with equal parts share one object, so its identity shows that they are equal.
        made: dict[tuple[object, ...], PlacedEntry] = {}
        try:
            for rank in _ranks_of(rules.mesh, sharing[name]):
                previous_rank = rank
                if source is not None:
                    previous_rank = source.mesh.counterpart(rules.mesh, rank)
                    previous_rank = _owner_near(source.mesh, previous_rank, whole.own_shapes)
                placer = _Placer(rules, whole, sharing[name], rank)
                key = placer.key(previous_rank)
                if key not in made:
                    made[key] = placer.placed(previous_rank, source)
                entries[rank][name] = made[key]
        except SplitImpossible as error:
            notes.add(f"{name}: {error}")
    notes.check()
    return WorldLayout(rules, wholes, sharing, names, entries)


def _owner_near(mesh: Mesh, rank: int, owners: Mapping[int, Shape]) -> int:
    """The rank itself, or the owner at the nearest coordinates, such as on another stage."""
    if not owners or rank in owners:
        return rank
    where = mesh.coordinates(rank).items()
    return min(owners, key=lambda one: len(mesh.coordinates(one).items() - where))


def joined_rows(world: WorldLayout, name: str) -> list[PlacedEntry]:
    """The flat buffers of a name, each joined along its axis, with its padding.

    There is one for each coordinate of the other axes that split the tensors in it.
    """
    rule = world.sharing[name].rule
    assert rule.flat is not None
    axis = rule.flat.axis
    rules = world.rules.on(world.mesh.with_sizes({axis: 1}))
    made: dict[tuple[object, ...], PlacedEntry] = {}
    for rank, entries in enumerate(world.entries):
        if name in entries:
            num_items = entries[name].num_items * world.mesh.size_of(axis)
            row = replace(rule, flat=replace(rule.flat, pad_to=num_items))
            where = {**world.mesh.coordinates(rank), axis: 0}
            at = rules.mesh.rank_at(where)
            placer = _Placer(rules, world.wholes[name], MatchedRule(row), at)
            made.setdefault(placer.key(0), placer.placed(0, world))
    return list(made.values())


class _Placer:
    """Makes the entry of one rank for one tensor."""

    def __init__(
        self, rules: ShardingRules, whole: GlobalTensor, sharing: MatchedRule, rank: int
    ) -> None:
        self._rules = rules
        self._whole = whole
        self._rule = sharing.rule
        self._where = rules.mesh.coordinates(rank)

    def key(self, previous_rank: int) -> tuple[object, ...]:
        if self._rule.kind is SharingKind.OWN:
            return (previous_rank,)
        flat = self._rule.flat
        axes = {self._rule.axis, *(cut.axis for cut in self._rule.cuts)}
        if flat is not None:
            inner = (cut for name, _ in flat.tensors for cut in self._cuts_of(name, flat))
            axes = {flat.axis, *(cut.axis for cut in inner)}
        return tuple(at for axis, at in self._where.items() if axis in axes)

    def placed(self, previous_rank: int, source: WorldLayout | None) -> PlacedEntry:
        name, rule, copy = self._whole.name, self._rule, 0
        if rule.flat is not None:
            return self._row(rule.flat)
        if rule.kind is SharingKind.OWN:
            view = self._view(self._whole.own_shapes[previous_rank], ())
            return self._entry(view.shape, patches_of(f"{name}@{previous_rank}", view))
        if source is None and rule.kind is SharingKind.AVERAGE:
            copy = self._where[rule.axis]
        shape, mesh = self._whole.shape, self._rules.mesh
        padding: tuple[StoredRegion, ...] = ()
        view = self._view(shape, rule.cuts)
        wide = padded_view(shape, rule.cuts, mesh, self._where)
        if source is None:
            padding = padding_of(name, shape, wide)
        elif padded_shape(shape, rule.cuts, mesh) == source.padded_shape(name):
            view = wide
        return self._entry(view.shape, patches_of(name, view, copy=copy), padding)

    def _row(self, flat: FlatBuffer) -> PlacedEntry:
        members = [
            (f"{self._whole.name}/{name}", self._view(shape, self._cuts_of(name, flat)))
            for name, shape in flat.tensors
        ]
        count = self._rules.mesh.size_of(flat.axis)
        index = self._where[flat.axis]
        num_items, patches = flat_part(members, flat, count=count, index=index)
        return self._entry((num_items,), patches)

    def _cuts_of(self, name: str, flat: FlatBuffer) -> tuple[DimensionSplit, ...]:
        """The splits of a tensor in a flat buffer along axes other than the buffer's."""
        rules = self._rules.rules_of(name)
        if len(rules) > 1:
            raise SplitImpossible(f"{name} in it is matched by {rules[0]} and by {rules[1]}")
        return tuple(cut for rule in rules for cut in rule.cuts if cut.axis != flat.axis)

    def _view(self, shape: Shape, cuts: tuple[DimensionSplit, ...]) -> StoredView:
        for cut in cuts:
            _check_dim(cut, shape)
        return view_of(shape, cuts, self._rules.mesh, self._where)

    def _entry(self, shape: Shape, *regions: tuple[StoredRegion, ...]) -> PlacedEntry:
        return PlacedEntry(self._whole.name, self._whole.dtype, shape, *regions)
