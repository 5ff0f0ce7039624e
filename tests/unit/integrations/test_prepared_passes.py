"""A loader that Accelerate has prepared begins and ends passes inside `steps()`."""

import copy
import importlib.util
import random
from collections.abc import Collection

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from ftrun.worker.state import determinism as rng

pytestmark = pytest.mark.full

if importlib.util.find_spec("accelerate") is not None:  # `scripts/test --full` installs it
    from accelerate import data_loader

    from ftrun.integrations import accelerate as prepared


def turns(taken: int, killed: Collection[int] = ()) -> list[object]:
    """Batches and random numbers of each turn; a killed one begins with a new loader."""

    def feed_of() -> prepared.PreparedLoader:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        loader = DataLoader(torch.arange(12), batch_size=3, shuffle=True)  # type: ignore[arg-type]
        return prepared.PreparedLoader("loader", data_loader.prepare_data_loader(loader))

    feed = feed_of()
    found: list[object] = []
    for at in range(5):
        if at in killed:
            state, randomness = copy.deepcopy(feed.state()), rng.take_all()
            feed = feed_of()
            feed.load_state(state)
            rng.put_back(randomness)
        for index, batch in enumerate(feed.batches(None, lambda: None, ends_if_left=True)):
            found.append((at, batch.tolist()))
            if index + 1 == taken:
                break
        found.append(torch.rand(1).item())
    return found


@pytest.mark.parametrize("taken", [2, 4, 5])
@pytest.mark.parametrize("killed", [[0], [1], [2, 3], [0, 1, 2, 3, 4]])
def test_a_pass_in_each_turn_is_the_same_after_restores(taken: int, killed: list[int]) -> None:
    assert turns(taken, killed) == turns(taken)
