"""The state of a version in the shards of a previous world: its plain values, and its tensors.

Runs in:  worker, training thread, inside `attach`; no collective.

Rule 1: step, epoch and parameter groups must be equal on all old ranks. Only the
        parameters in the groups may differ, because pipeline stages have different ones. If other
        values differ, there is no single state to resume from, and nothing is restored.
Rule 2: other objects (scheduler, scaler, dicts) are normally equal. If they differ, they are taken
        from one old rank, and the log reports it.
Rule 3: state and flags of modules and of their tensors are taken from the same old rank, and from
        other ranks if that one does not have the module.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property, partial
from typing import Any

import xxhash

from ftrun.errors import LayoutUnknown, RanksDiffer, SnapshotError, TensorIncomplete
from ftrun.ids import Rank, Version
from ftrun.sharding.module_values import gradients_merged, merged, modules_with, parameters_of
from ftrun.sharding.rank_values import DataShares, ranks
from ftrun.sharding.replica_check import (
    StateDifference,
    TensorContent,
    difference,
    have_equal_content,
)
from ftrun.sharding.rule_parser import read_carried
from ftrun.sharding.rules import STAGES, Mesh, ranks_alone
from ftrun.sharding.source_index import BoxCopy, Holder, SourceIndex, WholeTensor
from ftrun.snapshot import plain_values as plain
from ftrun.snapshot.boxes import strides_of
from ftrun.snapshot.plain_values import TensorRef, refs_in
from ftrun.worker.reshard.source import CheckedShards
from ftrun.worker.reshard.tensor_reader import copy_boxes
from ftrun.worker.restore import early_restore
from ftrun.worker.restore.shard import check_used
from ftrun.worker.state.tensors import DTYPES, home_of

_log = logging.getLogger(__name__)

_MUST_AGREE = {"session": "session", "groups": "parameter groups"}
_SHOULD_AGREE = {
    "stateful": "schedulers and scalers",
    "dicts": "dicts",
    "extra_state": "modules",
    "own_keys": "modules",
    "optimizer_keys": "optimizers",
    "providers": "state providers",
}
_SHARED_OUT = {
    "loaders": DataShares.loaders,
    "rng": DataShares.random_states,
    "generators": DataShares.generators,
}
_BY_MODULE = ("extra_state", "own_keys")
"""Parts with state of modules, by their paths."""


class SourceState:
    """One version, in the shards of all ranks that took it, for a rank of the new mesh."""

    def __init__(
        self, shards: CheckedShards, wanted: Version, previous_size: int, rank: Rank, mesh: Mesh
    ) -> None:
        self.version = wanted
        self.shards = shards
        self._rank, self._mesh = rank, mesh
        self._used: set[str] = set()
        _check_ranks(shards, previous_size)
        self._parts = {
            rank: plain.plain_bytes(head, partial(shards.read, rank))
            for rank, head in sorted(shards.headers.items())
        }
        self._before = self._mesh_before()
        self._own = Rank(self._before.counterpart(mesh, rank))
        self.index = SourceIndex(shards.headers, prefer=self._own)
        self._check_agreement()

    @property
    def ranks(self) -> list[Rank]:
        """Old ranks; the first is the one whose own state this rank takes over."""
        return [self._own, *(rank for rank in self._parts if rank != self._own)]

    # --- plain values ------------------------------------------------------------------------

    def part(self, name: str) -> Any:
        """A part of the plain values for this rank; its tensors are copies."""
        if name in _SHARED_OUT:
            return _SHARED_OUT[name](self._shares)
        if name in _BY_MODULE:
            return self._by_module(name)
        if name in self._merges:
            return self._merges[name]()
        rank = self._own if name in self._differing else Rank(0)
        if name not in self._parts[rank]:
            rank = next(one for one in self.ranks if name in self._parts[one])
        return self._decode(rank, name)

    def optional_part(self, name: str) -> Any:
        """Like `part`; None if no rank saved it, or an older version of ftrun did not."""
        return self.part(name) if any(name in one for one in self._parts.values()) else None

    def groups_among(self, present: Collection[str]) -> dict[str, list[dict[str, Any]]]:
        """Parameter groups; with pipeline stages, the groups of all ranks reduced to `present`."""
        first, *others = every = self._different("groups")
        if not self._mesh.has_stages and all(
            parameters_of(one) == parameters_of(first) for one in others
        ):
            return dict(first)
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in first}
        for name, groups in first.items():
            for at, group in enumerate(groups):
                params = dict.fromkeys(one for saved in every for one in saved[name][at]["params"])
                here = [one for one in params if one in present]
                found[name].append({**group, "params": here})
        return found

    @cached_property
    def parameters(self) -> frozenset[str]:
        return frozenset(
            name for groups in self._different("groups") for name in parameters_of(groups)
        )

    def optimizer_state(self, rank: Rank) -> Any:
        return plain.decode(self._parts[rank]["optimizer_state"])

    @property
    def notes(self) -> list[str]:
        """Differences from a restore into the same world: one log line each."""
        before, now = self._before, self._mesh
        found = [
            f"not bitwise: {self.version} was taken by {ranks(before.size)} ({before}) and "
            f"continues in {now.size} ({now}); parameters and optimizer state are those of that "
            "step, later sums are taken in another order",
            "buffers that no optimizer owns: each rank takes the buffers of the old rank with the "
            "same mesh coordinates, modulo the old mesh size",
        ]
        found += self._shares.notes()
        found += [
            f"{one.path} is {one.one} on old rank 0 and {one.other} on another rank. Each rank "
            f"takes the {_SHOULD_AGREE[name]} of the old rank with its coordinates"
            for name, one in self._differing.items()
        ]
        if now.num_batches > before.num_batches:
            found.append(
                f"{now.num_batches} ranks read different data; the snapshot has "
                f"{before.num_batches} such ranks. The additional ranks derive their random states "
                "from an old rank's state and their own number"
            )
        return found

    # --- tensors -----------------------------------------------------------------------------

    def whole(self, name: str) -> WholeTensor | None:
        """The tensor of this name, which counts as used; None if there is none."""
        self._used.add(name)
        if (found := self.index.tensor(name)) is not None:
            found.check_is_whole()
        return found

    def copy(self, rank: Rank, ref: TensorRef) -> object:
        entry = self.shards.headers[rank].entries[ref.name]
        self._used.add(ref.name)
        shape, home = entry.shape, home_of(ref.kind)
        made = early_restore.empty(shape, DTYPES[entry.dtype], home, ref.stride)
        if entry.num_bytes:
            holders = (Holder(rank, entry),)
            copy = BoxCopy(holders, 0, strides_of(shape), 0, made.stride(), shape)
            copy_boxes([(copy, made)], self.shards, is_announced=True, is_restore=True)
        return made.numpy() if ref.kind == "array" else made

    def check_all_used(self) -> None:
        self._used.update(self._referred(self._own, but="optimizer_state"))
        check_used({name: str(self.index.tensor(name)) for name in self.needed}, self._used)

    def check_agreement(self, tied: Mapping[str, str], *, is_strict: bool) -> None:
        """Report tensors that are tied here, and of which the old ranks saved different values.

        Tensors of which a part is missing count as equal, unless it is strict.

        Args:
            tied: other names of tied tensors, with the name under which each is restored.
            is_strict: raise a SnapshotError instead, also for objects of which the old ranks had
                different values.
        """
        found = [
            f"{other} and {name} are one tensor here, and the old ranks saved different values of "
            f"them: {name} is used"
            for other, name in tied.items()
            if self._differ(other, name, is_strict=is_strict)
        ]
        if is_strict:
            found += [
                f"{one.path} is {one.one} on old rank 0 and {one.other} on another rank"
                for one in self._differing.values()
            ]
            if found:
                raise SnapshotError(
                    f"{self.version} is not restored, because attach(strict=True): "
                    f"{'; '.join(found)}. Restore it in the layout that took it, or without strict"
                )
        where = self._mesh.coordinates(self._rank)
        if all(at == 0 for axis, at in where.items() if axis != STAGES):
            for text in found:
                _log.warning("%s", text)

    def _differ(self, one: str, other: str, *, is_strict: bool) -> bool:
        mine, its = self.index.tensor(one), self.index.tensor(other)
        if mine is None or its is None:
            return False
        if (mine.dtype, mine.shape) != (its.dtype, its.shape):
            return True
        try:
            mine.check_is_whole()
            its.check_is_whole()
        except TensorIncomplete:
            if is_strict:
                raise
            return False
        return not have_equal_content(mine, its, self.shards)

    def count_as_used(self, names: Iterable[str]) -> None:
        self._used.update(names)

    @cached_property
    def needed(self) -> list[str]:
        """The saved tensors that this rank has to use, in the order of the old shards.

        With pipeline stages, another rank may use them. Ranks without declared stages may be stages
        too, but a single rank has the whole model.
        """
        if self._mesh.has_stages:
            return []
        common = self.index.common_names
        if self._mesh.size > 1:
            return common
        # An old rank may have further tensors in its objects and in its optimizer.
        further = {name for rank in self._parts for name in self._referred(rank)}
        further.difference_update(common)
        return [name for name in self.index.names if name not in further]

    def close(self) -> None:
        self._parts.clear()
        self.shards.close()

    # --- details -----------------------------------------------------------------------------

    def _mesh_before(self) -> Mesh:
        parts = self._parts[Rank(0)]
        if "layout" in parts:
            return read_carried(plain.decode(parts["layout"])).mesh
        return ranks_alone(len(self._parts))

    @cached_property
    def _shares(self) -> DataShares:
        def part(rank: int, name: str) -> Any:
            return self._decode(Rank(rank), name)

        return DataShares(self._before, self._mesh, self._rank, part)

    @cached_property
    def _merges(self) -> dict[str, Callable[[], Any]]:
        """Makes parts from those of all ranks, because pipeline stages have other modules."""
        return {
            "frozen": self._frozen,
            "modules": self._modules,
            "training": self._training,
            "learned_others": self._learned_others,
            "gradients": self._gradients,
        }

    def _frozen(self) -> list[str]:
        return sorted({one for names in self._different("frozen") for one in names})

    def _training(self) -> dict[str, bool]:
        flags = (
            (self._decode(rank, "training"), modules_with(self.shards.headers[rank].entries))
            for rank in self._with_other("training", "groups")
        )
        # The script sets the mode of a whole model, because another layout may need another mode.
        roots = self._modules()["names"]
        return {path: flag for path, flag in merged(flags).items() if path not in roots}

    def _learned_others(self) -> list[str]:
        ranks = self._with_other("learned_others", "groups")
        names = (dict.fromkeys(self._decode(rank, "learned_others")) for rank in ranks)
        held = (self.shards.headers[rank].entries for rank in ranks)
        return list(merged(zip(names, held, strict=True)))

    def _gradients(self) -> dict[str, Any]:
        saved = [
            (self._decode(rank, "gradients"), parameters_of(self._decode(rank, "groups")))
            for rank in self._with_other("gradients", "groups")
        ]
        return gradients_merged(saved, set(self._frozen()))

    def _by_module(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for rank in self._with_other(name):
            # Tensors are copied only if the rank has further modules.
            if plain.decode(self._parts[rank][name]).keys() - found.keys():
                found = {**self._decode(rank, name), **found}
        return found

    def _modules(self) -> dict[str, Any]:
        """The part `modules`, with the buffers and strides of all ranks (stages have others)."""
        own, *_ = every = [self._decode(self._own, "modules"), *self._different("modules")]
        for key in ("buffers", "no_buffers"):
            own[key] = list(dict.fromkeys(name for one in every for name in one.get(key, ())))
        strides = [one.get("strides", {}) for one in reversed(every)]
        own["strides"] = {name: stride for one in strides for name, stride in one.items()}
        return dict(own)

    def _decode(self, rank: Rank, name: str) -> Any:
        return plain.decode(self._parts[rank][name], deref=lambda ref: self.copy(rank, ref))

    def _with_other(self, *names: str) -> list[Rank]:
        """This rank's old rank, and one rank for each other content of these parts."""
        found: dict[tuple[bytes, ...], Rank] = {}
        for rank in self.ranks:
            if all(name in self._parts[rank] for name in names):
                found.setdefault(tuple(self._parts[rank][name] for name in names), rank)
        return list(found.values())

    def _referred(self, rank: Rank, but: str = "") -> set[str]:
        """Names of the tensors that plain values refer to, in all parts except one."""
        parts = (part for name, part in self._parts[rank].items() if name != but)
        return {ref.name for part in parts for ref in refs_in(plain.decode(part))}

    def _different(self, name: str) -> list[Any]:
        """The different values of a part on all old ranks, each once; that of rank 0 first."""
        found: dict[bytes, Rank] = {}
        for rank, parts in self._parts.items():
            found.setdefault(parts[name], rank)
        return [self._decode(rank, name) for rank in found.values()]

    def _check_agreement(self) -> None:
        self._differing: dict[str, StateDifference] = {}
        for name, words in (_MUST_AGREE | _SHOULD_AGREE).items():
            found = self._first_difference(name, words)
            if found is None:
                continue
            rank, where = found
            if name in _MUST_AGREE:
                values = (where.one, where.other)
                raise RanksDiffer(key=where.path, ranks=(0, rank), values=values)
            self._differing[name] = where
        self._check_frozen()

    def _check_frozen(self) -> None:
        first = set(self._decode(Rank(0), "frozen"))
        for rank, parts in self._parts.items():
            if parts["frozen"] == self._parts[Rank(0)]["frozen"]:
                continue
            for name in sorted(first ^ set(self._decode(rank, "frozen"))):
                if all(name in self.shards.headers[one].entries for one in (Rank(0), rank)):
                    values = ("frozen", "learned") if name in first else ("learned", "frozen")
                    raise RanksDiffer(key=name, ranks=(0, rank), values=values)

    def _first_difference(self, name: str, words: str) -> tuple[Rank, StateDifference] | None:
        if not any(name in parts for parts in self._parts.values()):
            return None
        tree, has_tensors = self._compared(Rank(0), name)
        for rank, parts in self._parts.items():
            if parts.get(name) != self._parts[Rank(0)].get(name) or has_tensors:
                other, _ = self._compared(rank, name)
                mine = tree
                if name in _BY_MODULE:  # stages have other modules
                    mine = {path: tree[path] for path in tree if path in other}
                    other = {path: other[path] for path in mine}
                if (found := difference(mine, other, words)) is not None:
                    return rank, found
        return None

    def _compared(self, rank: Rank, name: str) -> tuple[Any, bool]:
        refs: list[TensorRef] = []

        def deref(ref: TensorRef) -> TensorContent:
            refs.append(ref)
            entry = self.shards.headers[rank].entries[ref.name]
            raw = self.shards.read(rank, entry.offset, entry.num_bytes)
            return TensorContent(str(entry), xxhash.xxh3_64_intdigest(raw))

        packed = self._parts[rank].get(name)
        tree = {} if packed is None else plain.decode(packed, deref=deref)
        if name == "groups":
            tree = {
                one: [{**group, "params": None} for group in groups] for one, groups in tree.items()
            }
        return tree, bool(refs)


def _check_ranks(images: CheckedShards, previous_size: int) -> None:
    missing = [rank for rank in range(previous_size) if rank not in images.headers]
    if missing or len(images.headers) != previous_size:
        shown = ", ".join(map(str, missing[:8]))
        raise LayoutUnknown(
            f"{len(images.headers)} shards are here, and {previous_size} ranks took the snapshot: "
            f"rank {shown or '?'} is missing"
        )
