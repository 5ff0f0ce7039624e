"""Variables that say over which rails ranks speak."""

import pytest

from ftrun.agent.launch import generation as generations
from ftrun.wire.cluster.generation import NetworkPlan, Rail
from tests.unit.recovery.made import card, plan


def test_a_bug_costs_the_variables_and_not_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    rails = [Rail("eth7", "10.0.0.1", 24)], [Rail("eth7", "10.0.0.2", 24)]
    cards = [card(one, rails=of) for one, of in zip("ab", rails, strict=True)]
    running = plan(0, cards, roads=NetworkPlan(order=["a", "b"], rails=["eth7"]))
    assert generations._road_variables(running, "a")["GLOO_SOCKET_IFNAME"] == "eth7"
    monkeypatch.setattr(generations, "match_rails", breaks)
    assert generations._road_variables(running, "a") == {}
