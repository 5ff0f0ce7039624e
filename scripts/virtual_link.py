"""The network of a virtual cluster: a bridge in a namespace of its own, a cable to each node.

Takes in: the switch's process, the nodes' first processes, what their cables shall be like.
Gives:    links that are up, down, slow or closed for one pair. Nothing is made in the network of
          the host: both ends of a cable are born in the namespaces they belong to.

Rule 1: cables are cut at the switch's end. The node's own end keeps its addresses and routes, its
        processes see packets that are not answered and nothing else, as with a real switch.
Rule 2: a node has the same hardware address all its life and after `revive`; otherwise its peers
        would speak to the old one for half a minute.
"""

import re
import subprocess
import sys
from pathlib import Path

from virtual_node import WAIT_S, ClusterError, Process

NETWORK = "10.77.0.0/24"
MAX_NODES = 250
MAX_DELAY_MS = 10_000
BRIDGE = "bridge"
_NOWHERE = "02:77:00:00:ff:ff"
"""The bridge's own address: it has no use for what is sent there, and drops it in silence."""

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
"""Below it the kernel takes packets of 64 KiB apart, at ten times the cost."""


def address(index: int) -> str:
    return f"10.77.0.{index + 1}"


def hardware_address(index: int) -> str:
    return f"02:77:00:00:00:{index + 1:02x}"


def port(index: int) -> str:
    """The switch's end of the cable; the node's end is eth0."""
    return f"p{index}"


def switch_command(name: str) -> list[str]:
    return ["unshare", "--net", "--", "sh", "-c", _SWITCH, "ftrun-vcluster-switch", name]


class Switch:
    """What can be done at the switch. `process` holds its namespace."""

    def __init__(self, process: Process) -> None:
        self.process = process

    def make_bridge(self) -> None:
        self.ip(
            f"link add {BRIDGE} address {_NOWHERE} type bridge mcast_snooping 0",
            f"link set {BRIDGE} up",
        )

    def ip(self, *lines: str) -> None:
        inside(self.process, ["ip", "-batch", "-"], "\n".join(lines) + "\n")

    def plug(self, cables: dict[int, Process]) -> None:
        """Lay a cable to each of these nodes, by index; its end in the node is down as yet."""
        lines = []
        for index, init in cables.items():
            far = f"eth0 address {hardware_address(index)} netns {init.pid}"
            lines.append(f"link add {port(index)} type veth peer name {far}")
            lines.append(f"link set {port(index)} master {BRIDGE} up")
        self.ip(*lines)

    def unplug(self, index: int) -> None:
        self._try(port(index), f"link delete {port(index)}")

    def cut(self, index: int) -> None:
        self._try(port(index), f"link set {port(index)} down")

    def heal(self, index: int) -> None:
        self.ip(f"link set {port(index)} up")

    def lengthen(self, index: int) -> None:
        """Lead a node's cable through the two devices of `delay_command`, which are there."""
        near, far, between = _delay_devices(index)
        self.ip(
            f"link add {between} type bridge mcast_snooping 0",
            f"link set {between} up",
            f"link set {near} txqueuelen 10000 master {between} up",
            f"link set {far} txqueuelen 10000 master {BRIDGE} up",
            f"link set {port(index)} master {between}",
        )

    def shorten(self, index: int) -> None:
        """The cable as it was; the two devices go with their process."""
        _, _, between = _delay_devices(index)
        self._try(port(index), f"link set {port(index)} master {BRIDGE}")
        self._try(between, f"link delete {between}")

    def delay_command(self, index: int, delay_ms: float, loss_percent: float) -> list[str]:
        """A process that makes two devices and carries frames between them."""
        near, far, _ = _delay_devices(index)
        enter = ["nsenter", "--target", str(self.process.pid), "--net", "--"]
        words = [near, far, str(delay_ms), str(loss_percent)]
        return [*enter, sys.executable, "-I", "-S", str(_DELAY), *words]

    def _try(self, device: str, line: str) -> None:
        """With a device that may be gone, or goes just now, as the kernel has noticed a death."""
        try:
            self.ip(line)
        except ClusterError:
            if re.search(rf" {device}[@:]", inside(self.process, ["ip", "-oneline", "link"])):
                raise


def _delay_devices(index: int) -> tuple[str, str, str]:
    """The near one, the far one, and the bridge between the node's cable and the near one."""
    return f"n{index}", f"f{index}", f"b{index}"


def close_to(init: Process, peer: str) -> None:
    """What this node sends to that address gets lost from now on, in silence."""
    inside(init, ["ip", "neigh", "replace", peer, "lladdr", _NOWHERE, "dev", "eth0"])


def open_to(init: Process, peer: str) -> None:
    inside(init, ["ip", "neigh", "flush", "to", peer, "dev", "eth0", "nud", "all"])


def bits_per_s(rate: str) -> float:
    """Raises: ClusterError: `rate` is not like 100mbit."""
    matched = _RATE.fullmatch(rate)
    if not matched or float(matched[1]) <= 0:
        raise ClusterError(f"a rate of {rate!r} is none: 500kbit, 100mbit, 2.5gbit, or off")
    return float(matched[1]) * _UNITS[matched[2]]


def limit(namespace: Process, device: str, rate: str) -> None:
    """What leaves by this device is at most so much; empty: without a limit."""
    # What is there by default cannot be deleted, and what is deleted gives way to the default.
    inside(namespace, ["tc", "qdisc", "replace", "dev", device, "root", "pfifo"])
    inside(namespace, ["tc", "qdisc", "delete", "dev", device, "root"])
    if rate:
        bits = bits_per_s(rate)
        burst = max(_MIN_BURST_BYTES, int(bits / 8 * 0.008))  # 8 ms of traffic
        words = ["rate", f"{bits:.0f}bit", "burst", str(burst), "latency", "50ms"]
        inside(namespace, ["tc", "qdisc", "add", "dev", device, "root", "tbf", *words])


def inside(namespace: Process, command: list[str], text: str = "") -> str:
    """Run a command in the network of this process; gives what it prints.

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
