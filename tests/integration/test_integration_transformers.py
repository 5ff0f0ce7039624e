"""A training of Hugging Face's Trainer that loses a rank ends with the same parameters."""

from pathlib import Path

import pytest

from tests.integration.conftest import Start
from tests.integration.examples import (
    RUNS_A_FRAMEWORK,
    each_of,
    example,
    loses_a_rank_twice,
    one_rank_ends_like_undisturbed,
)

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


ALONE = {
    "randint(256, (96, 16)": "randint(256, (40, 16)",
    "    gradient_accumulation_steps=2,\n": "",
    "import GPT2Config,": "import TrainerCallback, EarlyStoppingCallback, GPT2Config,",
    "trainer = Trainer(": """

class Dies(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, **now):
        if state.global_step == at:
            die()


class Skips(TrainerCallback):
    def on_step_end(self, args, state, control, **now):
        control.should_epoch_stop = state.global_step == 3


trainer = Trainer(""",
    "callbacks=[": "callbacks=[Dies(), ",
}
"""One rank; ten batches in an epoch."""

ENDS = """
timed = {"train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss"}
timed |= {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}
end(
    model=model.state_dict(),
    optimizer=trainer.optimizer.state_dict(),
    scheduler=trainer.lr_scheduler.state_dict(),
    log=[{k: v for k, v in one.items() if k not in timed} for one in trainer.state.log_history],
    loops=[trainer.state.global_step, trainer.state.epoch, trainer.state.best_metric],
    callbacks=[
        vars(one) for one in trainer.callback_handler.callbacks
        if isinstance(one, EarlyStoppingCallback)
    ],
)
"""

LEFT_EARLY = {"callbacks=[Dies(), ": "callbacks=[Dies(), Skips(), "}
STREAMED = {
    "model = GPT2LMHeadModel": """

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        order = torch.Generator().manual_seed(self.epoch)
        return (dataset[at] for at in torch.randperm(len(dataset), generator=order))

    def set_epoch(self, epoch):
        self.epoch = epoch


model = GPT2LMHeadModel""",
    "num_train_epochs=3": "max_steps=27",
    "train_dataset=dataset": "train_dataset=Stream()",
}


@pytest.mark.parametrize(("changes", "at"), [(LEFT_EARLY, 8), (STREAMED, 23)])
def test_a_rank_that_dies_in_an_epoch_that_does_not_follow_from_the_step(
    start: Start, tmp_path: Path, changes: dict[str, str], at: int
) -> None:
    code = f"at = {at}\n" + example("Hugging Face Trainer", ALONE | changes) + ENDS
    one_rank_ends_like_undisturbed(start, tmp_path, code, restored=[at])


RESUMES = {
    "trainer.train()": """if not os.path.exists("out/checkpoint-3"):
    arguments.max_steps = 3
    Trainer(model=model, args=arguments, train_dataset=dataset).train()
    arguments.max_steps = -1
elif not dies:
    os.remove("out/checkpoint-6/trainer_state.json")  # as if the rank had died while it saved
trainer.train(resume_from_checkpoint=True)""",
    "            die()": """            if dies:
                every = trainer.callback_handler.callbacks
                own = next(one for one in every if hasattr(one, "session"))
                feed = next(iter(own.session._loaders))
                assert len(feed.state()["before"]) <= 2  # not one for each skipped batch
            die()""",
    'save_strategy="no"': 'save_strategy="steps", save_steps=3',
}


def test_a_rank_that_dies_after_a_start_from_a_checkpoint_of_the_script(
    start: Start, tmp_path: Path
) -> None:
    """The restart finds a folder without the state of the Trainer, and does not need it."""
    code = "at = 8\n" + example("Hugging Face Trainer", ALONE | RESUMES) + ENDS
    one_rank_ends_like_undisturbed(start, tmp_path, code, restored=[8])


EVALUATED = {
    'save_strategy="no"': """save_strategy="no",
    eval_strategy="epoch",
    eval_on_start=True,
    metric_for_best_model="loss",
    learning_rate=0.0""",
    "train_dataset=dataset": "train_dataset=dataset, eval_dataset=dataset",
    "callbacks=[Dies(), ": "callbacks=[Dies(), EarlyStoppingCallback(early_stopping_patience=2), ",
}


def test_a_rank_that_dies_in_a_training_that_is_evaluated_at_its_start(
    start: Start, tmp_path: Path
) -> None:
    code = "at = 12\n" + example("Hugging Face Trainer", ALONE | EVALUATED) + ENDS
    one_rank_ends_like_undisturbed(start, tmp_path, code, restored=[12])
