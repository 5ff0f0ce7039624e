"""Matches interfaces of nodes to the rails of the run; names them to collective libraries.

Rule 1: interfaces in one network (address and prefix) are one rail, whatever their names. The rail
        gets the name that most nodes use for it. A node with two interfaces in one network keeps
        them apart by their names.
Rule 2: if networks do not identify rails, as with one network per cable, interfaces of one name
        are one rail.
Rule 3: a name that only one node has maps to the rail at the same position that this node lacks.
Source: torch's ProcessGroupGloo takes GLOO_SOCKET_IFNAME as a list of whole names, and all ranks
        must name equally many. NCCL takes NCCL_SOCKET_IFNAME and NCCL_IB_HCA as lists of name
        prefixes. With a leading =, the list contains whole names, so that eth1 does not match
        eth10.
"""

import ipaddress
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

from ftrun.wire.cluster.generation import NetworkPlan, Rail

RunRails = dict[str, dict[str, Rail]]
"""Each node's interface on a rail, by node id, by the run's name of the rail."""


def match_rails(rails: Mapping[str, Sequence[Rail]]) -> RunRails:
    """The rails of the run, in the order in which nodes have them; a node uses no name twice.

    The first rail of each node is that of its card's address.
    """
    names = _Names(rails)
    matched: RunRails = {name: {} for name in names.ordered}
    for node, of_node in rails.items():
        for name, rail in names.chosen(of_node).items():
            matched[name][node] = rail
    return {name: of_nodes for name, of_nodes in matched.items() if of_nodes}


def rails_of_node(matched: RunRails, node: str) -> dict[str, Rail]:
    return {name: of_nodes[node] for name, of_nodes in matched.items() if node in of_nodes}


class _Names:
    """The names of interfaces, across all nodes."""

    def __init__(self, rails: Mapping[str, Sequence[Rail]]) -> None:
        self.total: Counter[str] = Counter()
        self.by_network: dict[str, Counter[str]] = {}
        places: dict[str, int] = {}
        for of_node in rails.values():
            for location, rail in enumerate(of_node):
                self.total[rail.name] += 1
                places[rail.name] = min(location, places.get(rail.name, location))
                self.by_network.setdefault(_network(rail), Counter())[rail.name] += 1
        self.by_network.pop("", None)
        self.ordered = sorted(places, key=lambda name: (places[name], -self.total[name], name))

    def chosen(self, of_node: Sequence[Rail]) -> dict[str, Rail]:
        """The interfaces of one node by rail; an interface without a free name is omitted."""
        found = {rail.name: rail for rail in of_node if self._keeps_its_name(rail)}
        mine = {rail.name for rail in of_node}
        for rail in of_node:
            if found.get(rail.name) is rail:
                continue
            wanted = [*self._others(rail, mine), rail.name]
            name = next((name for name in wanted if name not in found), None)
            if name is not None:
                found[name] = rail
        return found

    def _keeps_its_name(self, rail: Rail) -> bool:
        of_network = self._of_network(rail)
        if of_network:
            return of_network[rail.name] > 1 or of_network.most_common(1)[0][0] == rail.name
        return self.total[rail.name] > 1

    def _others(self, rail: Rail, mine: Collection[str]) -> list[str]:
        """Names that it may map to, the most likely first; not those that only its node has."""
        of_network = self._of_network(rail)
        if of_network:
            common = of_network.most_common()
            return [name for name, count in common if count > 1 or name not in mine]
        return [name for name in self.ordered if self.total[name] > 1]

    def _of_network(self, rail: Rail) -> Counter[str]:
        of_network = self.by_network.get(_network(rail), Counter())
        return of_network if of_network.total() > 1 else Counter()


def _network(rail: Rail) -> str:
    return _network_of(rail.host, rail.prefix_bits) if rail.prefix_bits > 0 else ""


@lru_cache(maxsize=1 << 15)
def _network_of(host: str, prefix_bits: int) -> str:
    """Cached, because thousands of nodes are matched repeatedly. Empty for an invalid address."""
    try:
        address = ipaddress.ip_address(host)
        others = address.max_prefixlen - prefix_bits
        return f"{address.version}:{int(address) >> others}/{prefix_bits}"
    except ValueError:
        return ""


GLOO = "GLOO_SOCKET_IFNAME"
NCCL = "NCCL_SOCKET_IFNAME"
HCA = "NCCL_IB_HCA"
QUEUE_PAIRS = "NCCL_IB_QPS_PER_CONNECTION"
SOCKET_THREADS = "NCCL_SOCKET_NTHREADS"
SOCKETS_PER_THREAD = "NCCL_NSOCKS_PERTHREAD"
_RAILS = (GLOO, NCCL, HCA)
_SOCKETS = (SOCKET_THREADS, SOCKETS_PER_THREAD)
VARIABLES = (*_RAILS, QUEUE_PAIRS, *_SOCKETS)


def env_for(
    plan: NetworkPlan, rails_of_node: Mapping[str, Rail], user_env: Mapping[str, str]
) -> dict[str, str]:
    """Variables for the ranks of one node; `user_env` is their environment without a plan."""
    mine = [rails_of_node[name] for name in plan.rails if name in rails_of_node]
    if not mine or len(mine) < len(plan.rails):
        return {}
    names = ",".join(rail.name for rail in mine)
    wanted = {GLOO: names, NCCL: f"={names}"}
    if all(rail.hca for rail in mine):
        wanted[HCA] = "=" + ",".join(dict.fromkeys(rail.hca for rail in mine))
    if QUEUE_PAIRS in plan.flows:
        wanted[QUEUE_PAIRS] = str(plan.flows[QUEUE_PAIRS])
    if not any(name in user_env for name in _SOCKETS):  # NCCL limits their product
        wanted |= {name: str(plan.flows[name]) for name in _SOCKETS if name in plan.flows}
    return {name: value for name, value in wanted.items() if name not in user_env}


def rails_named(name: str, value: str, rails: RunRails) -> set[str]:
    """The rails of the run that such a variable names, on any node.

    Its value is `eth0,eth1`, `=eth0`, `^eth1` or `mlx5_0:1`; other variables name no rail.
    """
    if name not in _RAILS:
        return set()
    is_not = value.startswith("^")
    value = value.removeprefix("^")
    is_whole = name == GLOO or value.startswith("=")
    wanted = tuple(one.partition(":")[0] for one in value.removeprefix("=").split(",") if one)
    prefixes = () if is_whole else wanted
    named = set()
    for rail, on in rails.items():
        here = {one.hca if name == HCA else one.name for one in on.values()} - {""}
        if here.intersection(wanted) or any(one.startswith(prefixes) for one in here):
            named.add(rail)
    return {*rails} - named if is_not else named
