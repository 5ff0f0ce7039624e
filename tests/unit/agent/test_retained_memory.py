"""The next agent finds what the last one left with the stub, for plans of any size."""

import os
import socket

import msgspec
import pytest

from ftrun.agent.snapshots.retained_memory import (
    RETAINED_FDS,
    STUB_SOCKET,
    PersistedAgentState,
    StubClient,
    decode_state,
    kept,
    newer,
)
from tests.unit.recovery.made import card, plan

# An agent keeps its end of the socket until its process ends; here it is collected earlier.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

MANY_NODES = 4000
"""More JSON than one variable or one message can carry."""


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> socket.socket:
    """The stub's end of the socket; the agent finds its end in the environment."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    here.settimeout(10)
    monkeypatch.setenv(STUB_SOCKET, str(there.detach()))
    return here


def inherited(stub: socket.socket) -> str:
    """Receives one message like the stub, and names the descriptors like it."""
    _, fds, _, _ = socket.recv_fds(stub, 1, 253)
    return ",".join(map(str, fds))


@pytest.mark.parametrize("num_nodes", [1, 2, MANY_NODES])
def test_state_and_memory_come_to_the_next_agent_and_to_the_one_after_it(
    stub: socket.socket, monkeypatch: pytest.MonkeyPatch, num_nodes: int
) -> None:
    cards = [card(f"node-{number}") for number in range(num_nodes)]
    state = PersistedAgentState(plan(1, cards), is_chosen=True)
    arena = os.memfd_create("arena")
    os.write(arena, b"bytes")
    StubClient().keep([arena], state)
    os.close(arena)
    names = inherited(stub)
    again = ",".join(str(os.dup(int(fd))) for fd in names.split(","))
    for fds in (names, again):  # an agent that dies before its first message
        monkeypatch.setenv(RETAINED_FDS, fds)
        (found,), reported = kept()
        assert reported == state
        assert os.pread(found, 9, 0) == b"bytes"
        assert not os.get_inheritable(found)
        os.close(found)
    stub.close()


def test_the_same_is_not_sent_twice_and_an_ended_stub_is_harmless(
    stub: socket.socket,
) -> None:
    link, state = StubClient(), PersistedAgentState(is_chosen=True)
    link.keep([], state)
    link.keep([], state)
    inherited(stub)
    stub.setblocking(False)
    with pytest.raises(BlockingIOError):
        stub.recv(1)
    stub.close()
    link.keep([], PersistedAgentState())


def test_nothing_was_kept_for_a_first_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RETAINED_FDS, raising=False)
    assert kept() == ([], PersistedAgentState())


OLD = PersistedAgentState(plan(3, "ab"), is_chosen=True)
NEW = PersistedAgentState(plan(4, "ab"), is_chosen=False)


def test_the_newer_plan_counts_whichever_node_kept_it() -> None:
    assert newer(OLD, NEW).plan == newer(NEW, OLD).plan == NEW.plan
    voter_revision = msgspec.structs.replace(
        NEW, plan=msgspec.structs.replace(plan(4, "ab"), voter_revision=1)
    )
    assert newer(NEW, voter_revision).plan == voter_revision.plan


def test_of_one_plan_the_word_that_it_took_effect_counts() -> None:
    is_chosen = msgspec.structs.replace(NEW, is_chosen=True)
    assert newer(NEW, is_chosen).is_chosen
    assert newer(is_chosen, NEW).is_chosen


def test_where_one_has_nothing_the_other_counts() -> None:
    nothing = PersistedAgentState()
    assert decode_state(b"") == nothing
    assert newer(nothing, OLD) == newer(OLD, nothing) == OLD
    assert newer(nothing, nothing) == PersistedAgentState()


def test_a_fault_lasts_as_long_as_the_stub() -> None:
    """An SMP outlives its stub; then the device may have been repaired before the next start."""
    found = msgspec.structs.replace(OLD, fault="GPU 2 is lost")
    assert newer(NEW, found) == msgspec.structs.replace(NEW, fault=found.fault)
    assert newer(found, NEW).fault == ""
    assert newer(found, PersistedAgentState()) == OLD
    assert decode_state(found.encode()) == found


def test_what_was_kept_is_read_again_and_what_another_version_kept_is_not() -> None:
    assert decode_state(OLD.encode()) == OLD
    assert decode_state(b'{"plan": {"of": "another version"}}') is None
