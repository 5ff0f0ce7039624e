"""The report of a stopped run on the training state that it leaves."""

from pathlib import Path

import pytest

from ftrun.agent.launcher import retained_lines
from ftrun.agent.snapshots.smp_client import AgentSmpClient
from ftrun.wire.messages.checkpoint import CheckpointWritten
from ftrun.wire.messages.envelope import Envelope
from ftrun.wire.run_environment import RunFolder
from ftrun.wire.transport.channel import ReceivedMessage


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        (
            (7, None, None, ""),
            ["stopped at   step 7", "kept         nothing", "--checkpoint"],
        ),
        (
            (7, "ckpt", 7, ""),
            ["stopped at   step 7", "kept         step 7 in ckpt", "again"],
        ),
        (
            (7, "ckpt", None, "disk full"),
            ["step 7", "kept         nothing in ckpt: disk full"],
        ),
        (
            (7, "ckpt", 4, "disk full"),
            ["step 7", "step 4 in ckpt", "steps 5 to 7 are not kept: disk full", "to resume"],
        ),
    ],
    ids=["no-folder", "all", "none-written", "an-earlier-one"],
)
def test_each_line_reports_what_is_kept(
    kept: tuple[int, str | None, int | None, str], words: list[str]
) -> None:
    lines = retained_lines(*kept)
    assert len(lines) == len(words)
    for line, word in zip(lines, words, strict=True):
        assert word in line


def test_a_checkpoint_that_is_written_after_a_part_is_what_is_kept(tmp_path: Path) -> None:
    """Nodes held different versions at the end; the older one was complete."""
    smp = AgentSmpClient(RunFolder(tmp_path), 1.0)
    part = CheckpointWritten(0, 20, "", 100, 0.1, is_part=True, missing_ranks=[0])
    for body in (part, CheckpointWritten(0, 19, "saved/step-19", 100, 0.1)):
        envelope = Envelope("run", 0, 0, body)
        smp._take(ReceivedMessage(envelope, ()))
    assert smp.last_part is None
    assert smp.last_checkpoint is not None
    assert smp.last_checkpoint.step == 19
