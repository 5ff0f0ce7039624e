"""How a rank can be looked at from outside, also while it hangs.

Runs in:  worker: set up once in the main thread; after that nothing here needs the interpreter.
Takes in: the socket and the stack file that the agent has named; torch's process groups.
Gives:    torch's flight recorder over a unix socket (answered by a C++ thread, also while the GIL
          is held), all stacks in a file on a signal, the ranks of each process group on the page.
Source:   torch._C._distributed_c10d._WorkerServer, torch 2.6 to 2.15; faulthandler.

Rule 1: a script must not notice: no output, no signal that it could use, nothing after a fork.
"""

import ctypes
import faulthandler
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from ftrun.monitor.process_groups import encode_groups
from ftrun.wire import environment as env
from ftrun.wire.shared_memory.pages import MAX_GROUPS_BYTES, HeartbeatField, SharedPage
from ftrun.wire.shared_memory.stack_file import leave_calls
from ftrun.wire.transport.channel import short_socket_path

_C10D = "torch.distributed.distributed_c10d"

_server: Any = None
_num_groups = 0


def register_dumper(page: SharedPage) -> None:
    """Have all stacks written to the agent's file on a signal, by the C code of faulthandler."""
    fd = os.environ.get(env.STACK_FD)
    if not fd:
        return
    number = signal.SIGRTMAX - 1
    with suppress(OSError, RuntimeError, ValueError):
        # What faulthandler puts back when the interpreter ends; the default would kill the rank.
        signal.signal(number, signal.SIG_IGN)
        faulthandler.register(number, file=int(fd), all_threads=True, chain=False)
        page.set(HeartbeatField.HAS_DUMPER, number)
        if not faulthandler.is_enabled():  # SIGSEGV, SIGABRT and their like say where it was
            faulthandler.enable(file=int(fd), all_threads=False)


def dump_calls() -> None:
    """Leave the collectives called so far where the agent finds them when this process is gone."""
    c10d = sys.modules.get(_C10D)
    fd = os.environ.get(env.STACK_FD)
    if c10d is None or not fd or not c10d.is_initialized():
        return
    with suppress(ImportError, RuntimeError, TypeError, OSError, ValueError):
        from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]

        trace = _dump_fr_trace_json(includeCollectives=True, onlyActive=False)
        leave_calls(int(fd), trace.encode() if isinstance(trace, str) else trace)


def start_server(page: SharedPage) -> None:
    """Let the agent read the flight recorder; once, after the first process group is made."""
    global _server
    path = os.environ.get(env.RANK_SOCKET)
    if _server is not None or not path:
        return
    try:
        from torch._C._distributed_c10d import _WorkerServer
    except ImportError:
        return  # a torch built without it
    with suppress(OSError):
        os.unlink(path)
    with suppress(RuntimeError, OSError), _quiet_stderr(), short_socket_path(Path(path)) as short:
        _server = _WorkerServer(short)
        # A forked child that ends as an interpreter does would wait for a thread it has not got.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_server))
        page.set(HeartbeatField.HAS_SERVER, 1)


def publish_groups(page: SharedPage) -> None:
    """Write down the ranks of all process groups; cheap when there are no new ones."""
    global _num_groups
    c10d = sys.modules.get(_C10D)
    if c10d is None:
        return
    known = c10d._world.pg_group_ranks
    if len(known) == _num_groups:
        return
    _num_groups = len(known)
    names = c10d._world.pg_names
    groups = {str(names.get(pg, "")): sorted(ranks) for pg, ranks in known.items()}
    page.groups = encode_groups(groups, MAX_GROUPS_BYTES)


def calls_so_far() -> int:
    """Collectives that this rank has called on the default group; 0 where that is not counted."""
    c10d = sys.modules.get(_C10D)
    group = c10d.GroupMember.WORLD if c10d is not None else None
    if group is None:
        return 0
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:
        return 0


class _quiet_stderr:  # noqa: N801 - used as a function
    """The server's constructor says where it listens, in a line of its own C++ log."""

    def __enter__(self) -> None:
        self._kept = os.dup(2)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)

    def __exit__(self, *_: object) -> None:
        os.dup2(self._kept, 2)
        os.close(self._kept)
