"""Finds the TLS files for an etcd cluster, from --rdzv-conf or from etcdctl's variables.

Runs in:  cli.
Takes in: --rdzv-conf with the keys of torchrun's etcd backend, ETCDCTL_ variables.
Gives:    absolute paths of readable files; None for plain HTTP.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from ftrun.config.cluster import EtcdTls
from ftrun.errors import UsageError

_NAMES = {"ca": "cacert", "cert": "cert", "key": "key"}
_VARIABLES = {"ca": "ETCDCTL_CACERT", "cert": "ETCDCTL_CERT", "key": "ETCDCTL_KEY"}
_PROTOCOL = "protocol"


def etcd_tls(conf: str, variables: Mapping[str, str]) -> EtcdTls | None:
    """Returns the TLS files for etcd; None for plain HTTP.

    Args:
        conf: the value of --rdzv-conf: `protocol=https`; `cacert=`, `cert=` and `key=` with a file.
        variables: the environment; ETCDCTL_ variables apply to files that `conf` does not name.

    Raises:
        UsageError: a file cannot be read, or only one of certificate and key is given.
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
