"""Reduces the state of a rank to its share of the replicas, once the SMP has decided so.

Runs in:  worker: the training thread; the thread that copies computes the digests.
Takes in: the state of a boundary; the number of the decision on the command page; the members of
          the restored shard.
Gives:    the state with this rank's rows of each shared tensor; for each seal a digest of one part
          of all shared bytes, this rank's own and those of the other members.
Survives: the SMP: this rank continues with the members that it knows.

Rule 1: the members are valid for one key only. If the tensors change, the rank stores whole
        tensors until the SMP has compared the new ones.
Rule 2: the bytes of a check are read while no optimizer may step, like a lazy copy, and the check
        of the copy covers their tensors. A tensor that is copied at the boundary may change later,
        so its bytes are left out, and each rank stores it whole.
Rule 3: a rank that stores whole tensors states a digest too, if others may share theirs with it.
        They rely on its rows, although it is not in a group by its own knowledge.
Rule 4: tensors of devices are hashed by sums that the device computes in the stream of the copies.
        All shared tensors would be on one device. This is not in use yet (`_are_together`).
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
import xxhash

from ftrun.ids import Rank
from ftrun.snapshot.replica_shares import (
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
from ftrun.worker.capture.device_sources import DeviceCopies, OtherRead, SumChunk, slices
from ftrun.worker.context import WorkerContext
from ftrun.worker.smp_client import WorkerSmpClient
from ftrun.worker.state.state_tree import BoundaryState, PersistentSources, TensorSource
from ftrun.worker.state.tensors import byte_view

BLOCK_BYTES = 1 << 20
"""Largest block of a part."""

DEVICE_BLOCK_BYTES = 1 << 25
"""The same on a device, where each block costs about ten kernels."""


class ReplicaShares:
    """The shares of one rank.

    Args:
        restored: members of the restored shard; empty if it held whole tensors.
        is_allowed: the script has declared no layout, whose rules describe whole tensors.
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
        self._present: tuple[PersistentSources, int] | None = None
        """The sources of the last boundary, and their key."""
        self._cut: _Cut | None = None

    def cut(self, state: BoundaryState, at_boundary: Collection[str]) -> BoundaryState:
        """Return the state that this rank stores.

        Args:
            state: with whole tensors.
            at_boundary: names of tensors of optimizers that are copied at the boundary.

        Raises:
            PeerError: the SMP does not answer.
        """
        persistent = state.persistent
        self._update(persistent)
        key = self._key_of(persistent)
        if not key or self._decision <= 0:
            self._cut = None
            return state
        made_for = (self._members, key, len(at_boundary))
        if self._cut is None or not self._cut.is_of(persistent, made_for):
            left_out = names_at_boundary(persistent.sources, at_boundary)
            self._cut = _Cut(persistent, made_for, self._rank, left_out)
        return replace(state, persistent=self._cut.stored)

    def check(self, on_devices: DeviceCopies) -> Callable[[], ReplicaCheck | None]:
        """Return the function that hashes one part of the shared bytes of this boundary.

        It is called after the copy, and `on_devices` reads what it needs of a device.
        Its result is None if no ranks of this node share their replicas. All ranks that take a
        snapshot know the same last commit, so they hash the same part.
        """
        on_devices.others = ()
        if self._cut is None:
            return lambda: None
        phase = self._commands.get(CommandField.COMMIT_COUNT) % NUM_PHASES
        part = part_of(phase, self._cut.left_out)
        digest = self._cut.checked.begin(phase, on_devices)
        if digest is None:
            return lambda: None
        members, found = [int(one) for one in self._members], digest
        return lambda: ReplicaCheck(members, part, found())

    def _update(self, persistent: PersistentSources) -> None:
        decision = self._commands.get(CommandField.REPLICA_SHARES)
        if decision < 0 or not self._is_allowed:
            self._members = self._restored = ()
            self._decision = 0
            return
        key = self._key_of(persistent)
        if self._members and self._key != key:
            self._members = ()  # Rule 1
        if not key:
            return
        if self._restored:
            self._members = self._link.request_shares(key, self._restored)
            self._restored, self._key = (), key
            # The request may have made a decision.
            self._decision = self._commands.get(CommandField.REPLICA_SHARES)
        elif decision != self._decision:
            self._members = self._link.request_shares(key, ()) if decision else ()
            self._decision, self._key = decision, key

    def _key_of(self, persistent: PersistentSources) -> int:
        """The key of these sources; 0 if they cannot be shared."""
        if self._present is None or self._present[0] is not persistent:
            key = key_of(persistent.entries)
            self._present = (persistent, key if _are_together(persistent) else 0)
        return self._present[1]


def _are_together(persistent: PersistentSources) -> bool:
    """Whether all is in main memory. Replicas on devices are not shared before that is tested."""
    return all(source.tensor.is_cpu for source in persistent.sources)


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
    """The sources with this rank's rows in place of each shared tensor."""
    rows = shares_of(persistent.entries, len(members))[members.index(Rank(rank))]

    def share(source: TensorSource) -> TensorSource:
        own = rows.get(source.name)
        if own is None or source.name in left_out:
            return source
        tensor = source.tensor.narrow(own.dim, own.first, own.count)
        return replace(source, tensor=tensor, part=own.of(source.entry).part)

    return replace(persistent, sources=tuple(map(share, persistent.sources)), members=members)


class CheckedReplicas:
    """The bytes of all shared tensors, in blocks."""

    def __init__(self, shared: Sequence[TensorSource], key: int) -> None:
        self._key = key.to_bytes(8, "little")
        tensors = [source.tensor for source in sorted(shared, key=lambda one: one.name)]
        self._device = tensors[0].device if tensors else torch.device("cpu")
        most_bytes = BLOCK_BYTES if self._device.type == "cpu" else DEVICE_BLOCK_BYTES
        self._blocks = [block for tensor in tensors for block in slices(tensor, most_bytes)]

    def begin(self, phase: int, on_devices: DeviceCopies) -> Callable[[], int] | None:
        """Return the function that returns the digest of one part; None if it cannot be read.

        On a device, the copies that begin now read the part.
        """
        blocks = self._blocks[phase::NUM_PHASES]
        if self._device.type == "cpu":
            return partial(self._digest, (byte_view(b.contiguous()).numpy().data for b in blocks))
        device = device_at(self._device)
        if device is None or device not in on_devices.devices:
            return None
        if not blocks:
            return partial(self._digest, ())
        arrived: list[bytes] = []
        take = lambda content: arrived.append(content.tobytes())  # noqa: E731
        on_devices.others = (OtherRead(device, SumChunk(blocks, ()), take),)
        return partial(self._digest, arrived)

    def _digest(self, parts: Iterable[bytes | memoryview]) -> int:
        found = xxhash.xxh3_64(self._key)
        for part in parts:
            found.update(part)
        return found.intdigest()
