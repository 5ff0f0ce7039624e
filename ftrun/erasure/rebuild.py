"""Rebuilds the lost blocks of one stripe exactly, or refuses with the reasons.

Rule 1: every fragment is checked before it is decoded (fragments.py). A fragment that fails the
        check is rejected, and the next one replaces it.
Rule 2: a rebuilt block is checked too if its digest is known. If it does not match, one of the
        fragments is wrong although it matches its own digest. Then other sets of k fragments are
        tried.
Rule 3: fragments are consumed one by one, and only as many as are needed, so that the caller may
        fetch each on demand.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations, islice

from ftrun.erasure.codec import Buffer, Codec
from ftrun.erasure.fragments import BlockDigest, Fragment, FragmentSet, StripeId, block_digest
from ftrun.erasure.pinned_buffers import PinnedBuffers
from ftrun.errors import FragmentRefused, InternalError, StripeLost
from ftrun.ids import Generation

_MAX_TRIES = 64
"""Number of sets of k that are tried for each further fragment; a group of 8 nodes has 35."""


@dataclass(frozen=True, slots=True)
class StripeFacts:
    """Facts about a stripe that are known before any of its fragments arrives.

    Attributes:
        of: the stripe.
        nodes: name of the node at each place, k data and then m parity.
        empty: places whose node has no block in this stripe; they count as zeros.
        generation: generation that must have made the fragments; None: any.
        known: length and digest of blocks by place, if they are known from elsewhere.
    """

    of: StripeId
    nodes: tuple[str, ...]
    empty: frozenset[int] = frozenset()
    generation: Generation | None = None
    known: Mapping[int, BlockDigest] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RebuiltBlocks:
    """How the wanted blocks were obtained.

    Attributes:
        used: places of the k blocks that were decoded; empty if all wanted blocks arrived.
        verified: places of wanted blocks whose digest is known and matches.
        rejected: reasons of rejected fragments and decodings.
    """

    used: tuple[int, ...]
    verified: frozenset[int]
    rejected: tuple[str, ...]


def rebuild_stripe(
    codec: Codec, facts: StripeFacts, fragments: Iterable[Fragment], wanted: Mapping[int, Buffer]
) -> RebuiltBlocks:
    """Writes the wanted blocks of a stripe.

    Args:
        codec: for the k and m of this group.
        facts: of the stripe.
        fragments: of surviving nodes, best first. The place of each is the place of its sender.
        wanted: whole writable blocks of one length, by place. If a node's last block is shorter,
            the rest is written as zeros. After an error their content is undefined.

    Raises:
        StripeLost: there are too few good fragments, or no set of them gives the protected bytes.
    """
    if not wanted:
        return RebuiltBlocks((), frozenset(), ())
    work = StripeWork(codec, facts, wanted)
    if work.finish(None):
        return work.result
    for fragment in fragments:
        if work.take(fragment):
            return work.result
    raise work.refusal()


class StripeWork:
    """The rebuild of one stripe in progress; arguments as of `rebuild_stripe`."""

    def __init__(self, codec: Codec, facts: StripeFacts, wanted: Mapping[int, Buffer]) -> None:
        if len(facts.nodes) != codec.k + codec.m:
            raise InternalError(f"{len(facts.nodes)} nodes for {codec.k} + {codec.m} places")
        self.result = RebuiltBlocks((), frozenset(), ())
        self._codec = codec
        self._facts = facts
        self._wanted = {position: _bytes_of(one) for position, one in wanted.items()}
        with PinnedBuffers([], [*wanted.values()]) as blocks:
            self._block_bytes = blocks.num_bytes
        self._good = FragmentSet()
        zeros = memoryview(bytes(self._block_bytes if facts.empty else 0))
        self._blocks = dict.fromkeys(facts.empty, zeros)
        self._unresponsive = {*range(codec.k + codec.m)} - facts.empty
        self._problems: list[str] = []

    def take(self, fragment: Fragment) -> bool:
        """Adds the next fragment; True if all wanted blocks are complete."""
        return self.accept(fragment) and self.finish(fragment.index)

    def accept(self, fragment: Fragment) -> bool:
        """Checks and stores a fragment; if it is rejected, records the reason and returns False."""
        facts, position = self._facts, fragment.index
        self._unresponsive.discard(position)
        try:
            block = self._whole(fragment)
            known = facts.known.get(position)
            self._good.add(fragment, facts.of, generation=facts.generation, known=known)
        except FragmentRefused as error:
            self._problems.append(str(error))
            if position not in facts.empty and position not in self._good.of(facts.of):
                self._blocks.pop(position, None)
            return False
        self._blocks[position] = block
        return True

    def finish(self, newest: int | None) -> bool:
        """Tries to complete all wanted blocks; True if that has succeeded.

        `newest` is the place that has just arrived; sets without it have been tried.
        """
        came = self._wanted.keys() & self._blocks.keys()
        lost = self._wanted.keys() - came
        if lost and not any(self._decode(used, sorted(lost)) for used in self._sets(newest)):
            return False
        for position in came:
            self._wanted[position][:] = self._blocks[position]
        verified = frozenset(self._wanted.keys() & self._facts.known.keys())
        self.result = replace(self.result, verified=verified, rejected=tuple(self._problems))
        return True

    def refusal(self) -> StripeLost:
        """The error: available blocks, missing fragments, and reasons of rejections."""
        nodes = self._facts.nodes
        unresponsive = [
            f"no fragment from {nodes[i]} (place {i})" for i in sorted(self._unresponsive)
        ]
        return StripeLost(
            what=str(self._facts.of),
            have=[nodes[i] for i in sorted(self._blocks)],
            needed=self._codec.k,
            problems=[*unresponsive, *self._problems],
        )

    def _sets(self, newest: int | None) -> Iterator[tuple[int, ...]]:
        """Sets of k places that have not been tried yet."""
        if newest is None:
            return combinations(sorted(self._blocks), self._codec.k)
        others = [position for position in sorted(self._blocks) if position != newest]
        further = ((*few, newest) for few in combinations(others, self._codec.k - 1))
        return islice(further, _MAX_TRIES)

    def _decode(self, used: tuple[int, ...], lost: list[int]) -> bool:
        """Writes the lost blocks; False if one does not match its known digest."""
        have = {position: self._blocks[position] for position in used}
        self._codec.rebuild(have, {position: self._wanted[position] for position in lost})
        known = self._facts.known
        wrong = [i for i in lost if i in known and not _is(self._wanted[i], known[i])]
        if wrong:
            nodes = ", ".join(self._facts.nodes[i] for i in used)
            self._problems.append(
                f"the block of place {wrong[0]} decoded from {nodes} has another digest"
            )
        else:
            self.result = RebuiltBlocks(tuple(sorted(used)), frozenset(), ())
        return not wrong

    def _whole(self, fragment: Fragment) -> memoryview:
        """The bytes of a fragment, padded with zeros to a whole block."""
        payload = _bytes_of(fragment.payload)
        lacking = self._block_bytes - len(payload)
        if lacking < 0 or fragment.index in self._facts.empty:
            reason = f"it has {len(payload)} bytes, more than a block of {self._block_bytes}"
            if lacking >= 0:
                reason = "its node has no block in this stripe"
            raise FragmentRefused(what=fragment.name(self._facts.of), reason=reason)
        return memoryview(bytes(payload) + bytes(lacking)) if lacking else payload


def _bytes_of(block: Buffer) -> memoryview:
    return memoryview(block).cast("B")


def _is(block: memoryview, known: BlockDigest) -> bool:
    """Whether a whole block is these bytes followed by zeros."""
    start, rest = block[: known.num_bytes], block[known.num_bytes :]
    return block_digest(start) == known and not bytes(rest).strip(b"\0")
