"""Faults that a rank injects into itself, exactly at the end of the ordered step.

Runs in:  worker, in the thread that steps the optimizer; only in a run with --allow-faults.
Takes in: orders on the rank's fault page.
Gives:    the fault; before it, a mark on the page with the step at which the fault has fired.
Survives: nothing; the next process of this rank reads from the page which orders have fired.

Rule 1: without an order, the cost is one comparison per step.
Rule 2: the end of a step is the end of its optimizer step: before the boundary, before a
        snapshot of it, and before the collectives of the next step.
Rule 3: if a fault cannot be injected, it is marked as failed with the reason, and the training
        continues. Neither this process nor a later one tries again.
"""

import ctypes
import faulthandler
import math
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftrun import clock
from ftrun.wire import crash_points
from ftrun.wire.fault_orders import FAULT_PREFIX, FaultOrder, FaultPage
from ftrun.wire.shared_memory.pages import HeartbeatField
from ftrun.worker.context import WorkerContext

_SLEEP_S = 0.1
_A_DAY_S = 86400.0
_FOR_EVER_S = 1e9
_CGROUPS = Path("/sys/fs/cgroup")
_CHUNK_BYTES = 16 << 20
_MIB = 1 << 20
_TOP_OF_MANTISSA = {"float64": 51, "float32": 22, "float16": 9, "bfloat16": 6}
"""Highest mantissa bit by dtype: its flip is the largest change that keeps the exponent."""

_TORN_AT = "worker.capture.marked"
"""Here the slot header says COPYING, and the image is incomplete."""


def install(context: WorkerContext) -> None:
    from torch.optim import optimizer

    watch = InProcessFaults(context, FaultPage(context.launch.descriptors["fault"]))
    optimizer.register_optimizer_step_post_hook(watch.after_step)


class InProcessFaults:
    """Polls the fault page once per step, and executes orders."""

    def __init__(self, context: WorkerContext, page: FaultPage) -> None:
        self._heartbeats = context.page
        self._page = page
        self._rank = int(context.rank)
        self._known = page.ordered if page.ordered == page.fired else 0
        if self._known and page.order().fires_again:
            self._known = 0
        if page.ordered == page.failed:
            self._known = page.ordered
        self._order: FaultOrder | None = None
        self._steps_seen = 0
        self._later: list[Callable[[], None]] = []

    def after_step(self, optimizer: Any, *_: object) -> None:
        done = self._heartbeats.get(HeartbeatField.OPTIMIZER_STEPS)
        if done == self._steps_seen:
            return  # the fake step that fills a fresh optimizer, or the step of another optimizer
        self._steps_seen = done
        if self._later:
            for undo in self._later:
                undo()
            self._later.clear()
        if self._page.ordered != self._known:
            self._poll(optimizer)

    def _poll(self, optimizer: Any) -> None:
        number = self._page.ordered
        if self._page.is_cancelled(number):
            self._order, self._known = None, number
            return
        if self._order is None:
            self._order = self._page.order()
        step = self._step
        order = self._order
        late_again = order.fires_again and self._page.times > 0 and step != order.at_step
        if step < order.at_step or late_again:
            return
        self._order, self._known = None, number
        self._do(order, number, step, optimizer)

    @property
    def _step(self) -> int:
        """Step of the run that has just ended; counts from 1."""
        if self._heartbeats.get(HeartbeatField.ATTACHED):
            # The page of a new process has step 0 before its first boundary.
            return (
                self._heartbeats.get(HeartbeatField.STEP)
                or self._heartbeats.get(HeartbeatField.RESTORED_STEP)
            ) + 1
        return self._heartbeats.get(HeartbeatField.OPTIMIZER_STEPS)

    def _do(self, order: FaultOrder, number: int, step: int, optimizer: Any) -> None:
        def fired() -> None:
            self._page.mark_fired(number, step, clock.now_ns())

        def ended() -> None:
            self._page.mark_ended(number)

        def now_s() -> float:
            # Infinite for a cancelled fault, so that one with a duration ends at its next poll.
            return math.inf if self._page.is_cancelled(number) else clock.now_s()

        try:
            is_act = self._prepare(order, optimizer, fired, ended, now_s)
        except Exception as error:  # noqa: BLE001 - rule 3
            self._page.mark_failed(number, f"{type(error).__name__}: {error}")
            return
        if is_act:
            fired()
            _act(order, self._rank, step, now_s)
            ended()

    def _prepare(
        self,
        order: FaultOrder,
        optimizer: Any,
        fired: Callable[[], None],
        ended: Callable[[], None],
        now_s: Callable[[], float],
    ) -> bool:
        """Inject a fault that needs training objects; return whether `_act` must inject it."""
        match order.kind:
            case "collective-skip":
                self._later += skip_collective(fired)
            case "slow-input":
                slow_input(order.amount, order.for_s, fired, ended, now_s)
            case "oom":
                # If not, the cgroup was created for an earlier process of this rank.
                return _is_in_group_of(order)
            case "torn-snapshot":
                crash_points.arm(_TORN_AT, before=fired)
            case "nan" | "spike" | "weight-bitflip":
                found = _to_corrupt(order, optimizer)
                fired()
                _corrupt(order, found)
            case _:
                return True
        return False


