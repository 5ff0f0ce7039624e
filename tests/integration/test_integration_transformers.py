"""A training of Hugging Face's Trainer that loses a rank ends with the same parameters."""

from pathlib import Path

import pytest

from tests.integration.conftest import Start
from tests.integration.examples import ends_as_undisturbed, example, restored_steps

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(600)]

MASKED = {
    "trainer = Trainer(": """

def mask(samples):
    batch = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
    hidden = torch.rand(batch["input_ids"].shape) < 0.2
    return {**batch, "input_ids": batch["input_ids"].masked_fill(hidden, 0)}


trainer = Trainer(""",
    "callbacks=[": "data_collator=mask, callbacks=[",
}


@pytest.mark.parametrize(
    "changes",
    [{}, {"dataloader_num_workers=0": "dataloader_num_workers=2"}, MASKED],
    ids=["as it stands", "worker processes", "masked at random"],
)
def test_a_rank_that_dies_within_an_accumulation_and_in_a_later_epoch(
    start: Start, tmp_path: Path, changes: dict[str, str]
) -> None:
    """An epoch has 12 batches and 6 steps."""
    code = example("Hugging Face Trainer", changes)
    run = ends_as_undisturbed(start, tmp_path, code, {0: 7, 1: 12})
    first, second = restored_steps(run)
    assert first in (2, 3)
    assert second in (6, 7, 8)
