"""The leaf switch of each node, from configuration.

Source: Slurm's topology/tree plugin, topology.conf(5): SwitchName=.. Nodes=.. or Switches=..,
        with lists as n[1-4,07].
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ftrun.errors import UsageError

MOST_NAMES = 1 << 16
"""Names that one list may expand to."""


@dataclass(frozen=True, slots=True)
class LeafSwitches:
    """The leaf switch of each node, if it is known."""

    of: Mapping[str, str] = field(default_factory=dict)
    """Leaf switch by node id; the switch of other nodes is unknown."""
    source: str = ""
    """`labels`, `file`, `slurm`, `probes`; empty: not known."""
    above: Mapping[str, str] = field(default_factory=dict)
    """The switch that a switch is attached to, if there is one."""
    words: str = ""
    """How they are known, or why not, in a sentence."""

    @property
    def is_known(self) -> bool:
        return bool(self.of)


def leaves_from_labels(labels: Mapping[str, str]) -> LeafSwitches:
    """The label of a node names its leaf switch; an empty label names none."""
    of = {node: label for node, label in labels.items() if label}
    if not of:
        return LeafSwitches(words="No node has a label.")
    return LeafSwitches(of, "labels", words=_count(of, len(labels), "labels of the nodes"))


def leaves_from_file(topology: object, nodes: Collection[str]) -> LeafSwitches:
    """Reads a topology file: switches, each with a list of nodes, or with the switches below it.

    Args:
        topology: as the YAML parser returns it.
        nodes: of the run; other nodes in the file are ignored.

    Raises:
        UsageError: it has another form, or names a node on two switches.
    """
    of: dict[str, str] = {}
    above: dict[str, str] = {}
    for switch, parent, node in _walk(topology, ""):
        if parent:
            _put(above, switch, parent, "switch")
        if node:
            _put(of, node, switch, "node")
    of = {node: of[node] for node in nodes if node in of}
    return LeafSwitches(
        of, "file" if of else "", above, _count(of, len(nodes), "the topology file")
    )


def leaves_from_slurm(text: str, hosts: Mapping[str, str]) -> LeafSwitches:
    """Reads Slurm's topology.conf.

    Args:
        text: of the file.
        hosts: Slurm's name of each node, by node id.

    Raises:
        UsageError: a list is invalid, or a node is on two switches.
    """
    on: dict[str, str] = {}
    above: dict[str, str] = {}
    for line in text.splitlines():
        words = dict(_PAIR.findall(line.partition("#")[0]))
        found = {key.lower(): value for key, value in words.items()}
        switch = found.get("switchname", "")
        if not switch:
            continue
        for host in names_of_list(found.get("nodes", "")):
            _put(on, host, switch, "node")
        for below in names_of_list(found.get("switches", "")):
            _put(above, below, switch, "switch")
    of = {node: on[host] for node, host in hosts.items() if host in on}
    return LeafSwitches(
        of, "slurm" if of else "", above, _count(of, len(hosts), "Slurm's topology")
    )


def group_domains(
    nodes: Sequence[str], labels: Mapping[str, str], leaves: Mapping[str, str]
) -> dict[str, str]:
    """The fault domain of each node, for `ftrun.erasure.groups`: its `domains`.

    The labels are used if each node has one and they are not all equal, because the user then
    declares the fault domains. Otherwise the leaf switches are used, if they are known.
    """
    labelled = {node: labels[node] for node in nodes if labels.get(node)}
    on_leaf = {node: leaves[node] for node in nodes if node in leaves}
    if len(set(labelled.values())) > 1 and len(labelled) == len(nodes):
        return labelled
    return on_leaf if len(set(on_leaf.values())) > 1 else labelled


def names_of_list(text: str) -> list[str]:
    """Expands a list of Slurm: `n[1-2,07],m3` is n1, n2, n07, m3.

    Raises:
        UsageError: it is not a list, or expands to more than `MOST_NAMES` names.
    """
    names: list[str] = []
    for part in _ITEM.findall(text):
        for name in _expanded(part):
            names.append(name)
            if len(names) > MOST_NAMES:
                raise UsageError(f"a list stands for more than {MOST_NAMES:,} names: {text[:80]}")
    return names


_PAIR = re.compile(r"(\w+)\s*=\s*(\S+)")
_ITEM = re.compile(r"(?:[^,\[\]]|\[[^\]]*\])+")
_BRACKET = re.compile(r"\[([^\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def _expanded(part: str) -> Iterator[str]:
    bracket = _BRACKET.search(part)
    if bracket is None:
        yield part
        return
    before, after = part[: bracket.start()], part[bracket.end() :]
    for one in bracket[1].split(","):
        span = _RANGE.fullmatch(one.strip())
        if span is None:
            raise UsageError(f"{part} is no list of names: {one} is neither a number nor a range")
        low, high = span[1], span[2] or span[1]
        for number in range(int(low), int(high) + 1):
            for rest in _expanded(after):
                yield f"{before}{number:0{len(low)}d}{rest}"


def _walk(topology: object, parent: str) -> Iterator[tuple[str, str, str]]:
    """A switch, the switch above it if any, and a node on it or an empty string."""
    if not isinstance(topology, Mapping):
        raise UsageError("a topology file has switches, each with a list of nodes or with switches")
    for switch, below in topology.items():
        if isinstance(below, list | tuple):
            for node in below:
                yield str(switch), parent, str(node)
        else:
            yield str(switch), parent, ""
            yield from _walk(below, str(switch))


def _put(on: dict[str, str], what: str, switch: str, kind: str) -> None:
    if on.setdefault(what, switch) != switch:
        raise UsageError(
            f"{kind} {what} hangs on switches {on[what]} and {switch}: it can hang on one"
        )


def _count(of: Mapping[str, str], total: int, source: str) -> str:
    switches = len(set(of.values()))
    return f"By {source}, {len(of)} of {total} nodes hang on {switches} leaf switch(es)."
