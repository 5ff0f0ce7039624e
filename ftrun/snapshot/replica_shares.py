"""Splits the replicas of a node among its ranks: each stores some rows of every tensor.

Runs in:  worker and SMP. Pure.
Takes in: the entries of a rank's tensors, the number of members that share them; the digests of
          whole shards; what each seal states about replicas.
Gives:    the rows of each member; groups of ranks whose tensors are equal; ranks that differ.

A shard with shares is a layout of its own. Its shared entries are parts of tensors, and its header
names the members of the group under `MEMBERS`. All other data of a rank is in its own shard.

Rule 1: all members cut alike, because the rows depend only on the entries and on the number of
        members.
Rule 2: a share is a part of the whole tensor. A version is therefore complete even if some members
        stored shares and others whole tensors, so members may change at different steps.
Rule 3: tensors are shared only after all of their bytes were equal in `MIN_AGREED` versions.
Rule 4: each seal states a digest of one part in `NUM_PHASES` of all shared bytes, and of samples of
        all of them. Digests of one version are compared before it is committed. A version of shares
        without comparable digests of all members is not committed.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec
import xxhash

from ftrun.errors import LayoutUnknown
from ftrun.ids import Rank, Version
from ftrun.snapshot.boxes import TensorPart
from ftrun.snapshot.layout import CopyTiming, Layout, LayoutEntry

MEMBERS = "ftrun.members"
"""Key in the metadata of a layout: the ranks whose shards hold its tensors together."""

MIN_AGREED = 3
NUM_PHASES = 8
NO_PART = -1

_T = TypeVar("_T")
Group = tuple[Rank, ...]
"""Ranks that share their replicas, in order."""


def members_of(metadata: Mapping[str, str]) -> Group:
    """The members that share the replicas of a shard; empty if it holds whole tensors.

    Raises LayoutUnknown if the text is not valid.
    """
    text = metadata.get(MEMBERS, "")
    try:
        return tuple(Rank(int(one)) for one in text.split(",") if text)
    except ValueError as error:
        raise LayoutUnknown(f"{MEMBERS} of a shard is {text!r}") from error


def written(members: Group) -> dict[str, str]:
    return {MEMBERS: ",".join(map(str, members))} if members else {}


# --- rows --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rows:
    """Neighbouring items of a tensor along one dimension; all dimensions before it have size 1."""

    dim: int
    first: int
    count: int

    def of(self, entry: LayoutEntry) -> LayoutEntry:
        shape, offsets = list(entry.shape), [0] * len(entry.shape)
        shape[self.dim], offsets[self.dim] = self.count, self.first
        part = TensorPart(entry.shape, tuple(offsets))
        return replace(entry, shape=tuple(shape), part=part)


def is_shareable(entry: LayoutEntry) -> bool:
    return entry.when is CopyTiming.LAZY and not entry.is_small and entry.part is None


def shares_of(entries: Sequence[LayoutEntry], num_members: int) -> list[dict[str, Rows]]:
    """The rows of each member, by the names of the shareable entries."""
    found: list[dict[str, Rows]] = [{} for _ in range(num_members)]
    loads = [0] * num_members
    for entry in sorted(filter(is_shareable, entries), key=lambda one: one.name):
        dim = next(at for at, size in enumerate(entry.shape) if size > 1)
        row_bytes = entry.num_bytes // entry.shape[dim]
        least, rest = divmod(entry.shape[dim], num_members)
        # The members with the fewest bytes so far take the rows that remain.
        extra = sorted(range(num_members), key=lambda at: (loads[at], at))[:rest]
        first = 0
        for member, rows in enumerate(found):
            count = least + (member in extra)
            rows[entry.name] = Rows(dim, first, count)
            first += count
            loads[member] += count * row_bytes
    return found


# --- agreement ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReplicaContent:
    """The shareable tensors of a whole shard.

    Args:
        key: digest of their names, dtypes and shapes, see `key_of`.
        digest: of the key and all bytes.
    """

    key: int
    digest: int


def replica_content(layout: Layout, table: memoryview) -> ReplicaContent | None:
    """None if nothing of this shard can be shared, or it holds shares."""
    key = key_of(layout.entries)
    if not key:
        return None
    digest = xxhash.xxh3_64(key.to_bytes(8, "little"))
    for entry in sorted(filter(is_shareable, layout.entries), key=lambda one: one.name):
        pieces = layout.pieces_of(entry)
        digest.update(table[pieces.start : pieces.stop].tobytes())
    return ReplicaContent(key, digest.intdigest())


def key_of(entries: Sequence[LayoutEntry]) -> int:
    """Identifies the shareable entries among these: names, dtypes and shapes, in any order.

    0 if there are none, or if some entries are parts of tensors. A reader could not
    distinguish these from shares.
    """
    kept = sorted(filter(is_shareable, entries), key=lambda one: one.name)
    if not kept or any(one.part is not None for one in entries):
        return 0
    text = "".join(f"{len(one.name)}:{one.name} {one};" for one in kept)
    return xxhash.xxh3_64_intdigest(text.encode())


def whole_key(entries: Sequence[LayoutEntry]) -> int:
    """`key_of` the whole tensors, from the entries of a shard with shares."""
    return key_of([replace(one, shape=one.whole_shape, part=None) for one in entries])


class ShareAgreement:
    """Finds the groups of ranks of one node that may share their replicas."""

    def __init__(self) -> None:
        self._last: tuple[object, ...] = ()
        self._num_agreed = 0

    @property
    def is_settled(self) -> bool:
        """The last versions had the same groups, or none."""
        return self._num_agreed >= MIN_AGREED

    def poll(self, contents: Mapping[Rank, ReplicaContent | None]) -> tuple[Group, ...]:
        """Groups that were equal in this version and the ones before; empty: none yet.

        Args:
            contents: of all local ranks, in one committed version; later ones in later calls.
        """
        by_digest: dict[int, list[Rank]] = {}
        for rank, content in sorted(contents.items()):
            if content is not None:
                by_digest.setdefault(content.digest, []).append(rank)
        groups = tuple(tuple(ranks) for ranks in by_digest.values() if len(ranks) > 1)
        keys = tuple((rank, one and one.key) for rank, one in sorted(contents.items()))
        now = (groups, keys)
        self._num_agreed = self._num_agreed + 1 if now == self._last else 1
        self._last = now
        return groups if self.is_settled else ()


# --- seals -------------------------------------------------------------------------------------


class ReplicaCheck(msgspec.Struct, frozen=True, array_like=True):
    """What a seal states about the replicas of a rank on a node whose ranks share some.

    Args:
        members: the ranks that share them; empty if this rank has stored whole tensors.
        part: identifies the part of the shared bytes that was hashed, see `part_of`; `NO_PART`:
            none, so the version is not committed.
        digest: of the key of all shared tensors, of that part, and of samples of all parts.
    """

    members: list[int]
    part: int
    digest: int


def part_of(phase: int, left_out: Collection[str]) -> int:
    """Identifies a hashed part of the shared bytes.

    Args:
        phase: index of the part, below `NUM_PHASES`.
        left_out: names of shared tensors that are not hashed.
    """
    if not left_out:
        return phase
    names = "\n".join(sorted(left_out)).encode()
    return phase + NUM_PHASES * (1 + xxhash.xxh32_intdigest(names))


class SealChecks:
    """Compares the checks of the newest version that any rank has sealed."""

    def __init__(self) -> None:
        self._version: Version | None = None
        self._found: dict[Rank, ReplicaCheck] = {}

    def add(self, rank: Rank, sealed: Version, check: ReplicaCheck | None) -> None:
        """Add what a seal states; a late seal of an older version is ignored."""
        if self._version is None or sealed > self._version:
            self._version = sealed
            self._found = {}
        if check is not None and sealed == self._version:
            self._found[rank] = check

    def differing(self, sealed: Version) -> set[Rank]:
        """Members of a group whose digest of this version differs from the digest of the majority.

        If there is no majority, all members differ. Only digests of the same part are compared.
        """
        found = self._found if self._version == sealed else {}
        differ: set[Rank] = set()
        for members, part in {(tuple(one.members), one.part) for one in found.values()}:
            digests = {
                rank: check.digest
                for rank, check in found.items()
                if rank in members and check.part == part
            }
            differ |= minority(digests) if digests else set()
        return differ

    def is_proven(self, sealed: Version) -> bool:
        """Whether all members of each group have stated a digest of the same part.

        A member may have stored whole tensors. Shares of another group would have other bounds.
        """
        found = self._found if self._version == sealed else {}
        for members in {tuple(one.members) for one in found.values() if one.members}:
            checks = [found[rank] for rank in map(Rank, members) if rank in found]
            parts = {one.part for one in checks}
            if len(checks) < len(members) or len(parts) != 1 or NO_PART in parts:
                return False
            if any(tuple(one.members) not in ((), members) for one in checks):
                return False
        return True


def minority(digests: Mapping[_T, int]) -> set[_T]:
    """Holders whose digest differs from that of the majority; all if there is no majority."""
    right, times = Counter(digests.values()).most_common(1)[0]
    has_most = 2 * times > len(digests)
    return {one for one, digest in digests.items() if digest != right or not has_most}


def are_local(members: Collection[Rank], ranks: Collection[Rank]) -> bool:
    return len(members) > 1 and set(members) <= set(ranks)
