"""The main thread finds out that a thread of its agent has ended in a bug."""

import threading
from typing import Any

import pytest

from ftrun.agent.cluster.cluster_brain import ClusterControlLoop
from ftrun.agent.cluster.witness_thread import WitnessClient
from ftrun.membership.events import WitnessAnswered
from ftrun.recovery.commands import QueryWitness, WitnessOperation
from ftrun.wire.cluster.generation import NodeCard
from tests.unit.recovery.made import SETTINGS, card

DEADLINE_S = 60.0


class Register:
    """An outside witness that is asked in a way that no release foresees."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def ask(self, asked: QueryWitness, me: NodeCard) -> WitnessAnswered:
        self.asked.set()
        raise KeyError("a bug")


def test_an_agent_whose_witness_thread_has_ended_ends_too() -> None:
    register: Any = Register()
    brain = ClusterControlLoop(card("a"), SETTINGS, kept=None, took_effect=False)
    brain.witness_thread = WitnessClient(register, card("a"), brain.tell)
    brain.witness_thread.start()
    brain.passing()
    brain.witness_thread.ask(QueryWitness(WitnessOperation.KEEP, 0.0))
    assert register.asked.wait(DEADLINE_S)
    brain.close()
    with pytest.raises(RuntimeError, match="the witness thread has ended") as found:
        brain.passing()
    assert isinstance(found.value.__cause__, KeyError)
