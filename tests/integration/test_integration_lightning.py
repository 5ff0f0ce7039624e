"""A training under Lightning that loses a rank ends with the same parameters."""

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

VALIDATED = {
    "    def configure_optimizers(self):": """    def validation_step(self, batch, index):
        self.log("loss", self.training_step(batch, index), sync_dist=True)

    def configure_optimizers(self):""",
    "trainer.fit(model, loader)": "trainer.fit(model, loader, DataLoader(loader.dataset, 8))",
    "StepLR(optimizer, 1, 0.5)": "ReduceLROnPlateau(optimizer, patience=0)",
    "return [optimizer], [": 'return {"optimizer": optimizer, "lr_scheduler": {"monitor": "loss", '
    '"scheduler": ',
    "patience=0)]": "patience=0)}}",
    "logger=False,": "logger=False,\n    val_check_interval=6,",
}


@each_of(
    {
        "unchanged": {},
        "worker processes": {"num_workers=0": "num_workers=2"},
        "validated within the epoch": VALIDATED,
    }
)
def test_a_rank_that_dies_within_an_accumulation_and_in_a_later_epoch(
    start: Start, tmp_path: Path, changes: dict[str, str]
) -> None:
    """A step of the session is a batch."""
    code = example("Lightning", changes)
    loses_a_rank_twice(start, tmp_path, code, first=(4, 6), second=(12, 14, 16))


ALONE = {
    "devices=2": "devices=1",
    'strategy="ddp"': 'strategy="auto"',
    "randn(96, 8)": "randn(48, 8)",
}
"""One rank; twelve batches in an epoch."""

ENDS = """
end(
    model=model.state_dict(),
    optimizer=trainer.optimizers[0].state_dict(),
    scheduler=trainer.lr_scheduler_configs[0].scheduler.state_dict(),
    callbacks=[one.state_dict() for one in trainer.callbacks],
    loops=[
        trainer.current_epoch,
        trainer.global_step,
        trainer.fit_loop.epoch_loop._batches_that_stepped,
        trainer.fit_loop.epoch_loop.scheduler_progress.state_dict(),
    ],
)
"""

VALIDATES = {
    "    def configure_optimizers(self):": """    def validation_step(self, batch, index):
        self.log("loss", torch.tensor(1.0))

    def test_step(self, batch, index):
        die()

    def configure_optimizers(self):""",
    "trainer.fit(model, loader)": """trainer.fit(model, loader, DataLoader(loader.dataset, 8))
trainer.test(model, loader, verbose=False)
""",
    "import LightningModule,": "import LightningModule, callbacks as of_lightning,",
}
STOPPED = VALIDATES | {
    "callbacks=[": 'callbacks=[of_lightning.EarlyStopping("loss", patience=0), ',
}
STOPPED_WITHIN_AN_EPOCH = VALIDATES | {
    "callbacks=[": """val_check_interval=4, callbacks=[
        of_lightning.EarlyStopping("loss", patience=0, check_on_train_epoch_end=False), """,
}
STOPS_LATER = {
    "max_epochs=3": "min_epochs=2, max_epochs=4",
    "inputs, targets = batch": """inputs, targets = batch
        if self.trainer.current_epoch == 0:
            self.trainer.should_stop = True
        elif index == 2:
            die()""",
}


@pytest.mark.parametrize(
    ("changes", "restored"), [(STOPPED, 24), (STOPPED_WITHIN_AN_EPOCH, 8), (STOPS_LATER, 14)]
)
def test_a_rank_that_dies_after_a_stop_is_decided(
    start: Start, tmp_path: Path, changes: dict[str, str], restored: int
) -> None:
    """The fit is not begun again; or it ends as soon as `min_epochs` permits it."""
    code = example("Lightning", ALONE | changes) + ENDS
    one_rank_ends_like_undisturbed(start, tmp_path, code, restored=[restored])


CHECKPOINTS = {
    "import LightningModule,": "import LightningModule, callbacks as of_lightning,",
    "    def configure_optimizers(self):": """    def on_train_batch_start(self, batch, index):
        if self.trainer.max_epochs == 3 and index == 9:
            die()

    def configure_optimizers(self):""",
    "seed_everything(0)\n": """
def checkpoints():
    return of_lightning.ModelCheckpoint("c", every_n_train_steps=2, save_last=True)


def earlier_run():
    once = {"max_steps": 2, "accumulate_grad_batches": 2}
    earlier = Trainer(accelerator="cpu", logger=False, callbacks=checkpoints(), **once)
    earlier.fit(Sum(), loader)


seed_everything(0)
""",
    "trainer = Trainer(": """if not os.path.exists("c"):
    earlier_run()
seed_everything(1)
trainer = Trainer(""",
    "callbacks=[": "callbacks=[checkpoints(), ",
    "    enable_checkpointing=False,\n": "",
    "fit(model, loader)": 'fit(model, loader, ckpt_path="last", weights_only=False)',
}
"""Each start finds a checkpoint from within an epoch."""


def test_a_rank_that_dies_after_a_start_from_a_checkpoint_of_the_script(
    start: Start, tmp_path: Path
) -> None:
    code = example("Lightning", ALONE | CHECKPOINTS) + ENDS
    one_rank_ends_like_undisturbed(start, tmp_path, code, restored=[4])


STEPPED_WITHIN_THE_EPOCH = VALIDATED | {
    '"monitor": "loss"': '"monitor": "loss", "interval": "step", "frequency": 6',
    "    def validation_step": """    def on_train_batch_start(self, batch, index):
        if self.trainer.current_epoch == 0 and index == 6:
            die()

    def validation_step""",
}


def test_a_rank_that_dies_after_a_validation_that_a_scheduler_monitors(
    start: Start, tmp_path: Path
) -> None:
    code = example("Lightning", ALONE | STEPPED_WITHIN_THE_EPOCH) + ENDS
    one_rank_ends_like_undisturbed(start, tmp_path, code, restored=[6])


AVERAGED = {
    "import LightningModule,": "import LightningModule, callbacks as of_lightning,",
    "callbacks=[": "callbacks=[of_lightning.EMAWeightAveraging(decay=0.9), ",
    "    def configure_optimizers(self):": """    def on_train_batch_start(self, batch, index):
        if self.trainer.current_epoch == 1 and index == 4:
            die()

    def configure_optimizers(self):""",
}


def test_a_rank_that_dies_with_averaged_weights(start: Start, tmp_path: Path) -> None:
    code = example("Lightning", ALONE | AVERAGED) + ENDS
    code += "end(average=trainer.callbacks[0]._average_model.state_dict())"
    one_rank_ends_like_undisturbed(start, tmp_path, code, restored=[16])
