"""Reduces the state of a rank to its share of the replicas, once the SMP has decided so.

Runs in:  worker: the training thread; the thread that copies computes the digests.
Takes in: the state of a boundary; the number of the decision on the command page; the members of
          the restored shard.
Gives:    the state with this rank's rows of each shared tensor; for each seal a digest of one part
          of all shared bytes, this rank's own and those of the other members, and of samples of all
          of them.
Survives: the SMP: this rank continues with the members that it knows.

Rule 1: the members are valid for one key only. If the tensors change, the rank stores whole
        tensors until the SMP has compared the new ones.
Rule 2: the bytes of a check are read while no optimizer may step, like a lazy copy, and the check
        of the copy covers their tensors. A tensor that is copied at the boundary may change later,
        so its bytes are left out, and each rank stores it whole.
Rule 3: a rank that stores whole tensors states a digest too, if others may share theirs with it.
        They rely on its rows, although it is not in a group by its own knowledge.
Rule 4: tensors of devices are hashed by sums that the device computes in the stream of the copies.
        All shared tensors are on one device of the rank, or all are in main memory.
Rule 5: if there is no answer, no memory for shares next to the whole tensors, or an error in this
        module, the rank stores whole tensors. Without its check the SMP discards a version of
        shares, and ends the sharing if that happens twice in a row.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
import xxhash

from ftrun.errors import PeerError
from ftrun.ids import Rank
from ftrun.snapshot.replica_shares import (
    NO_PART,
    NUM_PHASES,
    Group,
    ReplicaCheck,
    is_shareable,
    key_of,
    part_of,
    shares_of,
)
from ftrun.wire.shared_memory.pages import CommandField
from ftrun.worker.capture.copying import names_at_boundary
from ftrun.worker.capture.device_copies import device_at
from ftrun.worker.capture.device_sources import DeviceCopies, SumChunk, slices
from ftrun.worker.capture.lazy_check import LINE_BYTES, bits_of, line_of, rows_of
from ftrun.worker.context import WorkerContext
from ftrun.worker.smp_client import WorkerSmpClient
from ftrun.worker.state.state_tree import BoundaryState, PersistentSources, TensorSource
from ftrun.worker.state.tensors import byte_view, copyable

BLOCK_BYTES = 1 << 20
"""Largest block of a part."""

DEVICE_BLOCK_BYTES = 1 << 25
"""The same on a device, where each block costs about ten kernels."""

_log = logging.getLogger(__name__)

_GOLDEN = 0.6180339887498949
"""The golden ratio minus 1. The fractional parts of its multiples are spread evenly over [0, 1)."""


class ReplicaShares:
    """The shares of one rank.

    `restored`: members of the restored shard; empty if it held whole tensors. Sharing is allowed if
    the script has declared no layout, because its rules describe whole tensors.
    """

    def __init__(
        self,
        context: WorkerContext,
        link: WorkerSmpClient,
        *,
        restored: Group = (),
        is_allowed: bool = True,
    ) -> None:
        self._rank = context.rank
        self._commands = context.commands
        self._link = link
        self._restored = restored
        self._is_allowed = is_allowed and context.settings.share_replicas
        self._members: Group = ()
        self._key = 0
        """Key of the tensors that the members share."""
        self._decision = 0
        """Number of the last decision that this rank has requested."""
        self._has_memory = True
        self._present: tuple[PersistentSources, int] | None = None
        """The sources of the last boundary, and their key."""
        self._cut: _Cut | None = None

    def cut(self, state: BoundaryState, at_boundary: Collection[str]) -> BoundaryState:
        """The part of a state of whole tensors that this rank stores.

        `at_boundary`: names of tensors of optimizers that are copied at the boundary.
        """
        try:
            return replace(state, persistent=self._stored(state.persistent, at_boundary))
        except Exception:  # noqa: BLE001 - rule 5
            _log.warning("rank %d: replicas are not shared", self._rank, exc_info=True)
            self._is_allowed, self._cut = False, None
            return state

    def _stored(
        self, persistent: PersistentSources, at_boundary: Collection[str]
    ) -> PersistentSources:
        self._update(persistent)
        key = self._key_of(persistent)
        is_shared = self._commands.get(CommandField.REPLICA_SHARES) > 0
        if not (key and self._is_allowed and is_shared):
            self._cut = None
            return persistent
        made_for = (self._members, key, len(at_boundary))
        if self._cut is None or not self._cut.is_of(persistent, made_for):
            left_out = names_at_boundary(persistent.sources, at_boundary)
            self._cut = _Cut(persistent, made_for, self._rank, left_out)
        return self._cut.stored

    def check(self, on_devices: DeviceCopies) -> Callable[[], ReplicaCheck | None]:
        """Return the function that hashes one part of the shared bytes of this boundary.

        It is called after the copy, and `on_devices` reads what it needs of a device.
        Its result is None if no ranks of this node share their replicas. All ranks that take a
        snapshot know the same last commit, so they hash the same part.
        """
        if self._cut is None:
            return lambda: None
        count = self._commands.get(CommandField.COMMIT_COUNT)
        part = part_of(count % NUM_PHASES, self._cut.left_out)
        digest = self._cut.checked.begin(count, on_devices)
        return partial(self._stated, [int(one) for one in self._members], part, digest)

    def _stated(
        self, members: list[int], part: int, digest: Callable[[], int] | None
    ) -> ReplicaCheck:
        try:
            if digest is not None:
                return ReplicaCheck(members, part, digest())
        except Exception:  # noqa: BLE001 - rule 5
            _log.warning("rank %d: replicas cannot be hashed", self._rank, exc_info=True)
        return ReplicaCheck(members, NO_PART, 0)

    def keep_whole(self) -> bool:
        """Store whole tensors from now on; return whether this rank has stored shares."""
        has_shared, self._members = bool(self._members), ()
        self._has_memory = False
        return has_shared

    def _update(self, persistent: PersistentSources) -> None:
        decision = self._commands.get(CommandField.REPLICA_SHARES)
        if decision < 0 or not self._is_allowed:
            self._members = self._restored = ()
            self._decision = 0
            return
        key = self._key_of(persistent)
        if self._members and self._key != key:
            self._members = ()  # Rule 1
        restored, self._restored = self._restored, ()
        if not key or (not restored and decision == self._decision):
            return
        if (restored or decision) and self._has_memory:
            try:
                self._members = self._link.request_shares(key, restored)
            except PeerError:  # the members that it knows stay valid, and it asks again
                return
        else:
            self._members = ()
        # A request for the restored members may have made a decision.
        self._decision = self._commands.get(CommandField.REPLICA_SHARES) if restored else decision
        self._key = key

    def _key_of(self, persistent: PersistentSources) -> int:
        if self._present is None or self._present[0] is not persistent:
            key = key_of(persistent.entries)
            self._present = (persistent, key if _are_together(persistent) else 0)
        return self._present[1]


def _are_together(persistent: PersistentSources) -> bool:
    """Whether all that can be shared is in main memory, or on one device that has streams."""
    shared = (source for source in persistent.sources if is_shareable(source.entry))
    devices = {source.tensor.device for source in shared}
    return len(devices) == 1 and all(one.type == "cpu" or device_at(one) for one in devices)


class _Cut:
    """What a rank stores of its sources, and the check of what others may rely on.

    `members` are empty if it stores whole tensors.
    """

    def __init__(
        self,
        whole: PersistentSources,
        made_for: tuple[Group, int, int],
        rank: int,
        at_boundary: Collection[str],
    ) -> None:
        self._whole = whole
        self._made_for = made_for
        members, key, _ = made_for
        shared = [one for one in whole.sources if is_shareable(one.entry)]
        self.left_out = {one.name for one in shared if one.name in at_boundary}
        self.checked = CheckedReplicas([s for s in shared if s.name not in self.left_out], key)
        self.stored = whole
        if members:
            self.stored = shares_of_rank(whole, members, rank, self.left_out)

    def is_of(self, whole: PersistentSources, made_for: tuple[Group, int, int]) -> bool:
        return whole is self._whole and made_for == self._made_for


def shares_of_rank(
    persistent: PersistentSources, members: Group, rank: int, left_out: Collection[str] = ()
) -> PersistentSources:
    rows = shares_of(persistent.entries, len(members))[members.index(Rank(rank))]

    def share(source: TensorSource) -> TensorSource:
        own = rows.get(source.name)
        if own is None or source.name in left_out:
            return source
        tensor = source.tensor.narrow(own.dim, own.first, own.count)
        return replace(source, tensor=tensor, part=own.of(source.entry).part)

    return replace(persistent, sources=tuple(map(share, persistent.sources)), members=members)


class CheckedReplicas:
    """The bytes of all shared tensors, in blocks, and samples of each 64 KiB."""

    def __init__(self, shared: Sequence[TensorSource], key: int) -> None:
        self._key = key.to_bytes(8, "little")
        tensors = [copyable(one.tensor) for one in sorted(shared, key=lambda one: one.name)]
        self._device = tensors[0].device if tensors else torch.device("cpu")
        most_bytes = BLOCK_BYTES if self._device.type == "cpu" else DEVICE_BLOCK_BYTES
        self._blocks = [block for tensor in tensors for block in slices(tensor, most_bytes)]
        self._rows = [rows_of(_dense(one)) for one in tensors if _has_lines(one)]
        sampled: dict[int, list[torch.Tensor]] = {}
        for one in tensors:
            if not one.is_cpu:
                sampled.setdefault(one.itemsize, []).append(bits_of(_dense(one)))
        self._sampled = list(sampled.values())

    def begin(self, count: int, on_devices: DeviceCopies) -> Callable[[], int] | None:
        """Return the function that returns the digest of one part; None if it cannot be read.

        On a device, the copies that begin now read the part. `count`: number of commits, which
        determines the part and the lines.
        """
        blocks = self._blocks[count % NUM_PHASES :: NUM_PHASES]
        where = count * _GOLDEN % 1.0
        if self._device.type == "cpu":
            lines = (line_of(rows, where).tobytes() for rows in self._rows)
            parts = (byte_view(b.contiguous()).numpy().data for b in blocks)
            return partial(self._digest, chain(lines, parts))
        arrived: list[bytes] = []
        take = lambda content: arrived.append(content.tobytes())  # noqa: E731
        chunk = SumChunk(blocks, (), self._sampled, where)
        if not on_devices.read_sums(self._device, chunk, take):
            return None
        return partial(self._digest_of_sums, arrived)

    def _digest_of_sums(self, arrived: Sequence[bytes]) -> int:
        if not arrived:
            raise RuntimeError("the sums of the device have not arrived")
        return self._digest(arrived)

    def _digest(self, parts: Iterable[bytes | memoryview]) -> int:
        found = xxhash.xxh3_64(self._key)
        for part in parts:
            found.update(part)
        return found.intdigest()


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The same items in the order of the memory."""
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


def _has_lines(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.nbytes >= LINE_BYTES and _dense(tensor).is_contiguous()
