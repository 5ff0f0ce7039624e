"""Worlds in which the protocol once failed, by seed; each rule has a unit test of its own too."""

import pytest

from simulation.mishaps import has_mishaps
from simulation.run import Outcome, run_seed

SEEDS = [
    pytest.param(2374, "liveness", id="a stale leader takes a node back"),
    pytest.param(3659, "liveness", id="a minority that gives up ends the majority"),
    pytest.param(3843, "liveness", id="a minority gives up while the others come back"),
    pytest.param(4409, "liveness", id="a newcomer is stranded by a leaving leader"),
    pytest.param(1682768, "safety", id="the committed protection is overwritten too early"),
    pytest.param(9001035, "liveness", id="a member of an announced plan is bound to another"),
    pytest.param(5001480, "liveness", id="a node that is back leaves again"),
    pytest.param(9001403, "liveness", id="a leaver ends before what it holds is fetched"),
    pytest.param(98839449, "liveness", id="a leaver ends before the voters have changed"),
    pytest.param(300, "liveness", id="a round begins again just before the commit"),
    pytest.param(922, "liveness", id="an endpoint without memory begins a second run"),
    pytest.param(4285, "liveness", id="the only member is lost before its first commit"),
    pytest.param(20002064, "safety", id="an older protection is kept when an SMP has moved"),
    pytest.param(30000246, "safety", id="ranks of another world overwrite what is committed"),
    pytest.param(40006180, "liveness", id="a part that is filled once more hides the whole one"),
    pytest.param(50001547, "liveness", id="an SMP that is started again counts an abandoned seal"),
    pytest.param(101942, "liveness", id="a node that is ready does not repeat what was lost"),
    pytest.param(101262, "liveness", id="one node alone fetches what a leaving node holds"),
    pytest.param(101999, "liveness", id="one node alone waits for the leader to name a step"),
    pytest.param(101203, "liveness", id="a damaged mirror is offered again and again"),
    pytest.param(400454, "liveness", id="a mirror is damaged after a restore"),
    pytest.param(
        51328, "liveness", id="a node ignores the heartbeats of a leader that leads again"
    ),
    pytest.param(63898, "liveness", id="a leaver holds shards of the world that was"),
    pytest.param(69988, "liveness", id="an SMP is dialled before it knows its new agent"),
    pytest.param(208467, "liveness", id="a damaged part is found by ranks of another world"),
    pytest.param(216406, "liveness", id="a node has slots and no part of their protection"),
    pytest.param(308989, "liveness", id="a second run without a version hides the first one"),
    pytest.param(310668, "liveness", id="a second run hides what the first one has lost"),
    pytest.param(333966, "liveness", id="a node that left the world holds what it started from"),
    pytest.param(503209, "liveness", id="a version is committed after two of its nodes have ended"),
    pytest.param(610637, "safety", id="a second run has heartbeats of the first one"),
    pytest.param(700296, "safety", id="one node alone has fetched what it starts from"),
]
WITH_MISHAPS = [
    pytest.param(20298, "liveness", id="a node that answers a ballot too late is never taken in"),
    pytest.param(201420, "liveness", id="an agent forgets that a version is ready"),
    pytest.param(71003075, "liveness", id="half of a plan's voters are dead when it is announced"),
    pytest.param(35607, "liveness", id="a damaged shard is rebuilt, and its protection is whole"),
    pytest.param(200130, "liveness", id="a node without a checkpoint takes it from the others"),
    pytest.param(701745, "liveness", id="ranks read a version of another world once"),
    pytest.param(702007, "liveness", id="nodes that can load no checkpoint run no ranks"),
    pytest.param(200004, "liveness", id="no checkpoint loads after a majority has turned to disk"),
]


@pytest.mark.parametrize(("seed", "mode"), SEEDS)
def test_it_does_not_fail_again(seed: int, mode: str) -> None:
    check(run_seed(seed, mode))


@pytest.mark.parametrize(("seed", "mode"), WITH_MISHAPS)
def test_it_does_not_fail_again_with_mishaps(seed: int, mode: str) -> None:
    check(run_seed(seed, mode, prepare=has_mishaps))


def check(outcome: Outcome) -> None:
    story = "\n".join(outcome.log[-40:])
    assert not outcome.problem, f"{outcome.problem}\n{story}"
