"""A worker reads its launch request from one variable or one message."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ftrun.agent.launch.zygote_client import send_request
from ftrun.ids import version
from ftrun.wire.messages.worker import decode_launch, encode_launch
from ftrun.wire.run_environment import LAUNCH
from ftrun.wire.shared_memory.pages import create_command_page, create_page, create_stack_file
from ftrun.worker.context import worker_context
from tests.launch_requests import launch_request, launch_variables

STANDBY = """
import json, os, socket, sys
from ftrun.worker.context import worker_context
from ftrun.worker.process import startup
request, fds, bound_with = startup._wait(socket.socket(fileno=int(sys.argv[1])), lambda: None)
startup.become_worker(request, fds, bound_with)
found = worker_context()
files = {name: os.readlink(f"/proc/self/fd/{fd}") for name, fd in found.launch.descriptors.items()}
print(json.dumps([os.environ["FTRUN_LAUNCH"], os.environ["OF_SCRIPT"], os.getcwd(), files]))
"""


@pytest.fixture
def pages() -> Iterator[dict[str, int]]:
    made = {
        "heartbeat": create_page("beat"),
        "command": create_command_page(),
        "stack": create_stack_file("0"),
    }
    yield made
    for fd in made.values():
        os.close(fd)


def test_a_request_comes_back_from_its_bytes() -> None:
    full = launch_request(restore=version(2, 7), restore_world_size=4, descriptors={"stack": 5})
    for made in (full, launch_request()):
        assert decode_launch(encode_launch(made)) == made


@pytest.mark.parametrize("missing", [LAUNCH, "RANK", "FTRUN_RUN_ID"])
def test_without_an_agent_there_is_no_context(
    missing: str, pages: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in launch_variables("r", launch_request(descriptors=pages)).items():
        monkeypatch.setenv(name, value)
    worker_context.cache_clear()
    try:
        context = worker_context()
        assert context is not None
        assert (context.rank, context.restore, context.is_resized) == (0, None, False)
        monkeypatch.delenv(missing)
        assert worker_context() is context, "a child that is forked shares it"
        worker_context.cache_clear()
        assert worker_context() is None
    finally:
        worker_context.cache_clear()


def test_a_standby_becomes_the_worker_of_its_message(
    pages: dict[str, int], tmp_path: os.PathLike[str]
) -> None:
    """Also below a rank of another run, whose request is in the environment of the agent."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    standby = subprocess.Popen(
        [sys.executable, "-c", STANDBY, str(its.fileno())], pass_fds=[its.fileno()]
    )
    its.close()
    read, write = os.pipe()
    outer = launch_variables("outer", launch_request(rank=3, restore=version(9, 9)))
    request = launch_request(
        start="warm",
        descriptors={**pages, "stdout": write, "stderr": 2},
        argv=["train.py"],
        variables={**os.environ, **outer, "FTRUN_RUN_ID": "r", "OF_SCRIPT": "1"},
        cwd=str(tmp_path),
    )
    send_request(mine, encode_launch(request), list(request.descriptors.values()))
    os.close(write)
    with open(read) as output:
        launch, of_script, cwd, files = json.loads(output.read())
    assert standby.wait(60) == 0
    mine.close()
    found = decode_launch(launch)
    assert (found.rank, found.restore, found.start) == (0, None, "warm")
    # Otherwise they would be in the environment twice.
    assert found.argv == []
    assert found.variables == {}
    assert (of_script, cwd) == ("1", str(tmp_path))
    assert files == {name: os.readlink(f"/proc/self/fd/{fd}") for name, fd in pages.items()}
