"""Ranks stay while others are killed, and the result is the same bit for bit."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("renewing_ranks.py")
RENEWALS = {
    "ddp2": 1, "ddp3": 2, "ddp3-two-at-once": 1, "ddp3-first-buckets": 1, "ddp3-unused": 1,
    "ddp3-views": 1, "fsdp2": 2, "hsdp4": 2, "split4": 1, "ddp2-16-times": 16,
}  # fmt: skip
DEFAULT = ("ddp3",)


def outcomes(folder: Path, *cases: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder), *cases],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {one["case"]: one for one in lines}


@pytest.fixture(scope="module")
def default_outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return outcomes(tmp_path_factory.mktemp("survivors"), *DEFAULT)


def check(case: str, outcome: Any) -> None:
    assert outcome["renewals"] == RENEWALS[case]
    for rank, calm in outcome["calm"].items():
        killed = outcome["killed"][rank]
        for name in ("losses", "state", "backend", "groups"):
            assert killed[name] == calm[name], f"{name} of rank {rank}"


@pytest.mark.slow
@pytest.mark.parametrize("case", DEFAULT)
def test_the_result_is_the_same_after_kills(case: str, default_outcomes: dict[str, Any]) -> None:
    check(case, default_outcomes[case])


@pytest.mark.full
@pytest.mark.parametrize("case", sorted(set(RENEWALS) - set(DEFAULT) - {"ddp2-16-times"}))
def test_the_result_is_the_same_after_kills_in_other_jobs(case: str, tmp_path: Path) -> None:
    check(case, outcomes(tmp_path, case)[case])


@pytest.mark.full
def test_a_renewal_leaves_two_threads_per_group_and_one_descriptor(tmp_path: Path) -> None:
    case = "ddp2-16-times"
    outcome = outcomes(tmp_path, case)[case]
    check(case, outcome)
    used = outcome["killed"]["0"]["used"]
    first, last = used[0], used[-1]
    num_groups = 2  # of rank 0 in this job
    assert len(used) == 16
    assert last["threads"] - first["threads"] <= 15 * 2 * num_groups
    assert last["descriptors"] <= first["descriptors"] + 15  # clients of the old stores
    assert last["kib"] - first["kib"] < 15 * 512
