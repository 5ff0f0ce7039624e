"""A rank's line to its agent."""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import msgspec
import pytest

from ftrun import clock
from ftrun.agent.launch.zygote_client import send_request
from ftrun.wire.messages.worker import Parked, Revoke, encode_launch
from ftrun.wire.shared_memory.pages import HeartbeatField, SharedPage, create_page
from ftrun.worker.survivors.line import AgentLine
from tests.launch_requests import launch_request

WAIT_S = 60.0


class Agent:
    """The agent's end of a line, and the rank's."""

    def __init__(self) -> None:
        self.socket, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.dup(self.socket.fileno())  # open to the end of this process, which ends with its line
        self.page = SharedPage(create_page("beat"))
        self.page.set(HeartbeatField.GENERATION, 3)
        self.aborted: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """Whether the generation was over when the groups were aborted."""
        self.line = AgentLine(its.detach(), self.page, self._abort)

    def _abort(self) -> None:
        self.aborted.put(self.line.is_revoked)

    def revoke(self, generation: int = 3) -> None:
        self.socket.send(msgspec.json.encode(Revoke(generation)))

    def answer(self) -> Parked:
        self.socket.settimeout(WAIT_S)
        return msgspec.json.decode(self.socket.recv(1 << 16), type=Parked)


@pytest.fixture
def agent() -> Iterator[Agent]:
    made = Agent()
    yield made
    made.socket.close()


def test_the_generation_is_over_before_the_groups_are_aborted(agent: Agent) -> None:
    agent.line.set_may_stay(True)
    assert agent.page.get(HeartbeatField.MAY_STAY) == 1
    agent.revoke()
    assert agent.line.await_revoke(WAIT_S)
    assert agent.aborted.get(timeout=WAIT_S)


def test_a_second_revocation_and_one_of_another_generation_have_no_effect(agent: Agent) -> None:
    agent.line.set_may_stay(True)
    agent.revoke(2)
    agent.revoke()
    agent.revoke()
    assert agent.aborted.get(timeout=WAIT_S)
    agent.line.decline("the last message on the line")
    assert agent.answer().problem == "the last message on the line"
    assert agent.aborted.empty()


def test_outside_of_a_guarded_loop_a_revocation_is_declined(agent: Agent) -> None:
    agent.line.set_may_stay(True)
    agent.line.set_may_stay(False)
    agent.revoke()
    assert "outside of a loop" in agent.answer().problem
    assert not agent.line.is_revoked
    assert agent.aborted.empty()


def test_a_process_that_leaves_the_loop_after_the_end_of_its_generation_declines(
    agent: Agent,
) -> None:
    agent.line.set_may_stay(True)
    agent.revoke()
    assert agent.line.await_revoke(WAIT_S)
    agent.line.set_may_stay(False)
    answer = agent.answer()
    assert (answer.generation, answer.problem) == (
        3, "it was outside of a loop with session.guard()",
    )  # fmt: skip


def test_a_parked_process_gets_its_request_with_descriptors(agent: Agent) -> None:
    for renewals in range(2):
        agent.page.set(HeartbeatField.GENERATION, 3 + renewals)
        agent.line.set_may_stay(True)
        agent.revoke(3 + renewals)
        assert agent.line.await_revoke(WAIT_S)
        given: queue.SimpleQueue[object] = queue.SimpleQueue()
        parking = threading.Thread(target=lambda: given.put(agent.line.park(5, 9)))  # noqa: B023
        parking.start()
        assert agent.answer() == Parked(3 + renewals, 5, 9, renewals)
        assert agent.page.get(HeartbeatField.MAY_STAY) == 0
        large = {"TEXT": "x" * (1 << 20)}  # more than fits a message
        request = launch_request(generation=4 + renewals, variables=large, descriptors={"a": 0})
        with open(os.devnull) as file:
            send_request(agent.socket, encode_launch(request), [file.fileno()])
        received, fds = given.get(timeout=WAIT_S)  # type: ignore[misc]
        parking.join(WAIT_S)
        assert received == request
        assert os.readlink(f"/proc/self/fd/{fds[0]}") == os.devnull
        os.close(fds[0])
        assert not agent.line.is_revoked
    assert agent.line.renewals == 2


def test_a_message_that_is_no_revocation_costs_only_itself(agent: Agent) -> None:
    agent.socket.send(b"{}")
    agent.line.set_may_stay(True)
    agent.revoke()
    assert agent.line.await_revoke(WAIT_S)


ALONE = """
import socket, sys, time
from ftrun.wire.shared_memory.pages import SharedPage, create_page
from ftrun.worker.survivors.line import AgentLine
agent, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
AgentLine(its.detach(), SharedPage(create_page("page")), lambda: None)
assert "torch" not in sys.modules
agent.close()
time.sleep(60)
"""


def test_a_process_ends_with_its_line() -> None:
    since_s = clock.now_s()
    done = subprocess.run([sys.executable, "-c", ALONE], timeout=WAIT_S, check=False)
    assert done.returncode == 1
    assert clock.now_s() - since_s < 30.0


def test_a_launch_request_that_cannot_be_read_ends_the_process() -> None:
    """`park` would wait for it without limit."""
    code = ALONE.replace(
        "agent.close()",
        """
import os
from ftrun.wire.messages.worker import REQUEST_IN_MEMORY
socket.send_fds(agent, [REQUEST_IN_MEMORY], [os.memfd_create("empty")])
""",
    )
    done = subprocess.run(
        [sys.executable, "-c", code], timeout=WAIT_S, check=False, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "a message on the line is lost" in done.stderr


WAITING = """
import os, socket, sys
from ftrun.wire.shared_memory.pages import HeartbeatField, SharedPage, create_page
from ftrun.worker.survivors.line import AgentLine
page = SharedPage(create_page("page"))
line = AgentLine(int(sys.argv[1]), page, lambda: None)
line.set_may_stay(True)
print("waiting", flush=True)
os._exit(0 if line.await_revoke(1.0) else 2)
"""


def test_time_in_which_the_process_is_suspended_is_no_wait_for_a_revocation() -> None:
    agent, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-c", WAITING, str(its.fileno())]
    with (
        agent,
        its,
        subprocess.Popen(command, pass_fds=[its.fileno()], stdout=subprocess.PIPE) as waiting,
    ):
        assert waiting.stdout is not None
        waiting.stdout.readline()
        waiting.send_signal(signal.SIGSTOP)
        agent.send(msgspec.json.encode(Revoke(0)))
        clock.sleep(1.5)
        waiting.send_signal(signal.SIGCONT)
        assert waiting.wait(WAIT_S) == 0
