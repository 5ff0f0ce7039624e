"""The choice of rails among a machine's interfaces, and the listener of each rail."""

import socket
from pathlib import Path

import pytest

from ftrun.agent.cluster.interfaces import (
    MAX_RAILS,
    NetworkInterface,
    _device,
    interfaces,
    listen_on,
    own_rails,
    rails_among,
)
from ftrun.errors import UsageError
from ftrun.wire.cluster.generation import NodeCard, Rail
from ftrun.wire.transport.tcp import listen_tcp


def interface(
    name: str, *hosts: str, driver: str = "mlx5_core", **more: object
) -> NetworkInterface:
    addresses = [(host, 64 if ":" in host else 24) for host in hosts]
    return NetworkInterface(name, is_up=True, addresses=addresses, driver=driver, **more)  # type: ignore[arg-type]


LO = NetworkInterface(
    "lo", is_up=True, is_loopback=True, addresses=[("127.0.0.1", 8), ("::1", 128)]
)
ETH0 = interface("eth0", "10.0.0.5", "fe80::5", speed_mbit=10_000, duplex="full")
IB0 = interface("ib0", "fe80::7", "fd00::7", "10.1.0.5", hca="mlx5_0")
DOWN = NetworkInterface("eth9", addresses=[("10.9.0.5", 24)])


def names(found: list[Rail]) -> list[str]:
    return [rail.name for rail in found]


def test_the_rail_of_the_card_is_first_and_others_have_their_figures() -> None:
    found = rails_among([LO, IB0, ETH0], "10.0.0.5", [], only_first=False)
    assert found == [
        Rail("eth0", "10.0.0.5", 24, 0, 10_000, "full"),
        Rail("ib0", "10.1.0.5", 24, hca="mlx5_0"),
    ]


@pytest.mark.parametrize(
    "inner",
    [
        LO,
        DOWN,
        interface("br7", "172.18.0.1", driver="bridge"),
        interface("docker0", "172.17.0.1", driver=""),
        interface("wg0", "10.8.0.1", driver="wireguard"),
        interface("eth5", "169.254.3.4", "fe80::9"),
    ],
    ids=lambda one: one.name,
)
def test_what_leads_to_no_other_node_is_left_out(inner: NetworkInterface) -> None:
    assert names(rails_among([ETH0, inner], "10.0.0.5", [], only_first=False)) == ["eth0"]


def test_what_the_card_is_on_is_a_rail_whatever_it_is() -> None:
    bridge = interface("br0", "10.0.0.5", driver="bridge")
    assert names(rails_among([bridge, IB0], "10.0.0.5", [], only_first=False)) == ["br0", "ib0"]


def test_named_interfaces_are_rails_whatever_they_are_and_nothing_else_is() -> None:
    docker = interface("docker0", "172.17.0.1", driver="bridge")
    found = rails_among([LO, ETH0, IB0, docker], "10.0.0.5", ["docker0"], only_first=True)
    assert names(found) == ["eth0", "docker0"]


def test_one_address_alone_is_listened_at_where_that_was_asked_for() -> None:
    assert names(rails_among([ETH0, IB0], "10.0.0.5", [], only_first=True)) == ["eth0"]


def test_next_to_loopback_there_is_no_other_rail() -> None:
    assert names(rails_among([LO, ETH0], "127.0.0.1", [], only_first=False)) == ["lo"]


def test_an_address_that_no_interface_has_gives_no_rail() -> None:
    assert rails_among([LO, ETH0], "10.0.0.6", [], only_first=False) == []


def test_a_node_of_ipv6_gets_addresses_of_that_kind() -> None:
    first = interface("eth0", "fd01::5", "10.0.0.5")
    found = rails_among([first, IB0], "fd01::5", [], only_first=False)
    assert [rail.host for rail in found] == ["fd01::5", "fd00::7"]


def test_an_interface_without_an_address_of_the_cards_kind_is_no_rail() -> None:
    other = interface("eth1", "fd00::7")
    assert names(rails_among([ETH0, other], "10.0.0.5", [], only_first=False)) == ["eth0"]
    with pytest.raises(UsageError, match=r"eth1, which has no address here of the kind of 10\.0"):
        rails_among([ETH0, other], "10.0.0.5", ["eth1"], only_first=False)


