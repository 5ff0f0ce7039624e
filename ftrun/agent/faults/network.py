"""Plans a cut, slow or lossy link of this node with `tc`, if this affects only this node.

Runs in the main thread: it checks and plans, and the reverter runs the commands.

Rule 1: a machine is never cut off by mistake. The device must be one end of a veth pair, and the
        network namespace must differ from that of process 1. If that comparison proves nothing,
        as on a node whose process 1 is its own, --allow-network-faults permits the fault.
Rule 2: packets are dropped at the device without a reply, like on a cut cable; addresses and
        routes stay. Kernels often lack netem, so a few instructions of classic BPF drop packets.
Rule 3: a queueing discipline that another program has set is neither replaced nor removed.
"""

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftrun.errors import FaultRefused
from ftrun.wire.messages.faults import FaultOrder

_CAP_NET_ADMIN = 12
_DROP_ALL = "1,6 0 0 2"
"""Classic BPF program that returns TC_ACT_SHOT."""

_RANDOM_AT = 0xFFFFF000 + 56
"""Offset from which classic BPF loads a random number: SKF_AD_OFF + SKF_AD_RANDOM."""

_MIN_BURST_BYTES = 256 << 10
"""With a smaller burst, the kernel segments packets of 64 KiB, at ten times the cost."""

_COMMAND_S = 10.0


@dataclass(frozen=True, slots=True)
class LinkFault:
    """Steps for the reverter."""

    do: list[list[Any]]
    undo: list[list[Any]]
    how: str


def link_fault(order: FaultOrder, *, host: str, is_allowed_anywhere: bool) -> LinkFault:
    tc, ip = shutil.which("tc"), shutil.which("ip")
    if tc is None or ip is None:
        raise FaultRefused("it needs the programs ip and tc (package iproute2)")
    if not _has_net_admin():
        raise FaultRefused("it needs root, or CAP_NET_ADMIN in this network namespace")
    device = _device_of(ip, host)
    if not is_allowed_anywhere:
        _check_own_namespace()
    _check_free(tc, device, is_root_needed=order.kind == "slow-link")
    if order.kind == "slow-link":
        return _slow(tc, device, order.amount)
    if order.kind == "lossy-link":
        return _dropping(tc, device, ("egress", "ingress"), _drop_some(order.amount), order)
    directions = ("egress",) if order.kind == "one-way-partition" else ("egress", "ingress")
    return _dropping(tc, device, directions, _DROP_ALL, order)


def _dropping(
    tc: str, device: str, directions: tuple[str, ...], program: str, order: FaultOrder
) -> LinkFault:
    do: list[list[Any]] = [["run", [tc, "qdisc", "add", "dev", device, "clsact"]]]
    for direction in directions:
        words = ["filter", "add", "dev", device, direction, "bpf", "da", "bytecode", program]
        do.append(["run", [tc, *words]])
    undo = [["run", [tc, "qdisc", "delete", "dev", device, "clsact"]]]
    what = f"{order.amount:g} % of packets" if order.kind == "lossy-link" else "every packet"
    return LinkFault(do, undo, f"{what} dropped at {device}, {' and '.join(directions)}")


def _check_free(tc: str, device: str, *, is_root_needed: bool) -> None:
    """Refuse if the device has a configured qdisc; the kernel's default has the handle 0:."""
    for found in _asked(tc, "qdisc", "show", "dev", device):
        kind = found.get("kind", "")
        is_root = bool(found.get("root")) and found.get("handle") != "0:"
        if is_root if is_root_needed else kind in ("clsact", "ingress"):
            raise FaultRefused(
                f"{device} has the qdisc {kind} already, of an earlier fault that still lasts or "
                f"of another program, and it is left alone. See: tc qdisc show dev {device}"
            )


def _drop_some(percent: float) -> str:
    if not 0 < percent < 100:
        raise FaultRefused(f"--amount is above 0 and below 100 percent, not {percent:g}")
    bound = int(percent / 100 * 0xFFFFFFFF)
    # Load a random word. If it is greater than the bound, pass the packet, else drop it.
    return f"4,32 0 0 {_RANDOM_AT},37 1 0 {bound},6 0 0 2,6 0 0 0"


def _slow(tc: str, device: str, mbit_s: float) -> LinkFault:
    if not 0.1 <= mbit_s <= 1e5:
        raise FaultRefused(f"--amount is 0.1 to 100000 Mbit/s, not {mbit_s:g}")
    bits = mbit_s * 1e6
    burst = max(_MIN_BURST_BYTES, int(bits / 8 * 0.008))
    shape = ["tbf", "rate", f"{bits:.0f}bit", "burst", str(burst), "latency", "50ms"]
    return LinkFault(
        # `add`, not `replace`: it fails if another qdisc was set after the check.
        [["run", [tc, "qdisc", "add", "dev", device, "root", *shape]]],
        [["run", [tc, "qdisc", "delete", "dev", device, "root"]]],
        f"tbf of {mbit_s:g} Mbit/s at {device}",
    )


def _device_of(ip: str, host: str) -> str:
    """Return the device with this address; it must be one end of a veth pair."""
    for device in _asked(ip, "address", "show"):
        if any(host == found.get("local") for found in device.get("addr_info", [])):
            name = str(device["ifname"])
            (link,) = _asked(ip, "-details", "link", "show", "dev", name)
            kind = link.get("linkinfo", {}).get("info_kind", "")
            if kind != "veth":
                raise FaultRefused(
                    f"{name}, which has the address {host}, is {kind or 'a device'} and no end of "
                    "a veth pair: others on this machine may need it. Run the nodes in network "
                    "namespaces of their own, as scripts/vcluster does"
                )
            return name
    raise FaultRefused(f"no device here has the address {host}, by which others reach this node")


def _asked(program: str, *words: str) -> list[dict[str, Any]]:
    try:
        done = subprocess.run(
            [program, "-json", *words], capture_output=True, timeout=_COMMAND_S, check=True, cwd="/"
        )
        found: list[dict[str, Any]] = json.loads(done.stdout or b"[]")
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise FaultRefused(f"{program} {' '.join(words)} did not answer: {error}") from None
    return [one for one in found if one]


def _has_net_admin() -> bool:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_NET_ADMIN & 1)
    return False


def _check_own_namespace() -> None:
    try:
        is_own = os.readlink("/proc/self/ns/net") != os.readlink("/proc/1/ns/net")
    except OSError:
        is_own = False
    if not is_own:
        raise FaultRefused(
            "this node has the network namespace of process 1, which may be the whole machine's. "
            "Where it is the node's own, as in a container or scripts/vcluster, say so at the "
            "start: ftrun --allow-network-faults"
        )
