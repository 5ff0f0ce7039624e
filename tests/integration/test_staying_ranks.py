"""Ranks that stay when another rank fails end with the bits of an undisturbed run."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.staying_ranks import JOBS

TIMEOUT_S = 500.0


def outcome_of(folder: Path, name: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.staying_ranks", str(folder), name],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outcome: dict[str, Any] = json.loads(done.stdout)
    return outcome


@pytest.mark.parametrize(
    "name",
    [one if one == "ddp" else pytest.param(one, marks=pytest.mark.full) for one in JOBS],
)
def test_a_job_whose_ranks_stay_has_the_bits_of_an_undisturbed_run(
    tmp_path: Path, name: str
) -> None:
    outcome = outcome_of(tmp_path, name)
    plain, disturbed = outcome["plain"], outcome["disturbed"]
    assert disturbed["losses"] == plain["losses"]
    assert disturbed["digests"] == plain["digests"]
    assert plain["restored"] == []
    assert len(disturbed["restored"]) >= len({one.split(":")[1] for one in JOBS[name].kills})
    stayed = [len(one) for one in disturbed["generations"].values()]
    assert max(stayed) > 1, "a process has run in more than one generation"
