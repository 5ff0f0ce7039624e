"""Numbers are rounded from one dtype to another just as torch rounds them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrun.sharding.source_index import Bits
from ftrun.tools.checkpoints import convert_writer
from ftrun.tools.checkpoints.convert_writer import bits_type, converted, mean

TORCH = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
WIDTH = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}

dtypes = st.sampled_from(list(TORCH))


def bits_of(tensor: torch.Tensor) -> Bits:
    raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return np.frombuffer(raw, bits_type(tensor.element_size()))


def tensor_of(bits: Bits, dtype: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(bits.tobytes()), dtype=TORCH[dtype])


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal in every bit; a NaN in one is a NaN in the other."""
    is_none = expected.isnan()
    assert torch.equal(found.isnan(), is_none)
    assert np.array_equal(bits_of(found[~is_none]), bits_of(expected[~is_none]))


@settings(deadline=None, max_examples=200)
@given(dtypes, dtypes, st.binary(min_size=8, max_size=256))
def test_any_bits_become_what_torch_makes_of_them(old: str, new: str, raw: bytes) -> None:
    bits = np.frombuffer(raw[: len(raw) // 8 * 8], bits_type(WIDTH[old]))
    expected = tensor_of(bits, old).to(TORCH[new])
    assert_equal(tensor_of(converted(bits, old, new), new), expected)


@pytest.mark.parametrize("old", ["F16", "BF16"])
@pytest.mark.parametrize("new", list(TORCH))
def test_all_small_numbers(old: str, new: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    expected = tensor_of(bits, old).to(TORCH[new])
    assert_equal(tensor_of(converted(bits, old, new), new), expected)


def test_bfloat16_comes_back_bit_for_bit_and_a_nan_stays_one() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    assert np.array_equal(converted(converted(bits, "BF16", "F32"), "F32", "BF16"), bits)
    low = np.array([0x7F800001, 0xFF80FFFF], np.uint32)
    assert converted(low, "F32", "BF16").tolist() == [0x7FC0, 0xFFC0]


def test_ties_go_to_the_even_one() -> None:
    halves = torch.tensor([1.00390625, 1.01171875, -1.00390625, 3.4e38], dtype=torch.float32)
    assert_equal(tensor_of(converted(bits_of(halves), "F32", "BF16"), "BF16"), halves.bfloat16())


def test_what_is_converted_in_parts_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    bits = bits_of(torch.randn(1000, generator=torch.Generator().manual_seed(1)))
    once = converted(bits, "F32", "BF16"), mean([bits, bits[::-1].copy()], "F32")
    monkeypatch.setattr(convert_writer, "_AT_ONCE", 7)
    again = converted(bits, "F32", "BF16"), mean([bits, bits[::-1].copy()], "F32")
    assert all(map(np.array_equal, once, again))


@pytest.mark.parametrize("dtype", list(TORCH))
def test_a_mean_is_rounded_once(dtype: str) -> None:
    made = torch.Generator().manual_seed(2)
    copies = [torch.randn(500, generator=made, dtype=torch.float64) for _ in range(3)]
    copies = [one.to(TORCH[dtype]) for one in copies]
    total = copies[0].double() + copies[1].double() + copies[2].double()
    expected = (total / 3).to(TORCH[dtype])
    assert_equal(tensor_of(mean([bits_of(one) for one in copies], dtype), dtype), expected)
