"""A training under Accelerate that loses a rank ends with the parameters it would have had."""

from pathlib import Path

import pytest

from tests.integration.conftest import Start
from tests.integration.examples import ends_as_undisturbed, example, restored_steps

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(600)]

NOISY = {
    "TensorDataset(x, x.sum(1, keepdim=True))": "Noisy(x, x.sum(1, keepdim=True))",
    "set_seed(0)\n": """set_seed(0)


class Noisy(TensorDataset):
    def __getitem__(self, index):
        inputs, targets = super().__getitem__(index)
        return inputs + 0.1 * torch.randn(8), targets


""",
}


@pytest.mark.parametrize(
    "changes",
    [{}, {"num_workers=0": "num_workers=2"}, NOISY],
    ids=["as it stands", "worker processes", "noise in the data"],
)
def test_a_rank_that_dies_within_an_accumulation_and_in_a_later_epoch(
    start: Start, tmp_path: Path, changes: dict[str, str]
) -> None:
    """An epoch has 12 batches, and a step of the session is a batch."""
    run = ends_as_undisturbed(start, tmp_path, example("Accelerate", changes), {0: 7, 1: 12})
    first, second = restored_steps(run)
    assert first in (4, 6)
    assert second in (12, 14, 16)
