"""Each kind of hang is diagnosed with its culprit, ended, and changes no bit of the result.

From the dumps of its incident alone, torch's analyzer and `ftrun explain` name the same rank.
"""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
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
    "stop": "frozen",
}
MISSING = {
    "leave": r"missed FR dumps from ranks \(\{1\}\)",
    "stop": r"missed FR dumps from ranks \(\{1\}\)",
    "skip": r"missed FR dumps from ranks \(\{[02]",
}
"""What torch's analyzer says. Gloo aborts a rank after a skipped collective. That rank leaves no
dump, and of the others the analyzer says that it cannot decide."""

ALWAYS = ("sleep",)
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
    return digests_of(run)


@pytest.mark.parametrize(
    "how", [one if one in ALWAYS else pytest.param(one, marks=pytest.mark.full) for one in KINDS]
)
def test_the_culprit_is_named_and_the_result_is_that_of_a_quiet_run(
    start: Start, digests: list[str], how: str
) -> None:
    run = start(*FLAGS, str(SCRIPT), how, str(CULPRIT))
    assert run.wait() == 0, run.text
    named = verdict_on(run, CULPRIT)
    verdict = named["verdict"]
    assert verdict["kind"] == KINDS[how]
    assert verdict["act_immediately"] is (how != "spin"), "on proof, not for want of it"
    closed: Any = [one for one in run.journal("incident_closed") if one["actions"]]
    assert [one["actions"] for one in closed] == [["kill", "respawn"]]
    assert closed[0]["verified"]["progress"]
    assert closed[0]["steps_lost"] <= 2
    if how not in ("leave", "skip", "stop"):
        assert "hanging_training.py" in verdict["text"], "the line of the script"
        stacks = {one["rank"]: one["stack"] for one in named["ranks"]}
        assert any("go_wrong" in frame for frame in stacks[CULPRIT])
    assert digests_of(run) == digests
    dumps = analyzer_command(run, named["incident"])
    explained = json.loads(of_ftrun(run, "explain", dumps[1], "--json"))["verdict"]
    assert set(explained["culprits"]) >= {CULPRIT}
    assert explained["culprits"] == [CULPRIT] or how == "skip", explained
    if importlib.util.find_spec("torch.distributed.flight_recorder") is not None:  # torch 2.10
        said = analyzed(dumps)
        assert re.search(MISSING.get(how, r"missing ranks: \{1\}"), said), said


def of_ftrun(run: Run, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "ftrun", *words], cwd=run.folder, env=run.variables, text=True,
        capture_output=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def analyzer_command(run: Run, incident: int) -> list[str]:
    """As `ftrun report` shows it; its second word is the folder of the dumps."""
    shown = of_ftrun(run, "report", str(incident), "--run", run.run_id)
    assert "The ranks' flight recorders: torchfrtrace " in shown, shown
    return shlex.split(shown.partition("The ranks' flight recorders: ")[2])


def analyzed(command: list[str]) -> str:
    """What torch's analyzer says; the script of that name may not be on the path."""
    code = "from torch.distributed.flight_recorder.fr_trace import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *command[1:]], text=True, capture_output=True, check=False,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def verdict_on(run: Run, culprit: int) -> Any:
    """The last line of the journal with a verdict on this rank alone."""
    found: Any = run.journal("verdict")
    named = [one for one in found if one["verdict"]["culprits"] == [culprit]]
    assert named, run.text
    # On a busy machine all ranks can be late in the first and the last seconds.
    others = [one["verdict"] for one in found if one not in named]
    assert not any(one["act_immediately"] for one in others), others
    return named[-1]


def digests_of(run: Run) -> list[str]:
    return sorted(re.findall(r"digest \d [0-9a-f]{64}", run.text))
