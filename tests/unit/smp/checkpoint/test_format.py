"""Checkpoints have these names and bytes, on every storage (formats 1 and 2)."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import xxhash

from ftrun import clock
from ftrun.ids import Rank, RunId, version
from ftrun.smp.checkpoint.storage.direct_file import CopyBuffers, Throttle
from ftrun.smp.checkpoint.storage.storage import Retention
from ftrun.smp.checkpoint.write_job import WriteJob, WriterContext
from ftrun.smp.checkpoint.writer import CheckpointWriter
from ftrun.wire.shared_memory.arena import Arena
from tests.integration.test_checkpoint_files import RANKS, Arenas, arenas

__all__ = ["arenas"]

TIME_S = 1_700_000_000.25


def context() -> WriterContext:
    return WriterContext(RunId("run"), CopyBuffers(lambda: 1 << 40), Throttle(threading.Event()))


def write_alone(found: Arenas, where: str) -> None:
    job = WriteJob(where, tuple(RANKS), 2, Retention(3), life="a life")
    CheckpointWriter(context()).write(found.fds, job)


def write_part(found: Arenas, where: str, rank: int) -> None:
    job = WriteJob(where, (Rank(rank),), 2, Retention(3), version(3, 7), "5b6a", "a life")
    CheckpointWriter(context()).write({Rank(rank): found.fds[Rank(rank)]}, job)


def contents(directory: Path) -> dict[str, str]:
    """The digest of each file, and the target of each link."""
    return {
        str(path.relative_to(directory)): (
            str(path.readlink())
            if path.is_symlink()
            else xxhash.xxh3_64_hexdigest(path.read_bytes())
        )
        for path in sorted(directory.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


@pytest.fixture(autouse=True)
def _fixed_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "wall_s", lambda: TIME_S)


RANK_0 = {"rank-00000.digests": "cf8f17973ec84d7c", "rank-00000.safetensors": "5259a94e7a178a18"}
RANK_1 = {"rank-00001.digests": "9abbaffbb8bf146f", "rank-00001.safetensors": "26a1d192e3f5456d"}
IN_DIRECTORY = {"index.json": "45ed5e953c64edf6", **RANK_0, **RANK_1}
"""The parts are removed."""
AT_URL = {"index.json": "086abe6f6856b846", **RANK_0, **RANK_1}
"""The parts stay. The index has its own time, because a store may not report one."""


def inside(folder: str, files: dict[str, str]) -> dict[str, str]:
    return {f"{folder}/{name}": digest for name, digest in files.items()}


def test_directory_of_one_node(arenas: Arenas, tmp_path: Path) -> None:
    arenas.seal(7, generation=3)
    write_alone(arenas, str(tmp_path))
    name = "step-00000007-g3"
    assert contents(tmp_path) == {"latest": name, **inside(name, IN_DIRECTORY)}


def test_directory_of_two_nodes(arenas: Arenas, tmp_path: Path) -> None:
    arenas.seal(7, generation=3)
    write_part(arenas, str(tmp_path), 0)
    lock = {".lock": xxhash.xxh3_64_hexdigest(b"")}
    part = {"part-00000.json": "1b0272a6cbec4450", **RANK_0}
    assert contents(tmp_path) == lock | inside(".tmp-step-00000007-g3-14180cf1-c01baa8d", part)
    write_part(arenas, str(tmp_path), 1)
    name = "step-00000007-g3"
    assert contents(tmp_path) == {**lock, "latest": name, **inside(name, IN_DIRECTORY)}


def test_url_of_one_node(arenas: Arenas, tmp_path: Path) -> None:
    arenas.seal(7, generation=3)
    write_alone(arenas, f"file://{tmp_path}")
    (name,) = (path.name for path in tmp_path.glob("step-*"))
    assert name.startswith("step-00000007-g3-14180cf1-"), "the token is random"
    found = contents(tmp_path)
    assert found.pop("latest") == xxhash.xxh3_64_hexdigest(f"{name}\n".encode())
    assert found.pop(f"{name}/part-00000.json")
    assert found == inside(name, AT_URL)


def test_url_of_two_nodes(arenas: Arenas, tmp_path: Path) -> None:
    arenas.seal(7, generation=3)
    name = "step-00000007-g3-14180cf1-c01baa8d"
    first = inside(name, {"part-00000.json": "89094c83829de16a", **RANK_0})
    write_part(arenas, f"file://{tmp_path}", 0)
    assert contents(tmp_path) == first
    write_part(arenas, f"file://{tmp_path}", 1)
    second = inside(name, {"part-00001.json": "9eed30867e4f50ac", **AT_URL})
    assert contents(tmp_path) == {
        "latest": xxhash.xxh3_64_hexdigest(f"{name}\n".encode()),
        **first,
        **second,
    }


SHARED = {
    "index.json": "9c049f44a52f5650",
    "rank-00000.digests": "cf8f17973ec84d7c",
    "rank-00000.59514b4a.pieces": "fe264e4ba5791426",
    "rank-00001.digests": "cf8f17973ec84d7c",
    "rank-00001.ca7a9d49.pieces": "5c68ca18767fbbc2",
}
"""Both ranks hold the same tensor: each file has a part of it (format 2)."""


def write_shared(found: Arenas, where: str, rank: int, wait_s: float) -> None:
    job = WriteJob(
        where, (Rank(rank),), 2, Retention(3), version(3, 7), "5b6a", share_wait_s=wait_s
    )
    CheckpointWriter(context()).write({Rank(rank): found.fds[Rank(rank)]}, job)


def test_directory_of_two_nodes_with_equal_bytes(arenas: Arenas, tmp_path: Path) -> None:
    arenas.seal(7, generation=3)
    copy_slot(arenas)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda rank: write_shared(arenas, str(tmp_path), rank, 30.0), RANKS))
    name = "step-00000007-g3"
    lock = {".lock": xxhash.xxh3_64_hexdigest(b"")}
    assert contents(tmp_path) == {**lock, "latest": name, **inside(name, SHARED)}


def test_offer_of_a_node(arenas: Arenas, tmp_path: Path) -> None:
    """One of two nodes is late, so the first one writes its image whole."""
    arenas.seal(7, generation=3)
    write_shared(arenas, str(tmp_path), 0, 0.01)
    (offer,) = tmp_path.glob(".tmp-*/offer-00000")
    assert xxhash.xxh3_64_hexdigest(offer.read_bytes()) == "6b3be5c5fadc7bd7"


def copy_slot(found: Arenas) -> None:
    """Rank 1 has the bytes of rank 0."""
    one, other = (Arena(found.fds[rank][0], writable=True) for rank in RANKS)
    other.image(0)[:] = one.image(0)
    other.table(0)[:] = one.table(0)
    other.write_header(0, one.header(0))
    one.close()
    other.close()
