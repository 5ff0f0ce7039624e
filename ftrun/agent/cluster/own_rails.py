"""The rails of this node: the interfaces over which other nodes can reach it, and a port on each.

Runs in:  agent, main thread, before the run begins.
Takes in: the interfaces, the address of this node's card, the names that the user has given.
Gives:    `Rail`s for this node's card, that of its address first; a listening socket for each.
Survives: an interface that cannot be listened on: it is no rail.

Rule 1: the first rail is the interface that has the card's address, whatever its name is.
Rule 2: named interfaces are rails whatever they are; if there are names, no other interface is.
Rule 3: without names, interfaces that lead to no other node are left out: loopback, interfaces that
        are down, bridges and tunnels of containers and virtual machines, link-local addresses. If
        the card's address is private, globally reachable addresses are left out too.
Rule 4: a run without a secret, or one that the user has bound to an address, listens on that
        address only. It listens on others only if the user has named them or, without a secret, has
        requested a network plan that uses them.
"""

import ipaddress
import logging
import re
import socket
from collections.abc import Sequence

import msgspec

from ftrun.agent.cluster.interfaces import NetworkInterface, interfaces
from ftrun.errors import AddressTaken, UsageError
from ftrun.wire.cluster.generation import NodeCard, Rail
from ftrun.wire.transport.tcp import listen_tcp

_log = logging.getLogger(__name__)

MAX_RAILS = 8
"""No further rails are listened on, because a plan with the cards of 1,024 nodes must fit in one
frame."""

_INNER_DRIVERS = frozenset(
    {"bridge", "dummy", "geneve", "ifb", "openvswitch", "tun", "vxlan", "wireguard"}
)
_INNER_NAMES = re.compile(
    r"(docker|br-|virbr|veth|cni|cali|flannel|cilium|kube|nodelocaldns|podman|lxc|lxd|vmnet|"
    r"tailscale|zt|wg|tun|tap|tunl|ip6tnl|sit|gre|dummy|ifb)"
)


def own_rails(
    host: str, named: Sequence[str] = (), *, only_first: bool = False, is_again: bool = False
) -> list[Rail]:
    """The rails of this node, without ports.

    Args:
        host: the address of this node's card.
        named: interfaces that the user has named; empty: all that lead to other nodes.
        only_first: only the interface of that address, and those that are named.
        is_again: this node has taken part before, so a missing rail must not end it.

    Raises:
        UsageError: an interface that is named is missing, is down or has no address; unless
            `is_again`.
    """
    try:
        found = interfaces()
    except (OSError, ValueError) as error:
        _log.warning("only %s is known as a rail: %s", host, error)
        return []
    return rails_among(found, host, named, only_first=only_first, is_again=is_again)


def rails_among(
    found: Sequence[NetworkInterface],
    host: str,
    named: Sequence[str],
    *,
    only_first: bool,
    is_again: bool = False,
) -> list[Rail]:
    first = next((one for one in found if one.bits(host) is not None), None)
    if first is None:
        return []
    rails = [_rail(first, host)]
    others = _named(found, named, host, is_again=is_again) if named else found
    for one in others:
        address = _address(one, host, is_named=bool(named))
        if one is first or address is None:
            continue
        if named or not (only_first or first.is_loopback or _is_inner(one)):
            rails.append(_rail(one, address))
    return rails[:MAX_RAILS]


def listen_on(
    rails: Sequence[Rail], first: socket.socket, before: NodeCard | None
) -> tuple[list[Rail], list[socket.socket]]:
    """Open a listening socket on each rail.

    Args:
        rails: of this node.
        first: the socket that listens on the first rail already.
        before: the card of the last agent of this node; the other nodes have its ports.

    Returns:
        The rails with their ports, and all sockets. A rail without a socket is left out.
    """
    found, sockets = [], [first]
    number = first.getsockname()[1]
    old = {rail.host: rail.port for rail in before.rails} if before is not None else {}
    for rail in rails:
        if rail is not rails[0]:
            try:
                sock = _listen(rail.host, old.get(rail.host, number))
            except UsageError as error:
                _log.warning("%s is no rail of this run: %s", rail.name, error)
                continue
            sockets.append(sock)
            number = sock.getsockname()[1]
        found.append(msgspec.structs.replace(rail, port=sockets[-1].getsockname()[1]))
    return found, sockets


def _listen(host: str, port: int) -> socket.socket:
    try:
        return listen_tcp(host, port)
    except AddressTaken:
        return listen_tcp(host, 0)


def _named(
    found: Sequence[NetworkInterface], named: Sequence[str], host: str, *, is_again: bool
) -> list[NetworkInterface]:
    by_name = {one.name: one for one in found}
    usable = []
    for name in dict.fromkeys(named):
        one = by_name.get(name)
        if one is not None and one.is_up and _address(one, host, is_named=True) is not None:
            usable.append(one)
            continue
        there = ", ".join(sorted(by_name))
        why = "is down" if one is not None and not one.is_up else "has no address here"
        why += f" of the kind of {host}" if one is not None and one.is_up else ""
        text = f"network.rails names {name}, which {why}. With an address there are: {there}"
        if not is_again:
            raise UsageError(text)
        _log.warning("%s", text)
    return usable


def _is_inner(one: NetworkInterface) -> bool:
    is_inner = one.driver in _INNER_DRIVERS or _INNER_NAMES.match(one.name) is not None
    return one.is_loopback or not one.is_up or is_inner


def _address(one: NetworkInterface, like: str, *, is_named: bool) -> str | None:
    """The first usable address of an interface, of the same IP version as the card's."""
    card = ipaddress.ip_address(like)
    for host in (ipaddress.ip_address(text) for text, _ in one.addresses):
        is_too_open = host.is_global and not card.is_global and not is_named
        if host.version == card.version and not host.is_link_local and not is_too_open:
            return str(host)
    return None


def _rail(one: NetworkInterface, host: str) -> Rail:
    return Rail(
        name=one.name,
        host=host,
        prefix_bits=one.bits(host) or 0,
        speed_mbit=one.speed_mbit,
        duplex=one.duplex,
        hca=one.hca,
    )