def _act(order: FaultOrder, rank: int, step: int, now_s: Callable[[], float]) -> None:
    match order.kind:
        case "rank-kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "segv":
            _die_plainly(signal.SIGSEGV)
            ctypes.string_at(0)
        case "abort":
            _die_plainly(signal.SIGABRT)
            os.abort()
        case "exit0-early":
            os._exit(0)
        case "exception" | "poison-batch":
            what = "this batch is poison" if order.kind == "poison-batch" else "ordered"
            raise RuntimeError(f"injected fault: {what} (rank {rank}, step {step})")
        case "oom":
            _allocate(int(order.amount * _MIB))
        case _:
            _freeze_versions(order.kind, order.for_s or _FOR_EVER_S, now_s)


_CIRCLES = """
def run_in_circles(now_s, until_s):
    while now_s() < until_s:
        pass
"""


def _freeze_versions(how: str, for_s: float, now_s: Callable[[], float]) -> None:
    """Block this thread: asleep (`hang`), asleep with the GIL (`gil-hold`), or in a busy loop."""
    if how == "gil-hold":
        _keep_the_lock(for_s)
        return
    until_s = clock.now_s() + for_s
    if how == "busy-loop":
        # Compiled under its own file name, because the diagnosis treats a loop in files of torch
        # or ftrun as library work.
        names: dict[str, Any] = {}
        exec(compile(_CIRCLES, "injected_fault.py", "exec"), names)
        names["run_in_circles"](now_s, until_s)
        return
    while now_s() < until_s:
        clock.sleep(_SLEEP_S)


def _keep_the_lock(for_s: float) -> None:
    """Wait in C for a mutex that this thread holds, because a signal would end a sleep."""
    c = ctypes.PyDLL(None)  # unlike CDLL, it holds the GIL during the C call
    mutex = ctypes.create_string_buffer(64)  # all zeros is an unlocked mutex
    end = (ctypes.c_long * 2)(int(clock.wall_s() + min(for_s, _A_DAY_S)), 0)
    c.pthread_mutex_lock(mutex)
    c.pthread_mutex_timedlock(mutex, end)
    c.pthread_mutex_unlock(mutex)


def _die_plainly(number: int) -> None:
    """Prepare to die by the signal itself, without a core file and without a handler."""
    import resource

    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    signal.signal(number, signal.SIG_DFL)


