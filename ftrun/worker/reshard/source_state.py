"""A version as all ranks of another world have saved it: its plain values, and its tensors.

Runs in:  worker, training thread, inside `attach`; no collective.
Takes in: where the shards are, the rank and the size of the new world.
Gives:    one state: what all ranks have alike once, what each has for itself by rank.

Rule 1: step, epoch and parameter groups must be alike on all old ranks, but for the parameters in
        the groups: stages of a pipeline have others. Where they are not there is no one state to
        go on from, and nothing is restored.
Rule 2: other objects (scheduler, scaler, dicts) are alike by nature. Those that are not are taken
        from one old rank, and the log says so.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import xxhash

from ftrun.errors import LayoutUnknown, RanksDiffer
from ftrun.ids import Rank, Version
from ftrun.sharding.mesh import Mesh, ranks_alone
from ftrun.sharding.rule_parser import read_carried
from ftrun.sharding.source_index import SourceIndex, WholeTensor
from ftrun.snapshot import plain_values as plain
from ftrun.snapshot import regroup
from ftrun.snapshot.agreement import StateDifference, TensorContent, difference
from ftrun.snapshot.layout import PLAIN_NAME
from ftrun.snapshot.plain_values import TensorRef
from ftrun.snapshot.regroup import WorldResize, ranks
from ftrun.worker.reshard.source import CheckedShards, ShardSource
from ftrun.worker.reshard.tensor_reader import readable
from ftrun.worker.restore import ready_memory
from ftrun.worker.restore.shard import check_used
from ftrun.worker.state import determinism as rng
from ftrun.worker.state.attached import AttachedState
from ftrun.worker.state.tensors import DTYPES, at_home

_MUST_AGREE = {"session": "session", "groups": "parameter groups"}
_SHOULD_AGREE = {
    "stateful": "schedulers and scalers",
    "dicts": "dicts",
    "extra_state": "modules",
    "own_keys": "modules",
}
_OWN = frozenset({"gradients", "learned_others"})
"""Parts that name tensors: a rank takes those of its counterpart."""


@dataclass(frozen=True, slots=True)
class NewRank:
    """A rank of the new world, and the mesh of all its ranks."""

    rank: Rank
    mesh: Mesh


class SourceState:
    """One version, in the shards of all ranks that took it.

    Args:
        source: of the shards; closed by `close`, or here where this fails.
        wanted: the version.
        old_size: so many ranks took it.
        seat: whose part is wanted.

    Raises:
        SnapshotError, PeerError: it is not all there, or not what was sealed, or not one state.
    """

    def __init__(self, source: ShardSource, wanted: Version, old_size: int, seat: NewRank) -> None:
        self.version = wanted
        self._seat = seat
        self._used: set[str] = set()
        try:
            self.images = CheckedShards(source, str(wanted))
            _check_ranks(self.images, old_size)
            self._parts = {rank: self._plain_of(rank) for rank in sorted(self.images.heads)}
            self._before = self._mesh_before()
            self._own = Rank(self._before.counterpart(seat.mesh, seat.rank))
            self.index = SourceIndex(self.images.heads, prefer=self._own)
            self._check_agreement()
        except BaseException:
            source.close()
            raise

    @property
    def ranks(self) -> list[Rank]:
        """Old ranks; first the one whose own state this rank takes over."""
        return [self._own, *(rank for rank in self._parts if rank != self._own)]

    @property
    def has_stages(self) -> bool:
        """Whether this rank is one of several stages now, and leaves others their parameters."""
        return self._seat.mesh.has_stages

    # --- plain values ------------------------------------------------------------------------

    def part(self, name: str) -> Any:
        """A part of the plain values, as this rank is to have it; its tensors are copies."""
        if name == "loaders":
            return {key: self._loader(found) for key, found in self._loaders.items()}
        if name == "frozen":
            return sorted({one for names in self._different(name) for one in names})
        if name == "modules":
            return self._modules()
        if name == "training":
            # The mode of a whole model is the script's; another layout may need another one.
            roots = self._modules()["names"]
            flags = self._decode(self._own, name)
            return {path: flag for path, flag in flags.items() if path not in roots}
        is_own = name in self._differing or name in _OWN
        return self._decode(self._own if is_own else Rank(0), name)

    def optional_part(self, name: str) -> Any:
        """The same; None where an older version of ftrun has not saved it."""
        return self.part(name) if name in self._parts[self._own] else None

    def groups_among(self, present: Collection[str]) -> dict[str, list[dict[str, Any]]]:
        """Parameter groups; where ranks are stages or were, what is here now of those of all.

        Args:
            present: names of tensors that this rank has.
        """
        first, *others = every = self._different("groups")
        if not self.has_stages and all(_named(one) == _named(first) for one in others):
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
        """Names of all that old ranks had in parameter groups."""
        return frozenset(name for groups in self._different("groups") for name in _named(groups))

    def optimizer_state(self, rank: Rank) -> Any:
        """What an old rank has of optimizers, with references in place of tensors."""
        return plain.decode(self._parts[rank]["optimizer_state"])

    def put_back_random_states(self, attached: AttachedState) -> None:
        """As at the restore point; for a rank that was not there, what follows from it."""
        saved = [self._decode(rank, "generators") for rank in self._streams]
        for name, state in regroup.generators(saved, self._resize).items():
            generator = attached.generators.get(name)
            if generator is not None:
                rng.set_generator(generator, state)
        taken = [self._decode(rank, "rng") for rank in self._streams]
        rng.put_back(regroup.streams(taken, self._resize))

    def notes(self) -> list[str]:
        """What is not as in a world of the same size: a line for the log each."""
        before, now = self._before, self._seat.mesh
        found = [
            f"not bitwise: {self.version} was taken by {ranks(before.size)} ({before}) and goes on "
            f"in {now.size} ({now}); parameters and optimizer state are those of that step, what "
            "comes after adds up in another order",
            "buffers that no optimizer owns: a rank has those of the old rank of its coordinates, "
            "counted round where there were fewer",
        ]
        if self._moves:
            loaders = self._loaders.items()
            notes = (regroup.loader_note(name, some, self._resize) for name, some in loaders)
            found += [note for note in notes if note is not None]
        found += [
            f"{one.path} is {one.one} on old rank 0 and {one.other} elsewhere: a rank has what the "
            f"old rank of its coordinates had of {_SHOULD_AGREE[name]}"
            for name, one in self._differing.items()
        ]
        if now.num_batches > before.num_batches:
            found.append(
                f"{now.num_batches} ranks see data of their own, and {before.num_batches} did: the "
                "random numbers of the others follow from an old rank's and from their own number"
            )
        return found

    # --- tensors -----------------------------------------------------------------------------

    def whole(self, name: str) -> WholeTensor | None:
        """The tensor of this name, which counts as used from now on; None where there is none.

        Raises:
            RanksDiffer, TensorIncomplete: it cannot be put together.
        """
        found = self.index.tensor(name)
        self._used.add(name)
        if found is not None:
            found.check_is_whole()
        return found

    def copy(self, rank: Rank, ref: TensorRef) -> object:
        """What an old rank had in a place of its plain values: a tensor or an array."""
        entry = self.images.heads[rank].entries[ref.name]
        self._used.add(ref.name)
        dtype = DTYPES[entry.dtype]
        raw = bytearray(self.images.read(rank, entry.offset, entry.num_bytes))
        flat = readable(memoryview(raw), dtype) if raw else torch.empty(0, dtype=dtype)
        copied = flat.view(entry.shape)
        if ref.stride:
            copied = ready_memory.empty(entry.shape, dtype, "cpu", ref.stride).copy_(copied)
        return copied.numpy() if ref.kind == "array" else at_home(copied, ref.kind)

    def check_all_used(self) -> None:
        """Nothing that every old rank has saved has been left behind.

        Raises:
            ShapeChanged: names the tensors that nobody wanted.
        """
        for name in self._parts[self._own].keys() - {"optimizer_state"}:
            self._decode(self._own, name)  # what plain values refer to counts as used
        if self.has_stages:
            return  # another stage may have it
        check_used(
            {name: str(self.index.tensor(name)) for name in self.index.common_names}, self._used
        )

    def close(self) -> None:
        """Let go of the shards."""
        self._parts.clear()
        self.images.close()

    # --- inside ------------------------------------------------------------------------------

    def _plain_of(self, rank: Rank) -> dict[str, bytes]:
        at = self.images.heads[rank].entries[PLAIN_NAME].offset
        length = int.from_bytes(self.images.read(rank, at, 8), "little")
        found: dict[str, bytes] = plain.decode(self.images.read(rank, at + 8, length))
        return found

    def _mesh_before(self) -> Mesh:
        """How the old ranks were arranged, as they have said; else each has data of its own."""
        parts = self._parts[Rank(0)]
        if "layout" in parts:
            return read_carried(plain.decode(parts["layout"])).mesh
        return ranks_alone(len(self._parts))

    @cached_property
    def _resize(self) -> WorldResize:
        """This rank among those that see data of their own."""
        now = self._seat.mesh
        index = now.batch_index(self._seat.rank)
        return WorldResize(index, self._before.num_batches, now.num_batches)

    @property
    def _moves(self) -> bool:
        """Whether another number of ranks see data of their own."""
        return self._resize.size != self._resize.old_size

    def _loader(self, states: list[Any]) -> Any:
        own = states[self._resize.old_rank]
        return regroup.loader(states, self._resize) if self._moves else own

    @cached_property
    def _streams(self) -> list[Rank]:
        """The old ranks that had data of their own, beside the one that this rank takes over."""
        return [Rank(rank) for rank in self._before.beside(self._own)]

    @cached_property
    def _loaders(self) -> dict[str, list[Any]]:
        """The states of each loader, by old rank."""
        saved = [self._decode(rank, "loaders") for rank in self._streams]
        own = saved[self._resize.old_rank]
        return {name: [states.get(name, own[name]) for states in saved] for name in own}

    def _modules(self) -> dict[str, Any]:
        """Names of buffers are those of all ranks: other stages have others."""
        own, *_ = every = [self._decode(self._own, "modules"), *self._different("modules")]
        for key in ("buffers", "no_buffers"):
            own[key] = list(dict.fromkeys(name for one in every for name in one.get(key, ())))
        strides = [one.get("strides", {}) for one in reversed(every)]
        own["strides"] = {name: stride for one in strides for name, stride in one.items()}
        return dict(own)

    def _decode(self, rank: Rank, name: str) -> Any:
        return plain.decode(self._parts[rank][name], deref=lambda ref: self.copy(rank, ref))

    def _different(self, name: str) -> list[Any]:
        """A part of all old ranks, what several have alike once; that of rank 0 first."""
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
        """What is learned on one old rank is learned on all that have it."""
        first = set(self._decode(Rank(0), "frozen"))
        for rank, parts in self._parts.items():
            if parts["frozen"] == self._parts[Rank(0)]["frozen"]:
                continue
            for name in sorted(first ^ set(self._decode(rank, "frozen"))):
                if all(name in self.images.heads[one].entries for one in (Rank(0), rank)):
                    values = ("frozen", "learned") if name in first else ("learned", "frozen")
                    raise RanksDiffer(key=name, ranks=(0, rank), values=values)

    def _first_difference(self, name: str, words: str) -> tuple[Rank, StateDifference] | None:
        """The first old rank whose part is not that of rank 0, and how it differs."""
        if not any(name in parts for parts in self._parts.values()):
            return None
        tree, has_tensors = self._compared(Rank(0), name)
        for rank, parts in self._parts.items():
            if parts.get(name) != self._parts[Rank(0)].get(name) or has_tensors:
                other, _ = self._compared(rank, name)
                if (found := difference(tree, other, words)) is not None:
                    return rank, found
        return None

    def _compared(self, rank: Rank, name: str) -> tuple[Any, bool]:
        """A part with what can be compared in place of tensors, and whether there are any."""
        refs: list[TensorRef] = []

        def deref(ref: TensorRef) -> TensorContent:
            refs.append(ref)
            entry = self.images.heads[rank].entries[ref.name]
            raw = self.images.read(rank, entry.offset, entry.num_bytes)
            return TensorContent(str(entry), xxhash.xxh3_64_intdigest(raw))

        packed = self._parts[rank].get(name)
        tree = {} if packed is None else plain.decode(packed, deref=deref)
        if name == "groups":
            tree = {
                one: [{**group, "params": None} for group in groups] for one, groups in tree.items()
            }
        return tree, bool(refs)


def _named(groups: Mapping[str, list[dict[str, Any]]]) -> set[str]:
    """The names in all parameter groups of all optimizers."""
    return {name for some in groups.values() for group in some for name in group["params"]}


def _check_ranks(images: CheckedShards, old_size: int) -> None:
    missing = [rank for rank in range(old_size) if rank not in images.heads]
    if missing or len(images.heads) != old_size:
        shown = ", ".join(map(str, missing[:8]))
        raise LayoutUnknown(
            f"{len(images.heads)} shards are here, and {old_size} ranks took the snapshot: "
            f"rank {shown or '?'} is missing"
        )
