"""What the status of several nodes says of warnings and of nodes that stand by."""

import pytest

from ftrun.agent.publish.cluster_status import WARNINGS_SHOWN, _warnings, standing_by
from ftrun.membership.leader.failure_detector import FailureDetector
from ftrun.wire.cluster.membership import Heartbeat
from tests.unit.recovery.made import SETTINGS, card, meet, plan


@pytest.mark.parametrize(("count", "last"), [(2, "node n1: w"), (64, "61 more nodes with such")])
def test_warnings_of_some_nodes_are_shown(count: int, last: str) -> None:
    beats = {f"n{number}": Heartbeat(generation=1, repeat_warning="w") for number in range(count)}
    found = _warnings({**beats, "quiet": Heartbeat(generation=1)})
    assert found[0] == "node n0: w"
    assert found[-1].startswith(last)
    assert len(found) == min(count, WARNINGS_SHOWN + 1)


def test_a_node_that_has_come_stands_by_also_without_a_vote() -> None:
    peers = FailureDetector(card("a"), SETTINGS)
    for name in "abcdefg":
        meet(peers, name)
    peers.by_id["c"].lost = peers.by_id["d"].lost = "silent"
    peers.by_id["e"].is_leaving = peers.by_id["f"].is_mute = True
    assert standing_by(peers, plan(1, "ab", "c")) == {"g"}
    peers.by_id["c"].lost = ""
    assert standing_by(peers, plan(1, "ab", "c")) == {"c", "g"}
    peers.by_id["g"].linked = False
    assert standing_by(peers, plan(1, "ab", "c")) == {"c"}