def _is_in_group_of(order: FaultOrder) -> bool:
    """Return whether this process is in the order's cgroup; with `at_step`, first move into it."""
    name = f"{FAULT_PREFIX}{order.id}"
    if order.at_step:
        # Not glob, because it fails if a group is removed during the search.
        found = [Path(folder) for folder, _, _ in os.walk(_CGROUPS) if Path(folder).name == name]
        for group in found:
            (group / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
    with open("/proc/self/cgroup", encoding="utf-8") as groups:
        return name in groups.read()


def _allocate(limit_bytes: int) -> None:
    """Touch memory until the kernel kills this process; stop at twice the limit."""
    held = []
    for _ in range(2 * limit_bytes // _CHUNK_BYTES + 1):
        chunk = bytearray(_CHUNK_BYTES)
        chunk[::4096] = b"\1" * len(chunk[::4096])
        held.append(chunk)
    raise MemoryError(
        f"injected fault: {len(held) * _CHUNK_BYTES} bytes were allocated, twice the limit of the "
        "cgroup, and the kernel has not killed this process"
    )


def _to_corrupt(order: FaultOrder, optimizer: Any) -> list[Any]:
    """Return the local data of all parameters that can be changed; raise if there are none."""
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    local = [_local(tensor) for tensor in tensors if tensor.is_floating_point()]
    found = [one for one in local if one.numel() and _type_of(one) in _TOP_OF_MANTISSA]
    if not found:
        raise RuntimeError(
            f"{order.kind} needs a parameter of {', '.join(_TOP_OF_MANTISSA)}, and this rank's "
            f"optimizer has none with elements here, of {len(tensors)} parameters"
        )
    return found


def _type_of(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _corrupt(order: FaultOrder, found: list[Any]) -> None:
    """Change parameters after the step, as a bad batch or defective memory would."""
    import torch

    with torch.no_grad():
        if order.kind == "spike":
            for tensor in found:
                tensor.mul_(order.amount)
            return
        target = found[0]
        flat = target.flatten()
        if order.kind == "nan":
            flat[0] = float("nan")
        else:
            size = flat.element_size()
            words = flat.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
            words[0] ^= 1 << _TOP_OF_MANTISSA[_type_of(flat)]
        target.copy_(flat.view_as(target))


def _local(tensor: Any) -> Any:
    data = tensor.detach()
    return data.to_local() if hasattr(data, "to_local") else data


def skip_collective(fired: Callable[[], None]) -> list[Callable[[], None]]:
    """Skip the next all-reduce of gradients; return the calls that undo this after that step.

    With DDP, the whole next step has no synchronisation. Without DDP, the next explicit all_reduce
    returns at once.
    """
    import gc

    from torch.nn.parallel import DistributedDataParallel

    found = [thing for thing in gc.get_objects() if type(thing) is DistributedDataParallel]
    wrapped: Any = next((one for one in found if one.require_backward_grad_sync), None)
    if wrapped is not None:
        wrapped.require_backward_grad_sync = False
        fired()

        def sync_again() -> None:
            wrapped.require_backward_grad_sync = True

        return [sync_again]
    _skip_one_all_reduce(fired)
    return []


def _skip_one_all_reduce(fired: Callable[[], None]) -> None:
    """Replace all_reduce for one call, also under other names in the script's `__main__`."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    original = dist.all_reduce
    holders = [vars(dist), vars(distributed_c10d), vars(sys.modules["__main__"])]
    names = [(held, name) for held in holders for name in held if held[name] is original]

    def all_reduce(*_args: object, async_op: bool = False, **_kwargs: object) -> object:
        for held, name in names:
            held[name] = original
        fired()
        return _Skipped() if async_op else None

    for held, name in names:
        held[name] = all_reduce


class _Skipped:
    """Work handle of a skipped collective."""

    def wait(self, *_: object) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def slow_input(
    more_s: float,
    for_s: float,
    fired: Callable[[], None],
    ended: Callable[[], None],
    now_s: Callable[[], float],
) -> None:
    """Delay each batch of torch's DataLoader by `more_s`, for `for_s` after the first batch."""
    from torch.utils.data import dataloader

    kinds: list[Any] = [
        dataloader._SingleProcessDataLoaderIter,
        dataloader._MultiProcessingDataLoaderIter,
    ]
    originals = {kind: kind._next_data for kind in kinds}
    until_s: list[float] = []

    def late(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Delay inside the loader's own `__next__`, so that a stack shows the loader."""

        def late_next_data(self: Any) -> Any:
            if not until_s:
                until_s.append(clock.now_s() + (for_s or _FOR_EVER_S))
                fired()
            if now_s() <= until_s[0]:
                clock.sleep(more_s)
            elif kinds[0]._next_data is not originals[kinds[0]]:
                for kind in kinds:
                    kind._next_data = originals[kind]
                ended()
            return original(self)

        return late_next_data

    for kind in kinds:
        kind._next_data = late(originals[kind])
