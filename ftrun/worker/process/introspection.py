"""Lets the agent inspect a rank from outside, even if the rank hangs.

Runs in:  worker: set up once in the main thread; stacks and flight recorder then work without the
          interpreter.
Takes in: the socket path and the stack file from the agent; torch's process groups.
Gives:    torch's flight recorder over a unix socket (answered by a C++ thread, also while the GIL
          is held), all stacks in a file on a signal, the ranks of each process group on the page.
          The server of torch 2.8 and 2.9 has no handler for gloo's recorder, so a Python thread
          writes it to the stack file on request.
Source:   torch._C._distributed_c10d._WorkerServer, torch 2.6 to 2.15; faulthandler.

Rule 1: the script is not affected: no output, no signal that it could use, no effect after a fork.
"""

import ctypes
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ftrun import clock
from ftrun.monitor.page_values import Backends, encode_backends, encode_groups
from ftrun.wire.shared_memory.pages import (
    MAX_BACKENDS_BYTES,
    MAX_GROUPS_BYTES,
    HeartbeatField,
    SharedPage,
    leave_calls,
)
from ftrun.wire.transport.channel import short_socket_path
from ftrun.worker.context import WorkerContext

_C10D = "torch.distributed.distributed_c10d"
_POLL_S = 0.1
_DUMP_SIGNAL = signal.SIGRTMAX - 1

_server: Any = None
_known_groups: list[tuple[int, str]] = []
_dumps_own_end = False
"""The stack of a fatal signal is written to the agent's file."""


def start_again(context: WorkerContext) -> None:
    """Write to the stack file and the page of another launch request."""
    global _known_groups
    _known_groups = []
    faulthandler.unregister(_DUMP_SIGNAL)  # else the handler keeps the old file
    if _dumps_own_end:
        faulthandler.disable()
    register_dumper(context)


def register_dumper(context: WorkerContext) -> None:
    """Register faulthandler, whose C code writes all stacks to the agent's file on a signal."""
    global _dumps_own_end
    fd = context.launch.descriptors["stack"]
    number = _DUMP_SIGNAL
    with suppress(OSError, RuntimeError, ValueError):
        # faulthandler restores this handler when the interpreter ends. The default handler would
        # kill the rank.
        signal.signal(number, signal.SIG_IGN)
        faulthandler.register(number, file=fd, all_threads=True, chain=False)
        context.page.set(HeartbeatField.HAS_DUMPER, number)
        if not faulthandler.is_enabled():  # SIGSEGV, SIGABRT and others write the failing stack
            faulthandler.enable(file=fd, all_threads=False)
            _dumps_own_end = True


def dump_calls(context: WorkerContext) -> None:
    """Write the collectives called so far to the stack file, for the agent to read after exit."""
    c10d = sys.modules.get(_C10D)
    if c10d is None or not c10d.is_initialized():
        return
    with suppress(ImportError, RuntimeError, TypeError, OSError, ValueError):
        from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]

        trace = _dump_fr_trace_json(includeCollectives=True, onlyActive=False)
        data = trace.encode() if isinstance(trace, str) else trace
        leave_calls(context.launch.descriptors["stack"], data)


def start_server(context: WorkerContext) -> None:
    """Start the flight recorder server; later calls do nothing. Needs a process group."""
    global _server
    path = context.launch.rank_socket
    if _server is not None or not path:
        return
    try:
        from torch._C._distributed_c10d import _WorkerServer
    except ImportError:
        return  # this torch is built without it
    with suppress(OSError):
        os.unlink(path)
    with suppress(RuntimeError, OSError), quiet_stderr(), short_socket_path(Path(path)) as short:
        _server = _WorkerServer(short)
        # Never destroyed: at exit, a forked child would wait for the server thread, which a fork
        # does not have.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_server))
        context.page.set(HeartbeatField.HAS_SERVER, 1)
        if sys.modules["torch"].__version__ < (2, 10):
            write_calls_on_request(context)


def write_calls_on_request(context: WorkerContext) -> None:
    page = context.page

    def run() -> None:
        while True:
            clock.sleep(_POLL_S)
            asked = page.get(HeartbeatField.CALLS_ASKED)
            if asked != page.get(HeartbeatField.CALLS_WRITTEN):
                dump_calls(context)
                page.set(HeartbeatField.CALLS_WRITTEN, asked)

    threading.Thread(target=run, name="ftrun-calls", daemon=True).start()


def publish_groups(page: SharedPage) -> None:
    global _known_groups
    c10d = sys.modules.get(_C10D)
    if c10d is None:
        return
    known, names = c10d._world.pg_group_ranks, c10d._world.pg_names
    found = [(id(pg), name) for pg, name in names.items()]
    if found == _known_groups:
        return
    _known_groups = found
    groups = {str(names.get(pg, "")): sorted(ranks) for pg, ranks in known.items()}
    page.backends = encode_backends(_backends(known), MAX_BACKENDS_BYTES)
    page.groups = encode_groups(groups, MAX_GROUPS_BYTES)
    timing = os.environ.get("TORCH_NCCL_ENABLE_TIMING", "").lower()
    page.set(HeartbeatField.TIMED, int(timing in ("1", "y", "yes", "t", "true")))


def _backends(groups: Iterable[Any]) -> Backends:
    """The backends of all groups; a `*` marks a class that is not torch's own ProcessGroup*."""
    by_device: dict[str, str] = {}
    ids: list[int | None] = []
    for group in groups:
        number = None
        for device in getattr(group, "_device_types", ()):
            with suppress(RuntimeError):
                backend = group._get_backend(device)
                backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
                name = str(backend.name()).lower()
                is_own = type(backend).__name__.lower() == f"processgroup{name}"
                by_device.setdefault(device.type, name if is_own else f"{name}*")
                number = getattr(backend, "uid", number) if name == "nccl" else number
        ids.append(number)
    return Backends(by_device, tuple(ids))


def calls_so_far() -> int:
    c10d = sys.modules.get(_C10D)
    group = c10d.GroupMember.WORLD if c10d is not None else None
    if group is None:
        return 0
    # Of the backend that is used now. A renewed group also keeps the one it was created with.
    devices = sorted(group._device_types, key=lambda one: (one.type == "cpu", one.type))
    try:
        return int(group._get_backend(devices[0])._get_sequence_number_for_group())
    except (RuntimeError, IndexError):  # a fake backend counts nothing
        return 0


class quiet_stderr:  # noqa: N801 - used as a function
    """Discards stderr, because C++ code of torch logs there."""

    def __enter__(self) -> None:
        self._kept = os.dup(2)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)

    def __exit__(self, *_: object) -> None:
        os.dup2(self._kept, 2)
        os.close(self._kept)
