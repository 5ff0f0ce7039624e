"""A rank steps while it has a lease, waits while it has none, and ends with its agent."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

from ftrun import clock
from ftrun.wire.shared_memory.pages import (
    CommandField,
    SharedPage,
    create_command_page,
)
from ftrun.worker.process import lease
from tests.launch_requests import context_of

WAIT_S = 600.0

BEHIND_A_WRAPPER = """
import os, sys, time
from types import SimpleNamespace
from ftrun.wire.shared_memory.pages import SharedPage, create_command_page
from ftrun.worker.process import lease
launch = SimpleNamespace(agent_pid=int(sys.argv[1]))
lease.install(SimpleNamespace(commands=SharedPage(create_command_page()), launch=launch))
print(os.getpid(), flush=True)
time.sleep(600)
"""


IN_A_LATER_TIME = """
import sys, threading
from ftrun.wire.shared_memory.pages import SharedPage
from ftrun.worker.process import lease
stepping = threading.Thread(target=lease.wait, args=(SharedPage(int(sys.argv[1])),), daemon=True)
stepping.start()
stepping.join(0.5)
print("waits" if stepping.is_alive() else "steps")
"""


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_no_optimizer_steps_without_a_lease(kind: str) -> None:
    found = context_of()
    lease.install(found)
    weight = nn.Parameter(torch.ones(3))
    optimizer = getattr(torch.optim, kind)([weight], lr=0.5)
    weight.sum().backward()
    optimizer.step()  # no lease is needed
    after_one = weight.detach().clone()
    assert not torch.equal(after_one, torch.ones(3))

    found.commands.set(CommandField.LEASE_NS, clock.now_ns() + 10**12)
    optimizer.step()
    after_two = weight.detach().clone()
    assert not torch.equal(after_two, after_one)

    found.commands.set(CommandField.LEASE_NS, 1)
    stepping = threading.Thread(target=optimizer.step, daemon=True)
    stepping.start()
    clock.sleep(0.3)
    assert stepping.is_alive()
    assert torch.equal(weight, after_two)
    found.commands.set(CommandField.LEASE_NS, clock.now_ns() + 10**12)
    stepping.join(WAIT_S)
    assert not stepping.is_alive()
    assert not torch.equal(weight, after_two)
    found.commands.set(CommandField.LEASE_NS, 0)


@pytest.mark.parametrize(("ahead_s", "found"), [(0, "steps"), (1000, "waits")])
def test_a_lease_ends_while_the_machine_is_suspended(ahead_s: int, found: str) -> None:
    """Its monotonic clock stops during the suspend; the clock that counts suspends continues."""
    later = ["unshare", "--user", "--map-root-user", "--time", "--boottime", str(ahead_s)]
    if shutil.which("unshare") is None or subprocess.run([*later, "true"], check=False).returncode:
        pytest.skip("needs namespaces (time)")
    fd = create_command_page()
    SharedPage(fd).set(CommandField.LEASE_NS, clock.now_ns() + 500 * 10**9)
    done = subprocess.run(
        [*later, sys.executable, "-c", IN_A_LATER_TIME, str(fd)],
        pass_fds=[fd],
        capture_output=True,
        text=True,
        check=True,
        timeout=WAIT_S,
    )
    os.close(fd)
    assert done.stdout == f"{found}\n"


def test_rank_behind_a_wrapper_ends_with_its_agent() -> None:
    agent = (
        "import os, subprocess, sys\n"
        "command = [sys.executable, sys.argv[1], str(os.getpid())]\n"
        "subprocess.run(['sh', '-c', 'setsid \"$0\" -c \"$1\" \"$2\"; :', *command])\n"
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
