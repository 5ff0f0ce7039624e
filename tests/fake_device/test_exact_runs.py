"""Trainings of the exactness tests on the fake device: a kill at any moment changes no bit.

The scripts and the comparisons are those of the processor. The device runs as late as it may, so
what ftrun does not wait for has not happened when a process is killed.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_device.device_build import CompilerMissing, library, search_path

from tests.integration import test_resized_world as resized
from tests.integration.test_session import assert_same_as_undisturbed

ON_DEVICE = str(Path(__file__).parent / "scripts" / "on_device.py")
pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> Iterator[None]:
    """For the processes of the tests."""
    try:
        library()
    except CompilerMissing as error:
        pytest.skip(str(error))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", search_path())
        yield


def test_one_process_resumes_bitwise(tmp_path: Path) -> None:
    assert_same_as_undisturbed(tmp_path, "amp", "accumulate", first=(ON_DEVICE, "own"))


def test_every_bit_comes_back_in_another_world(tmp_path: Path) -> None:
    with contextlib.ExitStack() as ends:
        node = resized.Node(tmp_path, "ddp", ends, first=(ON_DEVICE, "forked"))
        kinds = [("fsdp", 2), ("ddp", 1)]
        resized.test_every_bit_comes_back_in_any_other_layout(node, kinds)
