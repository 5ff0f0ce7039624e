"""The data that a node stores for others counts as committed when the version does."""

from types import SimpleNamespace
from typing import Any

import pytest

from ftrun.ids import Rank, version
from ftrun.smp.memory.parity_store import ParityStore, allocate_parity_region
from ftrun.smp.memory.replicas import ReplicaMonitor
from ftrun.smp.redundancy.exchange import ProtectorTools
from ftrun.smp.redundancy.group import LocalGroup
from ftrun.smp.redundancy.protector import Protector
from ftrun.snapshot.manifest import NodeManifest
from ftrun.snapshot.redundancy import NodeRedundancy
from ftrun.wire.cluster.transfer import RoundSealed
from ftrun.wire.messages.smp import NodeAddress, VersionReady
from ftrun.wire.shared_memory.parity_region import ParityRecord, ParityRegion, ParityRegionState

GENERATION, STEP = 1, 4
GROUP = LocalGroup(
    generation=GENERATION,
    world_size=2,
    nodes=tuple(NodeAddress(f"n{at}", at, "host", 1, [at]) for at in range(2)),
    position=0,
    parity=1,
    small_state_bytes=0,
    timeout_s=10.0,
    number=7,
)


class Links:
    """Records the messages that are sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def link(self, position: NodeAddress, purpose: str) -> "Links":
        return self

    def send(self, frame: Any) -> None:
        self.sent.append(frame.body)


class Made:
    """A protector with real parity regions, whose jobs finish at once; `ready` has its messages."""

    def __init__(self) -> None:
        self.links: Any = Links()
        self.parity_store = ParityStore()
        self.ready: list[Any] = []
        jobs: Any = SimpleNamespace(
            repeat=lambda *_: lambda: None, submit=lambda _, work, failed: work()()
        )
        codecs: Any = SimpleNamespace(get=lambda k, m: None, problem=lambda codec: "")
        shards = SimpleNamespace(manifest=lambda ranks: NodeManifest([]), shards={})
        maps: Any = SimpleNamespace(hold=lambda fds, wanted: shards)
        exchange: Any = None
        tools = ProtectorTools(
            run=0,
            peers=self.links,
            parity_store=self.parity_store,
            jobs=jobs,
            maps=maps,
            codecs=codecs,
            send_to_agent=lambda body, **_: self.ready.append(body),
            exchange=exchange,
        )
        replicas = ReplicaMonitor(jobs, maps, tools.send_to_agent)
        self.protector = Protector(tools, corrupt=lambda *_: False, replicas=replicas)
        self.protector.begin(GROUP)

    def keep(self, *, is_whole: bool) -> ParityRegion:
        """Store a part of the version."""
        slot = self.parity_store.free_slot()
        region = allocate_parity_region(record())
        self.parity_store.put(slot, region)
        region.begin(record())
        if is_whole:
            region.store_mirror(1, 10, 1)
            region.mark(ParityRegionState.COMPLETE)
        return region


def record() -> ParityRecord:
    return ParityRecord(
        generation=GENERATION,
        step=STEP,
        world_size=2,
        protected_in=GENERATION,
        members=GROUP.members,
        parity=1,
        position=0,
        block_bytes=4096,
        coded_bytes=[10, 10],
        own=NodeRedundancy([], 0, 0),
        holders=[],
        mirrors=[(1, 100)],
        num_rows=1,
    )


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_whole_part_is_committed_although_its_round_has_begun_again(is_whole: bool) -> None:
    """All nodes were ready. A link is lost before the commit arrives.

    This node then waits again for the others, which have dropped the version.
    """
    made = Made()
    region = made.keep(is_whole=is_whole)
    made.protector.received(GROUP.number, "n1", RoundSealed(GENERATION, STEP, 3, 0, []))
    made.protector.committed(version(GENERATION, STEP))
    assert (region.state is ParityRegionState.COMMITTED) == is_whole
    assert (made.parity_store.free_slot() != 0) == is_whole
    made.parity_store.free()


def test_a_node_that_is_ready_repeats_what_a_lost_connection_took_along() -> None:
    """The other node has not received it, and would wait forever."""
    made = Made()
    made.keep(is_whole=True)
    made.protector.protect(version(GENERATION, STEP), {Rank(0): []})
    made.protector.received(GROUP.number, "n1", RoundSealed(GENERATION, STEP, 1, 0, [], GENERATION))
    assert VersionReady(GENERATION, STEP, 1) in made.ready
    made.ready.clear()
    made.protector.protect(version(GENERATION, STEP), {Rank(0): []})
    assert made.ready == [VersionReady(GENERATION, STEP, 1)], "its agent asks again"
    made.links.sent.clear()
    made.protector.linked("n1")
    assert made.links.sent == [RoundSealed(GENERATION, STEP, 1, 0, [], GENERATION)]
    made.parity_store.free()
