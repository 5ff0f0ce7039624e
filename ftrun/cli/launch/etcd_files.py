"""The files for TLS with an etcd cluster: --rdzv-conf as torchrun's etcd has it, or etcdctl's own.

Runs in:  cli.
Takes in: --rdzv-conf, ETCDCTL_ variables.
Gives:    absolute paths, each looked at; none where plain HTTP is to be spoken.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from ftrun.config import EtcdTls
from ftrun.errors import UsageError

_NAMES = {"ca": "cacert", "cert": "cert", "key": "key"}
_VARIABLES = {"ca": "ETCDCTL_CACERT", "cert": "ETCDCTL_CERT", "key": "ETCDCTL_KEY"}
_PROTOCOL = "protocol"


def etcd_tls(conf: str, variables: Mapping[str, str]) -> EtcdTls | None:
    """How a node and the etcd know each other.

    Args:
        conf: of --rdzv-conf: `protocol=https`, `cacert=`, `cert=` and `key=` with a file each.
        variables: those of etcdctl stand for what is not given.

    Raises:
        UsageError: a file cannot be read, or half of what belongs together is missing.
    """
    pairs = (pair.partition("=") for pair in conf.split(","))
    given = {name.strip(): text.strip() for name, _, text in pairs}
    protocol = given.get(_PROTOCOL, "")
    if protocol not in ("", "http", "https"):
        raise UsageError(f"--rdzv-conf {_PROTOCOL} is http or https, not {protocol!r}")
    if protocol == "http":
        return None
    found: dict[str, str] = {}
    for what, name in _NAMES.items():
        source = f"--rdzv-conf {name}" if given.get(name) else _VARIABLES[what]
        if text := given.get(name) or variables.get(_VARIABLES[what], "").strip():
            found[what] = _readable(text, source)
    if ("cert" in found) != ("key" in found):
        there, missing = ("cert", "key") if "cert" in found else ("key", "cert")
        raise UsageError(
            f"for TLS with etcd a {there} is given and no {missing}: name both files, by "
            f"--rdzv-conf cert=FILE,key=FILE or {_VARIABLES['cert']} and {_VARIABLES['key']}"
        )
    return EtcdTls(**found) if found or protocol else None


def _readable(text: str, source: str) -> str:
    path = Path(text).expanduser().absolute()
    if not path.is_file():
        raise UsageError(f"{source} is {text!r}, and there is no such file on this node")
    if not os.access(path, os.R_OK):
        raise UsageError(f"{source} is {text!r}, which this user may not read")
    return str(path)
