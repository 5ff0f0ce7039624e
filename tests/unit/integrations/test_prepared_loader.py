"""Loops over a loader that an Accelerator has prepared, in addition to those of the session."""

import importlib.util
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ftrun.worker.session import Session

pytestmark = pytest.mark.full

if importlib.util.find_spec("accelerate") is not None:  # `scripts/test --full` installs it
    from accelerate import Accelerator

    from ftrun.integrations.accelerate import PreparedLoader, attach

BATCHES = [[0, 1], [2, 3], [4, 5]]


@pytest.fixture
def prepared() -> "Iterator[tuple[Session, DataLoader[int]]]":
    accelerator = Accelerator(cpu=True)
    _, loader = accelerator.prepare(nn.Linear(1, 1), DataLoader(range(6), batch_size=2))
    session = attach(accelerator)
    yield session, loader
    session.close()


def drawn(loader: "DataLoader[int]") -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def test_the_script_loops_over_the_loader_after_and_within_a_pass(
    prepared: "tuple[Session, DataLoader[int]]",
) -> None:
    session, loader = prepared
    found: list[list[int]] = []
    for _ in session.epochs(2):
        for batch in session.batches(loader):
            found.append(batch.tolist())
            assert drawn(loader) == BATCHES
        assert drawn(loader) == BATCHES
    assert found == 2 * BATCHES


def test_a_restore_at_the_end_of_a_pass(prepared: "tuple[Session, DataLoader[int]]") -> None:
    _, loader = prepared
    feed = PreparedLoader("loader", loader)
    for _ in feed.batches(None, lambda: None):
        saved = feed.state()
    again = PreparedLoader("loader", loader)
    again.load_state(saved)
    assert list(again.batches(None, lambda: None)) == []
    assert drawn(loader) == BATCHES
    assert [torch.as_tensor(batch).tolist() for batch in again.batches(None, lambda: None)] == (
        BATCHES
    )
