"""Reports the progress of a worker on its heartbeat page, without changes to the script.

Runs in:  worker, in the thread that steps an optimizer.
Takes in: torch's global hook after each optimizer step.
Gives:    the fields of `HeartbeatField` that do not need `attach`: steps, times, the first failure.
Survives: the worker; the agent reads the page of a dead worker.

Source: torch.optim.optimizer.register_optimizer_step_post_hook fires once per step for plain,
custom and compiled optimizers. It does not fire for a step that GradScaler skips. It fires once for
the fake step by which get_state_dict fills a fresh optimizer; that one is not counted. A graph that
contains a step fires no hook when it is replayed; `graph_captures` reports it.
"""

import functools
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ftrun import clock
from ftrun.wire.messages.worker import read_by_device
from ftrun.wire.shared_memory.pages import HeartbeatField, SharedPage
from ftrun.worker.context import WorkerContext, worker_context
from ftrun.worker.process import introspection as visibility
from ftrun.worker.process import message_record

_log = logging.getLogger(__name__)

READ_AT_IMPORT = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS",
    "KMP_AFFINITY", "KMP_BLOCKTIME", "GOMP_CPU_AFFINITY", "OMP_PROC_BIND", "TORCH_LOGS",
    "TORCH_CPP_LOG_LEVEL", "TORCH_SHOW_CPP_STACKTRACES", "ATEN_CPU_CAPABILITY",
    "PYTHONHASHSEED", "TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DEBUG",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT",
    "TORCH_BLAS_PREFER_HIPBLASLT", "TORCH_LINALG_PREFER_CUSOLVER",
    "TORCH_LINALG_PREFER_HIPSOLVER", "TORCH_ROCM_FA_PREFER_CK",
    "THP_MEM_ALLOC_ENABLE",
)  # fmt: skip
"""Variables that torch and its libraries read only during their import."""

_OF_COMPILER = ("TORCHINDUCTOR_", "TORCHDYNAMO_")
_COMPILER_CONFIGS = ("torch._dynamo.config", "torch._functorch.config", "torch._inductor.config")
"""They read variables of these names during their import; others are read when they are used."""

_ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Torch reads the part `backend:` of these during its import, and the rest later."""

_FAKE_STEP = "_init_optim_state"

_steps_by_optimizer: dict[int, int] = {}
_report_missed_now: Callable[[], None] | None = None
"""Names variables without effect; None once it has."""


def install(
    *,
    started_with: dict[str, str],
    bound_with: dict[str, str] | None = None,
    launched_with: dict[str, str] | None = None,
) -> None:
    """Install all hooks of this worker; do nothing if no agent started the process.

    Torch was imported with the environment `started_with`, and a standby has initialised the
    device with the variables `bound_with` (None: it has not). The script began with
    `launched_with` (None: it begins with the present environment).
    """
    # A fresh start imports this module before the script imports torch, so nothing here may do so.
    from ftrun.worker.process import lease
    from ftrun.worker.restore import early_restore

    worker_context.cache_clear()
    context = worker_context()
    if context is None:
        return
    context.page.set(HeartbeatField.PID, os.getpid())
    context.page.set(HeartbeatField.GENERATION, context.generation)
    if "line" in context.launch.descriptors:
        from ftrun.worker.survivors.rejoin import StayingProcess

        context.staying = StayingProcess(context, launched_with or dict(os.environ))
    from torch.optim import optimizer

    from ftrun.worker.process import graph_captures

    global _report_missed_now
    _report_missed_now = functools.partial(_report_missed, context, started_with, bound_with)
    after_step = _after_step(context)
    optimizer.register_optimizer_step_post_hook(after_step)
    lease.install(context)
    visibility.register_dumper(context)
    graph_captures.observe(context.page, after_step)
    _time_init_group(context)
    _time_device(context.page)
    if not context.launch.rehearses:  # the rank that runs writes to the arena
        early_restore.begin(context)
    if "fault" in context.launch.descriptors:
        from ftrun.worker.process import in_process_faults as inner_faults

        inner_faults.install(context)
    if context.recording is not None:
        context.recording.install()


def step_done(page: SharedPage, step: int) -> None:
    now_ns = clock.now_ns()
    visibility.publish_groups(page)
    calls = visibility.calls_so_far()
    page.note_calls(step, calls and calls - message_record.calls_of_default_group())
    if page.get(HeartbeatField.FIRST_STEP_NS):
        page.count_step(now_ns - page.get(HeartbeatField.STEP_NS))
    page.set(HeartbeatField.WAITED_AT_STEP_NS, page.get(HeartbeatField.WAITED_NS))
    page.set(HeartbeatField.STEP, step)
    page.set(HeartbeatField.STEP_NS, now_ns)
    page.set(HeartbeatField.HEARTBEAT_NS, now_ns)
    if not page.get(HeartbeatField.FIRST_STEP_NS):
        page.set(HeartbeatField.COMPILES, int("torch._inductor.compile_fx" in sys.modules))
        page.set(HeartbeatField.FIRST_STEP_NS, now_ns)


def _after_step(context: WorkerContext) -> Callable[..., None]:
    from ftrun.worker.restore import early_restore

    page = context.page

    def after_step(optimizer: Any, *_: Any) -> None:
        done = _steps_by_optimizer.get(id(optimizer), 0)
        if done == 0:
            if _is_fake_step():
                return
            report_missed()
            early_restore.release()  # a script without `attach` needs this call too
        _steps_by_optimizer[id(optimizer)] = done + 1
        check_finite(optimizer, page, page.get(HeartbeatField.STEP) + 1)
        if done + 1 > page.get(HeartbeatField.OPTIMIZER_STEPS):
            page.set(HeartbeatField.OPTIMIZER_STEPS, done + 1)
            if not page.get(HeartbeatField.ATTACHED):
                step_done(page, done + 1)
        # Also of a second optimizer, and outside of the session's loops.
        page.show_life(clock.now_ns())

    return context.unprotected.guarded(after_step)


def _is_fake_step() -> bool:
    frame = sys._getframe(2)
    for _ in range(12):
        if frame.f_code.co_name == _FAKE_STEP:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def _changed(names: Iterable[str], before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return [name for name in names if now.get(name) != before.get(name)]


def report_missed() -> None:
    global _report_missed_now
    report, _report_missed_now = _report_missed_now, None
    if report is not None:
        report()


def _allocator(variables: Mapping[str, str], name: str) -> str:
    return re.sub(r".*\bbackend:(\w+).*|.*", r"\1", variables.get(name, ""))


def _read_by_compiler(
    before: Mapping[str, str], now: Mapping[str, str], context: WorkerContext
) -> list[str]:
    """Variables of torch.compile that a standby has read, because it has its modules."""
    names = sorted(one for one in {**before, **now} if one.startswith(_OF_COMPILER))
    if context.launch.start != "warm" or not _changed(names, before, now):
        return []
    files = [getattr(sys.modules.get(one), "__file__", None) for one in _COMPILER_CONFIGS]
    text = "".join(Path(file).read_text("utf-8") for file in files if file)
    return [one for one in names if f'"{one}"' in text]


def _report_missed(
    context: WorkerContext, started_with: dict[str, str], bound_with: dict[str, str] | None
) -> None:
    now = dict(os.environ)
    found: list[str] = []
    names = [*READ_AT_IMPORT, *_read_by_compiler(started_with, now, context)]
    names += [one for one in _ALLOCATORS if _allocator(started_with, one) != _allocator(now, one)]
    if missed := _changed(names, started_with, now):
        found.append(
            f"{', '.join(missed)} set by the script has no effect: torch was loaded before it. "
            "Set it outside, or start with --start fresh"
        )
    if bound_with is not None:
        of_device = read_by_device(now)
        names = sorted({**bound_with, **of_device})
        if missed := _changed(names, bound_with, of_device):
            found.append(
                f"{', '.join(missed)} set by the script has no effect: a standby initialised the "
                "device before it. Set it outside, or start with start.device=off"
            )
    if found and context.rank == 0:
        context.page.note = found[0]
        sys.stderr.writelines(f"ftrun: {text}\n" for text in found)


def _time_init_group(context: WorkerContext) -> None:
    import torch.distributed as dist
    from torch.distributed import device_mesh, distributed_c10d

    if not dist.is_available():
        return
    original = dist.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not context.page.get(HeartbeatField.INIT_GROUP_NS):
            context.page.set(HeartbeatField.INIT_GROUP_NS, clock.now_ns())
        try:
            if not context.launch.rehearses:  # the rank that it may replace has the socket
                visibility.start_server(context)
            message_record.install(context.page)
        except Exception as error:  # noqa: BLE001 - a bug in ftrun must not end the script
            _log.warning("a bug in ftrun: no flight recorder of this rank", exc_info=error)
        return result

    for module in (dist, distributed_c10d, device_mesh):  # each has the name
        setattr(module, "init_process_group", init_process_group)  # noqa: B010 - for mypy


def _time_device(page: SharedPage) -> None:
    """Note when torch initialises the device, by the device module's own list of calls for then."""
    import torch

    accelerator = torch.accelerator.current_accelerator()
    module = torch.get_device_module(accelerator) if accelerator is not None else None
    call_then = getattr(module, "_lazy_call", None)  # cuda and xpu have it
    if call_then is not None:
        call_then(lambda: page.set(HeartbeatField.DEVICE_NS, clock.now_ns()))


_turn = 0


def check_finite(optimizer: Any, page: SharedPage, step: int) -> None:
    """Check one element of one parameter, and write the first bad step to the page.

    A NaN spreads to all parameters within one or two steps, so one element of another parameter
    each time is enough. Only parameters on the CPU are read, because a read from a device would
    wait for it. On a device, the loss shows the NaN.
    """
    global _turn
    if page.get(HeartbeatField.NUMERICAL_ANOMALY_STEP):
        return
    _turn += 1
    groups = optimizer.param_groups
    parameters = groups[_turn % len(groups)]["params"] if groups else ()
    if not parameters:
        return
    parameter = parameters[_turn % len(parameters)]
    if not parameter.requires_grad and parameter.grad is None:
        return  # no step changes it; it may be a mask of -inf
    local = getattr(parameter, "_local_tensor", parameter).detach()
    if local.device.type != "cpu" or not local.numel() or not local.is_floating_point():
        return
    with suppress(RuntimeError, NotImplementedError):  # sparse and quantised ones are not checked
        if not math.isfinite(local[(0,) * local.dim()].item()):
            page.set(HeartbeatField.NUMERICAL_ANOMALY_STEP, step)
