"""Real SMPs write to a URL together, die while they do, and never wait for a store that hangs."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftrun.ids import Version, version
from ftrun.wire.messages import checkpoint as checkpoint_messages
from ftrun.wire.messages import envelope as messages
from ftrun.wire.messages import smp as smp_messages
from tests.ftp_server import FtpServer, ftp_server
from tests.integration.conftest import free_port
from tests.integration.test_checkpoint_nodes import (
    FIRST,
    RUN_ID,
    WORLD,
    Make,
    Node,
    check_loaded,
    image_of,
    make,
    part,
    refused,
    wait_until,
)

__all__ = ["make"]

pytestmark = [pytest.mark.slow]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def server(root: Path, make: Make) -> Iterator[FtpServer]:
    """It ends before the nodes do, which then cannot write."""
    with ftp_server(root) as found:
        yield found


def order(
    url: str, at: Version | None, *, bytes_per_s: float = 0.0
) -> checkpoint_messages.WriteCheckpoint:
    pair = (at.generation, at.step) if at is not None else None
    return checkpoint_messages.WriteCheckpoint(
        url, 2, pair, "token" if pair else "", bytes_per_s=bytes_per_s, life="life"
    )


def load(node: Node, url: str) -> messages.AnyMessage:
    return node.ask(checkpoint_messages.LoadCheckpoint(url, WORLD, node.ranks))


def finished(answer: messages.AnyMessage) -> checkpoint_messages.CheckpointWritten:
    assert isinstance(answer, checkpoint_messages.CheckpointWritten), answer
    assert not answer.is_part, answer
    return answer


def check_files(root: Path, at: Version) -> None:
    """It is whole, and `latest` points to it."""
    folder = root / "run" / (root / "run" / "latest").read_text().strip()
    for rank in range(WORLD):
        assert (folder / f"rank-{rank:05d}.safetensors").read_bytes() == image_of(rank, at)
    assert (folder / "index.json").exists()


def test_nodes_that_write_at_once_make_one_checkpoint(
    make: Make, server: FtpServer, root: Path
) -> None:
    nodes = [make(0, 1), make(2, 3)]
    for node in nodes:
        node.ready()
    for step in (1, 2, 3):
        at = version(0, step)
        for node in nodes:
            node.seal(at, slot=step % 2)
            node.send(order(server.url(), at))
        answers = [node.answer() for node in nodes]
        whole = [one for one in answers if not getattr(one, "is_part", True)]
        assert len({finished(one).path for one in whole}) == 1, answers
        check_files(root, at)
    assert len(list(root.glob("run/*/index.json"))) == 2
    for node in nodes:
        node.lose()
        node.start()
        check_loaded(node, load(node, server.url()), version(0, 3))
        node.begin()
        again = finished(node.ask(order(server.url(), version(-1, 3))))
        assert (again.step, again.total_bytes) == (3, 0), "what was loaded is not sent again"


def test_a_killed_node_is_replaced_and_continues_from_the_url(
    make: Make, server: FtpServer, root: Path
) -> None:
    """SIGKILL in the middle of its files; its sent files of that version do not count."""
    first, second = make(0, 1), make(2, 3)
    first.ready()
    second.ready()
    assert part(first.ask(order(server.url(), FIRST))).missing_ranks == [2, 3]
    assert finished(second.ask(order(server.url(), FIRST))).step == 1
    for node in (first, second):
        node.seal(version(0, 2), slot=1)
    assert part(first.ask(order(server.url(), version(0, 2)))).missing_ranks == [2, 3]
    seen = server.changes
    second.send(order(server.url(), version(0, 2), bytes_per_s=50_000))
    wait_until(lambda: server.changes > seen + 1, "its first file is on its way")
    assert second.process is not None
    second.process.send_signal(signal.SIGKILL)
    second.lose()
    second.start()
    check_loaded(second, load(second, server.url()), FIRST)
    first.lose()
    first.start()
    check_loaded(first, load(first, server.url()), FIRST)
    whole = list(root.glob("run/step-*"))
    assert [path.name.split("-")[1] for path in whole] == ["00000001"], "its halves are swept"


def test_an_smp_ends_at_once_while_its_store_hangs(make: Make, server: FtpServer) -> None:
    node = make(0, 1, 2, 3)
    node.ready()
    assert finished(node.ask(order(server.url(), None))).step == 1
    node.seal(version(0, 2), slot=1)
    server.freeze()
    node.send(order(server.url(), None))
    started_s = time.monotonic()
    node.send(smp_messages.Shutdown())
    while not isinstance(node.answer(), messages.Done):
        pass
    assert node.process is not None
    node.process.wait(60)
    assert time.monotonic() - started_s < 30, "it would wait for as long as the store hangs"
    server.thaw()


def test_an_unreachable_store_is_reported_and_the_next_checkpoint_is_written(
    make: Make, root: Path
) -> None:
    node = make(0, 1, 2, 3)
    node.ready()
    port = free_port()  # a port that the kernel gives to no other process in between
    with ftp_server(root, port=port) as server:
        url = server.url()
        assert finished(node.ask(order(url, None))).step == 1
    node.seal(version(0, 2), slot=1)
    reason = refused(node.ask(order(url, None)))
    assert "ftp://me:***@127.0.0.1" in reason
    assert "Connection refused" in reason
    with ftp_server(root, port=port):
        assert finished(node.ask(order(url, None))).step == 2
    check_files(root, version(0, 2))
    assert RUN_ID in (next(root.glob("run/*/index.json"))).read_text()
