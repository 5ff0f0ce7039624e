"""A script with a checkpoint of its own loses at most one step once it has the two lines."""

from pathlib import Path

import pytest

from tests.integration.conftest import Start
from tests.integration.examples import ends_like_undisturbed, example, restored_steps

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_snapshot_wins_over_the_older_checkpoint(start: Start, tmp_path: Path) -> None:
    code = example("A script with a checkpoint of its own")
    run = ends_like_undisturbed(start, tmp_path, code, {0: 40, 1: 30})
    first, second = restored_steps(run)
    assert 36 <= first <= 39
    assert 60 <= second <= 68
    assert (tmp_path / "checkpoint.pt").exists()
