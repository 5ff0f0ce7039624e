"""One store for each generation, and the rendezvous handler that torch asks for it.

Runs in the main thread.

Each generation has a new store. torchrun reuses one, and a restarted rank then reads keys of the
last attempt (pytorch#135712). A store is created ahead of need, because the start of the next
generation is urgent. The listening socket is bound here and handed over, because TCPStore by itself
listens on every interface. The port is reported before the plan names the rail of the ranks, so it
is reserved on all rails until then.
"""

import contextlib
import errno
import logging
import socket
from collections.abc import Sequence
from typing import Any, ClassVar

from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from ftrun import clock
from ftrun.errors import UsageError
from ftrun.wire.cluster.generation import GenerationPlan

BACKEND = "ftrun"
LOOPBACK = "127.0.0.1"

TAKEN_S = 5.0
"""A port that was free when the run began may be taken by another process for this time."""

_RETRY_S = 0.1
_MAX_PORTS = 20
_BACKLOG = 512
_log = logging.getLogger(__name__)


def make_store(address: str, port: int = 0) -> TCPStore:
    """Create a store that listens on `address` only, on `port` or any free one."""
    return _store_at(address, _listener(address, port))


def _listener(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _store_at(address: str, listener: socket.socket) -> TCPStore:
    try:
        return TCPStore(
            address,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    finally:
        with contextlib.suppress(OSError):
            listener.close()


class StorePool:
    """The stores of this generation and of the next; `others` are addresses of other rails."""

    def __init__(self, address: str, port: int, others: Sequence[str] = ()) -> None:
        self.address = address
        self._port = port
        self._others = [other for other in others if other != address]
        self._held: dict[str, socket.socket] = {}
        """Listeners that reserve the port of the next store at the other addresses."""
        self._current: TCPStore | None = None
        self._next: TCPStore | None = None

    def prepare(self) -> None:
        """Create the next store now; a fixed port is free only after the old store is closed."""
        if self._next is None and not self._port:
            self._next, self._held = self._promise()

    @property
    def next_port(self) -> int:
        if self._port:
            return self._port
        self.prepare()
        assert self._next is not None
        return int(self._next.port)

    def take(self, address: str = "") -> TCPStore:
        """Return the store of a new generation.

        Without an `address`, and at the pool's own one, it is the store that was created ahead of
        need.
        """
        if self._port:
            self._current = None
            self._current = self._at_given_port(address or self.address)
        else:
            self.prepare()
            self._current, self._next = self._on_rail(address) or self._next, None
            self._let_go()
        assert self._current is not None
        return self._current

    def check(self) -> None:
        """Raises UsageError if no store can listen at the given port."""
        if self._port:
            try:
                _listener(self.address, self._port).close()
            except OSError as error:
                raise UsageError(
                    f"--master-port {self._port} cannot be used at {self.address}: "
                    f"{error.strerror or error}. Give a free one, or leave it out"
                ) from error

    def _at_given_port(self, address: str) -> TCPStore:
        """The store at the given port, or at any other if it stays taken."""
        give_up_s = clock.now_s() + TAKEN_S
        while True:
            try:
                return make_store(address, self._port)
            except OSError as error:
                if clock.now_s() > give_up_s:
                    _log.warning("--master-port %d is taken now, so another is used", self._port)
                    return make_store(address)
                _log.debug("port %d of %s: %s", self._port, address, error)
                clock.sleep(_RETRY_S)

    def _promise(self) -> tuple[TCPStore, dict[str, socket.socket]]:
        for _ in range(_MAX_PORTS):
            store = make_store(self.address)
            held = self._hold(int(store.port))
            if held is not None:
                return store, held
        return make_store(self.address), {}

    def _hold(self, port: int) -> dict[str, socket.socket] | None:
        held: dict[str, socket.socket] = {}
        for other in self._others:
            try:
                held[other] = _listener(other, port)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    for listener in held.values():
                        listener.close()
                    return None
                _log.debug("no store can listen at %s: %s", other, error)
        return held

    def _on_rail(self, address: str) -> TCPStore | None:
        """Move the next store to another rail; None if it stays or the port is taken there.

        A taken port is no reason to end this agent: ranks of other nodes do not find their store
        and fail, and the next generation follows.
        """
        if address in ("", self.address):
            return None
        listener = self._held.pop(address, None)
        try:
            return _store_at(address, listener or _listener(address, self.next_port))
        except (OSError, RuntimeError) as error:
            _log.warning("no store at %s port %d: %s", address, self.next_port, error)
            return None

    def _let_go(self) -> None:
        for listener in self._held.values():
            listener.close()
        self._held = {}


class PlanRendezvousHandler(RendezvousHandler):
    """A rendezvous that is complete already: the plan says which nodes take part."""

    plan: ClassVar[GenerationPlan]
    """Of the generation that starts."""
    group_rank: ClassVar[int]
    """The index of this node in the plan, which torch calls its group rank."""

    def __init__(self, run_id: str, pool: StorePool) -> None:
        self._run_id = run_id
        self._pool = pool

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        plan = self.plan
        # Ranks are in the plan and not exchanged, so no agent waits for the store of another agent.
        # That agent may be dead by now, which is detected in another way. Only workers connect to
        # it.
        own = plan.store_host if plan.paths is not None else ""
        store = self._pool.take(own) if self.group_rank == 0 else HashStore()
        port = store.port if isinstance(store, TCPStore) else plan.store_port
        address = store.host if isinstance(store, TCPStore) else plan.store_host
        info = RendezvousStoreInfo(address, port)
        return RendezvousInfo(store, self.group_rank, len(plan.members), info)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """No effect: no node can join through torch's rendezvous."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def register(pool: StorePool) -> None:
    def create(params: RendezvousParameters, *_: Any) -> RendezvousHandler:
        return PlanRendezvousHandler(params.run_id, pool)

    rendezvous_handler_registry.register(BACKEND, create)
