"""The thread that queries the outside witness.

Runs in:  agent, a thread of its own, because a query may block and heartbeats must not wait.
Takes in: queries of the control loop, in a queue.
Gives:    `WitnessAnswered` to the control loop, for each query or a later one of its kind.
Survives: a witness that never answers: at most one query of each kind is kept.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

from ftrun.agent.cluster.etcd_witness import ANSWER_S, EtcdWitness
from ftrun.membership.events import WitnessAnswered
from ftrun.recovery.commands import QueryWitness, WitnessOperation
from ftrun.wire.cluster.generation import NodeCard

_log = logging.getLogger(__name__)


class WitnessClient:
    """The queries of one agent, one at a time."""

    def __init__(
        self, register: EtcdWitness, me: NodeCard, tell: Callable[[WitnessAnswered], None]
    ) -> None:
        self._register = register
        self._me = me
        self._tell = tell
        self._questions: SimpleQueue[QueryWitness | None] = SimpleQueue()
        self.failure: Exception | None = None
        """The exception that has ended this thread. The leader has no witness then, and the agent
        must end."""
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="ftrun-witness", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ask(self, asked: QueryWitness) -> None:
        """Queue a query; from any thread, never waits."""
        self._questions.put(asked)

    def close(self) -> None:
        self._questions.put(None)
        self._thread.join(2 * ANSWER_S)

    def _run(self) -> None:
        try:
            while not self._is_over:
                for asked in self._next():
                    self._tell(self._register.ask(asked, self._me))
        except Exception as error:  # noqa: BLE001 - any of them ends this agent
            _log.exception("the thread that speaks with the witness ended in a bug of ftrun")
            self.failure = error

    def _next(self) -> list[QueryWitness]:
        """The queries since the last call: the newest of each kind, in order."""
        kept: dict[WitnessOperation, QueryWitness] = {}
        found = self._questions.get()
        with suppress(Empty):
            while found is not None:
                kept.pop(found.wish, None)
                kept[found.wish] = found
                found = self._questions.get_nowait()
            self._is_over = True
        return list(kept.values())
