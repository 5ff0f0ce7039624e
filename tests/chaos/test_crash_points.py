"""A kill at any crash point of capture, seal, commit, restart and restore changes no bit.

One run counts the crash points that it passes. Then one run per point is killed there; without
--full, only for every sixteenth point. A new crash point is thus tested without a change here.
"""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.chaos.conftest import STEPS, TRAIN, Checked
from tests.integration.conftest import Run

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

KILL_RANK = """
    if step == 25 and rank == 1 and session.generation == 0:
        os.kill(os.getpid(), 9)
"""


def disturbed(folder: Path, env: dict[str, str], *first: str) -> Run:
    """A run in which rank 1 is killed at step 25, so that its restart can be killed too.

    Args:
        first: the words before the script.
    """
    at = TRAIN.index("    optimizer.step()")
    (folder / "train.py").write_text(TRAIN[:at] + KILL_RANK.lstrip("\n") + TRAIN[at:])
    words = ("--nproc-per-node", "2", "--checkpoint-dir", "saved", "--checkpoint-every", "0.5")
    return Run(folder, *words, *first, "train.py", str(STEPS), "0.01", env=env)


def points_passed(folder: Path, *first: str) -> list[str]:
    """Names of the points that such a run passes, each once, in a fixed order."""
    count = folder / "points"
    run = disturbed(folder, {"FTRUN_CRASH_COUNT": str(count)}, *first)
    try:
        assert run.wait() == 0, run.text
    finally:
        run.end()
    return sorted(Counter(count.read_text().split()))


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "every", [pytest.param(16, id="sixteenth"), pytest.param(1, id="point", marks=pytest.mark.full)]
)
def test_kill_at_any_point_changes_no_bit(
    tmp_path_factory: pytest.TempPathFactory, undisturbed: Checked, every: int
) -> None:
    points = points_passed(tmp_path_factory.mktemp("count"))
    for part in ("agent.restart", "worker.capture", "worker.restore", "smp.commit"):
        assert any(name.startswith(part) for name in points), f"no point of {part} is passed"
    kill_at_each(points[::every], tmp_path_factory, undisturbed)


def kill_at_each(
    points: list[str],
    tmp_path_factory: pytest.TempPathFactory,
    undisturbed: Checked,
    *first: str,
) -> None:
    """One run per point, killed there; `first` are the words before the script."""
    folders = [tmp_path_factory.mktemp(name) for name in points]
    # Two at a time: most of a run is waiting for imports and for the pace of its steps.
    with ThreadPoolExecutor(2) as pool:
        list(
            pool.map(
                lambda given: killed_at(*given, undisturbed, *first),
                zip(points, folders, strict=True),
            )
        )


def killed_at(name: str, folder: Path, undisturbed: Checked, *first: str) -> None:
    once = folder / "once"
    run = disturbed(folder, {"FTRUN_CRASH_AT": name, "FTRUN_CRASH_ONCE": str(once)}, *first)
    try:
        assert run.wait() == 0, f"killed at {name}:\n{run.text}"
        assert once.exists(), f"{name} was not passed again"
        undisturbed.check(run)
    finally:
        run.end()
