"""A store for each generation, and the handler torch asks for one.

Runs in:  agent, main thread.
Takes in: the address workers reach this node by.
Gives:    TCPStores, each bound to that one address.

A new store for each generation: torchrun reuses one, whose keys of the last attempt a restarted
rank then reads (pytorch#135712). Made ahead of need, since the next generation is started when
seconds count. The listening socket is bound here and handed over, because TCPStore by itself
listens on every interface.
"""

import contextlib
import socket
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND = "ftrun"
LOOPBACK = "127.0.0.1"


def make_store(address: str, port: int = 0) -> TCPStore:
    """A store that listens on `address` only, on `port` or any free one."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen(512)
        bound = listener.getsockname()[1]
        return TCPStore(
            address,
            bound,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    finally:
        with contextlib.suppress(OSError):
            listener.close()


class StorePool:
    """The store of this generation, and the one of the next."""

    def __init__(self, address: str, port: int) -> None:
        self.address = address
        self._port = port
        self._current: TCPStore | None = None
        self._next: TCPStore | None = None

    def prepare(self) -> None:
        """Make the next store now; a fixed port is free only when the old store is gone."""
        if self._next is None and not self._port:
            self._next = make_store(self.address)

    def take(self) -> TCPStore:
        """The store of a new generation."""
        if self._port:
            self._current = None
            self._current = make_store(self.address, self._port)
        else:
            self.prepare()
            self._current, self._next = self._next, None
        assert self._current is not None
        return self._current


class OneNodeHandler(RendezvousHandler):
    """Rendezvous of a run on one node: nobody to wait for."""

    def __init__(self, run_id: str, pool: StorePool) -> None:
        self._run_id = run_id
        self._pool = pool

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        store = self._pool.take()
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(self._pool.address, store.port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nobody else could join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def register(pool: StorePool) -> None:
    """Make `--rdzv-backend ftrun` known to torch."""

    def create(params: RendezvousParameters, *_: Any) -> RendezvousHandler:
        return OneNodeHandler(params.run_id, pool)

    rendezvous_handler_registry.register(BACKEND, create)
