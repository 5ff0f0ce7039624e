"""Ranks of one node that hold equal state store it once: same bytes after any kill, less memory.

Real runs with DDP. The undisturbed run of each number of ranks shares nothing.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from ftrun.snapshot.layout import parse_header
from ftrun.snapshot.replica_shares import members_of
from tests.integration.conftest import Run, Start, in_full

SCRIPT = Path(__file__).with_name("scripts") / "replicated_training.py"
STEPS = 40
WIDTH = 300
STATE_BYTES = 2 * 3 * WIDTH * WIDTH * 4
"""Weights and moments of the large layers."""

Ends = tuple[str, ...]


def ends_of(folder: Path, num_ranks: int) -> Ends:
    return tuple((folder / f"end.{rank}").read_text() for rank in range(num_ranks))


def words(num_ranks: int, *switches: str, pace_s: float = 0.02) -> list[str]:
    flags = ["--nproc-per-node", str(num_ranks), "--snapshot-every", "1", "--max-restarts", "3"]
    return [*flags, str(SCRIPT), str(STEPS), str(pace_s), *switches]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Ends]:
    """Digests of the final state of each rank, by the number of ranks."""
    found: dict[int, Ends] = {}

    def ends(num_ranks: int) -> Ends:
        if num_ranks not in found:
            folder = tmp_path_factory.mktemp(f"undisturbed-{num_ranks}")
            run = Run(folder, "--set", "snapshot.share_replicas=false", *words(num_ranks))
            try:
                assert run.wait() == 0, run.text
            finally:
                run.end()
            found[num_ranks] = ends_of(folder, num_ranks)
            assert len(set(found[num_ranks])) == num_ranks  # BatchNorm differs from rank to rank
        return found[num_ranks]

    return ends


def finished(run: Run, num_ranks: int) -> Ends:
    assert run.wait() == 0, run.text
    assert not run.journal("smp_replicas_differ")
    return ends_of(run.folder, num_ranks)


def memory_over_state(run: Run) -> float:
    snapshots = run.status().get("snapshots") or {}
    found = snapshots.get("memory_bytes", 0)  # type: ignore[attr-defined]
    return found / STATE_BYTES if found else math.inf


@pytest.mark.parametrize(
    ("num_ranks", "die"),
    [
        (4, "die=25:3"),
        *in_full((2, "die=2:1"), (2, "die=25:0"), (2, "die=25:all")),
        *in_full((4, "die=2:all"), (4, "die=25:all")),
    ],
)
def test_a_kill_before_and_after_the_change_leaves_the_same_bytes(
    start: Start, undisturbed: Callable[[int], Ends], num_ranks: int, die: str
) -> None:
    run = start(*words(num_ranks, die))
    assert finished(run, num_ranks) == undisturbed(num_ranks)
    assert len(run.journal("generation_started")) == 2


@pytest.mark.parametrize(
    "point",
    [
        *("worker.capture.sealed:4", "smp.arena.granted:3"),
        *in_full("worker.capture.sealed:6", "worker.capture.arena_mapped:2"),
        *in_full("worker.capture.copied:5", "smp.arena.granted:4"),
        *in_full("worker.capture.sealed:5", "worker.capture.sealed:7"),
        *in_full("worker.capture.marked:5", "worker.capture.smp_notified:5"),
        *in_full("smp.commit.seal_received:9", "smp.commit.decided:6"),
        *in_full("smp.commit.replaced_freed:5"),
    ],
)
def test_a_kill_during_the_change_leaves_the_same_bytes(
    start: Start, undisturbed: Callable[[int], Ends], tmp_path: Path, point: str
) -> None:
    once = tmp_path / "once"
    run = start(*words(2), env={"FTRUN_CRASH_AT": point, "FTRUN_CRASH_ONCE": str(once)})
    assert finished(run, 2) == undisturbed(2)
    assert once.exists(), f"{point} was not passed"


def test_the_memory_of_a_node_has_two_slots_of_the_state(start: Start) -> None:
    run = start(*words(4, pace_s=0.5))
    run.wait_until("sharing", lambda: memory_over_state(run) < 3.0)
    run.process.terminate()
    run.process.wait(60)


def test_a_checkpoint_has_each_byte_once_and_starts_another_number_of_ranks(
    start: Start, tmp_path: Path
) -> None:
    run = start("--checkpoint-dir", "saved", "--checkpoint-every", "0.5", *words(2, pace_s=0.1))
    assert run.wait() == 0, run.text
    files = sorted((tmp_path / "saved" / "latest").glob("rank-*.safetensors"))
    sizes = [file.stat().st_size for file in files]
    assert len(sizes) == 2
    assert sum(sizes) < 1.2 * STATE_BYTES
    for file in files:
        layout, _ = parse_header(memoryview(file.read_bytes()))
        assert members_of(layout.metadata) == (0, 1)
    ends = ends_of(tmp_path, 2)
    again = start("--checkpoint-dir", "saved", *words(2))
    assert again.wait() == 0, again.text
    assert ends_of(tmp_path, 2) == ends
    resized = start("--checkpoint-dir", "saved", *words(3))
    assert resized.wait() == 0, resized.text
    assert "not bitwise" in resized.text


def test_a_silent_difference_ends_the_sharing_and_is_reported(start: Start) -> None:
    run = start(*words(4, "drift=20"))
    assert run.wait() == 0, run.text
    (first, *_) = run.journal("smp_replicas_differ")
    assert json.loads(json.dumps(first["ranks"])) == [1]


@pytest.mark.full
def test_an_smp_killed_at_a_difference_finds_it_again(start: Start, tmp_path: Path) -> None:
    once = tmp_path / "once"
    words_of_crash = {
        "FTRUN_CRASH_AT": "smp.commit.replicas_differed",
        "FTRUN_CRASH_ONCE": str(once),
    }
    run = start(*words(4, "drift=20", pace_s=0.3), env=words_of_crash)
    assert run.wait() == 0, run.text
    assert once.exists()
    first, second = run.journal("smp_replicas_differ")
    assert first["ranks"] == second["ranks"] == [1]
