"""Observes the captures and replays of device graphs in this process.

Runs in:  worker, the threads that capture and replay.
Takes in: calls of torch's graph classes; torch's hook before each optimizer step.
Gives:    `HeartbeatField.CAPTURES` and `REPLAYS`; calls of the functions given to `listen`.
Source:   a query of an event from any thread of the process ends a capture in CUDA's default mode,
          and the agent's dumps of NCCL's recorder query events (ftrun.agent.observe.recorder).

Rule 1: the page shows the capture before the wait, and the agent its dump before the look at the
        page. So one of the two sees the other. The wait ends with the deadline of the dump.
Rule 2: in a capture a step is recorded and does not run, so the hooks of steps do nothing. A replay
        fires no hook. The listener gets the optimizers that stepped in the capture, also if it
        was made before `attach`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ftrun import clock
from ftrun.wire.shared_memory.pages import HeartbeatField, SharedPage
from ftrun.worker.state.unprotected import Hook

_POLL_S = 0.001
_METHODS = ("capture_begin", "capture_end", "replay")
GRAPHS = tuple(
    kind
    for kind in (
        torch.cuda.CUDAGraph,
        getattr(torch.accelerator, "Graph", None),  # from 2.12
        getattr(torch.xpu, "XPUGraph", None),
    )
    if kind is not None and all(hasattr(kind, name) for name in _METHODS)
)


BeforeCapture = Callable[[Any], None]
BeforeReplay = Callable[[Any, Sequence[Optimizer]], None]


def _nothing(*_: Any) -> None:
    pass


class GraphObserver:
    """Wraps the methods of graph classes until it is closed."""

    def __init__(self, kinds: Sequence[Any] = GRAPHS) -> None:
        self._before_capture: BeforeCapture = _nothing
        self._before_replay: BeforeReplay = _nothing
        self._page: SharedPage | None = None
        self._after_step: Hook = _nothing
        self._stepping: list[Optimizer] | None = None
        """Optimizers that have stepped in the capture in progress."""
        self._steps: WeakKeyDictionary[Any, list[Optimizer]] = WeakKeyDictionary()
        self._hook = register_optimizer_step_pre_hook(self._note_step)
        self._originals = [(kind, name, getattr(kind, name)) for kind in kinds for name in _METHODS]
        for kind, name, original in self._originals:
            setattr(kind, name, functools.wraps(original)(getattr(self, f"_{name}")(original)))

    def show(self, page: SharedPage, after_step: Hook = _nothing) -> None:
        """Show captures and replays on the page; call `after_step` for each replayed step."""
        self._page, self._after_step = page, after_step
        page.note_capture(is_in_progress=self.is_capturing)

    def listen(
        self, before_capture: BeforeCapture = _nothing, before_replay: BeforeReplay = _nothing
    ) -> None:
        """Set the functions to call; they must not raise.

        From `before_capture` to the end of the capture, nothing may wait for a device.
        `before_replay` takes the graph, and the optimizers that stepped in its capture.
        """
        self._before_capture, self._before_replay = before_capture, before_replay

    def close(self) -> None:
        self._hook.remove()
        for kind, name, original in self._originals:
            setattr(kind, name, original)

    @property
    def is_capturing(self) -> bool:
        return self._stepping is not None

    def outside_captures(self, hook: Hook) -> Hook:
        """Wrap the hook of a step: rule 2."""

        @functools.wraps(hook)
        def call(*args: Any) -> None:
            if self._stepping is None:
                hook(*args)

        return call

    def _note_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not torch.compiler.is_compiling() and self._stepping is not None:
            self._stepping.append(optimizer)

    def _set_capture(self, stepping: list[Optimizer] | None) -> None:
        self._stepping = stepping
        if self._page is not None:
            self._page.note_capture(is_in_progress=stepping is not None)

    def _capture_begin(self, original: Callable[..., None]) -> Callable[..., None]:
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> None:
            self._before_capture(graph)
            stepping: list[Optimizer] = []
            self._set_capture(stepping)
            page = self._page
            try:
                while page is not None and page.get(HeartbeatField.READING_NS) > clock.now_ns():
                    clock.sleep(_POLL_S)
                original(graph, *args, **kwargs)
            except BaseException:
                self._set_capture(None)
                raise
            self._steps[graph] = stepping

        return capture_begin

    def _capture_end(self, original: Callable[..., None]) -> Callable[..., None]:
        def capture_end(graph: Any) -> None:
            try:
                original(graph)
            finally:
                self._set_capture(None)

        return capture_end

    def _replay(self, original: Callable[..., None]) -> Callable[..., None]:
        def replay(graph: Any) -> None:
            stepping = self._steps.get(graph, ())
            if not self.is_capturing:
                self._before_replay(graph, stepping)
            original(graph)
            if self._page is not None:
                self._page.add(HeartbeatField.REPLAYS, 1)
            for optimizer in stepping:
                self._after_step(optimizer)

        return replay


@functools.cache
def observer() -> GraphObserver:
    return GraphObserver()


def observe(page: SharedPage, after_step: Hook) -> None:
    """Show captures and replays on the page; nothing on a machine without a device."""
    if torch.accelerator.current_accelerator() is not None:
        observer().show(page, after_step)
