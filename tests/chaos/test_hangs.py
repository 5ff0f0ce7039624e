"""Each kind of hang is diagnosed with its culprit, ended, and changes no bit of the result."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.conftest import Run
from tests.integration.conftest import Start

SCRIPT = Path(__file__).parents[1] / "integration" / "scripts" / "hanging_training.py"
FLAGS = (
    "--nproc-per-node", "3", "--snapshot-every", "1", "--set", "hang.suspect_after_s=2",
    "--set", "hang.no_activity_s=0.6", "--set", "hang.kill_after_s=5",
)  # fmt: skip
CULPRIT = 1
KINDS = {
    "sleep": "hang in computation",
    "workers": "hang in computation",
    "leave": "crash",
    "skip": "skipped collective",
    "gil": "GIL stuck",
    "spin": "busy loop",
    "lock": "hang in computation",
}
ALWAYS = ("sleep", "skip")
"""The others run with scripts/test --full."""

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.launch]


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of all ranks after a run without a fault."""
    run = Run(tmp_path_factory.mktemp("quiet"), *FLAGS, str(SCRIPT), "nothing", "0")
    try:
        assert run.wait() == 0, run.text
    finally:
        run.end()
    return found(run)


@pytest.mark.parametrize(
    "how", [one if one in ALWAYS else pytest.param(one, marks=pytest.mark.full) for one in KINDS]
)
def test_the_culprit_is_named_and_the_result_is_that_of_a_quiet_run(
    start: Start, digests: list[str], how: str
) -> None:
    run = start(*FLAGS, str(SCRIPT), how, str(CULPRIT))
    assert run.wait() == 0, run.text
    verdicts: list[Any] = [line["verdict"] for line in run.journal("verdict")]
    assert verdicts, run.text
    # On a busy machine the others can be late, too, in the first seconds.
    assert all(CULPRIT in one["culprits"] for one in verdicts), verdicts
    assert verdicts[-1]["culprits"] == [CULPRIT]
    assert verdicts[-1]["kind"] == KINDS[how]
    assert verdicts[-1]["act_immediately"] is (how != "spin"), "on proof, not for want of it"
    closed: Any = run.journal("incident_closed")
    assert [one["actions"] for one in closed] == [["kill", "respawn"]]
    assert closed[0]["verified"]["progress"]
    assert closed[0]["steps_lost"] <= 2
    if how not in ("leave", "skip"):
        assert "hanging_training.py" in verdicts[-1]["text"], "the line of the script"
        stacks: Any = {one["rank"]: one["stack"] for one in run.journal("verdict")[-1]["ranks"]}  # type: ignore[attr-defined]
        assert any("go_wrong" in frame for frame in stacks[CULPRIT])
    assert found(run) == digests


def found(run: Run) -> list[str]:
    return sorted(re.findall(r"digest \d [0-9a-f]{64}", run.text))
