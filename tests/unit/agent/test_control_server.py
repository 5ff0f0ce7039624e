"""The control thread still answers after a document that it cannot build."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ftrun.agent.publish.control_server import ControlServer
from ftrun.errors import PeerError
from ftrun.wire.messages.envelope import (
    Done,
    Hello,
    ReadmitRequest,
    Refused,
    StatusReply,
    StatusRequest,
    StopRequest,
)
from ftrun.wire.messages.status import ClusterStatus, ExclusionStatus, NodeStatus
from ftrun.wire.transport.channel import Channel, connect

DEADLINE_S = 60.0


class Served:
    """A control server whose document `make` returns."""

    def __init__(self, path: Path) -> None:
        self.make: Any = lambda: b"{}"
        self.stops: list[str] = []
        self.path = path
        run: Any = SimpleNamespace(
            spec=SimpleNamespace(run_id="mine", nodes=None),
            smp=SimpleNamespace(folder=SimpleNamespace(agent_socket=path)),
            observers=SimpleNamespace(status=SimpleNamespace(document=lambda: self.make())),
            signals=SimpleNamespace(ask_stop=self.stops.append),
            rpc=None,
        )
        self.run = run
        self.server = ControlServer(run, None)
        self.server.start()

    def channel(self) -> Channel:
        hello = Hello(pid=1, role="cli")
        return connect(
            self.path, run_id="mine", peer="the agent", hello=hello, deadline_s=DEADLINE_S
        )

    def ask(self, body: Any) -> Any:
        channel = self.channel()
        try:
            return channel.ask(body, deadline_s=DEADLINE_S).body
        finally:
            channel.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path / "agent.sock")
    yield made
    made.server.stop()


def test_a_document_that_raises_costs_one_client(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> bytes:
        raise AttributeError("'NoneType' object has no attribute 'text'")

    served.make = fail
    with pytest.raises(PeerError):
        served.ask(StatusRequest())
    assert "a request was not answered: a bug of ftrun" in caplog.text
    served.make = lambda: b'{"state": "running"}'
    assert served.ask(StatusRequest()) == StatusReply(b'{"state": "running"}')
    assert served.ask(StopRequest()) == Done()
    assert served.stops == ["ftrun stop"]


def test_without_a_published_document_the_reason_is_reported(served: Served) -> None:
    def fail() -> bytes:
        raise PeerError("there is no status yet: the agent has just been started")

    served.make = fail
    assert served.ask(StatusRequest()) == Refused(
        "there is no status yet: the agent has just been started"
    )


# --- ftrun readmit ----------------------------------------------------------------------------


class Leader:
    """The status of a run over several nodes, and the requests to its leader."""

    def __init__(self, status: ClusterStatus, *, leads: bool = False) -> None:
        self.status = status
        self.readmitted: list[str] = []
        last = SimpleNamespace(leader_id="a", leader_host="a.local", leads=leads)
        self.control_loop = SimpleNamespace(read=lambda: SimpleNamespace(value=last))

    def whole(self) -> ClusterStatus:
        return self.status

    def readmit(self, node_id: str) -> None:
        self.readmitted.append(node_id)


EXCLUDED = ClusterStatus(
    state="running",
    summary="",
    nodes=(NodeStatus("a"),),
    exclusions=(ExclusionStatus("b", "slow", 60.0), ExclusionStatus("c", "GPU 2 is lost")),
)


def test_the_leader_is_asked_to_readmit_an_excluded_node(served: Served) -> None:
    served.run.rpc = leader = Leader(EXCLUDED)
    served.run.spec.nodes = SimpleNamespace(secret_file="/a/secret")
    assert served.ask(ReadmitRequest("b")) == Done()
    assert leader.readmitted == ["b"]
    assert served.ask(ReadmitRequest("d")) == Refused("node d is not excluded; excluded: b, c")
    refused = served.ask(ReadmitRequest("c"))
    assert refused.reason.startswith("node c cannot be readmitted: GPU 2 is lost. Repair it")
    leader.status = ClusterStatus(state="electing", summary="electing", note="no answer")
    assert served.ask(ReadmitRequest("b")) == Refused("no leader has answered: no answer")
    assert leader.readmitted == ["b"]


def test_without_a_secret_only_the_node_of_the_leader_readmits(served: Served) -> None:
    served.run.spec.nodes = SimpleNamespace(secret_file=None)
    served.run.rpc = other = Leader(EXCLUDED)
    assert "only the node of the leader" in served.ask(ReadmitRequest("b")).reason
    served.run.rpc = leader = Leader(EXCLUDED, leads=True)
    assert served.ask(ReadmitRequest("b")) == Done()
    assert (other.readmitted, leader.readmitted) == ([], ["b"])


def test_a_run_on_one_node_excludes_none(served: Served) -> None:
    assert "one node" in served.ask(ReadmitRequest("b")).reason
