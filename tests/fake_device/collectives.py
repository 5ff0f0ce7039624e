"""Collectives of the fake device, by gloo, as NCCL orders them: in a stream of the group.

A call returns at once. The group's stream waits for the caller's stream, and calls gloo on the
memory of the device when it gets there. `wait` lets the caller's stream wait for it. Each rank runs
the collectives of a group in the order of the calls.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from fake_device import fake

BACKEND = "fakeccl"

Tensors = Sequence[torch.Tensor]


def register() -> None:
    """Let `init_process_group()` choose this backend for the fake device."""
    dist.Backend.register_backend(BACKEND, _create, devices=["fake"])


class _Queued(dist.Work):
    """A collective that the stream of its group will reach."""

    def __init__(self, device: torch.device, stream: torch.Stream, result: Any) -> None:
        super().__init__()
        self._stream = stream
        self._end = stream.record_event()
        self._result = result
        self._future: torch.futures.Future[Any] = torch.futures.Future(devices=[device])
        with stream:  # the future lets its readers wait for the current stream of now
            self._future.set_result(result)

    def wait(self, timeout: timedelta | None = None) -> bool:
        torch.accelerator.current_stream(self._stream.device).wait_event(self._end)
        return True

    def is_completed(self) -> bool:
        return self._end.query()

    def is_success(self) -> bool:
        return True

    def result(self) -> Any:
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


class FakeProcessGroup(dist.ProcessGroup):
    """The collectives that DDP and FSDP2 use."""

    def __init__(self, gloo: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._gloo = gloo
        self._streams: dict[torch.device, torch.Stream] = {}

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return BACKEND

    @property
    def group_name(self) -> str:
        return str(dist.distributed_c10d._world.pg_names[self])

    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        gloo = self._gloo
        return self._queue(tensors, tensors, lambda t: gloo.allreduce(t, *_given(opts)))

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: Tensors, opts: Any) -> dist.Work:
        return self._queue(tensors, tensors, lambda t: self._gloo.broadcast(t, opts))

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        flat = [one for of_input in outputs for one in of_input]
        size = self.size()

        def call(t: list[torch.Tensor]) -> dist.Work:
            received = t[: len(flat)]
            lists = [received[at : at + size] for at in range(0, len(received), size)]
            return self._gloo.allgather(lists, t[len(flat) :], *_given(opts))

        return self._queue([*flat, *inputs], outputs, call)

    def allgather_into_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        return self._each(self._gloo._allgather_base, outputs, inputs, opts)

    def _allgather_base(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        return self._each(self._gloo._allgather_base, [output], [source], opts)

    def reduce_scatter(
        self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None
    ) -> dist.Work:
        flat = [one for of_output in inputs for one in of_output]
        size = self.size()

        def call(t: list[torch.Tensor]) -> dist.Work:
            sent = t[len(outputs) :]
            lists = [sent[at : at + size] for at in range(0, len(sent), size)]
            return self._gloo.reduce_scatter(t[: len(outputs)], lists, *_given(opts))

        return self._queue([*outputs, *flat], outputs, call)

    def reduce_scatter_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        return self._each(self._gloo._reduce_scatter_base, outputs, inputs, opts)

    def _reduce_scatter_base(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        return self._each(self._gloo._reduce_scatter_base, [output], [source], opts)

    # The names from torch 2.13 on; for several tensors torch accepts both names.
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base

    def barrier(self, opts: Any = None) -> dist.Work:
        torch.accelerator.synchronize()
        return self._gloo.barrier(*_given(opts))  # type: ignore[no-any-return]

    def _each(
        self, collective: Callable[..., dist.Work], outputs: Tensors, inputs: Tensors, opts: Any
    ) -> dist.Work:
        """A collective of one output and one input, for each pair in turn."""
        count = len(outputs)

        def call(t: list[torch.Tensor]) -> dist.Work:
            given = zip(t[:count], t[count:], strict=True)
            works = [collective(*pair, *_given(opts)) for pair in given]
            for one in works:
                one.wait()
            return works[-1]

        result = outputs[0] if count == 1 else outputs
        return self._queue([*outputs, *inputs], result, call)

    def _queue(
        self, tensors: Tensors, result: Any, call: Callable[[list[torch.Tensor]], dist.Work]
    ) -> dist.Work:
        device = tensors[0].device
        if device.type == "cpu":
            return call(list(tensors))
        stream = self._streams.setdefault(device, torch.Stream(device))
        stream.wait_stream(torch.accelerator.current_stream(device))
        for one in tensors:
            one.record_stream(stream)
        views = [fake.host_view(one) for one in tensors]

        def run() -> None:
            call(views).wait()

        with stream:
            fake.call_in_stream(device, run)
        return _Queued(device, stream, result)


def _given(opts: Any) -> tuple[Any, ...]:
    return () if opts is None else (opts,)


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> FakeProcessGroup:
    inner = dist.PrefixStore(BACKEND, store)
    return FakeProcessGroup(dist.ProcessGroupGloo(inner, rank, size, timeout), rank, size)
