"""A version of another layout is loaded tensor by tensor, with little additional memory."""

import re

import pytest

from tests.integration.conftest import Start
from tests.integration.test_layouts_training import SCRIPTS

pytestmark = [pytest.mark.slow, pytest.mark.full]

SCRIPT = str(SCRIPTS / "measured_load.py")
LAYER_BYTES = 3 * 4 << 20
"""A parameter and its two moments, on one rank."""
MOST_BYTES = LAYER_BYTES + (8 << 20)
"""The load needs about 1 MiB; the rest allows for other allocations of the process."""
ENV = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""Freed memory is returned, so that it is not counted."""


@pytest.mark.parametrize("kind", ["rules", "fsdp"])
def test_about_one_layer_more_than_the_state_itself(start: Start, kind: str) -> None:
    """2 ranks, then 1 and 4, of a state of 288 MiB in all."""
    words = ("--checkpoint-dir", "saved", "--nproc-per-node")
    for steps, size in enumerate((2, 1, 4), start=1):
        run = start(*words, str(size), SCRIPT, kind, str(steps), env=ENV)
        assert run.wait() == 0, run.text
        found = re.findall(r"loaded step=(\d+) state=(\d+) extra=(-?\d+)", run.text)
        assert len(found) == size, run.text
        for step, state, extra in found:
            assert int(step) == steps - 1
            if steps > 1:
                assert int(state) >= 24 * 2 * (4 << 20) // size
                assert int(extra) < MOST_BYTES, f"{size} ranks: {found}"
