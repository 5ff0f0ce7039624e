"""A store for each generation, and the handler torch asks for one.

Runs in:  agent, main thread.
Takes in: the address workers reach this node by; the place of this node in a generation.
Gives:    TCPStores, each bound to that one address; where the workers of other nodes' find theirs.

A new store for each generation: torchrun reuses one, whose keys of the last attempt a restarted
rank then reads (pytorch#135712). Made ahead of need, since the next generation is started when
seconds count. The listening socket is bound here and handed over, because TCPStore by itself
listens on every interface.
"""

import contextlib
import socket
from dataclasses import dataclass
from typing import Any

from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]
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

    @property
    def next_port(self) -> int:
        """Where the store of the next generation listens, if rank 0 is on this node."""
        if self._port:
            return self._port
        self.prepare()
        assert self._next is not None
        return int(self._next.port)

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


@dataclass(frozen=True, slots=True)
class Placement:
    """This node in a generation, as torch wants to know it."""

    group_rank: int
    num_nodes: int
    first_rank: int
    world_size: int
    store_host: str
    store_port: int


class PlanHandler(RendezvousHandler):
    """Rendezvous that has happened already: the plan says who takes part."""

    placement = Placement(0, 1, 0, 1, LOOPBACK, 0)

    def __init__(self, run_id: str, pool: StorePool) -> None:
        self._run_id = run_id
        self._pool = pool

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        at = self.placement
        # Ranks are in the plan and not exchanged, so no agent waits for another one's store: it
        # may be dead by now, which this agent is told otherwise. Only workers connect to it.
        store = self._pool.take() if at.group_rank == 0 else HashStore()
        port = store.port if isinstance(store, TCPStore) else at.store_port
        address = self._pool.address if at.group_rank == 0 else at.store_host
        info = RendezvousStoreInfo(address, port)
        return RendezvousInfo(store, at.group_rank, at.num_nodes, info)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nobody else could join this way."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def register(pool: StorePool) -> None:
    """Make `--rdzv-backend ftrun` known to torch."""

    def create(params: RendezvousParameters, *_: Any) -> RendezvousHandler:
        return PlanHandler(params.run_id, pool)

    rendezvous_handler_registry.register(BACKEND, create)
