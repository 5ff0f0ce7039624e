"""Bulk data wait while an interface carries other traffic, but not for ever."""

import select
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrun.smp.redundancy import other_traffic
from ftrun.smp.redundancy.other_traffic import OtherTraffic, RdmaPorts, YieldRule, interface_of
from ftrun.wire.transport.bulk_socket import BulkSocket
from ftrun.wire.transport.handshake import AuthSession, PeerIdentity

LINK_BYTES_S = 125e6
TURN_S = 0.005


def share_sent(rule: YieldRule, collective: Callable[[float], bool], *, for_s: float) -> float:
    """The part of the time in which bulk data are sent over a link of a gigabit.

    While both send, each has one half of the link.
    """
    sent = own = 0.0
    sending_s = now_s = 0.0
    while now_s < for_s:
        still = rule.waits_still(now_s)
        waits = rule.waits(round(sent), round(own), now_s=now_s) if still is None else still
        is_busy = collective(now_s)
        now_s += TURN_S
        sending_s += 0.0 if waits else TURN_S
        own_bytes = 0.0 if waits else LINK_BYTES_S * TURN_S / (2 if is_busy else 1) / 1.05
        other_bytes = LINK_BYTES_S * TURN_S / (1 if waits else 2) if is_busy else 2000.0
        own += own_bytes
        sent += 1.05 * own_bytes + other_bytes
    return sending_s / for_s


def test_without_other_traffic_nothing_waits() -> None:
    assert share_sent(YieldRule(), lambda _: False, for_s=2.0) > 0.99


def test_bulk_data_are_sent_between_collectives() -> None:
    def collective(now_s: float) -> bool:
        return now_s % 1.0 < 0.3

    share = share_sent(YieldRule(), collective, for_s=10.0)
    assert 0.68 < share < 0.75


def test_on_a_network_that_is_never_idle_bulk_data_have_a_fifth_of_the_time() -> None:
    share = share_sent(YieldRule(), lambda _: True, for_s=20.0)
    assert 0.18 < share < 0.3


def test_acknowledgements_and_heartbeats_are_no_collective() -> None:
    rule = YieldRule()
    sent = 0
    for turn in range(10):
        assert not rule.waits(sent, sent, now_s=turn * TURN_S)
        sent += round(LINK_BYTES_S * TURN_S)
    own = sent
    for turn in range(10, 20):  # nothing is sent, and the acknowledgements of incoming data are
        assert not rule.waits(sent, own, now_s=turn * TURN_S)
        sent += round(0.02 * LINK_BYTES_S * TURN_S)


def test_after_a_gap_the_last_sample_does_not_count() -> None:
    rule = YieldRule()
    assert not rule.waits(0, 0, now_s=0.0)
    assert not rule.waits(10**9, 0, now_s=10.0)
    assert rule.waits_still(10.001) is False
    assert rule.waits_still(10.006) is None
    assert not rule.waits(10**9, 0, now_s=9.0)


@given(st.lists(st.tuples(st.integers(0, 10**8), st.integers(0, 10**8), st.floats(0, 0.3))))
def test_whatever_the_counters_show_a_fifth_of_the_time_is_left(
    turns: list[tuple[int, int, float]],
) -> None:
    rule = YieldRule()
    sent = own = 0
    now_s = waiting_s = sending_s = 0.0
    for more, mine, passed_s in turns:
        still = rule.waits_still(now_s)
        if rule.waits(sent, own, now_s=now_s) if still is None else still:
            waiting_s += passed_s
        else:
            sending_s += passed_s
        sent, own, now_s = sent + more, own + mine, now_s + passed_s
    assert waiting_s <= 4 * sending_s + 1.0 + 0.3


def made_socket(sock: socket.socket) -> BulkSocket:
    identity = PeerIdentity("run", "smp", "node", 0)
    session = AuthSession(identity, identity, b"", b"", is_authenticated=False)
    return BulkSocket(sock, session, timeout_s=5.0)


def test_the_counters_of_this_machine_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(OSError, match="no interface"):
        interface_of("192.0.2.1")
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as sock,
        listener.accept()[0] as other,
    ):
        traffic, bulk = OtherTraffic(), made_socket(sock)
        assert traffic.pause_s(bulk) == 0.0
        traffic.add(bulk)
        sock.sendall(bytes(1000))
        assert other.recv(1000, socket.MSG_WAITALL)
        assert bulk.wire_bytes == 1000
        assert other_traffic._interface_bytes()["lo"] >= 1000
        assert traffic.pause_s(bulk) == 0.0, "the first sample decides nothing"
        monkeypatch.setattr(other_traffic, "_interface_bytes", dict)
        monkeypatch.setattr(other_traffic, "_SAMPLE_S", 0.0)
        assert traffic.pause_s(bulk) == 0.0, "counters that cannot be read cost nothing"
        traffic.remove(bulk)
        assert traffic.pause_s(bulk) == 0.0


def rdma_of_loopback(system: Path, link_layer: str) -> Path:
    """Give the interface `lo` an RDMA device with one port; return its counter."""
    device = system / "class" / "net" / "lo"
    port = device / "device" / "infiniband" / "mlx5_0" / "ports" / "1"
    (port / "counters").mkdir(parents=True)
    (device / "ifindex").write_text(f"{socket.if_nametoindex('lo')}\n")
    (port / "link_layer").write_text(f"{link_layer}\n")
    counter = port / "counters" / "port_xmit_data"
    counter.write_text("1000\n")
    return counter


@pytest.mark.parametrize(("link_layer", "sent"), [("Ethernet", 4500), ("InfiniBand", 4000)])
def test_rdma_counts_in_addition_unless_the_device_counts_all(
    tmp_path: Path, link_layer: str, sent: int
) -> None:
    counter = rdma_of_loopback(tmp_path, link_layer)
    ports = RdmaPorts("lo", tmp_path)
    assert ports.with_interface(500) == sent
    counter.write_text("2000")
    assert ports.with_interface(500) == sent + 4000
    assert RdmaPorts("no-such", tmp_path).with_interface(500) == 500
    counter.unlink()
    assert RdmaPorts("lo", tmp_path).with_interface(500) == 500, "a driver without this counter"


def test_bulk_data_yield_to_rdma(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = rdma_of_loopback(tmp_path, "Ethernet")
    monkeypatch.setattr(other_traffic, "_SAMPLE_S", 1e-6)
    monkeypatch.setattr(other_traffic, "_interface_bytes", lambda: {"lo": 0})
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as sock,
    ):
        traffic, bulk = OtherTraffic(tmp_path), made_socket(sock)
        traffic.add(bulk)
        words, pauses = 1000, []
        for turn in range(40):
            words += 10**9 if turn >= 20 else 0
            counter.write_text(f"{words}\n")
            pauses.append(traffic.pause_s(bulk))
            select.select([], [], [], 0.005)
        assert not any(pauses[:20])
        assert sum(pause > 0 for pause in pauses[20:]) >= 15
        counter.unlink()
        assert traffic.pause_s(bulk) == 0.0, "counters that cannot be read cost nothing"
