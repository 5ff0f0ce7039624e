"""Reads a version of another layout through sharding rules, as if this rank had taken it.

Runs in:  worker, training thread, inside `attach`; no collective.
Takes in: the shards of all ranks that took the version, the rules stored in it, and the rules that
          the script declares now.
Gives:    the state of this rank in the new layout; of each tensor only the needed bytes are read.

A version contains its own layout, because `attach(layout=...)` stores the rules and the mesh in the
plain values of every snapshot. Only the new layout has to be declared.
"""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ftrun.errors import LayoutUnknown, RulesMismatch
from ftrun.ids import Rank, Version
from ftrun.sharding.box_copies import BoxCopy
from ftrun.sharding.rank_values import RankValues
from ftrun.sharding.replica_check import differing
from ftrun.sharding.rule_parser import read_carried
from ftrun.sharding.rules import ShardingRules
from ftrun.sharding.stored_entries import plain_bytes, stored_entries
from ftrun.sharding.world_layout import lay_out, read_world
from ftrun.snapshot import plain_values as plain
from ftrun.snapshot.layout import ITEM_BYTES, CopyTiming, LayoutEntry
from ftrun.snapshot.plain_values import TensorRef
from ftrun.worker.context import WorkerContext
from ftrun.worker.reshard.engine import images_of, telling_of_corruption
from ftrun.worker.reshard.source import ByteRange, CheckedShards
from ftrun.worker.reshard.tensor_reader import MOST_BYTES, readable
from ftrun.worker.restore import ready_memory
from ftrun.worker.restore.loader import put_back_random_states, reload
from ftrun.worker.restore.shard import check_used
from ftrun.worker.smp_client import WorkerSmpClient
from ftrun.worker.state.attached import AttachedState
from ftrun.worker.state.declared_layout import DeclaredSharding
from ftrun.worker.state.state_tree import StateTree
from ftrun.worker.state.tensors import DTYPES, at_home

_log = logging.getLogger(__name__)


def open_ruled(
    context: WorkerContext, link: WorkerSmpClient, layout: DeclaredSharding
) -> "RuledState":
    """Open the version to restore from the shards of ranks of another layout.

    Raises:
        SnapshotError, PeerError: a shard is missing, or differs from the sealed one.
        RulesMismatch: the version cannot be converted to this layout.
    """
    assert context.restore is not None
    old_size = context.restore_world_size
    source = images_of(context.restore, link, old_size)
    try:
        with telling_of_corruption(context):
            images = CheckedShards(source, str(context.restore))
            found = RuledState(images, context, layout.rules)
    except BaseException:
        source.close()
        raise
    if context.rank == 0:
        for note in found.notes:
            _log.warning("%s", note)
    return found


class RuledState:
    """One version, assembled for one rank of another layout.

    Args:
        images: of all ranks that took it.
        context: of the rank that restores it.
        rules: of the layout of that rank.

    Raises:
        LayoutUnknown: the version contains no layout.
        RulesMismatch: the version cannot be converted to this layout.
    """

    def __init__(self, images: CheckedShards, context: WorkerContext, rules: ShardingRules) -> None:
        assert context.restore is not None
        self.version: Version = context.restore
        self._context = context
        self._images = images
        self._used: set[str] = set()
        parts = [plain_bytes(h, partial(images.read, r)) for r, h in sorted(images.heads.items())]
        if "layout" not in parts[0]:
            raise LayoutUnknown(
                f"{self.version} was taken by a script that declared no layout: start the ranks "
                "that took it, or make a checkpoint of it another one by ftrun snapshots convert"
            )
        saved = read_carried(plain.decode(parts[0]["layout"]))
        self.heads = [head for _, head in sorted(images.heads.items())]
        stored = stored_entries(self.heads, parts, source=saved.source)
        before = read_world(saved, stored)
        after = lay_out(rules, before)
        if problems := differing(self, before):
            raise RulesMismatch(source=saved.source, problems=problems)
        self._stock = before.stock()
        own = partial(after.own_name, context.rank)
        self._placed = {own(name): one for name, one in after.entries[context.rank].items()}
        values = RankValues(parts, before, after)
        self._parts: dict[str, bytes] = plain.decode(values.of(context.rank))
        self.notes = [
            f"not bitwise: {self.version} was taken by {before.mesh} and goes on in {after.mesh}; "
            "parameters and optimizer state are those of that step, what comes after adds up in "
            "another order",
            *values.notes(),
        ]

    def read(self, rank: int, name: str, first_byte: int, num_bytes: int) -> memoryview:
        offset = self._images.heads[Rank(rank)].entries[name].offset
        return self._images.read(Rank(rank), offset + first_byte, num_bytes)

    # --- as `reload` reads it ----------------------------------------------------------------

    def part(self, name: str) -> Any:
        return plain.decode(self._parts[name], deref=self._deref)

    def optional_part(self, name: str) -> Any:
        return self.part(name) if name in self._parts else None

    def load(self, tree: StateTree, context: WorkerContext) -> None:
        with telling_of_corruption(context):
            reload(self, tree, context)

    def put_back_random_states(self, attached: AttachedState) -> None:
        put_back_random_states(self, attached)

    def close(self) -> None:
        self._images.close()

    def entry(self, name: str) -> LayoutEntry | None:
        placed = self._placed.get(name)
        return (
            None
            if placed is None
            else LayoutEntry(name, placed.dtype, placed.shape, CopyTiming.LAZY)
        )

    def tensor(self, name: str) -> torch.Tensor:
        """Assemble a tensor of this rank; if divergent copies are stored, return their mean."""
        self._used.add(name)
        placed = self._placed[name]
        copies = self._stock.copies(placed.patches)
        made = [self._filled(one, placed.num_items, placed.dtype) for one in copies]
        if len(made) == 1:
            return made[0].view(placed.shape)
        total = made[0].double()
        for one in made[1:]:
            total += one
        return (total / len(made)).to(made[0].dtype).view(placed.shape)

    def copy_into(self, name: str, target: torch.Tensor) -> None:
        target.copy_(self.tensor(name))

    def check_all_used(self) -> None:
        check_used({name: str(self.entry(name)) for name in self._placed}, self._used)

    def _filled(self, copies: Sequence[BoxCopy], num_items: int, dtype: str) -> torch.Tensor:
        """[items] filled from the copies; padding is 0."""
        item_bytes = ITEM_BYTES[dtype]
        made = torch.zeros(num_items, dtype=DTYPES[dtype])
        short = [part for copy in copies for part in copy.cut_to(MOST_BYTES // item_bytes)]
        self._images.expect([self._range(copy, item_bytes) for copy in short])
        for copy in short:
            one = self._range(copy, item_bytes)
            raw = self._images.read(one.rank, one.offset, one.num_bytes)
            found = readable(raw, made.dtype).as_strided(copy.shape, copy.strides)
            made.as_strided(copy.shape, copy.to_strides, copy.to_first).copy_(found)
        return made

    def _range(self, copy: BoxCopy, item_bytes: int) -> ByteRange:
        rank = Rank(copy.rank)
        offset = self._images.heads[rank].entries[copy.entry].offset
        return ByteRange(rank, offset + copy.first * item_bytes, copy.span * item_bytes)

    def _deref(self, ref: TensorRef) -> object:
        made = self.tensor(ref.name)
        if ref.stride:
            made = ready_memory.empty(tuple(made.shape), made.dtype, "cpu", ref.stride).copy_(made)
        return made.numpy() if ref.kind == "array" else at_home(made, ref.kind)
