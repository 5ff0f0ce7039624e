"""A checkpoint that was not written is reported if nothing makes up for it."""

from types import SimpleNamespace
from typing import Any

import pytest

from ftrun.agent.snapshots.checkpoint_orders import CheckpointOrders
from ftrun.wire.messages.smp import MemoryNeeded


@pytest.mark.parametrize(
    ("every_steps", "pool_bytes", "is_reported"), [(0, 0, True), (5, 0, False), (5, 1, True)]
)
def test_a_superseded_order_is_reported_if_it_was_for_pools_or_by_time(
    every_steps: int, pool_bytes: int, is_reported: bool
) -> None:
    written: list[Any] = []
    smp = SimpleNamespace(
        new_checkpoints=[],
        superseded=["a rank has no snapshot"],
        num_writes=0,
        refused="",
        needed=MemoryNeeded(0, pool_bytes=pool_bytes),
    )
    profile = SimpleNamespace(checkpoint=SimpleNamespace(every_s=60.0))
    run = SimpleNamespace(
        spec=SimpleNamespace(profile=profile, persist_every=every_steps),
        smp=smp,
        journal=SimpleNamespace(write=written.append),
    )
    orders = CheckpointOrders(run)  # type: ignore[arg-type]
    orders.report()
    assert orders.not_written == ("a rank has no snapshot" if is_reported else "")
    assert len(written) == is_reported
    assert orders.num_skipped == (1 if every_steps else 0)
