"""Several nodes write one checkpoint without a leader.

Real SMP processes, two or three on this machine, hold some ranks of a world of four each, and share
a directory. The test acts as their agents and workers.
"""

import contextlib
import gc
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import xxhash

from ftrun.errors import PeerError
from ftrun.ids import Version, version
from ftrun.smp.checkpoint.index import file_sizes, parse_index
from ftrun.smp.checkpoint.storage.local import LOCK_NAME
from ftrun.snapshot.layout import CopyTiming, Layout, LayoutEntry, make_layout
from ftrun.wire.messages import checkpoint as checkpoint_messages
from ftrun.wire.messages import envelope as messages
from ftrun.wire.messages import smp as smp_messages
from ftrun.wire.messages import worker as worker_messages
from ftrun.wire.messages.checkpoint import INDEX_NAME
from ftrun.wire.shared_memory.arena import Arena, SlotHeader, SlotState, table_digest, verify
from ftrun.wire.shared_memory.pages import create_command_page
from ftrun.wire.transport.channel import Channel, connect
from tests.integration.test_smp import CHECKPOINT_POINTS

RUN_ID = "test-run"
TIMEOUT_S = 60.0
WORLD = 4
FIRST = version(0, 1)


def wait_until(claim: Callable[[], bool], what: str) -> None:
    """Bounded wait on a condition that another process makes true."""
    end = time.monotonic() + TIMEOUT_S
    while not claim():
        assert time.monotonic() < end, f"not within {TIMEOUT_S} s: {what}"
        select.select([], [], [], 0.002)


def layout_of(rank: int) -> Layout:
    return make_layout(
        [LayoutEntry("weight", "F32", (150_000 + rank,), CopyTiming.LAZY)], plain_bytes=10
    )


