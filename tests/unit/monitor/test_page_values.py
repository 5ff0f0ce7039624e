"""Histogram of step durations, the deadlines derived from it, and process groups in a text line."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrun.config.profile import HangConfig
from ftrun.monitor.page_values import (
    FORGET_AT,
    NUM_BUCKETS,
    Backends,
    bucket_of,
    decode_backends,
    decode_groups,
    decode_ranks,
    encode_backends,
    encode_groups,
    encode_ranks,
    quantile_s,
    upper_edge_s,
)
from ftrun.monitor.verdicts import RankView, ranks_text
from ftrun.monitor.wait_graph import HangDeadlines
from ftrun.wire.shared_memory.pages import SharedPage, create_page


@given(st.integers(0, 1 << 60))
def test_a_bucket_is_at_most_a_quarter_too_large(duration_ns: int) -> None:
    bucket = bucket_of(duration_ns)
    assert 0 <= bucket < NUM_BUCKETS
    if 0 < bucket < NUM_BUCKETS - 1:
        seconds = (duration_ns // 1000) / 1e6
        assert seconds <= upper_edge_s(bucket) <= seconds * 1.26


def test_quantiles() -> None:
    counts = [0] * NUM_BUCKETS
    assert quantile_s(counts, 0.99) == 0.0
    for duration_s in [0.1] * 98 + [5.0] * 2:
        counts[bucket_of(int(duration_s * 1e9))] += 1
    assert 0.1 <= quantile_s(counts, 0.5) <= 0.125
    assert 5.0 <= quantile_s(counts, 0.99) <= 6.25
    assert quantile_s(counts, 1.1) == upper_edge_s(NUM_BUCKETS - 1)


def test_a_page_counts_and_forgets() -> None:
    fd = create_page("test")
    page = SharedPage(fd)
    for _ in range(FORGET_AT - 1):
        page.count_step(10**8)
    assert sum(page.step_times) == FORGET_AT - 1
    page.count_step(10**10)
    assert sum(page.step_times) == FORGET_AT // 2 - 1
    page.groups = "0=0-7"
    page.phase, page.note = "eval", "a note"
    assert (page.groups, page.phase, page.note) == ("0=0-7", "eval", "a note")
    os.close(fd)


def test_deadlines_follow_the_steps() -> None:
    quick = HangDeadlines.of(0.1, HangConfig())
    assert (quick.act_s, quick.kill_s) == (10.0, 120.0)
    slow = HangDeadlines.of(20.0, HangConfig())
    assert (slow.act_s, slow.kill_s) == (60.0, 200.0)
    assert quick.sample_s < quick.suspect_after_s < quick.act_s
    assert [quick.number(one) for one in (8.0, 9.0, 10.0, 120.0, 1800.0)] == [0, 1, 2, 3, 4]


@given(st.lists(st.integers(0, 5000), min_size=1, unique=True))
def test_ranks_come_back(ranks: list[int]) -> None:
    assert sorted(decode_ranks(encode_ranks(ranks))) == sorted(ranks)


def test_ranks_are_short() -> None:
    assert encode_ranks(range(4096)) == "0-4095"
    assert encode_ranks(range(0, 64, 8)) == "0-56:8"
    assert encode_ranks([0, 3]) == "0,3"
    assert encode_ranks([0, 1, 2, 5, 9]) == "0-2,5,9"


def test_groups_come_back_as_many_as_fit() -> None:
    groups = {"0": range(8), "a b": [0, 4]}
    text = encode_groups(groups, 100)
    assert decode_groups(text) == {"0": tuple(range(8)), "ab": (0, 4)}
    assert decode_groups(encode_groups(groups, 7)) == {"0": tuple(range(8))}
    assert decode_groups("0=0-7 torn=1-x word") == {"0": tuple(range(8))}


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([3], "rank 3"),
        ([1, 2], "ranks 1 and 2"),
        (range(7), "ranks 0 to 6"),
        ([1, 3, 9], "ranks 1, 3 and 9"),
        (range(0, 40, 2), "20 ranks"),
    ],
)
def test_ranks_in_words(ranks: list[int], words: str) -> None:
    assert ranks_text(ranks) == words


def test_the_users_own_line_is_found() -> None:
    stack = ("/v/site-packages/torch/nn/functional.py:5 in linear", "/me/train.py:8 in go")
    assert RankView(0, 1, "S", 1, 1.0, stack=stack).place == "/me/train.py:8 in go"
    assert RankView(0, 1, "S", 1, 1.0, stack=stack[:1]).place == stack[0]
    assert RankView(0, 1, "S", 1, 1.0).place == ""


def test_backends_come_back() -> None:
    both = Backends({"cpu": "gloo", "cuda": "nccl"}, (0, None, 4))
    assert encode_backends(both, 100) == "cpu:gloo cuda:nccl 0,-,4"
    assert decode_backends(encode_backends(both, 100)) == both
    assert both.device_backend == "nccl"
    assert encode_backends(both, 20) == "cpu:gloo cuda:nccl"
    plain = Backends({"cpu": "gloo", "cuda": "gloo"}, (None,))
    assert encode_backends(plain, 100) == "cpu:gloo cuda:gloo"
    assert plain.device_backend == ""
    assert decode_backends("") == Backends()
    assert decode_backends("torn 1,2").ids == (1, 2)
