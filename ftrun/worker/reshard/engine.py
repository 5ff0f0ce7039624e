"""Loads a version that ranks of another layout took into the attached objects, in place.

Runs in:  worker, training thread, inside `attach`; no collective.

Without rules, the parts that the shards state are indexed. Optimizer state is created before it is
filled, because most optimizers have none before their first step. State of its parameter's shape is
created like the parameter, other state as a plain tensor. If several old ranks hold equal bytes,
they are read from one of them; the others are compared with it by digest.

With rules, the state of this rank is assembled as if the rank had taken the version. A version
contains its own layout, because `attach(layout=...)` stores the rules and the mesh in the plain
values of every snapshot. Only the new layout has to be declared.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ftrun.errors import LayoutUnknown, RulesMismatch, ShapeChanged
from ftrun.ids import Rank, Version
from ftrun.sharding.rank_values import RankValues
from ftrun.sharding.replica_check import check_replicas, differing, padding_notes
from ftrun.sharding.rule_parser import read_carried
from ftrun.sharding.rules import ShardingRules, ranks_alone
from ftrun.sharding.source_index import BoxCopy, WholeTensor
from ftrun.sharding.world_layout import lay_out, read_world, stored_entries
from ftrun.snapshot import plain_values as plain
from ftrun.snapshot.boxes import Shape
from ftrun.snapshot.layout import CopyTiming, LayoutEntry
from ftrun.snapshot.plain_values import TensorRef
from ftrun.worker.context import WorkerContext
from ftrun.worker.reshard.source import CheckedShards, open_shards
from ftrun.worker.reshard.source_state import SourceState
from ftrun.worker.reshard.tensor_reader import copy_boxes, fill
from ftrun.worker.restore import early_restore
from ftrun.worker.restore.loader import RankState, fill_expanded, reporting_corruption
from ftrun.worker.restore.shard import check_fits, check_used, fits
from ftrun.worker.smp_client import WorkerSmpClient
from ftrun.worker.state.optimizer_state import mapped
from ftrun.worker.state.state_tree import PersistentSources, StateTree
from ftrun.worker.state.tensors import (
    DTYPE_NAMES,
    DTYPES,
    LocalPart,
    box_of,
    copyable,
    home_of,
    is_expanded,
    is_sharded,
    local_tensor,
    stride_of,
    uninitialized,
)  # fmt: skip

_NOTHING = "nothing"

_log = logging.getLogger(__name__)


def open_resharded(
    context: WorkerContext, link: WorkerSmpClient, layout: ShardingRules | None
) -> "ReshardedState | RuledState":
    """Open the version to restore from the shards of ranks of another layout."""
    wanted = context.restore
    assert wanted is not None
    previous_size = context.restore_world_size
    fds = link.open_images(wanted, previous_size)
    source = open_shards(fds, map(Rank, range(previous_size)), wanted, link)
    found: ReshardedState | RuledState
    try:
        with reporting_corruption(context):
            shards = CheckedShards(source, str(wanted))
            if layout is not None and not layout.is_empty:
                found = RuledState(shards, wanted, context.rank, layout)
            else:
                mesh = ranks_alone(context.world_size) if layout is None else layout.mesh
                found = ReshardedState(shards, wanted, previous_size, context.rank, mesh)
    except BaseException:
        source.close()
        raise
    if context.rank == 0:
        for note in found.notes:
            _log.warning("%s", note)
    return found


class ReshardedState(SourceState):
    """One version for one rank of another world, by the part metadata in the shards."""

    def described(self, name: str) -> tuple[str, Shape] | None:
        found = self.index.tensor(name)
        return None if found is None else (found.dtype, found.shape)

    def load_tensors(
        self, tree: StateTree, persistent: PersistentSources, groups: Mapping[str, Any]
    ) -> None:
        wanted = _Wanted(self, casts=tree.attached.casts)
        wanted.add_attached(persistent, tree)
        self._states = {
            name: _states(name, optimizer, wanted, persistent)
            for name, optimizer in tree.attached.optimizers.items()
            if name in groups
        }
        boxes = {name: box_of(tensor) for name, tensor in wanted.tensors.items()}
        placed = {name: box for name, box in boxes.items() if box is not None}
        with torch.no_grad():
            check_replicas(wanted.saved, placed, self.shards)
            fill(wanted.tensors, wanted.saved, self.shards)
            for name, target in wanted.expanded.items():
                fill_expanded(target, wanted.tensors[name])

    def optimizer_states(self) -> dict[str, Any]:
        return self._states


class _Wanted:
    """The tensors to fill and their saved tensors, both by name."""

    def __init__(self, saved: SourceState, *, casts: bool) -> None:
        self.world = saved
        self.casts = casts
        self.tensors: dict[str, torch.Tensor] = {}
        self.expanded: dict[str, torch.Tensor] = {}
        """Tensors that receive their values from the tensors of the same name in `tensors`."""
        self.saved: dict[str, WholeTensor] = {}

    def add_attached(self, persistent: PersistentSources, tree: StateTree) -> None:
        names = {*persistent.names.values(), *tree.attached.tensors}
        pairs = zip(persistent.sources, persistent.originals, strict=True)
        wanted = [(source.name, original) for source, original in pairs if source.name in names]
        changed = [found for one in wanted if (found := self._changed(*one)) is not None]
        # A tied tensor may have been saved under each of its names, by different stages.
        tied = plain.decode(persistent.modules)["tied"]
        self.world.count_as_used(tied)
        self.world.check_agreement(tied, is_strict=tree.attached.is_strict)
        lost = self.world.parameters - names - tied.keys()
        left = [name for name in self.world.needed if name in lost]
        check_fits([*changed, *((n, str(self.world.whole(n)), _NOTHING) for n in left)])
        for name, tensor in wanted:
            self.add(name, tensor)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if (changed := self._changed(name, tensor)) is not None:
            check_fits([changed])
        found = self.world.whole(name)
        assert found is not None, name
        self.tensors[name] = tensor.detach()
        if is_expanded(local_tensor(tensor, name)):
            self.expanded[name], self.tensors[name] = tensor, tensor.detach().clone()
        self.saved[name] = found

    def _changed(self, name: str, tensor: torch.Tensor) -> tuple[str, str, str] | None:
        found = self.world.whole(name)
        now = (DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
        if found is None or found.shape != now[1] or not fits(found.dtype, now[0], self.casts):
            saved = _NOTHING if found is None else str(found)
            return name, saved, f"{now[0]}{list(now[1])}"
        if box_of(tensor) is None:
            return name, str(found), "a DTensor with strided shards or partial sums"
        return None


def _states(
    optimizer_name: str,
    optimizer: torch.optim.Optimizer,
    wanted: _Wanted,
    persistent: PersistentSources,
) -> dict[Any, Any]:
    parameters = {persistent.names[id(p)]: p for g in optimizer.param_groups for p in g["params"]}
    elsewhere = wanted.world.parameters - parameters.keys()
    found: dict[Any, Any] = {}
    for rank in wanted.world.ranks:
        saved = wanted.world.optimizer_state(rank)[optimizer_name]["state"]
        for key, values in saved.items():
            if key not in found and key not in elsewhere:
                found[key] = _made(values, parameters.get(key), wanted)
        # An old rank without state of a parameter never stepped it, or another rank stepped it.
        if all(name in found for name in parameters):
            break
    return found


def _made(values: Any, parameter: torch.Tensor | None, wanted: _Wanted) -> Any:
    def made(leaf: Any) -> Any:
        return _made_tensor(leaf, parameter, wanted) if isinstance(leaf, TensorRef) else leaf

    return mapped(values, made)


def _made_tensor(ref: TensorRef, parameter: torch.Tensor | None, wanted: _Wanted) -> object:
    saved = wanted.world.whole(ref.name)
    assert saved is not None, ref.name
    dtype = DTYPES[saved.dtype]
    if ref.kind == "array":
        made = early_restore.empty(saved.shape, dtype, "cpu", ref.stride)
        wanted.add(ref.name, made)
        return made.numpy()
    is_like = parameter is not None and saved.shape == tuple(parameter.shape) and saved.shape
    if parameter is not None and is_sharded(parameter) and is_like:
        local = local_tensor(parameter, "a parameter")
        shape, stride = tuple(local.shape), stride_of(local)
        made = LocalPart(early_restore.empty(shape, dtype, local.device, stride)).like(parameter)
    elif ref.kind.startswith("sharded") and parameter is not None and not is_like:
        raise ShapeChanged(
            key=ref.name, saved=f"a sharded {saved}", present=f"state of {list(parameter.shape)}"
        )
    else:
        # Numbers, such as the step, are created on the CPU, as in torch's optimizers.
        device = parameter.device if parameter is not None and saved.shape else "cpu"
        made = early_restore.empty(saved.shape, dtype, device, ref.stride)
    wanted.add(ref.name, made)
    return made


class RuledState(RankState):
    """One version, assembled for one rank of another layout."""

    def __init__(
        self, shards: CheckedShards, wanted: Version, rank: Rank, rules: ShardingRules
    ) -> None:
        self.version = wanted
        self._shards = shards
        self._used: set[str] = set()
        parts = [
            plain.plain_bytes(h, partial(shards.read, r)) for r, h in sorted(shards.headers.items())
        ]
        if "layout" not in parts[0]:
            raise LayoutUnknown(
                f"{self.version} was taken by a script that declared no layout: start the ranks "
                "that took it, or make a checkpoint of it another one by ftrun checkpoints convert"
            )
        saved = read_carried(plain.decode(parts[0]["layout"]))
        self.headers = [head for _, head in sorted(shards.headers.items())]
        stored = stored_entries(self.headers, parts, source=saved.source)
        before = read_world(saved, stored)
        after = lay_out(rules, before)
        if problems := differing(self, before):
            raise RulesMismatch(source=saved.source, problems=problems)
        self._index = before.index(lambda rank, name: self.headers[rank].entries[name])
        own = partial(after.own_name, rank)
        self._placed = {own(name): one for name, one in after.entries[rank].items()}
        values = RankValues(parts, before, after)
        self._parts: dict[str, bytes] = plain.decode(values.of(rank))
        self.notes = [
            f"not bitwise: {self.version} was taken by {before.mesh} and continues in "
            f"{after.mesh}; parameters and optimizer state are those of that step, later sums are "
            "taken in another order",
            *values.notes(),
            *(padding_notes(self, before, after) if rank == 0 else ()),
        ]
        """As `SourceState.notes`."""

    def read(self, rank: int, name: str, first_byte: int, num_bytes: int) -> memoryview:
        offset = self._shards.headers[Rank(rank)].entries[name].offset
        return self._shards.read(Rank(rank), offset + first_byte, num_bytes)

    def part(self, name: str) -> Any:
        return plain.decode(self._parts[name], deref=self._deref)

    def optional_part(self, name: str) -> Any:
        return self.part(name) if name in self._parts else None

    def close(self) -> None:
        self._shards.close()

    def entry(self, name: str) -> LayoutEntry | None:
        if (placed := self._placed.get(name)) is None:
            return None
        return LayoutEntry(name, placed.dtype, placed.shape, CopyTiming.LAZY)

    def tensor(self, name: str) -> torch.Tensor:
        placed = self._placed[name]
        made = uninitialized(placed.shape, DTYPES[placed.dtype], "cpu")
        self.copy_into(name, made)
        return made

    def copy_into(self, name: str, target: torch.Tensor) -> None:
        """Assemble a tensor of this rank; if divergent copies are stored, it is their mean."""
        self._used.add(name)
        placed = self._placed[name]
        dtype, copies = DTYPES[placed.dtype], self._index.copies(placed.patches)
        is_plain = len(copies) == 1 and target.dtype == dtype
        if is_plain and target.is_contiguous():
            self._fill(target, copies[0])
            return
        device = target.device if is_plain else "cpu"
        first, *others = (uninitialized(placed.shape, dtype, device) for _ in copies)
        for made, some in zip((first, *others), copies, strict=True):
            self._fill(made, some)
        if others:
            total = first.double()
            for one in others:
                total += one
            first = (total / len(copies)).to(dtype)
        copyable(target).copy_(copyable(first))

    def check_all_used(self) -> None:
        check_used({name: str(self.entry(name)) for name in self._placed}, self._used)

    def _fill(self, target: torch.Tensor, copies: Sequence[BoxCopy]) -> None:
        """Fill a row-major tensor; padding is 0."""
        copyable(target).zero_()
        copy_boxes([(copy, target) for copy in copies], self._shards, is_restore=True)

    def _deref(self, ref: TensorRef) -> object:
        placed = self._placed[ref.name]
        dtype, home = DTYPES[placed.dtype], home_of(ref.kind)
        made = early_restore.empty(placed.shape, dtype, home, ref.stride)
        self.copy_into(ref.name, made)
        return made.numpy() if ref.kind == "array" else made
