"""Resolves the node settings of a run on several nodes: counts, endpoint, name, address.

Every node resolves its own command line. The nodes compare the settings that must be equal when
they meet. Therefore only the node's own settings, such as its name and address, depend on the node.
"""

import importlib.util
import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ftrun.cli.launch.command_line import CommandLine
from ftrun.cli.launch.profiles import SettingValue, plain_value
from ftrun.cli.launch.slurm import SlurmStep, leaf_switch
from ftrun.config.cluster import EtcdTls, NodesSpec
from ftrun.config.profile import Profile
from ftrun.errors import UsageError
from ftrun.network.detect.leaf_switches import leaves_from_file, leaves_from_slurm
from ftrun.wire.transport import secret
from ftrun.wire.transport.tcp import is_local_address

RDZV_PORT, MASTER_PORT = 29400, 29500  # of --rdzv-endpoint and --master-port, as in torchrun
ETCD_PORT = 2379  # default port of --rdzv-endpoint with --rdzv-backend etcd
OUR_BACKENDS = ("", "c10d", "static", "ftrun")
ETCD = "etcd"
_GOOD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_RDZV_CONF = {
    "join_timeout": "join_timeout_s",
    "timeout": "join_timeout_s",
    "last_call_timeout": "last_call_timeout_s",
}
_TLS_FILES = {"ca": "cacert", "cert": "cert", "key": "key"}
_TLS_VARIABLES = {"ca": "ETCDCTL_CACERT", "cert": "ETCDCTL_CERT", "key": "ETCDCTL_KEY"}
_MAX_TOPOLOGY_BYTES = 8 << 20


def nodes_of(
    line: CommandLine, variables: Mapping[str, str], profile: Profile, step: SlurmStep | None
) -> NodesSpec | None:
    """Resolves all settings of this node; None for a run on one node."""
    given = _Given(line, variables)
    count = _count(given, step)
    if count is None:
        return None
    least, most, spares = count
    _check_backend(given)
    _check_times(profile)
    nnodes = f"{least}:{most}" if least < most else str(least)
    etcd = _etcd(given, nnodes)
    (host, port), *more = etcd or _endpoints(given, step, nnodes)
    node_id, is_named = _node_id(given, step)
    data, parity = profile.erasure.data_and_parity
    path, is_ours, no_secret = _secret_file(profile, step)
    topology, slurm_topology = read_topology(profile.network.topology)
    return NodesSpec(
        min_nodes=least,
        max_nodes=most,
        spares=spares,
        endpoint_host=host,
        endpoint_port=port,
        more_endpoints=[] if etcd else more,
        etcd=[f"{host}:{port}" for host, port in etcd],
        etcd_tls=etcd_tls(given.torchrun("rdzv-conf").text, variables) if etcd else None,
        etcd_life=step.restarts if step is not None else 0,
        node_id=node_id,
        is_named=is_named,
        node_rank=_whole(rank) if (rank := given.torchrun("node-rank")) else None,
        secret_file=path,
        secret_is_ours=is_ours,
        no_secret=no_secret,
        bind=_bind(given),
        domain=_domain(given),
        switch=leaf_switch(variables) if step is not None else "",
        topology=topology,
        slurm_topology=slurm_topology,
        erasure_data=data,
        erasure_parity=parity,
        erasure_ring=profile.erasure.is_mirror,
    )


def num_nodes(line: CommandLine, variables: Mapping[str, str]) -> tuple[int, int, int]:
    """Returns the minimum and maximum number of members, and the spares, outside Slurm."""
    return _count(_Given(line, variables), None) or (1, 1, 0)


def rdzv_settings(conf: str | None, origin: str) -> list[SettingValue]:
    """Returns the timeouts of --rdzv-conf as profile keys; torch reads the other keys."""
    found: dict[str, SettingValue] = {}
    for pair in (conf or "").split(","):
        name, _, text = pair.partition("=")
        key = _RDZV_CONF.get(name.strip())
        if key is not None and (key not in found or name.strip() != "timeout"):
            found[key] = SettingValue("nodes", key, plain_value(text), f"{origin} {name.strip()}")
    return list(found.values())


