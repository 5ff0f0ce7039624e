"""The page shows captures of graphs, and a capture waits for a dump that queries the device."""

import threading

import pytest
import torch

from ftrun import clock
from ftrun.agent.observe.recorder import may_query_device
from ftrun.wire.shared_memory.pages import HeartbeatField, SharedPage, create_page
from ftrun.worker.process.graph_captures import observe, observe_class


def graph_class(page: SharedPage, log: list[bool]) -> type:
    class Graph:
        def capture_begin(self, *, fails: bool = False) -> None:
            log.append(page.may_capture)
            if fails:
                raise RuntimeError("the device is lost")

        def capture_end(self) -> None:
            log.append(page.may_capture)

        def replay(self) -> None:
            log.append(page.may_capture)

    observe_class(Graph, page)
    page.note_capture(is_in_progress=False)
    return Graph


@pytest.fixture
def page() -> SharedPage:
    return SharedPage(create_page("test"))


def test_a_capture_is_shown_until_its_end(page: SharedPage) -> None:
    log: list[bool] = []
    graph = graph_class(page, log)()
    assert not page.may_capture
    graph.capture_begin()
    assert page.may_capture
    assert not may_query_device(page, 1.0)
    assert page.get(HeartbeatField.READING_NS) == 0
    graph.capture_end()
    graph.replay()
    graph.replay()
    assert log == [True, True, False, False]
    assert (page.may_capture, page.get(HeartbeatField.REPLAYS)) == (False, 2)
    with pytest.raises(RuntimeError):
        graph.capture_begin(fails=True)
    assert not page.may_capture


def test_a_capture_waits_for_a_dump_and_not_beyond_its_deadline(page: SharedPage) -> None:
    graph = graph_class(page, [])()
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
    observe(page)
    assert page.may_capture
    assert not may_query_device(page, 1.0)
