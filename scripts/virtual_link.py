"""The network of a virtual cluster: bridges in a namespace of their own, cables to each node.

Takes in: the switch's process, the nodes' first processes, the properties of their cables.
Gives:    links that are up, down, slow or blocked for one pair. The network of the host does not
          change: both ends of a cable are created in the namespaces they belong to.

Each rail is a network of its own: a bridge for each leaf and, if there are several, another bridge
that joins them, the spine. A packet from one leaf to another passes two uplinks.

Rule 1: cables are cut at the switch's end. The node's own end keeps its addresses and routes. Its
        processes see only packets without an answer, as with a real switch.
Rule 2: a node has the same hardware address all its life and after `revive`; otherwise its peers
        would send to the old one for half a minute.
"""

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from virtual_node import WAIT_S, ClusterError, Process
from virtual_state import Network, Node, alive

MAX_NODES = 250
MAX_RAILS = 8
MAX_LEAVES = 32
MAX_DELAY_MS = 10_000
_NOWHERE = "02:77:00:00:ff:ff"
"""The bridges' own address: they do not use packets that are sent there, and drop them."""

_SWITCH = """
set -e
echo $$
read -r go
[ ! -e /proc/sys/net/ipv6 ] || echo 1 >/proc/sys/net/ipv6/conf/default/disable_ipv6
echo ready
[ "$2" = owned ] || exec sleep infinity </dev/null >/dev/null
exec cat >/dev/null
"""
_DELAY = Path(__file__).with_name("virtual_delay.py")
_RATE = re.compile(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)")
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_MIN_BURST_BYTES = 256 * 1024
"""Below this size the kernel splits packets of 64 KiB, at ten times the cost."""


def address(index: int, rail: int = 0) -> str:
    return f"10.77.{rail}.{index + 1}"


def device_of(rail: int) -> str:
    return f"eth{rail}"


@dataclass(frozen=True)
class Port:
    """The port of a switch to which a node's cable is connected."""

    index: int
    """Of the node."""
    rail: int
    leaf: int

    @property
    def name(self) -> str:
        """Of the switch's end of the cable."""
        return f"p{self.index}-{self.rail}"

    @property
    def device(self) -> str:
        """The node's end of it."""
        return device_of(self.rail)

    @property
    def bridge(self) -> str:
        return _leaf(self.leaf, self.rail)

    @property
    def hardware_address(self) -> str:
        """Of the node's end."""
        return f"02:77:00:00:{self.rail:02x}:{self.index + 1:02x}"

    @property
    def delay_devices(self) -> tuple[str, str, str]:
        """The near one, the far one, and the bridge between the node's cable and the near one."""
        which = f"{self.index}-{self.rail}"
        return f"n{which}", f"f{which}", f"b{which}"


def ports(node: Node, rail: int | None = None) -> list[Port]:
    """Of one rail, or of all. Raises: ClusterError: there is no such rail."""
    found = [Port(node.index, number, node.leaf) for number in range(len(node.cables))]
    if rail is None:
        return found
    if not 0 <= rail < len(found):
        raise ClusterError(f"{node.name} has no rail {rail}: it has {len(found)}, from 0")
    return [found[rail]]


def checked(network: Network, nodes: int) -> Network:
    """Raises: ClusterError: such a network is not possible for this number of nodes."""
    for count, most, what in (
        (network.rails, MAX_RAILS, "rails"),
        (network.leaves, MAX_LEAVES, "leaves"),
    ):
        if not 1 <= count <= most:
            raise ClusterError(f"{count} {what}: 1 to {most} are possible")
    for rate in filter(None, (network.uplink, network.rail_rate)):
        bits_per_s(rate)
    if network.uplink and network.leaves == 1:
        raise ClusterError("an uplink joins leaves, and there is one leaf: ask for two")
    wrong = [leaf for leaf in network.leaf_of if not 0 <= leaf < network.leaves]
    if wrong or len(network.leaf_of) not in (0, nodes):
        raise ClusterError(
            f"leaf_of {network.leaf_of}: one of 0 to {network.leaves - 1} for each of {nodes} nodes"
        )
    return network