def image_of(rank: int, at: Version, salt: str = "") -> bytes:
    """Bytes that differ for each rank, version and generation."""
    layout = layout_of(rank)
    seed = xxhash.xxh3_128_digest(f"{rank} {at} {salt}".encode())
    return layout.header + (seed * (layout.data_bytes // len(seed) + 1))[: layout.data_bytes]


@dataclass
class Node:
    """The SMP processes of one node in sequence, its agent, and the arenas of its ranks."""

    name: str
    ranks: list[int]
    folder: Path
    run_id: str = RUN_ID
    process: subprocess.Popen[bytes] | None = None
    agent: Channel | None = None
    arenas: dict[int, int] = field(default_factory=dict)
    granted: dict[int, int] = field(default_factory=dict)
    channels: list[Channel] = field(default_factory=list)
    page_fd: int = -1
    starts: int = 0

    def start(self, *, crash_at: str = "", count: str = "") -> None:
        """Start a new SMP; it gets the existing arenas, as from its agent."""
        self.starts += 1
        path = self.folder / f"{self.name}-{self.starts}.sock"
        command = [sys.executable, "-m", "ftrun.smp", "--run-id", self.run_id]
        with (self.folder / f"{self.name}-{self.starts}.log").open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--socket", str(path), "--orphan-s", "600"],
                env={**os.environ, "FTRUN_CRASH_AT": crash_at, "FTRUN_CRASH_COUNT": count},
                stderr=log,
            )
        wait_until(path.exists, f"{self.name} listens")
        self.agent = self.connect("agent")
        if self.arenas:
            fds = [self.arenas[rank] for rank in sorted(self.arenas)]
            assert self.ask(smp_messages.AdoptMemory(sorted(self.arenas)), *fds) == messages.Done()

    def connect(self, role: str, rank: int = -1) -> Channel:
        channel = connect(
            self.folder / f"{self.name}-{self.starts}.sock",
            run_id=self.run_id,
            peer=f"the SMP of {self.name}",
            hello=messages.Hello(role=role, pid=os.getpid(), rank=rank),
            deadline_s=TIMEOUT_S,
        )
        self.channels.append(channel)
        return channel

    def begin(self, generation: int = 0, world_size: int = WORLD) -> None:
        if self.page_fd < 0:
            self.page_fd = create_command_page()
        body = smp_messages.BeginGeneration(generation, world_size, self.ranks)
        assert self.ask(body, self.page_fd) == messages.Done()

    def ask(self, body: messages.AnyMessage, *fds: int) -> messages.AnyMessage:
        self.send(body, *fds)
        return self.answer()

    def send(self, body: messages.AnyMessage, *fds: int) -> None:
        assert self.agent is not None
        self.agent.send(body, fds=fds, deadline_s=TIMEOUT_S)

    def answer(self) -> messages.AnyMessage:
        assert self.agent is not None
        while True:
            received = self.agent.receive(deadline_s=TIMEOUT_S)
            if not isinstance(
                received.body,
                worker_messages.ArenaGranted
                | smp_messages.MemoryNeeded
                | smp_messages.VersionCommitted,
            ):
                assert not received.fds
                return received.body
            for fd in received.fds:
                assert isinstance(received.body, worker_messages.ArenaGranted)
                if received.body.rank in self.granted:
                    os.close(self.granted[received.body.rank])
                self.granted[received.body.rank] = fd

    def make_arenas(self) -> None:
        for rank in self.ranks:
            layout = layout_of(rank)
            body = worker_messages.RequestArena(
                rank, WORLD, layout.image_bytes, len(layout.pieces), 9 + rank
            )
            got = self.connect("worker", rank).ask(body, deadline_s=TIMEOUT_S)
            assert isinstance(got.body, worker_messages.ArenaGranted)
            (self.arenas[rank],) = got.fds

    def seal(self, at: Version, *, slot: int = 0, salt: str = "") -> None:
        for rank in self.ranks:
            layout = layout_of(rank)
            arena = Arena(self.arenas[rank], writable=True)
            image = image_of(rank, at, salt)
            arena.image(slot)[:] = image
            table = arena.table(slot)
            for index, piece in enumerate(layout.pieces):
                begin = len(layout.header) + piece.offset
                table[index] = xxhash.xxh3_64_intdigest(image[begin : begin + piece.num_bytes])
            digest = table_digest(table)
            del table
            header = SlotHeader(
                SlotState.SEALED, at.generation, at.step, len(image), digest, at.step
            )
            arena.write_header(slot, header)
            arena.close()

    def ready(self, at: Version = FIRST, *, crash_at: str = "", count: str = "") -> None:
        """Up, with the arenas of its ranks sealed at this version."""
        self.start(crash_at=crash_at, count=count)
        self.begin()
        if not self.arenas:
            self.make_arenas()
        self.seal(at)

    def write(
        self, directory: Path | str, at: Version = FIRST, *, keep: int = 2
    ) -> messages.AnyMessage:
        return self.ask(order(directory, at, keep=keep))

    def load(self, directory: Path | str) -> messages.AnyMessage:
        return self.ask(checkpoint_messages.LoadCheckpoint(str(directory), WORLD, self.ranks))

    def kill(self) -> None:
        """Kill the SMP alone; its arenas stay with its agent, which is the test."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            self.process.wait(TIMEOUT_S)
        for channel in self.channels:
            channel.close()
        self.channels.clear()
        self.agent = None

    def lose(self) -> None:
        """Kill the whole node, with its memory."""
        self.kill()
        for fd in (*self.arenas.values(), *self.granted.values(), self.page_fd):
            if fd >= 0:
                os.close(fd)
        self.arenas, self.granted, self.page_fd = {}, {}, -1


Make = Callable[..., Node]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    gc.collect()  # what other tests have left is not counted
    before = len(os.listdir("/proc/self/fd"))
    numbers = itertools.count()
    with contextlib.ExitStack() as ends:  # all of them, also if one does not end as it should

        def made(*ranks: int, run_id: str = RUN_ID) -> Node:
            node = Node(f"node{next(numbers)}", list(ranks), tmp_path, run_id)
            ends.callback(node.lose)
            return node

        yield made
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def order(
    directory: Path | str, at: Version, *, keep: int = 2, token: str = "", wait_s: float = 0.0
) -> checkpoint_messages.WriteCheckpoint:
    return checkpoint_messages.WriteCheckpoint(
        str(directory), keep, (at.generation, at.step), token, share_timeout_s=wait_s
    )


def finished(answer: messages.AnyMessage) -> Path:
    assert isinstance(answer, checkpoint_messages.CheckpointWritten), answer
    assert not answer.is_part, answer
    assert answer.missing_ranks == []
    return Path(answer.path.removeprefix("file://"))


def part(answer: messages.AnyMessage) -> checkpoint_messages.CheckpointWritten:
    assert isinstance(answer, checkpoint_messages.CheckpointWritten), answer
    assert answer.is_part
    assert answer.path == ""
    return answer


def refused(answer: messages.AnyMessage) -> str:
    assert isinstance(answer, checkpoint_messages.CheckpointFailed), answer
    return answer.reason


def listing(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != LOCK_NAME)


def check_files(path: Path, at: Version = FIRST, salt: str = "") -> None:
    """It is whole, `latest` points to it, and the directory contains nothing else."""
    index = parse_index((path / INDEX_NAME).read_bytes(), what="it")
    assert [shard.rank for shard in index.shards] == list(range(WORLD))
    assert (index.run_id, index.step, index.world_size) == (RUN_ID, at.step, WORLD)
    for shard in index.shards:
        assert (path / shard.file).read_bytes() == image_of(shard.rank, at, salt)
    names = {name for shard in index.shards for name in shard.names}
    left = set(os.listdir(path)) - names
    latest = path.parent / "latest"
    if latest.is_symlink():
        assert left == {"index.json"}
        assert latest.resolve() == path
    else:  # at a URL
        assert {name for name in left if not name.startswith("part-")} == {"index.json"}
        assert latest.read_text().strip() == path.name


def check_loaded(node: Node, answer: messages.AnyMessage, at: Version = FIRST) -> None:
    """The node has its own ranks in memory, byte for byte."""
    assert isinstance(answer, checkpoint_messages.CheckpointLoaded), answer
    assert (answer.generation, answer.step) == (-1, at.step)
    for rank in node.ranks:
        check_arena(node.granted[rank], rank, at)


def check_arena(fd: int, rank: int, at: Version) -> None:
    arena = Arena(fd, writable=False)
    try:
        slot = arena.find(version(-1, at.step))
        assert slot is not None
        verify(arena, slot, what="test")[1].release()
        assert bytes(arena.image(slot)) == image_of(rank, at)
    finally:
        arena.close()


@pytest.mark.parametrize("groups", [[[0, 1], [2, 3]], [[0, 3], [1], [2]]])
def test_nodes_that_write_at_once_make_one_checkpoint(
    make: Make, directory: Path, groups: list[list[int]]
) -> None:
    nodes = [make(*ranks) for ranks in groups]
    for node in nodes:
        node.ready()
    for step in (1, 2, 3):
        at = version(0, step)
        for node in nodes:
            node.seal(at, slot=step % 2)
        for node in nodes:
            node.send(order(directory, at))
        answers = [node.answer() for node in nodes]
        paths = {finished(one) for one in answers if not getattr(one, "is_part", True)}
        assert len(paths) == 1, answers
        check_files(paths.pop(), at)
    assert listing(directory) == ["latest", "step-00000002-g0", "step-00000003-g0"]
    newest = directory / "step-00000003-g0"
    for node in nodes:
        assert finished(node.write(directory, version(0, 3))) == newest, "asked again"

    for node in nodes:
        node.lose()
        node.start()
        check_loaded(node, node.load(directory), version(0, 3))
        node.begin()
        again = finished(node.write(directory, version(-1, 3)))
        assert again == newest, "what was loaded is not written again"


def test_the_last_to_come_finishes_and_the_others_report_missing_nodes(
    make: Make, directory: Path
) -> None:
    first, second = make(0, 1), make(2, 3)
    first.ready()
    second.ready()
    answer = part(first.write(directory))
    assert answer.missing_ranks == [2, 3]
    assert answer.note == ""
    assert answer.total_bytes == sum(layout_of(rank).image_bytes for rank in (0, 1))
    assert part(first.write(directory)).total_bytes == 0, "nothing is written twice"
    path = finished(second.write(directory))
    check_files(path)
    assert listing(directory) == ["latest", "step-00000001-g0"]


def test_an_overwritten_version_is_refused_but_a_part_that_is_there_counts(
    make: Make, directory: Path
) -> None:
    first, second = make(0, 1), make(2, 3)
    first.ready()
    second.ready()
    part(first.write(directory))
    for slot in (0, 1):
        first.seal(version(0, 5 + slot), slot=slot)
        second.seal(version(0, 5 + slot), slot=slot)
    assert part(first.write(directory)).missing_ranks == [2, 3]
    assert "overwritten" in refused(second.write(directory))
    assert part(second.write(directory, version(0, 6))).missing_ranks == [0, 1]
    path = finished(first.write(directory, version(0, 6)))
    check_files(path, version(0, 6))
    assert listing(directory) == ["latest", path.name], "what cannot be finished is swept"


def test_without_a_version_all_ranks_must_be_here(make: Make, directory: Path) -> None:
    node = make(0, 1)
    node.ready()
    assert "not all ranks" in refused(
        node.ask(checkpoint_messages.WriteCheckpoint(str(directory), 1))
    )
    assert not directory.exists()
    spare = make()
    spare.start()
    spare.begin()
    assert "no ranks" in refused(spare.write(directory))


def test_unshared_directories_are_noticed_and_do_not_fill_up(make: Make, tmp_path: Path) -> None:
    first, second = make(0, 1), make(2, 3)
    first.ready()
    second.ready()
    for step in (1, 2, 3, 4):
        at = version(0, step)
        for node in (first, second):
            node.seal(at, slot=step % 2)
            answer = part(node.write(tmp_path / node.name, at))
            others = "2, 3" if node is first else "0, 1"
            if step == 1:
                assert answer.note == ""
            else:
                assert f"ranks {others} have written no part" in answer.note
                assert str(tmp_path / node.name) in answer.note
    for node in (first, second):
        assert len(listing(tmp_path / node.name)) == 2, "this version's and the one before"


def test_what_others_have_left_is_neither_used_nor_in_the_way(make: Make, directory: Path) -> None:
    unknown_peer = make(2, 3, run_id="another-run")
    unknown_peer.ready()
    part(unknown_peer.write(directory))
    first, second = make(0, 1), make(2, 3)
    first.ready()
    second.ready()
    part(second.ask(order(directory, FIRST, token="another life")))
    theirs = set(listing(directory))
    assert part(first.write(directory)).missing_ranks == [2, 3]
    (ours,) = set(listing(directory)) - theirs
    foreign = next(directory.glob(".tmp-*/part-00002.json"))
    for name in ("part-00002.json", "rank-00002.safetensors", "rank-00002.digests"):
        shutil.copy(foreign.parent / name, directory / ours / name)
    answer = part(first.write(directory))
    assert answer.missing_ranks == [2, 3]
    assert "is ignored" in answer.note
    path = finished(second.write(directory))
    check_files(path)
    left = set(listing(directory)) - {"latest", path.name}
    assert len(left) == 1, "the other run's may be at work, the other life's is over"
    os.utime(directory / left.pop(), (1, 1))
    first.seal(version(0, 2), slot=1)
    part(first.write(directory, version(0, 2)))
    assert len(listing(directory)) == 3, "files without a change for long are swept"


@pytest.mark.parametrize(
    "damage", ["cut part", "cut file", "missing file", "other version", "rank too high"]
)
def test_a_damaged_part_does_not_count_and_is_written_again(
    make: Make, directory: Path, damage: str
) -> None:
    first, second = make(0, 1), make(2, 3)
    first.ready()
    second.ready()
    part(first.write(directory))
    (folder,) = directory.glob(".tmp-step-*")
    path = folder / "part-00000.json"
    if damage == "cut part":
        os.truncate(path, 50)
    elif damage == "cut file":
        os.truncate(folder / "rank-00001.safetensors", 50)
    elif damage == "missing file":
        (folder / "rank-00001.digests").unlink()
    else:
        old, new = ('"step": 1', '"step": 7') if damage == "other version" else ("1", "9")
        text = json.loads(path.read_bytes())["index"]
        changed = json.dumps(text, indent=1).replace(old, new)
        digest = xxhash.xxh3_64_hexdigest(changed.encode())
        path.write_text(f'{{"digest":"{digest}","index":{changed}}}')
    answer = part(second.write(directory))
    assert answer.missing_ranks == [0, 1]
    assert answer.note
    check_files(finished(first.write(directory)))


def test_parts_of_an_earlier_life_are_swept_when_a_new_one_begins(
    make: Make, directory: Path
) -> None:
    first, second = make(0, 1), make(2, 3)
    first.ready()
    part(first.write(directory))
    first.lose()
    for node in (first, second):
        node.start()
        assert node.load(directory) == checkpoint_messages.CheckpointLoaded(-1, -1, "")
        node.begin()
        node.make_arenas()
        node.seal(FIRST, salt="second life")
    assert part(second.write(directory)).missing_ranks == [0, 1]
    check_files(finished(first.write(directory)), salt="second life")


def test_a_version_of_another_life_is_not_taken_for_this_one(make: Make, directory: Path) -> None:
    first, second = make(0, 1), make(2, 3)
    first.ready()
    second.ready()
    part(first.write(directory))
    finished(second.write(directory))
    for node in (first, second):
        node.seal(FIRST, salt="second life")
    part(first.write(directory))
    path = finished(second.write(directory))
    assert path.name == "step-00000001-g0.2"
    check_files(path, salt="second life")


def test_a_checkpoint_of_several_nodes_is_loaded_by_others(make: Make, directory: Path) -> None:
    first, second = make(0, 1), make(2, 3)
    first.ready()
    second.ready()
    part(first.write(directory))
    path = finished(second.write(directory))
    for ranks in ([0, 1, 2, 3], [1], [0, 2, 3]):
        node = make(*ranks)
        node.start()
        check_loaded(node, node.load(directory))
        assert sorted(node.granted) == ranks, "its own and no others"
        node.lose()

    node = make(0, 1)
    node.start()
    body = checkpoint_messages.LoadCheckpoint(str(directory), 2, node.ranks)
    assert node.ask(body) == checkpoint_messages.CheckpointLoaded(
        -1, 1, str(path), world_size=WORLD
    )
    node.begin(world_size=2)
    worker = node.connect("worker", 0)
    got = worker.ask(worker_messages.OpenShards(0, -1, 1, WORLD), deadline_s=TIMEOUT_S)
    assert got.body == worker_messages.ShardsOpened([0, 1, 2, 3])
    for rank, fd in enumerate(got.fds):
        check_arena(fd, rank, FIRST)
        os.close(fd)


def test_a_directory_that_cannot_be_read_is_named_for_the_leader(
    make: Make, directory: Path
) -> None:
    node = make(*range(WORLD))
    node.start()
    directory.symlink_to(directory)  # ELOOP
    answer = node.load(directory)
    assert isinstance(answer, checkpoint_messages.CheckpointLoaded), answer
    assert list(answer.rejected) == [str(directory)]
    assert "symbolic links" in answer.problem


def test_the_one_checkpoint_that_is_named_is_loaded(make: Make, directory: Path) -> None:
    first, second = make(0, 1), make(2, 3)
    first.ready()
    second.ready()
    for step in (1, 2):
        for node in (first, second):
            node.seal(version(0, step), slot=step % 2)
            node.write(directory, version(0, step))
    body = checkpoint_messages.LoadCheckpoint(
        str(directory), WORLD, first.ranks, only="step-00000001-g0"
    )
    check_loaded(first, first.ask(body))
    answer = first.ask(checkpoint_messages.LoadCheckpoint(str(directory), WORLD, [0], only="x"))
    assert isinstance(answer, checkpoint_messages.CheckpointLoaded)
    assert (answer.path, list(answer.rejected)) == ("", ["x"])
    assert "can be used" in answer.problem


OF_THE_FIRST = [one for one in CHECKPOINT_POINTS if one.endswith(("started", "written"))]
OF_THE_FIRST.remove("smp.checkpoint.index_written")
"""The crash points of a node that does not find all parts."""


def passed(count: Path) -> list[str]:
    """Crash points with their hit, in the order passed: `name:N`."""
    names = count.read_text().split()
    return [f"{name}:{names[: at + 1].count(name)}" for at, name in enumerate(names)]


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("scheme", "comes_last"),
    [
        pytest.param("", False, id="comes first", marks=pytest.mark.full),
        pytest.param("", True, id="comes last", marks=pytest.mark.full),
        pytest.param("file://", False, id="comes first, at a URL", marks=pytest.mark.full),
        pytest.param("file://", True, id="comes last, at a URL", marks=pytest.mark.full),
    ],
)
def test_an_smp_killed_at_any_point_writes_again_and_one_of_them_finishes(
    make: Make, tmp_path: Path, scheme: str, comes_last: bool
) -> None:
    first, second = make(0, 1), make(2, 3)
    count = tmp_path / "points"
    first.ready()
    second.ready(count=str(count))
    started = len(passed(count))
    write_two(first, second, f"{scheme}{tmp_path / 'whole'}", comes_last)
    points = [one for one in passed(count)[started:] if one.startswith("smp.checkpoint.")]
    names = {point.partition(":")[0] for point in points}
    assert names == set(CHECKPOINT_POINTS if comes_last else OF_THE_FIRST)
    for point in points:
        directory = tmp_path / point
        where = f"{scheme}{directory}"
        second.kill()
        second.ready(crash_at=point)
        with contextlib.suppress(PeerError):
            write_two(first, second, where, comes_last)
        assert second.process is not None
        assert second.process.wait(TIMEOUT_S) == -signal.SIGKILL, point
        step = 2 if list(directory.glob("step-00000001-g0*/index.json")) else 1
        second.kill()
        second.start()
        second.begin()
        for node in (first, second):
            node.seal(version(0, step), slot=step % 2)
        first.write(where, version(0, step), keep=1)
        path = finished(second.write(where, version(0, step), keep=1))
        check_files(path, version(0, step))
        assert finished(first.write(where, version(0, step), keep=1)) == path
        for node in (first, second):
            node.seal(version(0, 9))
        part(first.write(where, version(0, 9), keep=1))
        path = finished(second.write(where, version(0, 9), keep=1))
        assert listing(directory) == ["latest", path.name], point


def equal_layout(rank: int) -> Layout:
    entry = LayoutEntry("weight", "F32", (1_000_000,), CopyTiming.LAZY)
    return make_layout([entry], plain_bytes=10, metadata={"ftrun.rank": str(rank)})


def equal_image(rank: int, at: Version, salt: str = "") -> bytes:
    """Bytes that are equal on all ranks, and differ from piece to piece."""
    layout = equal_layout(rank)
    parts = (xxhash.xxh3_128_digest(f"{at} {n}".encode()) * 4096 for n in range(99))
    return layout.header + b"".join(parts)[: layout.data_bytes]


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("scheme", ["", "file://"], ids=["directory", "url"])
def test_an_smp_killed_while_it_writes_its_share_leaves_the_checkpoint_before(
    make: Make, tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "layout_of", equal_layout)
    monkeypatch.setattr(sys.modules[__name__], "image_of", equal_image)
    first, second = make(0, 1), make(2, 3)
    points = [name for name in OF_THE_FIRST if name != "smp.checkpoint.part_written"]
    for point in [*(f"{name}:1" for name in points), "smp.checkpoint.shard_written:2"]:
        directory = tmp_path / point
        where = f"{scheme}{directory}"
        for node in (first, second):
            node.kill()
            node.ready()
        path = write_at_once([first, second], where, FIRST)
        index = parse_index((path / INDEX_NAME).read_bytes(), what="it")
        stored = sum((path / name).stat().st_size for name in file_sizes(index.shards))
        images = [equal_layout(rank).image_bytes for rank in range(WORLD)]
        assert stored == sum(images) - (WORLD - 1) * 4_000_000, "no byte twice"
        second.kill()
        second.start(crash_at=point)
        second.begin()
        for node in (first, second):
            node.seal(version(0, 2), slot=1)
        for node in (first, second):
            node.send(order(where, version(0, 2), wait_s=3.0))
        assert part(first.answer()).missing_ranks == [2, 3], point
        assert second.process is not None
        assert second.process.wait(TIMEOUT_S) == -signal.SIGKILL, point
        check_whole(make, where, FIRST)
        second.kill()
        second.start()
        second.begin()
        write_at_once([first, second], where, version(0, 2))
        check_whole(make, where, version(0, 2))


def write_at_once(nodes: list[Node], where: str, at: Version) -> Path:
    for node in nodes:
        node.send(order(where, at, wait_s=TIMEOUT_S))
    answers = [node.answer() for node in nodes]
    (path,) = {finished(one) for one in answers if not getattr(one, "is_part", True)}
    return path


def check_whole(make: Make, where: str, at: Version) -> None:
    """All ranks come back bit for bit."""
    node = make(*range(WORLD))
    node.start()
    check_loaded(node, node.load(where), at)
    node.lose()


def write_two(first: Node, second: Node, where: str, comes_last: bool) -> None:
    """Write two versions; the second finished one prunes the first."""
    nodes = (first, second) if comes_last else (second, first)
    for step in (1, 2):
        for node in nodes:
            node.seal(version(0, step), slot=step % 2)
            node.write(where, version(0, step), keep=1)
