"""Records the messages (send, recv) that Python code calls on the CPU, for the agent.

Runs in:  worker, in each thread that calls or waits for a message.
Takes in: calls of `ProcessGroup.send` and `recv`, and of `Work.wait`; all of torch's functions for
          messages call them, also `batch_isend_irecv` and the pipeline schedules.
Gives:    the ring of messages on the heartbeat page, and the time that the rank has waited.
Survives: nothing; what is on the page survives the worker.
Source:   torch 2.6 to 2.13. The flight recorder of gloo has no entry for a message, and a stack
          shows `work.wait()` without its peer.

Rule 1: an error here ends the recording, and never the call.
Rule 2: messages of devices are in the recorder of their own backend, and are not recorded here.
"""

import logging
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ftrun import clock
from ftrun.monitor.order.messages import ANY, RecordedMessage, group_key
from ftrun.wire.shared_memory.message_ring import write_end, write_message, write_wait
from ftrun.wire.shared_memory.pages import HeartbeatField, SharedPage

_log = logging.getLogger(__name__)
MAX_OPEN = 4096
"""Messages that were called and not waited for; more are forgotten."""
MAX_KINDS = 16384
"""Kinds of messages that are counted; of those with a tag for each step the oldest are dropped."""
_SEND, _RECV, _RECV_ANY = "send", "recv", "recv_anysource"
_NAMES = ("dstRank", "srcRank", "tag")
"""Of the arguments after the tensors."""

_recorder: "_Recorder | None" = None


def install(page: SharedPage) -> None:
    """Record from now on; later calls do nothing. Needs torch.distributed."""
    global _recorder
    if _recorder is None:
        _recorder = _Recorder(page)


def restart() -> None:
    """Count from 0 on: the groups of this process have other backends, as on all other ranks."""
    if _recorder is not None:
        _recorder.restart()


def calls_of_default_group() -> int:
    """Recorded messages of the default group, which its sequence number includes."""
    return _recorder.calls_of_default_group() if _recorder is not None else 0


class _Group:
    """What a message needs to know of its group; `ranks` is empty if it is not recorded."""

    def __init__(self, group: Any, c10d: Any) -> None:
        self.key = group_key(group.group_name)
        self.ranks: list[int] = []
        backend = None
        with suppress(RuntimeError):  # it has no backend for the CPU
            import torch

            backend = group._get_backend(torch.device("cpu"))
        if backend is not None and "gloo" in str(backend.name()).lower():
            known = c10d._world.pg_group_ranks.get(group, {})
            by_rank = {own: rank for rank, own in known.items()}
            self.ranks = [by_rank[own] for own in range(len(by_rank))]


class _Recorder:
    def __init__(self, page: SharedPage) -> None:
        from torch.distributed import distributed_c10d as c10d

        self._page = page
        self._c10d = c10d
        self._groups: dict[tuple[int, str], _Group] = {}
        self._counts: dict[tuple[int, bool, int, int], int] = {}
        self._open: dict[int, int] = {}
        """By the identity of the work object: the number of the message."""
        self._number = 0
        self._in_default_group = 0
        self._default_group: Any = lambda: None
        """Weak reference to the default group that is counted: a script may make another one."""
        self._waited_ns = 0
        """In waits for messages."""
        self._kept: list[tuple[Any, str, Any]] = []
        for name in (_SEND, _RECV, _RECV_ANY):
            self._wrap(c10d.ProcessGroup, name, self._calling(name))
        self._wrap(c10d.Work, "wait", self._waiting)

    def restart(self) -> None:
        """The ring and its fields are those of a new page."""
        for known in (self._groups, self._counts, self._open):
            known.clear()
        self._number = self._in_default_group = self._waited_ns = 0

    def _wrap(self, owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        # `getattr` of a class of pybind11 gives a function that would not bind to an object.
        self._kept.append((owner, name, vars(owner)[name]))
        setattr(owner, name, wrapper(getattr(owner, name)))

    def calls_of_default_group(self) -> int:
        is_counted = self._default_group() is self._c10d.GroupMember.WORLD
        return self._in_default_group if is_counted else 0

    def _end(self, error: Exception) -> None:
        _log.warning("a bug in ftrun: messages are not recorded any more", exc_info=error)
        for owner, name, original in self._kept:
            setattr(owner, name, original)

    def _calling(self, name: str) -> Callable[[Any], Any]:
        def wrapper(original: Any) -> Any:
            def call(group: Any, *args: Any, **kwargs: Any) -> Any:
                number = 0
                try:
                    number = self._called(name, group, *args, **kwargs)
                except Exception as error:  # noqa: BLE001 - rule 1
                    self._end(error)
                work = original(group, *args, **kwargs)
                if number:
                    if len(self._open) >= MAX_OPEN:
                        self._open.clear()
                    self._open[id(work)] = number
                return work

            return call

        return wrapper

    def _called(self, name: str, group: Any, tensors: Any, *words: Any, **named: Any) -> int:
        """Record a call; its number, or 0 if it is not recorded."""
        if not tensors[0].is_cpu:
            return 0
        at = (id(group), group.group_name)
        known = self._groups.get(at)
        if known is None:
            known = self._groups[at] = _Group(group, self._c10d)
        if not known.ranks:
            return 0
        found = [*words, *(named[one] for one in _NAMES if one in named)]
        peer = ANY if name == _RECV_ANY else known.ranks[found[0]]
        tag, is_send = found[-1], name == _SEND
        key = (known.key, is_send, peer, tag)
        count = self._counts.pop(key, 0) + 1
        self._counts[key] = count  # the newest kind is the last one
        if len(self._counts) > MAX_KINDS:
            del self._counts[next(iter(self._counts))]
        page = self._page
        self._number += 1
        if group is self._c10d.GroupMember.WORLD:
            self._in_default_group = self.calls_of_default_group() + 1
            self._default_group = weakref.ref(group)
        step, now_ns = page.get(HeartbeatField.STEP), clock.now_ns()
        entry = RecordedMessage(
            self._number, step, now_ns, 0, 0, 0, known.key, tag, count, peer, is_send
        )
        write_message(page.message_memory, entry)
        page.set(HeartbeatField.MESSAGES, self._number)
        return self._number

    def _waiting(self, original: Any) -> Any:
        page, now_ns = self._page, clock.now_ns

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            number = self._open.pop(id(work), 0)
            began_ns = now_ns()
            if number:
                write_wait(page.message_memory, number, began_ns)
                page.set(HeartbeatField.MESSAGE_WAITED, number)
            try:
                return original(work, *args, **kwargs)
            finally:
                ended_ns = now_ns()
                page.add(HeartbeatField.WAITED_NS, ended_ns - began_ns)
                if number:
                    page.set(HeartbeatField.MESSAGE_WAITED, 0)
                    self._waited_ns += ended_ns - began_ns
                    write_end(page.message_memory, number, ended_ns, self._waited_ns)

        return wait
