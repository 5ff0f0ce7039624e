"""A version is restored bit by bit in another number of ranks, and training continues from it.

Real ranks with gloo, forked by one warm process, run against a real SMP; the test acts as the agent
of their node. It compares the whole state of the ranks at the restore point with the state of the
ranks of the next generation after `attach`.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler

from ftrun import clock
from ftrun.config.profile import SnapshotConfig
from ftrun.ids import RunId, Version, version
from ftrun.wire.messages import envelope as messages
from ftrun.wire.messages import smp as smp_messages
from ftrun.wire.messages import worker as worker_messages
from ftrun.wire.shared_memory.arena import Arena, open_slot, read_shape, void_slots
from ftrun.wire.shared_memory.pages import (
    CommandField,
    HeartbeatField,
    SharedPage,
    create_command_page,
    create_page,
)
from ftrun.wire.transport.channel import ReceivedMessage, connect
from tests.integration.conftest import in_full
from tests.launch_requests import launch_request, launch_variables

RUN = RunId("resized")
SCRIPT = Path(__file__).parent / "scripts" / "resizable_training.py"
MOST_RANKS = 4
MOST_GENERATIONS = 8
TIMEOUT_S = 90.0
TIED = "model.gain and model.scale are one tensor here, and the old ranks saved"


def wait_until(claim: Callable[[], bool], what: str) -> None:
    end_s = clock.now_s() + TIMEOUT_S
    while not claim():
        assert clock.now_s() < end_s, f"not within {TIMEOUT_S} s: {what}"
        select.select([], [], [], 0.002)


class Node:
    """The agent of one node: an SMP, a warm process, one generation after the other.

    Args:
        first: words between the interpreter and the script.
    """

    def __init__(
        self, folder: Path, kind: str, ends: contextlib.ExitStack, first: Sequence[str] = ()
    ) -> None:
        self.folder = folder
        self.kind = kind
        self.socket = folder / "smp.sock"
        self.smp = ends.enter_context(
            process(
                *(sys.executable, "-m", "ftrun.smp", "--run-id", RUN),
                *("--socket", str(self.socket), "--orphan-s", "60"),
            )
        )
        self.commands = [create_command_page() for _ in range(MOST_GENERATIONS)]
        self.heartbeats = [create_page("beat") for _ in range(MOST_GENERATIONS * MOST_RANKS)]
        for fd in (*self.commands, *self.heartbeats):
            ends.callback(os.close, fd)
        errors = ends.enter_context((folder / "ranks.err").open("wb"))
        self.warm = ends.enter_context(
            process(
                *(sys.executable, "-u", *first, str(SCRIPT), str(folder)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                pass_fds=[*self.commands, *self.heartbeats],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                text=True,
            )
        )
        wait_until(self.socket.exists, "the SMP listens")
        hello = messages.Hello(role="agent", pid=os.getpid())
        self.agent = connect(
            self.socket, run_id=RUN, peer="the SMP", hello=hello, deadline_s=TIMEOUT_S
        )
        ends.callback(self.agent.close)
        self.generation = -1
        self.world_size = 0
        self.newest: Version | None = None
        assert self.answer() == "ready", self.log()

    def answer(self) -> Any:
        assert self.warm.stdout is not None
        assert select.select([self.warm.stdout], [], [], TIMEOUT_S)[0], self.log()
        return json.loads(self.warm.stdout.readline() or "null")

    def log(self) -> str:
        return (self.folder / "ranks.err").read_text()

    def run(self, world_size: int, steps: int, **extra: object) -> list[int]:
        """Run one generation to this step; exit statuses by rank."""
        before, previous_size = self.newest, self.world_size
        self.generation += 1
        if before is not None:
            self.ask(smp_messages.VoidAfter(before.generation, before.step))
        ranks = list(range(world_size))
        body = smp_messages.BeginGeneration(
            self.generation,
            world_size,
            ranks,
            restored=(before.generation, before.step) if before is not None else None,
            restored_world_size=previous_size,
        )
        self.ask(body, self.commands[self.generation])
        command_fd = self.commands[self.generation]
        requests = [
            launch_request(
                generation=self.generation,
                rank=rank,
                world_size=world_size,
                smp_socket=str(self.socket),
                restore=before,
                restore_world_size=previous_size if before is not None else 0,
                snapshot=SnapshotConfig(every=1, commit_timeout_s=60),
                descriptors={"heartbeat": self.heartbeat_fd(rank), "command": command_fd},
            )
            for rank in ranks
        ]
        order = {
            "generation": self.generation,
            "kind": self.kind,
            "steps": steps,
            "variables": [launch_variables(RUN, request) for request in requests],
            **extra,
        }
        assert self.warm.stdin is not None
        self.warm.stdin.write(json.dumps(order) + "\n")
        self.warm.stdin.flush()
        statuses: list[int] = self.answer()
        if not any(statuses):
            self.world_size = world_size
            # Both words: the step is published before its generation.
            newest = version(self.generation, steps)
            wait_until(lambda: self.shown() == newest, f"step {steps} is committed")
            self.newest = newest
        return statuses

    def heartbeat_fd(self, rank: int) -> int:
        return self.heartbeats[self.generation * MOST_RANKS + rank]

    def heartbeat(self, rank: int) -> SharedPage:
        return SharedPage(self.heartbeat_fd(rank))

    def shown(self) -> Version:
        page = SharedPage(self.commands[self.generation])
        return version(
            page.get(CommandField.COMMITTED_GENERATION), page.get(CommandField.COMMITTED_STEP)
        )

    def ask(self, body: messages.AnyMessage, *fds: int) -> ReceivedMessage:
        """Ask the SMP; other messages are ignored."""
        self.agent.send(body, fds=fds, deadline_s=TIMEOUT_S)
        while True:
            received = self.agent.receive(deadline_s=TIMEOUT_S)
            if isinstance(
                received.body,
                worker_messages.ArenaGranted
                | smp_messages.MemoryNeeded
                | smp_messages.VersionCommitted
                | smp_messages.RestoreReady,
            ):
                for fd in received.fds:
                    os.close(fd)
                continue
            return received

    def arenas(self) -> list[tuple[int, int, int]]:
        """Descriptor, rank and world size of each arena that the SMP holds."""
        shapes = [(fd, read_shape(fd)) for fd in self.ask(smp_messages.HandOverMemory()).fds]
        return [(fd, shape.rank, shape.world_size) for fd, shape in shapes]

    def sizes(self) -> list[tuple[int, int]]:
        """World size and rank of each arena that the SMP holds."""
        found = self.arenas()
        for fd, _, _ in found:
            os.close(fd)
        return sorted((world_size, rank) for _, rank, world_size in found)

    def saved(self, what: str, rank: int) -> Any:
        path = self.folder / f"{what}.{self.generation}.{rank}.pt"
        return torch.load(path, weights_only=False)


@contextlib.contextmanager
def process(*argv: str, **options: Any) -> Iterator[Any]:
    """A process that ends with the block."""
    with subprocess.Popen(argv, **options) as started:
        try:
            yield started
        finally:
            started.kill()


@pytest.fixture
def node(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Node]:
    with contextlib.ExitStack() as ends:
        yield Node(tmp_path, getattr(request, "param", "ddp"), ends)


def assert_same(found: object, expected: object, path: str = "") -> None:
    """Equal to the last bit, dtypes included."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor), path
        assert found.dtype == expected.dtype, path
        assert torch.equal(found, expected), path
    elif isinstance(expected, dict):
        assert isinstance(found, dict), path
        assert found.keys() == expected.keys(), path
        for key, value in expected.items():
            assert_same(found[key], value, f"{path}.{key}")
    elif isinstance(expected, list):
        assert isinstance(found, list), path
        assert len(found) == len(expected), path
        for at, value in enumerate(expected):
            assert_same(found[at], value, f"{path}[{at}]")
    else:
        assert found == expected, path


