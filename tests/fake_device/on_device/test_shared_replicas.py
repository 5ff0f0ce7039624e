"""Ranks share replicas whose tensors are on a device; its sums take the place of their bytes."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import fake

from ftrun.config.profile import SnapshotConfig
from ftrun.snapshot.replica_shares import NUM_PHASES
from ftrun.worker.capture.device_copies import Device
from tests.integration import test_shared_in_process
from tests.integration.test_shared_in_process import (  # noqa: F401 - collected here
    WEIGHT_BYTES,
    WORLD,
    Node,
    TrainedRank,
    assert_same,
    test_a_damaged_share_is_named_by_every_rank,
    test_a_tensor_that_differs_everywhere_is_found_in_its_first_version,
    test_a_version_of_shares_and_whole_tensors_is_complete,
    test_other_tensors_end_the_shares_until_they_were_compared,
    test_shares_that_do_not_fit_together_are_rejected_like_a_damaged_slot,
)


class OnDevice(TrainedRank):
    """A rank with a device of its own: one thread at a time uses the copies of a device."""

    def __init__(self, rank: int) -> None:
        self.device = torch.device("fake", rank)
        with self.device:
            super().__init__(rank)

    def train(self, step: int) -> None:
        with self.device:
            super().train(step)


@pytest.fixture(
    params=[
        "lazy-off",
        "lazy-device",
        pytest.param("threads-off", marks=pytest.mark.full),
        pytest.param("threads-device", marks=pytest.mark.full),
    ],
)
def node(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Node]:
    """The order in which the devices run what is queued, and `snapshot.stage`."""
    mode, _, stage = request.param.partition("-")
    fake.set_mode(mode, seed=7, max_pause_us=500)
    monkeypatch.setattr(test_shared_in_process, "TrainedRank", OnDevice)
    with contextlib.closing(Node(tmp_path)) as made:
        made.settings = [SnapshotConfig(every=1, commit_timeout_s=60, stage=stage)] * WORLD
        yield made


def test_each_rank_restores_its_own_state_from_the_shares_of_both(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, put_bytes = Device.put, Counter[torch.device]()

    def counted(device: Device, target: torch.Tensor, fill: Any) -> None:
        put_bytes[device.device] += target.nbytes
        put(device, target, fill)

    ranks = node.begin()
    assert all(not one.is_cpu for one in ranks[0].model.parameters())
    at = node.share(ranks)
    for _ in range(NUM_PHASES):
        at = node.train(ranks)
    states = [one.state() for one in ranks]
    monkeypatch.setattr(Device, "put", counted)
    again = node.begin(at)
    assert_same(again, states)
    # Two weights, and two moments of the first one.
    assert put_bytes == {torch.device("fake", rank): 4 * WEIGHT_BYTES for rank in range(WORLD)}
    node.share(again)
    assert not node.notices
