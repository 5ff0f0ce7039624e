"""A checkpoint of one layout becomes one of another, by the rules that docs/layouts.md shows.

Checkpoints are real files: the SMP's own writer writes arenas that are filled by hand.
"""

import hashlib
import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from ftrun.errors import CheckpointError
from ftrun.ids import Rank, RunId, version
from ftrun.smp.checkpoint.index import FORMAT, SHARED_FORMAT, parse_index
from ftrun.smp.checkpoint.reader import CheckpointReader
from ftrun.smp.checkpoint.storage.direct_file import CopyBuffers, Throttle
from ftrun.smp.checkpoint.storage.local import LocalStorage
from ftrun.smp.checkpoint.storage.storage import Retention
from ftrun.smp.checkpoint.write_job import WriteJob, WriterContext, WriteResult
from ftrun.smp.checkpoint.writer import CheckpointWriter
from ftrun.snapshot import plain_values as plain
from ftrun.snapshot.layout import PLAIN_NAME, CopyTiming, LayoutEntry, make_layout, parse_header
from ftrun.snapshot.plain_values import TensorRef
from ftrun.tools.checkpoints.atoms import make as made
from ftrun.tools.checkpoints.catalog import find_damage
from ftrun.tools.checkpoints.convert import convert as converted
from ftrun.wire.messages.checkpoint import INDEX_NAME, ConvertReport
from ftrun.wire.shared_memory.arena import (
    Arena,
    ArenaShape,
    SlotHeader,
    SlotState,
    create_memfd,
    table_digest,
)
from tests.integration.documented import rule_file

Array = np.ndarray[Any, np.dtype[Any]]
DTYPES = {
    "F32": np.float32, "F64": np.float64, "I64": np.int64, "BF16": np.uint16, "C128": np.complex128
}  # fmt: skip
NAMES = {np.dtype(kind): name for name, kind in DTYPES.items()}


class World:
    """Arrays of all ranks, and a checkpoint of them. Names with prefix `model.` are learned.

    `is_shared`: each rank is a node of its own, and equal bytes are written once.
    """

    def __init__(
        self, folder: Path, ranks: Sequence[Mapping[str, Array]], *, is_shared: bool = False
    ) -> None:
        self.folder = folder
        self.ranks = [self._with_state(held) for held in ranks]
        fds = {Rank(rank): [self._arena(rank)] for rank in range(len(ranks))}
        order = WriteJob(str(folder), tuple(fds), len(ranks), retention=Retention(3), life="made")
        part = replace(order, version=version(3, 42), token="t", share_wait_s=30.0)
        parts = [replace(part, ranks=(rank,)) for rank in fds]
        try:
            with ThreadPoolExecutor(len(fds)) as pool:
                done = list(pool.map(lambda job: write(fds, job), parts if is_shared else [order]))
            (self.path,) = {Path(one.path) for one in done if not one.missing_ranks}
        finally:
            for (fd,) in fds.values():
                os.close(fd)

    def _with_state(self, held: Mapping[str, Array]) -> dict[str, Array]:
        state = {}
        for name, array in held.items():
            if NAMES[array.dtype] in ("F32", "F64"):
                state[f"state.{name}.mean"] = -array
                state[f"state.{name}.step"] = np.full((), 7, np.float32)
        return {**held, **state}

    def _plain(self, rank: int) -> bytes:
        learned = [name for name in self.ranks[rank] if not name.startswith("state.")]
        state = {
            name: {
                key: TensorRef(f"state.{name}.{key}")
                for key in ("mean", "step")
                if f"state.{name}.{key}" in self.ranks[rank]
            }
            for name in learned
        }
        parts: dict[str, object] = {
            "session": {"step": 42, "epoch": 0},
            "groups": {"optimizer": [{"lr": 0.5, "params": learned}]},
            "optimizer_state": {"optimizer": {"state": state}},
            **{name: {} for name in ("stateful", "generators", "loaders", "extra_state", "orders")},
            "dicts": {"mine": {"rank": rank}},
            "frozen": [],
            "rng": {"torch": bytes([rank])},
        }
        return plain.encode({name: plain.encode(part) for name, part in parts.items()})

    def _arena(self, rank: int) -> int:
        text = self._plain(rank)
        entries = [
            LayoutEntry(name, NAMES[array.dtype], array.shape, CopyTiming.LAZY)
            for name, array in self.ranks[rank].items()
        ]
        layout = make_layout(entries, plain_bytes=len(text) + 8)
        shape = ArenaShape(rank, len(self.ranks), layout.image_bytes, len(layout.pieces), 1)
        fd = create_memfd(shape)
        arena = Arena(fd, writable=True)
        image, table = arena.image(0), arena.table(0)
        start = len(layout.header)
        image[:start] = layout.header
        for entry in layout.entries:
            data = b""
            if entry.name == PLAIN_NAME:
                data = len(text).to_bytes(8, "little") + text
            elif entry.name in self.ranks[rank]:
                data = self.ranks[rank][entry.name].tobytes()
            at = start + entry.offset
            image[at : at + len(data)] = data
        for index, piece in enumerate(layout.pieces):
            at = start + piece.offset
            table[index] = xxhash.xxh3_64_intdigest(image[at : at + piece.num_bytes])
        sealed = SlotHeader(SlotState.SEALED, 3, 42, layout.image_bytes, table_digest(table), 1)
        arena.write_header(0, sealed)
        del image, table
        arena.close()
        return fd


