"""Notices of Kubernetes and Slurm about the own node.

Runs in:  agent, in the thread of each source.
Source:   Kubernetes, "Taints and Tolerations" and the API of nodes; the taints of Google's, AWS',
          Azure's, Karpenter's and the cluster autoscaler's termination handlers; Slurm,
          scontrol(1), "NODE STATES". Read 2026-11.

Rights: Kubernetes: `get` on this one node, for the pod's service account. Slurm: none beyond those
of each user.
"""

import json
import os
import re
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ftrun.agent.notices.clouds import node_url
from ftrun.agent.notices.source import Notice, SourceFailed, expected, fetch, output_of

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_OK = 200

LEAVING_TAINTS = (
    "node.kubernetes.io/out-of-service",
    "cloud.google.com/impending-node-termination",
    "aws-node-termination-handler/spot-itn",
    "aws-node-termination-handler/asg-lifecycle-termination",
    "aws-node-termination-handler/scheduled-maintenance",
    "kubernetes.azure.com/scheduled-event",
    "karpenter.sh/disrupted",
    "karpenter.sh/disruption",
    "ToBeDeletedByClusterAutoscaler",
)
"""Taints of a node that is about to be taken away. A node that is only cordoned stays."""


class KubernetesNotices:
    """Taints of the node of this pod that say that the node is about to be taken away."""

    name = "kubernetes"
    every_s = 5.0

    def __init__(self, variables: Mapping[str, str] = os.environ, account: Path = _ACCOUNT) -> None:
        self._variables = variables
        self._account = account

    def poll(self) -> Notice | None:
        url = self._url()
        try:
            token = (self._account / "token").read_text(encoding="ascii").strip()  # it changes
            tls = ssl.create_default_context(cafile=str(self._account / "ca.crt"))
        except OSError as error:
            raise SourceFailed(f"the pod has no service account: {error}") from error
        reply = fetch(url, {"Authorization": f"Bearer {token}"}, tls=tls)
        if reply.status in (401, 403):
            raise SourceFailed(
                f"{url} answers {reply.status}: the pod's service account needs the right to get "
                "this node"
            )
        return leaving(expected(reply, url, _OK).text, self.name)

    def _url(self) -> str:
        found = {
            name: self._variables.get(name, "")
            for name in ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT", "NODE_NAME")
        }
        missing = [name for name, value in found.items() if not value]
        if missing:
            raise SourceFailed(
                f"{', '.join(missing)} not set: the pod needs NODE_NAME from spec.nodeName "
                "(downward API)"
            )
        return node_url(*found.values())


def leaving(node: str, source: str) -> Notice | None:
    """The notice in a node object, as JSON."""
    try:
        spec: dict[str, Any] = json.loads(node)["spec"]
        taints = [(str(one["key"]), str(one.get("value") or "")) for one in spec.get("taints", ())]
    except (ValueError, KeyError, TypeError) as error:
        raise SourceFailed(f"the answer is no node object: {error!r}") from error
    for key, value in taints:
        if key in LEAVING_TAINTS:
            return Notice(source, f"taint {key}{f'={value}' if value else ''}")
    return None


class SlurmNotices:
    """The state of this node in Slurm: draining, failing or powering down."""

    name = "slurm"
    every_s = 30.0
    """The controller answers all nodes of a cluster."""
    _LEAVING = frozenset({"DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "POWERING_DOWN"})

    def __init__(self, node: str = "", command: str = "scontrol") -> None:
        self._node = node or os.environ.get("SLURMD_NODENAME", "")
        self._command = command

    def poll(self) -> Notice | None:
        if not self._node:
            raise SourceFailed("SLURMD_NODENAME is not set: ftrun was not started by srun")
        return self._in(output_of([self._command, "show", "node", self._node, "-o"]))

    def _in(self, line: str) -> Notice | None:
        state = re.search(r"\bState=(\S+)", line)
        if state is None:
            raise SourceFailed(f"scontrol shows no state of {self._node}: {line[:200].strip()}")
        flags = re.split(r"[+*~#!%$@^-]+", state.group(1))
        if not self._LEAVING.intersection(flags):
            return None
        reason = re.search(r"\bReason=(.*?)(?:\s\[\S+\])?(?:\s\w+=|$)", line)
        why = f", {reason.group(1).strip()}" if reason else ""
        return Notice(self.name, f"node {self._node} is {state.group(1)}{why}")
