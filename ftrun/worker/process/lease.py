"""Step lease: prevents a rank and its replacement from stepping at the same time.

Runs in:  worker, in the thread that steps an optimizer or passes a boundary. If the agent is not
          the parent process, also a separate thread.
Takes in: the lease on the command page, which the agent renews; the end of the agent.
Gives:    a rank that waits while its lease is expired.

If the agent is stopped, or cut off from the leader, it does not renew the lease, and its ranks
wait. If the agent resumes, it renews the lease or ends its ranks. If the agent ends, its ranks end
too: the kernel kills the children of the agent, and a rank started through a wrapper kills itself.
"""

import logging
import os
import select
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ftrun import clock, process_tree
from ftrun.wire.shared_memory.pages import CommandField, SharedPage
from ftrun.worker.context import WorkerContext

_POLL_S = 0.005
_installed: "weakref.WeakSet[SharedPage]" = weakref.WeakSet()

_log = logging.getLogger(__name__)


def install(context: WorkerContext) -> None:
    commands = context.commands
    if commands in _installed:
        return
    _installed.add(commands)

    def before_step(*_: Any) -> None:
        if not torch.compiler.is_compiling():
            wait(commands, lambda: context.is_revoked)

    register_optimizer_step_pre_hook(before_step)
    _end_with_agent(context.launch.agent_pid)


def wait(commands: SharedPage, is_over: Callable[[], bool] = bool) -> None:
    """Wait while the lease has expired, unless this rank's generation is over."""
    until_ns = commands.get(CommandField.LEASE_NS)
    if until_ns == 0 or clock.now_ns() <= until_ns:
        return
    since_s = clock.now_s()
    while 0 < commands.get(CommandField.LEASE_NS) < clock.now_ns() and not is_over():
        clock.sleep(_POLL_S)
    waited_s = clock.now_s() - since_s
    _log.warning("this rank has waited %.2f s: its agent had not renewed its lease", waited_s)


def _end_with_agent(agent: int) -> None:
    """If the agent is an ancestor but not the parent, kill this process when the agent ends."""
    above = os.getppid()
    if agent == above:
        return
    while above not in (0, 1, agent):
        above = process_tree.parent_of(above)
    if above != agent:  # another pid namespace
        return
    try:
        pidfd = os.pidfd_open(agent)
    except OSError:
        return  # the agent has just ended, and the stub ends this process
    threading.Thread(target=_watch, args=(pidfd,), name="ftrun-lease", daemon=True).start()


def _watch(agent: int) -> None:
    poller = select.poll()
    poller.register(agent, select.POLLIN)
    poller.poll()
    os.kill(os.getpid(), signal.SIGKILL)