def write(fds: Mapping[Rank, list[int]], job: WriteJob) -> WriteResult:
    throttle = Throttle(threading.Event())
    context = WriterContext(RunId("made"), CopyBuffers(lambda: 1 << 40), throttle)
    return CheckpointWriter(context).write({rank: fds[rank] for rank in job.ranks}, job)


def arrays_of(folder: Path) -> list[dict[str, Array]]:
    """The arrays of each rank of a checkpoint."""
    found = []
    for shard in parse_index((folder / INDEX_NAME).read_bytes(), what="it").shards:
        data = (folder / shard.file).read_bytes()
        layout, start = parse_header(memoryview(data))
        held = {}
        for entry in layout.entries:
            if not entry.name.startswith("ftrun."):
                kind = np.dtype(DTYPES[entry.dtype])
                at = start + entry.offset
                items = np.frombuffer(data, kind, entry.num_bytes // kind.itemsize, at)
                held[entry.name] = items.reshape(entry.shape)
        found.append(held)
    return found


def plain_of(folder: Path, rank: int) -> dict[str, Any]:
    data = (
        folder / parse_index((folder / INDEX_NAME).read_bytes(), what="it").shards[rank].file
    ).read_bytes()
    layout, start = parse_header(memoryview(data))
    at = start + layout.entries[-1].offset
    length = int.from_bytes(data[at : at + 8], "little")
    parts = plain.decode(data[at + 8 : at + 8 + length])
    return {name: plain.decode(part) for name, part in parts.items()}


class Converter:
    """Converts in a folder: in this process, or as `ftrun checkpoints convert`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def rules(self, name: str, text: str | None = None) -> str:
        (self.folder / name).write_text(rule_file(name) if text is None else text)
        return name

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "ftrun", "checkpoints", "convert", *words],
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def __call__(self, out: str, *words: str) -> Path:
        """The new checkpoint, every byte of it compared with its digests."""
        done = converted([*words, "old", out])
        assert done.problem == ""
        assert done.exit_code == 0
        storage = LocalStorage(self.folder / out, threading.Event())
        made = storage.describe("latest")
        assert made.index is not None
        assert find_damage(storage, made) == []
        assert (made.index.step, made.index.generation) == (42, 3)
        return self.folder / out / "latest"

    def refused(self, *words: str) -> tuple[int, str]:
        """Exit code and text; the failed conversion leaves no files."""
        done = converted([*words, "old", "new"])
        left = list((self.folder / "new").glob("*")) if (self.folder / "new").exists() else []
        assert left == []
        return done.exit_code, done.problem


@pytest.fixture
def convert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Converter:
    monkeypatch.chdir(tmp_path)
    return Converter(tmp_path)


def numbers(*shape: int, start: int = 1) -> Array:
    return np.arange(start, start + int(np.prod(shape)), dtype=np.float32).reshape(shape)


def assert_ranks(found: list[dict[str, Array]], expected: Sequence[Mapping[str, Array]]) -> None:
    """These names have these arrays, and the state of each is its own negative."""
    assert len(found) == len(expected)
    for here, there in zip(found, expected, strict=True):
        assert {n for n in here if not n.startswith("state.")} == set(there)
        for name, array in there.items():
            assert np.array_equal(here[name], array), name
            if f"state.{name}.mean" in here:
                assert np.array_equal(here[f"state.{name}.mean"], -array), name
                assert here[f"state.{name}.step"] == 7


# --- the files of the page --------------------------------------------------------------------


def rows(data: int, tensor: int) -> list[dict[str, Array]]:
    """The arrays that zero.yaml describes, on this number of ranks."""
    up, bias = numbers(10, 6), numbers(5, start=1000)
    found = []
    for rank in range(data * tensor):
        index, at = divmod(rank, tensor)
        part = np.array_split(up, tensor)[at]
        row = np.concatenate([part.reshape(-1), bias])
        row = np.pad(row, (0, -len(row) % (2 * data)))
        own = {"model.up": part, "model.bias": bias}
        found.append({**own, "optimizer.params[0][0]": np.split(row, data)[index]})
    return found


@pytest.mark.parametrize(("data", "tensor"), [(2, 1), (1, 2), (4, 3)])
def test_rows_that_are_shared_and_padded_otherwise(
    convert: Converter, data: int, tensor: int
) -> None:
    World(convert.folder / "old", rows(3, 2))
    words = ("--rules", convert.rules("zero.yaml"), "--mesh", f"dp={data},tp={tensor}")
    assert_ranks(arrays_of(convert("new", *words)), rows(data, tensor))


def stages(pipeline: int, tensor: int) -> list[dict[str, Array]]:
    """The arrays that pipeline.yaml describes, on this number of ranks."""
    found = []
    for rank in range(pipeline * tensor):
        stage, at = divmod(rank, tensor)
        held = {"model.embed": numbers(3)} if stage == 0 else {}
        for layer in np.array_split(np.arange(5), pipeline)[stage]:
            whole = numbers(7, 2, start=100 * int(layer))
            held[f"model.layers.{layer}.weight"] = np.array_split(whole, tensor)[at]
            held[f"model.layers.{layer}.scale"] = numbers(2, start=50 * int(layer))
        if stage == pipeline - 1:
            held["model.head"] = numbers(4)
        found.append(held)
    return found


def test_layers_move_to_other_stages(convert: Converter) -> None:
    World(convert.folder / "old", stages(2, 2))
    name = convert.rules("pipeline.yaml")
    for pipeline, tensor in ((1, 3), (4, 1)):
        out = f"new-{pipeline}"
        found = convert(out, "--rules", name, "--mesh", f"pp={pipeline},tp={tensor}")
        expected = stages(pipeline, tensor)
        assert_ranks(arrays_of(found), expected)
        for rank, held in enumerate(expected):
            parts = plain_of(found, rank)
            params = parts["groups"]["optimizer"][0]["params"]
            assert params == list(held)
            assert set(parts["optimizer_state"]["optimizer"]["state"]) == set(held)


def chunks(pipeline: int, tensor: int, runs: Sequence[int]) -> list[dict[str, Array]]:
    """The arrays that stages.yaml describes, with these numbers of ranks and layers per run."""
    found = []
    ends = np.cumsum([0, *runs]).tolist()
    for rank in range(pipeline * tensor):
        stage, at = divmod(rank, tensor)
        held = {}
        for turn, run in enumerate(range(stage, len(runs), pipeline)):
            name = f"model.chunks.{turn}"
            if run == 0:
                held[f"{name}.embed"] = numbers(3)
            for number, layer in enumerate(range(ends[run], ends[run + 1])):
                up, down = numbers(4, 2, start=100 * layer), numbers(2, 5, start=900 * layer)
                held[f"{name}.layers.{number}.up"] = np.array_split(up, tensor)[at]
                held[f"{name}.layers.{number}.down"] = np.array_split(down, tensor, 1)[at]
                held[f"{name}.layers.{number}.norm"] = numbers(2, start=50 * layer)
            if run == len(runs) - 1:
                held[f"{name}.head"] = numbers(4)
        found.append(held)
    return found


def test_layers_that_each_stage_numbers_again_move_to_other_stages(convert: Converter) -> None:
    World(convert.folder / "old", chunks(2, 2, [3, 2]))
    name = convert.rules("stages.yaml")
    for number, (pipeline, tensor, runs) in enumerate(
        [(3, 1, [2, 2, 1]), (1, 4, [5]), (2, 1, [1, 2, 1, 1])]
    ):
        text = rule_file(name).replace("pp: 2, tp: 2", f"pp: {pipeline}, tp: {tensor}")
        text = text.replace("of: 5", f"of: 5\n    sizes: {runs}")
        text = text.replace("turns: 1", f"turns: {len(runs) // pipeline}")
        words = ("--rules", name, "--to", convert.rules(f"to-{number}.yaml", text))
        found = convert(f"new-{number}", *words)
        expected = chunks(pipeline, tensor, runs)
        assert_ranks(arrays_of(found), expected)
        for rank, held in enumerate(expected):
            parts = plain_of(found, rank)
            state = parts["optimizer_state"]["optimizer"]["state"]
            assert set(parts["groups"]["optimizer"][0]["params"]) == set(state) == set(held)
            assert all(values["mean"].name == f"state.{n}.mean" for n, values in state.items())


def test_a_stage_with_another_number_of_layers_is_reported(convert: Converter) -> None:
    World(convert.folder / "old", chunks(2, 2, [2, 3]))
    code, words = convert.refused("--rules", convert.rules("stages.yaml"), "--mesh", "pp=1,tp=1")
    assert code == 2
    assert (
        "model.chunks.0.layers.2.up: its number is 2, and turn 0 of pp 1 has numbers 0 to 1"
        in words
    )


def experts(pipeline: int, expert: int, tensor: int) -> list[dict[str, Array]]:
    """The arrays that experts.yaml describes, on this number of ranks."""
    found = []
    for rank in range(pipeline * expert * tensor):
        stage, ep, tp = rank // (expert * tensor), rank // tensor % expert, rank % tensor
        held = {}
        for number, layer in enumerate(np.array_split(np.arange(3), pipeline)[stage]):
            name, start = f"model.layers.{number}", 1000 * int(layer)
            held[f"{name}.router"] = numbers(4, 6, start=start)
            for at, one in enumerate(np.array_split(np.arange(4), expert)[ep]):
                up = numbers(4, 6, start=start + 100 + 24 * int(one))
                held[f"{name}.experts.{at}.up"] = np.array_split(up, tensor)[tp]
            grouped = np.array_split(numbers(4, 5, 8, start=start + 300), expert)[ep]
            held[f"{name}.grouped"] = np.array_split(grouped, tensor, 2)[tp]
            rows = numbers(4, 4, 6, start=start + 500)
            part = np.array_split(np.array_split(rows, expert)[ep], tensor, 1)[tp]
            held[f"{name}.fused"] = part.reshape(-1, 6)
        found.append(held)
    return found


def test_experts_move_to_other_ranks_and_stages(convert: Converter) -> None:
    World(convert.folder / "old", experts(2, 2, 2))
    name = convert.rules("experts.yaml")
    for sizes in ((1, 4, 1), (3, 1, 4)):
        words = "pp={},ep={},tp={}".format(*sizes)
        found = convert(f"new-{sizes[0]}", "--rules", name, "--mesh", words)
        assert_ranks(arrays_of(found), experts(*sizes))
        held = experts(*sizes)[-1]
        state = plain_of(found, len(experts(*sizes)) - 1)["optimizer_state"]["optimizer"]["state"]
        assert set(state) == set(held)
        assert all(values["mean"].name == f"state.{n}.mean" for n, values in state.items())


def zero3(ranks: int) -> list[dict[str, Array]]:
    """The arrays that zero3.yaml describes, on this number of ranks."""
    wholes = {"model.up": numbers(10, 6), "model.bias": numbers(5, start=1000)}
    flat = {name: whole.reshape(-1) for name, whole in wholes.items()}
    rows = {name: np.pad(row, (0, -len(row) % ranks)) for name, row in flat.items()}
    return [{n: np.split(row, ranks)[rank] for n, row in rows.items()} for rank in range(ranks)]


def test_parameters_that_are_padded_alone(convert: Converter) -> None:
    World(convert.folder / "old", zero3(3))
    name = convert.rules("zero3.yaml")
    for ranks in (2, 7):
        found = convert(f"new-{ranks}", "--rules", name, "--ranks", str(ranks))
        assert_ranks(arrays_of(found), zero3(ranks))


MEGATRON = "megatron-core:layers=2,vocab=200,divisible=16,fc1=2"


def megatron(pipeline: int, tensor: int) -> list[dict[str, Array]]:
    found = []
    for rank in range(pipeline * tensor):
        stage, tp = divmod(rank, tensor)
        held = {}
        words = np.pad(numbers(200, 2), [(0, -200 % (16 * tensor)), (0, 0)])
        if stage == 0:
            held["model.embedding.word_embeddings.weight"] = np.split(words, tensor)[tp]
        for number, layer in enumerate(np.array_split(np.arange(2), pipeline)[stage]):
            gate, other = numbers(8, 2, start=50 * int(layer)), numbers(8, 2, start=900)
            halves = [np.split(half, tensor)[tp] for half in (gate, other)]
            held[f"model.decoder.layers.{number}.mlp.linear_fc1.weight"] = np.concatenate(halves)
        if stage == pipeline - 1 > 0:  # a copy of the embedding
            held["model.output_layer.weight"] = np.split(words, tensor)[tp]
        found.append(held)
    return found


def test_a_packaged_layout_is_named_with_its_values(convert: Converter) -> None:
    World(convert.folder / "old", megatron(2, 1))
    code, problem = convert.refused("--rules", "megatron-core:layers=2", "--ranks", "2")
    assert (code, "needs vocab" in problem) == (2, True)
    done = convert.command("old", "new", "--rules", f"{MEGATRON},pp=2", "--mesh", "pp=1,tp=4")
    assert done.returncode == 0, done.stderr
    assert_ranks(arrays_of(convert.folder / "new" / "latest"), megatron(1, 4))
    ranks = megatron(2, 1)
    ranks[1]["model.output_layer.weight"] = ranks[1]["model.output_layer.weight"] + 1
    World(convert.folder / "old", ranks)
    words = ("--rules", f"{MEGATRON},pp=2", "--mesh", "pp=1")
    problem = converted([*words, "old", "other"]).problem
    assert "model.embedding.word_embeddings.weight is F32" in problem
    assert "ranks 0 and 1, which should be equal, differ" in problem


def test_copies_that_went_their_own_ways_become_their_mean(convert: Converter) -> None:
    counts = [np.array([rank], np.int64) for rank in range(2)]
    held = [
        {"model.w": numbers(400, 300, start=3 * rank), "model.count": counts[rank]}
        for rank in range(2)
    ]
    World(convert.folder / "old", held)
    found = convert("new", "--rules", convert.rules("average.yaml"), "--ranks", "3")
    mean = (held[0]["model.w"] + held[1]["model.w"]) / 2
    assert_ranks(
        arrays_of(found), [{"model.w": mean, "model.count": counts[r % 2]} for r in range(3)]
    )
    assert [plain_of(found, rank)["dicts"]["mine"]["rank"] for rank in range(3)] == [0, 1, 0]


def test_what_is_in_padding_does_not_count(convert: Converter) -> None:
    text = "mesh: {dp: 2}\nshard:\n  - {name: model.*, axis: tp, dim: 0, size: 3, pad_to: 4}\n"
    held = [{"model.w": np.array([1, 2, 3, rank], np.float32)} for rank in range(2)]
    World(convert.folder / "old", held)
    name = convert.rules("x.yaml", text.replace("{dp: 2}", "{dp: 2, tp: 1}"))
    found = convert("new", "--rules", name, "--mesh", "dp=1")
    assert arrays_of(found)[0]["model.w"].tolist() == [1, 2, 3, 0]


def test_padding_is_kept_if_its_size_stays_and_else_reported(convert: Converter) -> None:
    text = ("mesh: {pp: 1, tp: 2}\n"
            "shard: [{name: model.*, axis: tp, dim: 0, size: 3, pad_to: 2}]\n")  # fmt: skip
    rows = np.array([1, 2, 3, 9], np.float32)
    World(convert.folder / "old", [{"model.w": part} for part in np.split(rows, 2)])
    name = convert.rules("x.yaml", text)
    convert.rules("to.yaml", text.replace("tp: 2", "tp: 1").replace("pad_to: 2", "pad_to: 4"))
    done = converted(["old", "kept", "--rules", name, "--to", "to.yaml"])
    assert_ranks(arrays_of(convert.folder / "kept" / "latest"), [{"model.w": rows}])
    assert not any("padding" in note for note in done.notes)
    done = converted(["old", "new", "--rules", name, "--mesh", "tp=3"])
    dropped = "padding of model.w, state.model.w.mean that is not zero"
    assert any(dropped in note for note in done.notes)
    empty = np.zeros(2, np.float32)
    expected = [{"model.w": part} for part in (rows[:2], np.array([3, 0], np.float32), empty)]
    assert_ranks(arrays_of(convert.folder / "new" / "latest"), expected)
    assert any(dropped in note for note in made(["export", "old", "atoms", "--rules", name]).notes)


# --- a larger one -----------------------------------------------------------------------------

LARGE = """
mesh: {dp: 2, tp: 2}
replicate: [model.norm]
shard:
  - {name: model.wide, axis: tp, dim: 1}
fragment:
  - {name: model.qkv, axis: tp, dim: 0, unit: 32, parts: [4, 2, 2]}
"""


def large(data: int, tensor: int) -> list[dict[str, Array]]:
    wide, qkv, norm = numbers(500, 700), numbers(256, 700), numbers(33)
    found = []
    for rank in range(data * tensor):
        at = rank % tensor
        headers = [np.array_split(one.reshape(-1, 32, 700), tensor)[at].reshape(-1, 700)
                 for one in np.split(qkv, [128, 192])]  # fmt: skip
        found.append(
            {
                "model.wide": np.array_split(wide, tensor, 1)[at],
                "model.qkv": np.concatenate(headers),
                "model.norm": norm,
            }
        )
    return found


def digests(folder: Path) -> dict[str, str]:
    paths = sorted(folder.glob("rank-*"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def test_bytes_that_several_ranks_have_in_one_file_are_converted_and_linked(
    convert: Converter,
) -> None:
    world = World(convert.folder / "old", large(2, 2), is_shared=True)
    name = convert.rules("large.yaml", LARGE)
    found = convert("new", "--rules", name, "--mesh", "dp=1,tp=4")
    assert_ranks(arrays_of(found), large(1, 4))
    assert format_of(found) == FORMAT
    linked = convert("linked", "--rules", name, "--mesh", "dp=2,tp=2")
    assert format_of(linked) == SHARED_FORMAT
    assert {p.name: p.stat().st_ino for p in linked.glob("rank-*")} == {
        p.name: p.stat().st_ino for p in world.path.glob("rank-*")
    }


def format_of(folder: Path) -> int:
    return parse_index((folder / INDEX_NAME).read_bytes(), what="it").format


def test_bytes_that_several_ranks_have_in_one_file_are_exported(convert: Converter) -> None:
    held = [{"model.w": numbers(300, 700), "model.small": numbers(9)}] * 2
    world = World(convert.folder / "old", held, is_shared=True)
    World(convert.folder / "whole", held)
    assert format_of(world.path) == SHARED_FORMAT
    made = []
    for name in ("old", "whole"):
        words = ["checkpoints", "export", name, f"{name}-out", "--format", "safetensors"]
        subprocess.run([sys.executable, "-m", "ftrun", *words], check=True, timeout=60)
        files = sorted((convert.folder / f"{name}-out").iterdir())
        made.append({path.name: path.read_bytes() for path in files})
    assert made[0] == made[1]
    row = numbers(300, 700)[150].tobytes()
    (damaged,) = (path for path in world.path.glob("*.pieces") if row in path.read_bytes())
    damaged.write_bytes(damaged.read_bytes().replace(row, row[::-1]))
    words = ["checkpoints", "export", "old", "again", "--format", "safetensors"]
    done = subprocess.run(
        [sys.executable, "-m", "ftrun", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert damaged.name in done.stdout + done.stderr


def test_any_number_of_workers_writes_the_same_bytes(convert: Converter) -> None:
    World(convert.folder / "old", large(2, 2))
    name = convert.rules("large.yaml", LARGE)
    made = {}
    for workers in ("1", "2", "7"):
        words = ("--rules", name, "--mesh", "tp=3,dp=2", "--workers", workers)
        found = convert(f"new-{workers}", *words)
        made[workers] = digests(found)
    assert_ranks(arrays_of(found), large(2, 3))
    assert made["1"] == made["2"] == made["7"]
    assert len(made["1"]) == 12


def test_several_hosts_write_the_files_of_one_checkpoint(convert: Converter) -> None:
    World(convert.folder / "old", large(2, 2))
    words = ("--rules", convert.rules("large.yaml", LARGE), "--mesh", "tp=3,dp=2")
    whole = convert("whole", *words)
    first = converted(["old", "new", *words, "--share", "2/4"])
    assert (first.problem, first.missing_shares) == ("", (1, 3, 4))
    assert not (convert.folder / "new" / "latest").exists()
    other = converted(["old", "new", *words, "--dtype", "bf16", "--share", "1/4"])
    assert other.missing_shares == (2, 3, 4)  # of another conversion
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "ftrun.tools.checkpoints.convert", "old", "new", *words,
             "--share", f"{number}/4"],
            cwd=convert.folder,
            stdout=subprocess.PIPE,
        )
        for number in (1, 3, 4)
    ]  # fmt: skip
    reports = [json.loads(one.communicate(timeout=60)[0]) for one in running]
    assert [one["problem"] for one in reports] == [""] * 3
    assert [] in [one["missing_shares"] for one in reports]
    made = convert.folder / "new" / "latest"
    assert digests(made) == digests(whole)
    assert_ranks(arrays_of(made), large(2, 3))
    assert not list(made.glob("part-*"))
    indexes = [parse_index((one / INDEX_NAME).read_bytes(), what="it") for one in (made, whole)]
    assert indexes[0].life == "made"
    assert indexes[0] == indexes[1]


def share_of_two(number: int, *words: str) -> ConvertReport:
    return converted(["old", "new", *words, "--share", f"{number}/2"])


@pytest.mark.parametrize("point", ["index_written", "renamed", "link_made"])
def test_a_share_that_was_killed_while_it_joined_is_repeated(
    convert: Converter, point: str
) -> None:
    World(convert.folder / "old", large(2, 2))
    words = ("--rules", convert.rules("large.yaml", LARGE), "--mesh", "tp=1,dp=2")
    assert share_of_two(1, *words).missing_shares == (2,)
    module = "ftrun.tools.checkpoints.convert"
    killed = subprocess.run(
        [sys.executable, "-m", module, "old", "new", *words, "--share", "2/2"],
        env={**os.environ, "FTRUN_CRASH_AT": f"smp.checkpoint.{point}"},
        stdout=subprocess.DEVNULL, timeout=60, check=False,
    )  # fmt: skip
    assert killed.returncode == -9
    assert share_of_two(2, *words).missing_shares == ()
    made = convert.folder / "new" / "latest"
    assert_ranks(arrays_of(made), large(2, 1))
    assert not list(made.glob("part-*"))
    assert [path.name for path in made.parent.glob("*step-*")] == ["step-00000042-g3"]


def test_a_share_that_is_repeated_after_the_join_finds_the_checkpoint(convert: Converter) -> None:
    World(convert.folder / "old", large(2, 2))
    words = ("--rules", convert.rules("large.yaml", LARGE), "--mesh", "tp=1,dp=2")
    share_of_two(1, *words)
    first = share_of_two(2, *words)
    again = share_of_two(1, *words)
    assert (again.problem, again.missing_shares, again.path) == ("", (), first.path)
    names = ("step-*", ".tmp-*")
    assert [len(list((convert.folder / "new").glob(one))) for one in names] == [1, 0]
    other = share_of_two(1, *words, "--dtype", "model.norm=bf16")  # of another conversion
    assert other.missing_shares == (2,)


def test_a_share_compares_only_what_it_writes(convert: Converter) -> None:
    ranks = stages(2, 2)
    ranks[3]["model.head"] = ranks[3]["model.head"] + 1  # of the last stage
    World(convert.folder / "old", ranks)
    words = ("--rules", convert.rules("pipeline.yaml"), "--mesh", "pp=2,tp=1")
    assert share_of_two(1, *words).problem == ""
    assert "model.head is F32" in share_of_two(2, *words).problem


def test_there_and_back_is_what_it_was(convert: Converter) -> None:
    world = World(convert.folder / "old", large(2, 2))
    name = convert.rules("large.yaml", LARGE)
    convert("there", "--rules", name, "--mesh", "tp=1,dp=1")
    other = convert.rules("one.yaml", LARGE.replace("dp: 2, tp: 2", "dp: 1, tp: 1"))
    done = convert.command("there", "back", "--rules", other, "--to", name)
    assert done.returncode == 0, done.stderr
    assert_ranks(arrays_of(convert.folder / "back" / "latest"), large(2, 2))
    back = plain_of(convert.folder / "back" / "latest", 0)
    assert {*back} == {*plain_of(world.path, 0), "layout"}  # it prints what it is


def test_the_same_layout_is_not_converted(convert: Converter) -> None:
    world = World(convert.folder / "old", large(2, 2))
    name = convert.rules("large.yaml", LARGE)
    found = convert("new", "--rules", name, "--mesh", "tp=2")
    for path in sorted(world.path.glob("rank-*")):
        assert (found / path.name).samefile(path)


def test_another_dtype(convert: Converter) -> None:
    World(convert.folder / "old", large(2, 2))
    name = convert.rules("large.yaml", LARGE)
    words = ("--dtype", "bf16", "--dtype", "state.model.norm.*=f64")
    (held, *_) = arrays_of(convert("new", "--rules", name, "--ranks", "2", *words))
    bits = large(1, 2)[0]["model.norm"].view(np.uint32)
    assert np.array_equal(held["model.norm"], ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16))
    assert held["model.wide"].dtype == np.uint16
    assert held["state.model.norm.mean"].dtype == np.float64
    assert held["state.model.wide.mean"].dtype == np.float32


def test_items_of_sixteen_bytes_are_put_together(convert: Converter) -> None:
    whole = np.arange(24.0).view(np.complex128).reshape(4, 3)
    World(convert.folder / "old", [{"model.z": part} for part in np.split(whole, 2)])
    rules = convert.rules("z.yaml", 'mesh: {tp: 2}\nshard: [{name: "model.z", axis: tp, dim: 0}]')
    assert_ranks(
        arrays_of(convert("new", "--rules", rules, "--mesh", "tp=1")), [{"model.z": whole}]
    )


@pytest.mark.full
@pytest.mark.slow
def test_no_more_than_a_few_tensors_are_in_memory(convert: Converter) -> None:
    held = [{f"model.w{at}": numbers(1 << 20) for at in range(16)} for _ in range(2)]
    World(convert.folder / "old", held)
    text = "mesh: {dp: 1, tp: 2}\nshard:\n  - {name: model.*, axis: tp, dim: 0}\n"
    name = convert.rules("x.yaml", text)
    words = ["old", "new", "--rules", name, "--mesh", "tp=1", "--workers", "1"]
    code = (
        "import pathlib, runpy, sys\n"
        f"sys.argv = ['convert', *{words!r}]\n"
        "try:\n    runpy.run_module('ftrun.tools.checkpoints.convert', run_name='__main__')\n"
        "except SystemExit:\n    pass\n"
        "lines = pathlib.Path('/proc/self/status').read_text().splitlines()\n"
        "sys.stderr.write(next(line.split()[1] for line in lines if line.startswith('VmHWM')))\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=convert.folder, capture_output=True, text=True, check=True, timeout=60
    )
    reported = json.loads(done.stdout)
    assert reported["problem"] == ""
    assert reported["num_bytes"] > 256e6
    assert int(done.stderr) * 1024 < 150e6


def test_what_was_made_is_reported(convert: Converter) -> None:
    World(convert.folder / "old", large(2, 2))
    words = ("old", "new", "--rules", convert.rules("large.yaml", LARGE), "--ranks", "2")
    reported = json.loads(convert.command(*words, "--json").stdout)
    assert (reported["world_size"], reported["num_tensors"]) == (2, 9)
    assert (reported["mesh_before"], reported["mesh_after"]) == ("dp 2, tp 2", "dp 1, tp 2")
    again = convert.command(*words)
    assert "dp 2, tp 2 -> dp 1, tp 2" in again.stdout
    assert (convert.folder / "new" / "latest").readlink().name.endswith(".2")


# --- what goes wrong --------------------------------------------------------------------------


def flipped(world: World, name: str, rank: int) -> None:
    """The first byte of a tensor in a rank's file."""
    path = world.path / f"rank-{rank:05d}.safetensors"
    data = bytearray(path.read_bytes())
    layout, start = parse_header(memoryview(bytes(data)))
    entry = next(entry for entry in layout.entries if entry.name == name)
    data[start + entry.offset] ^= 1
    path.write_bytes(data)


def cut_off(world: World) -> None:
    os.truncate(world.path / "rank-00001.safetensors", 20_000)


def without_file(world: World) -> None:
    (world.path / "rank-00001.digests").unlink()


@pytest.mark.parametrize(
    ("harm", "reported"),
    [
        (lambda world: flipped(world, "model.wide", 1), "rank 1: the digest of piece"),
        (lambda world: flipped(world, "model.norm", 0), "rank 0: the digest of piece"),
        (cut_off, "has 20,000 bytes of"),
        (without_file, "rank-00001.digests is not readable: No such file"),
    ],
    ids=["large", "small", "cut off", "no digests"],
)
def test_a_damaged_checkpoint_is_not_converted(
    convert: Converter, harm: Callable[[World], None], reported: str
) -> None:
    harm(World(convert.folder / "old", large(2, 2)))
    name = convert.rules("large.yaml", LARGE)
    code, words = convert.refused("--rules", name, "--ranks", "2")
    assert code == 77
    assert reported in words


def test_an_error_of_a_read_names_the_file_of_the_source(convert: Converter) -> None:
    world = World(convert.folder / "old", large(2, 2))
    with closing(CheckpointReader(world.path)) as reader:
        links = {os.path.realpath(one): int(one.name) for one in Path("/proc/self/fd").iterdir()}
        folder = os.open("/", os.O_RDONLY)  # whose bytes cannot be read
        os.dup2(folder, links[str(world.path.resolve() / "rank-00001.safetensors")])
        os.close(folder)
        with pytest.raises(CheckpointError, match=r"rank-00001\.safetensors is not readable"):
            reader.read(1, "model.wide", 0, 4)


def test_more_ranks_than_files_that_a_process_may_open(convert: Converter) -> None:
    world = World(convert.folder / "old", large(4, 2))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 4, hard))
    try:
        with closing(CheckpointReader(world.path)) as reader:
            assert len(reader.parts) == 8
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("name", ["model.norm", "model.wide"])
def test_ranks_that_should_have_the_same_and_do_not(convert: Converter, name: str) -> None:
    ranks = large(2, 2)
    ranks[3][name] = ranks[3][name] + 1
    World(convert.folder / "old", ranks)
    rules = convert.rules("large.yaml", LARGE)
    code, words = convert.refused("--rules", rules, "--ranks", "2")
    assert code == 2
    first = 0 if name == "model.norm" else 1
    assert f"{name} is F32" in words
    assert f"ranks {first} and 3" in words


