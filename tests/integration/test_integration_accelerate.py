"""A training under Accelerate that loses a rank ends with the same parameters."""

from pathlib import Path

from tests.integration.conftest import Start
from tests.integration.examples import RUNS_A_FRAMEWORK, each_of, example, loses_a_rank_twice

pytestmark = RUNS_A_FRAMEWORK

NOISY = {
    "TensorDataset(x, x.sum(1, keepdim=True))": "Noisy(x, x.sum(1, keepdim=True))",
    "set_seed(0)\n": """set_seed(0)


class Noisy(TensorDataset):
    def __getitem__(self, index):
        inputs, targets = super().__getitem__(index)
        return inputs + 0.1 * torch.randn(8), targets


""",
}


@each_of(
    {
        "unchanged": {},
        "worker processes": {"num_workers=0": "num_workers=2"},
        "noise in the data": NOISY,
    }
)
def test_a_rank_that_dies_within_an_accumulation_and_in_a_later_epoch(
    start: Start, tmp_path: Path, changes: dict[str, str]
) -> None:
    """A step of the session is a batch."""
    code = example("Accelerate", changes)
    loses_a_rank_twice(start, tmp_path, code, first=(4, 6), second=(12, 14, 16))
