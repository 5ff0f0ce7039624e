"""Trainings of the exactness tests on the fake device: a kill at any moment changes no bit.

The scripts and the comparisons are those of the processor. The device runs as late as it may, so
what ftrun does not wait for has not happened when a process is killed.
"""

import contextlib
import os
import signal
from pathlib import Path

import pytest
from fake_device import fake

from tests.chaos.conftest import Checked, Run, Start, let_end, start, train, wait_for_memory
from tests.chaos.test_crash_points import kill_at_each, points_passed
from tests.integration import test_resized_world as resized
from tests.integration import test_shared_replicas as shared
from tests.integration.test_session import assert_same_as_undisturbed

__all__ = ["start", "train"]

ON_DEVICE = str(Path(__file__).parent / "scripts" / "on_device.py")
WARM = ("--preload", "fake_device.preloaded", ON_DEVICE, "own")
"""Before the script of a run whose standbys know the device and have not used it."""

full = pytest.mark.full
pytestmark = [
    *(pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(1500)),
    pytest.mark.usefixtures("compiled"),
]


@pytest.fixture(scope="module")
def undisturbed(compiled: None, tmp_path_factory: pytest.TempPathFactory) -> Checked:
    return Checked(tmp_path_factory.mktemp("undisturbed"), *WARM)


@pytest.mark.parametrize("stream", ["own", pytest.param("default", marks=full)])
@pytest.mark.parametrize(
    "switches",
    [
        ("amp", "accumulate"),
        pytest.param(("batchnorm",), marks=full),
        pytest.param(("foreach",), marks=full),
        pytest.param(("fused",), marks=full),
        pytest.param(("capturable", "two-devices"), marks=full),
    ],
    ids=" ".join,
)
def test_one_process_resumes_bitwise(
    tmp_path: Path, switches: tuple[str, ...], stream: str
) -> None:
    assert_same_as_undisturbed(tmp_path, *switches, first=(ON_DEVICE, stream))


@pytest.mark.parametrize("mode", ["lazy", pytest.param("threads", marks=full)])
@pytest.mark.parametrize(
    "switches",
    [
        ("fsdp",),
        pytest.param(("ddp",), marks=full),
        pytest.param(("ddp", "late-ddp", "batchnorm"), marks=full),
        pytest.param(("fsdp", "amp", "accumulate"), marks=full),
    ],
    ids=" ".join,
)
def test_two_ranks_resume_bitwise(
    tmp_path: Path, switches: tuple[str, ...], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_DEVICE_MODE", mode)
    first = (ON_DEVICE, "own")
    assert_same_as_undisturbed(tmp_path, *switches, world_size=2, first=first)


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param([("fsdp", 2), ("ddp", 1)], marks=full),
        pytest.param([("ddp", 2), ("fsdp", 2), ("ddp", 3), ("fsdp", 4), ("plain", 1)], marks=full),
    ],
    ids=lambda kinds: ", ".join(f"{kind} {size}" for kind, size in kinds),
)
def test_every_bit_comes_back_in_another_world(
    tmp_path: Path, kinds: list[tuple[str, int]]
) -> None:
    with contextlib.ExitStack() as ends:
        node = resized.Node(tmp_path, "ddp", ends, first=(ON_DEVICE, "forked"))
        resized.test_every_bit_comes_back_in_any_other_layout(node, kinds)


@pytest.mark.full
@pytest.mark.parametrize("die", ["die=25:1", "die=25:all"])
def test_ranks_that_share_their_replicas_resume_bitwise(
    tmp_path: Path, start: Start, die: str
) -> None:
    *flags, name, steps, _ = shared.words(2)
    script = [name, steps, "0.2"]
    (tmp_path / "undisturbed").mkdir()
    alone = Run(
        tmp_path / "undisturbed", "--set", "snapshot.share_replicas=false", *flags, *WARM, *script
    )
    try:
        assert alone.wait() == 0, alone.text
    finally:
        alone.end()
    run = start(*flags, *WARM, *script, die)
    run.wait_until("sharing", lambda: shared.memory_over_state(run) < 3.0)
    assert len(run.journal("generation_started")) == 1
    assert shared.finished(run, 2) == shared.ends_of(tmp_path / "undisturbed", 2)
    assert len(run.journal("generation_started")) == 2


def test_without_page_locked_memory_a_run_resumes_bitwise_and_reports_it(
    start: Start,
    train: tuple[str, ...],
    undisturbed: Checked,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(fake.PINNED_VARIABLE, "0")
    run = start(*train[:2], *WARM, *train[2:])

    def warnings() -> list[str]:
        return list(run.status().get("warnings") or ())  # type: ignore[call-overload]

    run.wait_until("reported", lambda: len(run.journal("capture_slowed")) == 2 and warnings())
    assert [one["rank"] for one in run.journal("capture_slowed")] in ([0, 1], [1, 0])
    (warning,) = warnings()
    assert warning.startswith("rank 0 and 1 more here: the system refuses page-locked memory")
    assert "ulimit -l" in warning
    assert warning.endswith("start the run again")
    wait_for_memory(run, 20)
    os.kill(run.pids()[1], signal.SIGKILL)
    run.wait_until("reported again", lambda: len(run.journal("capture_slowed")) == 4)
    let_end(run)
    assert run.wait() == 0, run.text
    undisturbed.check(run)


def test_a_kill_at_a_point_of_a_snapshot_changes_no_bit(
    tmp_path_factory: pytest.TempPathFactory, undisturbed: Checked
) -> None:
    points = ["worker.capture.boundary_copied", "worker.restore.tensors_loaded"]
    kill_at_each(points, tmp_path_factory, undisturbed, *WARM)


@full
def test_a_kill_in_a_capture_through_a_pool_changes_no_bit(
    tmp_path_factory: pytest.TempPathFactory, undisturbed: Checked
) -> None:
    """Memory for one slot of each rank: a checkpoint of state on a device is written and loaded."""
    first = ("--set", "snapshot.max_memory_gb=0.0007", *WARM)
    kill_at_each(["worker.pool.sealed"], tmp_path_factory, undisturbed, *first)


@full
def test_a_kill_at_any_point_of_a_snapshot_changes_no_bit(
    tmp_path_factory: pytest.TempPathFactory, undisturbed: Checked
) -> None:
    points = points_passed(tmp_path_factory.mktemp("count"), *WARM)
    parts = ("worker.", "smp.commit.", "agent.restart.")
    points = [name for name in points if name.startswith(parts)]
    assert points
    kill_at_each(points, tmp_path_factory, undisturbed, *WARM)
