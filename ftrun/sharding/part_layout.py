"""Describes a world whose shards state which parts of which tensors they hold, without rules.

Such shards are of DTensors, of DDP, and of ranks that share replicas. The result is the same
`WorldLayout` that `read_world` makes from rules, so one engine converts both.
"""

import math
from collections.abc import Mapping, Sequence

from ftrun.ids import Rank
from ftrun.sharding.partition import StoredRegion
from ftrun.sharding.pipeline_stages import RankNames
from ftrun.sharding.rule_matching import MatchedRule, OwningParameter, StateOwnership
from ftrun.sharding.rule_parser import read_carried
from ftrun.sharding.rules import (
    REPLICATED,
    STAGES,
    NamePattern,
    ShardingRule,
    ShardingRules,
    SharingKind,
    StagePlacement,
    ranks_alone,
)
from ftrun.sharding.source_index import OURS, SourceIndex, WholeTensor
from ftrun.sharding.world_layout import (
    GlobalTensor,
    PlacedEntry,
    WorldLayout,
    check_is_of_session,
    parameters_by_state,
)
from ftrun.snapshot import plain_values as plain
from ftrun.snapshot.boxes import strides_of
from ftrun.snapshot.layout import LayoutEntry
from ftrun.snapshot.shard_header import ShardHeader

_OWN = ShardingRule(SharingKind.OWN, NamePattern("*"), 0)


def world_of_parts(
    headers: Sequence[ShardHeader], parts: Sequence[Mapping[str, bytes]], *, source: str
) -> WorldLayout:
    """The layout of the entries of each rank, from rank 0, as the shards state it.

    A tensor that is each rank's own (rule 2 of `source_index`) has the rule `own`.

    Raises:
        LayoutUnknown: an older ftrun took the version.
        RanksDiffer: ranks hold parts of different tensors under one name.
        RulesMismatch: no session saved it.
        TensorIncomplete: the parts do not cover a tensor.
    """
    check_is_of_session(parts, source=source)
    index = SourceIndex({Rank(rank): head for rank, head in enumerate(headers)}, prefer=Rank(0))
    wholes: dict[str, WholeTensor] = {}
    for name in index.names:
        found = index.tensor(name)
        assert found is not None
        found.check_is_whole()
        wholes[name] = found
    owners = {name: of for one in parts for name, of in parameters_by_state(one).items()}
    rules = _rules(headers, parts[0], source)
    entries: tuple[dict[str, PlacedEntry], ...] = tuple({} for _ in headers)
    for name, one in wholes.items():
        made: dict[object, PlacedEntry] = {}
        for rank, head in enumerate(headers):
            if name in head.entries:
                key = head.entries[name].box if one.is_shared else rank
                if key not in made:
                    made[key] = _placed(one, head.entries[name], rank)
                entries[rank][name] = made[key]
    return WorldLayout(
        rules,
        {name: _global(one, owners.get(name), wholes, entries) for name, one in wholes.items()},
        {n: MatchedRule(REPLICATED if one.is_shared else _OWN) for n, one in wholes.items()},
        [RankNames()] * len(headers),
        entries,
    )


def _rules(
    headers: Sequence[ShardHeader], parts: Mapping[str, bytes], source: str
) -> ShardingRules:
    """Rules that only describe the mesh, and the axes along which ranks are stages."""
    mesh = ranks_alone(len(headers))
    if "layout" in parts:
        mesh = read_carried(plain.decode(parts["layout"])).mesh
    axes = [STAGES] if mesh.has_stages else []
    held = [
        [one.name for one in head.layout.entries if not one.name.startswith(OURS)]
        for head in headers
    ]
    if "layout" not in parts and any(names != held[0] for names in held):
        axes = list(mesh.names)  # stages that declare no mesh
    stages = tuple(StagePlacement(NamePattern(""), 0, axis, (0,)) for axis in axes)
    return ShardingRules(source, mesh, (), stages)


def _placed(tensor: WholeTensor, entry: LayoutEntry, rank: int) -> PlacedEntry:
    name = tensor.name if tensor.is_shared else f"{tensor.name}@{rank}"
    box = entry.box
    regions: tuple[StoredRegion, ...] = ()
    if box is not None and not box.is_empty:
        regions = (StoredRegion(name, box, 0, strides_of(box.shape)),)
    return PlacedEntry(tensor.name, entry.dtype, entry.shape, regions)


def _global(
    tensor: WholeTensor,
    parameter: str | None,
    wholes: Mapping[str, WholeTensor],
    entries: Sequence[Mapping[str, PlacedEntry]],
) -> GlobalTensor:
    owner = None
    if parameter is not None and parameter in wholes:
        how = StateOwnership.NUMBER if math.prod(tensor.shape) == 1 else None
        is_like = tensor.shape == wholes[parameter].shape
        owner = OwningParameter(parameter, StateOwnership.LIKE if is_like else how)
    held = {
        rank: some[tensor.name].shape for rank, some in enumerate(entries) if tensor.name in some
    }
    return GlobalTensor(
        tensor.name, tensor.dtype, tensor.shape, owner, {} if tensor.is_shared else held
    )