@dataclass(frozen=True, slots=True)
class _Text:
    """A value and the flag or variable that gave it; false if it was not given."""

    text: str
    source: str

    def __bool__(self) -> bool:
        return self.text != ""


@dataclass(frozen=True, slots=True)
class _Given:
    """Reads a value from its flag, or else from its variable."""

    line: CommandLine
    variables: Mapping[str, str]

    def torchrun(self, name: str) -> _Text:
        variable = f"PET_{name}".upper().replace("-", "_")
        return self._first(name, self.line.torchrun_value(name), variable)

    def own(self, name: str, variable: str) -> _Text:
        return self._first(name, self.line.own_value(name), variable)

    def _first(self, name: str, flag: str | None, variable: str) -> _Text:
        if flag is not None:
            return _Text(flag.strip(), f"--{name}")
        return _Text(self.variables.get(variable, "").strip(), variable)


def _count(given: _Given, step: SlurmStep | None) -> tuple[int, int, int] | None:
    """Returns the minimum and maximum number of members, and the spares; None for one node."""
    nnodes = given.torchrun("nnodes")
    spares = _whole(given.own("spares", "FTRUN_SPARES"))
    alone = given.torchrun("standalone")
    is_alone = alone.text == "1"
    if nnodes:
        match = re.fullmatch(r"(\d+)(?::(\d+))?", nnodes.text)
        least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= least <= most:
            raise UsageError(
                f"{nnodes.source} is a number of nodes such as 4, or MIN:MAX such as 2:4, not "
                f"{nnodes.text!r}"
            )
    elif step is not None and not is_alone:
        least = most = step.num_nodes - spares
        if least < 1:
            raise UsageError(
                f"the Slurm step has {step.num_nodes} nodes, and --spares {spares} leaves "
                "none of them to train on"
            )
    else:
        least = most = 1
    # With an endpoint, several steps may be one run.
    meets_others = given.torchrun("rdzv-endpoint") or given.torchrun("master-addr")
    if step is not None and not (is_alone or meets_others) and step.num_nodes < least:
        raise UsageError(
            f"the Slurm step has {step.num_nodes} nodes, and {least} are needed to train. Give the "
            "step more nodes (srun -N), or a smaller --nnodes"
        )
    if most + spares == 1:
        return None
    if is_alone:
        raise UsageError(
            f"{alone.source} means one node alone, and {most + spares} are requested. Leave it "
            "out, and give every node the same --rdzv-endpoint"
        )
    return least, most, spares


def _check_backend(given: _Given) -> None:
    backend = given.torchrun("rdzv-backend")
    if backend.text not in (*OUR_BACKENDS, ETCD):
        raise UsageError(
            f"{backend.source} is {backend.text!r}. The backends are ftrun's own rendezvous, "
            "which c10d, static and ftrun all name, and an etcd v3 cluster (etcd). This version "
            "has no others: leave the flag out, and name one of the nodes with --rdzv-endpoint"
        )


def _etcd(given: _Given, nnodes: str) -> list[tuple[str, int]]:
    """Returns the endpoints of an etcd cluster; empty if the nodes use no etcd."""
    backend, endpoint = given.torchrun("rdzv-backend"), given.torchrun("rdzv-endpoint")
    if backend.text != ETCD:
        return []
    if not endpoint:
        raise UsageError(
            f"{backend.source} etcd (--nnodes {nnodes}) needs the cluster's client addresses: "
            f"--rdzv-endpoint HOST, HOST:{ETCD_PORT} or several, with commas between them"
        )
    if "://" in endpoint.text:
        raise UsageError(
            f"{endpoint.source} is {endpoint.text!r}; for etcd it is HOST:PORT, or several with "
            "commas. --rdzv-conf protocol=https, or cacert=FILE, requests TLS"
        )
    if importlib.util.find_spec("etcd3gw") is None:
        raise UsageError(
            f"{backend.source} etcd needs the package etcd3gw, which is not installed for this "
            "python. Install it on every node: pip install 'ftrun[etcd]'"
        )
    texts = [text.strip() for text in endpoint.text.split(",")]
    return [parse_endpoint(text, source=endpoint.source, port=ETCD_PORT) for text in texts]


