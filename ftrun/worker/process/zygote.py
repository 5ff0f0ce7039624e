"""The zygote: a process with torch imported, from which workers are forked.

Runs in:  a process of its own: `python -u -m ftrun.worker.process.zygote FD AGENT_PID [MODULE
          ...]`, or a fork of the agent that runs this program.
Takes in: fork orders from the agent on descriptor FD, a SOCK_SEQPACKET socket.
Gives:    standbys: processes with torch imported that wait for a `LaunchRequest`. Each has its own
          socket, so a launch does not pass through the zygote.
Survives: nothing; standbys and workers do not need the zygote after their fork.

Rule 1: one thread, no tensor operation and no CUDA call before a fork. If the parent ran one
        parallel operation, the child hangs in libgomp. Checked before each fork.
Rule 2: a standby is forked twice, so that it becomes a child of the agent (a subreaper). The agent
        reads its exit status, and the kernel kills the standby when the agent dies.
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
"""Modules that a first DDP step and a restore import. Without torch._dynamo, the DDP constructor
takes 0.8 s."""


def preload(modules: tuple[str, ...]) -> list[str]:
    """Import the modules; return the names of those that are missing."""
    missing = []
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError:
            missing.append(name)
    return missing


def unfit_to_fork() -> str:
    """Reason why a fork of this process could hang or fail; empty if a fork is safe."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA was initialised in the zygote (by a preloaded module?)"
    return threads_in_the_way()


def fork_standby(control: socket.socket, agent_pid: int) -> socket.socket | None:
    """Fork one standby; return the order socket in the standby, None in the zygote."""
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
    """Fork on order until the agent closes the socket; a standby returns its order socket."""
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
    # is_available() must not call cuInit in this process, because CUDA then fails in every fork.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    missing = preload(PRELOAD)
    reserve_fd = int(variables.pop(RESERVE_SOCKET, "-1"))
    if reserve_fd >= 0 and reserve.begin(reserve_fd, control, variables):
        return  # this process is an agent that was forked later, or its rank, and has ended
    missing += preload(tuple(sys.argv[3:]))
    gc.collect()
    gc.freeze()
    control.send(json.dumps({"ready": True, "missing": missing}).encode())
    orders = serve(control, agent_pid)
    if orders is None:
        os._exit(0)
    # Returns after the user's script, into a normal interpreter exit, so that atexit handlers and
    # non-daemon threads of the script run.
    standby.run(orders)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        main()
