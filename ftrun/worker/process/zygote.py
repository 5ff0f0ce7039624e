"""The zygote: a process with torch imported, from which workers are forked.

Runs in:  a process of its own: `python -u -m ftrun.worker.process.zygote FD AGENT_PID SETTINGS`, or
          a fork of the agent that runs this program.
Takes in: fork orders from the agent on descriptor FD, a SOCK_SEQPACKET socket.
Gives:    standbys: processes with torch imported that wait for a `LaunchRequest`. Each has its own
          socket, so a launch does not pass through the zygote.
Survives: nothing; standbys and workers do not need the zygote after their fork.

Rule 1: one thread, no tensor operation, no device and no device file before a fork. If the parent
        ran one parallel operation, the child hangs in libgomp. Checked after each module that the
        user preloads, and before each fork.
Rule 2: a standby is forked twice, so that it becomes a child of the agent (a subreaper). The agent
        reads its exit status, and the kernel kills the standby when the agent dies.

The first zygote also forks the reserve when it has imported everything: a process from which the
stub forks the next agents of this node, with torch already imported, on orders over a
SOCK_SEQPACKET socket. The reserve is a child of the agent, and of the stub after the agent ends. It
ends when the stub closes the socket.

Rule 3: the reserve has one thread, and imports no module of the agent or of the user.
Rule 4: if the stub no longer waits for a forked agent, that agent ends before it has any effect.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from collections.abc import Sequence
from functools import partial

from ftrun import clock
from ftrun.linux import (
    die_with_parent,
    fork_orphan,
    ignore_user_signals,
    name_process,
    unfit_to_fork,
)
from ftrun.wire.messages.agent_start import (
    MAX_FDS,
    MAX_ORDER_BYTES,
    RESERVE_SOCKET,
    RETAINED_FDS,
    STUB_SOCKET,
    ZygoteSettings,
    decode_order,
    encode_numbers,
)
from ftrun.worker.process import startup as standby
from ftrun.worker.process.preparation import (
    PreparationFailed,
    import_compiler,
    prepare_all,
)

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
    "ftrun.worker.process.graph_captures",
    "ftrun.worker.session",
    "ftrun.worker.snapshot_session",
    "ftrun.worker.capture.explicit_save",
    "ftrun.worker.replicas.shared_state",
    "ftrun.worker.reshard.engine",
)
"""Modules that a first DDP step and a restore import. Without torch._dynamo, the DDP constructor
takes 0.8 s."""


def preload(modules: Sequence[str]) -> dict[str, str]:
    failed = {}
    for name in modules:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a module of the user raises any
            failed[name] = f"{type(error).__name__}: {error}"
    return failed


def preload_for_user(modules: Sequence[str], folder: str) -> tuple[dict[str, str], str]:
    """Import modules while a fork is safe, from `folder` first, as the script does.

    What the modules add to the path stays, because the ranks do not execute them again. Returns
    the errors, and the module that made a fork unsafe; empty if none did.
    """
    failed: dict[str, str] = {}
    is_safe = not unfit_to_fork()
    if not sys.flags.safe_path:
        del sys.path[0]  # the folder in which ftrun was started
    sys.path.insert(0, folder)
    try:
        for name in modules:
            failed |= preload((name,))
            if is_safe and unfit_to_fork():
                return failed, name
        return failed, ""
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)
        if not sys.flags.safe_path:
            sys.path.insert(0, folder)  # a rank replaces the first one


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


def serve(
    control: socket.socket, agent_pid: int, settings: ZygoteSettings, *, unsafe_module: str
) -> tuple[socket.socket, bool] | None:
    """Fork on order until the agent closes the socket.

    A standby returns its order socket, and whether it calls the functions of `start.prepare`.
    """
    while True:
        data = control.recv(1 << 16)
        if not data:
            return None
        order = json.loads(data)
        if task := order.get("successor", ""):
            control = fork_successor(control, agent_pid, settings, task) or control
            continue
        for _ in range(order["count"]):
            reason = unfit_to_fork()
            if reason:
                cause = f"--preload {unsafe_module}: " if unsafe_module else ""
                control.send(json.dumps({"unfit": f"{cause}{reason}"}).encode())
                break
            orders = fork_standby(control, agent_pid)
            if orders is not None:
                return orders, order["prepare"]


def fork_successor(
    control: socket.socket, agent_pid: int, settings: ZygoteSettings, task: str
) -> socket.socket | None:
    """Fork a process that prepares more than this zygote has done; None in this zygote.

    If that process can be forked afterwards, it returns the control socket with which it takes the
    place of this zygote. Otherwise it ends.

    Args:
        task: `call`: the functions of `start.prepare`; `compiler`: import it.
    """
    if (unfit := unfit_to_fork()) or not fork_orphan():
        if unfit:
            control.send(json.dumps({"prepared": {"failure": unfit}}).encode())
        return None
    die_with_parent(agent_pid)
    name_process("ftrun-standby")
    control.send(json.dumps({"preparing": os.getpid()}).encode())
    begun_s = clock.now_s()
    reason = failure = ""
    try:
        reason = prepare_all(settings) if task == "call" else import_compiler()
    except (PreparationFailed, ImportError) as error:
        failure = str(error)
    seconds = round(clock.now_s() - begun_s, 3)
    answer = {"prepared": {"seconds": seconds, "reason": reason, "failure": failure}}
    if reason or failure:
        control.send(json.dumps(answer).encode())
        os._exit(0)
    gc.collect()
    gc.freeze()
    for_agent, mine = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    socket.send_fds(control, [json.dumps(answer).encode()], [for_agent.fileno()])
    for_agent.close()
    control.close()
    name_process("ftrun-zygote")
    return mine


def _prepare_in_standby(settings: ZygoteSettings) -> None:
    try:
        prepare_all(settings)
    except PreparationFailed as error:
        sys.stderr.write(f"ftrun: {error}, in a standby. Its rank calls it itself\n")


def _freeze() -> None:
    """Keep collections of forked processes from writing to all objects, and so copying them."""
    gc.freeze()
    atexit.register(_unfreeze_for_triton)


def _unfreeze_for_triton() -> None:
    """Triton 3.9, of torch 2.15, prints its functions as leaks if they are not collected."""
    if "triton._C.libtriton" in sys.modules:
        gc.unfreeze()


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
    gc.disable()  # collections take a fifth of these imports
    preload(PRELOAD)
    gc.enable()
    reserve_fd = int(variables.pop(RESERVE_SOCKET, "-1"))
    if reserve_fd >= 0 and begin_reserve(reserve_fd, control, variables):
        return  # this process is an agent that was forked later, or its rank, and has ended
    settings = ZygoteSettings.decode(sys.argv[3])
    failed, unsafe_module = preload_for_user(settings.preload, settings.folder)
    gc.collect()
    _freeze()
    control.send(json.dumps({"ready": True, "failed": failed}).encode())
    found = serve(control, agent_pid, settings, unsafe_module=unsafe_module)
    if found is None:
        os._exit(0)
    orders, prepares = found
    prepare = partial(_prepare_in_standby, settings) if prepares else lambda: None
    # Returns after the user's script, into a normal interpreter exit, so that atexit handlers and
    # non-daemon threads of the script run.
    standby.run(orders, prepare)


# --- the reserve --------------------------------------------------------------------------------

_AS_IN_A_NEW_PROCESS = (
    signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip


def begin_reserve(fd: int, zygotes: socket.socket, variables: dict[str, str]) -> bool:
    """Fork the reserve; return True only in an agent or rank forked from it, after its program."""
    is_reserve = False
    with contextlib.suppress(OSError):  # without a fork, the next agent starts as a new program
        is_reserve = not unfit_to_fork() and fork_orphan()
    if not is_reserve:
        os.close(fd)
        return False
    zygotes.close()
    return _serve_stub(socket.socket(fileno=fd), variables)


def _serve_stub(control: socket.socket, variables: dict[str, str]) -> bool:
    """Fork an agent on each order; return only in agents."""
    os.setsid()
    name_process("ftrun-reserve")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _freeze()
    _report(control, str(os.getpid()))
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
        _report(stub, str(os.getpid()))
        if not stub.recv(1):
            os._exit(0)  # Rule 4
    folder, changed = decode_order(order)
    os.environ.clear()
    os.environ.update(variables | changed)
    os.environ[STUB_SOCKET] = str(fds[1])
    os.environ[RETAINED_FDS] = encode_numbers(fds[2:])
    sys.argv = ["", folder]
    runpy._run_module_as_main("ftrun.agent")  # type: ignore[attr-defined]


def _report(to: socket.socket, text: str) -> None:
    try:
        to.send(text.encode())
    except OSError:
        os._exit(0)  # the stub has ended


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        main()
