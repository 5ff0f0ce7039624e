"""Plans the operations of Universal Checkpointing: extract, union and strip.

An atom is one whole tensor, without the number of a rank and without padding: a parameter, or one
value of its optimizer state. Each operation gives files; each file states which regions of whole
tensors it holds, so the files of one operation are the source of the next one, and of
`world_layout.lay_out`, which is the operation load.

    extract        the part of each rank, as the rank stores it; equal parts once
    union          one tensor for each entry, at the size to which the ranks padded it
    strip_padding  atoms; a flat buffer becomes its tensors

Atoms are the state of a world of one rank (`one_rank`), so all engines for worlds read them.

Source: Universal Checkpointing (arXiv 2406.18820, section 4): Extract, Union, StripPad, Load.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

import xxhash
import yaml

from ftrun.sharding.partition import StoredRegion, StoredView, padded_shape, patches_of, view_of
from ftrun.sharding.rank_values import RankValues, refs_changed
from ftrun.sharding.rule_parser import read_rules
from ftrun.sharding.rules import DimensionSplit, Mesh, SharingKind, ranks_alone
from ftrun.sharding.world_layout import (
    GlobalTensor,
    PlacedEntry,
    StoredEntry,
    WorldLayout,
    joined_rows,
    read_world,
)
from ftrun.snapshot import plain_values as plain
from ftrun.snapshot.boxes import Shape
from ftrun.snapshot.layout import ITEM_BYTES
from ftrun.snapshot.plain_values import TensorRef, join, refs_in

ATOM_DTYPES = {"F16": "F32", "BF16": "F32"}
"""Dtypes that atoms widen, without loss. All others are unchanged."""

_WORDS = {"F64": "fp64", "F32": "fp32", "F16": "fp16", "BF16": "bf16"}
_PART = "sharded"
"""Kind of a reference to a rank's part of a DTensor; see `TensorRef`."""

_ALONE = ranks_alone(1)
_HERE = {"dp": 0}
_LONGEST_NAME = 200
"""Bytes of a file name without its ending; file systems have at most 255."""


@dataclass(frozen=True, slots=True)
class TensorFile:
    """One file: a part of an entry, or all of it.

    Args:
        entry: its name in a pipeline of one stage.
        regions: of whole tensors; items outside them are padding.
        part: which of several parts of the entry; empty: all of it.
        member: the tensor of a flat buffer; empty: the entry is no flat buffer, or all of it.
    """

    entry: str
    dtype: str
    shape: Shape
    regions: tuple[StoredRegion, ...]
    part: str = ""
    member: str = ""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def one_rank(world: WorldLayout) -> WorldLayout:
    """The world of one rank that has all tensors whole, and rules that describe it."""
    stored = [
        StoredEntry(
            name, one.dtype, _shape(one), None if one.owner is None else one.owner.parameter
        )
        for name, one in world.wholes.items()
    ]
    return read_world(read_rules(_rules_text(world), source="the atoms"), [stored])


def extract(world: WorldLayout) -> list[tuple[int, TensorFile]]:
    """The files, each with a rank that stores it."""
    found = []
    for name in world.wholes:
        parts: dict[int, tuple[int, PlacedEntry]] = {}
        for rank, entries in enumerate(world.entries):
            if name in entries:  # ranks with equal parts share one object
                parts.setdefault(id(entries[name]), (rank, entries[name]))
        if world.sharing[name].rule.kind is SharingKind.OWN:
            parts = dict(list(parts.items())[:1])
        for at, (rank, placed) in enumerate(parts.values()):
            part = f"{at}-of-{len(parts)}"
            regions = tuple(_of_one_rank(one, name) for one in placed.patches)
            found.append((rank, TensorFile(name, placed.dtype, placed.shape, regions, part)))
    return found


def union(world: WorldLayout) -> list[TensorFile]:
    """One file for each entry; one for each buffer of a flat entry that other axes split too."""
    found = []
    for name, tensor in world.wholes.items():
        rule = world.sharing[name].rule
        if rule.flat is not None:
            rows = joined_rows(world, name)
            for at, row in enumerate(rows):
                part = f"{at}-of-{len(rows)}" if len(rows) > 1 else ""
                found.append(TensorFile(name, row.dtype, row.shape, row.patches, part))
            continue
        view = _padded(_shape(tensor), rule.cuts, world.mesh)
        label = f"{name}@0" if rule.kind is SharingKind.OWN else name
        patches = patches_of(label, view)
        found.append(TensorFile(name, tensor.dtype, view.shape, patches))
    return found


