"""The rebuilt bytes equal the protected ones, even if some fragments are bad."""

from collections.abc import Iterable, Iterator
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
from ftrun.erasure.rebuild import StripeFacts, StripeWork
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
FACTS = StripeFacts(OF, NODES, generation=Generation(3))


def fragment(index: int, payload: bytes | None = None, *, position: int | None = None) -> Fragment:
    """The fragment at that place, or one with other bytes and a matching digest."""
    payload = STRIPE[index] if payload is None else payload
    header = FragmentHeader(OF, Generation(3), index, block_digest(payload))
    at = index if position is None else position
    return Fragment(NODES[at], at, pack(header), payload)


def rebuilt(
    fragments: Iterable[Fragment], *places: int, facts: StripeFacts = FACTS
) -> dict[int, bytearray]:
    """The wanted blocks; raises StripeLost."""
    found = {position: bytearray(b"?" * BLOCK_BYTES) for position in places}
    work = StripeWork(CODEC, facts, found)
    if not any(map(work.take, fragments)):
        raise work.refusal()
    return found


def refusal_of(*fragments: Fragment, facts: StripeFacts = FACTS) -> StripeLost:
    with pytest.raises(StripeLost) as caught:
        rebuilt(fragments, 1, facts=facts)
    return caught.value


def assert_right(found: dict[int, bytearray]) -> None:
    assert all(block == STRIPE[position] for position, block in found.items())


def test_data_and_parity_come_back() -> None:
    assert_right(rebuilt(map(fragment, (0, 2, 3, 4)), 1, 5))


def test_no_more_fragments_are_fetched_than_are_needed() -> None:
    fetched: list[int] = []

    def fetch() -> Iterator[Fragment]:
        for position in (5, 4, 3, 2, 0):
            fetched.append(position)
            yield fragment(position)

    assert_right(rebuilt(fetch(), 1))
    assert fetched == [5, 4, 3, 2]


BAD = replace(fragment(0), payload=b"?" + STRIPE[0][1:])
SHORT = replace(fragment(0), payload=STRIPE[0][:-1])
OTHER = fragment(0, STRIPE[0][::-1])


@pytest.mark.parametrize(
    ("excluded", "reason"),
    [
        (BAD, "of n0 for stripe 7 of step 9 (generation 3) (place 0)"),
        (SHORT, "it has 299 bytes"),
        (fragment(0, DATA[0] + b"x"), "it has 301 bytes, more than a block of 300"),
        (fragment(5, position=0), "it is of place 5"),
    ],
)
def test_a_bad_one_is_excluded_and_the_next_one_is_used(excluded: Fragment, reason: str) -> None:
    good = list(map(fragment, (2, 3, 4, 5)))
    assert_right(rebuilt([excluded, *good], 1))
    assert reason in str(refusal_of(excluded, *good[:3]))


def test_a_good_copy_from_elsewhere_takes_the_place_of_a_bad_one() -> None:
    assert_right(rebuilt([SHORT, *map(fragment, (0, 2, 3, 4))], 1, 5))


def test_a_refusal_names_what_is_there_and_what_is_not() -> None:
    lost = refusal_of(SHORT, fragment(3), fragment(4))
    assert lost.have == ("n3", "n4")
    message = str(lost)
    assert "2 of 4 good fragments are available (n3, n4)" in message
    assert "stripe 7 of step 9 (generation 3)" in message
    for words in ("from n1 (place 1)", "from n2 (place 2)", "from n5 (place 5)", "of n0"):
        assert words in message
    assert lost.exit_code == 77


def test_nothing_at_all_is_a_refusal() -> None:
    assert refusal_of().have == ()


def test_where_two_differ_for_one_place_neither_is_used() -> None:
    fragments = [fragment(0), OTHER, fragment(0), *map(fragment, (2, 3, 4, 5))]
    assert_right(rebuilt(fragments, 1))
    lost = refusal_of(*fragments[:-1])
    assert lost.have == ("n2", "n3", "n4")
    assert str(lost).count("two different ones were received for one place") == 2


def test_the_same_one_twice_is_one() -> None:
    fragments = [fragment(0), fragment(0), *map(fragment, (2, 3))]
    assert "the same one was received before" in str(refusal_of(*fragments))
    assert_right(rebuilt([*fragments, fragment(4)], 1))


# --- short and missing blocks -------------------------------------------------------------------


def short_stripe() -> tuple[list[bytes], StripeFacts]:
    """A stripe whose data block 2 is short and whose data block 3 does not exist."""
    blocks = [DATA[0], DATA[1], DATA[2][:50], b""]
    parity = [bytearray(BLOCK_BYTES) for _ in range(2)]
    CODEC.encode([block.ljust(BLOCK_BYTES, b"\0") for block in blocks], parity)
    return [*blocks, *map(bytes, parity)], replace(FACTS, empty=frozenset({3}))


@pytest.mark.parametrize(("there", "places"), [((2, 4, 5), (0, 1)), ((0, 1, 4), (2,))])
def test_a_missing_block_counts_as_zeros_and_a_short_one_has_zeros_behind_it(
    there: tuple[int, ...], places: tuple[int, ...]
) -> None:
    blocks, facts = short_stripe()
    found = rebuilt([fragment(i, blocks[i]) for i in there], *places, facts=facts)
    assert found == {i: blocks[i].ljust(BLOCK_BYTES, b"\0") for i in places}


def test_a_fragment_of_a_node_without_a_block_is_excluded() -> None:
    blocks, facts = short_stripe()
    fragments = [fragment(3, DATA[3]), *(fragment(i, blocks[i]) for i in (0, 2, 4))]
    assert rebuilt(fragments, 1, facts=facts)[1] == blocks[1]
    assert "no block in this stripe" in str(refusal_of(*fragments[:-1], facts=facts))


# --- checks of the request --------------------------------------------------------------------


@pytest.mark.parametrize(
    "targets",
    [{1: bytearray(8), 2: bytearray(9)}, {1: bytes(BLOCK_BYTES)}, {9: bytearray(BLOCK_BYTES)}],
)
def test_targets_that_cannot_be_are_refused(targets: dict[int, bytearray]) -> None:
    with pytest.raises(InternalError):
        any(map(StripeWork(CODEC, FACTS, targets).take, map(fragment, (0, 3, 4, 5))))


def test_a_group_of_another_size_is_refused() -> None:
    with pytest.raises(InternalError):
        StripeWork(choose_codec(3, 1), FACTS, {1: bytearray(BLOCK_BYTES)})
