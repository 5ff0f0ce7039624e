"""Orders the reads of a snapshot after the work that the script has queued on a device.

Runs in:  worker, training thread: hooks and boundaries.

Streams of a device run independently of each other. Without an event, a read in one stream may
return the bytes before a step that another stream has not reached yet.

Rule: at a boundary, the current stream of each device waits for the streams that had steps. If
        tensors are copied at the boundary, these streams then wait for the current one, because the
        next forward changes buffers, and may run in them.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ftrun.worker.state.tensors import on_device
from ftrun.worker.state.unprotected import Hook


class StepStreams:
    """The streams in which steps were queued since the last boundary."""

    def __init__(self, guarded: Callable[[Hook], Hook]) -> None:
        self._streams: set[torch.Stream] = set()
        self._joined: list[torch.Stream] = []
        self._devices = WeakKeyDictionary[Optimizer, tuple[int, list[torch.device]]]()
        """With the number of parameter groups, which the script may add to."""
        self._hook = register_optimizer_step_pre_hook(guarded(self._before_step))

    def close(self) -> None:
        self._hook.remove()

    def note(self, device: torch.device | None = None) -> None:
        self._streams.add(torch.accelerator.current_stream(device))

    def join(self) -> None:
        """Let the current streams wait for the steps: the rule."""
        streams, self._streams = self._streams, set()
        self._joined = []
        for stream in streams:
            current = torch.accelerator.current_stream(stream.device)
            if current != stream:
                with on_device(stream.device):
                    current.wait_stream(stream)
                self._joined.append(stream)

    def release(self) -> None:
        """Let the streams of the steps wait for the current ones: the rule."""
        for stream in self._joined:
            with on_device(stream.device):
                stream.wait_stream(torch.accelerator.current_stream(stream.device))

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        groups = optimizer.param_groups
        count, devices = self._devices.get(optimizer, (-1, []))
        if count != len(groups):
            used = {one.device for group in groups for one in group["params"]}
            devices = [device for device in used if device.type != "cpu"]
            self._devices[optimizer] = (len(groups), devices)
        for device in devices:
            self.note(device)


class JudgedGraphs:
    """Whether replays of graphs without an optimizer step change sources: rule 6 of capture.py."""

    def __init__(self) -> None:
        self.harmless: WeakSet[Any] = WeakSet()
        self.changing: WeakSet[Any] = WeakSet()
        self.replayed: WeakSet[Any] = WeakSet()
        """Graphs replayed since the verified snapshot, whose sources are not compared yet."""
        self.are_new = False
        """A graph was replayed that is not judged yet."""
        self._sources: object = None

    def see(self, sources: object) -> None:
        if sources is not self._sources:
            self._sources = sources
            self.harmless.clear()

    def judge(self, *, has_changed: bool) -> bool:
        """Whether the graphs in the window of a verified snapshot may have changed sources."""
        replayed, self.replayed = self.replayed, WeakSet()
        if not replayed:
            return False
        (self.changing if has_changed else self.harmless).update(replayed)
        return has_changed