def strip_padding(one: WorldLayout) -> list[TensorFile]:
    """The atoms of a world of one rank."""
    found = []
    for name, tensor in one.wholes.items():
        placed, flat = one.entries[0][name], one.sharing[name].rule.flat
        if flat is None:
            found.append(TensorFile(name, placed.dtype, placed.shape, placed.patches))
            continue
        for member, shape in flat.tensors:
            patches = patches_of(f"{name}/{member}", view_of(shape, (), _ALONE, _HERE))
            found.append(TensorFile(name, tensor.dtype, shape, patches, member=member))
    return found


def share_of(entry: str, count: int) -> int:
    """Which of `count` workers handles an entry, from 0."""
    return xxhash.xxh3_64_intdigest(entry.encode()) % count


def paths_of(files: Sequence[TensorFile], states: Mapping[str, Any]) -> list[str]:
    """A path for each file, without ending: the parameter, then which value of it.

    Args:
        states: the part `optimizer_state` of the plain values of one rank.
    """
    keys = _state_keys(states)
    used: set[str] = set()
    found = []
    for file in files:
        word = _WORDS.get(file.dtype, file.dtype.lower())
        folder, name = keys.get(file.entry, (file.entry, word))
        if file.member:
            name = name if file.member == folder else f"{folder}.{name}"
            folder = file.member
        if file.part:
            name = f"{name}.{file.part}"
        path = f"{_file_name(folder)}/{_file_name(name)}"
        while path in used:
            path += "+"
        used.add(path)
        found.append(path)
    return found


# --- one rank -----------------------------------------------------------------------------------


def _shape(tensor: GlobalTensor) -> Shape:
    """Of a rank's own tensor: that of the first rank that has it."""
    return next(iter(tensor.own_shapes.values()), tensor.shape)


def _rules_text(world: WorldLayout) -> str:
    flat, own, others = [], [], []
    for name, one in world.sharing.items():
        if one.rule.flat is not None:
            tensors = {member: list(shape) for member, shape in one.rule.flat.tensors}
            flat.append({"name": name, "axis": "dp", "tensors": tensors})
        elif one.rule.kind is SharingKind.OWN:
            own.append(name)
        else:
            others.append(name)
    rules = {
        "mesh": {"dp": 1},
        "replicate": others if flat or own else ["*"],
        "flat": flat,
        "own": own,
    }
    return str(yaml.safe_dump(rules, sort_keys=False))


def _of_one_rank(region: StoredRegion, entry: str) -> StoredRegion:
    is_own = region.tensor.startswith(f"{entry}@")
    return replace(region, tensor=f"{entry}@0") if is_own else region


def values_of_one_rank(
    parts: Sequence[dict[str, bytes]], world: WorldLayout, one: WorldLayout
) -> dict[str, bytes]:
    """The plain values of the world of one rank, encoded part by part.

    References to a rank's part of a DTensor become references to the whole tensor.
    """
    made: dict[str, bytes] = plain.decode(RankValues(parts, world, one).of(0))
    for name, raw in made.items():
        tree = plain.decode(raw)
        if any(ref.kind.startswith(_PART) for ref in refs_in(tree)):
            made[name] = plain.encode(refs_changed(tree, _of_whole))
    return made


def _of_whole(ref: TensorRef) -> TensorRef:
    if not ref.kind.startswith(_PART):
        return ref
    return replace(ref, kind=f"tensor{ref.kind.removeprefix(_PART)}", stride=())


# --- padding ------------------------------------------------------------------------------------


def _padded(shape: Shape, cuts: Sequence[DimensionSplit], mesh: Mesh) -> StoredView:
    padded = enumerate(padded_shape(shape, cuts, mesh))
    return view_of(
        shape, [DimensionSplit("dp", d, pad_to=size) for d, size in padded], _ALONE, _HERE
    )


# --- names --------------------------------------------------------------------------------------


def _state_keys(states: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Parameter and key of each entry of optimizer state."""
    found: dict[str, tuple[str, str]] = {}
    for optimizer, saved in states.items():
        for parameter, values in saved["state"].items():
            for key, entry in _refs(values, ""):
                found[entry] = (str(parameter), key or optimizer)
    return found


def _refs(values: Any, path: str) -> Iterator[tuple[str, str]]:
    """Path and entry of each tensor in a tree."""
    if isinstance(values, TensorRef):
        yield path, values.name
    elif isinstance(values, Mapping):
        for key, value in values.items():
            yield from _refs(value, join(path, key))
    elif isinstance(values, list | tuple):
        for at, value in enumerate(values):
            yield from _refs(value, f"{path}[{at}]")


def _file_name(name: str) -> str:
    text = quote(name, safe="[]")
    if text.startswith("."):
        text = f"%2E{text[1:]}"
    if len(text) > _LONGEST_NAME:
        text = f"{text[:_LONGEST_NAME]}~{xxhash.xxh3_64_hexdigest(name.encode())}"
    return text
