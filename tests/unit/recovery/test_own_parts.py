"""OwnParts: a dead SMP or zygote is started again, until it has died too often."""

import pytest

from ftrun.events import PartEvent, SmpExited, ZygoteExited
from ftrun.recovery.commands import DisableComponent, RespawnSmp, RespawnZygote
from ftrun.recovery.supervisor import ComponentRestarts


@pytest.mark.parametrize(
    ("event", "respawn", "part"),
    [(SmpExited("gone"), RespawnSmp, "smp"), (ZygoteExited("gone"), RespawnZygote, "zygote")],
)
def test_own_parts_are_respawned_until_they_die_too_often(
    event: PartEvent, respawn: type[RespawnSmp | RespawnZygote], part: str
) -> None:
    parts = ComponentRestarts()
    for _ in range(5):
        assert isinstance(parts.handle(event, now_s=1.0), respawn)
    last = parts.handle(event, now_s=1.0)
    assert isinstance(last, DisableComponent)
    assert last.part == part
    assert isinstance(parts.handle(event, now_s=1000.0), respawn)
