"""Shows on the heartbeat page when a device graph is being captured.

Runs in:  worker, the thread that captures.
Gives:    `HeartbeatField.CAPTURES` and `REPLAYS`.
Source:   a query of an event from any thread of the process ends a capture in CUDA's default mode,
          and the agent's dumps of NCCL's recorder query events (ftrun.agent.observe.recorder).

Rule 1: the page shows the capture before the wait, and the agent its dump before the look at the
        page. So one of the two sees the other. The wait ends with the deadline of the dump.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from ftrun import clock
from ftrun.wire.shared_memory.pages import HeartbeatField, SharedPage

_POLL_S = 0.001


def observe(page: SharedPage) -> None:
    """Observe the captures of all classes of graphs; nothing on a machine without a device."""
    if torch.accelerator.current_accelerator() is None:
        return
    kinds = (torch.cuda.CUDAGraph, getattr(torch.accelerator, "Graph", None))  # from 2.12
    for kind in kinds:
        if kind is not None:
            observe_class(kind, page)
    page.note_capture(is_in_progress=False)


def observe_class(kind: Any, page: SharedPage) -> None:
    begin, end, replay = kind.capture_begin, kind.capture_end, kind.replay

    @functools.wraps(begin)
    def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
        page.note_capture(is_in_progress=True)
        _await_dump(page)
        try:
            return begin(graph, *args, **kwargs)
        except BaseException:
            page.note_capture(is_in_progress=False)
            raise

    kind.capture_begin = capture_begin
    kind.capture_end = _then(end, lambda: page.note_capture(is_in_progress=False))
    kind.replay = _then(replay, lambda: page.add(HeartbeatField.REPLAYS, 1))


def _then(original: Callable[..., Any], note: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(graph: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(graph, *args, **kwargs)
        finally:
            note()

    return call


def _await_dump(page: SharedPage) -> None:
    while page.get(HeartbeatField.READING_NS) > clock.now_ns():
        clock.sleep(_POLL_S)
