"""Notices of the metadata servers of AWS, Google Cloud and Azure.

Runs in:  agent, in the thread of each source.
Source:   AWS EC2 User Guide, "Spot Instance interruption notices", "EC2 instance rebalance
          recommendations", "Use the Instance Metadata Service" (version 2); Google Compute Engine,
          "Spot VMs", "Get live migration notices"; Azure, "Scheduled Events for Linux VMs". Read
          2026-11.

Only reads. No event is acknowledged: the cloud keeps its own time.
"""

import json
from typing import Any
from urllib.parse import quote

from ftrun import clock
from ftrun.agent.notices.source import (
    TIMEOUT_S,
    Notice,
    Reply,
    SourceFailed,
    expected,
    fetch,
)

_LINK_LOCAL = "http://169.254.169.254"
_OK, _NONE_YET, _UNAUTHORIZED = 200, 404, 401


def _document(reply: Reply, url: str) -> Any:
    try:
        return json.loads(reply.text)
    except ValueError as error:
        raise SourceFailed(f"{url} does not answer with JSON: {reply.text[:80]!r}") from error


def _fields(found: Any, url: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise SourceFailed(f"{url} does not answer with an object")
    return found


class AwsNotices:
    """Interruptions of spot instances, by the instance metadata service, version 2.

    `with_rebalance`: also recommendations to move, which do not say that the machine is taken away.
    """

    name = "aws"
    every_s = 5.0
    _TOKEN_S = 3600

    def __init__(self, base: str = _LINK_LOCAL, *, with_rebalance: bool = False) -> None:
        self._base = f"{base}/latest"
        self._token, self._until_s = "", 0.0
        self._with_rebalance = with_rebalance

    def poll(self) -> Notice | None:
        found = self._read("spot/instance-action")
        if found is not None:
            action, at = found.get("action", "interruption"), found.get("time", "")
            return Notice(self.name, f"spot interruption, {action}", str(at))
        if self._with_rebalance:
            found = self._read("events/recommendations/rebalance")
            if found is not None:
                at = str(found.get("noticeTime", ""))
                return Notice(self.name, "rebalance recommendation", at)
        return None

    def _read(self, path: str) -> dict[str, Any] | None:
        url = f"{self._base}/meta-data/{path}"
        reply = self._with_token(url)
        if reply.status == _UNAUTHORIZED:  # the token has expired, for example after a suspend
            self._until_s = 0.0
            reply = self._with_token(url)
        if expected(reply, url, _OK, _NONE_YET).status == _NONE_YET:
            return None
        return _fields(_document(reply, url), url)

    def _with_token(self, url: str) -> Reply:
        if clock.now_s() >= self._until_s:
            asked = f"{self._base}/api/token"
            lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": str(self._TOKEN_S)}
            self._token = expected(fetch(asked, lifetime, method="PUT"), asked, _OK).text.strip()
            self._until_s = clock.now_s() + self._TOKEN_S / 2
        return fetch(url, {"X-aws-ec2-metadata-token": self._token})


class GoogleNotices:
    """Preemption of this VM, and maintenance that ends it."""

    name = "google"
    every_s = 1.0
    _ENDS = "TERMINATE_ON_HOST_MAINTENANCE"

    def __init__(self, base: str = "http://metadata.google.internal") -> None:
        self._base = f"{base}/computeMetadata/v1/instance"

    def poll(self) -> Notice | None:
        if self._read("preempted").upper() == "TRUE":
            return Notice(self.name, "the VM is preempted")
        if self._read("maintenance-event") == self._ENDS:
            return Notice(self.name, "host maintenance ends the VM")
        return None

    def _read(self, path: str) -> str:
        url = f"{self._base}/{path}"
        reply = expected(fetch(url, {"Metadata-Flavor": "Google"}), url, _OK)
        flavor = {name.lower(): value for name, value in reply.headers.items()}
        if flavor.get("metadata-flavor") != "Google":
            raise SourceFailed(f"{url} is not answered by a metadata server of Google")
        return reply.text.strip()


class AzureNotices:
    """Scheduled events that end or restart this VM; one that only pauses it (Freeze) does not."""

    name = "azure"
    every_s = 1.0
    _ENDING = frozenset({"Preempt", "Terminate", "Reboot", "Redeploy"})
    _FIRST_S = 120.0
    """The first answer takes up to two minutes, while the service is enabled for the VM."""

    def __init__(self, base: str = _LINK_LOCAL) -> None:
        self._base = f"{base}/metadata"
        self._vm = ""
        self._has_answered = False

    def poll(self) -> Notice | None:
        if not self._vm:
            name = f"{self._base}/instance/compute/name?api-version=2021-02-01&format=text"
            self._vm = expected(fetch(name, {"Metadata": "true"}), name, _OK).text.strip()
        url = f"{self._base}/scheduledevents?api-version=2020-07-01"
        limit_s = TIMEOUT_S if self._has_answered else self._FIRST_S
        reply = expected(fetch(url, {"Metadata": "true"}, timeout_s=limit_s), url, _OK)
        self._has_answered = True
        for event in _fields(_document(reply, url), url).get("Events", ()):
            if event.get("EventType") in self._ENDING and self._vm in event.get("Resources", ()):
                reason = f"{event['EventType']} of the VM, {event.get('Description', '')}"
                return Notice(self.name, reason.rstrip(", "), str(event.get("NotBefore", "")))
        return None


def node_url(host: str, port: str, node: str) -> str:
    """Address of a node object in the API of Kubernetes."""
    place = f"[{host}]" if ":" in host else host
    return f"https://{place}:{port}/api/v1/nodes/{quote(node, safe='')}"
