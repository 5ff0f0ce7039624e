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
        check(fragment(payload=b""), OF, generation=Generation(1))
    name = "the fragment of node-b for stripe 5 of step 20 (generation 1) (place 2)"
    assert name in str(caught.value)


def test_the_one_that_was_asked_for_passes() -> None:
    assert check(fragment(), OF, generation=Generation(1)) == HEADER


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (replace(HEADER, of=replace(OF, run=run_digest(RunId("other")))), "run"),
        (replace(HEADER, of=replace(OF, version=version(0, 20))), "generation 0"),
        (replace(HEADER, of=replace(OF, version=version(1, 19))), "step 19"),
        (replace(HEADER, of=replace(OF, group=78)), "group"),
        (replace(HEADER, of=replace(OF, stripe=6)), "stripe 6"),
        (replace(HEADER, generation=Generation(0)), "generation 0"),
        (replace(HEADER, index=1), "place 1"),
    ],
)
def test_a_fragment_of_something_else_is_refused(header: FragmentHeader, reason: str) -> None:
    with pytest.raises(FragmentRefused) as caught:
        check(fragment(header), OF, generation=Generation(1))
    assert reason in caught.value.reason


@pytest.mark.parametrize(
    "payload", [PAYLOAD[:-1], PAYLOAD + b"\0", b"", bytes(len(PAYLOAD)), b"?" + PAYLOAD[1:]]
)
def test_other_bytes_are_refused(payload: bytes) -> None:
    with pytest.raises(FragmentRefused):
        check(fragment(payload=payload), OF, generation=Generation(1))


def test_an_empty_block_is_no_fragment() -> None:
    empty = fragment(replace(HEADER, block=block_digest(b"")), b"")
    with pytest.raises(FragmentRefused):
        check(empty, OF, generation=Generation(1))


def test_runs_are_distinguished() -> None:
    assert run_digest(RunId("a")) != run_digest(RunId("b"))
    assert run_digest(RunId("a")) == run_digest(RunId("a"))
