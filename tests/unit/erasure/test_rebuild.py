"""The rebuilt bytes equal the protected ones, even if some fragments are bad."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from ftrun.erasure.codec import choose_codec
from ftrun.erasure.fragments import (
    Fragment,
    FragmentHeader,
    StripeId,
    block_digest,
    pack,
    run_digest,
)
from ftrun.erasure.rebuild import RebuiltBlocks, StripeFacts, rebuild_stripe
from ftrun.errors import InternalError, StripeLost
from ftrun.ids import Generation, RunId, version

BLOCK_BYTES = 300
CODEC = choose_codec(4, 2)
OF = StripeId(run_digest(RunId("run")), version(3, 9), 4, 7)
NODES = tuple(f"n{i}" for i in range(6))
DATA = [bytes((i * 37 + at * at) % 251 for at in range(BLOCK_BYTES)) for i in range(4)]
PARITY = [bytearray(BLOCK_BYTES) for _ in range(2)]
CODEC.encode(DATA, PARITY)
STRIPE = [*DATA, *map(bytes, PARITY)]
KNOWN = {i: block_digest(block) for i, block in enumerate(STRIPE)}
FACTS = StripeFacts(OF, NODES, generation=Generation(3))


def fragment(index: int, payload: bytes | None = None, *, position: int | None = None) -> Fragment:
    """The fragment at that place, or one with other bytes and a matching digest."""
    payload = STRIPE[index] if payload is None else payload
    header = FragmentHeader(OF, Generation(3), index, block_digest(payload))
    at = index if position is None else position
    return Fragment(NODES[at], at, pack(header), payload)


def wanted(*places: int) -> dict[int, bytearray]:
    return {position: bytearray(b"?" * BLOCK_BYTES) for position in places}


def assert_right(found: dict[int, bytearray]) -> None:
    assert all(block == STRIPE[position] for position, block in found.items())


def test_data_and_parity_come_back() -> None:
    found = wanted(1, 5)
    done = rebuild_stripe(CODEC, FACTS, map(fragment, (0, 2, 3, 4)), found)
    assert_right(found)
    assert done == RebuiltBlocks((0, 2, 3, 4), frozenset(), ())


def test_known_digests_are_compared() -> None:
    found = wanted(1, 5)
    facts = replace(FACTS, known=KNOWN)
    done = rebuild_stripe(CODEC, facts, map(fragment, (0, 2, 3, 4)), found)
    assert done.verified == {1, 5}
    assert_right(found)


def test_no_more_fragments_are_fetched_than_are_needed() -> None:
    fetched: list[int] = []

    def fetch() -> Iterator[Fragment]:
        for position in (5, 4, 3, 2, 0):
            fetched.append(position)
            yield fragment(position)

    found = wanted(1)
    rebuild_stripe(CODEC, FACTS, fetch(), found)
    assert_right(found)
    assert fetched == [5, 4, 3, 2]


def test_a_bad_one_is_excluded_and_the_next_one_is_used() -> None:
    bad = replace(fragment(0), payload=b"?" + STRIPE[0][1:])
    found = wanted(1)
    done = rebuild_stripe(CODEC, FACTS, [bad, *map(fragment, (2, 3, 4, 5))], found)
    assert_right(found)
    assert done.used == (2, 3, 4, 5)
    assert len(done.rejected) == 1
    assert "n0" in done.rejected[0]


def test_a_good_copy_from_elsewhere_takes_the_place_of_a_bad_one() -> None:
    bad = replace(fragment(0), payload=STRIPE[0][:-1])
    found = wanted(1, 5)
    rebuild_stripe(CODEC, FACTS, [bad, *map(fragment, (0, 2, 3, 4))], found)
    assert_right(found)


def test_a_refusal_names_what_is_there_and_what_is_not() -> None:
    bad = replace(fragment(0), payload=STRIPE[0][:-1])
    with pytest.raises(StripeLost) as caught:
        rebuild_stripe(CODEC, FACTS, [bad, fragment(3), fragment(4)], wanted(1))
    lost = caught.value
    assert lost.have == ("n3", "n4")
    message = str(lost)
    assert "2 of 4 good fragments are available (n3, n4)" in message
    assert "stripe 7 of step 9 (generation 3)" in message
    assert "2 of 4" in message
    for words in ("from n1 (place 1)", "from n2 (place 2)", "from n5 (place 5)", "of n0"):
        assert words in message
    assert lost.exit_code == 77


def test_nothing_at_all_is_a_refusal() -> None:
    with pytest.raises(StripeLost):
        rebuild_stripe(CODEC, FACTS, [], wanted(0))


def test_a_fragment_under_the_place_of_another_is_excluded() -> None:
    misplaced = fragment(0, position=2)
    found = wanted(1)
    done = rebuild_stripe(CODEC, FACTS, [misplaced, *map(fragment, (0, 3, 4, 5))], found)
    assert done.used == (0, 3, 4, 5)
    assert_right(found)


def test_where_two_differ_for_one_place_neither_is_used() -> None:
    other = fragment(0, STRIPE[0][::-1])
    found = wanted(1)
    fragments = [fragment(0), other, *map(fragment, (2, 3, 4, 5))]
    done = rebuild_stripe(CODEC, FACTS, fragments, found)
    assert done.used == (2, 3, 4, 5)
    assert_right(found)
    with pytest.raises(StripeLost):
        rebuild_stripe(CODEC, FACTS, fragments[:-1], wanted(1))


def test_the_same_one_twice_is_one() -> None:
    fragments = [fragment(0), fragment(0), *map(fragment, (2, 3))]
    with pytest.raises(StripeLost):
        rebuild_stripe(CODEC, FACTS, fragments, wanted(1))
    found = wanted(1)
    rebuild_stripe(CODEC, FACTS, [*fragments, fragment(4)], found)
    assert_right(found)


# --- wrong bytes that match their own digest --------------------------------------------------


@pytest.mark.parametrize("wrong", [0, 2, 3, 4])
def test_a_forged_fragment_is_found_by_what_is_rebuilt(wrong: int) -> None:
    facts = replace(FACTS, known={1: KNOWN[1]})
    fragments = [
        fragment(position, STRIPE[position][::-1] if position == wrong else None)
        for position in (0, 2, 3, 4, 5)
    ]
    found = wanted(1)
    done = rebuild_stripe(CODEC, facts, fragments, found)
    assert_right(found)
    assert wrong not in done.used
    assert done.verified == {1}
    assert done.rejected


def test_a_forged_fragment_whose_digest_is_known_is_not_even_decoded() -> None:
    facts = replace(FACTS, known=KNOWN)
    found = wanted(1)
    liar = fragment(0, STRIPE[0][::-1])
    done = rebuild_stripe(CODEC, facts, [liar, *map(fragment, (2, 3, 4, 5))], found)
    assert done.used == (2, 3, 4, 5)
    assert_right(found)


def test_fragments_that_do_not_give_what_was_protected_are_a_refusal() -> None:
    facts = replace(FACTS, known={1: KNOWN[1]})
    liar = fragment(0, STRIPE[0][::-1])
    with pytest.raises(StripeLost) as caught:
        rebuild_stripe(CODEC, facts, [liar, *map(fragment, (2, 3, 4))], wanted(1))
    assert caught.value.have == ("n0", "n2", "n3", "n4")
    assert "another digest" in str(caught.value)


# --- short and missing blocks -------------------------------------------------------------------


def short_stripe() -> tuple[list[bytes], StripeFacts]:
    """A stripe whose data block 2 is short and whose data block 3 does not exist."""
    blocks = [DATA[0], DATA[1], DATA[2][:50], b""]
    parity = [bytearray(BLOCK_BYTES) for _ in range(2)]
    CODEC.encode([block.ljust(BLOCK_BYTES, b"\0") for block in blocks], parity)
    blocks += map(bytes, parity)
    known = {i: block_digest(block) for i, block in enumerate(blocks) if block}
    return blocks, replace(FACTS, empty=frozenset({3}), known=known)


def test_a_block_that_never_was_counts_as_zeros() -> None:
    blocks, facts = short_stripe()
    found = wanted(0, 1)
    fragments = [fragment(position, blocks[position]) for position in (2, 4, 5)]
    done = rebuild_stripe(CODEC, facts, fragments, found)
    assert (found[0], found[1]) == (blocks[0], blocks[1])
    assert done.used == (2, 3, 4, 5)
    assert done.verified == {0, 1}


def test_a_short_block_comes_back_with_zeros_behind_it() -> None:
    blocks, facts = short_stripe()
    found = wanted(2, 3)
    done = rebuild_stripe(CODEC, facts, [fragment(i, blocks[i]) for i in (0, 1, 4)], found)
    assert found == {2: blocks[2].ljust(BLOCK_BYTES, b"\0"), 3: bytes(BLOCK_BYTES)}
    assert done.verified == {2}


def test_bytes_behind_the_end_of_a_short_block_are_wrong_bytes() -> None:
    blocks, facts = short_stripe()
    known = {2: replace(facts.known[2], num_bytes=49, digest=block_digest(blocks[2][:49]).digest)}
    fragments = [fragment(i, blocks[i]) for i in (0, 1, 4)]
    with pytest.raises(StripeLost):
        rebuild_stripe(CODEC, replace(facts, known=known), fragments, wanted(2))


def test_a_fragment_of_a_node_without_a_block_is_excluded() -> None:
    blocks, facts = short_stripe()
    fragments = [fragment(3, DATA[3]), *(fragment(i, blocks[i]) for i in (0, 2, 4))]
    found = wanted(1)
    done = rebuild_stripe(CODEC, facts, fragments, found)
    assert found[1] == blocks[1]
    assert "no block in this stripe" in done.rejected[0]


def test_only_empty_blocks_give_zeros_without_any_fragment() -> None:
    facts = replace(FACTS, empty=frozenset({0, 1, 2, 3}))
    found = wanted(2, 4)
    assert rebuild_stripe(CODEC, facts, [], found).used == (0, 1, 2, 3)
    assert found == {2: bytes(BLOCK_BYTES), 4: bytes(BLOCK_BYTES)}


def test_a_fragment_longer_than_a_block_is_excluded() -> None:
    long = fragment(0, DATA[0] + b"x")
    found = wanted(1)
    done = rebuild_stripe(CODEC, FACTS, [long, *map(fragment, (2, 3, 4, 5))], found)
    assert f"{BLOCK_BYTES + 1} bytes" in done.rejected[0]
    assert_right(found)


# --- checks of the request --------------------------------------------------------------------


def test_what_is_wanted_and_comes_is_copied() -> None:
    found = wanted(1)
    done = rebuild_stripe(CODEC, FACTS, [fragment(0), fragment(1)], found)
    assert_right(found)
    assert done == RebuiltBlocks((), frozenset(), ())


def test_a_part_may_come_while_the_rest_is_rebuilt() -> None:
    found = wanted(1, 2)
    done = rebuild_stripe(CODEC, FACTS, map(fragment, (0, 1, 3, 4)), found)
    assert_right(found)
    assert done.used == (0, 1, 3, 4)


def test_nothing_wanted_is_nothing_done() -> None:
    assert rebuild_stripe(CODEC, FACTS, [], {}) == RebuiltBlocks((), frozenset(), ())


@pytest.mark.parametrize(
    "targets",
    [{1: bytearray(8), 2: bytearray(9)}, {1: bytes(BLOCK_BYTES)}, {9: bytearray(BLOCK_BYTES)}],
)
def test_targets_that_cannot_be_are_refused(targets: dict[int, bytearray]) -> None:
    with pytest.raises(InternalError):
        rebuild_stripe(CODEC, FACTS, map(fragment, (0, 3, 4, 5)), targets)


def test_a_group_of_another_size_is_refused() -> None:
    with pytest.raises(InternalError):
        rebuild_stripe(choose_codec(3, 1), FACTS, [], wanted(1))
