"""A fragment is exactly the requested one, or it is refused with a reason."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrun.erasure.fragments import (
    HEADER_BYTES,
    BlockDigest,
    Fragment,
    FragmentHeader,
    FragmentSet,
    StripeId,
    block_digest,
    check,
    pack,
    run_digest,
    unpack,
)
from ftrun.errors import FragmentRefused, SnapshotError
from ftrun.ids import Generation, RunId, version

u64 = st.integers(0, 2**64 - 1)
i64 = st.integers(-(2**63), 2**63 - 1)
u32 = st.integers(0, 2**32 - 1)

OF = StripeId(run_digest(RunId("run")), version(1, 20), 77, 5)
PAYLOAD = bytes(range(256)) * 3
HEADER = FragmentHeader(OF, Generation(1), 2, block_digest(PAYLOAD))


def fragment(header: FragmentHeader = HEADER, payload: bytes = PAYLOAD) -> Fragment:
    return Fragment("node-b", 2, pack(header), payload)


@given(st.builds(StripeId, u64, st.builds(version, i64, i64), u64, u64), i64, u32, u32, u64)
def test_a_header_reads_back(
    of: StripeId, generation: int, index: int, num_bytes: int, digest: int
) -> None:
    header = FragmentHeader(of, Generation(generation), index, BlockDigest(num_bytes, digest))
    raw = pack(header)
    assert len(raw) == HEADER_BYTES
    assert unpack(raw) == header
    assert unpack(memoryview(bytearray(raw))) == header


def test_no_bit_of_a_header_may_change() -> None:
    raw = pack(HEADER)
    for bit in range(8 * len(raw)):
        changed = bytearray(raw)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FragmentRefused):
            unpack(changed)


@pytest.mark.parametrize("raw", [b"", pack(HEADER)[:-1], pack(HEADER) + b"x", bytes(HEADER_BYTES)])
def test_what_is_no_header_is_refused(raw: bytes) -> None:
    with pytest.raises(FragmentRefused):
        unpack(raw)


def test_a_refusal_reports_what_it_is_of() -> None:
    with pytest.raises(SnapshotError) as caught:
        check(fragment(payload=b""), OF)
    message = str(caught.value)
    assert "node-b" in message
    assert "stripe 5 of step 20 (generation 1)" in message
    assert "place 2" in message


def test_the_one_that_was_asked_for_passes() -> None:
    assert check(fragment(), OF) == HEADER
    assert check(fragment(), OF, generation=Generation(1), known=HEADER.block) == HEADER


@pytest.mark.parametrize(
    ("of", "reason"),
    [
        (replace(OF, run=run_digest(RunId("other"))), "run"),
        (replace(OF, version=version(0, 20)), "generation 0"),
        (replace(OF, version=version(1, 19)), "step 19"),
        (replace(OF, group=78), "group"),
        (replace(OF, stripe=6), "stripe 6"),
    ],
)
def test_a_fragment_of_something_else_is_refused(of: StripeId, reason: str) -> None:
    with pytest.raises(FragmentRefused) as caught:
        check(fragment(replace(HEADER, of=of)), OF)
    assert reason in caught.value.reason


def test_a_fragment_of_another_generation_or_place_is_refused() -> None:
    with pytest.raises(FragmentRefused) as caught:
        check(fragment(replace(HEADER, generation=Generation(0))), OF, generation=Generation(1))
    assert "generation 0" in caught.value.reason
    with pytest.raises(FragmentRefused) as caught:
        check(fragment(replace(HEADER, index=1)), OF)
    assert "place 1" in caught.value.reason


@pytest.mark.parametrize(
    "payload", [PAYLOAD[:-1], PAYLOAD + b"\0", b"", bytes(len(PAYLOAD)), b"?" + PAYLOAD[1:]]
)
def test_other_bytes_are_refused(payload: bytes) -> None:
    with pytest.raises(FragmentRefused):
        check(fragment(payload=payload), OF)


def test_an_empty_block_is_no_fragment() -> None:
    with pytest.raises(FragmentRefused):
        check(fragment(replace(HEADER, block=block_digest(b"")), b""), OF)


def test_bytes_that_agree_with_their_header_only_are_refused() -> None:
    other = PAYLOAD[::-1]
    sound = fragment(replace(HEADER, block=block_digest(other)), other)
    check(sound, OF)
    with pytest.raises(FragmentRefused):
        check(sound, OF, known=HEADER.block)


# --- collected ----------------------------------------------------------------------------------


def test_fragments_of_two_stripes_do_not_meet() -> None:
    found = FragmentSet()
    further = [replace(OF, stripe=6), replace(OF, version=version(2, 20)), replace(OF, run=1)]
    found.add(fragment(), OF)
    for of in further:
        found.add(fragment(replace(HEADER, of=of)), of)
        assert found.of(of) == {2: fragment(replace(HEADER, of=of))}
    assert found.of(OF) == {2: fragment()}
    assert found.of(replace(OF, group=1)) == {}
    found.forget(OF)
    assert found.of(OF) == {}
    assert found.of(further[0]) != {}


def test_a_fragment_that_does_not_pass_takes_no_place() -> None:
    found = FragmentSet()
    with pytest.raises(FragmentRefused):
        found.add(fragment(payload=PAYLOAD[:-1]), OF)
    assert found.of(OF) == {}
    found.add(fragment(), OF)
    assert found.of(OF) == {2: fragment()}


def test_the_same_fragment_again_is_refused_and_the_first_stays() -> None:
    found = FragmentSet()
    found.add(fragment(), OF)
    for _ in range(2):
        with pytest.raises(FragmentRefused):
            found.add(fragment(), OF)
    assert found.of(OF) == {2: fragment()}


def test_of_two_that_differ_neither_stays() -> None:
    found = FragmentSet()
    other = PAYLOAD[::-1]
    found.add(fragment(), OF)
    for one in (fragment(replace(HEADER, block=block_digest(other)), other), fragment()):
        with pytest.raises(FragmentRefused):
            found.add(one, OF)
        assert found.of(OF) == {}


def test_runs_are_distinguished() -> None:
    assert run_digest(RunId("a")) != run_digest(RunId("b"))
    assert run_digest(RunId("a")) == run_digest(RunId("a"))
