"""A training of Hugging Face's Trainer that loses a rank ends with the same parameters."""

from pathlib import Path

from tests.integration.conftest import Start
from tests.integration.examples import RUNS_A_FRAMEWORK, each_of, example, loses_a_rank_twice

pytestmark = RUNS_A_FRAMEWORK

MASKED = {
    "trainer = Trainer(": """

def mask(samples):
    batch = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
    hidden = torch.rand(batch["input_ids"].shape) < 0.2
    return {**batch, "input_ids": batch["input_ids"].masked_fill(hidden, 0)}


trainer = Trainer(""",
    "callbacks=[": "data_collator=mask, callbacks=[",
}

SAVED = {
    "dataloader_num_workers=0": "dataloader_num_workers=0,\n    ignore_data_skip=True",
    'save_strategy="no"': 'save_strategy="steps",\n    save_steps=2',
    "trainer.train()": """found = "out/checkpoint-2"
trainer.train(resume_from_checkpoint=found if os.path.isdir(found) else None)""",
}
"""Each restart finds a checkpoint of the script's own, of a step within the first epoch."""


@each_of(
    {
        "unchanged": {},
        "worker processes": {"dataloader_num_workers=0": "dataloader_num_workers=2"},
        "masked at random": MASKED,
        "ignoring the place in the data": {
            "dataloader_num_workers=0": "dataloader_num_workers=0,\n    ignore_data_skip=True"
        },
        "the same, with a checkpoint of its own": SAVED,
    }
)
def test_a_rank_that_dies_within_an_accumulation_and_in_a_later_epoch(
    start: Start, tmp_path: Path, changes: dict[str, str]
) -> None:
    """A step of the session is an optimizer's."""
    code = example("Hugging Face Trainer", changes)
    loses_a_rank_twice(start, tmp_path, code, first=(2, 3), second=(6, 7, 8))
