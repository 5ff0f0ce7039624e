"""The reserve: a process from which the stub forks the next agents of this node.

Runs in:  reserve: a fork of the first zygote, made after its preload.
Takes in: orders from the stub, on a SOCK_SEQPACKET socket.
Gives:    agents with torch already imported; each becomes a child of the stub.
Survives: agents and zygotes. The reserve is a child of the agent, and of the stub after the agent
          ends. It ends when the stub closes the socket.

Rule 1: the reserve has one thread, and imports no module of the agent or of the user.
Rule 2: if the stub no longer waits for a forked agent, that agent ends before it has any effect.
"""

import contextlib
import gc
import os
import runpy
import signal
import socket
import sys

from ftrun.linux import fork_orphan, name_process
from ftrun.wire.messages.agent_start import (
    MAX_FDS,
    MAX_ORDER_BYTES,
    RETAINED_FDS,
    STUB_SOCKET,
    decode_order,
    encode_numbers,
)

_AS_IN_A_NEW_PROCESS = (
    signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip


def begin(fd: int, zygotes: socket.socket, variables: dict[str, str]) -> bool:
    """Fork the reserve; return True only in an agent or rank forked from it, after its program.

    Args:
        fd: the socket on which the stub sends orders.
        zygotes: the zygote's control socket, which the fork closes.
        variables: the environment of the agents that are forked later.
    """
    is_reserve = False
    with contextlib.suppress(OSError):  # if fork fails, the next agent starts as a new program
        is_reserve = fork_orphan()
    if not is_reserve:
        os.close(fd)
        return False
    zygotes.close()
    return _serve(socket.socket(fileno=fd), variables)


def _serve(control: socket.socket, variables: dict[str, str]) -> bool:
    """Fork an agent on each order; return only in agents."""
    os.setsid()
    name_process("ftrun-reserve")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.freeze()
    _say(control, str(os.getpid()))
    while True:
        order, fds = b"", list[int]()
        with contextlib.suppress(OSError):
            order, fds, _, _ = socket.recv_fds(
                control, MAX_ORDER_BYTES, MAX_FDS, socket.MSG_CMSG_CLOEXEC
            )
        if not order:
            os._exit(0)
        is_agent = False
        with contextlib.suppress(OSError):
            is_agent = fork_orphan()
        if is_agent:
            control.close()
            _become_agent(order, fds, variables)
            return True
        for fd in fds:
            os.close(fd)


def _become_agent(order: bytes, fds: list[int], variables: dict[str, str]) -> None:
    """Answer the stub, then run the agent as if this process had started as that program."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # as the stub does
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in _AS_IN_A_NEW_PROCESS:
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    with socket.socket(fileno=fds[0]) as stub:
        _say(stub, str(os.getpid()))
        if not stub.recv(1):
            os._exit(0)  # Rule 2
    folder, changed = decode_order(order)
    os.environ.clear()
    os.environ.update(variables | changed)
    os.environ[STUB_SOCKET] = str(fds[1])
    os.environ[RETAINED_FDS] = encode_numbers(fds[2:])
    sys.argv = ["", folder]
    runpy._run_module_as_main("ftrun.agent")  # type: ignore[attr-defined]


def _say(to: socket.socket, text: str) -> None:
    try:
        to.send(text.encode())
    except OSError:
        os._exit(0)  # the stub has ended
