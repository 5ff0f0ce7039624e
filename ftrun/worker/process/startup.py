"""Turns a process into a worker: a standby, which is forked already, or a new process.

Runs in:  standby, then worker (the same process); fresh start: `python -u -m
          ftrun.worker.process.startup script|module|command ...`.
Takes in: one `LaunchRequest` from the agent, with descriptors; the user's program. A standby can
          get a `BindDevice` first.
Gives:    the user's script, run as `python -u script.py` would run it. If it fails: the traceback
          on stderr without ftrun's own frames, and torch's error file in the format of `@record`,
          for scripts that do not use it. The file holds the time of the failure, which identifies
          the first cause: when a rank fails, its connections close, and other ranks then fail too.

A fork lacks parts of the state of a new interpreter, which this module creates: a `__main__` module
that stays in sys.modules (pickling, spawned DataLoader workers and atexit need it), sys.argv and
sys.path[0], unbuffered streams on the right descriptors, default signals, a process session of its
own, new seeds for numpy, and the distributed debug level that torch reads at import.

In a fresh start the script itself imports torch, so variables that it sets before that import are
used. The heartbeat is installed at the end of that import, so this module must not import torch.
"""

import builtins
import contextlib
import gc
import importlib.abc
import importlib.util
import json
import logging
import marshal
import os
import pkgutil
import runpy
import select
import signal
import socket
import sys
import traceback
import types
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType, TracebackType
from typing import Any, TextIO

import msgspec

from ftrun import clock
from ftrun.errors import FtrunError
from ftrun.linux import (
    die_with_parent,
    ignore_user_signals,
    let_parent_trace,
    name_process,
    offer_to_oom_killer,
)
from ftrun.wire.messages.worker import (
    REQUEST_IN_MEMORY,
    LaunchRequest,
    decode_binding,
    decode_launch,
    encode_launch,
)
from ftrun.wire.run_environment import LAUNCH
from ftrun.wire.shared_memory.pages import HeartbeatField, SharedPage
from ftrun.worker.context import worker_context
from ftrun.worker.process import heartbeat, message_record
from ftrun.worker.process import introspection as visibility

MAX_ORDER_BYTES = 1 << 20
MAX_ORDER_FDS = 16
_IDLE_S = 0.3
"""A standby without a launch request for this time may be busy for some milliseconds."""

_PYC_HEAD = 16
"""Bytes before the code in a .pyc file."""

_INTERFACE = "GLOO_SOCKET_IFNAME"
_log = logging.getLogger(__name__)
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def run(orders: socket.socket, prepare: Callable[[], None]) -> None:
    """`prepare` is called when the agent knows this process, so it may end it at any time."""
    request, fds, bound_with = _wait(orders, prepare)
    become_worker(request, fds, bound_with)
    run_script(request.argv, is_module=request.is_module)


def _wait(
    orders: socket.socket, prepare: Callable[[], None]
) -> tuple[LaunchRequest, list[int], dict[str, str] | None]:
    """The request, its descriptors, and the variables with which a device was initialised."""
    os.setsid()
    offer_to_oom_killer()
    let_parent_trace()
    name_process("ftrun-standby")
    _warm_up()
    answer = json.dumps({"pid": os.getpid()}).encode()
    bound_with: dict[str, str] | None = None
    is_warm = False
    while True:
        data, fds = b"", list[int]()
        with contextlib.suppress(OSError):
            orders.send(answer)
        prepare()
        with contextlib.suppress(OSError):
            if not is_warm and not select.select([orders], [], [], _IDLE_S)[0]:
                is_warm = True
                _warm_up_groups()
            data, fds, _, _ = socket.recv_fds(orders, MAX_ORDER_BYTES, MAX_ORDER_FDS)
        if not data:
            os._exit(0)  # the agent has closed the socket; no user code has run
        if data == REQUEST_IN_MEMORY:
            orders.close()
            return read_request(fds.pop(0)), fds, bound_with
        from ftrun.worker.process import bound_device

        binding = decode_binding(data)
        bound_with = binding.variables
        answer = msgspec.json.encode(bound_device.bind(binding))


def read_request(fd: int) -> LaunchRequest:
    """The request in a memfd, which is closed."""
    with open(fd, "rb") as memory:
        memory.seek(0)
        return decode_launch(memory.read())


def _warm_up() -> None:
    """Warm up the operations of a first training step before the launch request arrives.

    A first call costs page faults of the forked heap and builds lazy tables. This function does not
    change the state of the random generator. With one OpenMP thread it starts no thread.

    A backward and a step query all devices, which fixes CUDA_VISIBLE_DEVICES before the script can
    set it. If this torch is built for a device, both are left to the script.
    """
    import torch

    if torch.get_num_threads() > 1:
        return  # a parallel region would start threads that the script may want to configure
    weight = torch.zeros(8, 8, requires_grad=True)
    optimizer = torch.optim.AdamW([weight])
    loss = torch.nn.functional.linear(torch.zeros(2, 8), weight).sum()
    if torch.accelerator.current_accelerator() is None:
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    gc.collect(0)


