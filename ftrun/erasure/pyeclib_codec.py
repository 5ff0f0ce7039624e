"""The codec through pyeclib's public functions: the fallback for ISA-L, and its oracle in tests.

pyeclib puts a header before each block, and requires it to rebuild. Here the headers are those of a
stripe of zeros of the same length, because they hold only index and lengths.

Rule 1: pyeclib gets only `bytes`, because its decode of any other type ends the process.
Rule 2: pyeclib accepts flipped bits, duplicates and blocks of two generations without an error. The
        caller of `rebuild` has checked the blocks before.
"""

from collections.abc import Mapping, Sequence

from ftrun.erasure.codec import Buffer, check_counts, check_position, check_shape, sources_of
from ftrun.erasure.pinned_buffers import PinnedBuffers
from ftrun.errors import NotSupportedHere


class PyeclibCodec:
    """Reed-Solomon by pyeclib's isa_l_rs_cauchy."""

    name = "pyeclib"

    def __init__(self, k: int, m: int) -> None:
        """Raises NotSupportedHere if pyeclib or ISA-L is missing."""
        check_shape(k, m)
        self.k, self.m = k, m
        try:
            from pyeclib.ec_iface import ECDriver, ECDriverError
        except ImportError as error:
            raise NotSupportedHere(f"pyeclib cannot be imported: {error}") from error
        try:
            self._driver = ECDriver(ec_type="isa_l_rs_cauchy", k=k, m=m)
        except ECDriverError as error:
            raise NotSupportedHere(f"pyeclib has no ISA-L: {error}") from error
        self._headers: tuple[int, list[bytes]] = (0, [])

    def encode(self, data: Sequence[Buffer], parity: Sequence[Buffer]) -> None:
        check_counts(self, data, parity)
        with PinnedBuffers(data, parity) as blocks:
            made = self._parity_of([_bytes(one) for one in data], blocks.num_bytes)
            for target, found in zip(parity, made, strict=True):
                _write(target, found)

    def update(
        self, position: int, data: Buffer, parity_index: int, parity: Buffer, *, first: bool
    ) -> None:
        check_position(self, position, parity_index)
        with PinnedBuffers([data], [parity], may_be_shorter=True) as blocks:
            length = blocks.num_bytes
            # The code is linear: the contribution of a block is the parity of a stripe with it
            # among zeros.
            stripe = [bytes(length)] * self.k
            stripe[position] = _bytes(data).ljust(length, b"\0")
            added = self._parity_of(stripe, length)[parity_index]
            _write(parity, added if first else _xor(added, _bytes(parity)))

    def rebuild(self, have: Mapping[int, Buffer], want: Mapping[int, Buffer]) -> None:
        used = sources_of(self, have, want)
        with PinnedBuffers([have[i] for i in used], [*want.values()]) as blocks:
            headers = self._headers_of(blocks.num_bytes)
            fragments = [headers[i] + _bytes(have[i]) for i in used]
            # reconstruct() sorts the list that it is given, and returns the blocks in that order.
            wanted = sorted(want)
            made = self._driver.reconstruct(fragments, [*wanted])
            for index, fragment in zip(wanted, made, strict=True):
                _write(want[index], fragment[len(headers[index]) :])

    def _parity_of(self, data: list[bytes], length: int) -> list[bytes]:
        made = self._driver.encode(b"".join(data))[self.k :]
        header_bytes = len(made[0]) - length
        return [one[header_bytes:] for one in made]

    def _headers_of(self, length: int) -> list[bytes]:
        # One attribute for both values, so that another thread never sees a mixed pair.
        known_length, headers = self._headers
        if known_length != length:
            made = self._driver.encode(bytes(self.k * length))
            headers = [one[: len(one) - length] for one in made]
            self._headers = (length, headers)
        return headers


def _bytes(block: Buffer) -> bytes:
    return bytes(memoryview(block).cast("B"))


def _write(target: Buffer, found: bytes) -> None:
    memoryview(target).cast("B")[:] = found


def _xor(one: bytes, other: bytes) -> bytes:
    mixed = int.from_bytes(one, "little") ^ int.from_bytes(other, "little")
    return mixed.to_bytes(len(one), "little")
