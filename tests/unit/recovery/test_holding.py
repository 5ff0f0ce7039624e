"""The lease of ranks ends before other ranks take their place; no node beside: there is none."""

import pytest

from ftrun.config.cluster import ClusterSize
from tests.unit.recovery.agents import STEP_S, Agents
from tests.unit.recovery.made import settings

TICK_S = STEP_S


def begun(wishes: ClusterSize) -> Agents:
    """A run of three nodes, led by a, that has begun."""
    made = Agents("abc", settings(wishes=wishes, settle_s=5.0))
    made.passes(20.0)
    assert made.lead() == "a"
    return made


def successors_start_s(made: Agents, lost: str) -> float:
    """When the next generation takes effect on the other nodes."""
    give_up_s = made.now_s + 60.0
    while not any(
        generation > 0 for node_id, generation in made.running().items() if node_id != lost
    ):
        assert made.now_s < give_up_s
        made.passes(TICK_S)
    return made.now_s


@pytest.mark.parametrize("phase", range(8))
@pytest.mark.parametrize("lost", ["a", "b"])
def test_lease_of_a_frozen_agent_ends_before_its_successors_start(lost: str, phase: int) -> None:
    made = begun(ClusterSize(2, 2, 1))
    made.passes(phase * TICK_S)
    made[lost].is_frozen = True
    lease_s = made[lost].member.holding.lease_s
    assert lease_s is not None
    assert made.now_s < lease_s <= made.now_s + 1.0
    assert lease_s < successors_start_s(made, lost)
    assert made[lost].member.holding.lease_s == lease_s


@pytest.mark.parametrize("lost", ["a", "b"])
def test_lease_is_not_renewed_by_an_agent_that_is_cut_off(lost: str) -> None:
    made = begun(ClusterSize(2, 2, 1))
    made.cut(lost)
    last_s = 0.0
    give_up_s = made.now_s + 60.0
    while not any(new > 0 for one, new in made.running().items() if one != lost):
        assert made.now_s < give_up_s
        made.passes(TICK_S)
        last_s = max(last_s, made[lost].member.holding.lease_s or 0.0)
    assert 0.0 < last_s < made.now_s


def test_lease_is_renewed_when_the_lead_is_heard_again() -> None:
    made = begun(ClusterSize(2, 3, 0))
    made.cut("c")
    made.passes(2.5)
    assert made["c"].member.is_held
    assert made["c"].member.holding.lease_s == 0.0
    made.heal()
    made.passes(0.5)
    lease_s = made["c"].member.holding.lease_s
    assert lease_s is not None
    assert lease_s > made.now_s


def test_a_node_that_nothing_can_replace_needs_no_lease() -> None:
    made = Agents("a", settings(wishes=ClusterSize(1, 1, 0)))
    made.passes(20.0)
    assert made.running() == {"a": 0}
    assert made["a"].member.holding.lease_s is None