def _check_times(profile: Profile) -> None:
    nodes = profile.nodes
    if not nodes.heartbeat_interval_s < nodes.self_fencing_timeout_s < nodes.failure_timeout_s:
        raise UsageError(
            f"nodes.heartbeat_interval_s ({nodes.heartbeat_interval_s:g}) must be below "
            "nodes.self_fencing_timeout_s "
            f"({nodes.self_fencing_timeout_s:g}), and that below nodes.failure_timeout_s "
            f"({nodes.failure_timeout_s:g}): "
            "an isolated node must have stopped its ranks before others replace them"
        )


def _endpoints(given: _Given, step: SlurmStep | None, nnodes: str) -> list[tuple[str, int]]:
    """Returns the endpoints at which the nodes meet; the first leader is expected at the first."""
    endpoint, master = given.torchrun("rdzv-endpoint"), given.torchrun("master-addr")
    if endpoint:
        texts = [text.strip() for text in endpoint.text.split(",")]
        return list(dict.fromkeys(parse_endpoint(text, source=endpoint.source) for text in texts))
    if master:
        port = given.torchrun("master-port")
        host = _host(master.text.strip("[]"), master.source)
        return [(host, _port(port.text, port.source) if port else MASTER_PORT)]
    if step is not None:
        return [(step.first_node, step.port)]
    raise UsageError(
        f"a run over several nodes (--nnodes {nnodes}) needs a rendezvous. Name one of the nodes, "
        "the same on all: --rdzv-endpoint HOST, or HOST:PORT if port "
        f"{RDZV_PORT} is taken; or several, with commas between them. Inside "
        "`srun --ntasks-per-node=1` no endpoint is needed"
    )


def parse_endpoint(text: str, *, source: str, port: int = RDZV_PORT) -> tuple[str, int]:
    """Parses `HOST`, `HOST:PORT`, `[IPV6]:PORT` or an IPv6 address without a port."""
    if match := re.fullmatch(r"\[(.+)\](?::(.*))?", text) or re.fullmatch(r"([^:]*):([^:]*)", text):
        return _host(match[1], source), port if match[2] is None else _port(match[2], source)
    return _host(text, source), port


def _host(text: str, source: str) -> str:
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        if not re.fullmatch(r"[\w.-]+", text):
            raise UsageError(f"{source} names a node, such as node1, not {text!r}") from None
        return text
    if address.is_unspecified:
        raise UsageError(
            f"{source} is {text!r}, which means every address of a machine. Name the address that "
            "the other nodes reach"
        )
    return text


