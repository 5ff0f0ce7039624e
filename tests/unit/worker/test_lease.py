"""A rank steps while it has a lease, waits while it has none, and ends with its agent."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from ftrun import clock
from ftrun.ids import Generation, Incarnation, Rank, RunId
from ftrun.wire.pages import Command, Page, create_command_page, create_page
from ftrun.worker import lease
from ftrun.worker.context import SnapshotSettings, WorkerContext

WAIT_S = 60.0

BEHIND_A_WRAPPER = """
import os, sys, time
from types import SimpleNamespace
from ftrun.wire.pages import Page, create_command_page
from ftrun.worker import lease
lease.install(SimpleNamespace(commands=Page(create_command_page())))
print(os.getpid(), flush=True)
time.sleep(600)
"""


def context() -> WorkerContext:
    return WorkerContext(
        run_id=RunId("run"),
        rank=Rank(0),
        world_size=1,
        generation=Generation(0),
        incarnation=Incarnation(0),
        page=Page(create_page("beat")),
        commands=Page(create_command_page()),
        arena_fd=None,
        restore=None,
        smp_socket=Path("none"),
        settings=SnapshotSettings(),
    )


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_no_optimizer_steps_without_a_lease(kind: str) -> None:
    found = context()
    lease.install(found)
    weight = nn.Parameter(torch.ones(3))
    optimizer = getattr(torch.optim, kind)([weight], lr=0.5)
    weight.sum().backward()
    optimizer.step()  # no lease is needed
    after_one = weight.detach().clone()
    assert not torch.equal(after_one, torch.ones(3))

    found.commands.set(Command.LEASE_NS, clock.now_ns() + 10**12)
    optimizer.step()
    after_two = weight.detach().clone()
    assert not torch.equal(after_two, after_one)

    found.commands.set(Command.LEASE_NS, 1)
    stepping = threading.Thread(target=optimizer.step, daemon=True)
    stepping.start()
    clock.sleep(0.3)
    assert stepping.is_alive()
    assert torch.equal(weight, after_two)
    found.commands.set(Command.LEASE_NS, clock.now_ns() + 10**12)
    stepping.join(WAIT_S)
    assert not stepping.is_alive()
    assert not torch.equal(weight, after_two)
    found.commands.set(Command.LEASE_NS, 0)


def test_rank_behind_a_wrapper_ends_with_its_agent() -> None:
    agent = (
        "import os, subprocess, sys\n"
        "os.environ['FTRUN_AGENT_PID'] = str(os.getpid())\n"
        "subprocess.run(['sh', '-c', 'setsid \"$0\" -c \"$1\"; :', sys.executable, sys.argv[1]])\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", agent, BEHIND_A_WRAPPER], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    rank = int(process.stdout.readline())
    pidfd = os.pidfd_open(rank)
    try:
        process.kill()
        process.wait(WAIT_S)
        # The rank has the other end of this pipe.
        ended = threading.Thread(target=process.stdout.read, daemon=True)
        ended.start()
        ended.join(WAIT_S)
        assert not ended.is_alive(), "it outlives its agent"
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)
        process.stdout.close()
