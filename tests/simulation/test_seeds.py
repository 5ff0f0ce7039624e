"""Seeds of worlds in which the protocol once failed; each rule also has its own unit test."""

import pytest

from simulation.mishaps import has_mishaps
from simulation.sweep import checked

SEEDS = [
    pytest.param(2374, "liveness", id="a stale leader wins a node back"),
    pytest.param(3659, "liveness", id="a minority that gives up ends the majority"),
    pytest.param(3843, "liveness", id="a minority gives up while the others come back"),
    pytest.param(4409, "liveness", id="a new node loses its leader, which is draining"),
    pytest.param(1682768, "safety", id="the committed protection is overwritten too early"),
    pytest.param(9001035, "liveness", id="a member of an announced plan has promised another"),
    pytest.param(5001480, "liveness", id="a node that has returned leaves again"),
    pytest.param(9001403, "liveness", id="a draining node ends before its state is fetched"),
    pytest.param(98839449, "liveness", id="a draining node ends before the voters have changed"),
    pytest.param(300, "liveness", id="a round restarts just before the commit"),
    pytest.param(922, "liveness", id="an endpoint without memory starts a second run"),
    pytest.param(4285, "liveness", id="the only member is lost before its first commit"),
    pytest.param(20002064, "safety", id="an older protection is kept after an SMP has moved"),
    pytest.param(30000246, "safety", id="ranks of another world overwrite a committed version"),
    pytest.param(40006180, "liveness", id="a refilled part hides the complete one"),
    pytest.param(50001547, "liveness", id="a restarted SMP counts an abandoned seal"),
    pytest.param(101942, "liveness", id="a ready node does not repeat lost messages"),
    pytest.param(101262, "liveness", id="a single node fetches the state of a draining node"),
    pytest.param(101999, "liveness", id="a single node waits for the leader to name a step"),
    pytest.param(101203, "liveness", id="a damaged mirror is offered repeatedly"),
    pytest.param(400454, "liveness", id="a mirror is damaged after a restore"),
    pytest.param(
        51328, "liveness", id="a node ignores the heartbeats of a leader that leads again"
    ),
    pytest.param(63898, "liveness", id="a draining node holds shards of the previous world"),
    pytest.param(69988, "liveness", id="an SMP is dialled before it knows its new agent"),
    pytest.param(208467, "liveness", id="a damaged part is found by ranks of another world"),
    pytest.param(216406, "liveness", id="a node has slots and no part of their protection"),
    pytest.param(308989, "liveness", id="a second run without a version hides the first one"),
    pytest.param(310668, "liveness", id="a second run hides a loss of the first one"),
    pytest.param(333966, "liveness", id="a node outside the world holds its restored version"),
    pytest.param(503209, "liveness", id="a version is committed after two of its nodes have ended"),
    pytest.param(610637, "safety", id="a second run has heartbeats of the first one"),
    pytest.param(625331, "liveness", id="two runs have used the same number"),
    pytest.param(716607, "safety", id="a new leader dials the endpoint at once"),
    pytest.param(731817, "liveness", id="a restarted node and a second run have one number"),
    pytest.param(740004, "liveness", id="two proposers repeat their ballots at the same times"),
    pytest.param(710763, "safety", id="a plan is chosen late, after a voter revision"),
    pytest.param(700296, "safety", id="one node only has fetched its restore point"),
    pytest.param(1082705, "safety", id="the node that reported the newest plan is lost"),
    pytest.param(1084762, "liveness", id="the only shards of the previous world are lost"),
    pytest.param(1151443, "safety", id="a second run's plan has the number of the first run's"),
    pytest.param(1138442, "liveness", id="an SMP commits before its new agent has a plan"),
    pytest.param(1213339, "liveness", id="a leader leaves while another voter is being lost"),
    pytest.param(1225085, "safety", id="a node that left holds an older version than the members"),
    pytest.param(1504089, "liveness", id="a leader that led before does not know a spare"),
    pytest.param(1505351, "safety", id="a node did not mark its part of a commit"),
    pytest.param(1524188, "liveness", id="two proposers of two runs meet"),
    pytest.param(1559306, "safety", id="a ballot of a second run meets the leader of the first"),
    pytest.param(1728810, "liveness", id="a draining node has proposed itself while cut off"),
    pytest.param(1785009, "liveness", id="the newest protection of a lost rank is damaged"),
    pytest.param(1548031, "liveness", id="a commit while two nodes of one group are being lost"),
]
WITH_MISHAPS = [
    pytest.param(20298, "liveness", id="a node that answers a ballot too late never joins"),
    pytest.param(201420, "liveness", id="an agent forgets that a version is ready"),
    pytest.param(71003075, "liveness", id="half of a plan's voters are dead at its announcement"),
    pytest.param(35607, "liveness", id="a damaged shard is rebuilt from complete protection"),
    pytest.param(200130, "liveness", id="a node without a checkpoint takes it from the others"),
    pytest.param(701745, "liveness", id="ranks read a version of another world only once"),
    pytest.param(702007, "liveness", id="nodes that can load no checkpoint run no ranks"),
    pytest.param(200004, "liveness", id="no checkpoint loads after a majority chose the disk"),
]


@pytest.mark.parametrize(("seed", "mode"), SEEDS)
def test_it_does_not_fail_again(seed: int, mode: str) -> None:
    assert [*checked([seed], modes=[mode])]


@pytest.mark.parametrize(("seed", "mode"), WITH_MISHAPS)
def test_it_does_not_fail_again_with_mishaps(seed: int, mode: str) -> None:
    assert [*checked([seed], has_mishaps, modes=[mode], flags=" --mishaps")]