def _port(text: str, source: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 1 <= int(text) <= 65535:
        raise UsageError(f"the port of {source} is a number from 1 to 65535, not {text!r}")
    return int(text)


def _node_id(given: _Given, step: SlurmStep | None) -> tuple[str, bool]:
    """Returns the node's name, and whether it differs from the machine's host name."""
    chosen = given.own("node-id", "FTRUN_NODE_ID")
    if chosen:
        if not _GOOD_NAME.fullmatch(chosen.text):
            raise UsageError(
                f"{chosen.source} {chosen.text!r} is not usable: 1 to 100 letters, digits, '.', "
                "'_' or '-', the first a letter or a digit"
            )
        return chosen.text, True
    machine = _shortened_name(socket.gethostname())
    if step is None or not step.node_name:
        return machine, False
    name = _shortened_name(step.node_name)
    return name, name.partition(".")[0] != machine.partition(".")[0]


def _shortened_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("._-")[:100] or "node"


def _bind(given: _Given) -> str | None:
    address = given.own("bind", "FTRUN_BIND") or given.torchrun("local-addr")
    if not address:
        return None
    host = _host(address.text.strip("[]"), address.source)
    if not is_local_address(host):
        raise UsageError(
            f"{address.source} is {address.text!r}, which is no address of this machine "
            f"({socket.gethostname()}). `ip -brief address` lists them"
        )
    return host


def _domain(given: _Given) -> str | None:
    label = given.own("fault-domain", "FTRUN_FAULT_DOMAIN")
    if label and not (label.text.isprintable() and len(label.text) <= 100):
        raise UsageError(f"{label.source} is a name of at most 100 characters, not {label.text!r}")
    return label.text or None


def _secret_file(profile: Profile, step: SlurmStep | None) -> tuple[str | None, bool, str]:
    """Returns the secret file, whether ftrun made it, and the reason if there is none."""
    given = profile.security.secret_file
    if given is not None:
        path = Path(given).expanduser().absolute()
        secret.load_secret(path)
        return str(path), False, ""
    reason = f"no --secret-file is given; {secret.HOW_TO_MAKE} creates one for all nodes"
    if step is not None:
        try:
            folder = Path.home() / ".ftrun" / "secrets"
            made = secret.shared_secret_file(folder, step.key)
            secret.forget_shared_secrets(folder, step.earlier_keys)
            return str(made), True, ""
        except (UsageError, RuntimeError) as error:
            reason = str(error)
    if profile.security.require_secret:
        raise UsageError(f"security.require_secret is set, and {reason}")
    return None, False, reason


def _whole(given: _Text) -> int:
    if not given:
        return 0
    if not re.fullmatch(r"\d{1,6}", given.text):
        raise UsageError(f"{given.source} is a whole number, 0 or more, not {given.text!r}")
    return int(given.text)


# --- files --------------------------------------------------------------------------------------


def etcd_tls(conf: str, variables: Mapping[str, str]) -> EtcdTls | None:
    """Returns absolute paths of readable TLS files for etcd; None for plain HTTP.

    `conf` is the value of --rdzv-conf, with the keys of torchrun's etcd backend: `protocol=https`;
    `cacert=`, `cert=` and `key=` with a file. ETCDCTL_ variables apply to files that it does not
    name.
    """
    pairs = (pair.partition("=") for pair in conf.split(","))
    given = {name.strip(): text.strip() for name, _, text in pairs}
    protocol = given.get("protocol", "")
    if protocol not in ("", "http", "https"):
        raise UsageError(f"--rdzv-conf protocol is http or https, not {protocol!r}")
    if protocol == "http":
        return None
    found: dict[str, str] = {}
    for what, name in _TLS_FILES.items():
        source = f"--rdzv-conf {name}" if given.get(name) else _TLS_VARIABLES[what]
        if text := given.get(name) or variables.get(_TLS_VARIABLES[what], "").strip():
            found[what] = _readable(text, source)
    if ("cert" in found) != ("key" in found):
        given_one, missing = ("cert", "key") if "cert" in found else ("key", "cert")
        raise UsageError(
            f"for TLS with etcd a {given_one} is given and no {missing}: name both files, with "
            "--rdzv-conf cert=FILE,key=FILE or ETCDCTL_CERT and ETCDCTL_KEY"
        )
    return EtcdTls(**found) if found or protocol else None


def _readable(text: str, source: str) -> str:
    path = Path(text).expanduser().absolute()
    if not path.is_file():
        raise UsageError(f"{source} is {text!r}, and there is no such file on this node")
    if not os.access(path, os.R_OK):
        raise UsageError(f"{source} is {text!r}, which this user may not read")
    return str(path)


def read_topology(path: str | None) -> tuple[dict[str, Any] | None, str]:
    """Returns parsed YAML, or the text of Slurm's topology.conf; read only once, at the start."""
    if path is None:
        return None, ""
    try:
        data = Path(path).read_bytes()[: _MAX_TOPOLOGY_BYTES + 1]
        text = data.decode("utf-8")
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"--topology {path} cannot be read: {reason}") from error
    if len(data) > _MAX_TOPOLOGY_BYTES:
        limit = f"{_MAX_TOPOLOGY_BYTES >> 20} MiB"
        raise UsageError(f"--topology {path} has more than {limit}: is it the right file?")
    try:
        if "switchname=" in text.lower():
            leaves_from_slurm(text, {})
            return None, text
        found = yaml.safe_load(text)
        leaves_from_file(found, [])
    except (UsageError, yaml.YAMLError) as error:
        raise UsageError(
            f"--topology {path} is not understood: {error}. List switches with their nodes, such "
            "as leaf1: [node1, node2], or give Slurm's topology.conf"
        ) from error
    return found, ""
