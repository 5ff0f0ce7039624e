"""A training under Lightning that loses a rank ends with the same parameters."""

from pathlib import Path

from tests.integration.conftest import Start
from tests.integration.examples import RUNS_A_FRAMEWORK, each_of, example, loses_a_rank_twice

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