def _warm_up_groups() -> None:
    """Run the code of a first process group, without a group, once a standby is idle.

    The first group of a process takes 4 to 40 ms longer than the second: libraries are loaded, and
    the pages of their code and of the heap are touched. Three quarters of that are saved, at least.

    A group that is made and destroyed would leave its traces: the flight recorder has its size from
    the first group, and gloo numbers the groups of a process. Gloo opens the interface before both,
    so `init_process_group` fails at an interface that cannot exist. The loopback interface is then
    opened, which resolves no host name. Without effect if this torch is built for a device, as
    above.
    """
    import torch

    dist = torch.distributed
    is_built = dist.is_available() and dist.is_gloo_available()
    if not is_built or torch.accelerator.current_accelerator() is not None:
        return
    hook, interface = sys.excepthook, os.environ.get(_INTERFACE)
    try:
        os.environ[_INTERFACE] = "no/interface"
        with visibility.quiet_stderr(), contextlib.suppress(RuntimeError):
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        dist.ProcessGroupGloo.create_device(interface="lo")
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.distributed_c10d._world.group_count = 0  # the name of the next group
    except Exception as error:  # noqa: BLE001 - the rank itself reports it
        _log.debug("no process group was warmed up: %s", error)
    finally:
        sys.excepthook = hook  # torch replaces it, so that errors name the rank
        del os.environ[_INTERFACE]
        if interface is not None:
            os.environ[_INTERFACE] = interface


