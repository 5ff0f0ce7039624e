"""The page shows captures of graphs, a capture waits for a dump, and replays name their steps."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import nn

from ftrun import clock
from ftrun.agent.observe.recorder import may_query_device
from ftrun.wire.shared_memory.pages import HeartbeatField, SharedPage, create_page
from ftrun.worker.capture.boundaries import AccumulationTracker
from ftrun.worker.process.graph_captures import GraphObserver, observe


class Graph:
    """In place of a graph of a device; `log` has what the page shows at each call."""

    log: list[bool]
    page: SharedPage

    def capture_begin(self, *, fails: bool = False) -> None:
        self.log.append(self.page.may_capture)
        if fails:
            raise RuntimeError("the device is lost")

    def capture_end(self) -> None:
        self.log.append(self.page.may_capture)

    def replay(self) -> None:
        self.log.append(self.page.may_capture)


@pytest.fixture
def page() -> SharedPage:
    return SharedPage(create_page("test"))


@pytest.fixture
def kind(page: SharedPage) -> type[Graph]:
    return type("Graph", (Graph,), {"log": [], "page": page} | {
        name: getattr(Graph, name) for name in ("capture_begin", "capture_end", "replay")
    })  # fmt: skip


@pytest.fixture
def observer(kind: type[Graph], page: SharedPage) -> Iterator[GraphObserver]:
    with closing(GraphObserver([kind])) as made:
        made.show(page)
        yield made


@pytest.mark.usefixtures("observer")
def test_a_capture_is_shown_until_its_end(kind: type[Graph], page: SharedPage) -> None:
    graph = kind()
    assert not page.may_capture
    graph.capture_begin()
    assert page.may_capture
    assert not may_query_device(page, 1.0)
    assert page.get(HeartbeatField.READING_NS) == 0
    graph.capture_end()
    graph.replay()
    graph.replay()
    assert kind.log == [True, True, False, False]
    assert (page.may_capture, page.get(HeartbeatField.REPLAYS)) == (False, 2)


def test_a_capture_that_fails_is_over(
    kind: type[Graph], page: SharedPage, observer: GraphObserver
) -> None:
    with pytest.raises(RuntimeError):
        kind().capture_begin(fails=True)
    assert not page.may_capture
    assert not observer.is_capturing


@pytest.mark.usefixtures("observer")
def test_a_capture_waits_for_a_dump_and_not_beyond_its_deadline(
    kind: type[Graph], page: SharedPage
) -> None:
    graph = kind()
    assert may_query_device(page, 30.0)
    capture = threading.Thread(target=graph.capture_begin)
    capture.start()
    capture.join(0.1)
    assert capture.is_alive()
    assert page.may_capture
    page.set(HeartbeatField.READING_NS, 0)
    capture.join(10.0)
    assert not capture.is_alive()
    graph.capture_end()
    assert may_query_device(page, 0.05)
    before_s = clock.now_s()
    graph.capture_begin()
    assert 0.1 < clock.now_s() - before_s < 10.0


def test_unobserved_captures_forbid_queries(
    page: SharedPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A build for CUDA names it without a GPU too.
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    observe(page, lambda *_: None)
    assert page.may_capture
    assert not may_query_device(page, 1.0)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def captured(graph: Graph, *calls: Callable[[], Any]) -> None:
    graph.capture_begin()
    for one in calls:
        one()
    graph.capture_end()


def test_a_replay_names_the_optimizers_of_its_own_capture(
    kind: type[Graph], page: SharedPage, observer: GraphObserver
) -> None:
    stepping, other = optimizer_of(nn.Linear(1, 1)), optimizer_of(nn.Linear(1, 1))
    early, update, forward = kind(), kind(), kind()
    captured(early, stepping.step)  # before `attach`, which listens
    counted: list[object] = []
    observer.show(page, counted.append)
    seen: list[object] = []
    observer.listen(
        lambda graph: seen.append(graph), lambda graph, optimizers: seen.append([*optimizers])
    )
    captured(update, stepping.step)
    captured(forward)
    other.step()
    assert seen == [update, forward]
    for graph in (forward, early, update):
        graph.replay()
    assert seen[2:] == [[], [stepping], [stepping]]
    assert counted == [stepping, stepping]
    observer.listen()
    update.replay()
    assert len(seen) == 5


def test_the_replay_of_an_update_ends_an_accumulation(
    kind: type[Graph], observer: GraphObserver
) -> None:
    """Its capture runs no step, so it uses no gradients of the turn before."""
    model = nn.Linear(3, 1)
    optimizer = optimizer_of(model)

    def before(_: Any, optimizers: Any) -> None:
        for one in optimizers:
            accumulation.before_step(one)

    observer.listen(before_replay=before)
    accumulation = AccumulationTracker([optimizer], guarded=observer.outside_captures)

    def turn(step: Callable[[], Any]) -> bool:
        model(torch.ones(2, 3)).sum().backward()
        is_pending = accumulation.boundary()
        step()
        optimizer.zero_grad(set_to_none=False)
        return is_pending and not accumulation.boundary()

    assert turn(optimizer.step)
    graph = kind()
    captured(graph, optimizer.step)
    assert accumulation.crossing == []
    assert turn(graph.replay)
    assert turn(graph.replay)
    assert accumulation.crossing == []
    accumulation.close()
