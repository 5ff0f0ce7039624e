"""Reads a checkpoint as one state, for any number of ranks that wrote it. Loads no torch.

Tensors are read in any thread, and all bytes are compared with their digests. A tensor is read in
parts of some megabytes: each is gathered from all chunks that overlap it. Memory therefore does not
depend on the size of a tensor, nor on its sharding.

Rule 1: State of an optimizer and sharded state has one content in the world. If ranks differ in it,
        there is no whole tensor, and nothing is exported.
Rule 2: Buffers and objects that no optimizer owns belong to each rank. Those of rank 0 are
        exported, and a note names those that differ on another rank.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any

import numpy as np

from ftrun.cli.screen.text import count, listed
from ftrun.errors import CheckpointError, RanksDiffer, SnapshotCorrupt, TensorIncomplete
from ftrun.ids import Rank
from ftrun.sharding.partition import StoredRegion
from ftrun.sharding.replica_check import difference, unequal_holder
from ftrun.sharding.source_index import BoxCopy, Chunk, Holder, SourceIndex, WholeTensor, gathered
from ftrun.snapshot import plain_values as plain
from ftrun.snapshot.boxes import Box, cut_to, strides_of, whole
from ftrun.snapshot.layout import ITEM_BYTES, PLAIN_NAME
from ftrun.snapshot.plain_values import refs_in
from ftrun.tools.export.selection import ExportOutline, NameFilter, outline_of
from ftrun.worker.reshard.source import CheckedShards, DiskImages

PART_BYTES = 8 << 20
"""Size of a part; the pieces at its ends are read twice, so that it must not be small."""

FIRST = Rank(0)
_OBJECTS = {"stateful": "", "dicts": "", "extra_state": "", "session": "session"}
_SHOWN = 3


class ExportSource:
    """One checkpoint.

    Raises:
        CheckpointError: its plain values are damaged, or no session of `ftrun.attach` saved it.
        LayoutUnknown: an older ftrun wrote it, without the regions of tensor parts.
    """

    def __init__(self, images: DiskImages) -> None:
        self.images = images
        self.notes: list[str] = []
        self._headers = images.headers()
        self._index = SourceIndex(self._headers, prefer=FIRST)
        self._reader = WholeTensorReader(images, self.note)
        self._parts = {rank: self._plain_of(rank) for rank in sorted(self._headers)}
        if not all("optimizer_state" in parts for parts in self._parts.values()):
            raise CheckpointError(
                "it was saved by ftrun.dcp, not by a session of ftrun.attach, and cannot be "
                "exported: resume a run from it, where dcp.load with ftrun.dcp.Reader() loads it "
                "into any layout and dcp.save to a folder writes torch's own files"
            )

    def note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def outline(self, choice: NameFilter, *, is_whole: bool) -> ExportOutline:
        """Returns the selected state; `is_whole`: more than the tensors of modules is exported."""
        parts = dict(self._first)
        if (differing := self._differing("groups", "parameter groups")) is not None:
            self.note(f"optimizers are left out: {differing}")
            parts["groups"] = {}
        for name, words in _OBJECTS.items() if is_whole else ():
            if (differing := self._differing(name, words)) is not None:
                self.note(f"{differing}; that of rank 0 is exported")
        return outline_of(parts, self._optimizer_states, self._held, choice)

    def whole(self, name: str) -> WholeTensor:
        """Returns a tensor; raises a CheckpointError if parts are missing or differ."""
        try:
            found = self._index.tensor(name)
            assert found is not None, name
            found.check_is_whole()
        except TensorIncomplete as error:
            raise CheckpointError(
                f"{name} of shape {list(error.shape)} cannot be exported: no rank saved "
                f"{error.hole} as a block of it. Leave it out with --only"
            ) from error
        except RanksDiffer as error:
            raise _no_one_tensor(name, error.ranks, " and ".join(error.values)) from error
        for chunk in found.chunks:
            other = self._other_content(name, chunk)
            if other is not None and found.is_shared:
                ranks = (chunk.holders[0].rank, other.rank)
                raise _no_one_tensor(name, ranks, "tensors of different content")
            if other is not None:
                self.note(f"{name} differs between ranks; that of rank 0 is exported")
        return found

    @cached_property
    def left_out(self) -> list[str]:
        """State that no format can contain, because it belongs to a rank or is not in tensors."""
        generators = ", ".join(["", *self._first["generators"]])
        found = [f"random states of {count(len(self._parts), 'rank')}{generators}"]
        found += [f"position of {name}" for name in self._first["loaders"]]
        found += [
            f"bytes of the state provider {name}" for name in self._first.get("providers", ())
        ]
        if frozen := self._first["frozen"]:
            found.append(f"frozen parameters: {listed(frozen, _SHOWN)}")
        return found

    def _plain_of(self, rank: Rank) -> dict[str, bytes]:
        entry = self._headers[rank].entries[PLAIN_NAME]
        raw = self._reader.held("plain values", Holder(rank, entry))
        length = int.from_bytes(raw[:8], "little")
        found: dict[str, bytes] = plain.decode(raw[8 : 8 + length])
        return found

    @cached_property
    def _first(self) -> dict[str, Any]:
        """The plain values of rank 0, with references in place of tensors."""
        return {name: plain.decode(raw) for name, raw in self._parts[FIRST].items()}

    def _each(self, name: str) -> Iterator[tuple[Rank, Any]]:
        """Yields one part of the plain values: of rank 0, and of each rank that differs."""
        seen: set[bytes] = set()
        for rank, parts in self._parts.items():
            if name in parts and parts[name] not in seen:
                seen.add(parts[name])
                yield rank, plain.decode(parts[name])

    def _differing(self, name: str, words: str) -> str | None:
        (_, first), *others = self._each(name)
        for rank, other in others:
            if (found := difference(first, other, words)) is not None:
                path = found.path.lstrip(".")
                return f"{path} is {found.one} on rank 0 and {found.other} on rank {rank}"
        return None

    @cached_property
    def _optimizer_states(self) -> Mapping[str, dict[Any, Any]]:
        """The state of every parameter; a rank may lack those that another rank steps."""
        found: dict[str, dict[Any, Any]] = {}
        for _, optimizers in self._each("optimizer_state"):
            for name, saved in optimizers.items():
                found[name] = {**saved["state"], **found.get(name, {})}
        return found

    @cached_property
    def _held(self) -> list[str]:
        """Tensors without a reference: of modules, and attached tensors."""
        names = {name for parts in self._parts.values() for name in parts}
        trees = (tree for name in names for _, tree in self._each(name))
        referred = {ref.name for tree in trees for ref in refs_in(tree)}
        return [name for name in self._index.names if name not in referred]

    def _other_content(self, name: str, chunk: Chunk) -> Holder | None:
        """Returns a rank whose content of a chunk differs from that of its first holder."""
        first, other = chunk.holders[0], unequal_holder(chunk, self._headers)
        if other is None or not first.entry.is_small:
            return other
        # A small entry is hashed with its neighbours, which may be the difference.
        held = self._reader.held
        return other if held(name, first) != held(name, other) else None


def _no_one_tensor(name: str, ranks: tuple[int, int], values: str) -> CheckpointError:
    return CheckpointError(
        f"{name} cannot be exported: ranks {ranks[0]} and {ranks[1]} have {values} under this "
        "name. Leave it out with --only, or shard it as a DTensor"
    )


class WholeTensorReader:
    """Reads tensors of one checkpoint; one for each thread, because it caches what it read last.

    `note` is called for a damaged file, if the copy of another rank is read instead.
    """

    def __init__(
        self, images: DiskImages, note: Callable[[str], object], part_bytes: int = PART_BYTES
    ) -> None:
        self._files = images
        self._images = CheckedShards(images, "the checkpoint")
        self._note = note
        self._part_bytes = part_bytes

    def parts(self, tensor: WholeTensor) -> Iterator[memoryview]:
        """Yields the bytes in order; CheckpointError: no rank has an undamaged copy of a piece."""
        if 0 in tensor.shape:
            return
        most_items = self._part_bytes // ITEM_BYTES[tensor.dtype]
        for box in cut_to(whole(tensor.shape), strides_of(tensor.shape), most_items):
            yield self._gathered(tensor, box)

    def everything(self, tensor: WholeTensor) -> bytearray:
        found = bytearray()
        for part in self.parts(tensor):
            found += part
        return found

    def held(self, name: str, holder: Holder) -> memoryview:
        entry = holder.entry
        return self._read(name, holder, entry.offset, entry.num_bytes)

    def _gathered(self, tensor: WholeTensor, box: Box) -> memoryview:
        """Returns the items of a box of the whole tensor, row by row."""
        copies = tensor.copies_into(StoredRegion(tensor.name, box, 0, strides_of(box.shape)))
        read = partial(self._first_good, tensor.name)
        if len(copies) == 1 and copies[0].span == box.num_items:
            return read(copies[0])  # one contiguous run
        made = gathered(copies, box.num_items, ITEM_BYTES[tensor.dtype], read)
        return made.view(np.uint8).data

    def _first_good(self, name: str, copy: BoxCopy) -> memoryview:
        """Returns bytes of a copy from the first holder whose file is not damaged there."""
        first: CheckpointError | None = None
        for holder in copy.holders:
            one = copy.bytes_in(holder)
            try:
                found = self._read(name, holder, one.offset, one.num_bytes)
            except CheckpointError as error:
                first = first or error
                continue
            if first is not None:
                self._note(f"{first}; {self._files.path_of(holder.rank)} has a whole copy")
            return found
        assert first is not None
        raise first

    def _read(self, name: str, holder: Holder, at: int, num_bytes: int) -> memoryview:
        try:
            return self._images.read(holder.rank, at, num_bytes)
        except SnapshotCorrupt as error:
            pieces = len(self._images.headers[holder.rank].digests)
            raise CheckpointError(
                f"{self._files.path_of(holder.rank, error.piece)} is damaged: piece {error.piece} "
                f"of {pieces}, which has {name}, differs from its digest"
            ) from error