COMMON = ("step", "parameters", "optimizer", "groups", "scheduler")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("node", ["fsdp", *in_full("ddp")], indirect=True)
def test_every_bit_comes_back_in_another_number_of_ranks(node: Node) -> None:
    mask = node.kind == "fsdp"
    assert node.run(4, 3, mask=mask) == [0] * 4, node.log()
    steps = 3
    for size in (3, 4, 2, 1, 2):
        previous_size = node.world_size
        ends = [node.saved("end", rank) for rank in range(previous_size)]
        used = [node.saved("seen", rank) for rank in range(previous_size)]
        steps += 2
        assert node.run(size, steps, mask=mask) == [0] * size, node.log()
        for rank in range(size):
            restored = node.saved("restored", rank)
            old = ends[rank % previous_size]
            for what in COMMON:
                assert_same(restored[what], ends[0][what], what)
            for what in ("buffers", "average", "training"):
                assert_same(restored[what], old[what], what)
            if rank < previous_size:
                assert_same(restored["random"], old["random"], "random")
            else:
                assert not torch.equal(restored["random"][1], old["random"][1])
            assert node.saved("end", rank)["step"] == steps
            seen_before = {index for indices in used for index in indices}
            assert not seen_before & set(node.saved("seen", rank))
        assert node.sizes() == [(size, rank) for rank in range(size)]
        before, after = ends[0]["parameters"], node.saved("end", 0)["parameters"]
        assert not torch.equal(before["wide.weight"], after["wide.weight"])
    assert node.log().count("not bitwise") == 5


