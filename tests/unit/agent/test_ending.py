"""What a stopped run says of the training it leaves."""

import pytest

from ftrun.agent.ending import Kept


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        (Kept(7, None, None, ""), ["stopped at   step 7", "kept         nothing", "--checkpoint"]),
        (Kept(7, "ckpt", 7, ""), ["stopped at   step 7", "kept         step 7 in ckpt", "again"]),
        (Kept(7, "ckpt", None, "disk full"), ["step 7", "kept         nothing in ckpt: disk full"]),
        (
            Kept(7, "ckpt", 4, "disk full"),
            ["step 7", "step 4 in ckpt", "steps 5 to 7 are not kept: disk full", "to resume"],
        ),
    ],
    ids=["no-folder", "all", "none-written", "an-earlier-one"],
)
def test_each_line_says_what_is_kept(kept: Kept, words: list[str]) -> None:
    lines = kept.lines()
    assert len(lines) == len(words)
    for line, word in zip(lines, words, strict=True):
        assert word in line
