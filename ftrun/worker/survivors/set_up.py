"""What collectives gave during the set-up of a rank, for a process that sets up the rank alone.

Runs in:  worker, training thread, from the start of the script to the first turn.
Takes in: the calls of torch.distributed that communicate, and the constructor of DDP.
Gives:    a record of plain values, which is part of each snapshot. In a process that sets up alone,
          the same calls in the same order give the recorded results, without communication.

Rule 1: a result of more than the remaining bytes is not recorded. It is known only if all that the
        call wrote to is attached, because the restore writes there.
Rule 2: collectives that reach a backend in another way are counted. If there is one, this rank
        cannot be set up alone.
"""

import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

from ftrun.errors import SetUpDiffers, ValueNotStorable
from ftrun.snapshot.plain_values import decode, encode
from ftrun.worker.survivors.alone import LocalGroups
from ftrun.worker.survivors.groups import ProcessGroups

c10d: Any = distributed_c10d

MAX_BYTES = 256 << 10
"""Of all recorded results of a rank."""

_MAX_CALLS = 1000

_OUTPUTS = {
    "broadcast": "tensor", "all_reduce": "tensor", "all_reduce_coalesced": "tensors",
    "reduce": "tensor", "all_gather_object": "object_list", "gather_object": "object_gather_list",
    "broadcast_object_list": "object_list", "scatter_object_list": "scatter_object_output_list",
    "all_gather": "tensor_list", "all_gather_single": "output_tensor",
    "all_gather_into_tensor": "output_tensor", "_all_gather_base": "output_tensor",
    "all_gather_coalesced": "output_tensor_lists", "gather": "gather_list", "scatter": "tensor",
    "reduce_scatter": "output", "reduce_scatter_single": "output",
    "reduce_scatter_tensor": "output", "_reduce_scatter_base": "output",
    "all_to_all_single": "output", "all_to_all": "output_tensor_list",
    "barrier": "", "monitored_barrier": "",
}  # fmt: skip
"""Collectives, and the argument that each one writes to."""

_MESSAGES = (
    "isend", "irecv", "send", "recv", "send_object_list", "recv_object_list", "batch_isend_irecv",
)  # fmt: skip


class _Span(NamedTuple):
    """Bytes of a storage that a call has written to."""

    storage: Any
    """A `StorageWeakRef`, which also keeps the storage's address from being used again."""
    first: int
    last: int


class _OpenCall(NamedTuple):
    """A call whose result is not recorded."""

    text: str
    written: list[_Span]


