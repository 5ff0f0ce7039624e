"""A training under Lightning that loses a rank ends with the parameters it would have had."""

from pathlib import Path

import pytest

from tests.integration.conftest import Start
from tests.integration.examples import ends_as_undisturbed, example, restored_steps

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(600)]

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


@pytest.mark.parametrize(
    "changes",
    [{}, {"num_workers=0": "num_workers=2"}, VALIDATED],
    ids=["as it stands", "worker processes", "validated within the epoch"],
)
def test_a_rank_that_dies_within_an_accumulation_and_in_a_later_epoch(
    start: Start, tmp_path: Path, changes: dict[str, str]
) -> None:
    """An epoch has 12 batches, and a step of the session is a batch."""
    run = ends_as_undisturbed(start, tmp_path, example("Lightning", changes), {0: 7, 1: 12})
    first, second = restored_steps(run)
    assert first in (4, 6)
    assert second in (12, 14, 16)
