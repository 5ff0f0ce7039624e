"""The warm process that workers are forked from.

Runs in:  a process of its own: `python -u -m ftrun.worker.process.zygote FD AGENT_PID [MODULE
          ...]`, or a
          fork of the agent that runs this program in place of its own.
Takes in: fork orders from the agent on descriptor FD, a SOCK_SEQPACKET socket.
Gives:    standbys: processes with torch imported that wait for a `LaunchOrder`, each with a
          socket of its own, so that a launch does not pass through here.
Survives: nothing; standbys and workers do not need it once they are forked.

Rule 1: one thread, no tensor operation, no CUDA call before a fork. A parent that ran one
        parallel operation leaves a child that hangs in libgomp. Checked before each fork.
Rule 2: a standby is forked twice, so that it becomes a child of the agent (a subreaper), which
        reads its exit status and whose death it dies of.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys

from ftrun.linux import (
    die_with_parent,
    fork_orphan,
    ignore_user_signals,
    name_process,
    threads_in_the_way,
)
from ftrun.wire.messages.agent_start import RESERVE_SOCKET
from ftrun.worker.process import agent_reserve as reserve
from ftrun.worker.process import startup as standby

PRELOAD = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.nn.parallel.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.optim",
    "torch.distributed.tensor",
    "torch.utils.data",
    "torch.utils.data.distributed",
    "torch.profiler",
    "ftrun.worker.session",
    "ftrun.worker.snapshot_session",
    "ftrun.worker.reshard.engine",
)
"""What a first DDP step imports, and what a restore does: without torch._dynamo the DDP constructor
takes 0.8 s."""


def preload(modules: tuple[str, ...]) -> list[str]:
    """Import what is there; the names of what is not."""
    missing = []
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError:
            missing.append(name)
    return missing


def unfit_to_fork() -> str:
    """Why a child of this process could hang or fail; empty if it could not."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA was initialised in the warm process (by a preloaded module?)"
    return threads_in_the_way()


def fork_standby(control: socket.socket, agent_pid: int) -> socket.socket | None:
    """Fork one standby; in it the order socket comes back, in the zygote None."""
    for_agent, for_standby = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if fork_orphan():
        for_agent.close()
        control.close()
        die_with_parent(agent_pid)
        return for_standby
    for_standby.close()
    socket.send_fds(control, [b'{"standby": true}'], [for_agent.fileno()])
    for_agent.close()
    return None


def serve(control: socket.socket, agent_pid: int) -> socket.socket | None:
    """Fork on order until the agent hangs up; a standby leaves with its socket."""
    while True:
        order = control.recv(1 << 16)
        if not order:
            return None
        for _ in range(json.loads(order)["count"]):
            why = unfit_to_fork()
            if why:
                control.send(json.dumps({"unfit": why}).encode())
                break
            orders = fork_standby(control, agent_pid)
            if orders is not None:
                return orders


def main() -> None:
    variables = dict(os.environ)
    control = socket.socket(fileno=int(sys.argv[1]))
    agent_pid = int(sys.argv[2])
    control.set_inheritable(False)
    name_process("ftrun-zygote")
    die_with_parent(agent_pid)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    ignore_user_signals()
    # is_available() must not call cuInit here, which would poison every fork.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    missing = preload(PRELOAD)
    reserve_fd = int(variables.pop(RESERVE_SOCKET, "-1"))
    if reserve_fd >= 0 and reserve.begin(reserve_fd, control, variables):
        return  # an agent that was forked later, or one of its ranks, has ended
    missing += preload(tuple(sys.argv[3:]))
    gc.collect()
    gc.freeze()
    control.send(json.dumps({"ready": True, "missing": missing}).encode())
    orders = serve(control, agent_pid)
    if orders is None:
        os._exit(0)
    # Returns after the user's script, into a normal interpreter exit: atexit handlers and
    # non-daemon threads of the script get their turn.
    standby.run(orders)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        main()