class SetUp:
    """The set-up of this process, which ends with its first turn.

    Args:
        load: returns the record of the rank's earlier set-up, which makes this process set up
            alone; it is called once, at the first collective or at the end. None: with the others.
        generation: of this process.
    """

    def __init__(
        self,
        groups: ProcessGroups,
        load: Callable[[], Mapping[str, Any]] | None = None,
        generation: int = 0,
    ) -> None:
        self._groups = groups
        self._origin = generation
        self._load = load
        self._local = None if load is None else LocalGroups(groups)
        self._record: list[tuple[str, bytes | None]] = []
        self._replayed = 0
        self._left_bytes = MAX_BYTES
        self._open: list[_OpenCall] = []
        self._covered: dict[str, int] = {}
        self._problem = ""
        self._has_met = False
        self._thread = threading.get_ident()
        self._is_over = self._is_inside = False
        self._replaced: list[tuple[types.ModuleType, str, Any, Any]] = []
        """Module, name, what torch has there, what takes its place."""
        self._install()

    @property
    def is_alone(self) -> bool:
        return self._local is not None

    @property
    def problem(self) -> str:
        """Why another process cannot set up this rank alone; empty: it can, see also `unknown`."""
        return self._problem

    @property
    def origin(self) -> int:
        """The generation whose ranks made this set-up together; equal on all ranks that may join.

        A version of an earlier generation has the results of another set-up than the ranks that
        stay.
        """
        self._read()
        return self._origin

    def unknown(self, attached: Iterable[torch.Tensor]) -> str:
        """The first call whose result is neither recorded nor attached; empty: there is none."""
        spans: dict[int, list[_Span]] = {}
        for tensor in attached:
            span = _span(tensor)
            spans.setdefault(span.storage.cdata, []).append(span)
        for call in self._open:
            for storage, first, last in call.written:
                known = () if storage.expired() else spans.get(storage.cdata, ())
                if not any(one.first <= first and last <= one.last for one in known):
                    return f"{call.text} before the first turn, into a tensor that is not attached"
        return ""

    def export(self) -> dict[str, Any]:
        """The record, for `load` of a process that sets up this rank alone."""
        self._read()
        return {"generation": self._origin, "calls": self._record}

    def finish(self) -> None:
        """End the set-up. Raises SetUpDiffers if this process has made fewer calls than before."""
        if self._is_over:
            return
        self._is_over = True
        for module, name, original, wrapper in self._replaced:
            if getattr(module, name) is wrapper:  # else the script has replaced it too
                setattr(module, name, original)
        if self._local is not None:
            self._local.close()
            self._read()
            if self._replayed < len(self._record):
                raise SetUpDiffers("the end of the set-up", self._record[self._replayed][0])
            return
        counts = self._groups.calls()
        if counts and not self._has_met:
            self._fail("init_process_group was given a store of the script")
        for name, count in counts.items():
            if (unknown := count - self._covered.get(name, 0)) > 0:  # Rule 2
                self._fail(
                    f"{unknown} collectives of group {name} before the first turn were called "
                    "otherwise than through torch.distributed"
                )

    def _fail(self, problem: str) -> None:
        self._problem = self._problem or problem

    def _read(self) -> None:
        load, self._load = self._load, None
        if load is not None:
            record = load()
            self._origin = record["generation"]
            self._record = [(str(text), result) for text, result in record["calls"]]

    # --- calls ---------------------------------------------------------------------------------

    def _install(self) -> None:
        modules = [
            module
            for key, module in list(sys.modules.items())
            if key.startswith("torch.distributed") and isinstance(module, types.ModuleType)
        ]
        # Only these names are read: in a forked process, each object that is touched costs a page.
        for name in (*_OUTPUTS, *_MESSAGES):
            if (original := vars(c10d).get(name)) is None:
                continue
            wrapper = self._wrap(name, original)
            for module in modules:
                if vars(module).get(name) is original:
                    self._replace(module, name, wrapper)
        self._wrap_ddp()
        if not self.is_alone:
            meet = c10d.rendezvous

            def noted(*args: Any, **kwargs: Any) -> Any:
                self._has_met = True
                return meet(*args, **kwargs)

            self._replace(c10d, "rendezvous", noted)

    def _replace(self, module: types.ModuleType, name: str, wrapper: Any) -> None:
        self._replaced.append((module, name, getattr(module, name), wrapper))
        setattr(module, name, wrapper)

    def _wrap(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_elsewhere():
                return original(*args, **kwargs)
            given: Mapping[str, Any] = {}
            with self._noting_bugs():
                given = inspect.signature(original).bind(*args, **kwargs).arguments
            self._is_inside = True
            try:
                return self._call(name, functools.partial(original, *args, **kwargs), given)
            finally:
                self._is_inside = False

        return call

    def _wrap_ddp(self) -> None:
        original = DistributedDataParallel.__init__

        @functools.wraps(original)
        def construct(ddp: Any, *args: Any, **kwargs: Any) -> None:
            if self._is_elsewhere():
                original(ddp, *args, **kwargs)
                return
            self._is_inside = True
            try:
                before: dict[str, int] = {}
                with self._noting_bugs():
                    before = self._groups.calls()
                original(ddp, *args, **kwargs)
                with self._noting_bugs():
                    self._constructed(ddp.module, before)
            finally:
                self._is_inside = False

        # It stays after the set-up, because a later wrapper may have it as its original.
        DistributedDataParallel.__init__ = construct  # type: ignore[method-assign, assignment]

    def _is_elsewhere(self) -> bool:
        """Whether a call is not one of the script's own during the set-up."""
        return self._is_over or self._is_inside or threading.get_ident() != self._thread

    def _call(self, name: str, run: Callable[[], Any], given: Mapping[str, Any]) -> Any:
        if name in _MESSAGES:
            if self.is_alone:
                raise SetUpDiffers(f"{name} at {_caller()}", "no message between two ranks")
            with self._noting_bugs():
                self._fail(f"{_caller()} calls {name} before the first turn")
            return run()
        is_async = bool(given.get("async_op"))
        before, output = dict[str, int](), None
        with self._noting_bugs():
            output = _Output.of(given.get(_OUTPUTS[name]), are_objects="object" in name)
            text = f"{name} of group {_group_name(given)}: {output.text()}"
            if self.is_alone:
                self._write(text, output)
                return run() if is_async else None
            before = self._groups.calls()
        result = run()
        with self._noting_bugs():
            if output is not None:
                self._cover(before)
                self._note(text, output, is_known=not is_async)
        return result

    @contextmanager
    def _noting_bugs(self) -> Iterator[None]:
        """A bug must not end the script; of a rank that sets up alone, only this start ends."""
        try:
            yield
        except Exception as error:
            if self.is_alone:
                raise
            self._fail(f"a bug in ftrun: {error!r}")

    def _constructed(self, module: nn.Module, before: Mapping[str, int]) -> None:
        """DDP's constructor has sent the parameters and buffers of rank 0 to all."""
        local = [
            buffer
            for part in module.modules()
            for name, buffer in sorted(part._buffers.items())
            if buffer is not None and name in part._non_persistent_buffers_set
        ]
        text = f"DistributedDataParallel of {sum(1 for _ in module.parameters())} parameters"
        if self.is_alone:
            self._write(text, _Output(local, None))
            return
        self._cover(before)
        self._note(text, _Output(local, None), is_known=True)
        left_out = {id(one) for one in local}
        rest = [one for one in (*module.parameters(), *module.buffers()) if id(one) not in left_out]
        self._open.append(_OpenCall(f"{_caller()} calls {text}", list(map(_span, rest))))

    def _cover(self, before: Mapping[str, int]) -> None:
        for name, count in self._groups.calls().items():
            self._covered[name] = self._covered.get(name, 0) + count - before.get(name, 0)

    def _note(self, text: str, output: "_Output", *, is_known: bool) -> None:
        """Record a call that has returned; an asynchronous one has no known result yet."""
        text_here = f"{_caller()} calls {text}"
        if len(self._record) >= _MAX_CALLS:
            self._fail(f"more than {_MAX_CALLS:,} collectives before the first turn")
            return
        data: bytes | None = None
        try:
            if output.is_empty:
                data = b""
            elif is_known and output.num_bytes <= self._left_bytes:
                data = output.encoded()
        except ValueNotStorable as error:
            self._fail(f"{text_here}, and a {error.kind} cannot be recorded")
        if data is not None and len(data) <= self._left_bytes:
            self._left_bytes -= len(data)
            self._record.append((text, data))
            return
        self._record.append((text, None))
        self._open.append(_OpenCall(text_here, list(map(_span, output.tensors))))
        if output.objects is not None:
            self._fail(f"{text_here}, and at most {MAX_BYTES:,} bytes of results are recorded")

    def _write(self, text: str, output: "_Output") -> None:
        """Write the recorded result of the next call, which must be this one."""
        self._read()
        is_there = self._replayed < len(self._record)
        recorded, data = self._record[self._replayed] if is_there else ("the first turn", None)
        if recorded != text:
            raise SetUpDiffers(f"{text} at {_caller()}", recorded)
        self._replayed += 1
        if data:
            output.write(data)


class _Output(NamedTuple):
    """What a collective writes to."""

    tensors: list[torch.Tensor]
    objects: list[Any] | None

    @classmethod
    def of(cls, argument: Any, *, are_objects: bool) -> "_Output":
        if are_objects:
            return cls([], argument)
        if isinstance(argument, torch.Tensor):
            return cls([argument], None)
        found: list[torch.Tensor] = []
        for one in argument or ():
            found += [one] if isinstance(one, torch.Tensor) else one
        return cls(found, None)

    @property
    def is_empty(self) -> bool:
        return not self.tensors and not self.objects

    @property
    def num_bytes(self) -> int:
        return sum(one.numel() * one.element_size() for one in self.tensors)

    def text(self) -> str:
        if self.objects is not None:
            return f"{len(self.objects)} objects"
        texts = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in self.tensors]
        return " ".join(texts) or "no result"

    def encoded(self) -> bytes:
        """Raises ValueNotStorable for an object that is not plain."""
        return encode([[_stored(one) for one in self.tensors], self.objects], is_exact=True)

    def write(self, data: bytes) -> None:
        stored, objects = decode(data)
        with torch.no_grad():
            for tensor, one in zip(self.tensors, stored, strict=True):
                tensor.copy_(_tensor(one))
        if self.objects is not None:
            self.objects[:] = objects


def _stored(tensor: torch.Tensor) -> list[Any]:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), flat.numpy().tobytes()]


def _tensor(stored: list[Any]) -> torch.Tensor:
    dtype, shape, data = stored
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
    return flat.view(getattr(torch, dtype)).reshape(shape)


def _span(tensor: torch.Tensor) -> _Span:
    tensor = getattr(tensor, "_local_tensor", tensor)
    size = tensor.element_size()
    first = int(tensor.storage_offset()) * size
    extent = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    last = first + ((extent + 1) * size if tensor.numel() else 0)
    storage: Any = StorageWeakRef
    return _Span(storage(tensor.untyped_storage()), first, last)


def _group_name(given: Mapping[str, Any]) -> str:
    names: dict[Any, str] = {**c10d._world.pg_names}
    return names.get(given.get("group") or dist.group.WORLD, "of other ranks")


def _caller() -> str:
    """File and line of the script that calls torch."""
    frame = sys._getframe(1)
    own = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    while frame.f_back is not None and frame.f_code.co_filename.startswith(own):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