def switch_command(name: str) -> list[str]:
    return ["unshare", "--net", "--", "sh", "-c", _SWITCH, "ftrun-vcluster-switch", name]


class Switch:
    """Operations at the switch. `process` holds its namespace."""

    def __init__(self, process: Process) -> None:
        self.process = process

    def make_bridges(self, network: Network) -> None:
        lines = []
        for rail in range(network.rails):
            spine = [f"spine-{rail}"] if network.leaves > 1 else []
            for bridge in [*spine, *(_leaf(leaf, rail) for leaf in range(network.leaves))]:
                lines.append(f"link add {bridge} address {_NOWHERE} type bridge mcast_snooping 0")
                lines.append(f"link set {bridge} up")
            for leaf, (up, down) in enumerate(_uplinks(network, rail)):
                lines.append(f"link add {up} type veth peer name {down}")
                lines.append(f"link set {up} master {_leaf(leaf, rail)} up")
                lines.append(f"link set {down} master {spine[0]} up")
        self.ip(*lines)
        uplinks = [_uplinks(network, rail) for rail in range(network.rails)]
        ends = [end for of_rail in uplinks for both in of_rail for end in both]
        limit(self.process, ends, network.uplink)

    def ip(self, *lines: str) -> None:
        inside(self.process, ["ip", "-batch", "-"], "\n".join(lines) + "\n")

    def plug(self, cables: dict[Port, Process], rate: str) -> None:
        """Create these cables to nodes; their ends in the nodes are down and without a limit."""
        lines = []
        for port, init in cables.items():
            far = f"{port.device} address {port.hardware_address} netns {init.pid}"
            lines.append(f"link add {port.name} type veth peer name {far}")
            lines.append(f"link set {port.name} master {port.bridge} up")
        self.ip(*lines)
        limit(self.process, [port.name for port in cables], rate)

    def unplug(self, port: Port) -> None:
        self._try(port.name, f"link delete {port.name}")

    def cut(self, port: Port) -> None:
        self._try(port.name, f"link set {port.name} down")

    def heal(self, port: Port) -> None:
        self.ip(f"link set {port.name} up")

    def lengthen(self, port: Port) -> None:
        """Pass a node's cable through the two devices of `delay_command`, which exist."""
        near, far, between = port.delay_devices
        self.ip(
            f"link add {between} type bridge mcast_snooping 0",
            f"link set {between} up",
            f"link set {near} txqueuelen 10000 master {between} up",
            f"link set {far} txqueuelen 10000 master {port.bridge} up",
            f"link set {port.name} master {between}",
        )

    def shorten(self, port: Port) -> None:
        """Restore the cable; the two devices end with their process."""
        _, _, between = port.delay_devices
        self._try(port.name, f"link set {port.name} master {port.bridge}")
        self._try(between, f"link delete {between}")

    def delay_command(self, port: Port, delay_ms: float, loss_percent: float) -> list[str]:
        """A process that makes two devices and carries frames between them."""
        near, far, _ = port.delay_devices
        enter = ["nsenter", "--target", str(self.process.pid), "--net", "--"]
        words = [near, far, str(delay_ms), str(loss_percent)]
        return [*enter, sys.executable, "-I", "-S", str(_DELAY), *words]

    def _try(self, device: str, line: str) -> None:
        """For a device that the kernel may remove at this moment, after a death."""
        try:
            self.ip(line)
        except ClusterError:
            if re.search(rf" {device}[@:]", inside(self.process, ["ip", "-oneline", "link"])):
                raise


def _leaf(leaf: int, rail: int) -> str:
    return f"leaf{leaf}-{rail}"


def _uplinks(network: Network, rail: int) -> list[tuple[str, str]]:
    """Both ends of each leaf's link to the spine, if there is one."""
    leaves = range(network.leaves) if network.leaves > 1 else ()
    return [(f"u{leaf}-{rail}", f"d{leaf}-{rail}") for leaf in leaves]