def test_old_shards_stay_until_the_new_world_has_committed(node: Node) -> None:
    assert node.run(4, 2) == [0] * 4, node.log()
    old = [(4, rank) for rank in range(4)]
    assert any(node.run(3, 4, dies="restored"))
    assert node.sizes() == old
    assert any(node.run(3, 4, dies="before its seal"))
    assert node.shown() == version(-1, -1)
    assert set(node.sizes()) >= {*old, (3, 0)}
    assert node.run(3, 4) == [0] * 3, node.log()
    assert node.sizes() == [(3, rank) for rank in range(3)]


@pytest.mark.full
@pytest.mark.parametrize("node", ["hsdp"], indirect=True)
def test_shards_that_are_replicated_too_come_back_in_another_layout(node: Node) -> None:
    assert node.run(4, 2) == [0] * 4, node.log()
    for kind, size in (("fsdp", 3), ("ddp", 2), ("hsdp", 4), ("plain", 1)):
        expected = node.saved("end", 0)
        assert node.newest is not None
        assert node.run(size, node.newest.step + 1, kind=kind) == [0] * size, node.log()
        for what in COMMON:
            assert_same(node.saved("restored", 0)[what], expected[what], f"{kind}: {what}")


def assert_all_restored(node: Node, ends: list[Any], *more: str) -> None:
    """Every rank has its part of the joint state of all ranks at the restore point."""
    whole = {
        what: {name: value for end in ends for name, value in end[what].items()}
        for what in ("parameters", "optimizer", *more)
    }
    for rank in range(node.world_size):
        found = node.saved("restored", rank)
        assert found["step"] == ends[0]["step"]
        assert found["parameters"]
        for what, every in whole.items():
            assert_same(found[what], {name: every[name] for name in found[what]}, f"{rank}: {what}")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "kinds",
    [
        [("tp", 2), ("plain", 1)],
        pytest.param(
            [("tp", 2), ("plain", 1), ("fsdp+tp", 4), ("fsdp", 3), ("tp", 3)],
            marks=pytest.mark.full,
        ),
        pytest.param([("fsdp", 4), ("fsdp+tp", 4), ("tp", 4), ("ddp", 4)], marks=pytest.mark.full),
        pytest.param([("ddp", 2), ("fsdp", 2), ("tp", 2), ("ddp", 2)], marks=pytest.mark.full),
    ],
    ids=lambda kinds: ", ".join(f"{kind} {size}" for kind, size in kinds),
)
def test_every_bit_comes_back_in_any_other_layout(node: Node, kinds: list[tuple[str, int]]) -> None:
    """Torch's own tensor parallelism, with FSDP2 across it, and without."""
    steps = 2
    ends: list[Any] = []
    for kind, size in kinds:
        tensor = {"tp": size, "fsdp+tp": 2}.get(kind, 1)
        mesh = {"dp": size // tensor, "tp": tensor}
        assert node.run(size, steps, kind=kind, mesh=mesh) == [0] * size, node.log()
        if ends:
            assert_all_restored(node, ends)
            for what in COMMON:
                assert_same(node.saved("restored", 0)[what], ends[0][what], f"{kind}: {what}")
        ends = [node.saved("end", rank) for rank in range(size)]
        steps += 1


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.full
@pytest.mark.parametrize("splits", [[[2, 1], [1, 1, 1]], [[2, 1], [1, 2], [1, 1, 1], [3]]], ids=str)
def test_stages_of_a_pipeline_come_back_split_otherwise(
    node: Node, splits: list[list[int]]
) -> None:
    """Torch's own pipeline; each stage has some of three blocks, under the names of the model."""
    steps = 2
    for split in splits:
        ends = [node.saved("end", rank) for rank in range(node.world_size)]
        size = len(split)
        assert node.run(size, steps, kind="pp", split=split, tied=True) == [0] * size, node.log()
        assert TIED not in node.log() or size == 1
        if ends and size == 1:  # one tensor under two names has the value of the trained stage
            ends[0]["parameters"]["gain"] = ends[-1]["parameters"]["scale"]
        if ends:
            assert_all_restored(node, ends, "training")
        steps += 1
    assert any(node.run(1, steps, kind="pp", split=[2], tied=True))
    assert "model.last.weight was saved as F32[3, 2501] and is nothing now" in error_of(node, 0)
    if len(splits[-1]) > 1:  # the stages have trained their copies of a tensor that is one now
        assert any(node.run(1, steps, kind="pp", split=[3], tied=True, strict=True))
        refused = error_of(node, 0)
        assert f"{TIED} different values of them: model.scale is used" in refused
        assert "dicts.mine.rank is 0 on old rank 0 and 1 on another rank" in refused
    assert node.run(1, steps, kind="pp", split=[3], tied=True) == [0], node.log()
    assert (TIED in node.log()) == (len(splits[-1]) > 1)


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_mesh_reports_which_ranks_continue_with_the_same_data(node: Node) -> None:
    """Every sample once, in the order of the sampler, whatever the tensor-parallel size."""
    order = list(DistributedSampler(range(96), 1, 0, seed=3))
    steps = used = 0
    for data, tensor, more in ((1, 2, 4), (2, 2, 2), (4, 1, 1), (1, 4, 3)):
        steps += more
        kind = "fsdp" if tensor == 1 else "tp" if data == 1 else "fsdp+tp"
        size = data * tensor
        mesh = {"dp": data, "tp": tensor}
        assert node.run(size, steps, kind=kind, mesh=mesh) == [0] * size, node.log()
        seen = [node.saved("seen", rank) for rank in range(size)]
        assert all(seen[rank] == seen[rank // tensor * tensor] for rank in range(size))
        now = {index for indices in seen for index in indices}
        assert now == set(order[used : used + len(now)])
        assert len(now) == more * 2 * data
        used += len(now)
        log = node.log()
    assert "batch is skipped" not in log
    assert "batches are skipped" not in log


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.timeout(900)
def test_one_stage_becomes_two_where_the_mesh_declares_it(node: Node) -> None:
    assert node.run(1, 2, kind="pp", split=[3], mesh={"pp": 1}) == [0], node.log()
    ends = [node.saved("end", 0)]
    assert any(node.run(2, 3, kind="pp", split=[1, 2]))
    assert error_of(node, 0).startswith("ShapeChanged")
    for steps, split in enumerate(([1, 2], [1, 1, 1]), start=3):
        size = len(split)
        more = {"split": split, "mesh": {"pp": size}}
        assert node.run(size, steps, kind="pp", **more) == [0] * size, node.log()
        assert_all_restored(node, ends)
        ends = [node.saved("end", rank) for rank in range(size)]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "sizes",
    [[(2, "fsdp"), (1, "plain")], *in_full([(2, "ddp"), (2, "ddp")])],
    ids=["resized", "the same"],
)
def test_what_was_saved_in_another_dtype_is_rounded_where_the_script_asks(
    node: Node, sizes: list[tuple[int, str]]
) -> None:
    (size, kind), (now, kind_now) = sizes
    assert node.run(size, 2, kind=kind) == [0] * size, node.log()
    before = node.saved("end", 0)
    assert any(node.run(now, 3, kind=kind_now, half=True))
    assert error_of(node, 0).startswith("ShapeChanged: ")
    assert "wide.weight was saved as F32[2501, 37] and is BF16[2501, 37] now" in error_of(node, 0)
    assert node.run(now, 3, kind=kind_now, half=True, cast=True) == [0] * now, node.log()

    def rounded(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [rounded(name, one) for one in value]
        if isinstance(value, dict):
            return {key: rounded(name, one) for key, one in value.items()}
        # A value of another dtype than the parameter keeps it.
        is_rounded = name.startswith("wide.") and getattr(value, "dtype", None) == torch.float32
        return value.bfloat16() if is_rounded else value

    after = node.saved("restored", 0)
    parameters = {name: rounded(name, t) for name, t in before["parameters"].items()}
    assert_same(after["parameters"], parameters)
    optimizer = {
        name: {key: t if key == "step" else rounded(name, t) for key, t in state.items()}
        for name, state in before["optimizer"].items()
    }
    assert_same(after["optimizer"], optimizer)


def error_of(node: Node, rank: int) -> str:
    return (node.folder / f"error.{node.generation}.{rank}").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[2, 1], *in_full([1, 1])], ids=["resized", "the same"])
@pytest.mark.parametrize("node", ["plain"], indirect=True)
def test_tensors_of_another_model_are_listed(node: Node, sizes: list[int]) -> None:
    kind = "plain" if sizes[0] == 1 else "fsdp"
    assert node.run(sizes[0], 2, kind=kind) == [0] * sizes[0], node.log()
    assert all(node.run(sizes[1], 3, more=12))
    reported = error_of(node, 0)
    assert reported.startswith("ShapeChanged: 12 saved values do not fit:")
    assert "model.new9 was saved as nothing and is F32[10] now" in reported
    assert "new10" not in reported
    assert "- and 2 more" in reported


def flip_a_bit(node: Node, of_rank: int) -> None:
    """In a parameter's or an optimizer's bytes in the newest committed version."""
    assert node.newest is not None
    for fd, rank, _ in node.arenas():
        arena = Arena(fd, writable=True)
        slot = arena.find(node.newest)
        assert slot is not None
        if rank == of_rank:
            layout, _, _ = open_slot(arena, slot, what="test")
            tensors = [one for one in layout.entries if not one.name.startswith("ftrun.")]
            largest = max(tensors, key=lambda one: one.num_bytes)
            arena.image(slot)[len(layout.header) + largest.offset + 100] ^= 1
        arena.close()
        os.close(fd)


@pytest.mark.parametrize("node", ["fsdp"], indirect=True)
def test_a_corrupt_shard_of_another_rank_is_never_loaded_and_is_reported(node: Node) -> None:
    assert node.run(2, 2) == [0, 0], node.log()
    flip_a_bit(node, of_rank=1)
    assert any(node.run(3, 4))
    reported = [node.heartbeat(rank).get(HeartbeatField.CORRUPT_RANK) for rank in range(3)]
    assert reported[1] == 2
    assert set(reported) <= {0, 2}
    assert node.heartbeat(1).get(HeartbeatField.CORRUPT_SLOT)
    assert "digest" in node.heartbeat(1).note
    assert error_of(node, 1).startswith("SnapshotCorrupt")


def test_a_replica_replaces_a_corrupt_one(node: Node) -> None:
    assert node.run(2, 2) == [0, 0], node.log()
    expected = node.saved("end", 0)
    flip_a_bit(node, of_rank=1)
    assert node.run(3, 3) == [0] * 3, node.log()
    for what in COMMON:
        assert_same(node.saved("restored", 1)[what], expected[what], what)
    assert "another rank's copy" in node.log()


@pytest.mark.full
def test_shards_that_are_not_here_are_named(node: Node) -> None:
    assert node.run(3, 2) == [0] * 3, node.log()
    for fd, rank, _ in node.arenas():
        if rank == 1:
            void_slots(fd, lambda _: True)
        os.close(fd)
    assert all(node.run(2, 4))
    assert error_of(node, 0).startswith("LayoutUnknown")
    assert "rank 1, step 2" in error_of(node, 0)


def test_a_snapshot_of_an_older_ftrun_is_refused_in_words(node: Node) -> None:
    assert node.run(2, 2, older=True) == [0, 0], node.log()
    assert all(node.run(1, 4))
    assert error_of(node, 0).startswith("LayoutUnknown")
    assert "older ftrun" in error_of(node, 0)


@pytest.mark.parametrize("node", ["plain"], indirect=True)
def test_ranks_that_have_trained_for_themselves_are_no_one_state(node: Node) -> None:
    assert node.run(3, 2) == [0] * 3, node.log()
    assert all(node.run(2, 4))
    assert error_of(node, 0).startswith("RanksDiffer: model.")
