"""A checkpoint that ftrun 0.2 has written is restored bit for bit.

`recorded/checkpoint-0.2.tar.xz` is the checkpoint folder of `recorded_training.py 8`, one rank,
written by the last commit before `session.state`, strides, training flags and gradients were saved.
"""

import re
import tarfile
from pathlib import Path

import pytest

from tests.integration.conftest import Run, Start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RECORDED = Path(__file__).parent / "recorded" / "checkpoint-0.2.tar.xz"
SCRIPT = str(Path(__file__).parent / "scripts" / "recorded_training.py")
MAX_BYTES = 20_000

AT_STEP_8 = "a151f44020bdfebcf09f176af01cbb11c35c7b4f1ff0dce8377e7395d75b6dd7"
"""The output of that run at its end."""

BATCHES = ["8 [20, 28, 68, 60]", "9 [80, 12, 88, 64]"]
"""The samples of an undisturbed run of 10 steps of 0.2 after step 8."""


def said(run: Run, word: str) -> list[str]:
    return re.findall(rf"^{word} (.*)$", run.text, re.MULTILINE)


def test_a_checkpoint_of_0_2_comes_back_bit_for_bit(start: Start, tmp_path: Path) -> None:
    assert RECORDED.stat().st_size < MAX_BYTES
    with tarfile.open(RECORDED) as archive:
        # python 3.11.4 is the first with filters, and 3.12 and 3.13 warn without one
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(tmp_path / "saved")
    run = start("--checkpoint-dir", "saved", "--nproc-per-node", "1", SCRIPT, "10")
    assert run.wait() == 0, run.text
    assert said(run, "restored") == [AT_STEP_8]
    assert said(run, "batch") == BATCHES
    assert len(said(run, "ended")) == 1