def become_worker(
    request: LaunchRequest, fds: list[int], bound_with: dict[str, str] | None
) -> None:
    descriptors = dict(zip(request.descriptors, fds, strict=True))
    replace_streams(descriptors)
    for number in (*_SIGNALS, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    ignore_user_signals()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    started_with = dict(os.environ)
    os.environ.clear()
    os.environ.update(request.variables)
    kept = msgspec.structs.replace(request, descriptors=descriptors, argv=[], variables={}, cwd="")
    os.environ[LAUNCH] = encode_launch(kept).decode()
    os.chdir(request.cwd)
    _open_streams()
    _reseed()
    name_process(f"ftrun-rank{request.rank}")
    heartbeat.install(started_with=started_with, bound_with=bound_with)


def replace_streams(descriptors: dict[str, int]) -> None:
    """Use `stdout` and `stderr`, which are removed, as this process's own."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # the script may replace it
            getattr(sys, name).flush()
        fd = descriptors.pop(name)
        os.dup2(fd, number)
        os.close(fd)


def _open_streams() -> None:
    before = sys.__stdout__
    encoding = before.encoding if before is not None else "utf-8"
    strict = before.errors if before is not None and before.errors else "strict"
    stdin: TextIO | None = None
    with contextlib.suppress(OSError):  # closed, as under some schedulers
        stdin = open(0, encoding=encoding, errors=strict, closefd=False)  # noqa: SIM115
    sys.stdin = sys.__stdin__ = stdin  # type: ignore[assignment, misc]
    for fd, name, errors in ((1, "stdout", strict), (2, "stderr", "backslashreplace")):
        stream = open(fd, "w", 1, encoding=encoding, errors=errors, closefd=False)  # noqa: SIM115
        stream.reconfigure(write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _reseed() -> None:
    # `random` reseeds itself after a fork, and torch has the default seed of a new process. Without
    # a new seed, numpy would repeat the zygote's numbers in every worker.
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available():
        torch.distributed.set_debug_level_from_env()
    logging.getLogger().handlers.clear()


def run_script(argv: list[str], *, is_module: bool) -> None:
    """Run the user's program to its end, with the exit code that it would have by itself."""
    try:
        if (context := worker_context()) is not None:
            context.page.set(HeartbeatField.STARTED_NS, clock.now_ns())
        if is_module:
            _run_module(argv)
        else:
            _run_file(argv)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - what the interpreter itself would do
        report_error(error)
        code = error.exit_code if isinstance(error, FtrunError) else 1
        raise SystemExit(130 if isinstance(error, KeyboardInterrupt) else code) from None


def _search_first(folder: str) -> None:
    if sys.flags.safe_path:
        sys.path.insert(0, folder)
    else:
        sys.path[0] = folder  # replaces the folder in which ftrun was started


def _run_file(argv: list[str]) -> None:
    path = os.path.abspath(argv[0])
    sys.argv = list(argv)
    if pkgutil.get_importer(path) is not None:  # a folder or a zip file with __main__.py
        _search_first(path)
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    _search_first(os.path.dirname(os.path.realpath(path)))
    main = types.ModuleType("__main__")
    main.__file__ = path
    main.__loader__ = SourceFileLoader("__main__", path)
    vars(main)["__builtins__"] = builtins
    sys.modules["__main__"] = main
    with open(path, "rb") as source:
        content = source.read()
    is_compiled = content.startswith(importlib.util.MAGIC_NUMBER)
    code = marshal.loads(content[_PYC_HEAD:]) if is_compiled else compile(content, path, "exec")
    exec(code, main.__dict__)


def _run_module(argv: list[str]) -> None:
    sys.argv = list(argv)
    _search_first(os.getcwd())
    # The private function keeps the module in sys.modules after it returns, as `python -m` does.
    # runpy.run_module removes it, and atexit handlers and pickles then fail to find it.
    runpy._run_module_as_main(argv[0], alter_argv=True)  # type: ignore[attr-defined]


_OWN_FOLDER = f"{os.sep}worker{os.sep}"
_PACKAGE = os.path.abspath(__file__).rpartition(_OWN_FOLDER)[0] + os.sep


def report_error(error: BaseException) -> None:
    trace = _users_part(error.__traceback__)
    context = worker_context()
    if context is not None:
        explain_missing_name(error, context.page)
        if not context.page.get(HeartbeatField.FAILED_NS):
            context.page.set(HeartbeatField.FAILED_NS, clock.now_ns())
        with contextlib.suppress(Exception):  # nothing may take the place of the script's error
            heartbeat.report_missed()
        visibility.dump_calls(context)
    write_error_file(error, trace)
    if isinstance(error, KeyboardInterrupt) and _ends_in_ftrun(trace):
        return  # the rank waited for the end of the run, so no line of the script was interrupted
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    sys.stderr.flush()


def explain_missing_name(error: BaseException, page: SharedPage) -> None:
    """Add a note to a NameError if a restored process has made no step."""
    is_restored = page.get(HeartbeatField.RESTORE_END_NS) > 0
    step = page.get(HeartbeatField.RESTORED_STEP)
    if isinstance(error, NameError) and is_restored and not page.get(HeartbeatField.FIRST_STEP_NS):
        error.add_note(
            f"ftrun: this process has made no step, because step {step} is restored. "
            " If the loop over steps assigns this name, the loop had no turn: after the "
            "loop, use session.step and session.state"
        )


def write_error_file(error: BaseException, trace: TracebackType | None) -> None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.path.exists(path):
        return  # @record has written it
    text = "".join(traceback.format_exception(type(error), error, trace))
    document = {
        "message": {
            "message": f"{type(error).__name__}: {error}",
            "errorCode": 1,
            "extraInfo": {"py_callstack": text, "timestamp": str(int(clock.wall_s()))},
        }
    }
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(document, file)
    except OSError as problem:
        sys.stderr.write(f"ftrun: no error file at {path}: {problem.strerror}\n")


def _ends_in_ftrun(trace: TracebackType | None) -> bool:
    file = ""
    while trace is not None:
        file, trace = trace.tb_frame.f_code.co_filename, trace.tb_next
    return os.path.abspath(file).startswith(_PACKAGE)


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    part = trace
    while part is not None:
        file = os.path.abspath(part.tb_frame.f_code.co_filename)
        is_own = file.startswith(_PACKAGE.removesuffix(os.sep) + _OWN_FOLDER)
        if not is_own and "runpy" not in file:
            return _without_wrappers(part)
        part = part.tb_next
    return None  # a syntax error: no user frame ran


def _without_wrappers(trace: TracebackType) -> TracebackType:
    """Remove the frames through which ftrun observes calls of torch."""
    at: TracebackType | None = trace
    while at is not None:
        while (inner := at.tb_next) and _is_wrapper(inner):
            at.tb_next = inner.tb_next
        at = at.tb_next
    return trace


def _is_wrapper(trace: TracebackType) -> bool:
    return trace.tb_frame.f_code.co_filename == message_record.__file__


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Installs the heartbeat at the end of `import torch`."""

    def __init__(self, launched_with: dict[str, str]) -> None:
        self._launched_with = launched_with

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _InstallingLoader(spec.loader, self._launched_with)
        return spec


class _InstallingLoader(importlib.abc.Loader):
    def __init__(self, loader: Any, launched_with: dict[str, str]) -> None:
        self._loader = loader
        self._launched_with = launched_with

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        # The script may have set variables since its start, for torch or for itself.
        heartbeat.install(started_with=dict(os.environ), launched_with=self._launched_with)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def main() -> None:
    kind, argv = sys.argv[1], sys.argv[2:]
    offer_to_oom_killer()
    request = decode_launch(os.environ[LAUNCH])
    die_with_parent(request.agent_pid)
    let_parent_trace()
    if kind == "command":
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)  # this interpreter ignores them
        os.execvp(argv[0], argv)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    ignore_user_signals()
    name_process(f"ftrun-rank{request.rank}")
    sys.meta_path.insert(0, _AfterTorch(dict(os.environ)))
    run_script(argv, is_module=kind == "module")


if __name__ == "__main__":
    main()
