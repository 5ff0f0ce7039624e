"""What a restart would wait for, done before it: `ftrun.prepared`, and the compiler's imports.

Runs in:  a fork of the zygote that becomes the next zygote, or standbys; in the script, if a result
          is not there.
Survives: an error of a function: the script calls it, and gets the error there.

Rule 1: the zygote never calls a function itself. A fork of it does, while the zygote serves. That
        fork becomes the zygote only if the functions have left nothing that a fork breaks.
Rule 2: a call leaves the states of the random generators as they were, so a script draws the same
        numbers whether a result was there or not.

A script may call `prepared` before it imports torch, and on any system, so this module imports
neither torch nor what needs Linux.
"""

import contextlib
import importlib
import logging
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from ftrun import clock
from ftrun.wire.messages.agent_start import ZygoteSettings

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

COMPILER = (
    "torch._inductor.compile_fx",
    "torch._inductor.codegen.cpp_wrapper_gpu",
    "torch._dynamo.backends.inductor",
    "torch._export.db",
    "torch.export._trace",
    "torch.distributed.tensor.experimental",
    "torch.utils.cpp_extension",
)

_THREAD_ENDS_S = 1.0

_results: dict[Callable[[], Any], Any] = {}
"""By function; they stay until the process ends."""


def prepared(function: Callable[[], _Result]) -> _Result:
    """Return the result of `function`, which is called once in this process at most.

    With `--prepare MODULE:FUNCTION`, ftrun has called it before a restart needs it. Then all ranks
    of a node may share the memory of the result. So it must depend on neither the rank nor a
    device, and must seed the random numbers that it draws. In any other process it is called here.
    """
    if function not in _results:
        name = _name_of(function)
        if getattr(function, "__module__", "") == "__main__" and name in map(_name_of, _results):
            _log.warning(
                "ftrun.prepared: %s of the script is called again. Move it to a module, "
                "because its classes differ from those of the script",
                name,
            )
        _results[function] = _call(function)
    return _results[function]  # type: ignore[no-any-return]


def prepare_all(settings: ZygoteSettings) -> str:
    """Call the functions of `settings`; why it is not safe to fork afterwards, empty if it is.

    Raises:
        PreparationFailed: a function has failed; the message names it.
    """
    from ftrun.linux import num_threads

    files, threads = _open_files(), num_threads()
    for name in settings.prepare:
        with _as_script(settings):
            try:
                prepared(_function(name))
            except (Exception, SystemExit) as error:
                last = traceback.format_exception_only(error)[-1].strip()
                raise PreparationFailed(f"--prepare {name} failed: {last}") from error
        reason = _unfit(threads)
        if not reason and (left := sorted(set(_open_files().values()) - set(files.values()))):
            reason = f"it leaves {', '.join(left[:3])} open, and ranks would share the position"
        if reason:
            return f"{name}: {reason}"
    return ""


class PreparationFailed(Exception):
    """A function of `start.prepare` cannot be called."""


def import_compiler() -> str:
    """Import what the first call of a compiled function does, with a warm cache on the disk.

    Returns why it is not safe to fork afterwards. Each process that compiles for CPUs finds out
    which vector instructions work, by programs that take 1 s; it does so once, and forks inherit
    the answer. Measured with 2 ranks on 2 cores, from a kill to the next step: 6.5 s without this,
    and 1.3 s with it. It runs at low priority, because ranks train at the same time; this process
    serves at normal priority later.
    """
    from ftrun.linux import at_low_priority, num_threads

    threads = num_threads()
    at_low_priority(_import_compiler)
    give_up_s = clock.now_s() + _THREAD_ENDS_S
    while num_threads() > threads and clock.now_s() < give_up_s:
        clock.sleep(0.001)
    return _unfit(threads)


def _import_compiler() -> None:
    for name in COMPILER:
        importlib.import_module(name)
    import torch

    if torch.accelerator.current_accelerator() is None:
        from torch._inductor.cpu_vec_isa import pick_vec_isa

        pick_vec_isa()


def _unfit(threads: int) -> str:
    """`threads`: their number before."""
    from ftrun.linux import num_threads, unfit_to_fork

    more = num_threads() - threads
    return unfit_to_fork() or (f"it has started {more} threads that run on" if more > 0 else "")


def _name_of(function: Callable[[], Any]) -> str:
    return getattr(function, "__qualname__", "")


def _call(function: Callable[[], _Result]) -> _Result:
    state = random.getstate()
    if "torch" in sys.modules:
        from ftrun.worker.state import determinism

        states = determinism.take_all()
        try:
            return function()
        finally:
            determinism.put_back(states)
    try:
        return function()
    finally:
        random.setstate(state)


def _function(name: str) -> Callable[[], Any]:
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for attribute in path.split("."):
        found = getattr(found, attribute)
    return found  # type: ignore[no-any-return]


@contextlib.contextmanager
def _as_script(settings: ZygoteSettings) -> Iterator[None]:
    """With the arguments and the first folder of the import path that the script has."""
    before = sys.argv
    sys.argv = list(settings.argv)
    sys.path.insert(0, settings.folder)
    try:
        yield
    finally:
        sys.argv = before
        with contextlib.suppress(ValueError):
            sys.path.remove(settings.folder)


def _open_files() -> dict[str, str]:
    """Paths of this process's descriptors, by number."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the folder itself
            found[number] = os.readlink(f"/proc/self/fd/{number}")
    return found
