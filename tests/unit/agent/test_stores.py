"""A store for each generation, on the rail that the plan names, at the promised port."""

import socket
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ftrun.agent.launch import rendezvous
from ftrun.agent.launch.rendezvous import (
    PlanRendezvousHandler,
    StorePool,
    make_store,
)
from ftrun.errors import UsageError
from tests.unit.recovery.made import plan

OWN, OTHER = "127.0.0.1", "127.78.0.2"


def reached(host: str, port: int) -> bool:
    store = TCPStore(host, port, is_master=False)
    store.set("key", "value")
    return bool(store.get("key") == b"value")


def can_listen(host: str, port: int) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
            sock.listen()
        except OSError:
            return False
    return True


def test_a_store_is_of_the_family_of_its_address() -> None:
    try:
        store = make_store("::1")
    except OSError:
        pytest.skip("needs IPv6")
    assert reached("::1", store.port)


def test_a_promised_port_is_held_on_every_rail_until_it_is_taken() -> None:
    pool = StorePool(OWN, 0, [OWN, OTHER, "203.0.113.7"])
    port = pool.next_port
    assert not can_listen(OTHER, port)
    store = pool.take(OTHER)
    assert (store.host, store.port) == (OTHER, port)
    assert reached(OTHER, port)
    assert pool.next_port != port
    again = pool.next_port
    assert pool.take().port == again
    assert can_listen(OTHER, again)


def test_a_port_that_cannot_be_had_costs_no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = StorePool(OWN, 0)
    port = pool.next_port
    with socket.socket() as taken:
        taken.bind((OTHER, port))
        taken.listen()
        handler = PlanRendezvousHandler("run", pool)
        paths: Any = object()
        changes = {"store_host": OTHER, "store_port": port, "paths": paths}
        monkeypatch.setattr(PlanRendezvousHandler, "plan", plan(1, "ab", **changes), raising=False)
        monkeypatch.setattr(PlanRendezvousHandler, "group_rank", 0, raising=False)
        info = handler.next_rendezvous()
    # Ranks of this node get the address of an existing store, and wait there for missing ranks.
    assert info.bootstrap_store_info.master_addr == OWN
    assert info.bootstrap_store_info.master_port == port


def test_a_given_port_that_is_taken_is_refused_and_later_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "TAKEN_S", 0.2)
    with socket.create_server((OWN, 0)) as taken:
        port = taken.getsockname()[1]
        pool = StorePool(OWN, port)
        with pytest.raises(UsageError, match=f"--master-port {port} cannot be used at {OWN}"):
            pool.check()
        store = pool.take()
        assert store.port != port
        assert reached(OWN, store.port)
    del store
    assert pool.take().port == port
