"""A version as all ranks of another world have saved it: its plain values, and its tensors.

Runs in:  worker, training thread, inside `attach`; no collective.
Takes in: where the shards are, the rank and the size of the new world.
Gives:    one state: what all ranks have alike once, what each has for itself by rank.

Rule 1: parameter groups, step and epoch must be alike on all old ranks. Where they are not there
        is no one state to go on from, and nothing is restored.
Rule 2: other objects (scheduler, scaler, dicts) are alike by nature. Those that are not are taken
        from one old rank, and the log says so.
"""

from functools import cached_property
from typing import Any

import torch
import xxhash

from ftrun.errors import LayoutUnknown, RanksDiffer, ShapeChanged
from ftrun.ids import Rank, Version
from ftrun.snapshot import plain, regroup
from ftrun.snapshot.agreement import Difference, TensorContent, difference
from ftrun.snapshot.layout import PLAIN_NAME
from ftrun.snapshot.plain import TensorRef
from ftrun.snapshot.regroup import Resize, ranks
from ftrun.snapshot.world_index import WholeTensor, WorldIndex
from ftrun.worker import rng
from ftrun.worker.attached import Attached
from ftrun.worker.image_source import CheckedImages, ImageSource
from ftrun.worker.tensors import DTYPES
from ftrun.worker.world_reader import readable

_MUST_AGREE = {"session": "session", "groups": "parameter groups", "frozen": "frozen parameters"}
_SHOULD_AGREE = {"stateful": "schedulers and scalers", "dicts": "dicts", "extra_state": "modules"}


class SavedWorld:
    """One version, in the shards of `resize.old_size` ranks.

    Args:
        source: of the shards; closed by `close`, or here where this fails.
        wanted: the version.
        resize: whose part is wanted.

    Raises:
        SnapshotError, PeerError: it is not all there, or not what was sealed, or not one state.
    """

    def __init__(self, source: ImageSource, wanted: Version, resize: Resize) -> None:
        self.version = wanted
        self.resize = resize
        self._used: set[str] = set()
        try:
            self.images = CheckedImages(source, str(wanted))
            _check_ranks(self.images, resize)
            self.index = WorldIndex(self.images.heads, prefer=Rank(resize.old_rank))
            self._parts = {rank: self._plain_of(rank) for rank in sorted(self.images.heads)}
            self._check_agreement()
        except BaseException:
            source.close()
            raise

    @property
    def ranks(self) -> list[Rank]:
        """Old ranks; first the one whose own state this rank takes over."""
        own = Rank(self.resize.old_rank)
        return [own, *(rank for rank in self._parts if rank != own)]

    # --- plain values ------------------------------------------------------------------------

    def part(self, name: str) -> Any:
        """A part of the plain values, as this rank is to have it; its tensors are copies."""
        if name == "loaders":
            return {key: regroup.loader(found, self.resize) for key, found in self._loaders.items()}
        return self._decode(self.ranks[0] if name in self._differing else Rank(0), name)

    def optimizer_state(self, rank: Rank) -> Any:
        """What an old rank has of optimizers, with references in place of tensors."""
        return plain.decode(self._parts[rank]["optimizer_state"])

    def put_back_random_states(self, attached: Attached) -> None:
        """As at the restore point; for a rank that was not there, what follows from it."""
        saved = [self._decode(rank, "generators") for rank in self._parts]
        for name, state in regroup.generators(saved, self.resize).items():
            generator = attached.generators.get(name)
            if generator is not None:
                rng.set_generator(generator, state)
        taken = [self._decode(rank, "rng") for rank in self._parts]
        rng.put_back(regroup.streams(taken, self.resize))

    def notes(self) -> list[str]:
        """What is not as in a world of the same size: a line for the log each."""
        resize = self.resize
        old = resize.old_size
        found = [
            f"not bitwise: {self.version} was taken by {ranks(old)} and goes on in {resize.size}; "
            "parameters and optimizer state are those of that step, what comes after adds up in "
            "another order",
            f"buffers that no optimizer owns: rank r has those of old rank r mod {old}",
        ]
        notes = (regroup.loader_note(n, states, resize) for n, states in self._loaders.items())
        found += [note for note in notes if note is not None]
        found += [
            f"{one.path} is {one.one} on old rank 0 and {one.other} elsewhere: rank r has what old "
            f"rank r mod {old} had of {_SHOULD_AGREE[name]}"
            for name, one in self._differing.items()
        ]
        if resize.size > old:
            found.append(
                f"of {ranks(resize.size)} only {old} had a counterpart: the random numbers of the "
                "others follow from an old rank's and from their own number"
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
        return copied.numpy() if ref.kind == "array" else copied

    def check_all_used(self) -> None:
        """Nothing that every old rank has saved has been left behind.

        Raises:
            ShapeChanged: names the first tensor that nobody wanted.
        """
        own = self.ranks[0]
        for name in self._parts[own].keys() - {"optimizer_state"}:
            self._decode(own, name)  # what plain values refer to counts as used
        for name in self.index.common_names:
            if name not in self._used:
                saved = str(self.index.tensor(name))
                raise ShapeChanged(key=name, saved=saved, present="nothing")

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

    @cached_property
    def _loaders(self) -> dict[str, list[Any]]:
        """The states of each loader, by old rank."""
        saved = [self._decode(rank, "loaders") for rank in self._parts]
        own = saved[self.resize.old_rank]
        return {name: [states.get(name, own[name]) for states in saved] for name in own}

    def _decode(self, rank: Rank, name: str) -> Any:
        return plain.decode(self._parts[rank][name], deref=lambda ref: self.copy(rank, ref))

    def _check_agreement(self) -> None:
        self._differing: dict[str, Difference] = {}
        for name, words in (_MUST_AGREE | _SHOULD_AGREE).items():
            found = self._first_difference(name, words)
            if found is None:
                continue
            rank, where = found
            if name in _MUST_AGREE:
                values = (where.one, where.other)
                raise RanksDiffer(key=where.path, ranks=(0, rank), values=values)
            self._differing[name] = where

    def _first_difference(self, name: str, words: str) -> tuple[Rank, Difference] | None:
        """The first old rank whose part is not that of rank 0, and how it differs."""
        tree, has_tensors = self._compared(Rank(0), name)
        for rank, parts in self._parts.items():
            if parts[name] != self._parts[Rank(0)][name] or has_tensors:
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

        return plain.decode(self._parts[rank][name], deref=deref), bool(refs)


def _check_ranks(images: CheckedImages, resize: Resize) -> None:
    missing = [rank for rank in range(resize.old_size) if rank not in images.heads]
    if missing or len(images.heads) != resize.old_size:
        shown = ", ".join(map(str, missing[:8]))
        raise LayoutUnknown(
            f"{len(images.heads)} shards are here, and {resize.old_size} ranks took the snapshot: "
            f"rank {shown or '?'} is missing"
        )
