"""The control loop: a failed thread ends the agent; a node alone reads the finished run."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ftrun.agent.cluster import control_loop
from ftrun.agent.cluster.control_loop import LOOK_EVERY_S, ClusterControlLoop, FinishedWatch
from ftrun.agent.cluster.etcd_witness import WitnessClient
from ftrun.membership.discovery import MemberRole
from ftrun.membership.events import RunFinished, WitnessAnswered
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


LIFE = "7f"


@pytest.fixture
def lives(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of which life each look was; the record says that the run has finished."""
    found: list[str] = []

    def has_finished(spec: object, record: object, *, life: str) -> str:
        found.append(life)
        return "it has finished"

    monkeypatch.setattr(control_loop, "has_finished", has_finished)
    return found


def told_to(member: SimpleNamespace, directory: object) -> list[object]:
    """What a brain is told in the time of two looks."""
    told: list[object] = []
    brain: Any = SimpleNamespace(plan=SimpleNamespace(life=LIFE), member=member, tell=told.append)
    spec: Any = SimpleNamespace(nodes=object(), checkpoint_directory=directory)
    watch = FinishedWatch(spec, brain)
    for now_s in (0.0, LOOK_EVERY_S / 2, LOOK_EVERY_S):
        watch.look(now_s=now_s)
        if watch.thread is not None:
            watch.thread.join()
    return told


def leading(*, is_paused: bool) -> SimpleNamespace:
    pause = SimpleNamespace(is_on=is_paused)
    return SimpleNamespace(lead=SimpleNamespace(pause=pause), role=MemberRole.LEADING)


@pytest.mark.parametrize("role", [MemberRole.JOINING, MemberRole.SEEKING])
def test_a_node_without_a_leader_hears_that_its_run_has_finished(
    role: MemberRole, lives: list[str], tmp_path: Path
) -> None:
    member = SimpleNamespace(lead=None, role=role)
    assert told_to(member, str(tmp_path)) == [RunFinished("it has finished")]
    assert lives == [LIFE]


def test_a_paused_leader_hears_it_and_one_that_decides_does_not(
    lives: list[str], tmp_path: Path
) -> None:
    assert told_to(leading(is_paused=True), str(tmp_path)) == [RunFinished("it has finished")]
    assert told_to(leading(is_paused=False), str(tmp_path)) == []


@pytest.mark.parametrize("directory", [None, "s3://bucket/saved"])
def test_a_run_without_a_directory_has_no_record(directory: str | None, lives: list[str]) -> None:
    assert told_to(SimpleNamespace(lead=None, role=MemberRole.SEEKING), directory) == []
