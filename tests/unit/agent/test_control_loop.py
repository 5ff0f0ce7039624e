"""The control loop: a failed thread ends the agent; a single node reads the finished run."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ftrun.agent.cluster import control_loop
from ftrun.agent.cluster.control_loop import POLL_EVERY_S, ClusterControlLoop, FinishedWatch
from ftrun.agent.cluster.etcd_witness import WitnessClient
from ftrun.membership.discovery import MemberRole
from ftrun.membership.events import RunFinished, WitnessAnswered
from ftrun.recovery.commands import QueryWitness, WitnessOperation
from ftrun.wire.cluster.generation import NodeCard
from tests.unit.recovery.made import SETTINGS, card

DEADLINE_S = 60.0


class Register:
    """An outside witness that raises an unexpected error."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def ask(self, asked: QueryWitness, me: NodeCard) -> WitnessAnswered:
        self.asked.set()
        raise KeyError("a bug")


def test_an_agent_whose_witness_thread_has_ended_ends_too() -> None:
    register: Any = Register()
    control_loop = ClusterControlLoop(card("a"), SETTINGS, kept=None, is_chosen=False)
    control_loop.witness_thread = WitnessClient(register, card("a"), control_loop.post)
    control_loop.witness_thread.start()
    control_loop.tick()
    control_loop.witness_thread.ask(QueryWitness(WitnessOperation.RENEW, 0.0))
    assert register.asked.wait(DEADLINE_S)
    control_loop.close()
    with pytest.raises(RuntimeError, match="the witness thread has ended") as found:
        control_loop.tick()
    assert isinstance(found.value.__cause__, KeyError)


LIFE = "7f"


@pytest.fixture
def lives(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The life that each read asked for; the record says that the run has finished."""
    found: list[str] = []

    def has_finished(spec: object, record: object, *, life: str) -> str:
        found.append(life)
        return "it has finished"

    monkeypatch.setattr(control_loop, "has_finished", has_finished)
    return found


def reported_to(member: SimpleNamespace, directory: object) -> list[object]:
    """The reports to a control loop in the time of two polls."""
    reported: list[object] = []
    control_loop: Any = SimpleNamespace(
        plan=SimpleNamespace(life=LIFE), member=member, post=reported.append
    )
    spec: Any = SimpleNamespace(nodes=object(), checkpoint_directory=directory)
    watch = FinishedWatch(spec, control_loop)
    for now_s in (0.0, POLL_EVERY_S / 2, POLL_EVERY_S):
        watch.poll(now_s=now_s)
        if watch.thread is not None:
            watch.thread.join()
    return reported


def leading(*, is_paused: bool) -> SimpleNamespace:
    pause = SimpleNamespace(is_on=is_paused)
    return SimpleNamespace(leader=SimpleNamespace(pause=pause), role=MemberRole.LEADING)


@pytest.mark.parametrize("role", [MemberRole.JOINING, MemberRole.SEEKING])
def test_a_node_without_a_leader_is_informed_that_its_run_has_finished(
    role: MemberRole, lives: list[str], tmp_path: Path
) -> None:
    member = SimpleNamespace(leader=None, role=role)
    assert reported_to(member, str(tmp_path)) == [RunFinished("it has finished")]
    assert lives == [LIFE]


def test_a_paused_leader_receives_it_and_one_that_decides_does_not(
    lives: list[str], tmp_path: Path
) -> None:
    assert reported_to(leading(is_paused=True), str(tmp_path)) == [RunFinished("it has finished")]
    assert reported_to(leading(is_paused=False), str(tmp_path)) == []


@pytest.mark.parametrize("directory", [None, "s3://bucket/saved"])
def test_a_run_without_a_directory_has_no_record(directory: str | None, lives: list[str]) -> None:
    assert reported_to(SimpleNamespace(leader=None, role=MemberRole.SEEKING), directory) == []