def part(one: Node, other: Node, rail: int, *, is_one_way: bool = False) -> None:
    """Drop all packets between these two over this rail; one way: from the first to the other."""
    if one is other:
        raise ClusterError(f"{one.name} cannot be cut from itself")
    for near, far in ((one, other), *(() if is_one_way else ((other, one),))):
        _close_to(alive(near), far.cables[rail].address, device_of(rail))
        cable = near.cables[rail]
        cable.cut_from = sorted({*cable.cut_from, far.name})


def join(one: Node, other: Node, rail: int) -> None:
    """Undo `part`, if it was done."""
    if other.name not in one.cables[rail].cut_from:
        return
    for near, far in ((one, other), (other, one)):
        cable = near.cables[rail]
        if near.init is not None and near.is_alive:
            _open_to(near.init, far.cables[rail].address, device_of(rail))
        cable.cut_from = [name for name in cable.cut_from if name != far.name]


def _close_to(init: Process, peer: str, device: str) -> None:
    """Drop all packets from this node to that address."""
    inside(init, ["ip", "neigh", "replace", peer, "lladdr", _NOWHERE, "dev", device])


def _open_to(init: Process, peer: str, device: str) -> None:
    inside(init, ["ip", "neigh", "flush", "to", peer, "dev", device, "nud", "all"])


def bits_per_s(rate: str) -> float:
    """Raises: ClusterError: `rate` is not like 100mbit."""
    matched = _RATE.fullmatch(rate)
    if not matched or float(matched[1]) <= 0:
        raise ClusterError(f"the value {rate!r} is not a rate: 500kbit, 100mbit, 2.5gbit, or off")
    return float(matched[1]) * _UNITS[matched[2]]


def limit(namespace: Process, devices: Sequence[str], rate: str) -> None:
    """Limit the rate at which packets leave by each of these devices; empty: no limit."""
    lines = []
    for device in devices:
        # The default cannot be deleted; after a deletion the default applies.
        lines.append(f"qdisc replace dev {device} root pfifo")
        lines.append(f"qdisc delete dev {device} root")
        if rate:
            bits = bits_per_s(rate)
            burst = max(_MIN_BURST_BYTES, int(bits / 8 * 0.008))  # 8 ms of traffic
            shape = f"tbf rate {bits:.0f}bit burst {burst} latency 50ms"
            lines.append(f"qdisc add dev {device} root {shape}")
    if lines:
        inside(namespace, ["tc", "-batch", "-"], "\n".join(lines) + "\n")


def limit_to(namespace: Process, addresses: Mapping[str, str], rate: str, usual: str) -> None:
    """Limit the rate of packets by each of these devices to one address; empty: `usual` again."""
    limit(namespace, list(addresses), "" if rate else usual)
    lines = []
    for device, peer in addresses.items() if rate else ():
        lines.append(f"qdisc add dev {device} root handle 1: htb default 1")
        for number, of in ((1, usual or "100gbit"), (2, rate)):
            bits = bits_per_s(of)
            burst = max(_MIN_BURST_BYTES, int(bits / 8 * 0.008))
            shape = f"htb rate {bits:.0f}bit burst {burst} cburst {burst} quantum 60000"
            lines.append(f"class add dev {device} parent 1: classid 1:{number} {shape}")
        match = f"u32 match ip dst {peer} classid 1:2"
        lines.append(f"filter add dev {device} parent 1: protocol ip {match}")
    if lines:
        inside(namespace, ["tc", "-batch", "-"], "\n".join(lines) + "\n")


def inside(namespace: Process, command: list[str], text: str = "") -> str:
    """Run a command in the network of this process; gives its output.

    Not `ip netns exec`, which would mount another /sys.
    """
    if not namespace.is_alive:
        raise ClusterError(f"process {namespace.pid}, which held the network, has ended")
    done = subprocess.run(
        ["nsenter", "--target", str(namespace.pid), "--net", "--", *command],
        input=text,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
        cwd="/",
        start_new_session=True,  # ^C must not stop it half way
    )
    if done.returncode != 0:
        what = " ".join(command) + (f" ({text.strip()})" if text else "")
        raise ClusterError(f"{what}: {done.stderr.strip() or f'exit {done.returncode}'}")
    return done.stdout
