"""`start.device: context`: standbys initialise the device for the next start of the ranks."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.conftest import Checked, Run, Start, let_end, start, train
from tests.integration.conftest import in_full

__all__ = ["start", "train"]

FACTS = str(Path(__file__).parent / "scripts" / "facts.py")
ON_DEVICE = str(Path(__file__).parent / "scripts" / "on_device.py")
FIRST = (
    "--preload", "fake_device.preloaded", "--set", "start.device=context", FACTS, ON_DEVICE, "own",
)  # fmt: skip
_FACTS = re.compile(r"rank=(\d) generation=(\d+) pid=(\d+) bound=(\w+) facts=(.*)")

pytestmark = [
    *(pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(1500)),
    pytest.mark.usefixtures("compiled"),
]


def wait_until_bound(run: Run, count: int) -> None:
    run.wait_until("bound", lambda: len(run.journal("standby_bound")) >= count)


@pytest.mark.full
def test_ranks_of_bound_standbys_find_a_new_process_and_resume_bitwise(
    tmp_path: Path, start: Start, train: tuple[str, ...]
) -> None:
    (tmp_path / "undisturbed").mkdir()
    undisturbed = Checked(tmp_path / "undisturbed", *FIRST[:2], *FIRST[4:])
    run = start(*train[:2], *FIRST, *train[2:])
    wait_until_bound(run, 2)
    os.kill(run.pids()[1], signal.SIGKILL)
    wait_until_bound(run, 4)
    let_end(run)
    assert run.wait() == 0, run.text
    undisturbed.check(run)
    assert not run.journal("standby_dropped")
    assert "has no effect" not in run.text
    bound = run.journal("standby_bound")
    assert sorted(str(one["device"]) for one in bound) == ["fake:0", "fake:0", "fake:1", "fake:1"]
    found = [line.groups() for line in _FACTS.finditer(run.text)]
    assert len(found) == 4
    assert {(generation, is_bound) for _, generation, _, is_bound, _ in found} == {
        ("0", "False"),
        ("1", "True"),
    }
    for rank in "01":
        facts = {line[4] for line in found if line[0] == rank}
        assert len(facts) == 1, facts


@pytest.mark.full
def test_the_second_failure_in_a_row_does_not_wait_for_a_device(
    tmp_path: Path, start: Start, train: tuple[str, ...]
) -> None:
    """The standbys of the second start are not bound yet, or not ready."""
    run = start(*train[:2], *FIRST, *train[2:])
    wait_until_bound(run, 2)
    for generation in (1, 2):
        os.kill(run.pids()[0], signal.SIGKILL)
        run.wait_until("restarted", lambda: len(run.journal("generation_started")) > generation)  # noqa: B023
    let_end(run)
    assert run.wait() == 0, run.text
    assert not run.journal("fresh_start_used")


@pytest.mark.parametrize(
    ("scenario", "dropped", "is_bound"),
    [
        ("as bound", [], True),
        ("other variable", ["CUDA_VISIBLE_DEVICES changed"], False),
        *in_full(
            ("at once", ["its device was not ready"], False),
            ("no room", ["0.0 GB of fake:0 are free, and 2.1 GB must stay free"], False),
            ("ended", ["the standby has ended"], False),
            ("unreadable", ["the standby sends an answer that cannot be read"], False),
            ("unbound", ["GPU 0 is lost"], False),
            ("no step", [], True),
        ),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_a_standby_serves_only_as_it_was_bound(
    tmp_path: Path, scenario: str, dropped: list[str], is_bound: bool
) -> None:
    """With a zygote, without a run: what a launch gets, and what the journal says."""
    script = Path(__file__).parent / "scripts" / "one_launch.py"
    words = [sys.executable, str(script), str(tmp_path), scenario]
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert f"launched bound={is_bound} visible=" in done.stdout, done.stdout + done.stderr
    lines = map(json.loads, (tmp_path / "journal.jsonl").read_text().splitlines())
    assert [line["reason"] for line in lines if line["kind"] == "standby_dropped"] == dropped
    assert "still there" not in done.stdout
    if scenario == "no step":
        assert done.stdout.endswith("bound again: False\n"), done.stdout


def test_no_standby_is_bound_for_a_rank_that_the_node_has_no_more(tmp_path: Path) -> None:
    script = Path(__file__).parent / "scripts" / "one_launch.py"
    words = [sys.executable, str(script), str(tmp_path), "fewer ranks"]
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=600)
    assert done.stdout.endswith("bound: [0]\n"), done.stdout + done.stderr