@pytest.mark.parametrize(
    ("rules", "more", "reported"),
    [
        ("mesh: {tp: 2", ["--ranks", "2"], "line 1, column 13"),
        ("mesh: {tp: 3}", ["--ranks", "2"], "does not fit the mesh"),
        ("mesh: {dp: 3}", ["--ranks", "2"], "4 ranks took"),
        ("mesh: {dp: 4}\nreplicate: [model.norm]", ["--ranks", "2"], "model.wide matches no rule"),
        (LARGE, [], "give the new layout"),
        (LARGE, ["--ranks", "3"], "--mesh tp=4,dp=2"),
        (LARGE, ["--ranks", "2", "--mesh", "tp=1"], "--ranks and --mesh both"),
        (LARGE, ["--mesh", "tp"], "--mesh has axes"),
        (LARGE, ["--mesh", "pp=2"], "pp is no axis"),
        (LARGE, ["--to", "none.yaml"], "none.yaml: No such file"),
        (LARGE, ["--dtype", "int4"], "it is one of f64, f32, f16, bf16"),
        (LARGE, ["--dtype", "x*=bf16"], "names no floating tensor"),
        (LARGE, ["--ranks", "2", "--workers", "-1"], "at least 1"),
        (LARGE, ["--mesh", "tp=5", "--to", ""], "--to and --mesh"),
        (LARGE, ["--ranks", "2", "--share", "0/2"], "--share is I/N"),
        (LARGE, ["--ranks", "2", "--share", "3/3"], "there are 2 ranks to write"),
        (LARGE, ["--ranks", "4", "--share", "1/2"], "files are linked: no --share"),
    ],
)
def test_what_makes_no_sense_is_refused(
    convert: Converter, rules: str, more: list[str], reported: str
) -> None:
    World(convert.folder / "old", large(2, 2))
    code, words = convert.refused("--rules", convert.rules("x.yaml", rules), *more)
    assert code == 2
    assert reported in words


def test_the_command_line_reports_why_and_has_the_exit_code(convert: Converter) -> None:
    World(convert.folder / "old", large(2, 2))
    words = ("old", "new", "--rules", convert.rules("large.yaml", LARGE), "--ranks", "3")
    done = convert.command(*words)
    assert done.returncode == 2
    assert done.stderr.startswith("Error: --ranks 3 does not fit the mesh")
    done = convert.command(*words, "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["exit_code"] == 2


def test_no_checkpoint_there(convert: Converter) -> None:
    code, words = convert.refused("--rules", convert.rules("x.yaml", LARGE), "--ranks", "2")
    assert code == 77
    assert "neither a checkpoint nor a directory" in words
