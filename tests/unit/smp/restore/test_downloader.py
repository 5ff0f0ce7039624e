"""Items move to their next source if one refuses, does not answer, is lost or sends other bytes."""

import contextlib
from collections import deque
from collections.abc import Callable, Sequence

import xxhash

from ftrun.smp.jobs import Wait, drive
from ftrun.smp.restore.downloader import BLOCK, PIECE, WINDOW_BYTES, Downloader, DownloadItem
from ftrun.smp.restore.rpc import PendingRequests
from ftrun.wire.cluster import transfer as t

TIMEOUT_S = 0.05


class Sources:
    """Nodes that answer at once, in the requesting thread."""

    def __init__(self) -> None:
        self.requests = PendingRequests()
        self.answers: dict[str, Callable[[int, int, DownloadItem], None]] = {}
        self.asked: list[tuple[str, int]] = []
        self.now_s = 0.0
        self.downloader = Downloader(self.requests, self.ask, timeout_s=TIMEOUT_S, now_s=self.tick)

    def tick(self) -> float:
        self.now_s += TIMEOUT_S / 2
        return self.now_s

    def ask(self, node: str, number: int, batch: Sequence[DownloadItem]) -> bool:
        self.asked.append((node, len(batch)))
        if node not in self.answers:
            return False
        for index, item in enumerate(batch):
            self.answers[node](number, index, item)
        return True

    def give(self, raw: bytes) -> Callable[[int, int, DownloadItem], None]:
        def answer(number: int, index: int, item: DownloadItem) -> None:
            digest = xxhash.xxh3_64_intdigest(raw)
            self.requests.take_own(t.FetchData(number, index), [raw], digest)

        return answer

    def refuse(self, number: int, index: int, item: DownloadItem) -> None:
        self.requests.take_own(t.FetchMissing(number, index, "not here"), (), None)

    def run(self, *items: DownloadItem) -> list[DownloadItem]:
        return drive(self.downloader.steps(items))


def unresponsive(number: int, index: int, item: DownloadItem) -> None:
    pass


def item_of(raw: bytes, *sources: str, kind: str = PIECE) -> DownloadItem:
    digest = xxhash.xxh3_64_intdigest(raw)
    room = memoryview(bytearray(len(raw)))
    return DownloadItem(kind, digest, len(raw), [room], deque(sources), digest)


def test_a_good_answer_fills_the_item() -> None:
    sources, item = Sources(), item_of(b"bytes", "a")
    sources.answers["a"] = sources.give(b"bytes")
    assert sources.run(item) == []
    assert bytes(item.views[0]) == b"bytes"
    assert (item.source, sources.downloader.num_bytes) == ("a", 5)


def test_a_refusal_and_other_bytes_lead_to_the_next_source() -> None:
    sources, item = Sources(), item_of(b"bytes", "a", "b", "c")
    sources.answers.update(a=sources.refuse, b=sources.give(b"other"), c=sources.give(b"bytes"))
    assert sources.run(item) == []
    assert item.source == "c"
    assert item.problems == ["a: not here", "b: its bytes do not match the requested digest"]


def test_an_answer_of_another_length_is_dropped_and_its_source_becomes_unresponsive() -> None:
    sources, item = Sources(), item_of(b"bytes", "a", "b")
    sources.answers.update(a=sources.give(b"longer bytes"), b=sources.give(b"bytes"))
    assert sources.run(item) == []
    assert item.problems == ["a: no answer for 0 s"]


def test_an_unresponsive_source_gets_no_more_requests() -> None:
    sources, item = Sources(), item_of(b"bytes", "a", "b", "a")
    sources.answers.update(a=unresponsive, b=sources.give(b"other"))
    assert sources.run(item) == [item]
    assert sources.asked == [("a", 1), ("b", 1)]
    assert item.problems == [
        "a: no answer for 0 s",
        "b: its bytes do not match the requested digest",
        "a: no answer for 0 s",
    ]


def test_an_unknown_and_a_lost_node_are_not_waited_for() -> None:
    sources, item = Sources(), item_of(b"bytes", "unknown", "lost")
    sources.answers["lost"] = unresponsive
    sources.downloader.lost("lost", "its link broke")
    assert sources.run(item) == [item]
    assert item.problems == ["unknown: its address is unknown", "lost: its link broke"]


def test_a_late_answer_of_a_source_that_was_given_up_is_not_written() -> None:
    sources, item = Sources(), item_of(b"bytes", "a", "b")
    late: list[int] = []
    sources.answers["a"] = lambda number, index, item: late.append(number)

    def answer(number: int, index: int, item: DownloadItem) -> None:
        sources.give(b"bytes")(number, index, item)
        sources.give(b"LATE!")(late[0], 0, item)

    sources.answers["b"] = answer
    assert sources.run(item) == []
    assert bytes(item.views[0]) == b"bytes"


def test_one_request_names_several_pieces_and_one_block() -> None:
    sources = Sources()
    sources.answers["a"] = sources.give(b"bytes")
    pieces = [item_of(b"bytes", "a") for _ in range(17)]
    blocks = [item_of(b"bytes", "a", kind=BLOCK) for _ in range(2)]
    assert sources.run(*pieces[:2], *blocks, *pieces[2:]) == []
    assert sources.asked == [("a", 2), ("a", 1), ("a", 1), ("a", 15)]


def test_the_bytes_requested_of_one_source_at_a_time_are_bounded() -> None:
    sources, owed, most = Sources(), [0], [0]
    waiting: list[tuple[int, int, bytes]] = []
    raws = [bytes([at]) * (WINDOW_BYTES // 4) for at in range(9)]

    def answer(number: int, index: int, item: DownloadItem) -> None:
        owed[0] += item.num_bytes
        most[0] = max(most[0], owed[0])
        waiting.append((number, index, raws[by_key[item.key]]))

    by_key = {xxhash.xxh3_64_intdigest(raw): at for at, raw in enumerate(raws)}
    sources.answers["a"] = answer
    items = [item_of(raw, "a", kind=BLOCK) for raw in raws]
    steps = sources.downloader.steps(items)
    wait: Wait | None = next(steps)
    while wait is not None:
        number, index, raw = waiting.pop(0)
        owed[0] -= len(raw)
        sources.give(raw)(number, index, items[0])
        with contextlib.suppress(StopIteration):
            wait = steps.send(wait.events.get())
            continue
        wait = None
    assert sources.downloader.num_bytes == sum(map(len, raws))
    assert most[0] == WINDOW_BYTES


def test_a_cancelled_download_ends_and_takes_no_more_answers() -> None:
    sources, item = Sources(), item_of(b"bytes", "a")
    numbers: list[int] = []

    def answer(number: int, index: int, item: DownloadItem) -> None:
        numbers.append(number)
        sources.downloader.cancel()

    sources.answers["a"] = answer
    assert sources.run(item) == []
    sources.give(b"LATE!")(numbers[0], 0, item)
    assert bytes(item.views[0]) == bytes(5)
