"""Reads one version of a rank that shares its replicas.

Runs in:  worker, training thread, inside `attach`; no collective.
Gives:    the state of `LocalState`, with whole tensors in place of the shares.

Some members may have stored shares of this version, others whole tensors. Each tensor is assembled
from the parts of all members, and each piece is compared with its digest before it is used.

Rule 1: no member writes to the slots of this version before all ranks have restored it. A rank
        writes its first snapshot to its other slot. Its second snapshot waits for the commit of the
        first, which needs a seal of every rank.
Rule 2: if the shards do not belong to one state, this rank's slot is reported like a damaged one,
        so that an older version is restored. A restart from the same version would fail again.
"""

import os
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from ftrun.errors import LayoutUnknown, RanksDiffer, TensorIncomplete
from ftrun.ids import Rank, Version
from ftrun.sharding.replica_check import check_replicas
from ftrun.sharding.source_index import ShardSource, SourceIndex, WholeTensor
from ftrun.snapshot.boxes import whole
from ftrun.wire.shared_memory.arena import Arena
from ftrun.wire.shared_memory.pages import HeartbeatField
from ftrun.worker.context import WorkerContext
from ftrun.worker.reshard.source import CheckedShards, open_shards
from ftrun.worker.reshard.tensor_reader import fill
from ftrun.worker.restore.loader import LocalState, reporting_corruption
from ftrun.worker.smp_client import WorkerSmpClient
from ftrun.worker.state.tensors import DTYPES, uninitialized


class SharedState(LocalState):
    """One version of a rank that shares its replicas with the ranks in `members`.

    `right`: pieces of this rank's own shard that were compared with their digests.

    Raises TensorIncomplete or RanksDiffer if the shares do not belong to one state.
    """

    def __init__(
        self,
        arena: Arena,
        wanted: Version,
        context: WorkerContext,
        link: WorkerSmpClient,
        right: Collection[int] = (),
    ) -> None:
        super().__init__(arena, wanted, context, right)
        shares = [entry for entry in self._entries.values() if entry.part is not None]
        for entry in shares:
            if not entry.is_small:  # a piece of a small entry holds other entries too
                self._unchecked.difference_update(self._layout.pieces_of(entry))
            # The offset of the whole entry has no meaning.
            self._entries[entry.name] = replace(entry, shape=entry.whole_shape, part=None)
        source, is_own_arena = _shards_of(self.members, wanted, context, link)
        try:
            with reporting_corruption(context):
                compared = {(context.rank, index) for index in right if is_own_arena}
                self._shards = CheckedShards(source, str(wanted), compared)
                index = SourceIndex(self._shards.headers, prefer=context.rank)
                self._shared = {entry.name: _tensor(index, entry.name) for entry in shares}
                boxes = {name: whole(one.shape) for name, one in self._shared.items()}
                check_replicas(self._shared, boxes, self._shards)
        except BaseException as error:
            source.close()
            if isinstance(error, TensorIncomplete | RanksDiffer):  # Rule 2
                context.page.note = f"the shares of {wanted} do not belong to one state: {error}"
                context.page.set(HeartbeatField.CORRUPT_RANK, 1 + context.rank)
                context.page.set(HeartbeatField.CORRUPT_SLOT, 1)
            raise

    def tensor(self, name: str) -> torch.Tensor:
        if name not in self._shared:
            return super().tensor(name)
        entry = self._entries[name]
        made = uninitialized(entry.shape, DTYPES[entry.dtype], "cpu")
        self.copy_into(name, made)
        return made

    def copy_into(self, name: str, target: torch.Tensor) -> None:
        if name not in self._shared:
            super().copy_into(name, target)
            return
        self._used.add(name)
        with torch.no_grad():
            fill({name: target}, self._shared, self._shards)

    def close(self) -> None:
        super().close()
        self._shards.close()


def _tensor(index: SourceIndex, name: str) -> WholeTensor:
    found = index.tensor(name)
    assert found is not None, name
    found.check_is_whole()
    return found


def _shards_of(
    members: Sequence[Rank], wanted: Version, context: WorkerContext, link: WorkerSmpClient
) -> tuple[ShardSource, bool]:
    """The shards of all members, and whether this rank's is in the arena that it has opened."""
    fds = link.open_images(wanted, context.world_size)
    for rank in fds.keys() - set(members):
        os.close(fds.pop(rank))
    if context.rank not in fds:
        for fd in fds.values():
            os.close(fd)
        raise LayoutUnknown(f"the shard of rank {context.rank} is not on this node")
    own = context.arena_fd
    is_own_arena = own is not None and os.path.sameopenfile(own, fds[context.rank])
    return open_shards(fds, members, wanted, link), is_own_arena
