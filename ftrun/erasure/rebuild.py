"""Rebuilds the lost blocks of one stripe exactly, or refuses with the reasons.

Rule 1: every fragment is checked before it is decoded (fragments.py). A fragment that fails the
        check is rejected, and the next one replaces it.
Rule 2: two fragments for one place are never both used. If they differ, neither is used.
Rule 3: fragments are consumed one by one, and only as many as are needed, so that the caller may
        fetch each on demand.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ftrun.erasure.codec import Buffer, Codec
from ftrun.erasure.fragments import BlockDigest, Fragment, StripeId, check
from ftrun.erasure.pinned_buffers import PinnedBuffers
from ftrun.errors import FragmentRefused, InternalError, StripeLost
from ftrun.ids import Generation


@dataclass(frozen=True, slots=True)
class StripeFacts:
    """Facts about a stripe that are known before any of its fragments arrives.

    Attributes:
        nodes: name of the node at each place, k data and then m parity.
        generation: generation that must have made the fragments.
        empty: places whose node has no block in this stripe; they count as zeros.
    """

    of: StripeId
    nodes: tuple[str, ...]
    generation: Generation
    empty: frozenset[int] = frozenset()


class StripeWork:
    """The rebuild of one stripe in progress.

    Args:
        codec: for the k and m of this group.
        facts: of the stripe.
        wanted: whole writable blocks of one length, by place; no fragment of these places is given
            to `take`. If a node's last block is shorter, the rest is written as zeros. After an
            error their content is undefined.
    """

    def __init__(self, codec: Codec, facts: StripeFacts, wanted: Mapping[int, Buffer]) -> None:
        if len(facts.nodes) != codec.k + codec.m:
            raise InternalError(f"{len(facts.nodes)} nodes for {codec.k} + {codec.m} places")
        self._codec = codec
        self._facts = facts
        self._wanted = wanted
        with PinnedBuffers([], [*wanted.values()]) as blocks:
            self._block_bytes = blocks.num_bytes
        zeros = memoryview(bytes(self._block_bytes if facts.empty else 0))
        self._blocks = dict.fromkeys(facts.empty, zeros)
        self._received: dict[int, BlockDigest] = {}
        """The first good fragment of each place."""
        self._unresponsive = {*range(codec.k + codec.m)} - facts.empty
        self._problems: list[str] = []

    def take(self, fragment: Fragment) -> bool:
        """Adds the next fragment, the best first; True if the wanted blocks are complete.

        `refusal` has the reason if a fragment is rejected.
        """
        self._unresponsive.discard(fragment.index)
        try:
            block = self._whole(fragment)
            header = check(fragment, self._facts.of, generation=self._facts.generation)
            self._check_is_first(fragment, header.block)
        except FragmentRefused as error:
            self._problems.append(str(error))
            return False
        self._blocks[fragment.index] = block
        if len(self._blocks) < self._codec.k:
            return False
        self._codec.rebuild(self._blocks, self._wanted)
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

    def _whole(self, fragment: Fragment) -> memoryview:
        """The bytes of a fragment, padded with zeros to a whole block."""
        payload = memoryview(fragment.payload).cast("B")
        lacking = self._block_bytes - len(payload)
        if lacking < 0 or fragment.index in self._facts.empty:
            reason = f"it has {len(payload)} bytes, more than a block of {self._block_bytes}"
            if lacking >= 0:
                reason = "its node has no block in this stripe"
            raise FragmentRefused(what=fragment.name(self._facts.of), reason=reason)
        return memoryview(bytes(payload) + bytes(lacking)) if lacking else payload

    def _check_is_first(self, fragment: Fragment, block: BlockDigest) -> None:
        """Rule 2: if another fragment differs, both are rejected, and the place stays empty."""
        position = fragment.index
        if position not in self._received:
            self._received[position] = block
            return
        reason = "the same one was received before"
        if position not in self._blocks or self._received[position] != block:
            self._blocks.pop(position, None)
            reason = "two different ones were received for one place; neither is used"
        raise FragmentRefused(what=fragment.name(self._facts.of), reason=reason)
