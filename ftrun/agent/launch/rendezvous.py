"""A store for each generation, and the handler torch asks for one.

Runs in:  agent, main thread.
Takes in: the address workers reach this node by; the place of this node in a generation.
Gives:    TCPStores, each bound to that one address; where the workers of other nodes' find theirs.

A new store for each generation: torchrun reuses one, whose keys of the last attempt a restarted
rank then reads (pytorch#135712). Made ahead of need, since the next generation is started when
seconds count. The listening socket is bound here and handed over, because TCPStore by itself
listens on every interface. The number is promised before anybody has said by which rail the ranks
will meet, so it is held on all of them until then.
"""

import contextlib
import errno
import logging
import socket
from collections.abc import Sequence
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

_MAX_PORTS = 20
_BACKLOG = 512
_log = logging.getLogger(__name__)


def make_store(address: str, port: int = 0) -> TCPStore:
    """A store that listens on `address` only, on `port` or any free one.

    Raises:
        OSError: it is no address of this node, or the port is taken there.
    """
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
    """The store of this generation, and the one of the next.

    Args:
        address: by which this node is known.
        port: a fixed one; 0: any.
        others: the addresses of this node's other rails.
    """

    def __init__(self, address: str, port: int, others: Sequence[str] = ()) -> None:
        self.address = address
        self._port = port
        self._others = [other for other in others if other != address]
        self._held: dict[str, socket.socket] = {}
        """The port of the next store at other addresses."""
        self._current: TCPStore | None = None
        self._next: TCPStore | None = None

    def prepare(self) -> None:
        """Make the next store now; a fixed port is free only when the old store is gone."""
        if self._next is None and not self._port:
            self._next, self._held = self._promise()

    @property
    def next_port(self) -> int:
        """Where the store of the next generation listens, if rank 0 is on this node."""
        if self._port:
            return self._port
        self.prepare()
        assert self._next is not None
        return int(self._next.port)

    def take(self, address: str = "") -> TCPStore:
        """The store of a new generation.

        Args:
            address: where this node listens for it, with the port that was named before; empty or
                `address`: where it was made ahead of need.
        """
        if self._port:
            self._current = None
            self._current = make_store(address or self.address, self._port)
        else:
            self.prepare()
            self._current, self._next = self._on_rail(address) or self._next, None
            self._let_go()
        assert self._current is not None
        return self._current

    def _promise(self) -> tuple[TCPStore, dict[str, socket.socket]]:
        """A store, and its port at the other addresses as far as it can be had there."""
        for _ in range(_MAX_PORTS):
            store = make_store(self.address)
            held = self._hold(int(store.port))
            if held is not None:
                return store, held
        return make_store(self.address), {}

    def _hold(self, port: int) -> dict[str, socket.socket] | None:
        """The port at the other addresses; None where it is taken at one of them."""
        held: dict[str, socket.socket] = {}
        for other in self._others:
            try:
                held[other] = _listener(other, port)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    for listener in held.values():
                        listener.close()
                    return None
                _log.debug("no store can be at %s: %s", other, error)
        return held

    def _on_rail(self, address: str) -> TCPStore | None:
        """The store that was promised, on another rail; None where it is not to be there.

        Where the port cannot be had any more, ranks of other nodes do not find their store: they
        fail, and the next generation comes. That is no reason for this agent to end.
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


@dataclass(frozen=True, slots=True)
class NodePlacement:
    """This node in a generation, as torch wants to know it."""

    group_rank: int
    num_nodes: int
    first_rank: int
    world_size: int
    store_host: str
    store_port: int
    rail_host: str = ""
    """Where the store of this node listens, if its ranks meet on a rail that was chosen."""


class PlanRendezvousHandler(RendezvousHandler):
    """Rendezvous that has happened already: the plan says who takes part."""

    placement = NodePlacement(0, 1, 0, 1, LOOPBACK, 0)

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
        own = at.rail_host or self._pool.address
        store = self._pool.take(own) if at.group_rank == 0 else HashStore()
        port = store.port if isinstance(store, TCPStore) else at.store_port
        address = store.host if isinstance(store, TCPStore) else at.store_host
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
        return PlanRendezvousHandler(params.run_id, pool)

    rendezvous_handler_registry.register(BACKEND, create)
