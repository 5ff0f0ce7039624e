"""Warnings of many nodes stay few lines."""

import pytest

from ftrun.agent.cluster_status import WARNINGS_SHOWN, _warnings
from ftrun.wire.heartbeats import Beat


@pytest.mark.parametrize(("count", "last"), [(2, "node n1: w"), (64, "61 more nodes with such")])
def test_warnings_of_some_nodes_are_shown(count: int, last: str) -> None:
    beats = {f"n{number}": Beat(generation=1, repeat_warning="w") for number in range(count)}
    found = _warnings({**beats, "quiet": Beat(generation=1)})
    assert found[0] == "node n0: w"
    assert found[-1].startswith(last)
    assert len(found) == min(count, WARNINGS_SHOWN + 1)
