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
    Refused,
    StatusReply,
    StatusRequest,
    StopRequest,
)
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
