"""The work of each rank in a step, without its waits, compared with the other ranks."""

from ftrun.monitor.slow.own_work import OwnWork


def test_a_window_needs_new_values_of_all_ranks() -> None:
    own = OwnWork()
    assert own.take() == {}
    own.add(0, 0, 0.0, 0.0)
    assert own.take() == {}
    own.add(1, 0, 0.0, 0.0)
    own.add(0, 10, 1.0, 0.2)
    assert own.take() == {}
    own.add(1, 1, 0.1, 0.0)
    assert own.take() == {}, "one step is too few"
    own.add(1, 10, 1.0, 0.6)
    window = own.take()
    assert {rank: round(one, 3) for rank, one in window.items()} == {0: 0.04, 1: -0.04}
    assert own.take() == {}


def test_a_generation_that_begins_again_has_no_value() -> None:
    own = OwnWork()
    for rank in (0, 1):
        own.add(rank, 10, 1.0, 0.0)
        own.add(rank, 2, 5.0, 0.0)
    assert own.take() == {}
