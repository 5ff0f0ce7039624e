"""Stages of a pipeline that send and receive messages: hung, out of order, and slow ranks."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.conftest import Run
from tests.chaos.test_hangs import digests_of, verdict_on
from tests.integration.conftest import Start

SCRIPTS = Path(__file__).parents[1] / "integration" / "scripts"
MESSAGES, STAGES = SCRIPTS / "messaging_training.py", SCRIPTS / "staged_training.py"
FLAGS = (
    "--nproc-per-node", "4", "--snapshot-every", "1", "--set", "hang.suspect_after_s=2",
    "--set", "hang.no_activity_s=0.6", "--set", "hang.kill_after_s=5",
)  # fmt: skip
CULPRIT = 1
TAGGED = "is send to rank 2 with tag 7, which was send to rank 2 in the two steps before"
KINDS = {
    "tag": ("deadlock", f"message 4 of step 13 {TAGGED}"),
    "skip": ("deadlock", "message 4 of step 13 is recv from rank 2, which was send to rank 2"),
    "peer": ("deadlock", "message 3 of step 13 is recv from rank 2, which was recv from rank 0"),
    "sleep": ("hang in computation", "wait in recv from rank 1 of the default group"),
    "stop": ("frozen", "wait in recv from rank 1 of the default group"),
    "spin": ("busy loop", "wait in recv from rank 1 of the default group"),
}
ALWAYS = ("tag",)
"""The others run with scripts/test --full."""

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.launch]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("undisturbed"), *FLAGS, str(MESSAGES), "nothing", "0")
    try:
        assert run.wait() == 0, run.text
    finally:
        run.end()
    return run


@pytest.mark.parametrize(
    "how", [one if one in ALWAYS else pytest.param(one, marks=pytest.mark.full) for one in KINDS]
)
def test_of_ranks_that_wait_in_messages_the_culprit_is_named(
    start: Start, undisturbed: Run, how: str
) -> None:
    assert not undisturbed.journal("verdict")
    run = start(*FLAGS, str(MESSAGES), how, str(CULPRIT))
    assert run.wait() == 0, run.text
    named = verdict_on(run, CULPRIT)
    verdict, (kind, words) = named["verdict"], KINDS[how]
    assert (verdict["kind"], verdict["victims"]) == (kind, [0, 2, 3])
    assert words in verdict["text"]
    stacks = {one["rank"]: one["stack"] for one in named["ranks"]}
    assert any("messaging_training.py" in frame for frame in stacks[CULPRIT])
    closed: Any = [one for one in run.journal("incident_closed") if one["actions"]]
    assert [one["actions"] for one in closed] == [["kill", "respawn"]]
    assert digests_of(run) == digests_of(undisturbed)


PAST_S = 20.0
"""Windows of a second each, for a past of the stages."""


@pytest.mark.full  # unit tests judge simulated stages
@pytest.mark.parametrize("slow", [(2, 3), (3,), (1,)], ids=["stage", "last", "first"])
def test_a_slow_stage_is_named_and_no_other(
    start: Start, tmp_path: Path, slow: tuple[int, ...]
) -> None:
    ranks = ",".join(map(str, slow))
    run = start(*FLAGS[:2], "--snapshot-every", "20", str(STAGES), str(tmp_path), ranks)
    run.wait_for_step(5)
    run.wait_until("the stages have a past", after(PAST_S))
    assert not run.journal("verdict")
    (tmp_path / "slow").touch()
    run.wait_until("a verdict", lambda: bool(run.journal("verdict")))
    verdicts: list[Any] = [one["verdict"] for one in run.journal("verdict")]
    assert [(one["kind"], one["culprits"]) for one in verdicts] == [
        ("slow computation", list(slow))
    ]
    if slow == (2, 3):
        assert verdicts[0]["confidence"] == "likely"
        assert "more work in each step than at first" in verdicts[0]["text"]


def after(seconds: float) -> Callable[[], bool]:
    end_s = time.monotonic() + seconds
    return lambda: time.monotonic() >= end_s
