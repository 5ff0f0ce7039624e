"""Orders the reads of a snapshot after the work that the script has queued on a device.

Runs in:  worker, training thread: hooks and boundaries.
Takes in: the streams in which optimizers step; captures and replays of graphs.
Gives:    streams that wait for the steps; the optimizers whose step a graph replays.

Streams of a device run independently of each other. Without an event, a read in one stream may
return the bytes before a step that another stream has not reached yet.

Rule 1: at a boundary, the current stream of each device waits for the streams that had steps.
Rule 2: a replay fires no optimizer hook and changes no version counter. Any replay may change the
        state, so it waits for the copy in progress, as an optimizer step does.
Rule 3: no copy is in progress during a capture, because work of another thread may end it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ftrun.worker.state.unprotected import Hook

_METHODS = ("capture_begin", "capture_end", "replay")
_GRAPHS = tuple(
    kind
    for kind in (torch.cuda.CUDAGraph, getattr(torch.accelerator, "Graph", None))  # from 2.12
    if kind is not None
)


class StepStreams:
    """The streams in which steps were queued since the last boundary.

    Args:
        guarded: wraps the hook so that its exceptions do not reach the script.
    """

    def __init__(self, guarded: Callable[[Hook], Hook]) -> None:
        self._streams: set[torch.Stream] = set()
        self._devices: WeakKeyDictionary[Optimizer, list[torch.device]] = WeakKeyDictionary()
        self._hook = register_optimizer_step_pre_hook(guarded(self._before_step))

    def close(self) -> None:
        self._hook.remove()

    def note(self, device: torch.device | None = None) -> None:
        self._streams.add(torch.accelerator.current_stream(device))

    def join(self) -> None:
        """Let the current streams wait for the steps: rule 1."""
        streams, self._streams = self._streams, set()
        for stream in streams:
            current = torch.accelerator.current_stream(stream.device)
            if current != stream:
                current.wait_stream(stream)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        devices = self._devices.get(optimizer)
        if devices is None:
            groups = optimizer.param_groups
            devices = list({one.device for group in groups for one in group["params"]})
            devices = [device for device in devices if device.type != "cpu"]
            self._devices[optimizer] = devices
        for device in devices:
            self.note(device)


class GraphReplays:
    """Observes the captures and replays of graphs until it is closed.

    Args:
        before_capture: called before a capture begins.
        before_replay: called before each replay, with the optimizers that stepped in the capture.
    """

    def __init__(
        self,
        before_capture: Callable[[], None],
        before_replay: Callable[[Sequence[Optimizer]], None],
    ) -> None:
        self._before_capture = before_capture
        self._before_replay = before_replay
        self._stepping: list[Optimizer] | None = None
        """Optimizers that have stepped in the capture in progress."""
        self._steps: WeakKeyDictionary[Any, list[Optimizer]] = WeakKeyDictionary()
        self._hook = register_optimizer_step_pre_hook(self._note_step)
        self._originals = [
            (kind, name, getattr(kind, name)) for kind in _GRAPHS for name in _METHODS
        ]
        for kind, name, original in self._originals:
            setattr(kind, name, functools.wraps(original)(getattr(self, f"_{name}")(original)))

    def close(self) -> None:
        self._hook.remove()
        for kind, name, original in self._originals:
            setattr(kind, name, original)

    @property
    def is_capturing(self) -> bool:
        return self._stepping is not None

    def outside_captures(self, hook: Hook) -> Hook:
        """Wrap the hook of a step: in a capture a step is recorded and does not run."""

        @functools.wraps(hook)
        def call(*args: Any) -> None:
            if self._stepping is None:
                hook(*args)

        return call

    def _note_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not torch.compiler.is_compiling() and self._stepping is not None:
            self._stepping.append(optimizer)

    def _capture_begin(self, original: Callable[..., None]) -> Callable[..., None]:
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> None:
            self._before_capture()
            original(graph, *args, **kwargs)
            self._stepping = self._steps[graph] = []

        return capture_begin

    def _capture_end(self, original: Callable[..., None]) -> Callable[..., None]:
        def capture_end(graph: Any) -> None:
            self._stepping = None
            original(graph)

        return capture_end

    def _replay(self, original: Callable[..., None]) -> Callable[..., None]:
        def replay(graph: Any) -> None:
            self._before_replay(self._steps.get(graph, ()))
            original(graph)

        return replay
