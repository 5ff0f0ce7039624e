"""A run resumes only from a version that every rank can be rebuilt from."""

from hypothesis import given
from hypothesis import strategies as st

from ftrun.ids import Rank, version
from ftrun.snapshot.restore_point import Offer, restore_point


def offer(rank: int, generation: int, step: int, world_size: int = 2) -> Offer:
    return Offer(Rank(rank), version(generation, step), world_size)


def test_the_newest_version_that_all_ranks_offer() -> None:
    found = restore_point(
        [offer(0, 0, 7), offer(0, 0, 8), offer(1, 0, 7), offer(1, 0, 8), offer(1, 0, 9)], 2
    )
    assert found.version == version(0, 8)
    assert found.why == "step 8 (generation 0): sealed by all 2 ranks"


def test_a_later_generation_is_newer_whatever_its_step() -> None:
    offers = [offer(rank, *which) for rank in (0, 1) for which in ((0, 9), (1, 5))]
    assert restore_point(offers, 2).version == version(1, 5)


def test_one_rank_alone() -> None:
    found = restore_point([offer(0, 0, 8, 1)], 1)
    assert found.why == "step 8 (generation 0): sealed by the only rank"


def test_a_rank_without_an_offer_is_named() -> None:
    found = restore_point([offer(0, 0, 8)], 2)
    assert found.version is None
    assert found.why == "no version is sealed by all 2 ranks: rank 1 offers nothing"


def test_several_ranks_without_an_offer_are_named() -> None:
    found = restore_point([offer(0, 0, 8, 3)], 3)
    assert found.why == "no version is sealed by all 3 ranks: ranks 1, 2 offer nothing"


def test_no_offer_at_all() -> None:
    assert restore_point([], 2).why == "no version is sealed by all 2 ranks: nothing is offered"


def test_offers_that_do_not_meet_are_named() -> None:
    found = restore_point([offer(0, 0, 7), offer(1, 0, 8)], 2)
    assert found.version is None
    assert found.why == (
        "no version is sealed by all 2 ranks: rank 0 has step 7 (generation 0); "
        "rank 1 has step 8 (generation 0)"
    )


def test_offers_of_another_world_size_are_set_aside_and_named() -> None:
    found = restore_point([offer(0, 0, 8, 4), offer(3, 0, 8, 4)], 2)
    assert found.version is None
    assert found.why.endswith("nothing is offered; set aside: 2 from a world of 4, this run has 2")


def test_a_rank_outside_the_world_does_not_count() -> None:
    assert restore_point([offer(0, 0, 8), offer(5, 0, 8)], 2).version is None


offers = st.lists(
    st.builds(
        offer,
        st.integers(0, 4),
        st.integers(-1, 2),
        st.integers(0, 4),
        st.sampled_from([1, 2, 3, 3, 3]),
    ),
    max_size=40,
)


@given(offers, st.integers(1, 3))
def test_nothing_newer_is_offered_by_all_and_the_order_of_offers_does_not_matter(
    given_offers: list[Offer], world_size: int
) -> None:
    found = restore_point(given_offers, world_size)
    assert restore_point(list(reversed(given_offers)), world_size) == found
    mine = [one for one in given_offers if one.world_size == world_size]
    for candidate in {one.version for one in mine}:
        complete = {one.rank for one in mine if one.version == candidate} >= set(range(world_size))
        if complete:
            assert found.version is not None
            assert found.version >= candidate
    if found.version is not None:
        assert {one.rank for one in mine if one.version == found.version} >= set(range(world_size))
    assert found.why