def test_what_the_internet_reaches_is_listened_at_only_where_it_is_named() -> None:
    public = interface("eth1", "8.8.4.4")
    both = interface("eth2", "8.8.8.8", "10.2.0.5")
    found = rails_among([ETH0, public, both], "10.0.0.5", [], only_first=False)
    assert [rail.host for rail in found] == ["10.0.0.5", "10.2.0.5"]
    found = rails_among([ETH0, public], "10.0.0.5", ["eth1"], only_first=False)
    assert [rail.host for rail in found] == ["10.0.0.5", "8.8.4.4"]
    found = rails_among([public, both], "8.8.4.4", [], only_first=False)
    assert [rail.host for rail in found] == ["8.8.4.4", "8.8.8.8"]


def test_there_is_a_limit_to_rails() -> None:
    many = [interface(f"eth{i}", f"10.{i}.0.5") for i in range(40)]
    assert len(rails_among(many, "10.0.0.5", [], only_first=False)) == MAX_RAILS


@pytest.mark.parametrize(("name", "reason"), [("ib9", "has no address"), ("eth9", "is down")])
def test_a_named_interface_that_cannot_be_used_is_reported(name: str, reason: str) -> None:
    with pytest.raises(UsageError, match=f"network.rails names {name}, which {reason}"):
        rails_among([ETH0, DOWN], "10.0.0.5", [name], only_first=False)


def test_a_named_interface_that_has_disappeared_does_not_end_a_node(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wanted = ["eth9", "ib9", "ib0"]
    found = rails_among([ETH0, DOWN, IB0], "10.0.0.5", wanted, only_first=False, is_again=True)
    assert names(found) == ["eth0", "ib0"]
    assert "network.rails names eth9, which is down" in caplog.text


def test_labels_of_addresses_are_no_interfaces() -> None:
    assert [_device(label) for label in (b"eth0", b"eth0:1", b"\xff")] == ["eth0", "eth0", "\ufffd"]


@pytest.mark.parametrize("error", [OSError("no"), ValueError("no")])
def test_interfaces_that_cannot_be_listed_cost_no_start(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails() -> list[NetworkInterface]:
        raise error

    monkeypatch.setattr("ftrun.agent.cluster.interfaces.interfaces", fails)
    assert own_rails("10.0.0.5") == []


def test_this_machine_has_loopback() -> None:
    found = {one.name: one for one in interfaces()}
    assert found["lo"].is_loopback
    assert found["lo"].bits("127.0.0.1") == 8
    assert found["lo"].bits("127.0.0.2") is None
    assert own_rails("127.0.0.1")[0].name == "lo"


def test_the_rdma_device_is_that_of_the_interface_or_below_it(tmp_path: Path) -> None:
    device = tmp_path / "class" / "net" / "lo"
    (device / "lower_eth7" / "device" / "infiniband" / "mlx5_3").mkdir(parents=True)
    (device / "ifindex").write_text(f"{socket.if_nametoindex('lo')}\n")
    assert {one.name: one.hca for one in interfaces(tmp_path)}["lo"] == "mlx5_3"
    (device / "ifindex").write_text("12345\n")
    assert {one.name: one.hca for one in interfaces(tmp_path)}["lo"] == ""


def test_each_rail_is_listened_at_by_the_same_number_where_it_is_free() -> None:
    first = listen_tcp("127.0.0.1", 0)
    number = first.getsockname()[1]
    taken = listen_tcp("127.0.0.3", number)
    rails = [Rail("lo", "127.0.0.1"), Rail("a", "127.0.0.2"), Rail("b", "127.0.0.3")]
    rails.append(Rail("gone", "203.0.113.7"))
    found, sockets = listen_on(rails, first, None)
    try:
        assert names(found) == ["lo", "a", "b"]
        assert [rail.port for rail in found[:2]] == [number, number]
        assert found[2].port not in (0, number)
        assert [sock.getsockname()[1] for sock in sockets] == [rail.port for rail in found]
    finally:
        for sock in (*sockets, taken):
            sock.close()


def test_an_agent_that_is_started_again_listens_where_the_last_one_did() -> None:
    with listen_tcp("127.0.0.2", 0) as probe:
        port = probe.getsockname()[1]
    before = NodeCard("a", 1, "127.0.0.1", 1, 1, rails=[Rail("lo", "127.0.0.2", port=port)])
    rails = [Rail("lo", "127.0.0.1"), Rail("a", "127.0.0.2")]
    found, sockets = listen_on(rails, listen_tcp("127.0.0.1", 0), before)
    for sock in sockets:
        sock.close()
    assert found[1].port == port
