"""Nodes that were lost too often, or evicted, run no ranks for an hour."""

import msgspec

from ftrun.recovery.past import NodeFailures


def test_losses_of_an_hour_are_counted_beside_those_of_the_last_leader() -> None:
    made = NodeFailures(3)
    made.succeed({"a": [1000.0], "b": [10.0]}, {}, now_s=2000.0)
    made.note("a", now_s=2100.0)
    made.note("a", now_s=2200.0)
    assert made.ages_s(now_s=2200.0) == {"a": [1200.0, 100.0, 0.0], "b": [210.0]}
    assert made.set_aside(now_s=2200.0) == {"a"}
    assert made.set_aside(now_s=4600.0) == set()
    assert made.ages_s(now_s=6000.0) == {}


def test_a_barred_node_stays_aside_for_an_hour_also_under_the_next_leader() -> None:
    made, heir = NodeFailures(3), NodeFailures(3)
    made.bar("a", now_s=100.0)
    assert made.set_aside(now_s=200.0) == {"a"}
    heir.succeed(made.ages_s(now_s=200.0), made.barred_ages_s(now_s=200.0), now_s=50.0)
    assert heir.set_aside(now_s=3549.0) == {"a"}
    assert heir.set_aside(now_s=3550.0) == set()
    heir.succeed({}, {}, now_s=60.0)
    assert heir.set_aside(now_s=61.0) == set()


def test_what_is_kept_of_a_barred_node_does_not_grow_with_the_limit() -> None:
    """A limit of 100,000 made each plan 0.9 MB larger, and agents too slow for their heartbeats."""
    made = NodeFailures(100_000)
    made.bar("a", now_s=1.0)
    assert made.set_aside(now_s=2.0) == {"a"}
    kept = (made.ages_s(now_s=2.0), made.barred_ages_s(now_s=2.0))
    assert len(msgspec.msgpack.encode(kept)) < 100
