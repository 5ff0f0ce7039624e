"""What a node protects for others counts as committed when the version is."""

from types import SimpleNamespace
from typing import Any

import pytest

from ftrun.ids import RunId, version
from ftrun.smp.exchange import ProtectorTools
from ftrun.smp.protecting import Protecting
from ftrun.smp.protector import Protector
from ftrun.smp.vaults import Vaults, make_vault
from ftrun.snapshot.redundancy import NodePlan
from ftrun.wire.protected import NodePlace
from ftrun.wire.transfer import Sealed
from ftrun.wire.vault import VaultRecord, VaultState

GENERATION, STEP = 1, 4
GROUP = Protecting(
    generation=GENERATION,
    world_size=2,
    nodes=tuple(NodePlace(f"n{at}", at, "host", 1, [at]) for at in range(2)),
    place=0,
    parity=1,
    small_state_bytes=0,
    patience_s=10.0,
    number=7,
)


class Links:
    """Takes what is sent."""

    def link(self, place: NodePlace, purpose: str) -> "Links":
        return self

    def tell(self, frame: Any) -> None:
        pass


def record() -> VaultRecord:
    return VaultRecord(
        generation=GENERATION,
        step=STEP,
        world_size=2,
        protected_in=GENERATION,
        members=GROUP.members,
        parity=1,
        place=0,
        block_bytes=4096,
        coded_bytes=[10, 10],
        own=NodePlan([], 0, 0),
        holders=[],
        mirrors=[(1, 100)],
        num_rows=1,
    )


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_whole_part_is_committed_although_its_round_has_begun_again(is_whole: bool) -> None:
    """All nodes were ready. A link is lost before the commit comes, and this node alone waits for
    the others again, which have dropped the version.
    """  # noqa: D205 - one sentence
    vaults = Vaults()
    jobs: Any = SimpleNamespace(repeat=lambda *_: lambda: None)
    codecs: Any = SimpleNamespace(get=lambda k, m: None, problem=lambda codec: "")
    links: Any = Links()
    maps: Any = None
    exchange: Any = None
    protector = Protector(
        RunId("run"),
        ProtectorTools(links, vaults, jobs, maps, codecs, exchange),
        tell_agent=lambda *_, **__: None,
        corrupt=lambda *_: False,
    )
    protector.begin(GROUP)
    slot = vaults.free_slot()
    vaults.put(slot, make_vault(record()))
    vault = vaults.take(slot, record())
    assert vault is not None
    vault.begin(record())
    if is_whole:
        vault.keep_mirror(1, 10, 1)
        vault.mark(VaultState.COMPLETE)
    protector.heard(GROUP.number, "n1", Sealed(GENERATION, STEP, 3, 0, []))
    protector.committed(version(GENERATION, STEP))
    assert (vault.state is VaultState.COMMITTED) == is_whole
    assert (vaults.free_slot() != slot) == is_whole
    vaults.free()
