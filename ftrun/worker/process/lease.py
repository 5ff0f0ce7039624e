"""The right of a rank to step: no rank steps beside the one that has taken its place.

Runs in:  worker, in whichever thread steps an optimizer or passes a boundary; one thread of its
          own where the agent is not the parent.
Takes in: the lease on the command page, which the agent renews; the agent's life.
Gives:    a rank that stands still while it has no lease.

An agent that is stopped, or cut off from the leader, does not renew the lease, and its ranks wait.
If it goes on, it renews the lease or ends its ranks. If it ends, they end too: of its children the
kernel takes care, and behind a wrapper the rank ends itself.
"""

import logging
import os
import select
import signal
import threading
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ftrun import clock, process_tree
from ftrun.wire import environment as env
from ftrun.wire.shared_memory.pages import CommandField, SharedPage
from ftrun.worker.context import WorkerContext

_POLL_S = 0.005
_installed: "weakref.WeakSet[SharedPage]" = weakref.WeakSet()

_log = logging.getLogger(__name__)


def install(context: WorkerContext) -> None:
    """Check the lease before each optimizer step of this process, from now on."""
    commands = context.commands
    if commands in _installed:
        return
    _installed.add(commands)

    def before_step(*_: Any) -> None:
        if not torch.compiler.is_compiling():
            wait(commands)

    register_optimizer_step_pre_hook(before_step)
    _end_with_agent()


def wait(commands: SharedPage) -> None:
    """Return at once with a lease, else when there is one again."""
    until_ns = commands.get(CommandField.LEASE_NS)
    if until_ns == 0 or clock.now_ns() <= until_ns:
        return
    since_s = clock.now_s()
    while 0 < commands.get(CommandField.LEASE_NS) < clock.now_ns():
        clock.sleep(_POLL_S)
    waited_s = clock.now_s() - since_s
    _log.warning("this rank has waited %.2f s: its agent had not renewed its lease", waited_s)


def _end_with_agent() -> None:
    """Behind a wrapper: be killed when the agent ends, as its children are."""
    agent, above = int(os.environ.get(env.AGENT_PID, 0)), os.getppid()
    if agent in (0, above):
        return
    while above not in (0, 1, agent):
        above = process_tree.parent_of(above)
    if above != agent:  # another pid namespace
        return
    try:
        pidfd = os.pidfd_open(agent)
    except OSError:
        return  # it has just ended, and the stub ends this process
    threading.Thread(target=_watch, args=(pidfd,), name="ftrun-lease", daemon=True).start()


def _watch(agent: int) -> None:
    poller = select.poll()
    poller.register(agent, select.POLLIN)
    poller.poll()
    os.kill(os.getpid(), signal.SIGKILL)
